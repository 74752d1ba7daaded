"""Everything private in torch's compiler that this package uses. Must not know about calls or references.

The compiler can be extended in five places: the meaning of names in a function that is compiled (``get_closure``), the
meaning of annotations (``try_ann_to_type``), the type of a value without an annotation (``_jit_try_infer_type``), the
Python functions that are operators (the table of builtins), and the hooks that get everything the compiler has compiled
(emit hooks). All five can be undone. The interpreter can be extended in one place: the method that calls a script from
Python. This cannot be undone.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed.rpc
import torch.jit._builtins
import torch.jit._script
import torch.jit._state
import torch.jit.annotations
import torch.jit.frontend
from torch import _jit_internal
from torch._sources import fake_range

Closure = Callable[[Any], dict[str, Any]]
Annotation = Callable[..., Any]
Inference = Callable[[Any], Any]
EmitHook = Callable[[Any], None]

# torch has incomplete type hints for these.
Graph: TypeAlias = Any
Node: TypeAlias = Any
Value: TypeAlias = Any
Type: TypeAlias = Any
types_of: Any = torch._C
_script: Any = torch.jit._script
_frontend: Any = torch.jit.frontend


class Patches:
    """The changes to torch's compiler. Making an instance installs them.

    Args:
        replace_names: Gets a function and the names that it refers to; returns the names that the compiler uses.
        type_of_annotation: Returns the type that an annotation means, or None to let the compiler decide.
        infer_type: Returns the type of a value whose type the compiler cannot infer, or None.
        on_compiled: Called with the graph of everything that has been compiled.
    """

    def __init__(
        self,
        *,
        replace_names: Callable[[Any, dict[str, Any]], dict[str, Any]],
        type_of_annotation: Callable[[Any, Any], Any],
        infer_type: Callable[[Any], Any],
        on_compiled: Callable[[Graph], None],
    ) -> None:
        self._active = True
        self._old_closure: Closure = _jit_internal.get_closure
        self._old_annotation: Annotation = torch.jit.annotations.try_ann_to_type
        self._old_inference: Inference = types_of._jit_try_infer_type
        self._old_hooks: tuple[EmitHook | None, EmitHook | None] = torch._C._jit_get_emit_hooks()

        def get_closure(function: Any) -> dict[str, Any]:
            names = self._old_closure(function)
            # The emit hooks do not get the methods of script classes, so names must not be replaced there.
            in_class = sys._getframe(1).f_code is _jit_internal.createResolutionCallbackForClassMethods.__code__
            return replace_names(function, names) if self._active and not in_class else names

        def try_ann_to_type(annotation: Any, loc: Any, rcb: Any = None) -> Any:
            if isinstance(annotation, types_of.Type):
                return annotation
            found = type_of_annotation(annotation, loc) if self._active else None
            return self._old_annotation(annotation, loc, rcb) if found is None else found

        def try_infer_type(value: Any) -> Any:
            found = self._old_inference(value)
            inferred = infer_type(value) if self._active and not found.success() else None
            return found if inferred is None else types_of.InferredType(inferred)

        def on_module(module: Any) -> None:
            if self._active:
                for name in module._method_names():
                    on_compiled(module._get_method(name).graph)
            if self._old_hooks[0] is not None:
                self._old_hooks[0](module)

        def on_function(function: Any) -> None:
            if self._active:
                on_compiled(function.graph)
            if self._old_hooks[1] is not None:
                self._old_hooks[1](function)

        self._new_closure, self._new_annotation, self._new_inference = get_closure, try_ann_to_type, try_infer_type
        torch._C._jit_set_emit_hooks(on_module, on_function)
        _jit_internal.get_closure = get_closure
        torch.jit.annotations.try_ann_to_type = try_ann_to_type
        types_of._jit_try_infer_type = try_infer_type

    def remove(self) -> None:
        """Restore what was there before.

        Functions that others have patched since stay patched, and the replacements below them do nothing from now on.
        Torch has only one pair of emit hooks and does not tell who set it, so the pair found at first is restored.
        """
        self._active = False
        if _jit_internal.get_closure is self._new_closure:
            _jit_internal.get_closure = self._old_closure
        if torch.jit.annotations.try_ann_to_type is self._new_annotation:
            torch.jit.annotations.try_ann_to_type = self._old_annotation
        if types_of._jit_try_infer_type is self._new_inference:
            types_of._jit_try_infer_type = self._old_inference
        torch._C._jit_set_emit_hooks(*self._old_hooks)


# What the compiler knows about names, types and places in source code.


def special_form(name: str) -> Any:
    """The function that the compiler recognizes, by identity, as ``rpc_sync``, ``rpc_async`` or ``remote``."""
    return getattr(sys.modules["torch.distributed.rpc"], name)


def set_operator(function: Callable[..., Any], operator: str | None) -> None:
    """Make a Python function an operator in script. None undoes this."""
    table = torch.jit._builtins._get_builtin_table()
    if operator is None:
        table.pop(id(function), None)
    else:
        table[id(function)] = operator


def type_of(annotation: Any, loc: Any = None) -> Any:
    """The type that an annotation means. ``loc`` is its place in the source code, for errors."""
    return torch.jit.annotations.ann_to_type(annotation, loc or fake_range())


def type_of_values(python_class: type) -> Any:
    """The type in script of the values of a Python class.

    None if the class does not determine it. Plain data, tensors and scripted classes do.
    """
    if issubclass(python_class, torch.Tensor):
        return types_of.TensorType.get()
    if python_class in {bool, int, float, complex, str}:
        return type_of(python_class)
    return torch.jit._state._get_script_class(python_class)


def infer(value: Any) -> Any:
    """The type that the compiler infers for a value; None if it cannot."""
    found = types_of._jit_try_infer_type(value)
    return found.type() if found.success() else None


def error(loc: Any, message: str) -> Exception:
    """An error of the compiler, at a place in source code."""
    return _frontend.FrontendError(loc or fake_range(), message)  # type: ignore[no-any-return]


def is_interface(value: Any) -> bool:
    """Whether ``torch.jit.interface`` made this value."""
    return isinstance(value, type) and "__torch_script_interface__" in vars(value)


def find_function(name: str) -> Any:
    """The scripted function with a qualified name; None if there is none."""
    return torch.jit._state._python_cu.find_function(name)


# Compiling templates.


def script(function: Any) -> Any:
    """As ``torch.jit.script``, without its deprecation warning."""
    return _script._script_impl(function)


def instantiate(template: types.FunctionType, meanings: Mapping[str, Any]) -> Any:
    """Script a copy of a function in which some names have other meanings."""
    copy = types.FunctionType(template.__code__, {**template.__globals__, **meanings}, template.__name__)
    copy.__module__, copy.__qualname__ = template.__module__, template.__qualname__
    copy.__annotations__ = template.__annotations__
    return script(copy)


def replace_by_cast(function: Any, name: str) -> None:
    """Replace the calls of a Python function, in a scripted function, by a cast of the first argument.

    The cast accepts a value of any type, which an operator does not: operators check their arguments.
    """
    graph = function.graph
    for node in graph.findAllNodes("prim::PythonOp", True):
        if node.pyname() == name:
            with inserting(graph, node):
                cast = graph.create("prim::unchecked_cast", [node.inputsAt(0)])
                cast.output().setType(node.output().type())
                graph.insertNode(cast)
            node.output().replaceAllUsesWith(cast.output())
            node.destroy()


def ignored(function: Callable[..., Any], **annotations: Any) -> Any:
    """A Python function for use in script, with annotations that may be types of the compiler."""

    def call(*args: Any) -> Any:
        return function(*args)

    # The compiler reads the signature, so the function needs one with the right names.
    names = ", ".join(name for name in annotations if name != "return")
    namespace: dict[str, Any] = {"call": call}
    exec(f"def {function.__name__}({names}):\n    return call({names})", namespace)
    made = namespace[function.__name__]
    made.__annotations__ = annotations
    made.__module__ = function.__module__
    return torch.jit.ignore(made)


def instantiate_class(template: type, name: str, meanings: Mapping[str, Any]) -> Any:
    """Script a copy of a class under another name, in which some names have other meanings; returns its type."""
    copy = type(template.__name__, (), dict(vars(template)) | {"__qualname__": template.__qualname__})
    qualified = f"__torch__.{template.__module__}.{name}"

    def meaning(word: str) -> Any:
        return meanings[word] if word in meanings else getattr(builtins, word, None)

    _script._compile_and_register_class(copy, meaning, qualified)
    return torch.jit._state._python_cu.get_class(qualified)


def set_python_class(name: str, python_class: type) -> None:
    """Set the Python class of the values of a scripted class that come out of script."""
    torch.jit._state._name_to_pyclass[name] = python_class


# Running scripts.


def wrap_calls(call: Callable[..., Any]) -> None:
    """Let ``call(invoke, script, *args, **kwargs)`` make all calls from Python to scripted functions and methods."""
    for callable_class in (types_of.ScriptFunction, types_of.ScriptMethod):
        callable_class.__call__ = _wrapped(callable_class.__call__, call)


def _wrapped(invoke: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return call(invoke, self, *args, **kwargs)

    __call__.__doc__ = invoke.__doc__
    return __call__


def name_of(script: Any) -> str:
    """The qualified name of a scripted function or method, which no other one has."""
    if isinstance(script, types_of.ScriptFunction):
        return str(script.qualified_name)
    return f"{script.raw_owner._type().qualified_name()}.{script.name}"


@contextlib.contextmanager
def inserting(graph: Graph, node: Node) -> Iterator[None]:
    """Insert new nodes in front of ``node`` inside the ``with`` block."""
    with graph.insert_point_guard(node):
        yield
