"""Takes the status of one worker from counters and tables that its parts keep anyway.

Runs on the thread that read the question, and takes about as long as serving a few calls. So a worker whose handlers
all hang still answers.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterable
from typing import Any

import torch

from backhaul._autograd.backward.engine import Engine
from backhaul._autograd.context import Context
from backhaul._monitoring.function_times import FunctionTimes
from backhaul._monitoring.status import (
    CallStatus,
    ChannelStatus,
    GraphStatus,
    MemberStatus,
    ReferenceStatus,
    WorkerStatus,
)
from backhaul._rpc.calls.pending_call import Pending
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.node import Node
from backhaul._rref.registry import RRefRegistry
from backhaul._worker.deadlines import FOREVER

_MAX_CALLS = 8  # of each direction that are described
_MAX_VALUES = 4096  # values of references, and tensors in them, that are looked at
_PAGE_BYTES = resource.getpagesize()


def take_status(node: Node, times: FunctionTimes, started: float, version: str) -> WorkerStatus:
    """What the worker of ``node`` tells a monitor."""
    worker, client, server, record = node.worker, node.client, node.server, node.peers.own.record
    now = worker.runtime.now()
    serving, calling = server.under_way, list(client.pending)
    return WorkerStatus(
        id=record.id,
        name=record.name,
        incarnation=record.incarnation,
        host=record.host,
        machine=socket.gethostname(),
        pid=os.getpid(),
        version=version,
        at=now,
        uptime=now - started,
        served=server.served,
        called=client.sent,
        tasks=worker.thread_pool.waiting(),
        num_serving=len(serving),
        num_calling=len(calling),
        memory=_resident_bytes(),
        serving=_longest(CallStatus(call.label, call.peer.info.name, now - call.arrived) for call in serving),
        calling=_longest(CallStatus(call.label, call.peer.info.name, _age(call, now)) for call in calling),
        channels=tuple(
            ChannelStatus(peer.info.name, channel.bytes_sent, channel.bytes_received or 0, channel.backlog)
            for channel, peer in node.peers.connections.channels()
        ),
        functions=times.functions(),
        passes=times.passes(),
        references=_references(node),
        graphs=_graphs(node),
        members=tuple(_member(peer) for peer in node.peers),
        counters={name: int(count()) for name, count in worker.counters.items()},
    )


def _longest(calls: Iterable[CallStatus]) -> tuple[CallStatus, ...]:
    return tuple(sorted(calls, key=lambda call: -call.seconds)[:_MAX_CALLS])


def _age(call: Pending, now: float) -> float:
    """For how long a call has been under way; 0 where that is not known, because it has no time limit of its own."""
    return 0.0 if call.cut or call.deadline == FOREVER else max(now - (call.deadline - call.timeout), 0.0)


def _resident_bytes() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
    return 0


def _member(peer: Peer) -> MemberStatus:
    record = peer.record
    state = "lost" if peer.lost else "suspected" if peer.suspicion else "ok"
    return MemberStatus(
        record.id, record.name, record.incarnation, record.host, record.addresses, state, peer.lost or peer.suspicion
    )


def _references(node: Node) -> ReferenceStatus:
    registry = node.worker.part(RRefRegistry)
    counted = _ByteCount()
    for value in registry.owned.present_values(_MAX_VALUES):
        counted.add(value)
    return ReferenceStatus(len(registry.owned), counted.nbytes, registry.owned.count_forks(), len(registry.held))


def _graphs(node: Node) -> GraphStatus:
    engine = node.worker.part(Engine)
    contexts: list[Context] = engine.container.select(lambda context: True)
    counted = _ByteCount()
    for context in contexts:
        for gradient in context.held():
            counted.add(gradient)
    return GraphStatus(
        contexts=len(engine.container),
        messages=sum(len(context.sends) for context in contexts),
        gradient_bytes=counted.nbytes,
        passes=len(engine.drivers),
        passes_ended=engine.passes_ended,
    )


class _ByteCount:
    """Counts the memory of tensors, each storage once. Runs no code of the user's."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._seen: set[int] = set()
        self._left = _MAX_VALUES

    def add(self, value: Any) -> None:
        """Count the tensors of a value: a tensor, a module, or a container of these."""
        self._left -= 1
        if self._left < 0:
            return
        if isinstance(value, torch.Tensor):
            with contextlib.suppress(Exception), torch._C.DisableTorchFunctionSubclass():  # not all have a storage
                storage = torch.Tensor.untyped_storage(value)
                if storage.data_ptr() not in self._seen:
                    self._seen.add(storage.data_ptr())
                    self.nbytes += storage.nbytes()
        elif isinstance(value, torch.nn.Module):
            with contextlib.suppress(RuntimeError):  # a module that another thread changes
                for tensor in (*torch.nn.Module.parameters(value), *torch.nn.Module.buffers(value)):
                    self.add(tensor)
        elif type(value) in (list, tuple, dict):
            with contextlib.suppress(RuntimeError):  # a container that another thread changes
                for each in value.values() if type(value) is dict else value:
                    self.add(each)
