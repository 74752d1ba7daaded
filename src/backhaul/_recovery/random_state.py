"""The random numbers that a process will draw next: those of torch, of Python and, if it is used, of numpy."""

from __future__ import annotations

import random
import sys
import uuid
import zlib
from dataclasses import dataclass
from typing import Any

import torch

PROCESS = uuid.uuid4().hex
"""Tells this process from others: its workers share their random numbers."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of the generators of one process.

    Attributes:
        cpu: The state of torch's generator.
        cuda: The states of the generators of CUDA devices, if torch has started CUDA.
        python: The state of ``random``.
        numpy: The state of numpy's global generator, if numpy is imported.
    """

    cpu: torch.Tensor
    cuda: list[torch.Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        """The state that the generators have now."""
        numpy: Any = sys.modules.get("numpy.random")
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(torch.get_rng_state(), cuda, random.getstate(), None if numpy is None else numpy.get_state())

    def put_back(self) -> None:
        """Let the generators go on from this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda and len(self.cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None and self.numpy is not None:
            numpy.set_state(self.numpy)

    def checksum(self) -> int:
        """The same for equal states."""
        torchs = [zlib.crc32(each.numpy().tobytes()) for each in (self.cpu, *self.cuda)]
        numpys = None if self.numpy is None else (zlib.crc32(self.numpy[1].tobytes()), *self.numpy[2:])
        return hash((*torchs, self.python, numpys))
