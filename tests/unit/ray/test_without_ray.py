"""What the package does where Ray is not installed."""

from __future__ import annotations

import sys

import pytest

import backhaul as bh
from tests.cluster.processes import run_processes


def has_ray(rank: int) -> bool:
    return "ray" in sys.modules


def test_backhaul_does_not_import_ray() -> None:
    assert run_processes(has_ray, 1) == [False]


def test_start_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"backhaul\[ray\]") as caught:
        bh.ray.start(1)
    assert caught.value.name == "ray"
    with pytest.raises(ImportError):
        bh.ray.join("ours", "extra")
