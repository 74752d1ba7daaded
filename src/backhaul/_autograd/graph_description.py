"""Describes the graph of a context over all workers, as plain data."""

from __future__ import annotations

from typing import Any

from backhaul._autograd.backward.engine import Engine
from backhaul._autograd.backward.groups import Grouping
from backhaul._autograd.backward.local_pass import LocalPass
from backhaul._autograd.forward.recording import enter, leave
from backhaul._rpc.security.policy import internal
from backhaul._worker.worker import current_worker
from backhaul.errors import ContextError


def describe(engine: Engine, context: int) -> dict[str, Any] | None:
    """This worker's share of a context; None if it has none."""
    try:
        found = engine.container.get(context)
    except ContextError:
        return None
    with found.lock:
        sends = [
            {
                "message": record.message,
                "to": engine.name_of(record.to),
                "tensors": len(record.ends),
                "gradient": record.born_in is not None,
            }
            for record in found.sends.values()
        ]
        recvs = [{"message": recv.message, "from": engine.name_of(recv.sender)} for recv in found.recvs.values()]
        ends = {record.message: record.ends for record in found.sends.values()}
        runs = list(found.runs.values())
        known = sorted(found.known)
    return {
        "known": [engine.name_of(worker) for worker in known],
        "sends": sends,
        "recvs": recvs,
        "spent": sorted(found.spent),
        "groups": [group.sources for group in Grouping(ends).groups],
        "gradients": len(found.gradients),
        "passes": [_describe_run(engine, run) for run in runs],
    }


def _describe_run(engine: Engine, run: LocalPass) -> dict[str, Any]:
    drive = engine.drivers.get((run.spec.context, run.spec.number))
    described = {
        "driver": engine.name_of(run.spec.driver),
        "number": run.spec.number,
        "failed": run.failed,
        "waiting": run.waiting,
    }
    if drive is not None and run.spec.driver == engine.id:
        described["outstanding"] = {m: engine.name_of(w) for m, w in drive.ledger.outstanding.items()}
    return described


def describe_everywhere(engine: Engine, context: int) -> dict[str, Any]:
    """The shares of all workers that a context has reached, by name."""
    engine.container.get(context)
    found: dict[str, Any] = {}
    todo = [engine.worker.name]
    token = enter(None)
    try:
        while todo:
            name = todo.pop()
            if name in found:
                continue
            own = name == engine.worker.name
            share = describe(engine, context) if own else engine.client.call(name, share_of, (context,), None, None)
            if share is not None:
                found[name] = share
                todo.extend(share["known"])
    finally:
        leave(token)
    return {"context": context, "driver": engine.worker.name, "workers": found}


@internal(int)
def share_of(context: int) -> dict[str, Any] | None:
    """Called by the worker that describes a context; see ``describe``."""
    return describe(current_worker().part(Engine), context)
