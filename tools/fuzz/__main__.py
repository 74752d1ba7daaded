"""The command ``python -m tools.fuzz``."""

import sys

from tools.fuzz.run import main

if __name__ == "__main__":
    sys.exit(main())
