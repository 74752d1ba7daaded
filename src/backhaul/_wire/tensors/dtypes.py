"""The dtypes of torch as tensors on the wire use them: their names, and what torch can do with each.

This module knows no message. It asks torch which dtypes exist, so a new version of torch adds its own.
"""

from __future__ import annotations

import functools
import re
import threading
import warnings

import torch

from backhaul.errors import ProtocolError

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
UNCOPIED = {dtype for name, dtype in DTYPES.items() if re.fullmatch(r"u?int[1-7]|bits.*|float4.*", name)} & {
    dtype for dtype in DTYPES.values() if dtype.itemsize == 1
}
"""One-byte dtypes that torch stores but cannot copy into another layout."""
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
BUFFERED = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
}
"""Dtypes that ``torch.frombuffer`` supports in every version of torch."""
NO_WARNING = BUFFERED | {torch.int8, torch.int16, torch.complex64, torch.complex128}
"""Dtypes that torch never warns about. It calls some of the others experimental, and each version adds more."""


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name. Raises ``ProtocolError``."""
    try:
        return DTYPES[name]
    except KeyError:
        raise ProtocolError(
            f"this worker's torch {torch.__version__} has no dtype {name!r}; use the same torch version on all workers"
        ) from None


def silence_warnings() -> None:
    """Make torch issue its one-time warnings about unusual tensors now, where nobody sees them.

    torch issues each of these warnings once per process. The sender should see them, not the receiver.
    """
    with _silencing:
        _silence_once()


_silencing = threading.Lock()  # guards the first call of _silence_once


@functools.cache
def _silence_once() -> None:
    """Run only once, because warning filters are shared by all threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (1,), check_invariants=False)
        torch.ones(1, 1).to_sparse_csr()
        torch.nested.as_nested_tensor([torch.ones(1)])
        for dtype in DTYPES.values():
            if dtype not in QUANTIZED:
                torch.empty(1, dtype=dtype)
        torch._make_per_tensor_quantized_tensor(torch.ones(1, dtype=torch.int8), 1.0, 0)
