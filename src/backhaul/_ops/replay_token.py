"""What the first run of a function depended on besides its arguments, in a tensor that travels with the graph."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_HEAD = 3  # numbers in front of the state of the generator
_SIGNED = 1 << 63


@dataclass(frozen=True, slots=True)
class ReplayToken:
    """How to run a function again so that it does the same.

    Attributes:
        check: Checksum of its results; 0: not known.
        context: The context that was current at the caller; 0: none.
        random: State of the generator of random numbers before it ran; None if it drew none.
    """

    check: int = 0
    context: int = 0
    random: torch.Tensor | None = None

    def pack(self) -> torch.Tensor:
        """As a tensor; they are all of one size."""
        made = blank()
        made.zero_()
        made[0], made[1] = self.check, _signed(self.context)
        if self.random is not None:
            made[2] = 1
            made[_HEAD:] = self.random.view(torch.int64)
        return made

    @classmethod
    def unpack(cls, tensor: torch.Tensor) -> ReplayToken:
        """What ``pack`` made."""
        check, context, drew = tensor[:_HEAD].tolist()
        random = tensor[_HEAD:].view(torch.uint8).clone() if drew else None
        return cls(check, context % (2 * _SIGNED), random)


def _signed(number: int) -> int:
    return number - 2 * _SIGNED if number >= _SIGNED else number


def blank() -> torch.Tensor:
    """A tensor of the size of tickets; a fake one where tensors are fake."""
    return torch.empty(_HEAD + _STATE, dtype=torch.int64)


_STATE = torch.get_rng_state().view(torch.int64).numel()


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """Of all that is in them; never 0."""
    found = 1
    for tensor in tensors:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        found = zlib.crc32(repr((plain.dtype, tuple(plain.shape))).encode(), found)
        if size := plain.untyped_storage().nbytes() and plain.numel() * plain.element_size():
            found = zlib.crc32((ctypes.c_char * size).from_address(plain.data_ptr()), found)
    return found or 1
