"""What the codemod writes, leaves and reports, for programs in the ways that people write them."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from backhaul._migrate.program import migrate

HEAD = "import torch.distributed.rpc as rpc\n"


def migrated(program: str) -> str:
    """The program after the codemod, which must have nothing to report and nothing to do a second time."""
    done = migrate(dedent(program))
    assert [remark for remark in done.remarks if remark.left] == []
    assert migrate(done.text).text == done.text
    ast.parse(done.text)
    return done.text


def body(line: str) -> str:
    """What becomes of one line that uses ``rpc``."""
    head, _, rest = migrated(HEAD + line).partition("\n")
    assert head == "import backhaul as bh"
    return rest


def left(program: str) -> list[tuple[int, str]]:
    """The lines that the codemod leaves, and why. It must not have changed them."""
    done = migrate(dedent(program))
    old, new = dedent(program).splitlines(), done.text.splitlines()
    assert all(old[remark.line - 1] in new for remark in done.remarks if remark.left)
    return [(remark.line, remark.text) for remark in done.remarks if remark.left]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("rpc.init_rpc('a', rank=0, world_size=2)", "bh.init('a', rank=0, world_size=2)"),
        ("rpc.init_rpc('a', rpc.BackendType.TENSORPIPE, 0, 2)", "bh.init('a', rank=0, world_size=2)"),
        ("rpc.init_rpc(name='a', backend=None, rank=r, world_size=2)", "bh.init(name='a', rank=r, world_size=2)"),
        (
            "rpc.init_rpc('a', rank=0, world_size=2, rpc_backend_options=o)",
            "bh.init('a', rank=0, world_size=2, options=o)",
        ),
        ("rpc.init_rpc('a', None, 0, 2, o)", "bh.init('a', rank=0, world_size=2, options=o)"),
        (
            "o = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=0, init_method=u)",
            "o = bh.Options(threads=8, timeout=0, init_method=u)",
        ),
        (
            "o = rpc.TensorPipeRpcBackendOptions(device_maps={'b': {0: 1}})",
            "o = bh.Options(devices=bh.Devices(maps={'b': {0: 1}}))",
        ),
        ("rpc.shutdown()", "bh.serve()"),
        ("rpc.shutdown(True, 0)", "bh.serve()"),
        ("rpc.shutdown(graceful=False)", "bh.shutdown(graceful=False)"),
        ("rpc.shutdown(timeout=9)", "bh.shutdown(timeout=9)"),
        ("rpc.shutdown(polite)", 'bh.shutdown(graceful=polite, timeout=float("inf"))'),
        ("rpc.rpc_sync('b', f, (x,), None, -1)", "bh.rpc_sync('b', f, (x,), None, None)"),
        ("rpc.remote('b', f, timeout=rpc.constants.UNSET_RPC_TIMEOUT)", "bh.remote('b', f, timeout=None)"),
        ("rpc.api.rpc_async('b', f)", "bh.rpc_async('b', f)"),
        ("def f(r: rpc.RRef[int]) -> rpc.RRef: ...", "def f(r: bh.RRef[int]) -> bh.RRef: ..."),
        ("copy = rpc.RRef.to_here", "copy = bh.RRef.to_here"),
        ("t = rpc.get_rpc_timeout()", "t = bh.current_worker().options.timeout"),
        ("ok = rpc.is_available()", "ok = True"),
        ("@rpc.functions.async_execution\ndef f(): ...", "@bh.async_execution\ndef f(): ..."),
        ("y = {k: rpc.rpc_sync(k, f) for k in names}", "y = {k: bh.rpc_sync(k, f) for k in names}"),
        ("print(f'{rpc.get_worker_info().name}')", "print(f'{bh.get_worker_info().name}')"),
        (
            'x = f"""ä\n {rpc.RRef!r:>{rpc.get_rpc_timeout()}}"""',
            'x = f"""ä\n {bh.RRef!r:>{bh.current_worker().options.timeout}}"""',
        ),
        ("x = 'a' f'{rpc.remote(a, b)}' f'{rpc.remote(c, d)}'", "x = 'a' f'{bh.remote(a, b)}' f'{bh.remote(c, d)}'"),
        (
            "x.backward(dist_autograd_ctx_id=c, retain_graph=True)\nrpc.shutdown()",
            "x.backward(context=c, retain_graph=True)\nbh.serve()",
        ),
    ],
)
def test_a_line(before: str, after: str) -> None:
    assert body(before) == after


def test_formatting_and_comments_stay() -> None:
    before = """\
        # -*- coding: utf-8 -*-
        import torch  # first
        import torch.distributed.rpc as rpc  # calls
        from torch.distributed.optim import (
            DistributedOptimizer,  # steps everywhere
            ZeroRedundancyOptimizer,
        )

        rpc.init_rpc( "ä",   # a name
            rank = 0,
            world_size=2 )   # two
        """
    after = """\
        # -*- coding: utf-8 -*-
        import torch  # first
        import backhaul as bh  # calls
        # steps everywhere
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from backhaul.optim import DistributedOptimizer

        bh.init( "ä",   # a name
            rank = 0,
            world_size=2 )   # two
        """
    assert migrated(before) == dedent(after)
    assert migrated(dedent(before).replace("\n", "\r\n")) == dedent(after).replace("\n", "\r\n")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "import torch\ntorch.distributed.rpc.rpc_sync('b', f)\n",
            "import torch\nimport backhaul as bh\nbh.rpc_sync('b', f)\n",
        ),
        ("import torch.distributed.rpc\ntorch.distributed.rpc.shutdown()\n", "import backhaul as bh\nbh.serve()\n"),
        (
            "import torch.distributed.rpc\ntorch.distributed.rpc.shutdown(); torch.ones(1)\n",
            "import backhaul as bh\nimport torch\nbh.serve(); torch.ones(1)\n",
        ),
        (
            "import torch.distributed as dist\ndist.rpc.shutdown()\ndist.barrier()\n",
            "import torch.distributed as dist\nimport backhaul as bh\nbh.serve()\ndist.barrier()\n",
        ),
        (
            "from torch.distributed import autograd, rpc\nwith autograd.context() as c:\n    rpc.rpc_sync('b', f)\n",
            "import backhaul as bh\nwith bh.context() as c:\n    bh.rpc_sync('b', f)\n",
        ),
        (
            "from torch.distributed.rpc import RRef as Ref, init_rpc, rpc_sync\ninit_rpc('a', rank=0, world_size=1)\n",
            "import backhaul as bh\nfrom backhaul import RRef as Ref, rpc_sync\nbh.init('a', rank=0, world_size=1)\n",
        ),
        (
            "from torch.distributed.nn import RemoteModule\nm = RemoteModule('b', Net)\n",
            "from backhaul.nn import RemoteModule\nm = RemoteModule('b', Net)\n",
        ),
        (
            "def f():\n    from torch.distributed import rpc\n    rpc.shutdown()\n",
            "def f():\n    import backhaul as bh\n    bh.serve()\n",
        ),
        (
            "try:\n    from torch.distributed.rpc import shutdown\nexcept ImportError:\n    raise\nshutdown()\n",
            "try:\n    import backhaul as bh\nexcept ImportError:\n    raise\nbh.serve()\n",
        ),
        (
            f"{HEAD}bh = 1\nrpc.shutdown()\n",
            "import backhaul\nbh = 1\nbackhaul.serve()\n",
        ),
        (
            "import torch.distributed.autograd as a\na.backward(context_id=c, roots=[x])\na.backward(c, [x], True)\n",
            "import backhaul as bh\nbh.backward(context=c, roots=[x])\nbh.backward(c, [x], retain_graph=True)\n",
        ),
        (
            f"import backhaul as bh\n{HEAD}rpc.shutdown()\n",
            "import backhaul as bh\nbh.serve()\n",
        ),
    ],
)
def test_ways_to_import(before: str, after: str) -> None:
    assert migrated(before) == after


def test_options_that_change_after_they_are_made() -> None:
    before = HEAD + dedent("""\
        options = rpc.TensorPipeRpcBackendOptions()
        options.init_method = "tcp://host:1"
        options.set_device_map("b", {0: 1})
        print(options.rpc_timeout, options.device_maps)
        """)
    after = dedent("""\
        import backhaul as bh
        import dataclasses
        options = bh.Options()
        options = dataclasses.replace(options, init_method="tcp://host:1")
        options = dataclasses.replace(options, devices=bh.Devices(maps={**(options.devices.maps or {}), "b": {0: 1}}))
        print(options.timeout, options.devices.maps)
        """)
    assert migrated(before) == after


def test_other_things_of_the_same_name_stay() -> None:
    program = HEAD + dedent("""\
        def f(rpc, remote=None):
            return rpc.shutdown()


        class Server:
            rpc = None

            def stop(self):
                rpc.shutdown()
                self.rpc.shutdown()
        """)
    changed = migrated(program)
    assert changed == program.replace(HEAD, "import backhaul as bh\n").replace(
        "        rpc.shut", "        bh.shut"
    ).replace("bh.shutdown", "bh.serve")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("rpc.init_rpc(**settings)", "unpacked"),
        ("rpc.init_rpc('a', rank=0)", "join"),
        ("rpc.init_rpc('a', backend=chosen, rank=0, world_size=2)", "backend"),
        ("rpc.TensorPipeRpcBackendOptions(devices=[0])", "devices"),
        ("rpc.backend_registry.register_backend('x', f, g)", "registry"),
        ("getattr(rpc, name)", "value"),
        ("def f(x: 'rpc.RRef') -> None: ...", "quotes"),
        ("rpc.nonsense()", "no such name"),
    ],
)
def test_what_it_cannot_write_stays_and_is_reported(line: str, word: str) -> None:
    program = HEAD + line + "\n"
    ((number, text),) = left(program)
    assert (number, word in text) == (2, True)
    assert HEAD in migrate(program).text, "the line still needs its import"


def test_imports_that_it_cannot_write() -> None:
    assert [line for line, _ in left("from torch.distributed.rpc import *\n")] == [1]
    assert [line for line, _ in left("from torch.distributed.rpc import RpcAgent\n")] == [1]
    ambiguous = "try:\n    import torch.distributed.rpc as rpc\nexcept ImportError:\n    rpc = None\nrpc.shutdown()\n"
    assert [line for line, _ in left(ambiguous)] == [5]


def test_notes_ask_for_nothing() -> None:
    (note,) = migrate(f"{HEAD}mock('torch.distributed.rpc.rpc_sync')\nrpc.shutdown()\n").remarks
    assert (note.line, note.left) == (2, False)
    (note,) = migrate(f"{HEAD}o = rpc.TensorPipeRpcBackendOptions(_channels=[1], rpc_timeout=2)\n").remarks
    assert (note.line, note.left) == (2, False)


def test_a_program_without_rpc_is_not_touched() -> None:
    program = "import torch\nimport torch.distributed as dist\n\nrpc = 1\ndist.init_process_group('gloo')\nprint(rpc)\n"
    assert migrate(program) == migrate(migrate(program).text)
    assert migrate(program).text == program
