"""A torch that lacks a private name is refused with an error that names it, and no use of such a name is undeclared."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from backhaul import _torch_support
from backhaul._torch_support import CORE, NAMES, NEWEST, OLDEST, UNCHECKED, require
from backhaul.errors import UnsupportedTorchError

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "backhaul"
FEATURES = {
    "compat": "backhaul.compat",
    "_devices": "backhaul.cuda",
    "jit": "backhaul.jit",
    "_ops": "backhaul.remote_op",
    "profiler": "backhaul.profile",
}
"""By folder; all other files are of the core."""
FILES = {"_autograd/torch_engine/sharded.py": "torch.distributed.fsdp.fully_shard"}
"""Files that are of a feature, though their folders are of the core."""


# What is said.


def run(program: str) -> str:
    """What a program prints that runs in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_names_what_is_missing() -> None:
    program = """
        import torch
        del torch._C._storage_Use_Count, torch._C._nn._parse_to
        try:
            import backhaul
        except ImportError as error:
            print(type(error).__name__, error.torch_version == torch.__version__, *error.missing)
            print(error)
    """
    first, second = run(program).splitlines()
    assert first == "UnsupportedTorchError True torch._C._nn._parse_to torch._C._storage_Use_Count"
    assert second.startswith(f"torch {torch.__version__} lacks 2 of the private names that backhaul uses")
    assert "torch._C._nn._parse_to, torch._C._storage_Use_Count" in second
    assert "pip install 'torch>=" in second


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("torch._C._profiler.ActiveProfilerType", "import backhaul.compat.rpc"),
        ("torch._C._stash_obj_in_tls", "import backhaul.jit"),
        ("torch._C._AutoDispatchBelowAutograd", "bh.remote_op(torch.sin, to='worker1')"),
        ("torch.utils._python_dispatch.TorchDispatchMode", "bh.remote_op(torch.sin, to='worker1')"),
        ("torch._C._profiler._ExperimentalConfig", "bh.profile().start()"),
        ("torch._C._profiler._ExperimentalConfig", "bh.profiler.attach(torch.profiler.profile())"),
    ],
)
def test_a_feature_is_checked_when_it_is_used(name: str, use: str) -> None:
    program = f"""
        import torch
        del {name}
        import backhaul as bh
        with bh.cluster(2):
            print(bh.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)).item())
            try:
                {use}
            except bh.errors.UnsupportedTorchError as error:
                print(*error.missing)
    """
    assert run(program).splitlines() == ["2.0", name]


def test_devices_are_checked_when_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    from backhaul._devices.cuda import driver, process

    _torch_support._check.cache_clear()
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(driver, "identities", lambda: ("a device",))
    monkeypatch.delattr(torch.cuda, "_is_in_bad_fork")
    with pytest.raises(UnsupportedTorchError) as caught:
        process.identities()
    assert "torch.cuda._is_in_bad_fork" in caught.value.missing
    monkeypatch.setattr(driver, "identities", lambda: ())
    assert process.identities() == ()


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", f"{OLDEST[0]}.{OLDEST[1] - 1}.1+cpu")
    with pytest.raises(UnsupportedTorchError) as caught:
        require(CORE)
    assert caught.value.torch_version == torch.__version__
    assert caught.value.missing == ()


def test_a_torch_newer_than_the_tested_ones_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", f"{NEWEST[0]}.{NEWEST[1] + 1}.0a0")
    require(CORE)


def test_names_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    require(CORE)
    monkeypatch.setattr(_torch_support, "_exists", None)
    require(CORE)


@pytest.mark.parametrize("feature", [feature for feature in NAMES if feature != "backhaul.cuda"])
def test_every_name_is_really_looked_for(feature: str) -> None:
    """What answers to any name would hide that one is missing."""
    assert [name for name in NAMES[feature] if not _torch_support._exists(name)] == []
    assert [name for name in NAMES[feature] if _torch_support._exists(f"{name}_nonesuch")] == []


def test_pyproject_says_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={OLDEST[0]}.{OLDEST[1]}" in project["dependencies"]


# What the sources use.

PARSED = {path: ast.parse(path.read_text()) for path in sorted(SOURCES.rglob("*.py"))}
CLASSES = (  # whose private attributes are torch's, whatever they are looked up on
    torch.Tensor,
    torch.UntypedStorage,
    torch.nn.Module,
    torch.futures.Future,
    torch._C.ScriptModule,
    torch._C.ScriptObject,
    torch._ops.OpOverload,
    torch._C._functions.AccumulateGrad,  # type: ignore[attr-defined]
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imports_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What names of a module stand for, as far as imports say."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def looked_up(node: ast.AST) -> tuple[ast.AST | None, str]:
    """On what an expression looks up which attribute; None and "" if it is another expression."""
    match node:
        case ast.Attribute(value=place, attr=name):
            return place, name
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[place, ast.Constant(value=str(name)), *_]):
            return place, name
    return None, ""


def dotted(node: ast.AST, known: dict[str, str]) -> str | None:
    """What an expression stands for, if it is a name that is known, or an attribute of one."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    place, name = looked_up(node)
    base = dotted(place, known) if place is not None else None
    return f"{base}.{name}" if base is not None else None


def assigned_in(path: Path, known: dict[str, str]) -> dict[str, str]:
    """Names that stand for something known since they are assigned at the top of a module."""
    found = {}
    for node in PARSED[path].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            what = dotted(node.value, known | found)
            if what is not None:
                found[node.target.id] = what
    return found


IMPORTED = {path: dict(imports_of(tree)) for path, tree in PARSED.items()}
ASSIGNED = {path: assigned_in(path, known) for path, known in IMPORTED.items()}


def known_in(path: Path) -> dict[str, str]:
    """What names of a module stand for, also where they are assigned in another of ours and imported from there."""
    known = IMPORTED[path] | ASSIGNED[path]
    for name, what in known.items():
        module, _, attribute = what.rpartition(".")
        origin = ASSIGNED.get(SOURCES.parent / f"{module.replace('.', '/')}.py", {})
        known[name] = origin.get(attribute, what)
    return known


def own_names() -> set[str]:
    """Names that the sources define somewhere."""
    found = set()
    for tree in PARSED.values():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    found.add(node.name)
                case ast.Attribute(ctx=ast.Store(), value=ast.Name(id="self" | "cls"), attr=name):
                    found.add(name)
                case ast.Name(ctx=ast.Store(), id=name):
                    found.add(name)
    return found


OWN = own_names() | {"_fields", "_replace"}  # and Python's, of named tuples


def private_names(path: Path) -> Iterator[tuple[str, int]]:
    """Private names of torch that a file uses, below ``torch``, with their lines; ``.name`` where an attribute of an
    instance is looked up.
    """
    known = known_in(path)
    for node in ast.walk(PARSED[path]):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute | ast.Call):
            names = [dotted(node, known) or ""]
        for name in names:
            head, _, rest = name.partition(".")
            parts = [part for part in rest.split(".") if not part.startswith("__")]
            if head == "torch" and any(map(is_private, parts)):
                yield ".".join(parts), node.lineno
        place, name = looked_up(node)
        if place is not None and is_private(name) and dotted(node, known) is None:
            mine = isinstance(place, ast.Name) and place.id in ("self", "cls")
            if name not in OWN or (not mine and any(hasattr(each, name) for each in CLASSES)):
                yield f".{name}", node.lineno


def feature_of(path: Path) -> str:
    inner = path.relative_to(SOURCES)
    return FILES.get(inner.as_posix()) or FEATURES.get(inner.parts[0], CORE)


def covers(declared: str, used: str) -> bool:
    """Whether a declared name is the one that is used, or lies below it, as a function does below its module."""
    if used.startswith("."):
        return declared.endswith(used)
    return declared == used or declared.startswith(f"{used}.")


@pytest.mark.parametrize("path", PARSED, ids=lambda path: str(path.relative_to(SOURCES)))
def test_every_private_name_is_declared(path: Path) -> None:
    declared = {*NAMES[CORE], *NAMES[feature_of(path)], *UNCHECKED}
    undeclared = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for name, line in private_names(path)
        if not any(covers(each, name) for each in declared)
    ]
    assert undeclared == [], "declare them in torch_support.py"


@pytest.mark.parametrize("feature", NAMES)
def test_every_declared_name_is_used(feature: str) -> None:
    used = {name for path in PARSED if feature_of(path) == feature for name, _ in private_names(path)}
    assert [name for name in NAMES[feature] if not any(covers(name, each) for each in used)] == []


def test_every_name_that_is_not_checked_is_used() -> None:
    used = {name for path in PARSED for name, _ in private_names(path)}
    assert [name for name in UNCHECKED if not any(covers(name, each) for each in used)] == []
