"""Brings a lost worker's share of a context back: the shell around ``replay``. The worker that made the context leads;
the others keep their requests, send them again when they are told to, and undo what a pass has added to gradients.

[Note: time] A share that is half made again is of no use to anybody. So a recovery has a thread of its own, which waits
for another worker as long as ``Replay.timeout`` says, or until the context is over, and then goes through with it.
Whoever needs it (a call that was lost, a pass) waits for it within the limit that it has itself: its own timeout, the
deadline around it, until it is cancelled. If it gives up, the next that needs the worker finds what was done meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from backhaul._autograd.container import split
from backhaul._autograd.context import Context
from backhaul._autograd.failure.replay import Pass, Place, Replay, ReplayEntry, ReplayLog, order
from backhaul._autograd.forward.recording import enter, leave
from backhaul._rpc.calls.pending import Pending, SyncCall
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.futures import Future
from backhaul._runtime import interrupts
from backhaul._runtime.runtime import Lock
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Recycler
from backhaul._worker import deadlines
from backhaul._worker.deadlines import FOREVER, Block, CancelScope
from backhaul._worker.worker import current_worker
from backhaul.errors import (
    BackhaulError,
    BackwardTimeoutError,
    CallTimeoutError,
    ContextError,
    PeerLostError,
    UnknownWorkerError,
)

if TYPE_CHECKING:
    from backhaul._autograd.backward.engine import Engine
    from backhaul._autograd.backward.local_pass import LocalPass

T = TypeVar("T")
_PAUSE = 0.05  # seconds between looks
_ASKING = 2.0  # seconds that a worker has to say that it is there
_TRIES = 3  # passes that are run again because a channel was lost, and no worker

_MOMENT = 0.001  # seconds between looks at what is about to end
_REFUSED = {"create": "create_graph=True", "into_grad": 'accumulate="grad"', "fast": 'mode="fast"'}

_memory = Recycler()


class Recovery:
    """One worker's. Thread-safe. Takes part in calls as soon as one is made in a context with replay."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._worker = engine.worker
        self._agent = engine.client
        self._container = engine.container
        engine.worker.attach(self)

    # Keeping.

    def begin(self, context: Context, replay: Replay) -> None:
        """This worker has made a context for replay."""
        peers = self._agent.peers
        context.replay = ReplayLog(peers.epoch, replay, [peer.info.name for peer in peers])
        self._agent.guard = self

    def keep_requests(self, context: Context, epoch: int) -> None:
        """From now on keep what this worker sends in a context, which was entered in that epoch."""
        if context.replay is None:
            with context.lock:
                if context.replay is None and not context.released:
                    context.replay = ReplayLog(epoch)
            self._agent.guard = self

    def keep(self, pending: Pending, frame: Frame) -> None:
        """See ``Guard``."""
        entry = _entry(pending)
        if entry is None:
            return
        entry.frame = frame.copied(_memory)  # arguments may be changed as soon as it is sent
        entry.label, entry.timeout = pending.label, pending.timeout
        log, peer = entry.context.replay, pending.peer
        if log is None:
            return
        earlier = log.answered(entry.to)[-1:]
        former = earlier[0].incarnation if earlier else entry.incarnation
        if not earlier and peer.record.epoch > log.epoch and entry.incarnation not in log.restored:
            former = ""  # one that nothing was asked of in this context, or not from here
        if former != entry.incarnation:
            # Nobody here has noticed the loss, but what was computed there is gone, and so is the worker's state.
            entry.incarnation = former
            reason = "another worker has taken its name"
            raise PeerLostError(f"lost worker '{peer.info.name}': {reason}", worker=peer.info.name, reason=reason)

    # Calls that lost their worker.

    def recover_call(self, pending: Pending, error: PeerLostError) -> Any:
        """See ``Guard``. All of it has no more time than the call had."""
        entry = _entry(pending)
        if entry is None or entry.frame is None:
            try:
                raise error
            finally:
                del error  # it refers to this frame from now on
        limit = self._limit_of(pending)
        token = deadlines.current.set(limit)
        try:
            return self._rescue(pending, entry, error)
        except BackhaulError as problem:
            if limit.left:
                raise
            raise _given_up(pending, limit, error) from problem
        finally:
            deadlines.current.reset(token)

    def _rescue(self, pending: Pending, entry: ReplayEntry, error: PeerLostError) -> Any:
        while error.worker == pending.peer.info.name:
            if not self._recover_by_maker(entry, error):
                break
            if (successor := self._successor(entry)) is None:
                error.add_note("replay was not possible: this worker does not know who has taken the place")
                break
            again = SyncCall(successor, pending.timeout, pending.label)
            again.kept = pending.kept
            entry.incarnation = again.peer.record.incarnation
            if (log := entry.context.replay) is not None:
                log.restored.add(entry.incarnation)
            try:
                assert entry.frame is not None
                value = self._agent.repeat(again, entry.frame)
            except PeerLostError as another:
                error = another
            else:
                entry.context.renew(entry.message, entry.reply)
                return value
        raise error

    def _successor(self, entry: ReplayEntry) -> Peer | None:
        """Who has taken the place of a lost worker. The maker of the context may know that before this worker does,
        which is waited for, but not for ever: None.
        """
        runtime = self._worker.runtime
        deadline = runtime.now() + self._worker.options.connect_timeout
        while True:
            with contextlib.suppress(UnknownWorkerError):
                peer = self._agent.peers.find(entry.to)
                if peer.record.incarnation != entry.incarnation:
                    return peer
            if runtime.now() > deadline:
                return None
            with self._worker.blocking():
                deadlines.wait(
                    runtime.one_shot(), _PAUSE, f"it was not known who has taken the place of worker {entry.to}"
                )

    def _limit_of(self, pending: Pending) -> CancelScope:
        """What is left to a call."""
        now = self._worker.runtime.now
        if pending.cut or not pending.timeout:
            left = FOREVER  # then it has what the limit around it has
        elif pending.deadline == FOREVER:
            left = pending.timeout  # it was not sent
        else:
            left = pending.deadline - now()
        return Block(pending.label, left, now, deadlines.current.get())

    def rescue_later(self, pending: Pending, error: PeerLostError, future: Future[Any]) -> bool:
        """See ``Guard``."""
        if _entry(pending) is None or self._worker.closed:
            return False
        outer, now = pending.limit, self._worker.runtime.now
        left = FOREVER if outer is None else outer.until - now()
        own = Block(pending.label if outer is None else outer.label, left, now, None)  # can be cancelled by itself

        def cancel(why: str = "") -> Any:
            if not self._claim(future):
                return False
            self._agent.count_cancel()
            own.cancelled = True  # in this order: nothing new may begin
            self._agent.cancel_within(frozenset([own]))
            own.cancel()
            future.set_exception(_waited(pending.cancelled(why), error))
            return True

        def run() -> None:
            deadlines.current.set(own)
            try:
                value = self.recover_call(pending, error)
            except BaseException as failure:
                if self._claim(future):
                    future.set_exception(failure)
            else:
                if self._claim(future):
                    future.set_result(value)
            finally:
                self._agent.recoveries.pop(pending.number, None)
                if outer is not None:
                    outer.forget(waker)
                self._agent.end()

        self._agent.begin()
        self._agent.paused.add(future)
        self._agent.recoveries[pending.number] = cancel
        if outer is not None:
            waker = outer.wake_with(functools.partial(cancel, f", as was {outer.root.label}, for which it was"))
        self._worker.thread_pool.submit(functools.partial(self._worker.run, run))
        return True

    def _claim(self, future: Future[Any]) -> bool:
        """Whether it is for the caller to complete a future that waits; False if another has, or a shutdown."""
        try:
            self._agent.paused.remove(future)
        except KeyError:
            return False
        return True

    def _apart(self, work: Callable[[], T]) -> T:
        """Do something on a thread of its own, and wait within the limit that holds here; see [Note: time]."""
        done: Future[T] = Future()

        def run() -> None:
            deadlines.current.set(None)
            try:
                value = work()
            except BaseException as error:
                if self._claim(done):
                    done.set_exception(error)
            else:
                if self._claim(done):
                    done.set_result(value)
            finally:
                self._agent.end()

        self._agent.begin()
        self._agent.paused.add(done)
        self._worker.thread_pool.submit(functools.partial(self._worker.run, run))
        return done.wait()

    def _recover_by_maker(self, entry: ReplayEntry, error: PeerLostError) -> bool:
        """Let the maker of the context recover a worker; whether it had to. Raises ``error`` if it cannot."""
        maker, _ = split(entry.context.id)
        arguments = entry.context.id, entry.to, entry.incarnation
        try:
            if maker == self._worker.info.id:
                return self.recover(*arguments)
            return self._call(maker, recover, *arguments, timeout=0)
        except BackhaulError as problem:
            error.add_note(f"replay was not possible: {problem}")
            raise error from problem

    def _call(self, worker: int, function: Callable[..., T], *args: Any, timeout: float | None = None) -> T:
        with _outside():
            made: T = self._agent.call(worker, function, args, None, timeout, mode="internal")
            return made

    def _ask(self, context: Context, worker: int, timeout: float, function: Callable[..., T], *args: Any) -> T:
        """Call a function on a worker that may have lost a channel, or be lost and replaced."""
        for tries in reversed(range(_TRIES)):
            try:
                return self._call(worker, function, context.id, *args)
            except (PeerLostError, UnknownWorkerError):  # the latter just before another takes its place
                if not tries:
                    raise
                self._await(context, worker, timeout)
        raise AssertionError

    # At the maker of the context.

    def recover(self, context: int, lost: int, incarnation: str) -> bool:
        """Make the share of a lost incarnation of a worker again on the one that takes its place, with its gradients of
        passes that are over. False if it was not lost after all: then only a channel was.

        Does not wait for another thread that is at it, once the new one has its state: what it runs again may be what
        calls here. Calls that are not part of that have no order among what is run again, as they had none before.
        """
        renewed = self._recover(context, lost, incarnation, patient=False)
        return renewed is not False

    def _recover(self, context: int, lost: int, incarnation: str, *, patient: bool) -> bool | None:
        """See ``recover``. None, unless ``patient``: another thread is at it. If patient, passes are for the caller."""
        found = self._container.get(context)
        log = found.replay
        if log is None or log.replay is None:
            raise ContextError(f"context {context} is not kept for replay", context=context)
        if lost == self._worker.info.id:
            return False  # others have lost a channel to it
        # One at a time; but what is run again may find that another worker is lost too.
        turn = log.turns.setdefault(lost, self._worker.runtime.lock())
        with self._worker.blocking():
            while not interrupts.acquire(turn, _PAUSE):
                deadlines.check(f"worker {lost} was not recovered")
                if not patient and self._incarnation_of(lost) in log.restored - {incarnation}:
                    return None
        return self._apart(functools.partial(self._take_turn, found, lost, incarnation, catch_up=not patient))

    def _take_turn(self, context: Context, lost: int, incarnation: str, *, catch_up: bool) -> bool:
        """The turn is taken already, by who waits for this."""
        log = context.replay
        assert log is not None
        try:
            with _outside():
                renewed = self._renew(context, log, lost, incarnation)
        finally:
            log.turns[lost].release()
        if renewed and log.passes:
            log.outdated = True
            if catch_up and (passing := self._passing(log)).acquire(blocking=False):
                try:  # else whoever runs passes sees to it
                    self._run_passes(context, log, [])
                finally:
                    passing.release()
        return renewed

    def _renew(self, context: Context, log: ReplayLog, lost: int, incarnation: str) -> bool:
        """Bring up whoever takes the place, and who takes the place of that one. Others that are lost meanwhile take
        what they had sent with them: their own successors send it anew.
        """
        assert log.replay is not None
        tries, fresh = _TRIES, ""
        while True:
            peer = self._await(context, lost, log.replay.timeout)
            if peer.record.incarnation == incarnation:
                return False
            if fresh != peer.record.incarnation:
                tries, fresh = _TRIES, peer.record.incarnation
            try:
                self._bring_up(context, log, peer)
                return True
            except PeerLostError:
                tries -= 1
                if not tries:
                    raise

    def _bring_up(self, context: Context, log: ReplayLog, peer: Peer) -> None:
        lost, fresh = peer.record.id, peer.record.incarnation
        assert log.replay is not None
        shares = self._shares(context, lost, log.replay.timeout)
        for _, entries in shares.values():
            for _, where, obstacle in entries:
                if where != fresh and obstacle is not None:
                    raise ContextError(obstacle, worker=peer.info.name, context=context.id)
        if fresh not in log.restored:
            if log.replay.restore is not None and peer.info.name in log.members:
                self._restore(log.replay.restore, peer)
            log.restored.add(fresh)
        stale = [
            (place, sender)
            for sender, (_, entries) in shares.items()
            for place, where, _ in entries
            if where != fresh and sender != lost
        ]
        due = order(stale)
        for sender in shares:
            self._call(sender, forget_below, context.id, [place for place, _ in due])
        for place, sender in due:
            self._call(sender, repeat, context.id, place, lost, fresh, timeout=0)

    def _restore(self, restore: Callable[[], Any], peer: Peer) -> None:
        try:
            self._call(peer.record.id, restore, timeout=0)
        except Exception as error:
            error.add_note(f"in the restore of a replay on worker '{peer.info.name}', which took a lost one's place")
            raise

    def _shares(
        self, context: Context, lost: int, timeout: float
    ) -> dict[int, tuple[set[int], list[tuple[Place, str, str | None]]]]:
        """By worker that the context has reached and that is there: whom it knows, and what it has sent to ``lost``."""
        found: dict[int, tuple[set[int], list[tuple[Place, str, str | None]]]] = {}
        todo, seen = [int(self._worker.info.id)], {lost}
        while todo:
            worker = todo.pop()
            if worker in seen:
                continue
            seen.add(worker)
            found[worker] = self._ask(context, worker, timeout, share_of, lost)
            todo.extend(found[worker][0])
        return found

    def _await(self, context: Context, worker: int, timeout: float) -> Peer:
        """The seam to membership: wait until a worker answers, be it another incarnation or, where only a channel was
        lost, the same. Raises ``PeerLostError``; and as ``limits.wait`` does.
        """
        runtime = self._worker.runtime
        deadline = runtime.now() + timeout
        name = f"worker {worker}"
        while True:
            with contextlib.suppress(UnknownWorkerError):
                peer = self._agent.peers.find(worker)
                name = f"worker '{peer.info.name}'"
                with contextlib.suppress(BackhaulError):
                    self._call(worker, is_there, timeout=min(_ASKING, timeout) or _ASKING)
                    if self._agent.peers.find(worker) is peer:
                        return peer
            left = deadline - runtime.now()
            if left <= 0:
                raise PeerLostError(f"nobody took the place of {name} within {timeout:g} s", worker=name)
            if context.released:
                raise ContextError(f"context {context.id} was over before anybody took the place of {name}")
            with self._worker.blocking():
                deadlines.wait(runtime.one_shot(), min(_PAUSE, left), f"nobody had taken the place of {name}")

    # At every worker.

    def share_of(self, context: int, lost: int) -> tuple[set[int], list[tuple[Place, str, str | None]]]:
        """Whom this worker knows in a context; and place, incarnation and obstacle of what ``lost`` has answered."""
        found = self._container.find(context)
        if found is None or found.replay is None:
            return set(), []
        entries = found.replay.answered(lost)
        with found.lock:
            return set(found.known), [(entry.place, entry.incarnation, entry.obstacle) for entry in entries]

    def forget_below(self, context: int, places: list[Place]) -> None:
        """See ``ReplayLog``."""
        found = self._container.find(context)
        if found is not None and found.replay is not None:
            found.replay.forget_below(places)

    def repeat(self, context: int, place: Place, to: int, incarnation: str) -> None:
        """Send a request again that a lost worker had answered, to the one that has its state."""
        log = (found := self._container.get(context)).replay
        entry = log.find(place, to) if log is not None else None
        if entry is None:
            raise ContextError(f"the request at place {place} was not kept", context=context)
        peer = self._await(found, to, _ASKING)
        if peer.record.incarnation != incarnation:
            name = peer.info.name
            raise PeerLostError(f"lost worker '{name}' while its share was made again", worker=name)
        self._agent.repeat(SyncCall(peer, entry.timeout, entry.label), entry.again())
        entry.incarnation = peer.record.incarnation
        entry.context.renew(entry.message, entry.reply)

    def undo(self, context: int, driver: int, number: int) -> set[int]:
        """Let go of a pass that has failed, and put gradients back to what they were before the first. Returns whom
        this worker knows in the context.
        """
        found = self._container.find(context)
        log = found.replay if found is not None else None
        if found is None or log is None:
            return set()
        with found.lock:
            run = found.runs.get((driver, number))
            if run is None:
                found.aborted.add((driver, number))  # nothing of it has come, and nothing will be used
            else:
                run.failed = run.aborted = True
            known = set(found.known)
        if run is not None:
            self.await_idle(run)
        log.undo_passes(found)
        return known

    def await_idle(self, run: LocalPass) -> None:
        """Wait until nothing of a pass that has failed runs here: it would still add to gradients."""
        with self._worker.blocking():
            while run.busy:
                self._worker.runtime.one_shot().wait(_MOMENT)

    # Passes.

    def backward(self, context: Context, *args: Any, **options: Any) -> None:
        """As the engine's, and again when a worker has been lost and replaced. The graph is kept."""
        for wrong, what in _REFUSED.items():
            if options[wrong]:
                raise ContextError(f"{what} is not possible in a context with replay", context=context.id)
        log = context.replay
        assert log is not None
        if log.replay is None:
            raise ContextError(
                f"context {context.id} was made for replay by another worker, which alone may run backward on it",
                context=context.id,
            )
        log.begin_passes(context)
        limit = Block(_label(context), options["timeout"] or FOREVER, self._worker.runtime.now, deadlines.current.get())
        token = deadlines.current.set(limit)
        passing = self._passing(log)
        try:
            with self._worker.blocking():
                while not interrupts.acquire(passing, _PAUSE):
                    deadlines.check("another pass was not done")
            try:
                log.passes.append((args, options))
                self._run_passes(context, log, log.passes[-1:], limit)
            except BaseException:
                log.passes.pop()
                raise
            finally:
                passing.release()
        except BackhaulError as error:
            if limit.left or isinstance(error, BackwardTimeoutError):
                raise
            raise self._too_late(context, limit, options["timeout"], error) from error
        finally:
            deadlines.current.reset(token)

    def _too_late(self, context: Context, limit: CancelScope, timeout: float, error: BackhaulError) -> BackhaulError:
        """What a pass fails with whose time was over, or that was cancelled, while it was not running."""
        label = _label(context)
        if limit.root.cancelled:
            return _waited(limit.unwanted(f"{label} was not done"), error)
        cut_by = None if limit.label == label else limit.label
        when = f"within {timeout:g} s" if cut_by is None else f"when the deadline of {cut_by} was over"
        name = self._worker.name
        made = BackwardTimeoutError(f"{label} was not done {when}", worker=name, context=context.id, cut_by=cut_by)
        return made if isinstance(error, CallTimeoutError) else _waited(made, error)

    def _passing(self, log: ReplayLog) -> Lock:
        """Held by whoever runs passes: one at a time."""
        return log.turns.setdefault(self._worker.info.id, self._worker.runtime.lock())

    def _run_passes(self, context: Context, log: ReplayLog, todo: list[Pass], limit: CancelScope | None = None) -> None:
        """Run passes. If a worker is lost, its gradients of earlier ones are lost too: then run all."""
        assert log.replay is not None
        until = limit.until if limit is not None and limit.label == _label(context) else FOREVER
        tries, undone = _TRIES, False
        try:
            while todo or log.outdated:
                if log.outdated:
                    log.outdated, undone = False, True
                    self._undo_everywhere(context, self._engine.new_number(), log.replay.timeout)
                    todo = list(log.passes)
                (args, options), number = todo[0], self._engine.new_number()
                again = {**options, "retain": True, "number": number, "until": until}
                try:
                    self._engine.backward(context, *args, **again)
                    todo = todo[1:]
                except (PeerLostError, ContextError) as error:
                    if context.released or isinstance(error, BackwardTimeoutError):
                        raise
                    undone = True
                    try:
                        self._undo_everywhere(context, number, log.replay.timeout)
                        lost = self._recover_from(context, log, error, log.replay.timeout)
                    except BackhaulError as problem:
                        error.add_note(f"replay was not possible: {problem}")
                        raise error from problem
                    tries = _TRIES if lost else tries - 1
                    if not tries or (not lost and not isinstance(error, PeerLostError)):
                        raise
                    log.outdated = False
                    todo = list(log.passes)
        except BaseException:
            log.outdated = log.outdated or undone  # whoever runs passes next makes those before again
            raise

    def _undo_everywhere(self, context: Context, number: int, timeout: float) -> None:
        """On every worker: what one did not undo would be counted twice."""
        own = int(self._worker.info.id)
        todo, seen = [own], set[int]()
        while todo:
            worker = todo.pop()
            if worker not in seen:
                seen.add(worker)
                todo.extend(self._ask(context, worker, timeout, undo, own, number))

    def _recover_from(self, context: Context, log: ReplayLog, error: BackhaulError, timeout: float) -> bool:
        """Recover all workers whose share is gone; whether there was one."""
        lost = {entry.to: entry.incarnation for entry in log.answered()}
        for worker, share in self._targets(context, timeout).items():
            lost.setdefault(worker, share)
        found = False
        for worker, incarnation in sorted(lost.items()):
            if error.worker == self._engine.name_of(worker) or incarnation != self._incarnation_of(worker):
                found = self._recover(context.id, worker, incarnation, patient=True) or found
        return found

    def _incarnation_of(self, worker: int) -> str:
        try:
            return self._agent.peers.find(worker).record.incarnation
        except UnknownWorkerError:
            return ""

    def _targets(self, context: Context, timeout: float) -> dict[int, str]:
        """Workers that others have called in the context, and as which incarnation."""
        found: dict[int, str] = {}
        todo, seen = [int(self._worker.info.id)], set[int]()
        while todo:
            worker = todo.pop()
            if worker not in seen:
                seen.add(worker)
                known, targets = self._ask(context, worker, timeout, targets_of)
                todo.extend(known)
                found |= targets
        return found

    def targets_of(self, context: int) -> tuple[set[int], dict[int, str]]:
        """Whom this worker knows in a context; and by which incarnation its requests were answered."""
        found = self._container.find(context)
        if found is None or found.replay is None:
            return set(), {}
        targets = {entry.to: entry.incarnation for entry in found.replay.answered()}
        with found.lock:
            return set(found.known), targets


def _entry(pending: Pending) -> ReplayEntry | None:
    for _, kept in pending.kept:
        if type(kept) is ReplayEntry:
            return kept
    return None


def _label(context: Context) -> str:
    return f"backward of context {context.id}"


def _given_up(pending: Pending, limit: CancelScope, error: PeerLostError) -> BackhaulError:
    """What a call fails with that was being rescued for as long as it had time, or until it was cancelled."""
    if limit.root.cancelled:
        return _waited(pending.cancelled(f", as was {limit.root.label}, for which it was"), error)
    return _waited(pending.timed_out(), error)


def _waited(made: BackhaulError, error: BackhaulError) -> BackhaulError:
    made.add_note(f"a worker to take the place of a lost one was waited for: {error}")
    return made


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """What is done inside is not part of any context."""
    token = enter(None)
    try:
        yield
    finally:
        leave(token)


# What workers do for each other.


def _own() -> Recovery:
    return current_worker().part(Recovery)


def is_there() -> None:
    """Answers."""


def recover(context: int, lost: int, incarnation: str) -> bool:
    """See ``Recovery.recover``."""
    return _own().recover(context, lost, incarnation)


def share_of(context: int, lost: int) -> tuple[set[int], list[tuple[Place, str, str | None]]]:
    """See ``Recovery.share_of``."""
    return _own().share_of(context, lost)


def forget_below(context: int, places: list[Place]) -> None:
    """See ``Recovery.forget_below``."""
    _own().forget_below(context, places)


def repeat(context: int, place: Place, to: int, incarnation: str) -> None:
    """See ``Recovery.repeat``."""
    _own().repeat(context, place, to, incarnation)


def undo(context: int, driver: int, number: int) -> set[int]:
    """See ``Recovery.undo``."""
    return _own().undo(context, driver, number)


def targets_of(context: int) -> tuple[set[int], dict[int, str]]:
    """See ``Recovery.targets_of``."""
    return _own().targets_of(context)
