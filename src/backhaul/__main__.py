"""``python -m backhaul``: the command ``backhaul``."""

import sys

from backhaul._command.main import main

sys.exit(main())
