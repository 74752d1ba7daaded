"""Compiles the native core if there is a compiler: ``python -m backhaul._native``."""

import sys

from backhaul._native import build, check

sys.exit(build.main(check))
