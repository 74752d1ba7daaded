"""The kit is a module of the package, so pytest has to be asked to explain its asserts."""

from __future__ import annotations

import sys

import pytest

if "backhaul.testing.transport_conformance" not in sys.modules:  # too late if another test module has imported it
    pytest.register_assert_rewrite("backhaul.testing.transport_conformance")
