"""What operators are made of."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from backhaul._ops.gradient_levels import Level, unpack
from backhaul._ops.replay_token import ReplayToken, blank, checksum
from backhaul._ops.signature import Signature, Template, values_of

places = st.lists(st.integers(0, 99)).map(tuple)


@given(st.lists(st.builds(Level, places, places)))
def test_levels_as_integers(levels: list[Level]) -> None:
    assert unpack([number for level in levels for number in level.pack()]) == levels


@given(check=st.integers(1, 2**32 - 1), context=st.integers(0, 2**64 - 1), random=st.booleans())
def test_tickets_as_tensors(check: int, context: int, random: bool) -> None:
    state = torch.get_rng_state() if random else None
    packed = ReplayToken(check, context, state).pack()
    assert packed.shape == blank().shape
    found = ReplayToken.unpack(packed)
    assert (found.check, found.context) == (check, context)
    assert found.random is None if state is None else torch.equal(found.random, state)


def test_checksums_tell_tensors_apart() -> None:
    tensors = [
        torch.tensor([1.0, 2.0]),
        torch.tensor([2.0, 1.0]),
        torch.tensor([[1.0, 2.0]]),
        torch.tensor([1.0, 2.0]).double(),
        torch.tensor([1 + 2j]),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([]),
        torch.tensor([]).int(),
    ]
    assert len({checksum([tensor]) for tensor in tensors}) == len(tensors)
    assert checksum([torch.arange(6.0).view(2, 3).t()]) == checksum([torch.arange(6.0).view(2, 3).t().contiguous()])
    assert checksum([])


def test_templates() -> None:
    x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)
    args = [x, 2, [y, z], [], [1, 2], None, "text"]
    template = Template(args)
    assert template.count == len(values_of(args)) == 3
    assert template.fill([z, y, x]) == [z, 2, [y, x], [], [1, 2], None, "text"]
    assert template.split([x, y, z, x])[1] == [x]


def test_complete_arguments() -> None:
    def function(x: torch.Tensor, n: int = 2, *, by: float = 3.0) -> torch.Tensor:
        return x

    signature = Signature(function)
    assert signature.named == ("by",)
    assert signature.complete((1,), {}) == [1, 2, 3.0]
    assert signature.complete((1,), {"by": 5.0}) == [1, 2, 5.0]
    assert signature.complete((), {"x": 1, "n": 4}) == [1, 4, 3.0]
    assert signature.schema(more=list[int]) == "(Tensor x, SymInt n, float by, SymInt[] more) -> Tensor[]"
