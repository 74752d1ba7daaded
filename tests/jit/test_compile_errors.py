"""Scripts with calls that do not compile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import backhaul as bh

from .functions import blend, script

A = torch.tensor([1.0, 2.0])

pytestmark = pytest.mark.usefixtures("workers")


def check_rejected(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        script(function)


def test_a_required_argument_passed_by_name() -> None:
    """The compiler checks only positional arguments, so these must include all arguments without a default."""

    def call(to: str, a: Tensor) -> Tensor:
        return bh.rpc_sync(to, blend, (a,), {"b": a})

    check_rejected(call, "Argument b not provided")


def test_too_few_arguments() -> None:
    def call(to: str, a: Tensor) -> Tensor:
        return bh.rpc_sync(to, blend, (a,))

    check_rejected(call, "Argument b not provided")


def test_too_many_arguments() -> None:
    def call(to: str, a: Tensor) -> Tensor:
        return bh.rpc_async(to, blend, (a, a, 1.0, 1, a)).wait()

    check_rejected(call, "Expected at most 4 arguments but found 5 positional arguments")


def test_wrong_type_of_argument() -> None:
    def call(to: str, a: Tensor) -> Tensor:
        return bh.remote(to, blend, (a, "word")).to_here()

    check_rejected(call, "Expected a value of type 'Tensor' for argument 'b'")


def test_wrong_type_of_result() -> None:
    def call(to: str, a: Tensor) -> str:
        return bh.rpc_async(to, blend, (a, a)).wait()

    check_rejected(call, "Return value was annotated as having type str but is actually of type Tensor")


def test_too_many_arguments_of_the_call_itself() -> None:
    def call(to: str, a: Tensor) -> Tensor:
        return bh.rpc_sync(to, blend, (a, a), {}, 1.0, 2)

    check_rejected(call, "Possible forms of call to rpc_sync")


def test_keyword_arguments_of_the_call_itself() -> None:
    def call(to: str, a: Tensor) -> Tensor:
        return bh.rpc_sync(to, blend, args=(a, a))

    check_rejected(call, "does not support kwargs")


def test_a_function_that_cannot_be_scripted() -> None:
    def plain(a: Any) -> Any:
        yield a

    def call(to: str, a: Tensor) -> Tensor:
        return bh.rpc_sync(to, plain, (a,))

    with pytest.raises(torch.jit.frontend.NotSupportedError, match="Yield aren't supported"):
        script(call)


def test_not_a_function() -> None:
    def call(to: str, a: Tensor) -> Tensor:
        return bh.rpc_sync(to, A, (a,))

    check_rejected(call, "rpc|Tensor")


# What scripts cannot do.


class Holder:
    """A class that becomes a script class when it is compiled."""

    def __init__(self, a: Tensor) -> None:
        self.a = a

    def call(self) -> Tensor:
        return bh.rpc_sync("worker1", blend, (self.a, self.a))


def use_holder(a: Tensor) -> Tensor:
    return Holder(a).call()


@pytest.mark.parametrize("what", [Holder, use_holder])
def test_calls_in_script_classes(what: Any) -> None:
    with pytest.raises(RuntimeError, match=r"rpc_sync cannot be called here: .* not in methods of script classes"):
        script(what)


def test_a_script_cannot_enter_a_context() -> None:
    def enters(a: Tensor) -> Tensor:
        with bh.context():
            return bh.rpc_sync("worker1", blend, (a, a))

    with pytest.raises(RuntimeError, match=r"a context cannot be entered in script: .* pass its id in"):
        script(enters)


def test_a_context_in_a_branch_that_is_not_compiled() -> None:
    def enters(a: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            with bh.context():
                return a
        return bh.rpc_sync("worker1", blend, (a, a))

    assert torch.equal(script(enters)(A), blend(A, A))


def test_a_reference_without_the_type_of_its_value() -> None:
    def fetch(rref: bh.RRef) -> Tensor:  # type: ignore[type-arg]
        return rref.to_here()

    with pytest.raises(Exception, match=r"write RRef\[T\](.|\n)*rref: bh.RRef"):
        script(fetch)
