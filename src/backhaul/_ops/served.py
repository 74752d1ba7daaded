"""What the worker that has the function does: runs it, and pulls gradients back through it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd.graph import get_gradient_edge

from backhaul._autograd.backward.engine import Engine
from backhaul._autograd.backward.groups import nodes_behind
from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import recv_of
from backhaul._autograd.forward.recording import Scope, enter, leave
from backhaul._autograd.ids import ContextId
from backhaul._autograd.torch_engine.run import LeafNode
from backhaul._ops.gradient_levels import Level
from backhaul._ops.operators import Grad
from backhaul._ops.replay_token import ReplayToken, checksum
from backhaul._ops.signature import Args, Template, call, values_of
from backhaul._ops.write_detector import WATCHES, ForeignWriteError, NoForeignWrites
from backhaul._wire.callables import label_of, resolve
from backhaul._worker.worker import current_worker
from backhaul.errors import BackhaulError, ContextError

Function = Callable[..., Any]

_replaying = threading.Lock()  # held while the generator of random numbers is put back to an earlier state


class ServedOp(NamedTuple):
    """A function and its arguments.

    Attributes:
        what: The function, or its name.
        named: Which of its arguments, the last ones, are to be given by name.
        args: All of them.
    """

    what: str | Function
    named: Sequence[str]
    args: Args

    @property
    def function(self) -> Function:
        """The function."""
        return resolve(self.what) if isinstance(self.what, str) else self.what

    def run(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run it with other tensors in the place of those among its arguments."""
        return call(self.function, self.named, Template(self.args).fill(values))


def run(given: ServedOp, grad: int, context: int) -> list[torch.Tensor]:
    """Order 0: the results of the function, and the ticket."""
    values = values_of(given.args)
    if grad == Grad.OFF:
        with torch.no_grad():
            return [*_on_their_own(given.run(values)), ReplayToken().pack()]
    if grad == Grad.UNUSED:
        outputs = given.run(values)
        if any(output.requires_grad for output in outputs):
            raise ValueError(
                f"the gradient of {label_of(given.function)} would be lost: no argument of this remote_op requires "
                f"grad, so no gradient comes back to worker '{current_worker().name}', but its result depends on "
                "tensors there that do; call it under torch.no_grad(), let an argument require grad, or use rpc_sync "
                "in a context"
            )
        return [*_on_their_own(outputs), ReplayToken().pack()]
    before = torch.get_rng_state()
    outputs = given.run(_leaves(values))  # as it runs again: whether they require grad may decide how it is computed
    drew = not torch.equal(before, torch.get_rng_state())
    replay_token = ReplayToken(checksum(outputs), context, before if drew else None)
    return [*_on_their_own(outputs), replay_token.pack()]


def pull(
    given: ServedOp,
    replay_token: torch.Tensor,
    seeds: Sequence[torch.Tensor],
    levels: Sequence[Level],
    context: int | None,
) -> list[torch.Tensor]:
    """Order 1 and higher: gradients of values.

    Those of tensors of this worker that require grad are added to the context; 0: there is none, None: it is over.
    """
    return _Pull(given, ReplayToken.unpack(replay_token), context).run(seeds, levels)


class _Pull:
    """One run of the function and back through it."""

    def __init__(self, given: ServedOp, replay_token: ReplayToken, context: int | None) -> None:
        self._given = given
        self._ticket = replay_token
        self._engine = current_worker().part(Engine)
        self._context: Context | None = None
        if context:
            self._context = self._engine.container.get_or_create(ContextId(context))
        self._own: dict[int, torch.Tensor] = {}  # the leaves that stand for values, by id

    def run(self, seeds: Sequence[torch.Tensor], levels: Sequence[Level]) -> list[torch.Tensor]:
        values = _leaves([*values_of(self._given.args), *seeds])
        self._own = {id(value): value for value in values}
        token = enter(None if self._context is None else Scope(current_worker(), self._context))
        try:
            return _on_their_own([grad.contiguous() for grad in self._results(values, levels, last=True)])
        finally:
            leave(token)

    def _results(self, values: list[torch.Tensor], levels: Sequence[Level], *, last: bool) -> list[torch.Tensor]:
        """The results of the order that has so many levels; see [Note: orders of an operator]."""
        if not levels:
            return self._run_again(values)
        *below, level = levels
        count = len(values) - len(level.seeded)
        results = self._results(values[:count], below, last=False)
        pairs = [
            (results[place], seed)
            for place, seed in zip(level.seeded, values[count:], strict=True)
            if results[place].requires_grad
        ]
        wanted = [values[place] for place in level.wanted]
        found = self._differentiate(pairs, wanted, last=last) if pairs else [None] * len(wanted)
        return [torch.zeros_like(v) if grad is None else grad for v, grad in zip(wanted, found, strict=True)]

    def _run_again(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        random = self._ticket.random
        if random is None:
            outputs = self._run_watched(values)
        else:
            with _replaying:
                now = torch.get_rng_state()
                torch.set_rng_state(random)
                try:
                    outputs = self._run_watched(values)
                finally:
                    torch.set_rng_state(now)
        if self._ticket.check != checksum(outputs):
            raise BackhaulError(
                f"{label_of(self._given.function)} gave other results when it was run again for its gradient, which "
                "would be wrong: it depends on something that has changed since, such as parameters, or that is never "
                "the same",
                worker=current_worker().name,
            )
        return outputs

    def _run_watched(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the function where it can change nothing that it has changed the first time."""
        try:
            with NoForeignWrites(values, again=True) if WATCHES else contextlib.nullcontext():
                return self._given.run(values)
        except ForeignWriteError as error:
            worker = current_worker().name
            raise ValueError(
                f"{label_of(self._given.function)} changes tensors of worker '{worker}' that are not its own, and "
                f"would do so a second time when it is run again for its gradient ({error}); a remote_op has to return "
                "what it computes: use rpc_sync, RemoteModule or torch.no_grad(), or put modules such as BatchNorm "
                "into evaluation mode"
            ) from None

    def _differentiate(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], wanted: Sequence[torch.Tensor], *, last: bool
    ) -> Sequence[torch.Tensor | None]:
        roots, seeds = [root for root, _ in pairs], [seed for _, seed in pairs]
        if not self._leads_elsewhere(roots):
            return torch.autograd.grad(roots, wanted, seeds, create_graph=not last, allow_unused=True)
        if self._context is None:
            self._refuse()
        self._engine.backward(
            self._context,
            roots,
            [seed.detach() for seed in seeds] if last else seeds,
            inputs=None if last else wanted,
            timeout=self._engine.worker.options.backward_timeout,
            retain=not last,
            create=not last,
            fast=False,
            into_grad=False,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        found = [self._context.gradient(value) for value in wanted]
        for value in self._own.values():
            self._context.replace(value, None)
        return found

    def _leads_elsewhere(self, roots: Sequence[torch.Tensor]) -> bool:
        """Whether gradients of ``roots`` come to other tensors than values: parameters, or those of other workers."""
        for node in nodes_behind([get_gradient_edge(root) for root in roots]):
            if recv_of(node) is not None or (type(node) is LeafNode and id(node.variable) not in self._own):
                return True
        return False

    def _refuse(self) -> NoReturn:
        worker, context = current_worker().name, self._ticket.context
        why = f"context {context}, in which it was called, is over" if context else "it was called outside of a context"
        raise ContextError(
            f"{label_of(self._given.function)} uses tensors of worker '{worker}' that require grad and are not its "
            f"arguments, or calls other workers; gradients have no place to go there, since {why}: call it, and "
            "backward, inside of `with backhaul.context():`, or detach those tensors",
            worker=worker,
            context=context or None,
        )


def _leaves(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [value.detach().requires_grad_(value.is_floating_point() or value.is_complex()) for value in values]


def _on_their_own(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As they leave: with strides that their copies would have, and memory of their own."""
    made = []
    seen: set[int] = set()
    for output in outputs:
        plain = output.detach()
        memory = plain.untyped_storage().data_ptr()
        if output._is_view() or memory in seen:
            plain = plain.clone()
        seen.add(memory)
        made.append(plain)
    return made
