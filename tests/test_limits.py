"""Files and classes stay within the limits of CONTRIBUTING.md, or say why not; one class name means one thing."""

from __future__ import annotations

import ast
import re

from tools.limits import ROOT, _reason, attributes_of, count_methods, excesses, lines_of_overloads, repeated_names


def test_what_is_over_a_limit_has_a_reason() -> None:
    assert [each for each in excesses() if not each.reason] == []


def test_one_class_name_is_one_thing() -> None:
    assert repeated_names() == {}


def test_the_count() -> None:
    source = "class A:\n    a: int\n    def f(self):\n        self.b = self.c, self.d = 1\n    async def g(self): ...\n"
    source += "    @overload\n    def g(self): ...\n"
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.ClassDef)
    assert count_methods(node) == 2
    assert lines_of_overloads(ast.parse(source)) == 2
    assert attributes_of(node) == {"a", "b", "c", "d"}
    assert _reason("# Over the limit because it is a table\n# of two lines.") == "it is a table of two lines."
    assert _reason("# It is large.") == ""


def test_the_page_names_what_is_over_a_limit() -> None:
    page = (ROOT / "docs" / "design" / "sizes.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", page, re.MULTILINE))
    assert named == {(each.name or each.path, each.path) for each in excesses()}, "run `python -m tools.limits --table`"
