"""Modules of other workers, for use in script.

The compiler requires functions that have source code and that are the same on both workers. So this module generates
functions for each interface, and asks the worker that owns the remote module to generate them too.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import threading
import typing
from typing import Any

import torch

from backhaul._rpc.api import rpc_async, rpc_sync
from backhaul._rref.handle import RRef
from backhaul.jit import torch_compiler

_CALLER = """
def {name}_async(self, {parameters}) -> Future_{name}:
    return rpc_async(self.module_rref.owner_name(), {name}_on_owner, (self.module_rref, {names}))

def {name}(self, {parameters}) -> Result_{name}:
    return rpc_async(self.module_rref.owner_name(), {name}_on_owner, (self.module_rref, {names})).wait()
"""
_CALLEE = """
def {name}_on_owner(module_rref: Reference, {parameters}) -> Result_{name}:
    return module_rref.local_value().{name}({names})
"""
_PICKLE_METHODS = """
def __getstate__(self) -> str:
    raise RuntimeError(
        "Passing a script RemoteModule over RPC is not supported. A RemoteModule can only be pickled when using RPC, "
        "before it is scripted"
    )

def __setstate__(self, state: str) -> None:
    raise RuntimeError("Loading a script RemoteModule is not supported. Make and script it on the worker that uses it")
"""

_lock = threading.RLock()  # guards _classes and _file_numbers
_classes: dict[type, type[torch.nn.Module]] = {}
_file_numbers = itertools.count()


def remote_module(module: RRef[Any], interface: type) -> torch.nn.Module:
    """Make a module for ``torch.jit.script`` whose methods run a scripted module of another worker.

    It has each method of the interface twice: under its name, and with the suffix ``_async``, which returns a future.
    The result is an ordinary module: script it, or make it part of a module that is scripted.

    Args:
        module: A reference to a scripted module.
        interface: A ``torch.jit.interface`` that the module implements. The worker of the module must be able to
            import it.

    Raises:
        TypeError: ``interface`` is not a ``torch.jit.interface``.

    Example:
        >>> import torch, backhaul as bh, backhaul.jit
        >>> from layers import Layer, LayerInterface  # doctest: +SKIP
        >>> with bh.cluster(2):  # doctest: +SKIP
        ...     layer = bh.remote("worker1", Layer)  # it returns torch.jit.script(...)
        ...     torch.jit.script(bh.jit.remote_module(layer, LayerInterface))(torch.ones(2))
        tensor([3., 3.])
    """
    if not torch_compiler.is_interface(interface):
        raise TypeError(f"{interface!r} is not a torch.jit.interface: decorate the class with @torch.jit.interface")
    made = _class_for(interface)()
    rpc_sync(module.owner(), generate_functions, (interface,))
    vars(made)["module_rref"] = module
    return made


def generate_functions(interface: type) -> None:
    """Generate the functions that the caller's methods call. Runs on the worker that owns the module."""
    _class_for(interface)


def _class_for(interface: type) -> type[torch.nn.Module]:
    with _lock:
        found = _classes.get(interface)
        if found is None:
            found = _classes[interface] = _generate(interface)
        return found


def _generate(interface: type) -> type[torch.nn.Module]:
    names = [name for name, value in vars(interface).items() if inspect.isfunction(value) and name[0] != "_"]
    namespace: dict[str, Any] = {
        "rpc_async": rpc_async,
        "Reference": RRef[interface],  # type: ignore[valid-type]
        "__name__": _module_name_for(interface),
    }
    callers, callees = [_PICKLE_METHODS], []
    for name in names:
        function = vars(interface)[name]
        parts = _template_values(name, function, namespace)
        callers.append(_CALLER.format(**parts))
        callees.append(_CALLEE.format(**parts))
    _run("".join(callees), namespace)
    for name in names:
        namespace[f"{name}_on_owner"] = torch_compiler.script(namespace[f"{name}_on_owner"])
    _run("".join(callers), namespace)
    methods = {method: namespace[method] for name in names for method in (name, f"{name}_async")}
    methods |= {name: namespace[name] for name in ("__getstate__", "__setstate__")}
    for method in methods.values():
        torch.jit.export(method)
    return type(
        f"Remote{interface.__name__}",
        (torch.nn.Module,),
        {
            **methods,
            "__annotations__": {"module_rref": namespace["Reference"]},
            "__module__": _module_name_for(interface),
        },
    )


def _module_name_for(interface: type) -> str:
    """The ``__name__`` of a module for the generated functions, which does not exist.

    It depends on the interface only, so that the scripted functions have the same qualified name on all workers.
    """
    return f"{__name__}.{interface.__module__}.{interface.__qualname__}".replace("<locals>", "locals")


def _template_values(name: str, function: Any, namespace: dict[str, Any]) -> dict[str, str]:
    """The values to fill the templates with, for one method. Adds what they refer to to ``namespace``."""
    hints = typing.get_type_hints(function)
    result = hints.get("return", torch.Tensor)
    namespace[f"Result_{name}"] = result
    namespace[f"Future_{name}"] = torch.futures.Future[result]  # type: ignore[valid-type]
    parameters, names = [], []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        namespace[f"{name}_{parameter.name}"] = hints.get(parameter.name, torch.Tensor)
        text = f"{parameter.name}: {name}_{parameter.name}"
        if parameter.default is not parameter.empty:
            namespace[f"default_{name}_{parameter.name}"] = parameter.default
            text += f" = default_{name}_{parameter.name}"
        parameters.append(text)
        names.append(parameter.name)
    return {"name": name, "parameters": ", ".join(parameters), "names": "".join(f"{each}, " for each in names)}


def _run(source: str, namespace: dict[str, Any]) -> None:
    """Execute generated code. The compiler finds its source in ``linecache``."""
    file = f"<backhaul.jit.modules {next(_file_numbers)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), namespace)
