"""Runs the cells of a notebook as a kernel does: ``__main__`` has no file, and each cell has a context of its own."""

import contextvars
import sys
import types

if __name__ == "__main__":
    cells = sys.stdin.read().split("# %%\n")
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    for number, text in enumerate(cells):
        contextvars.copy_context().run(exec, compile(text, f"<cell {number}>", "exec"), vars(main))
