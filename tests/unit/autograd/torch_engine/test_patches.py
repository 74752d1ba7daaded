"""Canaries of what autograd patches in torch: each patch is there while a worker runs and at no other time, and torch
still has the name that is patched, with the shape that the patch relies on. ``docs/patches.md`` lists all patches.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.autograd.function import _HookMixin
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

from backhaul._autograd.torch_engine import hooks, patches
from backhaul._autograd.torch_engine.hooks import node_hooks
from backhaul._autograd.torch_engine.reducers import reducers

STATES = """
    import signal, sys, warnings
    import torch
    from torch.autograd.function import _HookMixin
    from torch.nn.modules import module
    from torch.nn.parallel import distributed

    def state():
        return (
            torch._C._current_graph_task_id,
            torch._C._will_engine_execute_node,
            vars(_HookMixin)["_register_hook"],
            torch.autograd.graph._engine_run_backward,
            torch.autograd._engine_run_backward,
            vars(distributed._DDPSink)["backward"],
            len(module._global_module_registration_hooks),
            signal.getsignal(signal.SIGINT),
            sys.excepthook,
            sys.unraisablehook,
            sys.gettrace(),
            list(warnings.filters),
        )

    before = state()
    import backhaul as bh
    print("import", *(old is new or old == new for old, new in zip(before, state())))
    for _ in range(2):
        with bh.cluster(2) as workers:
            print("worker", *(old is new or old == new for old, new in zip(before, state())))
            workers[0].close()
            print("last", *(old is new or old == new for old, new in zip(before, state()[:7])))
        print("after", *(old is new or old == new for old, new in zip(before, state())))
"""


def run(program: str) -> list[list[str]]:
    """The lines that a program prints in a process of its own, as words."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_patches_are_there_only_while_a_worker_runs() -> None:
    """The import patches nothing. The first worker installs the patches and takes SIGINT over; the last undoes it."""
    untouched, patched = ["True"] * 12, ["False"] * 8 + ["True"] * 4
    cycle = [["worker", *patched], ["last", *["False"] * 7], ["after", *untouched]]
    assert run(STATES) == [["import", *untouched], *cycle, *cycle]


def test_a_forked_child_has_no_patches() -> None:
    program = """
        import os
        import torch
        before = torch._C._current_graph_task_id
        import backhaul as bh
        with bh.cluster(1):
            child = os.fork()
            if child == 0:
                os._exit(0 if torch._C._current_graph_task_id is before else 1)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run(program) == [["0"]]


@pytest.mark.parametrize("name", ["_current_graph_task_id", "_will_engine_execute_node"])
def test_torch_has_the_functions_that_multi_grad_hooks_call(name: str) -> None:
    """The hook looks them up on ``torch._C`` by name each time: only then it meets the patch."""
    patches.uninstall()
    assert type(vars(torch._C)[name]).__name__ == "builtin_function_or_method"
    assert f"torch._C.{name}" in inspect.getsource(torch.autograd.graph.register_multi_grad_hook)


def test_torch_calls_the_function_that_registers_hooks_of_nodes() -> None:
    patches.uninstall()
    register = vars(_HookMixin)["_register_hook"]
    assert isinstance(register, staticmethod)
    assert list(inspect.signature(register.__func__).parameters) == ["backward_hooks", "hook"]


def test_a_hook_on_a_node_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours are not counted."""
    monkeypatch.setattr(node_hooks, "possible", False)
    node = (torch.ones(1, requires_grad=True) * 2).grad_fn
    assert node is not None
    node.register_hook(hooks.own_hook(lambda *_: None)).remove()
    assert not node_hooks.possible
    node.register_prehook(lambda *_: None)
    assert node_hooks.possible


def test_hooks_that_came_while_nothing_watched_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_hooks, "possible", False)
    patches.uninstall()
    patches.install()
    assert not node_hooks.possible
    patches.uninstall()
    torch.ones(1, requires_grad=True).register_hook(lambda _: None)
    patches.install()
    assert node_hooks.possible


def test_torch_counts_hook_handles() -> None:
    before = RemovableHandle.next_id
    torch.ones(1, requires_grad=True).register_hook(lambda _: None)
    assert RemovableHandle.next_id == before + 1


def test_torch_tells_of_new_modules() -> None:
    patches.uninstall()
    seen: list[object] = []
    handle = modules.register_module_module_registration_hook(lambda *args: seen.append(args))
    outer, inner = torch.nn.Module(), torch.nn.Module()
    outer.inner = inner
    handle.remove()
    assert seen == [(outer, "inner", inner)]


def test_modules_made_while_nothing_watched_are_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducers, "_searched", True)
    patches.uninstall()
    assert not reducers._searched


def test_a_patch_of_another_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 7)
    patches.uninstall()
    assert torch._C._current_graph_task_id() == 7
