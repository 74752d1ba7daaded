"""RRefs of ``backhaul.compat.rpc`` in script, where they differ from Backhaul's own."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor

from backhaul.compat import rpc
from backhaul.compat.rpc.containers import share
from tests.jit.functions import script

pytestmark = pytest.mark.usefixtures("single_worker")


def five() -> int:
    return 5


@script
def value_of(rref: rpc.RRef[Tensor]) -> Tensor:
    return rref.local_value()


@script
def negated(rref: rpc.RRef[Tensor]) -> Tensor:
    return torch.neg(rref.to_here())


def test_a_script_passes_on_a_value_whose_annotation_is_wrong() -> None:
    assert value_of(rpc.remote("single", five)) == 5


def test_an_operator_rejects_a_value_whose_annotation_is_wrong() -> None:
    with pytest.raises(RuntimeError, match="Tensor"):
        negated(rpc.remote("single", five))


# Lists and dicts.


@script
def numbers(count: int) -> list[int]:
    return [i for i in range(count)]


@script
def add_number(rref: rpc.RRef[list[int]], number: int) -> None:
    rref.local_value().append(number)
    rref.to_here().append(number + 1)


@script
def table(x: Tensor) -> dict[str, list[Tensor]]:
    return {"x": [x]}


@script
def add_row(rref: rpc.RRef[dict[str, list[Tensor]]], x: Tensor) -> None:
    rref.local_value()["x"].append(x)
    rref.local_value()["y"] = [x]


@pytest.mark.parametrize("count", [0, 2])
def test_scripts_share_a_list_made_by_a_script(count: int) -> None:
    rref = rpc.remote("single", numbers, (count,))
    rpc.rpc_sync("single", add_number, (rref, 7))
    assert rref.to_here() == rref.local_value() == [*range(count), 7, 8]
    assert type(rref.to_here()) is list
    assert rpc.rpc_sync("single", rpc.RRef.to_here, (rref,)) == [*range(count), 7, 8]


def test_scripts_share_a_dict_made_by_a_script() -> None:
    rref = rpc.remote("single", table, (torch.ones(2),))
    rpc.rpc_sync("single", add_row, (rref, torch.zeros(2)))
    wanted = {"x": [[1.0, 1.0], [0.0, 0.0]], "y": [[0.0, 0.0]]}
    assert {key: [x.tolist() for x in row] for key, row in rref.to_here().items()} == wanted


def test_python_gets_a_copy_of_a_shared_list() -> None:
    rref = rpc.remote("single", numbers, (2,))
    rref.local_value().append(5)
    assert rref.to_here() == [0, 1]


@script
def options() -> list[int | None]:
    return [1, None]


def test_lists_of_unsupported_types_are_not_shared() -> None:
    assert type(share(options(), options.schema.returns[0].type)) is list
    assert rpc.remote("single", options).to_here() == [1, None]


# Files.


class Sum(torch.nn.Module):
    """A module that holds RRefs."""

    def __init__(self) -> None:
        super().__init__()
        self.rrefs = [rpc.remote("single", torch.mul, (torch.ones(2), n)) for n in range(4)]

    def forward(self) -> Tensor:
        made = torch.zeros(2)
        for rref in self.rrefs:
            made = made + rref.to_here()
        return made


def load_and_run(saved: bytes) -> Tensor:
    made: Tensor = torch.jit.load(io.BytesIO(saved))()
    return made


deprecated = pytest.mark.filterwarnings("ignore:`torch.jit")


@deprecated
def test_a_module_that_holds_rrefs_can_be_saved_where_enabled() -> None:
    module, file = script(Sum()), io.BytesIO()
    rpc._enable_jit_rref_pickle()
    try:
        torch.jit.save(module, file)
    finally:
        rpc._disable_jit_rref_pickle()
    assert rpc.rpc_sync("single", load_and_run, (file.getvalue(),)).tolist() == [6.0, 6.0]


@deprecated
def test_a_module_that_holds_rrefs_cannot_be_saved_elsewhere() -> None:
    with pytest.raises(RuntimeError, match="RRef jit pickling is only allowed inside RPC calls"):
        torch.jit.save(script(Sum()), io.BytesIO())
