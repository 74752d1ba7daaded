"""Print versions and settings, to paste into a bug report.

There are no secrets, host names, user names or paths of home folders in it.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import backhaul
from backhaul._command import machine
from backhaul._command.output import FINE, Output

if TYPE_CHECKING:
    from rich.console import RenderableType

# Of the environment, only what changes how Backhaul or torch works.
_VARIABLES = re.compile(
    r"BACKHAUL_\w+|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(OMP|MKL)_NUM_THREADS|CUDA_VISIBLE_DEVICES|CXX"
    r"|PYTORCH_\w+|TORCH_\w+|TORCHELASTIC_USE_AGENT_STORE|SLURM_(PROCID|NTASKS|STEP_NUM_TASKS)|PMI_(RANK|SIZE)"
    r"|OMPI_COMM_WORLD_(RANK|SIZE)|JOB_COMPLETION_INDEX|PYTHONDONTWRITEBYTECODE|PYTHONWARNINGS"
)
_HIDDEN = re.compile(r"SECRET|TOKEN|PASSWORD|KEY|ADDR|SSH|ENDPOINT|HOST")


def add_arguments(parser: ArgumentParser) -> None:
    """There are none."""


def main(given: Namespace, output: Output) -> int:
    """Print the report."""
    found = collect(os.environ)
    output.report(found, lambda: _table(found))
    return FINE


def collect(environ: Mapping[str, str]) -> dict[str, Any]:
    """The report."""
    state, details = machine.core_state()
    torch = machine.torch_facts()
    limits = {**machine.limits(), "processes_of_container": machine.process_limit()}
    shared = machine.shared_memory_bytes()
    packages = (*machine.PACKAGES, *(name for names in machine.EXTRAS.values() for name in names), "numpy")
    return {
        "backhaul": backhaul.__version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": torch.get("version", "not installed"),
        "torch_cuda": torch.get("cuda") or torch.get("hip") or "none",
        "native_core": f"{state}: {_masked(details)}" if details else state,
        "compiler": machine.compiler() or "none",
        **machine.system_facts(),
        "processors": machine.processors(),
        "memory": machine.show_bytes(machine.memory_bytes()),
        "dev_shm": "none" if shared is None else machine.show_bytes(shared),
        "gpus": machine.gpus(),
        "limits": limits,
        "packages": {name: machine.version_of(name) for name in packages},
        "environment": {name: _shown(name, environ[name]) for name in sorted(environ) if _VARIABLES.fullmatch(name)},
    }


def _shown(name: str, value: str) -> str:
    """The value of a variable; of those that may tell too much, only that they are set."""
    if _HIDDEN.search(name):
        return f"set ({len(value)} characters)" if value else "set, but empty"
    return _masked(value)


def _masked(text: str) -> str:
    """Without the home folder, the name of the user, and that of this host."""
    text = text.replace(str(Path.home()), "~") if str(Path.home()) != "/" else text
    for name, instead in ((_user(), "USER"), (socket.gethostname(), "HOST")):
        if len(name) > 2 and name != "root":
            text = re.sub(rf"\b{re.escape(name)}\b", instead, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        return ""


def _table(found: Mapping[str, Any]) -> RenderableType:
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in found.items():
        table.add_row(name.replace("_", " "), escape(_text(value)))
    return table


def _text(value: Any) -> str:
    match value:
        case {"open_files": _}:
            return _listed(value, "unlimited")
        case {"rich": _}:
            return _listed(value, "not installed")
        case Mapping():
            return "\n".join(f"{name}={each}" for name, each in value.items()) or "nothing set"
        case list():
            return "\n".join(value) or "none"
        case float():
            return f"{value:g}"
    return str(value)


def _listed(values: Mapping[str, Any], absent: str) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {absent if each is None else each}" for name, each in values.items())
