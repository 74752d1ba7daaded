"""The optimizer that users hold. It knows which worker owns which parameters, and the options of each group."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from backhaul._autograd.api import find_gradients
from backhaul._rpc.compression import as_it_is
from backhaul._rpc.move_progress import shown_move
from backhaul._rref.handle import RRef
from backhaul._runtime.compile_marks import graph_break
from backhaul._types import WorkerInfo
from backhaul.optim.local import Group, Local, Options, add, make
from backhaul.optim.owners import (
    Answers,
    OwnerCall,
    ask_all,
    by_owner,
    check_context,
    check_rrefs,
    function_call,
    method_call,
    step_call,
)


@dataclasses.dataclass(slots=True)
class _Part:
    """Newly added parameters of one owner, by group."""

    groups: list[Group] = dataclasses.field(default_factory=list)
    numbers: list[int] = dataclasses.field(default_factory=list)  # the indices of these groups among all groups
    places: list[int] = dataclasses.field(default_factory=list)  # the indices of their parameters among all parameters


@dataclasses.dataclass(slots=True)
class _Share:
    """What one owner optimizes."""

    local: RRef[Local]
    numbers: list[int]  # the indices of its groups among all groups
    sizes: list[int]  # how many parameters of each group it owns
    places: list[int]  # the indices of its parameters among all parameters


class DistributedOptimizer(torch.optim.Optimizer):
    """Optimizes parameters on the workers that own them: each owner runs a plain optimizer over its parameters.

    It is a ``torch.optim.Optimizer``: schedulers of ``torch.optim.lr_scheduler`` accept it, and their changes of
    ``param_groups`` reach the owners with the next step. Its ``state_dict`` equals that of a single optimizer over all
    parameters.

    Steps on one worker run one after the other, whoever requested them. Steps on different workers have no order.

    Args:
        optimizer_class: A class of ``torch.optim``, or a similar class whose ``step`` needs no closure.
        params_rref: References to parameters, or groups of them: dicts with ``"params"`` and options.
        *args: Positional arguments of the optimizer of each owner.
        **kwargs: Keyword arguments of the optimizer of each owner.

    Raises:
        Exception: The error of an owner that could not create its optimizer. Notes name all owners that failed.

    Example:
        >>> import torch, backhaul as bh
        >>> with bh.cluster(2):
        ...     weight = bh.remote("worker1", torch.ones, args=(2,), kwargs={"requires_grad": True})
        ...     optimizer = bh.optim.DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
        ...     with bh.context() as ctx:
        ...         bh.backward(ctx, [weight.rpc_sync().sum()])
        ...         optimizer.step(ctx)
        ...     weight.to_here().detach()
        tensor([0.5000, 0.5000])
    """

    @graph_break
    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params_rref: Iterable[RRef[Any]] | Iterable[Mapping[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        _check_class(optimizer_class)
        self._make = optimizer_class, args, kwargs  # how owners create their optimizers
        self._shares: dict[WorkerInfo, _Share] = {}
        self._count = 0  # parameters
        self._loads = 0  # how often a state was loaded
        self._lock = threading.Lock()  # guards _known
        self._known: list[Options] = []  # for each group, the options that all its owners have received
        groups = _split(params_rref)
        if not any(rrefs for _, rrefs in groups):
            raise ValueError("params_rref has no parameters; pass at least one reference")
        defaults = self._place(groups)
        self._ready = False
        super().__init__([{**options, "params": rrefs} for options, rrefs in groups], defaults)
        self._ready = True

    def _place(self, groups: Sequence[Group]) -> Options:
        """Create optimizers on owners that have none, add groups to the others, and complete the groups' options.

        Returns:
            The defaults of a created optimizer.
        """
        parts = self._parts(groups)
        try:
            answers = ask_all({owner: self._hand_over(owner, part) for owner, part in parts.items()}, "the optimizer")
        except Exception:
            with contextlib.suppress(Exception):  # a lost owner has nothing to undo
                self._on_all("undoing", lambda share: method_call(share.local, "keep_groups", len(share.numbers)))
            raise
        for owner, (local, _, completed) in answers.items():
            part, share = parts[owner], self._shares.setdefault(owner, _Share(local, [], [], []))
            share.numbers += part.numbers
            share.sizes += [len(rrefs) for _, rrefs in part.groups]
            share.places += part.places
            for number, options in zip(part.numbers, completed, strict=True):
                groups[number - len(self._known)][0].update(options)
        with self._lock:
            self._known += [_copy(options) for options, _ in groups]
        self._count += sum(len(rrefs) for _, rrefs in groups)
        return next((defaults for _, defaults, _ in answers.values()), {})

    def _parts(self, groups: Sequence[Group]) -> dict[WorkerInfo, _Part]:
        """Sort new groups by owner. Their indices follow those of the existing groups."""
        parts: dict[WorkerInfo, _Part] = {}
        count = self._count
        for number, (options, rrefs) in enumerate(groups, start=len(self._known)):
            for owner, places in by_owner(rrefs).items():
                part = parts.setdefault(owner, _Part())
                part.groups.append((options, [rrefs[place] for place in places]))
                part.numbers.append(number)
                part.places += [count + place for place in places]
            count += len(rrefs)
        return parts

    def _hand_over(self, owner: WorkerInfo, part: _Part) -> OwnerCall:
        if owner in self._shares:
            return function_call(owner, add, self._shares[owner].local, part.groups)
        return function_call(owner, make, *self._make, part.groups)

    @graph_break
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters: ``param_group`` is a dict with ``"params"`` and options."""
        if self._ready:
            ((options, rrefs),) = _split([param_group])
            options = {**self.defaults, **options}
            self._place([(options, rrefs)])
            param_group = {**options, "params": rrefs}
        self.param_groups.append({**self.defaults, **param_group})

    # Calls to owners.

    def ask(self, what: str, function: Callable[..., Any], *args: Any) -> Answers:
        """Run ``function(parameters, *args)`` on each owner. Errors mention ``what``."""
        answers = self._on_all(what, lambda share: method_call(share.local, "apply", function, *args))
        return [(self._shares[owner].places, answer) for owner, answer in answers.items()]

    def _on_all(self, what: str, call: Callable[[_Share], OwnerCall]) -> dict[WorkerInfo, Any]:
        return ask_all({owner: call(share) for owner, share in self._shares.items()}, what)

    def _with_changes(
        self, what: str, call: Callable[..., OwnerCall], method: str, *args: Any
    ) -> dict[WorkerInfo, Any]:
        """Call a method of all shares, and pass each the changed options of its groups, if there are any."""
        if all(map(_is_known, self._known, self.param_groups)):
            return self._on_all(what, lambda share: call(share.local, method, *args))
        now = [_copy(_options(group)) for group in self.param_groups]
        with self._lock:
            changes = [_difference(known, options) for known, options in zip(self._known, now, strict=True)]
            for known, change in zip(self._known, changes, strict=True):
                for name in change:
                    known.pop(
                        name, None
                    )  # unknown until all owners have it: if one call fails, only some owners have the change
        answers = self._on_all(
            what, lambda share: call(share.local, method, *args, [changes[number] for number in share.numbers])
        )
        with self._lock:
            self._known = now
        return answers

    @graph_break
    def step(  # type: ignore[override]
        self, context_id: int | Callable[[], Any] | None = None, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Step on all owners at once. When this returns or raises, each owner has stepped or failed.

        Parameters without a gradient do not change. The ``.grad`` of every parameter stays as it was.

        Args:
            context_id: The context that holds the gradients. None: step with ``.grad``, after ``loss.backward()`` or
                passes with ``accumulate="grad"``. A function is taken as ``closure``.
            closure: Called first. It computes the gradients into ``.grad``.

        Returns:
            What ``closure`` returned, else None.

        Raises:
            UnknownContextError: The context was released, or no owner knows it.
            Exception: The error of an owner. Notes name its worker and all other owners that failed. The remaining
                owners have stepped.
        """
        if callable(context_id):
            context_id, closure = None, context_id
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if context_id is not None:
            find_gradients(context_id)  # raises if it was released
            context_id = int(context_id)
        answers = self._with_changes("the step", step_call, "step", context_id)
        check_context(context_id, list(answers.values()))
        return result

    @graph_break
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the ``.grad`` of all parameters. The gradients of a context end with the context."""
        self._on_all("zero_grad", lambda share: step_call(share.local, "zero_grad", set_to_none))

    # State.

    @graph_break
    def state_dict(self) -> dict[str, Any]:
        """Return the options and the state of all parameters, as one optimizer over all of them would.

        The state holds plain data and copies of tensors on the CPU. Save it with ``torch.save`` or
        ``torch.distributed.checkpoint.save``; to load the latter, see ``read_checkpoint``.
        """
        with shown_move("copying optimizer state from", [owner.name for owner in self._shares]):
            answers = self._with_changes("state_dict", method_call, "state_dict")
        state: dict[int, Any] = {}
        options = [_options(group) for group in self.param_groups]
        for owner, answer in answers.items():
            share = self._shares[owner]
            state.update((share.places[place], value) for place, value in answer["state"].items())
            for number, group in zip(share.numbers, answer["param_groups"], strict=True):
                options[number] = _options(group)
        groups, count = [], 0
        for number, group in enumerate(self.param_groups):
            places = list(range(count, count + len(group["params"])))
            groups.append({**options[number], "params": places})
            count += len(places)
        return {"state": {place: state[place] for place in sorted(state)}, "param_groups": groups}

    @graph_break
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state on all owners. It comes from ``state_dict`` or from one optimizer over the same parameters.

        The parameters may live on other workers than when the state was saved.

        Raises:
            ValueError: The state has other groups than this optimizer; nothing was changed.
        """
        saved = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in saved] != sizes:
            raise ValueError(
                f"the state has groups of {[len(group['params']) for group in saved]} parameters, but this optimizer "
                f"has groups of {sizes}; create the optimizer with the groups that were saved"
            )
        # A checkpoint turns integer keys into strings, and leaves out empty dicts.
        names = [str(name) for group in saved for name in group["params"]]
        state = {str(name): value for name, value in state_dict.get("state", {}).items()}
        options = [_options(group) for group in saved]

        def load(share: _Share) -> OwnerCall:
            part = {place: state[names[whole]] for place, whole in enumerate(share.places) if names[whole] in state}
            groups, used = [], 0
            for number, size in zip(share.numbers, share.sizes, strict=True):
                groups.append({**options[number], "params": list(range(used, used + size))})
                used += size
            return method_call(share.local, "load_state_dict", {"state": part, "param_groups": groups})

        self._loads += 1
        with as_it_is(), shown_move("loading optimizer state to", [owner.name for owner in self._shares]):
            self._on_all("load_state_dict", load)
        for number, group in enumerate(self.param_groups):
            self.param_groups[number] = {**_copy(options[number]), "params": group["params"]}
        with self._lock:
            self._known = [_copy(group) for group in options]

    def _make_again(self, state: Mapping[str, Any]) -> None:
        """Make the optimizers of all owners anew, with a state: the references are to other parameters now."""
        groups = [(_options(group), list(group["params"])) for group in self.param_groups]
        self._shares, self._known, self._count = {}, [], 0
        self._place(groups)
        self.load_state_dict(state)

    def _optimizers_here(self) -> set[int]:
        """The ids of the optimizers of this worker's own share."""
        shares = self._shares.values()
        return {id(share.local.local_value().optimizer) for share in shares if share.local.is_owner()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a DistributedOptimizer cannot be pickled; save or send its state_dict() instead")


def _check_class(optimizer_class: Any) -> None:
    if not callable(optimizer_class):
        raise TypeError(f"optimizer_class must be a class of torch.optim, got a {type(optimizer_class).__name__}")
    step = getattr(optimizer_class, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if step is not None else None
    if closure is not None and closure.default is inspect.Parameter.empty:
        name = getattr(optimizer_class, "__name__", optimizer_class)
        raise TypeError(
            f"{name} needs a closure that recomputes the loss inside step(); use an optimizer that needs no closure"
        )


def _split(params: Any) -> list[Group]:
    """Convert the given parameters, in any accepted form, to groups of references with their options."""
    given = [params] if isinstance(params, (RRef, Mapping)) else list(params)
    if isinstance(params, RRef):
        check_rrefs(params)
    if not any(isinstance(group, Mapping) for group in given):
        return [({}, check_rrefs(given))]
    groups: list[Group] = []
    for number, group in enumerate(given):
        if not isinstance(group, Mapping) or "params" not in group:
            raise TypeError(f"params_rref mixes groups and references; group {number} must be a dict with 'params'")
        rrefs = group["params"]
        groups.append((_options(group), check_rrefs([rrefs] if isinstance(rrefs, RRef) else rrefs)))
    return groups


def _is_known(known: Options, group: Mapping[str, Any]) -> bool:
    """Whether an owner that knows these options knows those of a group. False is right in any case."""
    if len(known) != len(group) - 1:  # the parameters
        return False
    return all([known.get(name, group) is value for name, value in group.items() if name != "params"])


def _options(group: Mapping[str, Any]) -> Options:
    return {name: value for name, value in group.items() if name != "params"}


def _copy(options: Options) -> Options:
    """Copy options and their tensors, which schedulers change in place."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def _difference(known: Options, now: Options) -> Options:
    return {name: value for name, value in now.items() if name not in known or not same_value(known[name], value)}


def same_value(one: Any, other: Any) -> bool:
    """Whether two options are equal."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)
