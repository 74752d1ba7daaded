"""Checks the pages that were built: links, anchors, pictures with texts, and that nothing comes from other hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {("img", "src"), ("script", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
_NAMED = ("canonical", "license", "author")  # links that a browser does not load


class _Page(HTMLParser):
    """What a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.without_text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        for name, value in given.items():
            if (tag, name) in _LOADED and given.get("rel") not in _NAMED:
                self.loaded.append(value)
        if tag == "img" and not given.get("alt"):
            self.without_text.append(given.get("src", ""))


def problems(site: Path) -> list[str]:
    """Everything that is wrong in the pages below a folder."""

    @cache
    def read(path: Path) -> _Page:
        page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
        return page

    found: list[str] = []
    for path in sorted(site.rglob("*.html")):
        page, name = read(path), path.relative_to(site)
        found += [f"{name}: the picture {picture} has no text" for picture in page.without_text]
        for link in [*page.links, *page.loaded]:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                if link in page.loaded and url.scheme != "data":
                    found.append(f"{name}: loads {link} from another host")
                continue
            there = (path.parent / unquote(url.path)).resolve() if url.path else path
            there = there / "index.html" if there.is_dir() else there
            if not there.exists():
                found.append(f"{name}: {link} leads nowhere")
            elif url.fragment and there.suffix == ".html" and unquote(url.fragment) not in read(there).ids:
                found.append(f"{name}: {link} names no place on that page")
    return [*found, *_imports(site)]


def _imports(site: Path) -> Iterator[str]:
    """Style sheets that load from other hosts."""
    for path in sorted(site.rglob("*.css")):
        for target in re.findall(
            r"(?:@import\s+|url\()[\"']?(?:https?:)?//[^\"')\s]+", path.read_text(encoding="utf-8")
        ):
            yield f"{path.relative_to(site)}: {target}"
