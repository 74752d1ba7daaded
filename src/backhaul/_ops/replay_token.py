"""What a function's first run depended on besides its arguments, packed in a tensor that stays with the graph."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_HEAD = 3  # numbers before the state of the generator
_SIGNED = 1 << 63


@dataclass(frozen=True, slots=True)
class ReplayToken:
    """What is needed to repeat a run of a function exactly.

    Attributes:
        check: Checksum of the results; 0: unknown.
        context: The context that was current at the caller; 0: none.
        random: State of the random number generator before the run; None if the run drew no numbers.
    """

    check: int = 0
    context: int = 0
    random: torch.Tensor | None = None

    def pack(self) -> torch.Tensor:
        """Encode the token as a tensor. All tokens have the same size."""
        made = blank()
        made.zero_()
        made[0], made[1] = self.check, _signed(self.context)
        if self.random is not None:
            made[2] = 1
            made[_HEAD:] = self.random.view(torch.int64)
        return made

    @classmethod
    def unpack(cls, tensor: torch.Tensor) -> ReplayToken:
        """Decode the result of ``pack``."""
        check, context, drew = tensor[:_HEAD].tolist()
        random = tensor[_HEAD:].view(torch.uint8).clone() if drew else None
        return cls(check, context % (2 * _SIGNED), random)


def _signed(number: int) -> int:
    return number - 2 * _SIGNED if number >= _SIGNED else number


def blank() -> torch.Tensor:
    """Return an empty tensor of the size of a token; a fake tensor in fake mode."""
    return torch.empty(_HEAD + _STATE, dtype=torch.int64)


_STATE = torch.get_rng_state().view(torch.int64).numel()


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """Return a checksum of dtypes, shapes and values; never 0."""
    found = 1
    for tensor in tensors:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        found = zlib.crc32(repr((plain.dtype, tuple(plain.shape))).encode(), found)
        if size := plain.untyped_storage().nbytes() and plain.numel() * plain.element_size():
            found = zlib.crc32((ctypes.c_char * size).from_address(plain.data_ptr()), found)
    return found or 1
