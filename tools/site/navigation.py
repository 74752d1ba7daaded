"""The order of the pages. A page of ``docs`` that is not named here comes last among the how-tos."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

SECTIONS: dict[str, list[str]] = {
    "Start": ["quickstart", "concepts"],
    "Tutorials": [
        "tutorials/split-a-model",
        "tutorials/parameter-server",
        "tutorials/pipeline",
        "tutorials/actors",
        "tutorials/split-learning",
        "tutorials/several-hosts",
        "tutorials/notebooks",
        "tutorials/trainers",
    ],
    "How-tos": [
        "split",
        "groups",
        "streams",
        "nn",
        "optim",
        "profiling",
        "monitoring",
        "clusters",
        "failures",
        "recovery",
        "replay",
        "ray",
        "deadlines",
        "compression",
        "cuda",
        "compile",
        "torchscript",
        "typing",
        "security",
    ],
    "Reference": [
        "command",
        "api/index",
        "migration",
        "comparison",
        "errors",
        "troubleshooting",
        "faq",
        "examples/index",
        "glossary",
    ],
    "Measured": ["benchmarks", "performance", "reliability", "versions", "reference-suites"],
    "Inside": ["architecture", "design/index", "protocol", "patches"],
    "Project": ["project/changelog", "project/contributing", "project/code-of-conduct", "project/security"],
}

_ELSEWHERE = ("api/", "design/", "examples/", "project/", "tutorials/")
"""Folders whose pages are listed by the index of the folder, or above."""


def toctrees(pages: Iterable[str]) -> str:
    """The navigation, as the toctrees of the first page."""
    pages = set(pages)
    listed = {name for names in SECTIONS.values() for name in names}
    more = sorted(name for name in pages - listed - {"index"} if not name.startswith(_ELSEWHERE))
    parts = []
    for caption, names in SECTIONS.items():
        entries = [*names, *(more if caption == "How-tos" else [])]
        parts.append(toctree(entries, caption))
    return "\n".join(parts)


def toctree(entries: Iterable[str], caption: str = "") -> str:
    """A hidden toctree."""
    head = f":caption: {caption}\n" if caption else ""
    return "```{toctree}\n:hidden:\n" + head + "\n" + "\n".join(entries) + "\n```\n"


def names_of(source: Path) -> list[str]:
    """The pages below a folder, without their suffix."""
    return sorted(path.relative_to(source).with_suffix("").as_posix() for path in source.rglob("*.md"))
