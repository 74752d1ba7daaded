"""``python -m tools.site``: builds the site into ``build/site``. Warnings are errors, among them links to nowhere."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.cmd.build import build_main

from tools.site import navigation, notebooks, reference
from tools.site.assemble import ROOT, assemble, offer_notebook, write_indexes
from tools.site.checks import problems


def main(target: Path) -> int:
    """Build the site; returns the exit status."""
    source, pages = target / "source", target / "html"
    assemble(source)
    reference.write(source / "api")
    write_indexes(source)
    notebooks.write(source / "notebooks")
    for page in notebooks.pages():
        offer_notebook(source / "tutorials" / page.name)
    index = source / "index.md"
    index.write_text(f"{index.read_text()}\n{navigation.toctrees(navigation.names_of(source))}")
    here = str(Path(__file__).parent)
    arguments = ["-q", "-E", "-W", "--keep-going", "-b", "html", "-c", here, str(source), str(pages)]
    if status := build_main(arguments):
        return status
    found = problems(pages)
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        print(f"the site is in {pages / 'index.html'}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(ROOT / "build" / "site"))
