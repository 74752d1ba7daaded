"""Handlers are registered together with their checks, and a guard sees every frame."""

from __future__ import annotations

from typing import Any

import pytest

from backhaul._runtime.runtime import Runtime
from backhaul._transport.base import Channel, Lost, Received
from backhaul._transport.inproc import InprocEndpoint
from backhaul._wire.frames import Frame
from backhaul._worker.frame_receiver import FrameReceiver, fields_only


class RecordingChannel(Channel):
    peer = "test"

    def __init__(self) -> None:
        self.closed = False

    def send(self, frame: Frame, *, timeout: float | None = None) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def receiver() -> Any:
    endpoint = InprocEndpoint()
    yield FrameReceiver(endpoint, Runtime())
    endpoint.close()


def test_a_guard_gets_each_handler_with_its_check(receiver: FrameReceiver) -> None:
    seen: list[Any] = []
    receiver.register(3, lambda channel, frame: seen.append(frame.kind), check=fields_only)
    receiver.register(4, lambda channel, frame: seen.append(frame.kind), check=None)

    def guard(handler: Any, check: Any, channel: Channel, frame: Frame) -> None:
        seen.append(check)
        if check is not None:
            handler(channel, frame)

    receiver.guard(guard)
    assert receiver.guarded
    channel = RecordingChannel()
    assert receiver.accept(Received(channel, [Frame(3), Frame(4)])) == []
    assert seen == [fields_only, 3, None]
    assert not channel.closed


def test_no_handler_is_registered_behind_the_guard(receiver: FrameReceiver) -> None:
    receiver.guard(lambda handler, check, channel, frame: None)
    with pytest.raises(RuntimeError, match="kind 3"):
        receiver.register(3, lambda channel, frame: None, check=fields_only)


def test_a_frame_without_a_handler_closes_its_channel(receiver: FrameReceiver) -> None:
    channel = RecordingChannel()
    assert receiver.route(channel, Frame(77)) is None
    assert channel.closed


def test_listeners_hear_of_a_loss_in_order(receiver: FrameReceiver) -> None:
    heard: list[Any] = []
    receiver.on_gone(lambda channel: heard.append("gone"))
    stop = receiver.on_lost(lambda channel, reason: heard.append("never"))
    receiver.on_lost(lambda channel, reason: heard.append(reason))
    stop()
    receiver.see_to(Lost(RecordingChannel(), "broken"))
    assert heard == ["gone", "broken"]
