"""The plan of a pass, as workers ask for it and as its driver makes it: the shell around ``passes.Plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from backhaul._autograd.backward.driver import PassDriver, loss_of
from backhaul._autograd.forward.recording import enter, leave
from backhaul._autograd.messages import PassSpec
from backhaul._autograd.plan.termination import Plan, Summary
from backhaul._rpc.futures import Future
from backhaul._rpc.security.policy import internal
from backhaul._worker.worker import current_worker
from backhaul.errors import ContextError, PeerLostError

if TYPE_CHECKING:
    from backhaul._autograd.backward.engine import Engine

T = TypeVar("T")


class Planner:
    """One worker's. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.worker.attach(self)

    def orders_for(self, context: int, number: int, worker: int) -> tuple[Any, ...]:
        """At the driver: what the plan says about ``worker``; the plan is made at the first question."""
        drive = self._engine.drives.get((context, number))
        if drive is None:
            raise ContextError(f"pass {number} of context {context} is over", context=context)
        with drive.planning:
            if drive.plan is None:
                drive.plan = self._make_plan(drive)
        plan = drive.plan
        active = frozenset(plan.active.get(worker, ()))
        circular = frozenset(plan.circular.get(worker, ()))
        return active, circular, None if plan.useful is None else frozenset(plan.useful)

    def _make_plan(self, drive: PassDriver) -> Plan:
        own, client = self._engine.id, self._engine.client
        plan = Plan(own, drive.run.leads_to_inputs() if drive.spec.restricted else None)
        while missing := plan.missing():
            calls = {}
            token = enter(None)
            try:
                for worker in missing - {own}:
                    calls[worker] = client.call_async(worker, summary_of, (drive.spec,), None, 0, mode="internal")
            finally:
                leave(token)
            if own in missing:
                plan.add(own, drive.run.summary())
            for worker, call in calls.items():
                plan.add(worker, self._answer_of(drive.spec, worker, call))
        return plan

    def _answer_of(self, spec: PassSpec, worker: int, call: Future[T]) -> T:
        try:
            return call.wait()
        except PeerLostError as error:
            raise loss_of(spec, self._engine.name_of(worker), error.reason or str(error)) from error

    def summary_of(self, spec: PassSpec) -> Summary:
        """What the driver of a pass needs to know of this worker's graph."""
        return self._engine.run_of(self._engine.container.get(spec.context), spec).summary()


@internal(int, int, int)
def orders_for(context: int, number: int, worker: int) -> tuple[Any, ...]:
    """Called on the driver of a pass; see ``Planner.orders_for``."""
    return current_worker().part(Planner).orders_for(context, number, worker)


@internal(PassSpec)
def summary_of(spec: PassSpec) -> Summary:
    """Called by the driver of a pass; see ``Planner.summary_of``."""
    return current_worker().part(Planner).summary_of(spec)
