"""docs/migration.md names every public name of the reference, and replacements that exist."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from functools import reduce
from pathlib import Path

import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.rpc import api, backend_registry, constants, functions, options

import backhaul as bh
from backhaul._migrate.names import EXPRESSIONS, LEFT, OPTION_NAMES, QUERIES, REPLACED

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch deprecates what this module of its own uses
    from torch.distributed.optim import DistributedOptimizer

PAGE = (Path(__file__).parent.parent.parent / "docs" / "migration.md").read_text()
HOMES = ("torch.distributed.rpc", "torch.distributed.autograd", "torch._C._distributed_")
SUPPORTED = {"forward", "forward_async", "remote_parameters", "get_module_rref", "init_from_module_rref"}
"""The methods of RemoteModule that do not raise in the reference; the first two are made on each object."""


def rows(section: str) -> dict[str, str]:
    """A table of the page: name -> replacement."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return {name: new.strip("`") for name, new in re.findall(r"^\| `(\w+)` \| (\S+) \|", text, re.MULTILINE)}


def public(thing: object) -> set[str]:
    """The names that a module, or a class itself, offers."""
    found = {name for name in vars(thing) if not name.startswith("_")}
    if not inspect.ismodule(thing):
        return found
    defined = {name for name in found if str(getattr(vars(thing)[name], "__module__", "")).startswith(HOMES)}
    inside = {name for name in found if getattr(vars(thing)[name], "__name__", "").startswith(f"{HOMES[0]}.")}
    return defined | inside | set(getattr(thing, "__all__", ()))


def test_every_public_name_is_there() -> None:
    modules = (rpc, api, functions, options, backend_registry)
    assert set().union(*map(public, modules)) - {"rpc_constants", "rpc_contants"} <= set(
        rows("Names of torch.distributed.rpc")
    )
    assert public(dist_autograd) <= set(rows("Names of torch.distributed.autograd"))
    assert {name for name in dir(rpc.RRef) if not name.startswith("_")} == set(rows("Methods of RRef"))
    assert {name for name in dir(rpc.TensorPipeRpcBackendOptions) if not name.startswith("_")} == set(rows("Options"))
    assert {name for name in vars(constants) if name.isupper() and name[0] != "_"} == set(rows("Constants"))
    classes = {"DistributedOptimizer", "RemoteModule", *public(DistributedOptimizer), *SUPPORTED}
    assert classes == set(rows("DistributedOptimizer and RemoteModule"))
    assert {name for name in SUPPORTED if not name.startswith("forward")} <= set(dir(RemoteModule))


def test_every_replacement_exists() -> None:
    found = [new for section in re.findall(r"^## (.*)$", PAGE, re.MULTILINE) for new in rows(section).values()]
    named = [new.split(".")[1:] for new in found if new != "—"]
    assert len(named) > 40
    for path in named:
        owner = reduce(getattr, path[:-1], bh)
        fields = {field.name for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
        assert path[-1] in fields or hasattr(owner, path[-1]), path


def test_the_codemod_knows_the_table() -> None:
    known = {name.rpartition(".")[2] for name in (*REPLACED, *LEFT, *EXPRESSIONS, *QUERIES)}
    listed = {
        name: new
        for section in ("Names of torch.distributed.rpc", "Names of torch.distributed.autograd")
        for name, new in rows(section).items()
    }
    replaced = {name.rpartition(".")[2]: f"bh.{new}" for name, new in REPLACED.items()}
    assert {name: listed.get(name, new) for name, new in replaced.items()} == replaced
    assert {name for name, new in listed.items() if new != "—"} <= known
    assert {old: f"bh.Options.{new}" for old, new in OPTION_NAMES.items()}.items() <= rows("Options").items()
