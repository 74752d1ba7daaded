"""When a value that has travelled is the same as one that has not."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch


def assert_same(found: Any, expected: Any) -> None:
    """Compare types and contents all the way down; tensors with everything a user can ask them for."""
    assert type(found) is type(expected), (found, expected)
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.flags.writeable == expected.flags.writeable
        np.testing.assert_array_equal(found, expected)
    elif dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, torch.nn.Module):
        assert_same(dict(found.state_dict()), dict(expected.state_dict()))
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(found)
    else:
        assert found == expected


def _assert_same_tensor(found: torch.Tensor, expected: torch.Tensor) -> None:
    for what in ("dtype", "layout", "device", "requires_grad", "is_quantized", "is_nested"):
        assert getattr(found, what) == getattr(expected, what), what
    if expected.is_nested:
        for one, other in zip(found.unbind(), expected.unbind(), strict=True):
            assert_same(one, other)
        return
    assert found.__dict__ == expected.__dict__
    assert found.shape == expected.shape
    if expected.device.type == "meta":
        assert found.stride() == expected.stride()
        return
    for one, other in zip(_parts(found.detach()), _parts(expected.detach()), strict=True):
        assert one.shape == other.shape
        assert _bits(one) == _bits(other)
    if expected.is_quantized:
        assert found.qscheme() == expected.qscheme()
        torch.testing.assert_close(found.dequantize(), expected.dequantize(), rtol=0, atol=0)
    if expected.layout is torch.sparse_coo:
        assert found.is_coalesced() == expected.is_coalesced()


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that hold the numbers."""
    if tensor.is_quantized:
        return (tensor.int_repr(),)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> Any:
    """The contents, comparable for every dtype and with NaNs."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.dtype.itemsize]).tolist()
