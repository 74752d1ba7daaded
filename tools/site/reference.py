"""The pages of the API reference. Their text is in the docstrings; which names there are, in the packages."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.site.navigation import toctree


class Page(NamedTuple):
    """One page: its file, its title, and the names on it."""

    file: str
    title: str
    package: str
    names: tuple[str, ...]


_GROUPS: dict[str, tuple[str, ...]] = {
    "Workers": (
        *("init", "shutdown", "serve", "leave", "launch", "cluster", "get_address", "on_membership"),
        *("MembershipEvent", "Worker", "WorkerInfo", "current_worker"),
        *("get_worker_info", "get_worker_infos", "get_debug_info"),
    ),
    "Calls": (
        *("rpc_sync", "rpc_async", "remote", "RRef", "Future", "wait_all", "collect_all", "async_execution", "expose"),
        *("Retry", "deadline", "time_left", "cancelled", "compression"),
    ),
    "Gradients": ("context", "ContextHandle", "backward", "get_gradients", "Replay", "retry_step", "remote_op"),
    "Options": ("Options", "Security", "Tls", "Liveness", "Devices", "Limits", "Codec"),
}
"""The names of ``backhaul`` itself, by what they are for. The others come on a page of their own."""

PACKAGES = {
    "backhaul.nn": "Modules on other workers",
    "backhaul.optim": "Optimizers",
    "backhaul.profiler": "Profiles",
    "backhaul.otel": "OpenTelemetry",
    "backhaul.ray": "Ray",
    "backhaul.jit": "TorchScript",
}


def public_names(package: str) -> list[str]:
    """The public names of a package that are not packages themselves."""
    module = importlib.import_module(package)
    return [name for name in module.__all__ if not inspect.ismodule(getattr(module, name)) and name != "__version__"]


def error_names() -> list[str]:
    """The errors, base classes first, in the order of ``backhaul.errors``."""
    module = importlib.import_module("backhaul.errors")
    return [name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__]


def pages() -> Iterator[Page]:
    """All pages of the reference."""
    errors = set(error_names())
    elsewhere = {name for package in PACKAGES for name in public_names(package)}
    left = [name for name in public_names("backhaul") if name not in errors | elsewhere]
    for title, names in _GROUPS.items():
        yield Page(title.lower(), title, "backhaul", names)
        left = [name for name in left if name not in names]
    if left:
        yield Page("more", "More", "backhaul", tuple(left))
    for package, title in PACKAGES.items():
        yield Page(package.rpartition(".")[2], title, package, tuple(public_names(package)))
    yield Page("errors", "Errors", "backhaul.errors", tuple(error_names()))


def write(target: Path) -> None:
    """Write the pages, and an index of all names."""
    target.mkdir(parents=True, exist_ok=True)
    index = ["# API reference", "", "Every public name. `bh` is `import backhaul as bh`.", ""]
    files = []
    for page in pages():
        files.append(page.file)
        short = page.package.replace("backhaul", "bh", 1)
        links = [f"[`{name}`](#{page.package}.{name})" for name in page.names]
        index += [f"**[{page.title}]({page.file}.md)** (`{short}`): {', '.join(links)}", ""]
        text = [f"# {page.title}", "", *(_entry(page.package, name) for name in page.names)]
        (target / f"{page.file}.md").write_text("\n".join(text))
    (target / "index.md").write_text("\n".join([*index, toctree(files)]))


def _entry(package: str, name: str) -> str:
    thing = getattr(importlib.import_module(package), name)
    if inspect.isclass(thing):
        options = "   :members:\n"
        if issubclass(thing, BaseException):
            options += "   :show-inheritance:\n"
        return f"```{{eval-rst}}\n.. autoclass:: {package}.{name}\n{options}```\n"
    kind = "autofunction" if callable(thing) else "autodata"
    return f"```{{eval-rst}}\n.. {kind}:: {package}.{name}\n```\n"
