"""Tensor subclasses, parameters of all kinds and script modules keep their gradients wherever they travel.

Each kind runs the same programs twice: with calls between workers, and with plain autograd in one process.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import backhaul as bh
from backhaul._wire.tensors.subclasses import ragged_dimensions
from tests.jit.functions import script

DEADLINE_SECONDS = 60.0
DATA = torch.tensor([0.5, -1.0, 2.0, 3.0, -0.25, 1.5], dtype=torch.float64)


class Marked(torch.Tensor):
    """A subclass with memory of its own and nothing else."""


class Strict(torch.Tensor):
    """A subclass that refuses functions which it does not know, as classes with ``__torch_function__`` do."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "as_subclass":
            raise TypeError(f"Strict does not know {function}")
        return super().__torch_function__(function, types, args, kwargs or {})


class Weight(torch.nn.Parameter):
    """A subclass of parameters."""


class OwnPickle(torch.Tensor):
    """A subclass that pickles itself, and loses its graph."""

    def __reduce_ex__(self, protocol: int) -> Any:
        return _rebuild, (self.detach().as_subclass(torch.Tensor),)


class OwnPickleInGraph(torch.Tensor):
    """A subclass that pickles itself, and keeps its graph."""

    def __reduce_ex__(self, protocol: int) -> Any:
        return _rebuild, (self.as_subclass(torch.Tensor),)


def _rebuild(plain: torch.Tensor) -> torch.Tensor:
    return plain.as_subclass(Marked)


def jagged() -> torch.Tensor:
    parts = [DATA[:2], DATA[2:]]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def jagged_with_holes() -> torch.Tensor:
    offsets, lengths = torch.tensor([0, 3, 6]), torch.tensor([2, 1])
    return torch.nested.nested_tensor_from_jagged(DATA.clone(), offsets, lengths).detach().requires_grad_()


def dtensor() -> torch.Tensor:
    return distribute_tensor(DATA.clone(), init_device_mesh("cpu", (1,)), [Shard(0)]).requires_grad_()


MAKE: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: DATA.clone().requires_grad_(),
    "subclass": lambda: DATA.clone().as_subclass(Marked).requires_grad_(),
    "subclass with __torch_function__": lambda: torch.Tensor._make_subclass(Strict, DATA.clone(), True),
    "parameter": lambda: torch.nn.Parameter(DATA.clone()),
    "parameter subclass": lambda: Weight(DATA.clone()),
    "parameter of a subclass": lambda: torch.nn.Parameter(DATA.clone().as_subclass(Marked)),
    "subclass that pickles itself": lambda: DATA.clone().as_subclass(OwnPickleInGraph).requires_grad_(),
    "wrapper": lambda: TwoTensor(DATA.clone(), DATA.clone() * 2).requires_grad_(),
    "parameter of a wrapper": lambda: torch.nn.Parameter(TwoTensor(DATA.clone(), DATA.clone() * 2)),
    "wrapper of wrappers": lambda: TwoTensor(
        TwoTensor(DATA.clone(), DATA.clone() * 2), TwoTensor(DATA.clone() * 3, DATA.clone())
    ).requires_grad_(),
    "jagged": jagged,
    "jagged with lengths": jagged_with_holes,
}


def numbers(value: Any) -> Any:
    """The contents of a tensor of any kind, as plain tensors."""
    if value is None:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        value = value.detach()
    if isinstance(value, TwoTensor):
        return [numbers(value.a), numbers(value.b)]
    if value.layout is torch.jagged:
        return [part.clone() for part in value.unbind()]
    if hasattr(value, "full_tensor"):
        return value.full_tensor()
    return value.as_subclass(torch.Tensor).clone()


def total(value: torch.Tensor) -> torch.Tensor:
    """The sum of all elements, as a plain tensor that can be a root."""
    if value.layout is torch.jagged:
        return torch.stack([part.sum() for part in value.unbind()]).sum()
    found = value.sum()
    return found.full_tensor() if hasattr(found, "full_tensor") else found


# What workers do. Each worker has a leaf of its own.

held: dict[str, torch.Tensor] = {}


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def square_elsewhere(x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync("worker2", square, args=(x * 3,))


def in_containers(values: dict[str, list[torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return [{"x": values["xs"][0] * values["xs"][1]}]


def make_leaf(kind: str) -> None:
    held[kind] = MAKE[kind]()


def give_leaf(kind: str) -> torch.Tensor:
    return held[kind]


def gradient_of_leaf(kind: str, ctx: int | None) -> Any:
    return numbers(held[kind].grad if ctx is None else bh.get_gradients(ctx).get(held[kind]))


Gradients = dict[str, Any]


def distributed(kind: str, plain: bool = False) -> Gradients:
    """The gradients of all programs, over workers. ``plain``: outside contexts."""
    found: Gradients = {}
    leaf = MAKE[kind]()

    def step(name: str, forward: Callable[[], torch.Tensor]) -> None:
        if plain:
            forward().backward()
            found[name], leaf.grad = numbers(leaf.grad), None
            return
        with bh.context() as ctx:
            ctx.backward(forward())
            found[name] = numbers(ctx.grads.get(leaf))

    step("argument", lambda: total(bh.rpc_sync("worker1", square, args=(leaf,))))
    step("not a leaf", lambda: total(bh.rpc_sync("worker1", square, args=(leaf * 2,))))
    step("on its way", lambda: total(bh.rpc_sync("worker1", square_elsewhere, args=(leaf,))))
    step("twice", lambda: total(bh.rpc_sync("worker1", torch.mul, args=(leaf, leaf))))
    step(
        "in containers",
        lambda: total(bh.rpc_sync("worker1", in_containers, args=({"xs": [leaf, leaf * 2]},))[0]["x"]),
    )
    step("reference", lambda: total(bh.remote("worker1", square, args=(leaf,)).to_here()))

    bh.rpc_sync("worker1", make_leaf, args=(kind,))
    if plain:
        mine = bh.rpc_sync("worker1", give_leaf, args=(kind,))
        total(mine * mine).backward()
        found["result"] = bh.rpc_sync("worker1", gradient_of_leaf, args=(kind, None))
        return found
    with bh.context() as ctx:
        mine = bh.rpc_sync("worker1", give_leaf, args=(kind,))
        ctx.backward(total(mine * mine))
        found["result"] = bh.rpc_sync("worker1", gradient_of_leaf, args=(kind, ctx))
    return found


def expected(kind: str) -> Gradients:
    """The same with plain autograd."""

    def gradient(forward: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        leaf = MAKE[kind]()
        (found,) = torch.autograd.grad(total(forward(leaf)), [leaf])
        return numbers(found)

    return {
        "argument": gradient(square),
        "not a leaf": gradient(lambda x: square(x * 2)),
        "on its way": gradient(lambda x: square(x * 3)),
        "twice": gradient(lambda x: torch.mul(x, x)),
        "in containers": gradient(lambda x: x * (x * 2)),
        "reference": gradient(square),
        "result": gradient(square),
    }


@pytest.fixture(autouse=True)
def _forget_leaves() -> Iterator[None]:
    yield
    held.clear()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["plain", "subclass", "subclass with __torch_function__", "parameter of a subclass"])
def test_hooks_of_leaves(kind: str) -> None:
    """Those that run with the accumulation node."""
    seen: list[Any] = []
    leaf = MAKE[kind]()
    leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append(numbers(leaf.grad)))
    with bh.cluster(2):
        total(bh.rpc_sync("worker1", square, args=(leaf,))).backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected(kind)["argument"])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("plain", [False, True], ids=["context", "plain"])
@pytest.mark.parametrize("kind", MAKE)
def test_gradients_are_those_of_plain_autograd(kind: str, plain: bool) -> None:
    with bh.cluster(3):
        found = distributed(kind, plain)
    torch.testing.assert_close(found, expected(kind))


def all_kinds() -> dict[str, Gradients]:
    MAKE["dtensor"] = dtensor
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    if bh.current_worker().name != "worker0":
        return {}
    found = {kind: distributed(kind) for kind in MAKE}
    torch.testing.assert_close(found["dtensor"], expected("dtensor"))
    return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_gradients_between_processes() -> None:
    found = bh.launch(all_kinds, 3, timeout=DEADLINE_SECONDS, start_method="forkserver")[0]
    assert found.pop("dtensor")  # compared there, where its process group is
    torch.testing.assert_close(found, {kind: expected(kind) for kind in MAKE})


# Higher orders.


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["subclass", "parameter subclass", "wrapper", "jagged"])
def test_second_order(kind: str) -> None:
    """The gradient itself travels as the subclass, and is part of the graph."""

    def cube(x: torch.Tensor) -> torch.Tensor:
        return x * x * x

    leaf = MAKE[kind]()
    with bh.cluster(2), bh.context() as ctx:
        ctx.backward(total(bh.rpc_sync("worker1", cube, args=(leaf,))), create_graph=True)
        first = ctx.grads[leaf]
        ctx.backward(total(first * first))
        found = numbers(ctx.grads[leaf])  # passes accumulate

    plain = MAKE[kind]()
    (first,) = torch.autograd.grad(total(cube(plain)), [plain], create_graph=True)
    (second,) = torch.autograd.grad(total(first * first), [plain])
    torch.testing.assert_close(found, numbers(first + second))


# Modules by value.


class Holder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Weight(DATA.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.weight * x


class Scripted(torch.nn.Module):
    """Two parameters, one of them in a module inside, a buffer, and a tensor that requires grad and is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(DATA.clone())
        self.inner = torch.nn.Linear(6, 1, dtype=torch.float64)
        self.factor = torch.full((6,), 2.0, dtype=torch.float64, requires_grad=True)
        self.register_buffer("bias", DATA * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.weight * self.factor * x + self.bias)


class ScriptedList(torch.nn.Module):
    """Has a tensor that requires grad in a place where it cannot be put into the graph again."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = [DATA.clone().requires_grad_()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factors[0]


def run_module(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def test_a_module_with_a_parameter_subclass() -> None:
    module = Holder()
    with bh.cluster(2), bh.context() as ctx:
        ctx.backward(bh.rpc_sync("worker1", run_module, args=(module, DATA)).sum())
        found = ctx.grads[module.weight]
    module(DATA).sum().backward()
    torch.testing.assert_close(found, module.weight.grad)


def test_a_script_module() -> None:
    module = script(Scripted())
    leaves = [*module.parameters(), module.factor]
    with bh.cluster(2), bh.context() as ctx:
        y = bh.rpc_sync("worker1", run_module, args=(module, DATA))
        ctx.backward(y.sum())
        found = [ctx.grads[leaf] for leaf in leaves]
    again = module(DATA)
    torch.testing.assert_close(y, again)
    torch.testing.assert_close(found, list(torch.autograd.grad(again.sum(), leaves)))


def test_a_script_module_is_trained_where_it_was_sent() -> None:
    """Outside contexts it is a copy, with parameters of its own."""

    def leaves(module: Any) -> list[bool]:
        return [parameter.is_leaf and parameter.requires_grad for parameter in module.parameters()]

    with bh.cluster(2):
        assert bh.rpc_sync("worker1", leaves, args=(script(Scripted()),)) == [True] * 3


# What cannot be recorded is refused, and says how to mean it.


def losing(value: Any) -> Any:
    return [value]


def make_own_pickle() -> torch.Tensor:
    return DATA.clone().as_subclass(OwnPickle).requires_grad_()


@pytest.mark.parametrize(
    "make", [make_own_pickle, lambda: script(ScriptedList())], ids=["class that pickles itself", "script module"]
)
def test_a_lost_gradient_is_an_error(make: Callable[[], Any]) -> None:
    value = make()
    with bh.cluster(2):
        with bh.context() as ctx:
            with pytest.raises(bh.errors.SerializationError, match=rf"context {ctx.id}.*no_grad") as caught:
                bh.rpc_sync("worker1", losing, kwargs={"value": {"deep": [0, value]}})
            assert caught.value.path == "kwargs['value']['deep'][1]"
            with torch.no_grad():
                assert bh.rpc_sync("worker1", losing, args=(value,))
        with pytest.raises(bh.errors.SerializationError, match=r"outside contexts.*no_grad"):
            bh.rpc_sync("worker1", losing, args=(value,))
    with bh.cluster(2, options=bh.Options(autograd="context")):
        assert bh.rpc_sync("worker1", losing, args=(value,))  # there is nothing to lose outside a context


def test_a_lost_gradient_of_a_result_is_an_error() -> None:
    with bh.cluster(2), bh.context():
        with pytest.raises(bh.errors.SerializationError, match="OwnPickle") as caught:
            bh.rpc_sync("worker1", make_own_pickle)
        assert caught.value.path == "result"


def test_detached_values_of_any_class_travel() -> None:
    with bh.cluster(2), bh.context():
        (found,) = bh.rpc_sync("worker1", losing, args=(make_own_pickle().detach(),))
        assert not found.requires_grad


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it
def test_a_forward_mode_tangent_is_refused() -> None:
    with bh.cluster(2), forward_ad.dual_level():
        dual = forward_ad.make_dual(DATA.clone(), torch.ones_like(DATA))
        for value, path in ((dual, "args[0]"), ({"x": [1, dual]}, "args[0]['x'][1]"), (dual.sin(), "args[0]")):
            with pytest.raises(bh.errors.SerializationError, match="forward-mode tangent") as caught:
                bh.rpc_sync("worker1", losing, args=(value,))
            assert caught.value.path == path
        weight = torch.nn.Parameter(DATA.clone())
        with pytest.raises(bh.errors.SerializationError, match="forward-mode tangent"):
            bh.rpc_sync("worker1", losing, args=(forward_ad.make_dual(weight, torch.ones_like(weight)),))
        primal = forward_ad.unpack_dual(dual).primal
        assert torch.equal(bh.rpc_sync("worker1", square, args=(primal,)), DATA * DATA)


# Ragged dimensions.


def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    x = jagged().detach()
    return x, x * 2


def three_times(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
class TestRaggedDimensions:
    """torch lets two jagged tensors into one operation only if they share their ragged dimension."""

    def run(self) -> list[Any]:
        x = jagged().detach()
        offsets = x.offsets()
        y = torch.nested.nested_tensor_from_jagged(x.values() * 5, offsets)
        product = bh.rpc_sync("worker1", both, args=(x, y))
        first, second = bh.rpc_sync("worker1", pair)
        again = bh.rpc_sync("worker1", three_times, args=(x,))
        return [*(product).unbind(), *(first + second).unbind(), *(again + x).unbind()]

    def expected(self) -> list[Any]:
        first, second = DATA[:2], DATA[2:]
        return [first * first * 5, second * second * 5, first * 3, second * 3, first * 4, second * 4]

    def test_in_one_process(self) -> None:
        with bh.cluster(2):
            torch.testing.assert_close(self.run(), self.expected())

    def test_between_processes(self) -> None:
        found = bh.launch(run_ragged, 2, timeout=DEADLINE_SECONDS, start_method="forkserver")[0]
        torch.testing.assert_close(found, self.expected())

    def test_names_are_forgotten_with_their_dimensions(self) -> None:
        gc.collect()
        before = len(ragged_dimensions._names), len(ragged_dimensions._offsets)
        with bh.cluster(2):
            for _ in range(200):
                bh.rpc_sync("worker1", three_times, args=(jagged().detach(),))
        gc.collect()
        assert len(ragged_dimensions._names) <= before[0]
        assert len(ragged_dimensions._offsets) <= before[1] + 128


def run_ragged() -> list[Any] | None:
    return TestRaggedDimensions().run() if bh.current_worker().name == "worker0" else None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", MAKE)
def test_outside_a_context(kind: str) -> None:
    """A parameter is a copy of state and stays a leaf. Any other tensor raises when a gradient reaches it."""
    with bh.cluster(2, options=bh.Options(autograd="context")):
        (found,) = bh.rpc_sync("worker1", losing, args=(MAKE[kind](),))
    if isinstance(found, torch.nn.Parameter):
        assert found.is_leaf
        total(found * found).backward()
    else:
        with pytest.raises(RuntimeError, match="outside"):
            total(found * found).backward()


# Other ways to another process.


class Unfinished(Exception):
    """Brings what was computed so far."""


def give_up(x: torch.Tensor) -> None:
    raise Unfinished(x * 2, torch.nn.Parameter(DATA.clone()))


def test_a_tensor_that_comes_with_an_exception_refuses_its_gradient() -> None:
    leaf = MAKE["plain"]()
    with bh.cluster(2), bh.context() as ctx:
        with pytest.raises(Unfinished) as caught:
            bh.rpc_sync("worker1", give_up, args=(leaf,))
        tensor, parameter = caught.value.args
        assert torch.equal(tensor, DATA * 2)
        assert parameter.is_leaf
        with pytest.raises(RuntimeError, match="another worker's exception"):
            ctx.backward((tensor * leaf).sum())


def result_of_launch() -> Any:
    leaf = MAKE["plain"]()
    return leaf * 2, Holder(), MAKE["wrapper"]()


def test_a_result_of_launch_refuses_its_gradient() -> None:
    ((tensor, module, wrapper),) = bh.launch(result_of_launch, 1, start_method="forkserver", timeout=DEADLINE_SECONDS)
    module(DATA).sum().backward()
    assert module.weight.grad is not None
    for value in (tensor, wrapper):
        with pytest.raises(RuntimeError, match="a result of"):
            total(value).backward()


# Wrappers that share something.


def inner_of(wrapper: TwoTensor, other: torch.Tensor) -> torch.Tensor:
    return wrapper.a * 5 + wrapper.a * other


def wrap(w: torch.Tensor) -> TwoTensor:
    return TwoTensor(w * 2, w * 3)


def test_inner_tensors_keep_a_graph_of_their_own() -> None:
    """A wrapper may be a leaf that requires grad while its inner tensors were computed from something else."""

    def program(call: Callable[..., Any], w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        there = call(inner_of, wrap(w), v)
        back = call(wrap, w)
        return (there + back.a * v).sum()

    w, v = MAKE["plain"](), MAKE["plain"]()
    with bh.cluster(2), bh.context() as ctx:
        ctx.backward(program(lambda function, *args: bh.rpc_sync("worker1", function, args=args), w, v))
        found = [ctx.grads[w], ctx.grads[v]]
    torch.testing.assert_close(
        found, list(torch.autograd.grad(program(lambda function, *args: function(*args), w, v), [w, v]))
    )


def double_in_place(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    first.mul_(2)
    return first * 1 + second * second


def view_of(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(x.values(), x.offsets()) if x.layout is torch.jagged else x.view_as(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["plain", "wrapper", "jagged"])
def test_recorded_wrappers_do_not_share_memory(kind: str) -> None:
    """Like plain tensors: the graph would not know of a change in place."""
    leaf, plain = MAKE[kind](), MAKE[kind]()
    with bh.cluster(2), bh.context() as ctx:
        x = leaf * 1
        y = bh.rpc_sync("worker1", double_in_place, args=(x, view_of(x)))
        ctx.backward(total(y))
        found = numbers(ctx.grads[leaf])
    expected = plain * 2 + plain * plain
    torch.testing.assert_close(numbers(y), numbers(expected))
    torch.testing.assert_close(found, numbers(torch.autograd.grad(total(expected), [plain])[0]))


def add_plainly(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * 3).as_subclass(torch.Tensor) + b


def test_a_tensor_computed_from_a_lost_value_does_not_stand_for_it() -> None:
    lost = (MAKE["plain"]() * 2).as_subclass(OwnPickle)
    derived = lost.as_subclass(torch.Tensor) * 5
    with bh.cluster(2), bh.context(), pytest.raises(bh.errors.SerializationError, match="no_grad") as caught:
        bh.rpc_sync("worker1", add_plainly, args=(lost, derived))
    assert caught.value.path == "args[0]"


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's own use of it
def test_views_before_the_culprit_do_not_confuse_the_error() -> None:
    matrix = torch.ones(2, 2)
    with bh.cluster(2), forward_ad.dual_level():
        dual = forward_ad.make_dual(DATA.clone(), torch.ones_like(DATA))
        for value in (dual[:2], dual.as_subclass(Marked)):
            with pytest.raises(bh.errors.SerializationError, match="forward-mode tangent") as caught:
                bh.rpc_sync("worker1", losing, args=([matrix[0], value],))
            assert caught.value.path == "args[0][1]"
