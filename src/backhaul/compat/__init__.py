"""Torch's API on top of Backhaul: ``backhaul.compat.rpc`` replaces ``torch.distributed.rpc``, and
``backhaul.compat.autograd`` replaces ``torch.distributed.autograd``.

In this package, "the reference" means ``torch.distributed``'s RPC, distributed autograd, ``RemoteModule`` and
distributed optimizer. The package is for programs that move to Backhaul step by step, and for the reference's own test
suites. New programs should use ``backhaul`` itself. The rest of Backhaul must not know this package.
"""

from backhaul._torch_support import require

require("backhaul.compat")
