"""The core under sanitizers. ``make sanitize`` does more of it."""

from __future__ import annotations

import pytest

from tools import sanitize


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_broken_input_under_sanitizers() -> None:
    try:
        sanitize.runtime()
        library = sanitize.compile_core()
    except sanitize.SanitizerError as error:
        pytest.skip(str(error))
    assert library.exists()
    assert sanitize.main(["--inputs", "50000"]) == 0
