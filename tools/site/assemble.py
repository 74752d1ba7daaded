"""Puts the pages of the site together: the pages of the repository with their links, and the pages of the site alone.

Pages of ``docs`` keep their place. Pages at the root of the repository become pages of ``project``. Files of
``examples`` become pages that show them.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from tools.site.navigation import names_of, toctree

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PROJECT = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".txt": "text", ".json": "json"}

_FENCE = re.compile(r"^( *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^ *```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?P<head>!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()(?P<target>[^)#\s]*)(?P<anchor>#[^)]*)?\)")

# Leads from a page of the repository to what the forge has beside its files, such as releases.
_FORGE_LINK = re.compile(r"^(\[[^\]]+\]: )\.\./\.\./(.*\n)", re.MULTILINE)


def place_of(path: PurePosixPath) -> PurePosixPath | None:
    """Where a file of the repository is in the sources of the site; None: it is not there."""
    if path.parts[0] == "docs":
        return PurePosixPath(*path.parts[1:])
    if str(path) in PROJECT:
        return PurePosixPath("project", path.name.lower().replace("_", "-"))
    if str(path) == "README.md":
        return PurePosixPath("index.md")
    if path.parts[0] == "examples":
        return PurePosixPath("examples/index.md" if len(path.parts) == 1 or not path.suffix else f"{path}.md")
    return None


def with_links(text: str, page: PurePosixPath) -> str:
    """The text of a page of the repository, with links to where things are in the site.

    Raises:
        ValueError: A link leads to a file that is not in the site.
    """
    here = place_of(page)
    assert here is not None

    def moved(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = PurePosixPath(os.path.normpath(page.parent / target))
        place = place_of(path)
        if path.suffix == ".svg" and match["head"].startswith("!"):
            return _inline(ROOT / path)
        if place is None:
            raise ValueError(f"{page} links to {target}, which is not in the site")
        return f"{match['head']}{os.path.relpath(place, here.parent)}{anchor})"

    forge = rf"\g<1>{address}/\g<2>" if (address := _address_of_repository()) else ""
    return _outside_of_code(text, lambda part: _LINK.sub(moved, _FORGE_LINK.sub(forge, part)))


def _address_of_repository() -> str:
    """Empty while the project has none."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        address: str = tomllib.load(file)["tool"]["backhaul"]["repository"]
    return (os.environ.get("BACKHAUL_REPOSITORY") or address).rstrip("/")


def _inline(picture: Path) -> str:
    """A picture as part of the page, where its style sheet sees the colors of the theme."""
    return f'\n```{{raw}} html\n<div class="picture" tabindex="0">\n{picture.read_text()}</div>\n```\n'


def _outside_of_code(text: str, change: Callable[[str], str]) -> str:
    parts: list[str] = []
    done = 0
    for match in _FENCE.finditer(text):
        parts += [change(text[done : match.start()]), _block(match)]
        done = match.end()
    return "".join([*parts, change(text[done:])])


def _block(match: re.Match[str]) -> str:
    """A block of code; what follows its language, such as ``no-run: ...``, is for the tests."""
    language = match["info"].partition(" ")[0]
    return f"{match[1]}```{language}\n{match['code']}{match[1]}```"


def assemble(target: Path) -> None:
    """Write the sources of the site."""
    shutil.rmtree(target, ignore_errors=True)
    for path in _files():
        relative = PurePosixPath(path.relative_to(ROOT).as_posix())
        place = place_of(relative)
        assert place is not None
        to = target / place
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            to.write_text(with_links(path.read_text(), relative))
        elif relative.parts[0] == "examples":
            to.write_text(_listing(path))
        else:
            shutil.copy(path, to)
    start = (Path(__file__).parent / "start.md").read_text()
    (target / "index.md").write_text(with_links(start, PurePosixPath("README.md")))


def write_indexes(target: Path) -> None:
    """List the pages of folders whose pages are made or have no toctree."""
    examples = [name for name in names_of(target) if name.startswith("examples/")]
    rows = [
        f"- [{name.removeprefix('examples/')}]({name.removeprefix('examples/')}.md){_about(name)}" for name in examples
    ]
    entries = [name.removeprefix("examples/") for name in examples]
    (target / "examples" / "index.md").write_text("\n".join(["# Examples", "", *rows, "", toctree(entries)]))
    design = [name.removeprefix("design/") for name in names_of(target / "design") if name != "index"]
    with (target / "design" / "index.md").open("a") as index:
        index.write(f"\n{toctree(design)}")


def offer_notebook(page: Path) -> None:
    """Link a tutorial to its notebook, below its title."""
    title, _, rest = page.read_text().partition("\n")
    link = f"{{download}}`As a notebook <../notebooks/{page.stem}.ipynb>`"
    page.write_text(f"{title}\n\n{link}\n{rest}")


def _about(name: str) -> str:
    """The first sentence of an example's docstring."""
    path = ROOT / name
    if path.suffix != ".py":
        return ""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return ": " + " ".join(docstring.partition("\n\n")[0].split()) if docstring else ""


def _files() -> Iterator[Path]:
    yield from (path for path in sorted(DOCS.rglob("*")) if path.is_file())
    yield from (ROOT / name for name in PROJECT)
    yield from (path for path in sorted((ROOT / "examples").rglob("*")) if path.suffix in LANGUAGES)


def _listing(path: Path) -> str:
    name = path.relative_to(ROOT / "examples").as_posix()
    return f"# {name}\n\n```{LANGUAGES[path.suffix]}\n{path.read_text()}```\n"
