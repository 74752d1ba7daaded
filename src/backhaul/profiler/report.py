"""A timeline as one HTML page that needs nothing else: no network, no server, no other file.

The page is in the folder ``page``: its scripts do all the work. This module joins them with the data, and
sees to it that a name somebody chose stays a name.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Mapping
from importlib.resources import files

import msgspec

from backhaul.profiler.model import KINDS, Timeline

# Each uses those before it.
_STYLES = ("theme.css", "page.css", "timeline.css", "panels.css")
_SCRIPTS = ("data.js", "layout.js", "paint.js", "view.js", "details.js", "tables.js", "main.js")
_PLACE = re.compile(r"\{\{(\w+)\}\}")

# What would end a script element or open a comment in it, and the line ends that only JSON allows in strings. The page
# reads them as the same characters.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def render(timeline: Timeline, *, title: str = "Backhaul profile") -> str:
    """The page that shows a timeline.

    Args:
        timeline: What to show; it is not changed.
        title: Stands at the head of the page and in the browser's tab.

    Returns:
        All of the page. It loads nothing, and its policy forbids every script but its own.

    Example:
        >>> page = render(Timeline(owner=0, end=1_000_000), title="An empty step")
        >>> page.splitlines()[0]
        '<!doctype html>'
    """
    style = "\n".join(map(_part, _STYLES))
    script = '(() => {\n"use strict";\n' + "\n".join(map(_part, _SCRIPTS)) + "})();\n"
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    return _fill(
        _part("page.html"),
        {
            "policy": policy,
            "title": html.escape(title),
            "style": style,
            "script": script,
            "kinds": _embed(KINDS),
            "timeline": _embed(timeline),
        },
    )


def _part(name: str) -> str:
    return files("backhaul.profiler").joinpath("page", name).read_text(encoding="utf-8")


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Once over the template: what looks like a place inside a value is left alone."""
    return _PLACE.sub(lambda match: values[match[1]], template)


def _embed(value: object) -> str:
    """JSON that may stand inside a script element; what JSON has no word for is told as text."""
    return msgspec.json.encode(value, enc_hook=repr).decode().translate(_ESCAPES)


def _hash(text: str) -> str:
    """How a content security policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
