"""Global state of functions that travel by value, which is refused.

Such a function takes a copy of its globals along with each message. What it changes there is lost, and a tensor or a
module is another one with each call. What counts as state of a function and of the functions defined inside it:

- A global that it assigns or deletes: ``global count; count += 1``.
- A container, an object, or a class or function that travels by value too, if the code changes its content, as in
  ``seen.append(x)``, ``table[key] = x``, ``config.rate = x``, ``Total.sum += x``; also through a local name.
- An object of a class that travels by value too, if the code calls a method that changes an attribute of the object.
- An optimizer, an iterator, or a generator of random numbers that it reads.
- A tensor or a module that it reads, also inside a container or an object, if the function stands at the top level of
  its module or in a class there. In a script such a function goes by name and uses the callee's own tensor. A lambda or
  a local function takes copies in a script too, and gradients come back to what was copied.

Functions, classes and modules, numbers and strings, and containers that are only read are no state. Functions of
``__main__`` that a function calls travel with it, and are looked at then.

[Note: bytecode] Source code is not always there, so this looks at bytecode. ``_Trail`` follows what comes from a global
over the stack and through local names. It is not exact: a container that is changed by a function which it is given to,
say, is not noticed. For opcodes that it does not know, ``dis.stack_effect`` says how the stack changes.
"""

from __future__ import annotations

import collections.abc
import dis
import functools
import inspect
import io
import itertools
import logging
import random
import sys
import types
import weakref
from collections.abc import Callable, Container, Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch

from backhaul._wire.callables import label_of
from backhaul.errors import SerializationError

_MOST = 1000  # parts of a value that are looked at
_DEEPEST = 3  # methods that call each other
_PICKLED = ("__reduce__", "__reduce_ex__", "__getstate__")  # of objects that have their own, nobody knows what travels
_CHANGING = frozenset(
    (
        *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"),
        *("update", "setdefault", "popitem", "add", "discard"),
        *("intersection_update", "difference_update", "symmetric_difference_update"),
        *("appendleft", "extendleft", "popleft", "rotate", "subtract", "move_to_end"),
        *("__setitem__", "__delitem__", "__iadd__", "__ior__", "__iand__", "__isub__", "__ixor__"),
    )
)  # methods of containers
_MUTABLE = (collections.abc.MutableSequence, collections.abc.MutableMapping, collections.abc.MutableSet)


Way = tuple[str, ...]
"""How code gets to something: the name of a global, then attributes, and ``[]`` for an item of a container."""

_ITEM = "[]"
_SELF = "<self>"  # in the place of a global: the object that a method is called on
_SLICE: Way = ()  # what leads to a slice object, which is no global's


@dataclass(frozen=True, slots=True)
class Uses:
    """What the code of a function does with globals, by name.

    Attributes:
        reads: Those that it loads.
        assigns: Those that it assigns or deletes.
        changes: Those whose content it changes.
        calls: Methods whose names say that they change what they are called on: the way there from a global, and the
            method.
    """

    reads: Set[str]
    assigns: Set[str]
    changes: Set[str]
    calls: Set[tuple[Way, str]]


_known: weakref.WeakKeyDictionary[types.FunctionType, tuple[types.CodeType, Uses]] = weakref.WeakKeyDictionary()


def uses_of(function: types.FunctionType) -> Uses:
    """What ``function``, and the functions that are defined inside it, do with globals."""
    code = function.__code__
    known = _known.get(function)
    if known is None or known[0] is not code:
        known = _known[function] = code, _look_at(code)
    return known[1]


def refuse_state(function: types.FunctionType, *, by_value: Callable[[Any], bool], references: Container[type]) -> None:
    """Raise ``SerializationError`` if ``function``, which travels by value, has state of its own in globals.

    Args:
        function: The function.
        by_value: Whether a class or function travels by value, too.
        references: Types whose values travel as references to what they stand for.
    """
    space = function.__globals__
    if function.__module__ != space.get("__name__"):
        return  # a decorator's wrapper: the globals are those of the decorator's module
    uses, local = uses_of(function), "<" in function.__qualname__
    for name in sorted(uses.assigns):
        raise _refusal(function, f"assigns the global '{name}'", _CHANGED, name)
    for name in sorted(uses.reads & space.keys()):
        value = space[name]
        if type(value) in references:
            continue
        changed = name in uses.changes or any(
            way[0] == name and _changes(value, way[1:], method, by_value) for way, method in uses.calls
        )
        if changed and _goes_along(value, by_value):
            raise _refusal(function, f"changes the global '{name}'", _CHANGED, name)
        found = _state_in(value, by_value, references)
        if found is not None and not (local and found.copied):
            raise _refusal(function, f"uses the global '{name}', {found.what}", _USED, name)


_CHANGED = "and change only the copy", " and return what becomes of it"
_USED = "whose gradients and changes would be lost", ""


def _refusal(function: types.FunctionType, what: str, effect: tuple[str, str], name: str) -> SerializationError:
    label, (lost, returned) = label_of(function), effect
    if "<" in function.__qualname__:
        why = "as lambdas and local functions do"
    elif function.__module__ == "__main__":
        why = "since the other worker has another __main__"
    else:
        why = "since the other worker cannot import it"
    return SerializationError(
        f"{label} {what}. {label} travels by value, {why}. Each call would take a copy of '{name}' along, {lost}. "
        f"Put {label} and '{name}' into a module that both workers can import, "
        f"or pass '{name}' as an argument{returned}"
    )


# Values.


@dataclass(frozen=True, slots=True)
class _Found:
    """State that a value is or holds: what it is, for people, and whether gradients come back from a copy."""

    what: str
    copied: bool


def _goes_along(value: Any, by_value: Callable[[Any], bool]) -> bool:
    """Whether a copy of ``value`` travels with a function, and not only its name."""
    if isinstance(value, (type, types.FunctionType)):
        return by_value(value)
    return not isinstance(value, (types.ModuleType, logging.Logger))


def _changes(value: Any, way: Way, method: str, by_value: Callable[[Any], bool], depth: int = 0) -> bool:
    """Whether a call of ``method`` on what is found that way from ``value`` changes it."""
    for step in way:
        if step == _ITEM:
            return method in _CHANGING  # of what is not known
        value = inspect.getattr_static(value, step, None)
    if isinstance(value, torch.Tensor):
        return method.endswith("_")
    if method in _CHANGING and isinstance(value, _MUTABLE):
        return True
    function = inspect.getattr_static(type(value), method, None)
    if depth > _DEEPEST or not (isinstance(function, types.FunctionType) and by_value(type(value))):
        return False
    changed, calls = _done_to_self(function.__code__)
    return changed or any(_changes(value, inner, name, by_value, depth + 1) for inner, name in calls)


@functools.lru_cache(1024)
def _done_to_self(code: types.CodeType) -> tuple[bool, Set[tuple[Way, str]]]:
    """Whether a method changes an attribute of its first argument, and which methods it calls from there."""
    trail = _Trail(code)
    trail.begin_at_self()
    trail.follow()
    return _SELF in trail.changes, {(way[1:], method) for way, method in trail.calls if way[0] == _SELF}


def _state_in(value: Any, by_value: Callable[[Any], bool], references: Container[type]) -> _Found | None:
    """State that cannot be told apart from a constant by what is done with it."""
    kind = type(value)
    if isinstance(value, (random.Random, torch.Generator, *_numpy_generators())):
        return _Found("a generator of random numbers", copied=False)
    if isinstance(value, collections.abc.Iterator) and not isinstance(value, io.IOBase):
        return _Found(f"an iterator ({kind.__name__})", copied=False)
    seen, waiting = {id(value)}, collections.deque((value,))
    while waiting:
        part = waiting.popleft()
        found = _state_of(part, references)
        if found is not None:
            return found if part is value else _Found(f"a {kind.__name__} that holds {found.what}", found.copied)
        if type(part) not in references and _goes_along(part, by_value):
            for item in itertools.islice(_parts(part), _MOST - len(seen)):
                if id(item) not in seen:
                    seen.add(id(item))
                    waiting.append(item)
    return None


def _state_of(value: Any, references: Container[type]) -> _Found | None:
    kind = type(value)
    if kind in references:
        return None
    if isinstance(value, torch.Tensor):
        return _Found("a tensor", copied=True)
    if isinstance(value, torch.nn.Module) and _has_tensors(value):
        return _Found(f"a module ({kind.__name__})", copied=True)
    if isinstance(value, torch.optim.Optimizer):
        return _Found(f"an optimizer ({kind.__name__})", copied=False)
    return None


def _has_tensors(module: torch.nn.Module) -> bool:
    """Whether a module has anything that can be lost; an activation or a loss has not."""
    return next(itertools.chain(module.parameters(), module.buffers()), None) is not None


def _parts(value: Any) -> Iterator[Any]:
    """What a container, an object or a class holds, if a copy of that goes along with a copy of it."""
    if isinstance(value, dict):
        yield from list(value.values())
    elif isinstance(value, type):
        yield from list(vars(value).values())
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        yield from list(value)
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.SimpleNamespace) or all(
        getattr(type(value), name) is getattr(object, name) for name in _PICKLED
    ):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from list(attributes.values())


def _numpy_generators() -> tuple[type, ...]:
    module = sys.modules.get("numpy.random")
    return () if module is None else (module.Generator, module.RandomState)


# Code.


def _look_at(code: types.CodeType) -> Uses:
    trail = _Trail(code)
    trail.follow()
    inner = [_look_at(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return Uses(
        reads=trail.reads.union(*(uses.reads for uses in inner)),
        assigns=trail.assigns.union(*(uses.assigns for uses in inner)),
        changes=trail.changes.union(*(uses.changes for uses in inner)),
        calls=trail.calls.union(*(uses.calls for uses in inner)),
    )


_NEUTRAL = frozenset(
    ("NOP", "RESUME", "CACHE", "EXTENDED_ARG", "KW_NAMES", "MAKE_CELL", "COPY_FREE_VARS", "GET_ITER", "NOT_TAKEN")
)  # the top of the stack stays what it is
_ENDS = frozenset(
    ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
)  # what follows comes from elsewhere


class _Trail:
    """Goes through the instructions of one code object, see [Note: bytecode]."""

    def __init__(self, code: types.CodeType) -> None:
        self._code = code
        self._stack: list[Way | None] = []  # None: what has nothing to do with a global
        self._locals: dict[str, Way | None] = {}
        self._targets: dict[int, list[Way | None]] = {}  # the stack at instructions that are jumped to
        self.reads: set[str] = set()
        self.assigns: set[str] = set()
        self.changes: set[str] = set()
        self.calls: set[tuple[Way, str]] = set()

    def begin_at_self(self) -> None:
        """Take the first argument for a global called ``_SELF``."""
        if self._code.co_argcount:
            self._locals[self._code.co_varnames[0]] = (_SELF,)

    def follow(self) -> None:
        """Look at all instructions."""
        goes_on = True
        for instruction in dis.get_instructions(self._code):
            if not goes_on:
                self._stack = self._targets.get(instruction.offset, [])
            step = getattr(self, f"_{instruction.opname.lower()}", None)
            if step is not None:
                step(instruction)
            elif instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
                self._load(instruction)
            else:
                self._pass(instruction)
            goes_on = instruction.opname not in _ENDS

    def _pop(self) -> Way | None:
        return self._stack.pop() if self._stack else None

    def _pass(self, instruction: dis.Instruction) -> None:
        """Any other instruction: what it leaves on the stack is nobody's."""
        name = instruction.opname
        if isinstance(instruction.argval, int) and ("JUMP" in name or name in ("FOR_ITER", "SEND")):
            there = list(self._stack)
            _shift(there, _effect(instruction, jump=True), pure=True)
            self._targets.setdefault(instruction.argval, there)
        pure = name in _NEUTRAL or "JUMP" in name or name.startswith(("POP_", "STORE_", "DELETE_"))
        _shift(self._stack, _effect(instruction), pure=pure)

    # What reads globals and what comes from them.

    def _load_global(self, instruction: dis.Instruction) -> None:
        self.reads.add(instruction.argval)
        if (instruction.arg or 0) & 1:  # to be called: with a NULL, before or after
            self._stack += [None, None]
        else:
            self._stack.append((instruction.argval,))

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
        self._pass(instruction)
        if self._stack:
            self._stack[-1] = _SLICE

    def _load_const(self, instruction: dis.Instruction) -> None:
        self._stack.append(_SLICE if isinstance(instruction.argval, slice) else None)

    def _load_attr(self, instruction: dis.Instruction) -> None:
        way, name = self._pop(), instruction.argval
        to_call = _effect(instruction) > 0  # a method, and what it is called on
        if way and (to_call or name in _CHANGING or name.endswith("_")):
            self.calls.add((way, name))
        if to_call:
            self._stack += [None, None]
        else:
            self._stack.append((*way, name) if way else None)

    _load_method = _load_attr

    def _binary_subscr(self, instruction: dis.Instruction) -> None:
        key, way = self._pop(), self._pop()
        self._stack.append((*way, _ITEM) if way and key is not _SLICE else None)  # a slice of a container is a copy

    def _binary_op(self, instruction: dis.Instruction) -> None:
        if instruction.argrepr == _ITEM:  # as of Python 3.14
            self._binary_subscr(instruction)
        else:
            self._pass(instruction)

    def _for_iter(self, instruction: dis.Instruction) -> None:
        iterated = self._stack[-1] if self._stack else None
        self._pass(instruction)
        if self._stack:
            self._stack[-1] = (*iterated, _ITEM) if iterated else None

    def _copy(self, instruction: dis.Instruction) -> None:
        depth = instruction.arg or 1
        self._stack.append(self._stack[-depth] if len(self._stack) >= depth else None)

    def _swap(self, instruction: dis.Instruction) -> None:
        depth, stack = instruction.arg or 1, self._stack
        if len(stack) >= depth:
            stack[-1], stack[-depth] = stack[-depth], stack[-1]

    # What changes them.

    def _store_global(self, instruction: dis.Instruction) -> None:
        self.assigns.add(instruction.argval)
        self._pop()

    def _delete_global(self, instruction: dis.Instruction) -> None:
        self.assigns.add(instruction.argval)

    def _change(self, way: Way | None) -> None:
        if way:
            self.changes.add(way[0])

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


def _shift(stack: list[Way | None], effect: int, *, pure: bool) -> None:
    """Change the height of a stack. Unless ``pure``, its top is something new then."""
    if effect < 0:
        del stack[effect:]
    else:
        stack += [None] * effect
    if not pure and effect <= 0 and stack:
        stack[-1] = None


def _effect(instruction: dis.Instruction, *, jump: bool = False) -> int:
    try:
        return dis.stack_effect(instruction.opcode, instruction.arg, jump=jump)
    except ValueError:
        return 0
