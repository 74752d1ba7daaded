"""The command ``python -m tools.simulation``."""

import os
import sys

from tools.simulation.command import main

if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Skip the shutdown of the interpreter, in which threads of torch may abort the process.
    os._exit(status)
