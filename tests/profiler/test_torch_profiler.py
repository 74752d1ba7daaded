"""Profiles together with a profiler of torch in the same process."""

from __future__ import annotations

import time

import pytest
import torch

import backhaul as bh

from . import programs
from .timelines import check


def test_attach_to_a_torch_profiler() -> None:
    with bh.cluster(3):
        every_thread = torch.profiler._ExperimentalConfig(profile_all_threads=True)
        with torch.profiler.profile(record_shapes=True, experimental_config=every_thread) as prof:
            attached = bh.profiler.attach(prof)
            programs.step(1)
        remote = [event for event in prof.events() if event.is_remote]
        mm = [event for event in remote if event.name == "backward(worker0 -> worker1)#remote_op: aten::mm"]
        assert len(mm) == 2
        assert mm[0].input_shapes == [[programs.SIZE, programs.SIZE]] * 2
        assert any(event.name == "aten::mul" and not event.is_remote for event in prof.events())
        check(attached.timeline)
        local = [each for each in attached.timeline.slices if each.kind == "op" and each.name == "aten::mul"]
        assert local
        averages = {average.key: average.count for average in prof.key_averages()}
        assert averages["backward(worker0 -> worker1)#remote_op: aten::mm"] == 2


def test_attach_needs_a_running_profiler() -> None:
    with bh.cluster(1), pytest.raises(bh.BackhaulError, match="needs a running profiler"):
        bh.profiler.attach(torch.profiler.profile())


def test_another_profiler_is_not_disturbed() -> None:
    with bh.cluster(2):
        with torch.profiler.profile() as torch_profile, bh.profile() as prof:
            bh.rpc_sync("worker1", programs.inner, args=(torch.ones(programs.SIZE, programs.SIZE),))
            torch.ones(2).sin()
        assert any(event.name == "aten::sin" for event in torch_profile.events())
    assert "another profiler" in prof.timeline.workers[0].note
    assert len(prof.timeline.calls) == 1


def test_the_profile_notes_that_another_profiler_ended_its_recording() -> None:
    with bh.cluster(1), bh.profile() as prof:
        programs.use_torch_profiler()
    assert "another profiler" in prof.timeline.workers[0].note
    assert f"worker0: {prof.timeline.workers[0].note}" in prof.table()


def test_attached_events_use_the_clock_of_the_profiler() -> None:
    with bh.cluster(2):
        every_thread = torch.profiler._ExperimentalConfig(profile_all_threads=True)
        with torch.profiler.profile(experimental_config=every_thread) as prof:
            time.sleep(0.05)
            first = bh.profiler.attach(prof)
            assert bh.profiler.attach(prof) is first
            with torch.profiler.record_function("region"):
                bh.rpc_sync("worker1", programs.inner, args=(torch.eye(programs.SIZE),))
        events = {event.name: event.time_range for event in prof.events()}
        region = events["region"]
        (mm,) = [event for event in prof.events() if event.is_remote and event.name.endswith("aten::mm")]
        assert region.start <= mm.time_range.start <= mm.time_range.end <= region.end
