"""Runs the cells of a notebook as a kernel does: a ``__main__`` without a file, and a context of its own for each cell."""

import contextvars
import sys
import types

cells = sys.stdin.read().split("# %%\n")
sys.modules["__main__"] = main = types.ModuleType("__main__")
for number, text in enumerate(cells):
    contextvars.copy_context().run(exec, compile(text, f"<cell {number}>", "exec"), vars(main))
