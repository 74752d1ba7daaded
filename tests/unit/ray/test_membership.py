"""Where a worker listens on a node of Ray."""

from __future__ import annotations

import pytest

import backhaul as bh
from backhaul.ray.membership import ClusterSettings


@pytest.mark.parametrize(
    ("given", "several_hosts", "bind"),
    [
        (bh.Options(), False, None),
        (bh.Options(), True, "10.0.0.5"),
        (bh.Options(bind="0.0.0.0"), True, "0.0.0.0"),
        (bh.Options(bind="127.0.0.1"), False, "127.0.0.1"),
        (bh.Options(transport="unix"), True, None),
        (bh.Options(transport="tcp"), True, "10.0.0.5"),
    ],
)
def test_where_a_worker_listens(given: bh.Options, several_hosts: bool, bind: str | None) -> None:
    assert ClusterSettings(given, several_hosts).options_at("10.0.0.5").bind == bind
