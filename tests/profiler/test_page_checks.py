"""The checks of pages find what they are there for, each in a page that has it; and nothing in a page that has not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.page_checks import problems
from tests.profiler.conftest import Open

HEAD = '<meta name="viewport" content="width=device-width"><title>Page</title>'
GOOD = f"""<!doctype html><html lang="en"><head>{HEAD}</head><body><main><h1>Page</h1>
<p>See <a href="#a">there</a>.</p><button id="a">Press</button>
<svg role="img" aria-label="A picture" width="90" height="30"><rect width="90" height="30" fill="#000"/>
<text x="5" y="20" fill="#fff">text</text></svg></main></body></html>"""


def opened(open_report: Open, folder: Path, text: str) -> list[str]:
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    return problems(open_report(file))


def test_a_good_page(open_report: Open, tmp_path: Path) -> None:
    assert opened(open_report, tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (' lang="en"', "", "no lang"),
        ("<title>Page</title>", "", "no title"),
        ('content="width=device-width"', 'content="width=device-width, user-scalable=no"', "zoom is forbidden"),
        ("<p>See", "<h3>Part</h3><p>See", "level of headings"),
        ("main>", "div>", "main landmark"),
        ('id="a"', 'id="a" aria-labelledby="b"', "leads nowhere"),
        (">Press<", "><", "control without a name"),
        ("<p>See", '<input type="text"><p>See', "control without a name"),
        (' aria-label="A picture"', "", "picture without a text"),
        ("<p>See", '<img src="data:,"><p>See', "picture without a text"),
        ("<p>See", '<p style="color: #888">See', "contrast 3.5"),
        ("<p>See", '<p style="opacity: 0.4">See', "contrast 2."),
        ('fill="#fff"', 'fill="#333"', "contrast 1."),
        ("<p>See", '<div style="width: 500px">wide</div><p>See', "508 pixels wide"),
        ("<p>See", '<button style="all: unset; outline: auto">x</button><button>y</button><p>See', "close to another"),
        ("<p>See", '<div style="cursor: pointer">press</div><p>See', "only a mouse clicks"),
        ('id="a"', 'id="a" style="outline: none"', "focus cannot be seen"),
        ('id="a"', 'id="a" onfocus="this.previousElementSibling.firstElementChild.focus()"', "Tab does not reach"),
        (
            "<p>See",
            '<div style="height: 20px; overflow: auto"><p style="height: 90px">x</p></div><p>See',
            "a mouse scrolls",
        ),
    ],
)
def test_it_is_found(open_report: Open, tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in GOOD
    found = opened(open_report, tmp_path, GOOD.replace(old, new))
    assert [each for each in found if problem in each], found
