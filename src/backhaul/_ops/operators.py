"""Operators whose gradients are operators again, so that PyTorch can trace, batch and differentiate them. Owns all
private interfaces of the dispatcher that Backhaul uses. Knows no workers.

[Note: orders of an operator]

A function becomes two operators. The first runs the function: order 0. The second computes gradients, first of the
first operator (order 1), then of itself, any number of times: order k is the gradient of order k - 1.

- *values* of order 0: the tensors among the function's arguments, those in lists one by one.
- *values* of order k: those of order k - 1, then its *seeds*: gradients of some of the results of order k - 1.
- *results* of order k > 0: gradients of some of the values of order k - 1.
- *level* k gives the indices of the results that have seeds, and of the values whose gradients are wanted.

Nothing is kept between the runs: each run computes all it needs from the values. The *replay token*, a tensor that is
the last result of the first operator, holds what else the first run depended on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from backhaul._ops.gradient_levels import Level, unpack
from backhaul._ops.signature import Args, Signature, Template, values_of

Tensors = list[torch.Tensor]

NAMESPACE = "backhaul"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_calls = itertools.count()


def _new_call() -> int:
    return next(_calls)


_new_call._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does


@dataclass(frozen=True, slots=True)
class Implementation:
    """The functions behind the two operators.

    Attributes:
        run: Order 0. Takes all arguments and a constant of ``Grad``; the last result is the replay token.
        fake: Order 0 on fake tensors.
        pull: Order 1 and higher. Takes all arguments, the replay token, all seeds, and the levels.
    """

    run: Callable[[Args, int], Tensors]
    fake: Callable[[Args], Tensors]
    pull: Callable[[Args, torch.Tensor, Sequence[torch.Tensor], Sequence[Level]], Tensors]


class Grad:
    """Whether the caller will need gradients of the results."""

    OFF = 0
    """No: ``torch.no_grad()`` is active."""
    UNUSED = 1
    """No: no argument requires grad, so no gradient will come back."""
    WANTED = 2


@dataclass(frozen=True, slots=True)
class OperatorRun:
    """A run of an operator, without its tensors.

    Attributes:
        template: The arguments of the function.
        levels: The levels of gradients, packed.
        how: The further integer arguments of the first operator.
    """

    template: Template
    levels: tuple[int, ...] = ()
    how: tuple[int, ...] = ()


class Operators:
    """The two operators of a function.

    Attributes:
        op: The first operator. It takes all arguments, a constant of ``Grad``, and a number that is different for each
            call: a compiler merges calls with equal arguments into one.
    """

    def __init__(self, name: str, signature: Signature, does: Implementation) -> None:
        self._does = does
        self.op = _define(
            name + signature.schema(backhaul_grad=int, backhaul_call=int),
            self._run,
            self._run_fake,
            self._run_recorded,
            self._run_batched,
            torch.Tag.nondeterministic_seeded,  # the function may draw random numbers
        )
        self._pull_op = _define(
            f"{name}_grad"
            + signature.schema(
                backhaul_replay_token=torch.Tensor, backhaul_seeds=list[torch.Tensor], backhaul_levels=list[int]
            ),
            self._pull,
            self._pull_fake,
            self._pull_recorded,
            self._pull_batched,
        )

    def __call__(self, args: Args) -> Tensors:
        """Return the results of order 0, without the replay token."""
        if forward_ad._current_level >= 0:
            grad = Grad.WANTED
        elif torch.is_grad_enabled():
            grad = Grad.WANTED if any(value.requires_grad for value in values_of(args)) else Grad.UNUSED
        else:
            grad = Grad.OFF
        results: Tensors = self.op(*args, grad, _new_call())
        return results[:-1]

    # Order 0.

    def _run(self, *args: Any) -> Tensors:
        *plain, grad, _ = args
        return self._does.run(plain, grad)

    def _run_fake(self, *args: Any) -> Tensors:
        return self._does.fake(args[:-2])

    def _run_recorded(self, keys: Any, *args: Any) -> Tensors:
        *plain, grad, call = args
        return self._record(keys, OperatorRun(Template(plain), how=(grad, call)), None, values_of(plain))

    def _run_batched(self, info: Any, in_dims: Any, *args: Any) -> Any:
        return _one_by_one(self.op, info, in_dims, args)

    # Order 1 and higher.

    def _pull(self, *args: Any) -> Tensors:
        *plain, replay_token, seeds, levels = args
        return self._does.pull(plain, replay_token, seeds, unpack(levels))

    def _pull_fake(self, *args: Any) -> Tensors:
        *plain, _, seeds, levels = args
        values = [*values_of(plain), *seeds]
        wanted = [values[place] for place in unpack(levels)[-1].wanted]
        return [torch.empty_like(value, memory_format=torch.contiguous_format) for value in wanted]

    def _pull_recorded(self, keys: Any, *args: Any) -> Tensors:
        *plain, replay_token, seeds, levels = args
        return self._record(
            keys, OperatorRun(Template(plain), tuple(levels)), replay_token, [*values_of(plain), *seeds]
        )

    def _pull_batched(self, info: Any, in_dims: Any, *args: Any) -> Any:
        return _one_by_one(self._pull_op, info, in_dims, args)

    def pull(
        self, run: OperatorRun, values: Sequence[torch.Tensor], replay_token: torch.Tensor, *levels: Level
    ) -> Sequence[torch.Tensor]:
        """Return the results of the order that is ``len(levels)`` higher than that of ``run``."""
        packed = [*run.levels, *itertools.chain.from_iterable(level.pack() for level in levels)]
        args, seeds = run.template.split(values)
        found: Tensors = self._pull_op(*args, replay_token, seeds, packed)
        return found

    # Recording.

    def _record(
        self, keys: Any, run: OperatorRun, replay_token: torch.Tensor | None, values: Sequence[torch.Tensor]
    ) -> Tensors:
        with (
            enable_single_level_autograd_function()
        ):  # also under torch.func: this is the level that is being processed
            return list(_Recorded.apply(self, keys, run, replay_token, *values))  # type: ignore[attr-defined]

    def pass_on(
        self, keys: Any, run: OperatorRun, replay_token: torch.Tensor | None, values: Sequence[torch.Tensor]
    ) -> Tensors:
        """Dispatch to the keys below autograd."""
        args, seeds = run.template.split(values)
        found: Tensors = (
            self.op.redispatch(keys, *args, *run.how)
            if replay_token is None
            else self._pull_op.redispatch(keys, *args, replay_token, seeds, list(run.levels))
        )
        return found


def _define(schema: str, run: Any, fake: Any, recorded: Any, batched: Any, *tags: torch.Tag) -> Any:
    name = schema.partition("(")[0]
    qualified = f"{NAMESPACE}::{name}"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _library.impl(name, run, "CompositeExplicitAutograd")
    # Not with torch.library.register_autograd: torch.func rejects its result
    # (https://github.com/pytorch/pytorch/issues/168393), and it has no forward mode.
    _library.impl(name, recorded, "Autograd", with_keyset=True)
    torch.library.register_fake(qualified, fake, lib=_library)
    torch.library.register_vmap(qualified, batched, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


class _Recorded(_SingleLevelFunction):
    """An operator in a graph; see [Note: orders of an operator]."""

    @staticmethod
    def forward(
        ctx: Any,
        operators: Operators,
        keys: Any,
        run: OperatorRun,
        replay_token: torch.Tensor | None,
        *values: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        if run.how[:1] == (Grad.UNUSED,) and any(
            ctx.needs_input_grad
        ):  # tensors inside torch.func do not say that they require grad
            run = OperatorRun(run.template, how=(Grad.WANTED, *run.how[1:]))
        # Autograd is off while a Function runs, but torch.func may have further transforms outside this one.
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            results = operators.pass_on(keys & torch._C._after_autograd_keyset, run, replay_token, values)
        ctx.operators, ctx.run = operators, run
        ctx.set_materialize_grads(False)
        kept = (*values, results[-1] if replay_token is None else replay_token)
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)
        ctx.kinds = [
            (result.shape, result.dtype, result.device) if result.is_floating_point() or result.is_complex() else None
            for result in results
        ]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        *values, replay_token = ctx.saved_tensors
        seeds = {place: grad for place, grad in enumerate(grads) if grad is not None}
        needs = ctx.needs_input_grad[_LEADING:]
        wanted = [place for place, need in enumerate(needs) if need]
        if not (seeds and wanted):
            return (None,) * (_LEADING + len(needs))
        level = Level(tuple(seeds), tuple(wanted))
        results = ctx.operators.pull(ctx.run, [*values, *seeds.values()], replay_token, level)
        found = dict(zip(wanted, results, strict=True))
        return (*[None] * _LEADING, *(found.get(place) for place in range(len(needs))))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        """The gradient is linear in its seeds, and its gradient by them is the derivative: two orders at once."""
        *values, replay_token = ctx.saved_tensors
        given = {place: tangent for place, tangent in enumerate(tangents[_LEADING:]) if tangent is not None}
        seeds = {
            place: torch.zeros(kind[0], dtype=kind[1], device=kind[2])
            for place, kind in enumerate(ctx.kinds)
            if kind is not None
        }
        first = Level(tuple(seeds), tuple(given))
        second = Level(tuple(range(len(given))), tuple(range(len(values), len(values) + len(seeds))))
        results = ctx.operators.pull(ctx.run, [*values, *seeds.values(), *given.values()], replay_token, first, second)
        found = dict(zip(seeds, results, strict=True))
        return tuple(found.get(place) for place in range(len(ctx.kinds)))


_LEADING = 4  # arguments before the values


def _one_by_one(op: Any, info: Any, in_dims: Any, args: Args) -> Any:
    """Call the operator once for each element of a batch."""

    def pick(arg: Any, dim: Any, index: int) -> Any:
        if isinstance(dim, list | tuple):
            return [pick(part, place, index) for part, place in zip(arg, dim, strict=True)]
        return arg if dim is None else arg.select(dim, index)

    if not info.batch_size:
        raise ValueError("a remote_op cannot run on an empty batch, because the shapes of its results are unknown")
    results = []
    for index in range(info.batch_size):
        results.append(op(*(pick(arg, dim, index) for arg, dim in zip(args, in_dims, strict=True))))
    outputs = [torch.stack(parts) for parts in zip(*results, strict=True)]
    return outputs, [0] * len(outputs)
