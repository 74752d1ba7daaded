"""Makes the frame of a request: the function's name, the arguments, and the notes of interceptors. Sends nothing."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from backhaul._rpc.arguments import keywords as keyword_arguments
from backhaul._rpc.arguments import positional
from backhaul._rpc.calls.pending_call import Pending, check_size
from backhaul._rpc.compression import LEAST_COMPRESSED
from backhaul._rpc.interceptors import PROFILE, Interceptors
from backhaul._rpc.security.policy import name_for
from backhaul._wire.call_frames import encode_values, request_frame
from backhaul._wire.callables import Named
from backhaul._wire.codec import Encoded
from backhaul._wire.frames import Frame
from backhaul.errors import FrameTooLargeError, LimitError, SerializationError

F = TypeVar("F", bound=Callable[..., Any])


class RequestEncoder:
    """Encodes the requests of one worker. Thread-safe.

    Attributes:
        keeps_requests: Whether requests are kept for replay. A kept request may go out again over another channel, so
            it must not use slots of device memory, which belong to one channel.
    """

    def __init__(self, interceptors: Interceptors, now: Callable[[], float]) -> None:
        self._interceptors = interceptors
        self._now = now
        self.keeps_requests = False

    def encode(
        self,
        pending: Pending,
        function: Callable[..., Any] | str,
        known: Named | None,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> Frame:
        """The frame of a call's request. Notes and values to keep are set on ``pending``.

        Args:
            pending: The call.
            function: The function to call.
            known: The function's name, if it can be imported.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        peer = pending.peer
        values = args if type(args) is tuple else positional(args)
        named = None if kwargs is None else keyword_arguments(kwargs)
        count, keywords = len(values), False
        if named:
            values, keywords = (named, *values), True
        if known is not None and not peer.plain and (peer.main_shared or not known.in_main):
            name, names = known.name, _value_names(False, keywords, count)
        else:
            found = known.name if known is not None and (peer.main_shared or not known.in_main) else None
            name = name_for(peer, function, found) or ""
            names = _value_names(not name, keywords, count)
            values = values if name else (function, *values)
        try:
            link = peer.link.request(None if self.keeps_requests else peer.channel)
            encoded = encode_values(values, names, peer.main_shared, peer.plain, link, False)
        except SerializationError as error:
            hidden = getattr(function, _HIDDEN, 0)
            raise SerializationError(
                _renumbered(f"call to {pending.label}: {error}; nothing was sent", hidden),
                path=_renumbered(error.path or "", hidden) or None,
                device=error.device,
            ) from error.__cause__
        if encoded.lease is not None:
            pending.lease = encoded.lease
        notes: dict[str, bytes] = {}
        for interceptor in self._interceptors.of_calls:
            note, kept = interceptor.request_out(peer, encoded)
            if note is not None:
                notes[interceptor.key] = note
            if kept is not None:
                pending.kept = (*pending.kept, (interceptor, kept))
        if encoded.parcels or pending.trace is not None:
            self._add_rare_notes(pending, encoded, notes)
        if notes:
            pending.notes = notes
        left = max(pending.deadline - self._now(), 0.001) if pending.cut else pending.timeout
        frame = request_frame(pending.number, name, encoded, keywords, notes, left)
        if frame.nbytes > peer.unchecked_bytes:
            self._check_size(frame, pending, notes)
            # After the check: what the receiver has in the end is what counts.
            if frame.nbytes > LEAST_COMPRESSED and (smaller := peer.compression.of_call(encoded, function)) is not None:
                return request_frame(pending.number, name, smaller, keywords, notes, left)
        return frame

    def _check_size(self, frame: Frame, pending: Pending, notes: Mapping[str, bytes]) -> None:
        try:
            check_size(frame, pending.peer, "call to", pending)
        except (FrameTooLargeError, LimitError):
            self._interceptors.discard(pending.peer, notes)
            raise

    def _add_rare_notes(self, pending: Pending, encoded: Encoded, notes: dict[str, bytes]) -> None:
        if encoded.parcels:
            pending.parcels = encoded.parcels
            for carrier in self._interceptors.of_parcels:
                note = carrier.note_request(pending.peer, encoded)
                if note is not None:
                    notes[carrier.key] = note
        if pending.trace is not None and (note := pending.trace.encoded()):
            notes[PROFILE] = note


_HIDDEN = "_backhaul_hidden_arguments"


def hides_arguments(count: int) -> Callable[[F], F]:
    """Mark a function of a layer above whose first ``count`` arguments are not the user's: errors do not count them."""

    def mark(function: F) -> F:
        setattr(function, _HIDDEN, count)
        return function

    return mark


def _renumbered(text: str, hidden: int) -> str:
    """``text`` with places of arguments that do not count the first ``hidden`` of them."""
    return re.sub(r"\bargs\[(\d+)\]", lambda found: f"args[{max(int(found[1]) - hidden, 0)}]", text)


class _ValueNames(Sequence[str]):
    """The names of a request's values in errors. They are made on demand, since errors are rare."""

    def __init__(self, function: bool, keywords: bool, positional: int) -> None:
        self._head = ["function"] * function + ["kwargs"] * keywords
        self._positional = positional

    def __len__(self) -> int:
        return len(self._head) + self._positional

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        return self._head[index] if index < len(self._head) else f"args[{index - len(self._head)}]"


_value_names = functools.lru_cache(64)(_ValueNames)
