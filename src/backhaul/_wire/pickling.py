"""Pickles with references to the tensors of a message in place of the tensors.

This module adds three rules to those of cloudpickle: tensors go beside the pickle, ``__main__`` may be shared between
workers, and higher layers register types of their own (``reducers``, ``builders``).
"""

from __future__ import annotations

import functools
import io
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import torch
from torch.utils._pytree import tree_leaves

from backhaul._wire.callables import name_of, resolve
from backhaul._wire.global_state import refuse_state
from backhaul._wire.memory import Buffer
from backhaul._wire.tensors.subclasses import (
    SubclassReducer,
    is_recorded,
    make_wrapper,
    plain_alias,
    set_attributes,
)
from backhaul._wire.tensors.writer import TensorWriter

_SMALL_BUFFER_BYTES = 4096  # a smaller buffer is cheaper inside the pickle

Reducer = Callable[[Any, list[Any]], Any]
"""Reduces a value for a message, as ``__reduce__`` does. It may append a parcel to the list. Its layer acts on the
parcel when the message is sent. A message that cannot be encoded is never sent.
"""

reducers: dict[type, Reducer] = {}
"""The reducers that higher layers have registered, by type."""

builders: dict[tuple[str, str], Callable[..., Any]] = {}
"""What the unpickler calls in place of a named function, by module and name. It gets the receiving worker as its first
argument, before the arguments in the message.
"""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles one message. cloudpickle decides which functions and classes go by value, except those of a shared
    ``__main__``.

    Attributes:
        subclasses: Takes tensor subclasses apart.
        scripted: Script modules with a value that requires grad and cannot be recorded.
    """

    def __init__(
        self,
        file: io.BytesIO,
        writer: TensorWriter,
        loose: list[pickle.PickleBuffer],
        main_shared: bool,
        parcels: list[Any],
    ) -> None:
        # Not a bound method: a pickler that refers to itself would keep all values until the next garbage collection.
        super().__init__(file, protocol=5, buffer_callback=functools.partial(_take_buffer, loose))
        self._writer = writer
        self._main_shared = main_shared
        self._parcels = parcels
        self.subclasses = SubclassReducer()
        self.scripted: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        """See ``pickle.Pickler.reducer_override``."""
        kind = type(value)
        if kind is torch.Tensor:
            return self._reduce_tensor(value)
        if issubclass(kind, torch.Tensor):
            return self.subclasses.reduce(value)
        if (reducer := reducers.get(kind)) is not None:
            return reducer(value, self._parcels)
        if issubclass(kind, io.IOBase) and not issubclass(kind, (io.BytesIO, io.StringIO)):
            raise TypeError("an open file cannot be sent to another process; send its path or its content")
        if issubclass(kind, torch.jit.ScriptModule):
            return self._reduce_script_module(value)
        if kind is torch.jit.ScriptFunction or isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return resolve, (name_of(value),)
        if self._main_shared and isinstance(value, (type, types.FunctionType)) and _in_main(value):
            return NotImplemented  # pickle then sends the name
        reduced = super().reducer_override(value)
        if kind is types.FunctionType and reduced is not NotImplemented:
            refuse_state(value, by_value=self._by_value, references=reducers)
        return reduced

    def _by_value(self, value: Any) -> bool:
        return name_of(value, main_shared=self._main_shared) is None

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        reduced = _tensor, (self._writer.add(tensor),)
        return (*reduced, tensor.__dict__, None, None, set_attributes) if tensor.__dict__ else reduced

    def _reduce_script_module(self, module: Any) -> Any:
        """Save a script module as a whole. Its tensors that require grad are sent too, as part of the graph."""
        recorded: dict[tuple[str, str], torch.Tensor] = {}
        for path, part in module.named_modules() if torch.is_grad_enabled() else ():
            parameters = dict(part.named_parameters(recurse=False))
            for name in part._concrete_type.get_attributes():
                value = part._c.getattr(name)
                if isinstance(value, torch.Tensor):
                    if value.requires_grad:
                        recorded[path, name] = alias = plain_alias(value)
                        if name in parameters:
                            self.subclasses.parameters.append((value, alias))
                elif any(isinstance(each, torch.Tensor) and each.requires_grad for each in tree_leaves(value)):
                    self.scripted.append(module)
        return _script_module, (module.save_to_buffer(), recorded)


def _take_buffer(loose: list[pickle.PickleBuffer], buffer: pickle.PickleBuffer) -> bool:
    """Put a buffer beside the pickle, or return True to leave it inside the pickle."""
    try:
        view = buffer.raw()
    except BufferError:  # not contiguous
        return True
    if view.nbytes < _SMALL_BUFFER_BYTES or view.readonly:
        return True  # memory inside the pickle stays read-only at the other end
    loose.append(buffer)
    return False


class Unpickler(pickle.Unpickler):
    """Unpickles one message with these tensors for the worker ``worker``."""

    def __init__(
        self, file: io.BytesIO, tensors: Sequence[torch.Tensor], loose: Sequence[Buffer], worker: object
    ) -> None:
        super().__init__(file, buffers=loose)
        self._tensors = tensors
        self._worker = worker

    def find_class(self, module: str, name: str) -> Any:
        """See ``pickle.Unpickler.find_class``."""
        if name == "_tensor" and module == __name__:
            return self._tensors.__getitem__
        if name == make_wrapper.__name__ and module == make_wrapper.__module__:
            return functools.partial(make_wrapper, self._tensors)
        if (builder := builders.get((module, name))) is not None:
            return functools.partial(builder, self._worker)
        return super().find_class(module, name)


def _tensor(index: int) -> torch.Tensor:
    """Refers, in a pickle, to the tensor of that index. The unpickler replaces this function."""
    raise pickle.UnpicklingError("this pickle is part of a Backhaul message and cannot be read without its tensors")


def _script_module(saved: bytes, recorded: dict[tuple[str, str], torch.Tensor]) -> Any:
    # This does what torch.jit.load does, without its warning that TorchScript is deprecated.
    unit = torch._C.CompilationUnit()
    module = torch._C.import_ir_module_from_buffer(unit, saved, None, {}, False)  # type: ignore[call-arg, arg-type]
    made = torch.jit._recursive.wrap_cpp_module(module)
    parts = dict(made.named_modules()) if recorded else {}
    for (path, name), tensor in recorded.items():
        if is_recorded(tensor):  # as in ``make_parameter``
            parts[path]._c.setattr(name, tensor)
    return made


def _in_main(value: Any) -> bool:
    return value.__module__ == "__main__" and name_of(value, main_shared=True) is not None
