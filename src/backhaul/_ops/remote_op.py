"""Functions of other workers as operators. What is done over there is in ``served``."""

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

_names: set[str] = set()  # guarded by the lock of ``api``, under which all operators are made


class RemoteOp:
    """A function of another worker, as an operator. ``remote_op`` makes them.

    Attributes:
        op: The operator, as ``torch.library.opcheck`` takes it. After the function's arguments it takes what
            ``Operators.op`` does.
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
        """Run the function over there, and wait for the result."""
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
            raise self._cannot_be_faked(f"its result depends on what is in a tensor ({', '.join(map(str, unknown))})")
        return found

    def _cannot_be_faked(self, why: str) -> BackhaulError:
        return BackhaulError(
            f"{label_of(self._on_fakes)} cannot run on fake tensors, as it has to while a graph is traced: {why}; give "
            "remote_op a function that can by `fake=`: one that returns tensors of the same shapes and dtypes as "
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
        """Let the other worker take part in a context, so that it is told when that is over; None if it is."""
        worker = current_worker()
        context = worker.part(Engine).container.find(number) if number else None
        if context is not None and context.know(worker.part(Node).peers.find(self._to).record.id):
            return number
        return None if number else 0

    def _call(self, function: Callable[..., list[torch.Tensor]], args: Args, *more: Any) -> list[torch.Tensor]:
        """Call one of ``served``. That is not part of any context: its gradients are computed by calling another."""
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
    """A name for an operator. It depends on the code, since what was compiled is kept under the names of operators, and
    used again by later programs.
    """
    known = name_of(function)
    code = getattr(function, "__code__", None)
    try:
        essence = marshal.dumps(code) if known and code is not None else cloudpickle.dumps(function)
    except Exception:  # such as references: they travel, but not by pickle alone
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
    """While inside, fake tensors may meet real ones: the function's parameters, if they are here too."""
    if mode is None:
        yield
        return
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def _pending(mode: Any) -> set[Any]:
    """Symbols for numbers that depend on what is in tensors, and that the compiler has yet to find in results."""
    return set(getattr(getattr(mode, "shape_env", None), "pending_fresh_unbacked_symbols", ()))


def _sizes_of(tensors: Sequence[torch.Tensor]) -> set[Any]:
    """Symbols in the shapes of tensors."""
    numbers = itertools.chain.from_iterable((*t.shape, *t.stride(), t.storage_offset()) for t in tensors)
    return {symbol for n in numbers if isinstance(n, torch.SymInt) for symbol in n.node.expr.free_symbols}


def _reason(error: Exception) -> str:
    if isinstance(error, SerializationError):
        return f"it calls other workers, and fake tensors cannot be sent ({error})"
    if type(error).__name__ in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
        return f"what it does depends on what is in a tensor ({str(error).partition(chr(10))[0]})"
    if isinstance(error, ForeignWriteError):
        return f"it changes tensors that are not its own, which only its worker's run may do ({error})"
    return f"{type(error).__name__}: {error}"
