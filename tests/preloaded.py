"""What the processes that tests start are forked with: torch's compiler, too, which profiles and optimizers would each
import in a second. None of it is looked at any more when they collect garbage.
"""

from __future__ import annotations

import gc

import torch._dynamo
import torch.profiler  # noqa: F401

import backhaul._public  # noqa: F401

gc.collect()
gc.freeze()
