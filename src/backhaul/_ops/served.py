"""What the worker with the function does: runs it, and computes gradients by running it again."""

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

_replaying = threading.Lock()  # held while the random number generator is set to an earlier state


class ServedOp(NamedTuple):
    """A function and its arguments.

    Attributes:
        what: The function, or its name.
        named: The names of the last arguments, which are passed by keyword.
        args: All arguments.
    """

    what: str | Function
    named: Sequence[str]
    args: Args

    @property
    def function(self) -> Function:
        """The function itself."""
        return resolve(self.what) if isinstance(self.what, str) else self.what

    def run(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the function with ``values`` in place of the tensors among its arguments."""
        return call(self.function, self.named, Template(self.args).fill(values))


def run(given: ServedOp, grad: int, context: int) -> list[torch.Tensor]:
    """Order 0: return the results of the function, and the replay token."""
    values = values_of(given.args)
    if grad == Grad.OFF:
        with torch.no_grad():
            return [*_on_their_own(given.run(values)), ReplayToken().pack()]
    if grad == Grad.UNUSED:
        outputs = given.run(values)
        if any(output.requires_grad for output in outputs):
            raise ValueError(
                f"the gradient of {label_of(given.function)} would be lost: its result depends on tensors of worker "
                f"'{current_worker().name}' that require grad, but no argument of this remote_op requires grad, so no "
                "gradient comes back there; call it under torch.no_grad(), pass an argument that requires grad, or use "
                "rpc_sync, whose gradients go into .grad"
            )
        return [*_on_their_own(outputs), ReplayToken().pack()]
    before = torch.get_rng_state()
    outputs = given.run(_leaves(values))  # as in later runs: requires_grad may decide how a value is computed
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
    """Order 1 and higher: return gradients of values.

    Gradients of other tensors of this worker are added to the context. 0: there is no context; None: it has ended.
    """
    return _Pull(given, ReplayToken.unpack(replay_token), context).run(seeds, levels)


class _Pull:
    """Runs the function once more, and differentiates it."""

    def __init__(self, given: ServedOp, replay_token: ReplayToken, context: int | None) -> None:
        self._given = given
        self._replay_token = replay_token
        self._engine = current_worker().part(Engine)
        self._context: Context | None = None
        if context:
            self._context = self._engine.container.get_or_create(ContextId(context))
        self._own: dict[int, torch.Tensor] = {}  # id -> leaf that stands for a value

    def run(self, seeds: Sequence[torch.Tensor], levels: Sequence[Level]) -> list[torch.Tensor]:
        values = _leaves([*values_of(self._given.args), *seeds])
        self._own = {id(value): value for value in values}
        token = enter(None if self._context is None else Scope(current_worker(), self._context))
        try:
            return _on_their_own([grad.contiguous() for grad in self._results(values, levels, last=True)])
        finally:
            leave(token)

    def _results(self, values: list[torch.Tensor], levels: Sequence[Level], *, last: bool) -> list[torch.Tensor]:
        """Return the results of order ``len(levels)``; see [Note: orders of an operator]."""
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
        random = self._replay_token.random
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
        if self._replay_token.check != checksum(outputs):
            raise BackhaulError(
                f"{label_of(self._given.function)} returned other results when it ran again for its gradient, so the "
                "gradient would be wrong; do not change parameters or other state that it uses before backward",
                worker=current_worker().name,
            )
        return outputs

    def _run_watched(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the function; raise if it changes tensors that its first run has already changed."""
        try:
            with NoForeignWrites(values, again=True) if WATCHES else contextlib.nullcontext():
                return self._given.run(values)
        except ForeignWriteError as error:
            worker = current_worker().name
            raise ValueError(
                f"{label_of(self._given.function)} changes tensors of worker '{worker}' that it did not create, and "
                f"would change them again when it runs again to compute its gradient ({error}); use rpc_sync, "
                "RemoteModule or torch.no_grad() instead, or put modules such as BatchNorm into evaluation mode"
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
        """Return whether gradients of ``roots`` reach tensors other than values, here or on other workers."""
        for node in nodes_behind([get_gradient_edge(root) for root in roots]):
            if recv_of(node) is not None or (type(node) is LeafNode and id(node.variable) not in self._own):
                return True
        return False

    def _refuse(self) -> NoReturn:
        worker, context = current_worker().name, self._replay_token.context
        why = f"its context {context} has ended" if context else "it was called outside a context"
        raise ContextError(
            f"{label_of(self._given.function)} calls other workers, or uses tensors of worker '{worker}' that require "
            f"grad and are not its arguments; their gradients have no place because {why}; call it and backward inside "
            "`with backhaul.context():`, or detach those tensors",
            worker=worker,
            context=context or None,
        )


def _leaves(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [value.detach().requires_grad_(value.is_floating_point() or value.is_complex()) for value in values]


def _on_their_own(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Detach outputs, and copy views and tensors that share memory, so that each output has its own memory."""
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
