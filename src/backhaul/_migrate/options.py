"""Variables that hold options. Torch's options are changed after they are made; those of Backhaul are frozen."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable

from backhaul._migrate import names
from backhaul._migrate.calls import Arguments
from backhaul._migrate.edits import Source
from backhaul._migrate.imports import Imports


class OptionVariables:
    """The variables of a program that hold options, and what it does with them."""

    def __init__(self, source: Source, imports: Imports, leave: Callable[[int, str], None]) -> None:
        self._source = source
        self._imports = imports
        self._leave = leave
        self._texts: set[str] = set()

    def add(self, targets: Iterable[ast.expr]) -> None:
        """These are options from now on."""
        self._texts.update(self._source.text_of(target) for target in targets)

    def assign(self, statement: ast.Assign) -> bool:
        """``options.init_method = value``. Whether the statement is of this kind."""
        target = statement.targets[0]
        options = self._options_of(target)
        if options is None or not isinstance(target, ast.Attribute):
            return False
        bh, name = self._imports.bh, target.attr
        if len(statement.targets) > 1 or not (name in names.OPTION_NAMES or name == "device_maps"):
            self._leave(statement.lineno, f"options are frozen, and there is no `{name}`; pass all to {bh}.Options")
            return True
        start, end = self._source.span(statement.value)
        self._source.replace(target, options)
        before, after = (
            (f"devices={bh}.Devices(maps=", "))") if name == "device_maps" else (f"{names.OPTION_NAMES[name]}=", ")")
        )
        self._source.insert(start, f"dataclasses.replace({options}, {before}")
        self._source.insert(end, after)
        self._imports.needs_dataclasses = True
        return True

    def call(self, call: ast.Call) -> bool:
        """``options.set_device_map(to, device_map)``. Whether the statement is of this kind."""
        options = self._options_of(call.func)
        if options is None or not isinstance(call.func, ast.Attribute):
            return False
        arguments = Arguments(self._source, call)
        to, devices = arguments.find("to", 0), arguments.find("device_map", 1)
        bh, name = self._imports.bh, call.func.attr
        if name != "set_device_map" or to is None or devices is None or len(call.args) + len(call.keywords) != 2:
            self._leave(call.lineno, f"{bh}.Options has no `{name}`; leave the call out")
            return True
        (start, end), (first, first_end), (second, second_end) = map(self._source.span, (call, to, devices))
        kept = f"**({options}.devices.maps or {{}})"
        new = f"{options} = dataclasses.replace({options}, devices={bh}.Devices(maps={{{kept}, "
        self._source.cut(start, first, new)
        self._source.cut(first_end, second, ": ")
        self._source.cut(second_end, end, "}))")
        self._imports.needs_dataclasses = True
        return True

    def read(self, node: ast.Attribute) -> bool:
        """``options.rpc_timeout``. Whether the expression is of this kind."""
        if self._options_of(node) is None or not isinstance(node.ctx, ast.Load):
            return False
        end = self._source.span(node)[1]
        new = names.OPTION_NAMES.get(node.attr, "devices.maps" if node.attr == "device_maps" else "")
        if new:
            self._source.cut(end - len(node.attr), end, new)
        elif node.attr not in ("timeout", "threads", "devices"):
            self._leave(node.lineno, f"{self._imports.bh}.Options has no `{node.attr}`")
        return True

    def _options_of(self, node: ast.expr) -> str | None:
        """The text of the options that an attribute belongs to."""
        if not isinstance(node, ast.Attribute):
            return None
        text = self._source.text_of(node.value)
        return text if text in self._texts else None
