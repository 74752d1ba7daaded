"""Sends gradients of a large group while the rest of the group still runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

from backhaul._autograd.backward.groups import Fired, RecvEnd
from backhaul._autograd.forward.functions import Grads, Recv
from backhaul._autograd.ids import MessageId
from backhaul._autograd.torch_engine.hooks import NodeWatch
from backhaul._autograd.torch_engine.run import Node, engine_runs

SendEarly = Callable[[Recv, Grads], None]
"""Sends the gradients of a message before the group that they come from has run to its end."""


class EarlySends:
    """Until ``__exit__``, sends the gradients of a message as soon as all of them have arrived."""

    @classmethod
    def begin(cls, send: SendEarly, ends: Iterable[RecvEnd]) -> EarlySends | None:
        """None if another run of the engine is under way, which may read the hooks of the same nodes."""
        with engine_runs.lock:
            return None if engine_runs.count else cls(send, ends)

    def __init__(self, send: SendEarly, ends: Iterable[RecvEnd]) -> None:
        self._send = send
        self._thread = threading.get_ident()  # other threads may run the same nodes in other passes
        self._ends = {node: (end, index) for end in ends for index, node in end.nodes.items()}
        self._found: dict[MessageId, dict[int, torch.Tensor | None]] = {}
        self._sent: set[MessageId] = set()
        self._watch = NodeWatch(self._ends, self._on_gradient)

    def _on_gradient(self, node: Node, grad: torch.Tensor | None) -> None:
        if threading.get_ident() != self._thread:
            return
        end, index = self._ends[node]
        found = self._found.setdefault(end.recv.message, {})
        found[index] = grad
        if len(found) == len(end.nodes):
            self._sent.add(end.recv.message)
            self._send(end.recv, end.answer(found))

    def left(self, fired: Iterable[Fired]) -> list[Fired]:
        """The answers that have not been sent."""
        return [(recv, grads) for recv, grads in fired if recv.message not in self._sent]

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None:
        self._watch.__exit__(*args)
