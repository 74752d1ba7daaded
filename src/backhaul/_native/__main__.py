"""Compiles the native core if there is a compiler: ``python -m backhaul._native``."""

from backhaul._native.build import main

main()
