"""What the names of a module mean: which import, or something else, binds a name where it is used. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Import = ast.Import | ast.ImportFrom
ScopeNode = (
    ast.Module
    | ast.FunctionDef
    | ast.AsyncFunctionDef
    | ast.ClassDef
    | ast.Lambda
    | ast.ListComp
    | ast.SetComp
    | ast.DictComp
    | ast.GeneratorExp
)

_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar


class Binding(NamedTuple):
    """What binds a name: an import, or (``statement`` is None) something else on a line."""

    line: int
    imported: str = ""  # the dotted name that the import binds the name to
    statement: Import | None = None
    alias: ast.alias | None = None


class NameScope:
    """A module, class, function, lambda or comprehension, and the names that it binds."""

    def __init__(self, node: ScopeNode) -> None:
        self.node = node
        self.names: dict[str, list[Binding]] = {}
        self.outer: set[str] = set()  # declared global or nonlocal
        for child in _own_nodes(node):
            for name, binding in _bindings(child):
                self.names.setdefault(name, []).append(binding)
            if isinstance(child, ast.Global | ast.Nonlocal):
                self.outer.update(child.names)


def find(name: str, scopes: Sequence[NameScope]) -> list[Binding]:
    """The bindings that a name may have in the innermost of nested scopes."""
    for scope in reversed(scopes):
        if isinstance(scope.node, ast.ClassDef) and scope is not scopes[-1]:
            continue  # methods do not see the names of their class
        if name in scope.names and name not in scope.outer:
            return scope.names[name]
    return []


class ScopedVisitor(ast.NodeVisitor):
    """Visits a module, and knows the scopes around each node. Defaults and decorators belong to the scope outside."""

    def __init__(self, tree: ast.Module) -> None:
        self.scopes = [NameScope(tree)]

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = node.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        annotations = [each.annotation for each in parameters if each is not None]
        for part in (*node.decorator_list, *arguments.defaults, *arguments.kw_defaults, *annotations, node.returns):
            if part is not None:
                self.visit(part)
        self._inside(node, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
            self.visit(part)
        self._inside(node, node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for part in (*node.args.defaults, *node.args.kw_defaults):
            if part is not None:
                self.visit(part)
        self._inside(node, [node.body])

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        self._inside(node, ast.iter_child_nodes(node))

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def _inside(self, node: ScopeNode, parts: Iterable[ast.AST]) -> None:
        self.scopes.append(NameScope(node))
        for part in parts:
            self.visit(part)
        self.scopes.pop()


def own_parts(node: ScopeNode) -> list[ast.AST]:
    """The parts of a scope that are evaluated inside it; defaults and decorators belong to the scope around it."""
    if isinstance(node, ast.Lambda):
        return [node.args, node.body]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.args, *node.body]
    if isinstance(node, ast.ClassDef):
        return list(node.body)
    return list(ast.iter_child_nodes(node))


def _own_nodes(scope: ScopeNode) -> Iterator[ast.AST]:
    pending = own_parts(scope)
    while pending:
        node = pending.pop(0)
        yield node
        if not isinstance(node, ScopeNode):
            pending += ast.iter_child_nodes(node)


def _bindings(node: ast.AST) -> Iterator[tuple[str, Binding]]:
    line = getattr(node, "lineno", 0)
    if isinstance(node, ast.Import):
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            yield name, Binding(line, alias.name if alias.asname else name, node, alias)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            module = "." * node.level + (node.module or "")
            yield alias.asname or alias.name, Binding(line, f"{module}.{alias.name}", node, alias)
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id, Binding(line)
    elif isinstance(node, ast.arg):
        yield node.arg, Binding(line)
    elif isinstance(node, _NAMED) and node.name:
        yield node.name, Binding(line)
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest, Binding(line)
