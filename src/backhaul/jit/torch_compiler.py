"""All that this package uses of torch's compiler and is not public. Knows nothing of calls.

The compiler lets a package take part in five places: what names mean in a function that is
compiled (``get_closure``), what annotations mean (``try_ann_to_type``), which type a value has that has no annotation
(``_jit_try_infer_type``), which Python functions are operators (the table of builtins), and what is called with
everything it has compiled (emit hooks). All can be left again. The interpreter offers one: the method that calls a
script from Python.
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
Emitted = Callable[[Any], None]

# torch describes these to type checkers in part only.
Graph: TypeAlias = Any
Node: TypeAlias = Any
Value: TypeAlias = Any
Type: TypeAlias = Any
types_of: Any = torch._C
_script: Any = torch.jit._script
_frontend: Any = torch.jit.frontend


class Patches:
    """What is ours in torch's compiler, while it is installed.

    Args:
        captured: Makes of the names that a function refers to those that the compiler is to see.
        annotated: The type that an annotation means, or None if that is not ours to say.
        inferred: The type of a value that the compiler knows none for, or None likewise.
        emitted: Called with the graph of everything that has been compiled.
    """

    def __init__(
        self,
        captured: Callable[[Any, dict[str, Any]], dict[str, Any]],
        annotated: Callable[[Any, Any], Any],
        inferred: Callable[[Any], Any],
        emitted: Callable[[Graph], None],
    ) -> None:
        self._active = True
        self._closure: Closure = _jit_internal.get_closure
        self._annotation: Annotation = torch.jit.annotations.try_ann_to_type
        self._inference: Inference = types_of._jit_try_infer_type
        self._hooks: tuple[Emitted | None, Emitted | None] = torch._C._jit_get_emit_hooks()

        def get_closure(function: Any) -> dict[str, Any]:
            found = self._closure(function)
            # The hooks do not see the methods of script classes, so calls there have to be met as what they are.
            in_class = sys._getframe(1).f_code is _jit_internal.createResolutionCallbackForClassMethods.__code__
            return captured(function, found) if self._active and not in_class else found

        def try_ann_to_type(annotation: Any, loc: Any, rcb: Any = None) -> Any:
            if isinstance(annotation, types_of.Type):
                return annotation
            found = annotated(annotation, loc) if self._active else None
            return self._annotation(annotation, loc, rcb) if found is None else found

        def try_infer_type(value: Any) -> Any:
            found = self._inference(value)
            kind = inferred(value) if self._active and not found.success() else None
            return found if kind is None else types_of.InferredType(kind)

        def on_module(module: Any) -> None:
            if self._active:
                for name in module._method_names():
                    emitted(module._get_method(name).graph)
            if self._hooks[0] is not None:
                self._hooks[0](module)

        def on_function(function: Any) -> None:
            if self._active:
                emitted(function.graph)
            if self._hooks[1] is not None:
                self._hooks[1](function)

        self._own_closure, self._own_annotation, self._own_inference = get_closure, try_ann_to_type, try_infer_type
        torch._C._jit_set_emit_hooks(on_module, on_function)
        _jit_internal.get_closure = get_closure
        torch.jit.annotations.try_ann_to_type = try_ann_to_type
        types_of._jit_try_infer_type = try_infer_type

    def remove(self) -> None:
        """Put back what was there. What others have put on top since stays, and passes through; but torch has one pair
        of hooks and does not tell whose it is, so those are the ones found in the beginning.
        """
        self._active = False
        if _jit_internal.get_closure is self._own_closure:
            _jit_internal.get_closure = self._closure
        if torch.jit.annotations.try_ann_to_type is self._own_annotation:
            torch.jit.annotations.try_ann_to_type = self._annotation
        if types_of._jit_try_infer_type is self._own_inference:
            types_of._jit_try_infer_type = self._inference
        torch._C._jit_set_emit_hooks(*self._hooks)


# Calls, as the compiler knows them.


def special_form(name: str) -> Any:
    """What the compiler takes for ``rpc_sync``, ``rpc_async`` or ``remote``: it knows the reference's by identity."""
    return getattr(sys.modules["torch.distributed.rpc"], name)


def set_operator(function: Callable[..., Any], operator: str | None) -> None:
    """Let a Python function be an operator in script, or none again."""
    table = torch.jit._builtins._get_builtin_table()
    if operator is None:
        table.pop(id(function), None)
    else:
        table[id(function)] = operator


def type_of(annotation: Any, loc: Any = None) -> Any:
    """The type that an annotation means, at a place in a source."""
    return torch.jit.annotations.ann_to_type(annotation, loc or fake_range())


def type_of_values(python_class: type) -> Any:
    """The type of values of a Python class, if it is sure: of plain data, tensors and scripted classes; else None."""
    if issubclass(python_class, torch.Tensor):
        return types_of.TensorType.get()
    if python_class in {bool, int, float, complex, str}:
        return type_of(python_class)
    return torch.jit._state._get_script_class(python_class)


def infer(value: Any) -> Any:
    """The type that the compiler takes a value for; None if it knows none."""
    found = types_of._jit_try_infer_type(value)
    return found.type() if found.success() else None


def error(loc: Any, message: str) -> Exception:
    """An error at a place in a source."""
    return _frontend.FrontendError(loc or fake_range(), message)  # type: ignore[no-any-return]


def is_interface(value: Any) -> bool:
    """Whether something was made by ``torch.jit.interface``."""
    return isinstance(value, type) and "__torch_script_interface__" in vars(value)


def find_function(name: str) -> Any:
    """The scripted function of that qualified name; None if there is none."""
    return torch.jit._state._python_cu.find_function(name)


# Compiling what is ours.


def script(function: Any) -> Any:
    """As ``torch.jit.script``, without its warning."""
    return _script._script_impl(function)


def instantiate(template: types.FunctionType, meanings: Mapping[str, Any]) -> Any:
    """Script a function with other meanings for the names in it."""
    copy = types.FunctionType(template.__code__, {**template.__globals__, **meanings}, template.__name__)
    copy.__module__, copy.__qualname__ = template.__module__, template.__qualname__
    copy.__annotations__ = template.__annotations__
    return script(copy)


def set_unchecked(function: Any, name: str) -> None:
    """Let a scripted function take what it passes to a Python function of that name for that function's result, of
    whatever type it is; the Python function is not called. Operators check their arguments.
    """
    graph = function.graph
    for node in graph.findAllNodes("prim::PythonOp", True):
        if node.pyname() == name:
            with inserting(graph, node):
                made = graph.create("prim::unchecked_cast", [node.inputsAt(0)])
                made.output().setType(node.output().type())
                graph.insertNode(made)
            node.output().replaceAllUsesWith(made.output())
            node.destroy()


def ignored(function: Callable[..., Any], **annotations: Any) -> Any:
    """A Python function for use in script, with annotations that may be types of the compiler's."""

    def call(*args: Any) -> Any:
        return function(*args)

    # The compiler looks at the signature, so there has to be one.
    names = ", ".join(name for name in annotations if name != "return")
    space: dict[str, Any] = {"call": call}
    exec(f"def {function.__name__}({names}):\n    return call({names})", space)
    made = space[function.__name__]
    made.__annotations__ = annotations
    made.__module__ = function.__module__
    return torch.jit.ignore(made)


def instantiate_class(template: type, name: str, meanings: Mapping[str, Any]) -> Any:
    """Script a class under another name and with other meanings for the names in it; returns its type."""
    copy = type(template.__name__, (), dict(vars(template)) | {"__qualname__": template.__qualname__})
    qualified = f"__torch__.{template.__module__}.{name}"

    def meaning(word: str) -> Any:
        return meanings[word] if word in meanings else getattr(builtins, word, None)

    _script._compile_and_register_class(copy, meaning, qualified)
    return torch.jit._state._python_cu.get_class(qualified)


def set_python_class(name: str, python_class: type) -> None:
    """What values of a scripted class are in Python, when they come out of script."""
    torch.jit._state._name_to_pyclass[name] = python_class


def wrap_calls(call: Callable[..., Any]) -> None:
    """Let ``call(invoke, script, *args, **kwargs)`` make all calls from Python to scripted functions and methods."""
    for kind in (types_of.ScriptFunction, types_of.ScriptMethod):
        kind.__call__ = _wrapped(kind.__call__, call)


def _wrapped(invoke: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return call(invoke, self, *args, **kwargs)

    __call__.__doc__ = invoke.__doc__
    return __call__


def name_of(script: Any) -> str:
    """What tells a scripted function or method from all others."""
    if isinstance(script, types_of.ScriptFunction):
        return str(script.qualified_name)
    return f"{script.raw_owner._type().qualified_name()}.{script.name}"


@contextlib.contextmanager
def inserting(graph: Graph, node: Node) -> Iterator[None]:
    """Put new nodes in front of one."""
    with graph.insert_point_guard(node):
        yield
