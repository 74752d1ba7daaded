"""A browser for all tests of a module, and a page for each test."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backhaul.profiler.model import Timeline
from backhaul.profiler.report import render

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Lives as long as the module, so that the leak checks of single tests do not see its process and event loop."""
    with open_browser(find_chromium()) as chromium:
        yield chromium


def find_chromium() -> str:
    """The path of Chromium; skips the test if there is none."""
    pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("there is no Chromium; `make browser` installs it where it can")
    return path


@contextlib.contextmanager
def open_browser(path: str | Path) -> Iterator[Browser]:
    """A browser without a window. ``path``: Chromium, or a program that becomes it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as api:
        chromium = api.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_report(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens the report of a timeline. Checks at the end that no page had an error or requested another resource."""
    contexts, problems = [], []

    def open_report(shown: Timeline | Path, *, title: str = "A step", scheme: str = "light") -> Page:
        file = shown if isinstance(shown, Path) else tmp_path / f"report{len(contexts)}.html"
        if isinstance(shown, Timeline):
            file.write_text(render(shown, title=title), encoding="utf-8")
        context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", lambda request: request.url == file.as_uri() or problems.append(f"requested {request.url}"))
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        page.goto(file.as_uri())
        return page

    yield open_report
    for context in contexts:
        context.close()
    assert problems == []
