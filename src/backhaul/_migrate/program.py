"""Migrates one program: finds what it uses of torch's RPC, and writes Backhaul's names in their place. Pure.

It edits by the positions of Python's own ``ast``, so that migrating needs no package that Backhaul does not need. What
it does not change keeps its formatting and comments.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import warnings

from backhaul._migrate import calls, names
from backhaul._migrate.bindings import Binding, ScopedVisitor, find
from backhaul._migrate.edits import Source
from backhaul._migrate.imports import Imports
from backhaul._migrate.options import OptionVariables


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Remark:
    """Something that the codemod says about a line. ``left``: the line still needs a change by hand."""

    line: int
    text: str
    left: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Migration:
    """A migrated program: its text, and what there is to say about it."""

    text: str
    remarks: tuple[Remark, ...]


def migrate(text: str) -> Migration:
    """Rewrite a program from ``torch.distributed.rpc`` to Backhaul.

    A program that uses nothing of torch's RPC is returned as it is, so migrating twice is like migrating once.

    Raises:
        SyntaxError: The text is not Python.
        ValueError: The result would not be Python.

    Example:
        >>> print(
        ...     migrate('''
        ... import torch.distributed.rpc as rpc
        ... rpc.init_rpc("ps", rank=0, world_size=1)  # the only worker
        ... rpc.shutdown()
        ... ''').text
        ... )
        <BLANKLINE>
        import backhaul as bh
        bh.init("ps", rank=0, world_size=1)  # the only worker
        bh.serve()
        <BLANKLINE>
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the program itself writes
        tree = ast.parse(text)
        visitor = _Uses(Source(text), tree)
        visitor.visit(tree)
        visitor.finish()
        made = visitor.source.result()
        try:
            ast.parse(made)
        except SyntaxError as error:
            raise ValueError(f"this program cannot be migrated: line {error.lineno} would be no Python") from error
    return Migration(made, tuple(sorted(set(visitor.remarks))))


class _Uses(ScopedVisitor):
    """Visits every use of a name of torch, and edits it."""

    def __init__(self, source: Source, tree: ast.Module) -> None:
        super().__init__(tree)
        self.source = source
        self.remarks: list[Remark] = []
        self._imports = Imports(source, tree)
        self._bh = self._imports.bh
        self._options = OptionVariables(source, self._imports, self._leave)
        self._done: set[int] = set()  # ids of nodes that an edit has taken care of

    def finish(self) -> None:
        """Edit the imports, once it is known which of them are still needed."""
        for line, text in self._imports.rewrite():
            self._leave(line, text)

    # Uses.

    def visit_Call(self, node: ast.Call) -> None:
        found = self._resolve(node.func)
        if found is None:
            if isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
                calls.rename_keyword(self.source, node, "dist_autograd_ctx_id", "context")
            self.generic_visit(node)
            return
        name, bindings = found
        if (why := calls.refusal(name, node, self._is_backend)) is not None:
            self._keep(node.func, bindings, why)
        elif name in names.QUERIES and not node.args and not node.keywords:
            self._write(node, bindings, names.QUERIES[name].format(bh=self._bh))
            return
        else:
            new = names.REPLACED.get(name)
            if name == names.INIT:
                calls.change_init(self.source, node)
            elif name in names.OPTIONS:
                calls.change_options(self.source, node, self._bh, self._note)
            elif name == names.SHUTDOWN:
                new = calls.change_shutdown(self.source, node)
            elif name in names.CALLS:
                calls.change_call(self.source, node)
            elif name.startswith(names.AUTOGRAD):
                calls.change_autograd(self.source, node)
            self._use(node.func, name, bindings, new)
        self._done.add(id(node.func))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if id(node) in self._done:
            return
        if (found := self._resolve(node)) is not None:
            self._use(node, *found, names.REPLACED.get(found[0]))
        elif node.attr == "script" and ast.unparse(node) == "torch.jit.script" and self.source.edits:
            self._note(node, "if the script makes calls, `import backhaul.jit` first, see docs/torchscript.md")
        elif not self._options.read(node):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if id(node) in self._done or not isinstance(node.ctx, ast.Load):
            return
        bindings = find(node.id, self.scopes)
        tracked = [binding for binding in bindings if names.is_tracked(binding.imported)]
        if tracked and len({binding.imported for binding in bindings}) > 1:
            other = next(binding for binding in bindings if binding.imported != tracked[0].imported)
            self._keep(node, bindings, f"line {other.line} gives the name `{node.id}` another meaning")
        elif tracked:
            name = names.canonical(tracked[0].imported)
            self._use(node, name, bindings, names.REPLACED.get(name))
        elif bindings:
            self._imports.uses_other(node.id, bindings)

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(node.value, ast.Call):
            name = (self._resolve(node.value.func) or ("",))[0]
            if name in names.OPTIONS and calls.refusal(name, node.value, self._is_backend) is None:
                self._options.add(targets)
        if isinstance(node, ast.Assign) and self._options.assign(node):
            self.visit(node.value)
        else:
            self.generic_visit(node)

    visit_AnnAssign = visit_Assign

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node.value, ast.Call) and self._options.call(node.value):
            for argument in (*node.value.args, *node.value.keywords):
                self.visit(argument)
        else:
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str) or id(node) in self._done:
            return
        if any(module in node.value for module in names.MODULES):
            self._note(node, "a text names torch's RPC; it stays as it is")
        for part in _names_in(node.value):
            if (found := self._resolve(part)) is not None:
                self._keep(part, found[1], "it is in a text; write the annotation without quotes", line=node.lineno)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part)

    # What a use means, and what becomes of it.

    def _resolve(self, node: ast.expr) -> tuple[str, list[Binding]] | None:
        """The tracked name that an expression is, and what binds its first part; None if it is none."""
        parts: list[str] = []
        inner = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        if not isinstance(inner, ast.Name):
            return None
        bindings = find(inner.id, self.scopes)
        if len({binding.imported for binding in bindings}) != 1 or not bindings[0].imported:
            return None
        name = names.canonical(".".join([bindings[0].imported, *parts]))
        return (name, bindings) if names.is_tracked(name) else None

    def _use(self, node: ast.expr, name: str, bindings: list[Binding], new: str | None) -> None:
        if name in names.EXPRESSIONS:
            self._write(node, bindings, names.EXPRESSIONS[name].format(bh=self._bh))
        elif new is None and isinstance(node, ast.Attribute) and self._resolve(node.value) is not None:
            inner, inner_bindings = self._resolve(node.value) or (name, bindings)
            known = inner in names.REPLACED or inner in names.LEFT
            if known:  # an attribute of a name that is migrated, such as rpc.RRef.to_here
                self._use(node.value, inner, inner_bindings, names.REPLACED.get(inner))
            else:
                self._keep(node, bindings, names.reason_for(name))
        elif new is None:
            self._keep(node, bindings, names.reason_for(name))
        elif not isinstance(node, ast.Name) or name in names.RENAMED:  # others are imported under their name
            self._write(node, bindings, f"{self._bh}.{new}")

    def _write(self, node: ast.expr, bindings: list[Binding], text: str) -> None:
        self._imports.needs_backhaul(bindings)
        self.source.replace(node, text)

    def _keep(self, node: ast.expr, bindings: list[Binding], why: str, line: int = 0) -> None:
        self._imports.keep(bindings)
        self._leave(line or node.lineno, f"`{ast.unparse(node)}` stays: {why}")

    def _is_backend(self, node: ast.expr) -> bool:
        found = self._resolve(node)
        if found is None or not found[0].startswith(f"{names.RPC}.BackendType."):
            return False
        self._done.update(id(part) for part in ast.walk(node))
        return True

    def _note(self, node: ast.AST, text: str) -> None:
        self.remarks.append(Remark(getattr(node, "lineno", 0), text, left=False))

    def _leave(self, line: int, text: str) -> None:
        self.remarks.append(Remark(line, text))


def _names_in(text: str) -> list[ast.Attribute]:
    """The dotted names in the text of an annotation."""
    if _ANNOTATION.fullmatch(text) is None:
        return []
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]


_ANNOTATION = re.compile(r"[\w.]+\.\w+(\[.*\])?|\w+\[.*\..*\]")
