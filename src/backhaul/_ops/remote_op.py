"""Functions of other workers as operators, at the caller. What the other worker does is in ``served``."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import marshal
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import torch
from torch._guards import detect_fake_mode

from backhaul._autograd.backward.engine import Engine
from backhaul._autograd.forward.recording import current_scope, enter, leave
from backhaul._ops import served
from backhaul._ops.gradient_levels import Level
from backhaul._ops.operators import Implementation, Operators
from backhaul._ops.replay_token import ReplayToken, blank
from backhaul._ops.served import ServedOp
from backhaul._ops.signature import Args, Signature, Template, call, values_of
from backhaul._ops.write_detector import ForeignWriteError, NoForeignWrites
from backhaul._rpc.node import Node
from backhaul._wire.callables import label_of, name_of
from backhaul._worker.worker import current_worker
from backhaul.errors import BackhaulError, SerializationError

Function = Callable[..., Any]

_names: set[str] = set()  # guarded by the lock of ``api``, which is held while an operator is created


class RemoteOp:
    """A function of another worker, as an operator. ``remote_op`` creates it.

    Attributes:
        op: The operator, as ``torch.library.opcheck`` expects it. After the function's arguments it takes the further
            arguments of ``Operators.op``.
    """

    def __init__(self, function: Function, to: str | int, fake: Function | None, timeout: float | None) -> None:
        self._function = function
        self._to = to
        self._on_fakes = getattr(fake or function, "_torchdynamo_orig_callable", fake or function)
        self._timeout = timeout
        self._signature = Signature(function)
        does = Implementation(self._run, self._fake, self._pull)
        self._operators = Operators(_new_name(function, to), self._signature, does)
        self.op = self._operators.op

    def __repr__(self) -> str:
        return f"<remote_op {label_of(self._function)} on {self._to!r}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on the other worker and wait for the result."""
        return self._signature.collect(self._operators(self._signature.complete(args, kwargs)))

    def _run(self, args: Args, grad: int) -> list[torch.Tensor]:
        scope = current_scope(current_worker())
        return self._call(served.run, args, grad, scope.context.id if scope is not None else 0)

    def _fake(self, args: Args) -> list[torch.Tensor]:
        mode: Any = detect_fake_mode(values_of(args))
        known = _pending(mode)
        try:
            with torch.no_grad(), _real_tensors_too(mode):
                with NoForeignWrites(values_of(args), again=False):
                    outputs = call(self._on_fakes, self._signature.named, args)
                found = [*(output.detach().clone() for output in outputs), blank()]
        except Exception as error:
            raise self._cannot_be_faked(_reason(error)) from error
        if unknown := _pending(mode) - known - _sizes_of(found):
            raise self._cannot_be_faked(
                f"its result depends on the values in a tensor ({', '.join(map(str, unknown))})"
            )
        return found

    def _cannot_be_faked(self, why: str) -> BackhaulError:
        return BackhaulError(
            f"{label_of(self._on_fakes)} cannot run on fake tensors, which tracing a graph requires: {why}; pass "
            "remote_op(fake=...), a function that returns tensors of the same shapes and dtypes as "
            f"{label_of(self._function)}"
        )

    def _pull(
        self, args: Args, replay_token: torch.Tensor, seeds: Sequence[torch.Tensor], levels: Sequence[Level]
    ) -> list[torch.Tensor]:
        seeds = [seed.detach() for seed in seeds]
        return self._call(
            served.pull,
            args,
            replay_token,
            seeds,
            list(levels),
            self._take_part(ReplayToken.unpack(replay_token).context),
        )

    def _take_part(self, number: int) -> int | None:
        """Let the other worker take part in a context, so that it learns when the context ends. None: it has ended."""
        worker = current_worker()
        context = worker.part(Engine).container.find(number) if number else None
        if context is not None and context.know(worker.part(Node).peers.find(self._to).record.id):
            return number
        return None if number else 0

    def _call(self, function: Callable[..., list[torch.Tensor]], args: Args, *more: Any) -> list[torch.Tensor]:
        """Call a function of ``served``, outside any context: another function of ``served`` computes the gradients."""
        client = current_worker().part(Node).client
        peer = client.peers.find(self._to)
        what = name_of(self._function, main_shared=peer.main_shared) or self._function
        plain = Template(args).fill([value.detach() for value in values_of(args)])
        token = enter(None)
        try:
            found: list[torch.Tensor] = client.call(
                peer.record.id,
                function,
                (ServedOp(what, self._signature.named, plain), *more),
                None,
                self._timeout,
                label=label_of(self._function),
            )
            return found
        finally:
            leave(token)


def _new_name(function: Function, to: str | int) -> str:
    """Return a name for an operator. It depends on the code of the function, because torch caches compiled graphs under
    the names of their operators and uses them in later programs.
    """
    known = name_of(function)
    code = getattr(function, "__code__", None)
    try:
        essence = marshal.dumps(code) if known and code is not None else cloudpickle.dumps(function)
    except Exception:  # for example references, which can be sent but not pickled
        essence = uuid.uuid4().bytes
    words = re.sub(r"\W+", "_", f"{label_of(function)}_on_{to}")
    base = name = f"{words}_{hashlib.sha256(essence + repr(known).encode()).hexdigest()[:8]}"
    count = 1
    while name in _names:
        count += 1
        name = f"{base}_{count}"
    _names.add(name)
    return name


@contextlib.contextmanager
def _real_tensors_too(mode: Any) -> Iterator[None]:
    """Allow fake tensors together with real ones inside: the function may have parameters in this process."""
    if mode is None:
        yield
        return
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def _pending(mode: Any) -> set[Any]:
    """Return symbols for numbers that depend on values in tensors, and that the compiler must still find in results."""
    return set(getattr(getattr(mode, "shape_env", None), "pending_fresh_unbacked_symbols", ()))


def _sizes_of(tensors: Sequence[torch.Tensor]) -> set[Any]:
    """Return the symbols in the shapes of tensors."""
    numbers = itertools.chain.from_iterable((*t.shape, *t.stride(), t.storage_offset()) for t in tensors)
    return {symbol for n in numbers if isinstance(n, torch.SymInt) for symbol in n.node.expr.free_symbols}


def _reason(error: Exception) -> str:
    if isinstance(error, SerializationError):
        return f"it calls other workers, but fake tensors cannot be sent ({error})"
    if type(error).__name__ in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
        return f"it depends on the values in a tensor ({str(error).partition(chr(10))[0]})"
    if isinstance(error, ForeignWriteError):
        return f"it changes tensors that it did not create, which only the run on its worker may do ({error})"
    return f"{type(error).__name__}: {error}"
