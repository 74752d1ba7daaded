"""What the code of a function does with globals, read from its bytecode. Knows no value of a global and no message.

[Note: bytecode] Source code is not always available, so this module reads bytecode. ``_GlobalTracker`` follows what
comes from a global over the stack and through local names. The result is not exact. For example, it misses a container
that the code passes to another function which changes it. For opcodes that the tracker does not know,
``dis.stack_effect`` says how the stack changes.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Set
from dataclasses import dataclass

CHANGING_METHODS = frozenset(
    (
        *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"),
        *("update", "setdefault", "popitem", "add", "discard"),
        *("intersection_update", "difference_update", "symmetric_difference_update"),
        *("appendleft", "extendleft", "popleft", "rotate", "subtract", "move_to_end"),
        *("__setitem__", "__delitem__", "__iadd__", "__ior__", "__iand__", "__isub__", "__ixor__"),
    )
)
"""Methods of containers that change the container."""

AccessPath = tuple[str, ...]
"""How code reaches a value: the name of a global, then attributes, and ``ITEM`` for an item of a container."""

ITEM = "[]"
_SELF = "<self>"  # replaces the name of a global: the object that a method is called on
_SLICE: AccessPath = ()  # the path of a slice object, which comes from no global

_KEEPS_TOP = frozenset(
    ("NOP", "RESUME", "CACHE", "EXTENDED_ARG", "KW_NAMES", "MAKE_CELL", "COPY_FREE_VARS", "GET_ITER", "NOT_TAKEN")
)  # opcodes that leave the top of the stack as it is
_ENDS_BLOCK = frozenset(
    ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
)  # opcodes that never continue with the next instruction


@dataclass(frozen=True, slots=True)
class GlobalUses:
    """What the code of a function does with globals, by name.

    Attributes:
        reads: Globals that it loads.
        assigns: Globals that it assigns or deletes.
        changes: Globals whose content it changes.
        calls: Calls of methods on what comes from a global: the path from the global, and the name of the method.
    """

    reads: Set[str]
    assigns: Set[str]
    changes: Set[str]
    calls: Set[tuple[AccessPath, str]]


_known: weakref.WeakKeyDictionary[types.FunctionType, tuple[types.CodeType, GlobalUses]] = weakref.WeakKeyDictionary()


def uses_of(function: types.FunctionType) -> GlobalUses:
    """What ``function``, and the functions that are defined inside it, do with globals."""
    code = function.__code__
    known = _known.get(function)
    if known is None or known[0] is not code:
        known = _known[function] = code, _uses_in(code)
    return known[1]


def _uses_in(code: types.CodeType) -> GlobalUses:
    tracker = _GlobalTracker(code)
    tracker.run()
    inner = [_uses_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return GlobalUses(
        reads=tracker.reads.union(*(uses.reads for uses in inner)),
        assigns=tracker.assigns.union(*(uses.assigns for uses in inner)),
        changes=tracker.changes.union(*(uses.changes for uses in inner)),
        calls=tracker.calls.union(*(uses.calls for uses in inner)),
    )


@functools.lru_cache(1024)
def uses_of_self(code: types.CodeType) -> tuple[bool, Set[tuple[AccessPath, str]]]:
    """Whether a method changes an attribute of its first argument, and the methods that it calls on that argument."""
    tracker = _GlobalTracker(code)
    tracker.treat_self_as_global()
    tracker.run()
    return _SELF in tracker.changes, {(path[1:], method) for path, method in tracker.calls if path[0] == _SELF}


class _StackModel:
    """The stack and the local names of one code object, as access paths. None: a value that comes from no global.

    A method ``_<opcode>`` applies the instruction of that name. ``_other`` applies all instructions without a method.
    """

    def __init__(self, code: types.CodeType) -> None:
        self._code = code
        self._stack: list[AccessPath | None] = []
        self._locals: dict[str, AccessPath | None] = {}
        self._targets: dict[int, list[AccessPath | None]] = {}  # the stack at the targets of jumps, by offset

    def run(self) -> None:
        """Apply all instructions in the order of their offsets."""
        continues = True
        for instruction in dis.get_instructions(self._code):
            if not continues:
                self._stack = self._targets.get(instruction.offset, [])
            step = getattr(self, f"_{instruction.opname.lower()}", None)
            if step is not None:
                step(instruction)
            elif instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
                self._load(instruction)
            else:
                self._other(instruction)
            continues = instruction.opname not in _ENDS_BLOCK

    def _pop(self) -> AccessPath | None:
        return self._stack.pop() if self._stack else None

    def _other(self, instruction: dis.Instruction) -> None:
        """Apply an instruction without a method of its own. What it leaves on the stack comes from no global."""
        name = instruction.opname
        if isinstance(instruction.argval, int) and ("JUMP" in name or name in ("FOR_ITER", "SEND")):
            there = list(self._stack)
            _resize(there, _effect(instruction, jump=True), keep_top=True)
            self._targets.setdefault(instruction.argval, there)
        keep_top = name in _KEEPS_TOP or "JUMP" in name or name.startswith(("POP_", "STORE_", "DELETE_"))
        _resize(self._stack, _effect(instruction), keep_top=keep_top)

    def _load(self, instruction: dis.Instruction) -> None:
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        self._stack += [self._locals.get(name) for name in names]

    def _store_fast(self, instruction: dis.Instruction) -> None:
        self._locals[instruction.argval] = self._pop()

    _store_deref = _store_fast

    def _store_fast_store_fast(self, instruction: dis.Instruction) -> None:
        for name in instruction.argval:
            self._locals[name] = self._pop()

    def _store_fast_load_fast(self, instruction: dis.Instruction) -> None:
        stored, loaded = instruction.argval
        self._locals[stored] = self._pop()
        self._stack.append(self._locals.get(loaded))

    def _build_slice(self, instruction: dis.Instruction) -> None:
        self._other(instruction)
        if self._stack:
            self._stack[-1] = _SLICE

    def _load_const(self, instruction: dis.Instruction) -> None:
        self._stack.append(_SLICE if isinstance(instruction.argval, slice) else None)

    def _copy(self, instruction: dis.Instruction) -> None:
        depth = instruction.arg or 1
        self._stack.append(self._stack[-depth] if len(self._stack) >= depth else None)

    def _swap(self, instruction: dis.Instruction) -> None:
        depth, stack = instruction.arg or 1, self._stack
        if len(stack) >= depth:
            stack[-1], stack[-depth] = stack[-depth], stack[-1]


class _GlobalTracker(_StackModel):
    """Records what one code object does with globals, see [Note: bytecode]. The attributes are those of GlobalUses."""

    def __init__(self, code: types.CodeType) -> None:
        super().__init__(code)
        self.reads: set[str] = set()
        self.assigns: set[str] = set()
        self.changes: set[str] = set()
        self.calls: set[tuple[AccessPath, str]] = set()

    def treat_self_as_global(self) -> None:
        """Treat the first argument as a global called ``_SELF``."""
        if self._code.co_argcount:
            self._locals[self._code.co_varnames[0]] = (_SELF,)

    # Instructions that read globals, and what comes from globals.

    def _load_global(self, instruction: dis.Instruction) -> None:
        self.reads.add(instruction.argval)
        if (instruction.arg or 0) & 1:  # the code calls it: the instruction also pushes a NULL, before or after
            self._stack += [None, None]
        else:
            self._stack.append((instruction.argval,))

    def _load_attr(self, instruction: dis.Instruction) -> None:
        path, name = self._pop(), instruction.argval
        to_call = _effect(instruction) > 0  # pushes a method and its object
        if path and (to_call or name in CHANGING_METHODS or name.endswith("_")):
            self.calls.add((path, name))
        if to_call:
            self._stack += [None, None]
        else:
            self._stack.append((*path, name) if path else None)

    _load_method = _load_attr

    def _binary_subscr(self, instruction: dis.Instruction) -> None:
        key, path = self._pop(), self._pop()
        self._stack.append((*path, ITEM) if path and key is not _SLICE else None)  # a slice of a container is a copy

    def _binary_op(self, instruction: dis.Instruction) -> None:
        if instruction.argrepr == ITEM:  # since Python 3.14
            self._binary_subscr(instruction)
        else:
            self._other(instruction)

    def _for_iter(self, instruction: dis.Instruction) -> None:
        iterated = self._stack[-1] if self._stack else None
        self._other(instruction)
        if self._stack:
            self._stack[-1] = (*iterated, ITEM) if iterated else None

    # Instructions that change globals, and what comes from globals.

    def _store_global(self, instruction: dis.Instruction) -> None:
        self.assigns.add(instruction.argval)
        self._pop()

    def _delete_global(self, instruction: dis.Instruction) -> None:
        self.assigns.add(instruction.argval)

    def _change(self, path: AccessPath | None) -> None:
        if path:
            self.changes.add(path[0])

    def _store_subscr(self, instruction: dis.Instruction) -> None:
        self._pop()  # the key
        self._change(self._pop())
        self._pop()  # the value

    def _delete_subscr(self, instruction: dis.Instruction) -> None:
        self._pop()
        self._change(self._pop())

    def _store_slice(self, instruction: dis.Instruction) -> None:
        self._pop()
        self._store_subscr(instruction)

    def _store_attr(self, instruction: dis.Instruction) -> None:
        self._change(self._pop())
        self._pop()

    def _delete_attr(self, instruction: dis.Instruction) -> None:
        self._change(self._pop())


def _resize(stack: list[AccessPath | None], effect: int, *, keep_top: bool) -> None:
    """Change the height of a stack by ``effect``. Unless ``keep_top``, the top is a new value afterwards."""
    if effect < 0:
        del stack[effect:]
    else:
        stack += [None] * effect
    if not keep_top and effect <= 0 and stack:
        stack[-1] = None


def _effect(instruction: dis.Instruction, *, jump: bool = False) -> int:
    try:
        return dis.stack_effect(instruction.opcode, instruction.arg, jump=jump)
    except ValueError:
        return 0
