"""Changes the arguments of calls whose signatures differ between torch and Backhaul."""

from __future__ import annotations

import ast
from collections.abc import Callable

from backhaul._migrate import names
from backhaul._migrate.edits import Source

Note = Callable[[ast.AST, str], None]
"""Reports something that the reader of the program should know."""

_UNPACKED = "the arguments are unpacked with * or **; write them out"


class Arguments:
    """The arguments of one call, and the edits that change them."""

    def __init__(self, source: Source, call: ast.Call) -> None:
        self._source = source
        self._call = call
        self._all: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        self._all.sort(key=lambda node: (node.lineno, node.col_offset))
        self._dropped: set[int] = set()

    def find(self, name: str, place: int | None = None) -> ast.expr | None:
        """The value of a parameter, given by name or at its place."""
        if place is not None and place < len(self._call.args):
            return self._call.args[place]
        return next((keyword.value for keyword in self._call.keywords if keyword.arg == name), None)

    def name(self, value: ast.expr, new: str) -> None:
        """Give an argument by this name."""
        start = self._source.span(value)[0]
        keyword = self._keyword_of(value)
        if keyword is None:
            self._source.insert(start, f"{new}=")
        elif keyword.arg != new:
            first = self._source.span(keyword)[0]
            self._source.cut(first, first + len((keyword.arg or "").encode()), new)

    def drop(self, value: ast.expr) -> None:
        """Leave an argument out."""
        self._dropped.add(self._all.index(self._keyword_of(value) or value))

    def finish(self) -> None:
        """Cut the arguments that are left out, with their commas."""
        spans = [self._source.span(argument) for argument in self._all]
        kept = [index for index in range(len(spans)) if index not in self._dropped]
        for index in self._dropped:
            later = [other for other in kept if other > index]
            if later:
                self._source.cut(spans[index][0], spans[index + 1][0])
            elif kept:
                self._source.cut(spans[index - 1][1], spans[index][1])
            else:
                self._source.cut(spans[index][0], spans[index + 1][0] if index + 1 < len(spans) else self._close())

    def _close(self) -> int:
        """The offset of the closing parenthesis."""
        return self._source.span(self._call)[1] - 1

    def _keyword_of(self, value: ast.expr) -> ast.keyword | None:
        return next((keyword for keyword in self._call.keywords if keyword.value is value), None)


def refusal(name: str, call: ast.Call, backends: Callable[[ast.expr], bool]) -> str | None:
    """Why a call cannot be migrated, or None. ``backends`` says whether an expression names torch's backend."""
    if name not in names.RENAMED:
        return None
    if any(isinstance(each, ast.Starred) for each in call.args) or any(word.arg is None for word in call.keywords):
        return _UNPACKED
    given = {word.arg: word.value for word in call.keywords}
    if name == names.INIT:
        backend = call.args[1] if len(call.args) > 1 else given.get("backend")
        if backend is not None and not _is_constant(backend, None) and not backends(backend):
            return "Backhaul has one backend; leave the argument `backend` out"
        if len(call.args) < 4 and "world_size" not in given:
            return (
                "the group has no fixed size; the first worker calls bh.init(name, rank=0, world_size=1), the others "
                "bh.init(name, join=address), see docs/failures.md"
            )
    if name in names.OPTIONS and "devices" in given:
        return "Backhaul has no list of devices; leave the argument `devices` out"
    return None


def change_init(source: Source, call: ast.Call) -> None:
    """``init_rpc(name, backend, rank, world_size, rpc_backend_options)``."""
    arguments = Arguments(source, call)
    if (backend := arguments.find("backend", 1)) is not None:
        arguments.drop(backend)
    for place, old, new in (
        (2, "rank", "rank"),
        (3, "world_size", "world_size"),
        (4, "rpc_backend_options", "options"),
    ):
        if (value := arguments.find(old, place)) is not None:
            arguments.name(value, new)
    arguments.finish()


def change_options(source: Source, call: ast.Call, bh: str, note: Note) -> None:
    """``TensorPipeRpcBackendOptions(...)``."""
    arguments = Arguments(source, call)
    for place, old in enumerate(("rpc_timeout", "init_method")):  # by position only for RpcBackendOptions
        if place < len(call.args):
            arguments.name(call.args[place], names.OPTION_NAMES[old])
    for word in call.keywords:
        if word.arg in names.OPTION_NAMES:
            arguments.name(word.value, names.OPTION_NAMES[word.arg])
        elif word.arg == "device_maps":
            start, end = source.span(word.value)
            arguments.name(word.value, "devices")
            source.insert(start, f"{bh}.Devices(maps=")
            source.insert(end, ")")
        else:
            note(word.value, f"the option `{word.arg}` is left out: Backhaul has no such option")
            arguments.drop(word.value)
    arguments.finish()


def change_shutdown(source: Source, call: ast.Call) -> str:
    """``shutdown(graceful=True, timeout=0)``, where 0 is without limit; returns the function to call."""
    arguments = Arguments(source, call)
    graceful, timeout = arguments.find("graceful", 0), arguments.find("timeout", 1)
    if graceful is not None and _is_constant(graceful, True):
        arguments.drop(graceful)
        graceful = None
    elif graceful is not None:
        arguments.name(graceful, "graceful")
    unlimited = timeout is None or _is_constant(timeout, 0)
    if timeout is not None and unlimited:
        arguments.drop(timeout)
    elif timeout is not None:
        arguments.name(timeout, "timeout")
    if unlimited and graceful is not None and not _is_constant(graceful, False):
        source.insert(source.span(graceful)[1], ', timeout=float("inf")')
    arguments.finish()
    return "serve" if unlimited and graceful is None else "shutdown"


def change_call(source: Source, call: ast.Call) -> None:
    """``rpc_sync(to, func, args, kwargs, timeout)``: a timeout of -1 is None."""
    timeout = Arguments(source, call).find("timeout", 4)
    if timeout is not None and isinstance(timeout, ast.UnaryOp) and ast.unparse(timeout) in ("-1", "-1.0"):
        source.replace(timeout, "None")


def change_autograd(source: Source, call: ast.Call) -> None:
    """``backward(context_id, roots, retain_graph)`` and ``get_gradients(context_id)``."""
    arguments = Arguments(source, call)
    for old, new, place in (("context_id", "context", None), ("retain_graph", "retain_graph", 2)):
        if (value := arguments.find(old, place)) is not None:
            arguments.name(value, new)
    arguments.finish()


def rename_keyword(source: Source, call: ast.Call, old: str, new: str) -> None:
    """Give an argument by another name."""
    arguments = Arguments(source, call)
    if (value := arguments.find(old)) is not None:
        arguments.name(value, new)


def _is_constant(node: ast.expr, *values: object) -> bool:
    return isinstance(node, ast.Constant) and any(
        node.value == value and (node.value is None) == (value is None) for value in values
    )
