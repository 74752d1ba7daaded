"""Lists and dicts that scripted functions return to ``remote``. As in the reference, scripts on the owner share them.

Torch copies a Python list that is passed to a script, so changes that the script makes are lost. Torch also has lists
and dicts that are passed to scripts without a copy. The owner holds the value as one of these. Python code gets a copy,
as in the reference.
"""

from __future__ import annotations

from typing import Any

import torch

from backhaul._wire.pickling import reducers

_EXAMPLES: dict[str, Any] = {
    "BoolType": False,
    "IntType": 0,
    "FloatType": 0.0,
    "ComplexType": 0j,
    "StringType": "",
    "TensorType": torch.empty(0),
}
_SharedContainer: Any = (torch._C.ScriptList, torch._C.ScriptDict)


def share(value: Any, script_type: Any) -> Any:
    """Convert a list or dict to one that scripts share. ``script_type`` is its type in the compiler.

    Other values are returned unchanged. So are lists and dicts whose elements are not plain data, tensors, or lists,
    dicts and tuples of these.
    """
    classes = {"ListType": (list, torch._C.ScriptList), "DictType": (dict, torch._C.ScriptDict)}.get(script_type.kind())
    if classes is None or type(value) is not classes[0]:
        return value
    try:
        made = classes[1](_example(script_type))  # torch infers the type of elements, which an empty list does not have
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


def _example(script_type: Any) -> Any:
    """A value of a type, with one element in each container. Raises ``KeyError`` for unsupported types."""
    if script_type.kind() == "ListType":
        return [_example(script_type.getElementType())]
    if script_type.kind() == "DictType":
        return {_example(script_type.getKeyType()): _example(script_type.getValueType())}
    if script_type.kind() == "TupleType":
        return tuple(_example(element) for element in script_type.elements())
    return _EXAMPLES[script_type.kind()]


def unshare(value: Any) -> Any:
    """A Python copy of a shared list or dict. Other values are returned unchanged."""
    if not isinstance(value, _SharedContainer):
        return value
    return dict(value.items()) if isinstance(value, torch._C.ScriptDict) else list(value)


def _reduce(value: Any, _: list[Any]) -> Any:
    return dict, (unshare(value),)


reducers[torch._C.ScriptDict] = _reduce  # torch can pickle its shared lists, but not its shared dicts
