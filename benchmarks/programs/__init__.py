"""Programs that users run, each written once for ``torch.distributed.rpc`` and for ``backhaul.compat``.

A module is one program. ``WORKERS`` names its workers, the first of which is the driver. ``Driver()`` builds the model
from the driver, and ``run(steps)`` makes that many training steps and returns their losses. The programs have the shape
of the well-known examples of RPC in PyTorch and of ``examples/``, with models so small that most of a step is calls.
"""
