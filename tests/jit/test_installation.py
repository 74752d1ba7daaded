"""Changes to torch's compiler, and their removal."""

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
    """Runs a program in its own process; returns what it printed."""

    def start(program: str) -> str:
        file = tmp_path / "program.py"  # the compiler needs source code
        file.write_text(textwrap.dedent(program))
        command = [sys.executable, "-W", "error", "-W", "ignore:`torch.jit", str(file)]
        path = os.pathsep.join([str(ROOT), *sys.path])
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": path}
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return start


def test_backhaul_does_not_import_it(run: Run) -> None:
    assert run("import sys, backhaul; print('backhaul.jit' in sys.modules)") == "False\n"


def test_torch_without_torchscript(run: Run) -> None:
    program = """
        import torch, backhaul
        del torch.jit.script
        import backhaul.compat.rpc
        try:
            import backhaul.jit
        except ImportError as error:
            print(error)
    """
    assert "has no TorchScript (torch.jit.script)" in run(program)


def test_torch_with_an_unsupported_torchscript(run: Run) -> None:
    program = """
        import torch, torch._jit_internal, backhaul
        del torch._C._jit_set_emit_hooks
        try:
            import backhaul.jit
        except ImportError as error:
            print(type(error).__name__, error, *error.__notes__)
    """
    printed = run(program)
    assert printed.startswith("UnsupportedTorchError ")
    assert "torch._C._jit_set_emit_hooks" in printed
    assert "the rest of backhaul works without it" in printed


def test_uninstall_and_install_again() -> None:
    def backhaul_call(a: torch.Tensor) -> torch.Tensor:
        return bh.rpc_sync("worker1", blend, (a, a))

    closure, annotation = torch._jit_internal.get_closure, torch.jit.annotations.try_ann_to_type
    backhaul.jit.uninstall()
    try:
        backhaul.jit.uninstall()  # the second call does nothing
        assert torch._jit_internal.get_closure is not closure
        assert torch._jit_internal.get_closure.__module__ == "torch._jit_internal"
        assert torch.jit.annotations.try_ann_to_type is not annotation
        assert isinstance(torch._C._jit_try_infer_type, types.BuiltinFunctionType)
        assert torch._C._jit_get_emit_hooks() == (None, None)
        assert torch.jit._builtins._find_builtin(bh.backward) is None
        with pytest.raises(Exception, match=r"rpc_sync|source|keyword-only"):
            script(backhaul_call)
        with bh.cluster(2):  # functions that were scripted before still work
            torch.testing.assert_close(
                functions.sync("worker1", torch.ones(1), torch.ones(1)), blend(*[torch.ones(1)] * 2)
            )
    finally:
        backhaul.jit.install()
        backhaul.jit.install()
    with bh.cluster(2):
        torch.testing.assert_close(script(backhaul_call)(torch.ones(1)), blend(torch.ones(1), torch.ones(1)))


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


def test_only_the_compiler_sees_replaced_names() -> None:
    reference = torch.distributed.rpc.rpc_sync

    def backhaul_call(a: torch.Tensor) -> torch.Tensor:
        return bh.rpc_sync("worker1", blend, (a, a))

    script(backhaul_call)
    assert torch.distributed.rpc.rpc_sync is reference
    assert bh.rpc_sync is backhaul._rpc.api.rpc_sync
    assert backhaul_call.__globals__["bh"] is bh


def test_two_apis_in_one_function() -> None:
    from backhaul.compat import rpc as compat

    def mixed(a: torch.Tensor) -> torch.Tensor:
        return bh.rpc_sync("worker1", blend, (a, a)) + compat.rpc_sync("worker1", blend, (a, a))

    with pytest.raises(RuntimeError, match=r"makes calls with backhaul and backhaul\.compat\.rpc"):
        script(mixed)


def test_torch_distributed_rpc_still_works(run: Run) -> None:
    """A program may use torch.distributed.rpc itself in the same process."""

    def torch_call(a: torch.Tensor) -> torch.Tensor:
        return torch.distributed.rpc.rpc_sync("worker1", blend, (a, a))

    text = str(script(torch_call).graph)
    assert "prim::rpc_sync" in text
    assert "backhaul" not in text
    program = """
        import tempfile, warnings
        import torch, torch.distributed.rpc as rpc, backhaul as bh, backhaul.jit
        from tests.jit.functions import blend, script, sync

        @script
        def torch_calls(a: torch.Tensor) -> torch.Tensor:
            return rpc.rpc_sync("single", blend, (a, a)) + rpc.remote("single", blend, (a, a)).to_here()

        @script
        def fetch(rref: rpc.RRef[torch.Tensor]) -> torch.Tensor:
            return rref.to_here()

        with tempfile.NamedTemporaryFile() as file:
            options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file.name}")
            warnings.simplefilter("ignore")  # torch warns that its RPC is deprecated
            rpc.init_rpc("single", rank=0, world_size=1, rpc_backend_options=options)
            ones = torch.ones(1)
            with bh.cluster(2):
                assert torch.equal(torch_calls(ones), 2 * sync("worker1", ones, ones))
                assert torch.equal(fetch(rpc.RRef(ones)), ones)
            rpc.shutdown()
        print("done")
    """
    assert run(program) == "done\n"


def test_a_script_leaves_no_thread_state() -> None:
    """The worker and context that a script carries along are removed from the thread when the script ends."""
    with bh.cluster(2), bh.context():
        functions.after_wait("worker1", torch.ones(1), torch.ones(1, requires_grad=True))
        assert saved("backhaul") is None
        with pytest.raises(torch.jit.Error, match="too many"):
            functions.fail(torch.ones(2))
        assert saved("backhaul") is None


def test_scripts_without_calls_are_not_changed(run: Run, tmp_path: Path) -> None:
    """They can be saved, and loaded by a program that does not import Backhaul."""

    def double(a: torch.Tensor) -> torch.Tensor:
        return a * 2

    class Forks(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return torch.jit.fork(double, a).wait()

    made = script(Forks())
    assert "backhaul" not in str(made.graph)
    made.save(str(tmp_path / "forks.pt"))
    # Exits at once: torch's threads for forks may abort Python while it is finalized ("terminate called ...").
    load = f"torch.jit.load({str(tmp_path / 'forks.pt')!r})(torch.ones(1)).item()"
    assert run(f"import os, torch; print({load}, flush=True); os._exit(0)") == "2.0\n"


def test_public_names() -> None:
    assert sorted(backhaul.jit.__all__) == ["install", "remote_module", "uninstall"]
    assert all(getattr(backhaul.jit, name).__doc__ for name in backhaul.jit.__all__)
