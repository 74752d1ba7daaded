"""Converts a timeline to one HTML page that needs no network, no server and no other file.

The folder ``page`` contains the page and its scripts, which do all the work. This module combines them with the data
and escapes all names, so that no name can act as markup or script.
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

# In this order, because each file uses the ones before it.
_STYLES = ("theme.css", "page.css", "timeline.css", "panels.css")
_SCRIPTS = ("data.js", "layout.js", "paint.js", "view.js", "details.js", "tables.js", "main.js")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")

# Characters that could end a script element or begin a comment in it, and the line ends that JSON allows in strings but
# JavaScript does not. JSON reads the escapes as the same characters.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


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
    """Replace the placeholders of a template. Text in a value that looks like a placeholder is not replaced."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


def _embed(value: object) -> str:
    """JSON for use inside a script element. Values that JSON does not support become their ``repr``."""
    return msgspec.json.encode(value, enc_hook=repr).decode().translate(_ESCAPES)


def _hash(text: str) -> str:
    """The name of an inline script or style in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
