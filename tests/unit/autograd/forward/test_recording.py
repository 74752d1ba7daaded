"""The notes that make calls part of the graph: what is recorded, when, and where it stands in program order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backhaul._autograd.container import Container
from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import recv_of
from backhaul._autograd.forward.recording import ForwardRecorder, Scope, current_scope, enter, leave
from backhaul._autograd.ids import NO_CONTEXT, ContextId
from backhaul._autograd.messages import AutogradNote
from backhaul._autograd.torch_engine import anomaly
from backhaul._autograd.untrusted import UntrustedRecorder
from backhaul._options import Options
from backhaul._wire.codec import Encoded
from backhaul._wire.messages import Payload, pack, unpack
from backhaul._worker import deadlines
from backhaul._worker.deadlines import CancelScope
from backhaul.errors import UnknownContextError


class Side:
    """One end of a conversation: a worker as far as the recorder looks at it."""

    def __init__(self, number: int) -> None:
        self.worker: Any = SimpleNamespace(name=f"worker{number}", options=Options(autograd="context"))
        self.peer: Any = SimpleNamespace(record=SimpleNamespace(id=number))
        self.container = Container(number)
        self.recorder = ForwardRecorder(self.worker, self.container)

    @contextlib.contextmanager
    def context(self, *place: int) -> Iterator[Context]:
        context = self.container.new()
        token = enter(Scope(self.worker, context, place))
        try:
            yield context
        finally:
            leave(token)


@pytest.fixture
def caller() -> Side:
    return Side(1)


@pytest.fixture
def callee() -> Side:
    return Side(2)


@pytest.fixture(autouse=True)
def no_scope() -> Iterator[None]:
    token = enter(None)
    yield
    leave(token)


def message(tensors: list[torch.Tensor]) -> Encoded:
    return Encoded(Payload(), [], [], tensors)


def read(note: bytes | None) -> AutogradNote:
    assert note is not None
    return unpack(note, AutogradNote)


LEAF = torch.ones(2, requires_grad=True)
PLAIN = torch.ones(2)


def leaf() -> torch.Tensor:
    """As tensors that require grad come out of a message."""
    return torch.ones(2, requires_grad=True)


def test_outside_of_a_context(caller: Side) -> None:
    note, kept = caller.recorder.request_out(caller.peer, message([LEAF]))
    assert note is None
    assert caller.recorder.reply_in(caller.peer, kept, None, [PLAIN]) == [PLAIN]
    assert len(caller.container) == 0


def test_a_request_is_recorded_at_its_sender(caller: Side, callee: Side) -> None:
    made = LEAF * 2
    with caller.context() as context:
        note = read(caller.recorder.request_out(callee.peer, message([PLAIN, LEAF, PLAIN, made]))[0])
    assert note.context == context.id == (1 << 48) + 1
    assert note.positions == (1, 3)
    assert note.message >> 48 == 1
    (record,) = context.sends.values()
    assert (record.message, record.to, record.order) == (note.message, 2, (0,))
    assert record.ends[0] is LEAF
    assert record.ends[1].node is made.grad_fn
    assert context.known == {2}
    assert not context.recvs


def test_a_message_that_needs_no_grad_only_makes_the_workers_known(caller: Side, callee: Side) -> None:
    with caller.context() as context:
        note = read(caller.recorder.request_out(callee.peer, message([PLAIN]))[0])
    assert (note.message, note.positions) == (0, ())
    assert (context.known, context.sends) == ({2}, {})
    tensors, _ = callee.recorder.request_in(caller.peer, pack(note), [PLAIN])
    assert tensors == [PLAIN]
    there = callee.container.get(context.id)
    assert (there.known, there.recvs) == ({1}, {})


def test_no_grad_leaves_no_trace(caller: Side, callee: Side) -> None:
    with caller.context() as context, torch.no_grad():
        note, kept = caller.recorder.request_out(callee.peer, message([LEAF]))
        assert caller.recorder.request_out(callee.peer, message([PLAIN]))[0] is None
    assert (context.known, context.sends) == (set(), {})
    (argument,), served = callee.recorder.request_in(caller.peer, note, [leaf()])
    assert not argument.requires_grad
    assert served is None
    assert len(callee.container) == 0
    # The result of a call under no_grad needs none either.
    (found,) = caller.recorder.reply_in(callee.peer, kept, None, [torch.ones(2, requires_grad=True)])
    assert not found.requires_grad


def test_a_whole_call(caller: Side, callee: Side) -> None:
    with caller.context() as context:
        note, kept = caller.recorder.request_out(callee.peer, message([LEAF, PLAIN]))
        arrived = [LEAF.detach().clone().requires_grad_(), PLAIN]
        tensors, served = callee.recorder.request_in(caller.peer, note, arrived)
        assert recv_of(tensors[0].grad_fn) is not None
        assert tensors[1] is PLAIN
        assert current_scope(callee.worker).context is callee.container.get(context.id)
        back = read(callee.recorder.reply_out(caller.peer, served, message([PLAIN, tensors[0] * 2])))
        (_, result) = caller.recorder.reply_in(callee.peer, kept, pack(back), [PLAIN, torch.ones(2)])
    assert recv_of(result.grad_fn) is not None
    there = callee.container.get(context.id)
    assert set(there.recvs) == set(context.sends) == {read(note).message}
    assert set(there.sends) == set(context.recvs) == {back.message}
    assert back.message >> 48 == 2
    assert (there.known, context.known) == ({1}, {2})


def test_received_tensors_are_not_leaves(caller: Side, callee: Side) -> None:
    """One or several: they may be changed in place, also through views."""
    for count in (1, 3):
        with caller.context():
            note, _ = caller.recorder.request_out(callee.peer, message([LEAF] * count))
        arrived = [torch.arange(2.0) for _ in range(count)]
        tensors, _ = callee.recorder.request_in(caller.peer, note, arrived)
        for tensor in tensors:
            assert not tensor.is_leaf
            tensor.mul_(2)
            tensor[:1].add_(1)
            assert tensor.tolist() == [1.0, 2.0]


def test_places_in_program_order(caller: Side, callee: Side) -> None:
    """Of the request whose handler sent it, and its number among that handler's messages."""
    with caller.context():
        first = caller.recorder.request_out(callee.peer, message([LEAF]))[0]
        second = caller.recorder.request_out(callee.peer, message([PLAIN]))[0]
        third = caller.recorder.request_out(callee.peer, message([LEAF]))[0]
    assert [read(note).order for note in (first, second, third)] == [(0,), (1,), (2,)]
    places = []
    for request in (third, second):
        _, served = callee.recorder.request_in(caller.peer, request, [torch.ones(2)])
        nested = callee.recorder.request_out(caller.peer, message([LEAF]))[0]
        reply = callee.recorder.reply_out(caller.peer, served, message([LEAF]))
        places += [read(nested).order, read(reply).order]
    assert places == [(2, 0), (2, 1), (1, 0), (1, 1)]


def test_a_released_context_at_the_sender(caller: Side, callee: Side) -> None:
    with caller.context() as context:
        _, kept = caller.recorder.request_out(callee.peer, message([LEAF]))
        caller.container.pop(context.id)
        assert context.end() == {2}
        assert caller.recorder.request_out(callee.peer, message([LEAF]))[0] is None
        assert caller.recorder.request_out(callee.peer, message([PLAIN]))[0] is None
        # A reply that comes now finds nobody who would ask for gradients.
        caller.recorder.reply_in(callee.peer, kept, None, [PLAIN])
    assert len(caller.container) == 0


@pytest.mark.parametrize("early", [True, False])
def test_a_released_context_at_the_receiver(caller: Side, callee: Side, early: bool) -> None:
    """Whether it had been there or not."""
    with caller.context() as context:
        notes = [caller.recorder.request_out(callee.peer, message([LEAF]))[0] for _ in range(2)]
    if not early:
        callee.recorder.request_in(caller.peer, notes[0], [torch.ones(2)])
        enter(None)
    callee.container.pop(context.id)
    tensors, served = callee.recorder.request_in(caller.peer, notes[1], [PLAIN])
    assert tensors == [PLAIN]
    assert current_scope(callee.worker) is None
    assert callee.recorder.reply_out(caller.peer, served, message([LEAF])) is None
    assert len(callee.container) == 0


def test_a_reply_after_the_release(caller: Side, callee: Side) -> None:
    with caller.context() as context:
        note, _ = caller.recorder.request_out(callee.peer, message([LEAF]))
        tensors, served = callee.recorder.request_in(caller.peer, note, [torch.ones(2)])
    callee.container.pop(context.id).end()
    assert callee.recorder.reply_out(caller.peer, served, message(tensors)) is None


@pytest.mark.parametrize("leaves", [False, True])
def test_what_arrives_outside_of_a_context(caller: Side, callee: Side, leaves: bool) -> None:
    """It refuses its gradient and knows who sent it, or is a leaf as in the reference."""
    caller.recorder.leaves = callee.recorder.leaves = leaves
    note, kept = caller.recorder.request_out(callee.peer, message([LEAF]))
    (argument, plain), served = callee.recorder.request_in(caller.peer, note, [leaf(), PLAIN])
    assert plain is PLAIN
    assert served is None
    (result,) = caller.recorder.reply_in(callee.peer, kept, None, [leaf()])
    for tensor, sender in ((argument, 1), (result, 2)):
        assert tensor.requires_grad
        assert tensor.is_leaf == leaves
        if not leaves:
            recv, _ = recv_of(tensor.grad_fn)
            assert (recv.context, recv.message, recv.sender) == (NO_CONTEXT, 0, sender)


def test_what_arrives_of_a_context_that_is_over(caller: Side, callee: Side) -> None:
    """Its gradient is refused as well, and which context it was is known."""
    with caller.context() as context:
        note, kept = caller.recorder.request_out(callee.peer, message([LEAF]))
    callee.container.pop(context.id)
    (argument,), _ = callee.recorder.request_in(caller.peer, note, [leaf()])
    (result,) = caller.recorder.reply_in(callee.peer, kept, None, [leaf()])
    for tensor in (argument, result):
        recv, _ = recv_of(tensor.grad_fn)
        assert (recv.context, recv.message) == (context.id, 0)


def test_the_scope_of_another_worker_does_not_count(caller: Side, callee: Side) -> None:
    with caller.context():
        assert callee.recorder.request_out(caller.peer, message([LEAF]))[0] is None
        assert current_scope(callee.worker) is None


# Anomaly mode.


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("level", [anomaly.OFF, anomaly.CHECK_NAN])
def test_anomaly_mode_goes_with_requests(caller: Side, callee: Side, level: int, trusted: bool) -> None:
    """But it is one for the process, so strangers do not switch it on."""
    with caller.context():
        torch.set_anomaly_enabled(level != anomaly.OFF)
        try:
            note, _ = caller.recorder.request_out(callee.peer, message([LEAF]))
        finally:
            torch.set_anomaly_enabled(False)
    assert read(note).anomaly == level
    callee.worker.options = SimpleNamespace(autograd="context", security=SimpleNamespace(trusted=trusted))
    limit = CancelScope()
    token = deadlines.current.set(limit)
    try:
        UntrustedRecorder(callee.worker, callee.container, None).request_in(caller.peer, note, [torch.ones(2)])
        assert anomaly.level() == (level if trusted else anomaly.OFF)
    finally:
        deadlines.current.reset(token)
        if limit.at_end is not None:
            limit.at_end()
    assert anomaly.level() == anomaly.OFF


# The container.


def test_a_container_knows_what_it_released() -> None:
    container = Container(3)
    context = container.new()
    assert container.get(context.id) is context
    assert container.get_or_create(context.id) is context
    assert container.pop(context.id) is context
    assert container.pop(context.id) is None
    assert container.get_or_create(context.id) is None
    with pytest.raises(UnknownContextError, match="was released"):
        container.get(context.id)
    with pytest.raises(UnknownContextError, match="not known"):
        container.get(99)
    assert len(container) == 0


def test_a_container_remembers_a_bounded_number() -> None:
    container = Container(3)
    for number in range(20_000):
        container.pop(number)
    assert len(container._released) < 10_000
    assert container.get_or_create(ContextId(19_999)) is None


@pytest.mark.parametrize("worker", [0, 1, 65_535])
def test_ids_say_whose_they_are(worker: int) -> None:
    container = Container(worker)
    made = [container.new().id for _ in range(3)] + [container.new_message() for _ in range(3)]
    assert [number >> 48 for number in made] == [worker] * 6
    assert [number & (1 << 48) - 1 for number in made] == [1, 2, 3, 1, 2, 3]
    assert all(0 < number < 1 << 64 for number in made)
