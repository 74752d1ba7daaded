"""Makes one HTML page of a template, styles, scripts and data. The page loads nothing, and its content security policy
forbids all scripts but its own. All data is escaped, so that no name can act as markup or script.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files

import msgspec

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")

# Characters that could end a script element or begin a comment in it, and the line ends that JSON allows in strings but
# JavaScript does not. JSON reads the escapes as the same characters.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}

Part = tuple[str, str]
"""A file of a page: the package whose folder ``page`` has it, and its name."""


def assemble(
    template: Part,
    styles: Sequence[Part],
    scripts: Sequence[Part],
    values: Mapping[str, str],
    *,
    connect: str = "'none'",
) -> str:
    """The page.

    Args:
        template: Has the placeholders ``policy``, ``style`` and ``script``, and those of ``values``.
        styles: In this order.
        scripts: In this order, because each file uses the ones before it.
        values: What replaces the other placeholders. Text is to be escaped already.
        connect: From where the page may request data.
    """
    style = "\n".join(map(_read, styles))
    script = '(() => {\n"use strict";\n' + "\n".join(map(_read, scripts)) + "})();\n"
    allowed = f"style-src {_hash(style)}; script-src {_hash(script)}; connect-src {connect}"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'"
    filled = {"policy": policy, "style": style, "script": script, **values}
    # Text in a value that looks like a placeholder is not replaced.
    return _PLACEHOLDER.sub(lambda match: filled[match[1]], _read(template))


def embed(value: object) -> str:
    """JSON for use inside a script element. Values that JSON does not support become their ``repr``."""
    return msgspec.json.encode(value, enc_hook=repr).decode().translate(_ESCAPES)


def _read(part: Part) -> str:
    package, name = part
    return files(package).joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The name of an inline script or style in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
