"""Where an operation with remote tensors runs, and what becomes of its result.

- It writes to a tensor: on the worker of that tensor.
- Its tensors are on one owner, numbers aside: there.
- Otherwise here, with copies.
- ``_foreach_*``, and fused steps of optimizers: each element where it would run alone, with one message to each owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from backhaul._remote_tensors import on_owner, remote_tensor
from backhaul._remote_tensors.addresses import Address, Message, Place
from backhaul._remote_tensors.on_owner import Stays
from backhaul._remote_tensors.remote_tensor import RemoteTensor, fetch, send_changes_for
from backhaul._rpc.futures import Future
from backhaul._runtime.compile_marks import graph_break

_aten = torch.ops.aten

HERE = -1
"""In place of the id of an owner: this worker."""


@graph_break
def run_operation(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """See ``remote_tensor.run_operation``."""
    if func in _ALIASES and isinstance(args[0], RemoteTensor):
        return _alias(args[0])
    if func is _aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype) and _stays_here(kwargs):
        return args[0].to_here() if kwargs.get("device") is not None else _run_at(args[0], _aten.clone.default, args)
    if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
        return _check_and_unscale(*args)
    if func in _DRAWS and isinstance(args[0], RemoteTensor):
        return _draw_here(func, args, kwargs)
    if func is _aten.zero_.default and _zeroed_later(args[0]):
        return args[0]
    if func is _aten._foreach_zero_.default:
        args = [[each for each in args[0] if not _zeroed_later(each)]]
        if not args[0]:
            return None
    if func._schema.name.startswith("aten::_foreach_"):
        return _run_foreach(func, args, kwargs)
    if func._schema.name.startswith(_FUSED_STEPS):
        return _run_foreach(func, args, kwargs)
    leaves, form = tree_flatten((args, kwargs))
    written = [each for each in _written(func, args, kwargs) if isinstance(each, torch.Tensor)]
    owner = _owner_of(func, leaves, written)
    if owner == HERE:
        return _run_here(func, leaves, form)
    if torch.Tag.inplace_view in func.tags:
        raise NotImplementedError(f"{func} changes the shape of a tensor of another worker; use its form out of place")
    return _Call(owner, func, leaves, form).result()


def _zeroed_later(tensor: torch.Tensor) -> bool:
    """Note that a gradient becomes zero; False if ``tensor`` is no gradient of another worker."""
    if not isinstance(tensor, RemoteTensor) or tensor._address.kind != "gradient":
        return False
    tensor._gradients.zero(tensor._address.key)
    return True


_DRAWS = frozenset(
    getattr(getattr(_aten, name), overload)
    for name in ("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_")
    for overload in getattr(_aten, name).overloads()
    if overload in ("default", "float", "from", "to")
)
"""Operations that fill a tensor with random numbers, whatever is in it."""


def _draw_here(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> RemoteTensor:
    """Fill a tensor of another worker with random numbers of this worker, so that seeds mean what they mean in one
    process. Copies the whole tensor there.
    """
    tensor: RemoteTensor = args[0]
    drawn = func(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype), *args[1:], **kwargs)
    run_operation(_aten.copy_.default, (tensor, drawn), {})
    return tensor


_ALIASES = (_aten.detach.default, _aten.alias.default)


def _alias(tensor: RemoteTensor) -> RemoteTensor:
    alias = RemoteTensor(tensor._address, _form_of(tensor))
    alias._is_alias = True
    gradients = getattr(tensor, "_gradients", None)
    if gradients is not None and tensor._address.kind != "value":
        alias._gradients = gradients
        gradients.live.add(alias)
    return alias


def _form_of(tensor: RemoteTensor) -> on_owner.TensorForm:
    sparse = tensor.layout is not torch.strided
    return on_owner.TensorForm(tuple(tensor.shape), None if sparse else tensor.stride(), tensor.dtype, tensor.layout)


def _stays_here(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is None or torch.device(device).type == "cpu"


def _run_at(tensor: RemoteTensor, func: Any, args: Sequence[Any]) -> Any:
    leaves, form = tree_flatten((args, {}))
    return _Call(tensor._address.owner, func, leaves, form).result()


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_flatten(args[index] if index < len(args) else kwargs.get(argument.name))[0]
    return found


def _owner_of(func: Any, leaves: Sequence[Any], written: Sequence[torch.Tensor]) -> int:
    """The id of the worker where an operation runs; ``HERE`` for this worker."""
    if written:
        owners = {_place_of(tensor) for tensor in written}
        if len(owners) > 1:
            raise NotImplementedError(f"{func} writes to tensors of several workers at once; write to one at a time")
        return owners.pop()
    if any(isinstance(leaf, torch.device) and leaf.type not in ("cpu", "meta") for leaf in leaves):
        return HERE
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    with_dimensions = {_place_of(tensor) for tensor in tensors if tensor.dim()}
    owners = with_dimensions or {_place_of(tensor) for tensor in tensors if isinstance(tensor, RemoteTensor)}
    return owners.pop() if len(owners) == 1 else HERE


def _place_of(tensor: torch.Tensor) -> int:
    return tensor._address.owner if isinstance(tensor, RemoteTensor) else HERE


def _run_here(func: Any, leaves: Sequence[Any], form: Any) -> Any:
    """Run an operation here, with copies of remote tensors."""
    args, kwargs = tree_unflatten(_with_copies(leaves, HERE), form)
    return func(*args, **kwargs)


def _with_copies(leaves: Sequence[Any], owner: int) -> list[Any]:
    """The arguments with copies in place of remote tensors, except those of ``owner``."""
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, RemoteTensor) and leaf._address.owner != owner]
    made = list(leaves)
    for index, copy in zip(indices, fetch([leaves[index] for index in indices]), strict=True):
        made[index] = copy
    return made


class _Call:
    """An operation that runs on the owner of its tensors. ``result`` starts it, unless ``start`` has, and waits."""

    def __init__(self, owner: int, func: Any, leaves: Sequence[Any], form: Any) -> None:
        self._name = str(func)
        leaves = _with_copies(leaves, owner)
        remote = [leaf for leaf in leaves if isinstance(leaf, RemoteTensor)]
        send_changes_for(remote[0])
        self._via = remote[0]._address.container
        self._message = message = Message(owner)
        self._remote = remote
        places = [message.place(leaf._address) if isinstance(leaf, RemoteTensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(
            [each.detach() if isinstance(each, torch.Tensor) else each for each in places], form
        )
        for name in ("device", "pin_memory"):  # those of the owner
            kwargs.pop(name, None)
        self._run = self._via, on_owner.run, func, args, kwargs
        self._future: Future[Any] | None = None

    def start(self) -> None:
        """Start it, since others are to run at the same time."""
        self._future = self._message.send(*self._run, label=self._name)

    def result(self) -> Any:
        """The result; remote tensors stand for what stays on the owner."""
        try:
            if self._future is not None:
                found = self._future.wait()
            else:
                found = self._message.send_and_wait(*self._run, label=self._name)
            return tree_map(self._receive, found)
        except Exception as error:
            error.add_note(f"{self._name} ran on worker '{self._via.owner_name()}', which has its tensors")
            raise

    def _receive(self, value: Any) -> Any:
        if not isinstance(value, Stays):
            return value
        if isinstance(value.value, Place):
            return next(each for each in self._remote if self._message.place(each._address) == value.value)
        return RemoteTensor(Address(value.value), value.form)


# Lists of tensors.

_FUSED_STEPS = ("aten::_fused_adam", "aten::_fused_adagrad", "aten::_fused_sgd")
"""How the names of operations begin that step lists of parameters, each by itself."""


def _run_foreach(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on lists of tensors: each owner gets one message with its share."""
    count = len(args[0])
    written = _written(func, [each if _is_list(each, count) else [] for each in args], {})
    by_owner: dict[int, list[int]] = {}
    for index in range(count):
        parts = [each[index] for each in args if _is_list(each, count)]
        owner = _owner_of(func, parts, written[index::count])
        by_owner.setdefault(owner, []).append(index)

    def share(indices: Sequence[int]) -> tuple[list[Any], Any]:
        return tree_flatten(([_take(each, indices, count) for each in args], _take_all(kwargs, indices, count)))

    calls = {owner: _Call(owner, func, *share(indices)) for owner, indices in by_owner.items() if owner != HERE}
    for call in list(calls.values())[1:]:
        call.start()
    results = {HERE: _run_here(func, *share(by_owner[HERE]))} if HERE in by_owner else {}
    results.update((owner, call.result()) for owner, call in calls.items())
    if not func._schema.returns or not isinstance(next(iter(results.values())), list | tuple):
        return None
    made: dict[int, Any] = {}
    for owner, found in results.items():
        made.update(zip(by_owner[owner], found, strict=True))
    return [made[index] for index in range(count)]


def _is_list(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count


def _take(value: Any, indices: Sequence[int], count: int) -> Any:
    return [value[index] for index in indices] if _is_list(value, count) else value


def _take_all(kwargs: dict[str, Any], indices: Sequence[int], count: int) -> dict[str, Any]:
    return {name: _take(value, indices, count) for name, value in kwargs.items()}


def _check_and_unscale(tensors: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Unscale gradients where they are; ``found_inf`` becomes 1 if one of them, anywhere, is infinite or NaN."""
    by_owner: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_owner.setdefault(_place_of(tensor), []).append(tensor)
    here = by_owner.pop(HERE, [])
    calls = []
    for owner, remote in by_owner.items():
        leaves, form = tree_flatten(((remote, torch.zeros_like(found_inf), inverse_scale), {}))
        calls.append(_Call(owner, on_owner.check_and_unscale, leaves, form))
    for each in calls[1:]:
        each.start()
    if here:
        torch._amp_foreach_non_finite_check_and_unscale_(here, found_inf, inverse_scale)
    for call in calls:
        found_inf.copy_(torch.maximum(found_inf, call.result()))


remote_tensor.run_operation = run_operation
