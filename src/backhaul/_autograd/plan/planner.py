"""The shell around ``plan``: workers ask the driver of a pass for orders, the driver asks workers for summaries."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

from backhaul._autograd.forward.recording import enter, leave
from backhaul._autograd.messages import PassSpec
from backhaul._autograd.plan.plan import Plan, Summary
from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.security.policy import internal
from backhaul._runtime.runtime import Lock
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import ContextError, PeerLostError

OrdersSource = Callable[[], tuple[Any, ...]]
"""Returns the fields of ``Orders``, or raises what kept the driver from making the plan."""


class PlannedShare(Protocol):
    """One worker's share of a pass, as far as a plan needs it."""

    def summary(self, sources: Collection[int] = (), calls: Collection[int] = ()) -> Summary:
        """What the sources of this worker reach; see ``LocalPass.summary``."""


class PlannedPass(Protocol):
    """A pass at its driver, as far as the planner needs it."""

    spec: PassSpec
    plan: Plan | None

    @property
    def share(self) -> PlannedShare:
        """The driver's own share."""

    @property
    def planning(self) -> Lock:
        """Held while the plan is made."""

    def loss_of(self, worker: int, reason: str) -> BaseException:
        """The error of a pass that needs a lost worker."""


class Planner:
    """Makes the plans of the passes that this worker drives, and asks other drivers for orders. Thread-safe.

    Args:
        worker: The worker; the planner becomes one of its parts.
        client: Makes calls.
        find_pass: Finds a pass that this worker drives, by context and number.
        find_share: Finds this worker's share of a pass of another driver.
    """

    def __init__(
        self,
        worker: Worker,
        client: CallClient,
        find_pass: Callable[[tuple[int, int]], PlannedPass | None],
        find_share: Callable[[PassSpec], PlannedShare],
    ) -> None:
        self._id = worker.info.id
        self._client = client
        self._find_pass = find_pass
        self._find_share = find_share
        worker.attach(self)

    def request_orders(self, spec: PassSpec, follow: Callable[[OrdersSource], None]) -> None:
        """Get this worker's orders for a pass. Calls ``follow`` when the driver has answered: on this thread if this
        worker is the driver, else on another.
        """
        arguments = spec.context, spec.number, self._id
        if spec.driver == self._id:
            follow(lambda: self.orders_for(*arguments))
            return
        token = enter(None)
        try:
            future = self._client.call_async(spec.driver, orders_for, arguments, None, 0, mode="internal")
        finally:
            leave(token)
        future._when_done(lambda done: follow(done.value))

    def orders_for(self, context: int, number: int, worker: int) -> tuple[Any, ...]:
        """At the driver: the orders of ``worker``. The first question makes the plan."""
        planned = self._find_pass((context, number))
        if planned is None:
            raise ContextError(
                f"pass {number} of context {context} is over; worker {worker} asked for its orders too late",
                context=context,
            )
        with planned.planning:
            if planned.plan is None:
                planned.plan = self._make_plan(planned)
        orders = planned.plan.orders_for(worker)
        return orders.active, orders.circular, orders.useful

    def _make_plan(self, planned: PlannedPass) -> Plan:
        plan = Plan(self._id, restricted=planned.spec.restricted)
        while missing := plan.missing():
            asked = {}
            token = enter(None)
            try:
                for worker in missing.keys() - {self._id}:
                    arguments = planned.spec, list(missing[worker]), list(plan.calls)
                    asked[worker] = self._client.call_async(worker, summary_of, arguments, None, 0, mode="internal")
            finally:
                leave(token)
            if self._id in missing:
                plan.add(self._id, missing[self._id], planned.share.summary(missing[self._id], plan.calls))
            for worker, call in asked.items():
                try:
                    summary = call.wait()
                except PeerLostError as error:
                    if error.messages:  # raised on that worker, which has lost another one
                        raise
                    raise planned.loss_of(worker, error.reason or str(error)) from error
                plan.add(worker, missing[worker], summary)
        return plan

    def summary_of(self, spec: PassSpec, sources: list[int], calls: list[int]) -> Summary:
        """What the driver of a pass needs to know of this worker's graph."""
        return self._find_share(spec).summary(sources, calls)


@internal(int, int, int)
def orders_for(context: int, number: int, worker: int) -> tuple[Any, ...]:
    """A worker calls this on the driver of a pass; see ``Planner.orders_for``."""
    return current_worker().part(Planner).orders_for(context, number, worker)


@internal(PassSpec, list, list)
def summary_of(spec: PassSpec, sources: list[int], calls: list[int]) -> Summary:
    """The driver of a pass calls this; see ``Planner.summary_of``."""
    return current_worker().part(Planner).summary_of(spec, sources, calls)
