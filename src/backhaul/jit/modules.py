"""Modules of other workers, for use in script.

The compiler wants functions with a source, and the same ones on both workers. So each interface gets functions of its
own, written here, and the worker that has the module is asked to write them too.
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
    return rpc_async(self.module_rref.owner_name(), {name}_there, (self.module_rref, {names}))

def {name}(self, {parameters}) -> Result_{name}:
    return rpc_async(self.module_rref.owner_name(), {name}_there, (self.module_rref, {names})).wait()
"""
_CALLEE = """
def {name}_there(module_rref: Reference, {parameters}) -> Result_{name}:
    return module_rref.local_value().{name}({names})
"""
_REFUSAL = """
def __getstate__(self) -> str:
    raise RuntimeError(
        "Passing a script RemoteModule over RPC is not supported. A RemoteModule can only be pickled when using RPC, "
        "before it is scripted"
    )

def __setstate__(self, state: str) -> None:
    raise RuntimeError("a script RemoteModule cannot be loaded")
"""

_lock = threading.RLock()  # guards _classes and _files
_classes: dict[type, type[torch.nn.Module]] = {}
_files = itertools.count()


def remote_module(module: RRef[Any], interface: type) -> torch.nn.Module:
    """A module for ``torch.jit.script``, whose methods run on a scripted module of another worker.

    It has the methods of the interface, and each in a form with ``_async`` behind its name that gives a future. The
    result is a module like any other: script it, or make it part of one that is scripted.

    Args:
        module: Refers to a scripted module.
        interface: A ``torch.jit.interface`` that the module has; it has to be importable on that module's worker.

    Raises:
        TypeError: That is none.
    """
    if not torch_compiler.is_interface(interface):
        raise TypeError(f"{interface!r} is not a torch.jit.interface")
    made = _class_for(interface)()
    rpc_sync(module.owner(), prepare, (interface,))
    vars(made)["module_rref"] = module
    return made


def prepare(interface: type) -> None:
    """Runs on the worker that has the module: there have to be the functions that are going to be called."""
    _class_for(interface)


def _class_for(interface: type) -> type[torch.nn.Module]:
    with _lock:
        found = _classes.get(interface)
        if found is None:
            found = _classes[interface] = _write(interface)
        return found


def _write(interface: type) -> type[torch.nn.Module]:
    names = [name for name, value in vars(interface).items() if inspect.isfunction(value) and name[0] != "_"]
    space: dict[str, Any] = {
        "rpc_async": rpc_async,
        "Reference": RRef[interface],  # type: ignore[valid-type]
        "__name__": _home_of(interface),
    }
    callers, callees = [_REFUSAL], []
    for name in names:
        function = vars(interface)[name]
        parts = _describe(name, function, space)
        callers.append(_CALLER.format(**parts))
        callees.append(_CALLEE.format(**parts))
    _run("".join(callees), space)
    for name in names:
        space[f"{name}_there"] = torch_compiler.script(space[f"{name}_there"])
    _run("".join(callers), space)
    methods = {made: space[made] for name in names for made in (name, f"{name}_async")}
    methods |= {name: space[name] for name in ("__getstate__", "__setstate__")}
    for method in methods.values():
        torch.jit.export(method)
    return type(
        f"Remote{interface.__name__}",
        (torch.nn.Module,),
        {**methods, "__annotations__": {"module_rref": space["Reference"]}, "__module__": _home_of(interface)},
    )


def _home_of(interface: type) -> str:
    """The module that the functions are in, as it were: names of scripted functions are the same on all workers."""
    return f"{__name__}.{interface.__module__}.{interface.__qualname__}".replace("<locals>", "locals")


def _describe(name: str, function: Any, space: dict[str, Any]) -> dict[str, str]:
    """The parts of the templates, for one method. What they refer to is put into ``space``."""
    hints = typing.get_type_hints(function)
    result = hints.get("return", torch.Tensor)
    space[f"Result_{name}"] = result
    space[f"Future_{name}"] = torch.futures.Future[result]  # type: ignore[valid-type]
    parameters, names = [], []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        space[f"{name}_{parameter.name}"] = hints.get(parameter.name, torch.Tensor)
        text = f"{parameter.name}: {name}_{parameter.name}"
        if parameter.default is not parameter.empty:
            space[f"default_{name}_{parameter.name}"] = parameter.default
            text += f" = default_{name}_{parameter.name}"
        parameters.append(text)
        names.append(parameter.name)
    return {"name": name, "parameters": ", ".join(parameters), "names": "".join(f"{each}, " for each in names)}


def _run(source: str, space: dict[str, Any]) -> None:
    file = f"<backhaul.jit.modules {next(_files)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), space)
