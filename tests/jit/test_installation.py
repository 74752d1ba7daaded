"""What is done to torch's compiler, and undone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.rpc

import backhaul as bh
import backhaul.jit
from backhaul.jit.thread_state import saved

from . import functions
from .functions import blend, script

ROOT = Path(__file__).parents[2]

Run = Callable[[str], str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a program in a process of its own; returns what it printed."""

    def start(program: str) -> str:
        file = tmp_path / "program.py"  # the compiler wants a source
        file.write_text(textwrap.dedent(program))
        command = [sys.executable, "-W", "error", "-W", "ignore:`torch.jit", str(file)]
        path = os.pathsep.join([str(ROOT), *sys.path])
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": path}
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return start


def test_backhaul_does_without_it(run: Run) -> None:
    assert run("import sys, backhaul; print('backhaul.jit' in sys.modules)") == "False\n"


def test_where_there_is_no_torchscript(run: Run) -> None:
    program = """
        import torch, backhaul
        del torch.jit.script
        import backhaul.compat.rpc
        try:
            import backhaul.jit
        except ImportError as error:
            print(error)
    """
    assert "has no TorchScript (torch.jit.script) here" in run(program)


def test_where_torchscript_is_another(run: Run) -> None:
    program = """
        import torch, torch._jit_internal, backhaul
        del torch._C._jit_set_emit_hooks
        try:
            import backhaul.jit
        except ImportError as error:
            print(type(error).__name__, error, *error.__notes__)
    """
    said = run(program)
    assert said.startswith("UnsupportedTorchError ")
    assert "torch._C._jit_set_emit_hooks" in said
    assert "the rest of backhaul works without it" in said


def test_it_can_be_removed_and_put_back() -> None:
    def ours(a: torch.Tensor) -> torch.Tensor:
        return bh.rpc_sync("worker1", blend, (a, a))

    closure, annotation = torch._jit_internal.get_closure, torch.jit.annotations.try_ann_to_type
    backhaul.jit.uninstall()
    try:
        backhaul.jit.uninstall()  # for the second time, nothing
        assert torch._jit_internal.get_closure is not closure
        assert torch._jit_internal.get_closure.__module__ == "torch._jit_internal"
        assert torch.jit.annotations.try_ann_to_type is not annotation
        assert isinstance(torch._C._jit_try_infer_type, types.BuiltinFunctionType)
        assert torch._C._jit_get_emit_hooks() == (None, None)
        assert torch.jit._builtins._find_builtin(bh.backward) is None
        with pytest.raises(Exception, match=r"rpc_sync|source|keyword-only"):
            script(ours)
        with bh.cluster(2):  # what was scripted before goes on working
            torch.testing.assert_close(
                functions.sync("worker1", torch.ones(1), torch.ones(1)), blend(*[torch.ones(1)] * 2)
            )
    finally:
        backhaul.jit.install()
        backhaul.jit.install()
    with bh.cluster(2):
        torch.testing.assert_close(script(ours)(torch.ones(1)), blend(torch.ones(1), torch.ones(1)))


def test_hooks_of_others_are_called_too() -> None:
    seen = []
    backhaul.jit.uninstall()
    torch._C._jit_set_emit_hooks(lambda module: None, lambda function: seen.append(function.name))
    try:
        backhaul.jit.install()

        def fresh(a: torch.Tensor) -> torch.Tensor:
            return bh.rpc_sync("worker1", blend, (a, a))

        assert "backhaul::rpc_sync" in str(script(fresh).graph)
        assert "fresh" in seen
    finally:
        backhaul.jit.uninstall()
        torch._C._jit_set_emit_hooks(None, None)
        backhaul.jit.install()


def test_names_are_shown_to_the_compiler_alone() -> None:
    reference = torch.distributed.rpc.rpc_sync

    def ours(a: torch.Tensor) -> torch.Tensor:
        return bh.rpc_sync("worker1", blend, (a, a))

    script(ours)
    assert torch.distributed.rpc.rpc_sync is reference
    assert bh.rpc_sync is backhaul._rpc.api.rpc_sync
    assert ours.__globals__["bh"] is bh


def test_both_packages_in_one_function() -> None:
    from backhaul.compat import rpc as compat

    def mixed(a: torch.Tensor) -> torch.Tensor:
        return bh.rpc_sync("worker1", blend, (a, a)) + compat.rpc_sync("worker1", blend, (a, a))

    with pytest.raises(RuntimeError, match=r"makes calls with backhaul and backhaul\.compat\.rpc"):
        script(mixed)


def test_the_reference_stays_the_reference(run: Run) -> None:
    """A program that uses torch.distributed.rpc itself, in the same process."""

    def theirs(a: torch.Tensor) -> torch.Tensor:
        return torch.distributed.rpc.rpc_sync("worker1", blend, (a, a))

    text = str(script(theirs).graph)
    assert "prim::rpc_sync" in text
    assert "backhaul" not in text
    program = """
        import tempfile, warnings
        import torch, torch.distributed.rpc as rpc, backhaul as bh, backhaul.jit
        from tests.jit.functions import blend, script, sync

        @script
        def theirs(a: torch.Tensor) -> torch.Tensor:
            return rpc.rpc_sync("alone", blend, (a, a)) + rpc.remote("alone", blend, (a, a)).to_here()

        @script
        def bring(rref: rpc.RRef[torch.Tensor]) -> torch.Tensor:
            return rref.to_here()

        with tempfile.NamedTemporaryFile() as file:
            options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file.name}")
            warnings.simplefilter("ignore")  # torch warns of itself
            rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
            ones = torch.ones(1)
            with bh.cluster(2):
                assert torch.equal(theirs(ones), 2 * sync("worker1", ones, ones))
                assert torch.equal(bring(rpc.RRef(ones)), ones)
            rpc.shutdown()
        print("done")
    """
    assert run(program) == "done\n"


def test_nothing_hangs_on_threads_when_all_is_over() -> None:
    """What is current for a script is not for what follows it on the same thread."""
    with bh.cluster(2), bh.context():
        functions.after_wait("worker1", torch.ones(1), torch.ones(1, requires_grad=True))
        assert saved("backhaul") is None
        with pytest.raises(torch.jit.Error, match="too many"):
            functions.fail(torch.ones(2))
        assert saved("backhaul") is None


def test_other_scripts_are_what_they_are_without_it(run: Run, tmp_path: Path) -> None:
    """They can be saved here and loaded where there is no Backhaul."""

    def double(a: torch.Tensor) -> torch.Tensor:
        return a * 2

    class Forks(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return torch.jit.fork(double, a).wait()

    made = script(Forks())
    assert "backhaul" not in str(made.graph)
    made.save(str(tmp_path / "forks.pt"))
    # Ends at once: torch's threads for forks may abort an interpreter that is being finalized ("terminate called ...").
    load = f"torch.jit.load({str(tmp_path / 'forks.pt')!r})(torch.ones(1)).item()"
    assert run(f"import os, torch; print({load}, flush=True); os._exit(0)") == "2.0\n"


def test_public_names() -> None:
    assert sorted(backhaul.jit.__all__) == ["install", "remote_module", "uninstall"]
    assert all(getattr(backhaul.jit, name).__doc__ for name in backhaul.jit.__all__)
