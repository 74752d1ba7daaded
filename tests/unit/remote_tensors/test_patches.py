"""Canaries of what remote tensors patch in torch: each patch is there while a worker runs and at no other time, and
torch still uses the name that is patched.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.utils import _foreach_utils

STATES = """
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import clip_grad
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    def state():
        return (
            list(_foreach_utils._foreach_supported_types),
            DistributedDataParallel.__init__,
            clip_grad._group_tensors_by_device_and_dtype,
            list(optimizer._global_optimizer_pre_hooks),
        )

    before = state()
    import backhaul as bh
    print("import", *(old == new for old, new in zip(before, state())))
    for _ in range(2):
        with bh.cluster(2) as workers:
            print("worker", *(old == new for old, new in zip(before, state())))
            workers[0].close()
            print("last", *(old == new for old, new in zip(before, state())))
        print("after", *(old == new for old, new in zip(before, state())))
"""


def test_patches_are_there_only_while_a_worker_runs() -> None:
    command = [sys.executable, "-c", textwrap.dedent(STATES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    patched, untouched = ["False"] * 4, ["True"] * 4
    cycle = [["worker", *patched], ["last", *patched], ["after", *untouched]]
    assert [line.split() for line in done.stdout.splitlines()] == [["import", *untouched], *cycle, *cycle]


def test_torch_looks_into_the_list_of_classes() -> None:
    assert torch.Tensor in _foreach_utils._foreach_supported_types
    assert "in _foreach_supported_types" in inspect.getsource(_foreach_utils._has_foreach_support)
    assert "_has_foreach_support(" in inspect.getsource(torch.nn.utils.clip_grad)


def test_torch_groups_gradients_before_it_clips_them() -> None:
    for function in (clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_):
        source = inspect.getsource(function)
        assert source.index("_group_tensors_by_device_and_dtype(") < source.index("_foreach_")


def test_ddp_leaves_out_what_the_model_names() -> None:
    source = inspect.getsource(DistributedDataParallel.__init__)
    assert "module._ddp_params_and_buffers_to_ignore" in source
    model = torch.nn.Linear(1, 1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["weight"])
    assert list(model._ddp_params_and_buffers_to_ignore) == ["weight"]  # type: ignore[arg-type]
