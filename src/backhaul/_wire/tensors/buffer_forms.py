"""The memory of a tensor in a smaller form, and back. There are four forms: ``fp16``, ``bf16``, ``int8`` and ``zstd``.

Knows a dtype and bytes. Knows no table, no message, no option and no peer.

    fp16, bf16  each element in that dtype
    int8        the scales of the blocks, in float32; then each element as a multiple of its block's scale, in a byte
    zstd        one frame of zstd with the first bytes of all elements, then their second bytes, and so on
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from backhaul._wire.memory import Buffer, Recycler, address_of, block_type
from backhaul.errors import ProtocolError

BLOCK = 256
"""How many elements of ``int8`` share a scale."""

_CHUNK = 1 << 18  # elements of ``int8`` that are converted at a time: what lies between stays in the caches
_MOST = 127  # the largest number in a byte; -128 is not used
_SCALE_BYTES = 4
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # a block that needs a smaller scale becomes zeros
_LEVEL = 1  # of zstd; 3, its default, takes up to twice as long and saves nothing on floating-point numbers
_LEAST_WINDOW, _MOST_WINDOW = 10, 27  # logarithms of sizes: the least that zstd knows, and its own limit
_MAX_KEPT_BYTES = 64 << 20
_WIDE = frozenset((torch.float32, torch.float64))

LOSSY = {"fp16": _WIDE, "bf16": _WIDE, "int8": _WIDE | {torch.float16, torch.bfloat16}}
"""The forms that change values, and the dtypes that they take. ``zstd`` changes no value and takes all dtypes."""

FORMS = (*LOSSY, "zstd")
"""The names of all forms."""

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_memory = Recycler(_MAX_KEPT_BYTES)


def _find_zstd() -> ModuleType | None:
    """Python's own module (from 3.14 on), or its backport. None: neither is installed."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            pass
    return None


_zstd = _find_zstd()


def readable_forms() -> tuple[str, ...]:
    """The forms that this process can write and read."""
    return FORMS if _zstd is not None else tuple(LOSSY)


def shrink(memory: Buffer, form: str, dtype: torch.dtype) -> torch.Tensor | None:
    """The bytes of elements of ``dtype`` in a form. None: they travel as they are, because the form does not take the
    dtype, cannot hold one of the values, or saves nothing.

    No form can hold a finite value that it would make infinite. ``int8`` cannot hold infinite values and NaN.
    """
    nbytes = len(memory)
    if form != "zstd" and dtype not in LOSSY[form]:
        return None
    with address_of(memory) as address:  # of memory that may be read-only, about which torch would warn
        flat = torch.frombuffer(block_type(nbytes).from_address(address), dtype=torch.uint8)
        if form == "zstd":
            return _to_zstd(flat, dtype.itemsize)
        numbers = flat.view(dtype)
        return _to_int8(numbers) if form == "int8" else _to_half(numbers, _HALVES[form])


def restore(buffer: Buffer, form: str, dtype: torch.dtype, nbytes: int) -> Buffer:
    """Undo ``shrink``: ``nbytes`` of elements of ``dtype``. Checks the size before it takes memory.

    Raises:
        ProtocolError: There is no such form of this dtype, or the buffer does not hold that many bytes.
    """
    if form == "zstd":
        return _from_zstd(buffer, dtype.itemsize, nbytes)
    if dtype not in LOSSY.get(form, ()):
        raise ProtocolError(f"this worker reads no tensors of {dtype} in the form {form!r}")
    elements = nbytes // dtype.itemsize
    size = _int8_bytes(elements) if form == "int8" else 2 * elements
    if len(buffer) != size:
        raise ProtocolError(f"{elements} elements as {form} take {size} bytes, but the buffer has {len(buffer)}")
    made = _memory.allocate(nbytes)
    target = torch.frombuffer(made, dtype=dtype)
    if form == "int8":
        _from_int8(buffer, target)
    else:
        target.copy_(torch.frombuffer(buffer, dtype=_HALVES[form]))
    return made


def _to_half(flat: torch.Tensor, half: torch.dtype) -> torch.Tensor | None:
    made = flat.to(half)
    if not made.isfinite().all() and not torch.equal(made.isinf(), flat.isinf()):
        return None
    return made.view(torch.uint8)


# int8


def _int8_bytes(elements: int) -> int:
    return _scales_bytes(elements) + elements


def _scales_bytes(elements: int) -> int:
    return _SCALE_BYTES * -(-elements // BLOCK)


def _to_int8(flat: torch.Tensor) -> torch.Tensor | None:
    elements = len(flat)
    made = torch.empty(_int8_bytes(elements), dtype=torch.uint8)
    scales, numbers = made[: _scales_bytes(elements)].view(torch.float32), made[-elements:].view(torch.int8)
    for start in range(0, elements, _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.float32)
        count = len(part)
        if missing := -count % BLOCK:
            part = torch.nn.functional.pad(part, (0, missing))
        blocks = part.view(-1, BLOCK)
        scale = blocks.abs().amax(1).div_(_MOST)
        if not scale.isfinite().all():
            return None
        factor = torch.where(scale < _LEAST_SCALE, 0.0, scale.reciprocal())
        scales[start // BLOCK : start // BLOCK + len(scale)] = torch.where(scale < _LEAST_SCALE, 0.0, scale)
        rounded = blocks.mul(factor.unsqueeze(1)).round_().clamp_(-_MOST, _MOST)
        numbers[start : start + count] = rounded.view(-1)[:count]
    return made


def _from_int8(buffer: Buffer, target: torch.Tensor) -> None:
    elements = len(target)
    size = _scales_bytes(elements)
    scales = torch.frombuffer(buffer, dtype=torch.float32, count=size // _SCALE_BYTES)
    numbers = torch.frombuffer(buffer, dtype=torch.int8, offset=size)
    for start in range(0, elements, _CHUNK):
        part = numbers[start : start + _CHUNK].to(torch.float32)
        scale = scales[start // BLOCK : -(-(start + len(part)) // BLOCK)]
        whole = len(part) // BLOCK * BLOCK
        part[:whole].view(-1, BLOCK).mul_(scale[: whole // BLOCK].unsqueeze(1))
        if whole < len(part):
            part[whole:].mul_(scale[-1])
        target[start : start + len(part)] = part


# zstd


def _to_zstd(flat: torch.Tensor, width: int) -> torch.Tensor | None:
    if _zstd is None:
        return None
    planes = flat.view(-1, width).t().contiguous().view(-1)
    made = bytearray(_zstd.compress(block_type(len(planes)).from_address(planes.data_ptr()), _LEVEL))
    return torch.frombuffer(made, dtype=torch.uint8) if len(made) < len(flat) else None


def _from_zstd(buffer: Buffer, width: int, nbytes: int) -> Buffer:
    if _zstd is None:
        raise ProtocolError(
            "a tensor came compressed with zstd, which is not installed on this worker; install backhaul[compression] "
            "here, or choose another codec on the sender"
        )
    # A frame may ask for a window of many megabytes. A window larger than the tensor is never needed.
    window = min(max((nbytes - 1).bit_length(), _LEAST_WINDOW), _MOST_WINDOW)
    limits = {_zstd.DecompressionParameter.window_log_max: window}
    try:
        decompressor = _zstd.ZstdDecompressor(options=limits)
        found = decompressor.decompress(buffer, max_length=nbytes)
    except (_zstd.ZstdError, ValueError) as error:
        raise ProtocolError(f"a tensor came in a broken frame of zstd: {error}") from error
    if len(found) != nbytes or not decompressor.eof or decompressor.unused_data:
        raise ProtocolError(f"a tensor needs {nbytes} bytes, but its frame of zstd does not have just these")
    made = _memory.allocate(nbytes)
    planes = torch.frombuffer(bytearray(found), dtype=torch.uint8)
    torch.frombuffer(made, dtype=torch.uint8).view(-1, width).copy_(planes.view(width, -1).t())
    return made
