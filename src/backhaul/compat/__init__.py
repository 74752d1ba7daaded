"""The reference's names over Backhaul: ``backhaul.compat.rpc`` stands where ``torch.distributed.rpc`` stood, and
``backhaul.compat.autograd`` where ``torch.distributed.autograd`` did.

For programs that move over, and for the reference's own test suites. New programs have no use for it: whatever is
here is said better by ``backhaul`` itself, and nothing in the rest of the package knows of it.
"""

from backhaul._torch_support import require

require("backhaul.compat")
