"""Parts of calls that the reference exposes: their pickler, and their names in profiles."""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from backhaul._rref import handle


class RPCExecMode(enum.Enum):
    """How a call is made."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and the arguments to call it with."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None


def _build_rpc_profiling_key(exec_type: RPCExecMode, func_name: str, current_worker: str, dst_worker: str) -> str:
    """The name of a call in a profile."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker} -> {dst_worker})"


Reducer = Callable[[Any], Any]


class _InternalRPCPickler:
    """Pickles a value and returns its tensors separately. ``api._use_rpc_pickler`` replaces it by another pickler."""

    def __init__(self) -> None:
        self._reducers: dict[type, Reducer] = {}

    def _register_reducer(self, obj_class: type, reducer: Reducer) -> None:
        """Use ``reducer`` for values of a class. The first reducer registered for a class wins."""
        self._reducers.setdefault(obj_class, reducer)

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Return the value as bytes, and its tensors."""
        out = io.BytesIO()
        pickler = _TensorTablePickler(out, self._reducers)
        pickler.dump(obj)
        return out.getvalue(), pickler.tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
        """Rebuild the value."""
        return _TensorTableUnpickler(io.BytesIO(binary_data), tensor_table).load()


class _TensorTablePickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, reducers: dict[type, Reducer]) -> None:
        super().__init__(out)
        self.tensors: list[torch.Tensor] = []
        self._reducers = reducers

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not torch.Tensor:
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1

    def reducer_override(self, obj: Any) -> Any:
        reducer = self._reducers.get(type(obj))
        if reducer is not None:
            return reducer(obj)
        if isinstance(obj, handle.RRef):  # an RRef of this package, which has both methods
            rref: Any = obj
            return type(rref)._deserialize, (rref._serialize(),)
        return NotImplemented


class _TensorTableUnpickler(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(data)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return the value as bytes, and its tensors."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
    """Rebuild the value."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)
