"""The fields of log records."""

from __future__ import annotations

import logging

import pytest

import backhaul as bh

log = logging.getLogger("backhaul")


def write() -> None:
    log.warning("from a handler")


def test_a_record_about_another_worker_names_both(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "backhaul"), bh.cluster(["first", "second"]) as (_, second):
        seen = []
        stop = bh.on_membership(seen.append)
        with second:
            bh.leave()
        stop()
    found = [record for record in caplog.records if record.getMessage().startswith("worker 'second' has left")]
    assert [(record.worker, record.peer) for record in found] == [("first", "second")]


def test_a_record_of_a_handler_names_its_worker_and_call(caplog: pytest.LogCaptureFixture) -> None:
    with bh.cluster(["first", "second"]):
        bh.rpc_sync("second", write)
        bh.rpc_sync("second", write)
    one, other = [record for record in caplog.records if record.getMessage() == "from a handler"]
    assert (one.worker, one.peer) == ("second", "")
    assert 0 < one.call < other.call


def test_a_program_without_workers_has_the_fields_too(caplog: pytest.LogCaptureFixture) -> None:
    log.warning("no worker")
    (record,) = caplog.records
    assert (record.worker, record.peer, record.call) == ("", "", None)
