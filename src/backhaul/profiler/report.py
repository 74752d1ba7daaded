"""Converts a timeline to one HTML page that needs no network, no server and no other file.

The folder ``page`` contains the page and its scripts, which do all the work. ``inline_page`` combines them with the
data.
"""

from __future__ import annotations

import html

from backhaul.profiler.inline_page import assemble, embed
from backhaul.profiler.model import KINDS, Timeline

_STYLES = ("theme.css", "page.css", "timeline.css", "panels.css")
_SCRIPTS = ("data.js", "layout.js", "paint.js", "view.js", "details.js", "tables.js", "main.js")


def render(timeline: Timeline, *, title: str = "Backhaul profile") -> str:
    """The page that shows a timeline.

    Args:
        timeline: The timeline to show. It is not changed.
        title: The title at the head of the page and in the tab of the browser.

    Returns:
        The complete page. It loads nothing, and its content security policy forbids all scripts but its own.

    Example:
        >>> page = render(Timeline(owner=0, end=1_000_000), title="An empty step")
        >>> page.splitlines()[0]
        '<!doctype html>'
    """
    return assemble(
        (_PACKAGE, "page.html"),
        [(_PACKAGE, name) for name in _STYLES],
        [(_PACKAGE, name) for name in _SCRIPTS],
        {"title": html.escape(title), "kinds": embed(KINDS), "timeline": embed(timeline)},
    )


_PACKAGE = "backhaul.profiler"
