"""Lists and dicts that a scripted function makes with ``remote``: scripts on the owner share them, as in the reference.

A Python list comes into script as a copy, so changes that a script makes to it are lost. torch has lists and dicts that
come into script as they are. The owner holds the value as one of these; Python gets a copy of it, as in the reference.
"""

from __future__ import annotations

from typing import Any

import torch

from backhaul._wire.pickling import reducers

_ELEMENTS: dict[str, Any] = {
    "BoolType": False,
    "IntType": 0,
    "FloatType": 0.0,
    "ComplexType": 0j,
    "StringType": "",
    "TensorType": torch.empty(0),
}
_Shared: Any = (torch._C.ScriptList, torch._C.ScriptDict)


def share(value: Any, kind: Any) -> Any:
    """What the owner holds of a value of a type of the compiler's: if it is a list or a dict, one that scripts share.

    One whose elements are not plain data, tensors, or lists, dicts and tuples of these, stays what it is.
    """
    wanted = {"ListType": (list, torch._C.ScriptList), "DictType": (dict, torch._C.ScriptDict)}.get(kind.kind())
    if wanted is None or type(value) is not wanted[0]:
        return value
    try:
        made = wanted[1](_example(kind))  # the type of an empty one could not be seen
    except KeyError:
        return value
    if type(value) is list:
        made.clear()
        made.extend(value)
    else:
        for key in list(made.keys()):
            del made[key]
        for key, item in value.items():
            made[key] = item
    return made


def _example(kind: Any) -> Any:
    """A value of that type, with one element in each container. Raises ``KeyError`` for other types."""
    if kind.kind() == "ListType":
        return [_example(kind.getElementType())]
    if kind.kind() == "DictType":
        return {_example(kind.getKeyType()): _example(kind.getValueType())}
    if kind.kind() == "TupleType":
        return tuple(_example(element) for element in kind.elements())
    return _ELEMENTS[kind.kind()]


def copied(value: Any) -> Any:
    """What Python gets of a value."""
    if not isinstance(value, _Shared):
        return value
    return dict(value.items()) if isinstance(value, torch._C.ScriptDict) else list(value)


def _reduce(value: Any, _: list[Any]) -> Any:
    return dict, (copied(value),)


reducers[torch._C.ScriptDict] = _reduce  # torch's lists can be pickled, its dicts cannot
