"""The parts of the metadata that depend on where the project lives: its URLs, and links in the long description that
are absolute. All else is in ``pyproject.toml``.

The address is ``repository`` under ``[tool.backhaul]`` in ``pyproject.toml``. The variable ``BACKHAUL_REPOSITORY`` wins
over it: the release workflow sets it, since a workflow knows the address of its own repository.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^]]*)]\((?P<target>(?!https?:|#|mailto:)[^)\s]+)\)")


def find_repository() -> str:
    """The address of the repository, without a slash at its end; empty if it has none yet."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        named = tomllib.load(file)["tool"]["backhaul"]["repository"]
    return (os.environ.get("BACKHAUL_REPOSITORY") or named).rstrip("/")


def find_version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "src/backhaul/__init__.py").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def make_absolute(page: str, repository: str, version: str) -> str:
    """The page with absolute links to the files of this version. Without a repository only the text of a link is left,
    since a package index has none of the files.
    """

    def replace(link: re.Match[str]) -> str:
        if not repository:
            return "" if link["image"] else link["text"]
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({repository}/{kind}/v{version}/{link['target']})"

    return LINK.sub(replace, page)


def make_urls(repository: str) -> dict[str, str]:
    if not repository:
        return {}
    return {
        "Repository": repository,
        "Documentation": f"{repository}/tree/HEAD/docs",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


if __name__ == "__main__":
    where = find_repository()
    setup(
        long_description=make_absolute((ROOT / "README.md").read_text("utf-8"), where, find_version()),
        long_description_content_type="text/markdown",
        project_urls=make_urls(where),
    )
