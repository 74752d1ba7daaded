"""Exceptions arrive with their own type if possible, and always with the text and the traceback."""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import cloudpickle.cloudpickle
import pytest
import torch

from backhaul._wire.codec import Encoded
from backhaul._wire.faults import decode_fault, encode_fault
from backhaul._wire.frame_reader import FrameReader
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Fault, Kind, pack, unpack
from backhaul.errors import BackhaulError, CallTimeoutError, RemoteError, RemoteTraceback

from .trip import LIMIT, feed, wire_of


def wire_for(error: BaseException, worker: str = "far") -> bytes:
    fault, encoded = encode_fault(error, worker)
    assert encoded is None or isinstance(encoded, Encoded)
    return wire_of(Frame(Kind.FAULT, 1, pack(fault), encoded.buffers if encoded else ()))


def arrive(wire: bytes) -> BaseException:
    (frame,) = feed(FrameReader(LIMIT), wire)
    return decode_fault(unpack(frame.body, Fault), frame.buffers)


def carry(error: BaseException, worker: str = "far") -> BaseException:
    """Send an exception of ``worker``; return what arrives."""
    return arrive(wire_for(error, worker))


def raised(error: BaseException) -> BaseException:
    """Raise and catch the exception, so that it has a traceback."""

    def fails_in_here() -> None:
        raise error

    try:
        fails_in_here()
    except BaseException as caught:
        return caught
    raise AssertionError


class Simple(Exception):
    pass


class WithState(Exception):
    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.detail: dict[str, Any] = {}


class TwoNeeded(Exception):
    """Its constructor needs two arguments, but unpickling calls it with one."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(f"{left} and {right}")


class KeywordNeeded(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class CannotBeShown(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError

    __repr__ = __str__


class CannotBeUnpickled(Exception):
    def __setstate__(self, state: Any) -> None:
        raise ZeroDivisionError("while being unpickled")

    def __reduce__(self) -> Any:
        return type(self), self.args, {"x": 1}


class LeavesWhenRemade(Exception):
    """A constructor that ends the program."""

    def __init__(self, code: object) -> None:
        super().__init__(f"code {code}")
        if not isinstance(code, int):
            sys.exit(1)


class BecomesSomethingElse(Exception):
    def __reduce__(self) -> Any:
        return list, ((1, 2),)


class WithoutInit(BackhaulError):
    """A user's subclass that does not call the constructor of its base."""

    def __init__(self) -> None:
        RuntimeError.__init__(self, "no worker set")


class Unwritable(Exception):
    """An exception that refuses attributes."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class TestWhatIsSent:
    @pytest.mark.parametrize(
        "error",
        [
            ValueError("bad value"),
            ValueError(),
            KeyError("key"),
            ZeroDivisionError(1, "two"),
            StopIteration(5),
            AssertionError("left", ["right"]),
            AttributeError("no attribute"),
            RuntimeError("grüße"),
            OSError("plain"),
            FileNotFoundError(2, "No such file", "name.txt"),
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
            Simple("mine"),
            torch.OutOfMemoryError("too much"),
        ],
        ids=repr,
    )
    def test_arrives_with_type_and_arguments(self, error: Exception) -> None:
        made = carry(error)
        assert type(made) is type(error)
        assert made.args == error.args
        assert str(made) == str(error)

    def test_keeps_attributes(self) -> None:
        error = WithState("state", code=7)
        error.detail["x"] = [1]
        made = carry(error)
        assert isinstance(made, WithState)
        assert (made.code, made.detail) == (7, {"x": [1]})

    def test_keeps_errno_and_filename(self) -> None:
        made = carry(FileNotFoundError(2, "No such file", "name.txt"))
        assert isinstance(made, FileNotFoundError)
        assert (made.errno, made.filename) == (2, "name.txt")

    def test_keeps_tensors(self) -> None:
        (made,) = carry(ValueError(torch.arange(100_000))).args
        assert torch.equal(made, torch.arange(100_000))

    def test_keeps_notes_and_adds_one(self) -> None:
        error = ValueError("x")
        error.add_note("first")
        error.add_note("second")
        notes = carry(error, "bob").__notes__
        assert notes[:2] == ["first", "second"]
        assert any("bob" in note for note in notes[2:])
        assert error.__notes__ == ["first", "second"]

    def test_keeps_groups(self) -> None:
        made = carry(ExceptionGroup("several", [ValueError(1), ExceptionGroup("inner", [KeyError(2)])]))
        assert isinstance(made, ExceptionGroup)
        assert made.message == "several"
        inner = made.exceptions[1]
        assert isinstance(inner, ExceptionGroup)
        assert [type(one) for one in inner.exceptions] == [KeyError]

    def test_errors_of_ours_keep_their_fields(self) -> None:
        made = carry(CallTimeoutError("late", worker="carol", function="f", timeout=1.5), "bob")
        assert isinstance(made, CallTimeoutError)
        assert (made.worker, made.function, made.timeout) == ("carol", "f", 1.5)

    def test_errors_of_ours_without_a_worker_are_of_the_one_that_raised(self) -> None:
        made = carry(CallTimeoutError("late"), "bob")
        assert isinstance(made, CallTimeoutError)
        assert made.worker == "bob"

    def test_may_be_sent_on(self) -> None:
        made = carry(raised(carry(raised(KeyError("deep")), "third")), "second")
        assert isinstance(made, KeyError)
        assert isinstance(made.__cause__, RemoteTraceback)
        assert "third" in str(made.__cause__)
        assert made.__cause__.worker == "second"


class TestTheCause:
    def test_is_the_remote_traceback(self) -> None:
        cause = carry(raised(ValueError("bad value")), "bob").__cause__
        assert isinstance(cause, RemoteTraceback)
        assert cause.worker == "bob"
        assert "fails_in_here" in cause.text
        assert "ValueError: bad value" in cause.text

    def test_has_the_causes_and_contexts_of_the_original(self) -> None:
        outer = RuntimeError("outer")
        outer.__cause__ = raised(KeyError("inner"))
        text = str(carry(raised(outer)).__cause__)
        assert "KeyError: 'inner'" in text
        assert "direct cause" in text
        assert "RuntimeError: outer" in text

    def test_has_the_notes_of_the_original(self) -> None:
        error = ValueError("x")
        error.add_note("a hint")
        assert "a hint" in str(carry(raised(error)).__cause__)


def _unpicklable_argument() -> Exception:
    return ValueError("locked", threading.Lock())


def _unpicklable_attribute() -> Exception:
    error = WithState("locked")
    error.detail["lock"] = threading.Lock()
    return error


def _local_class() -> Exception:
    class Local(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("not to be pickled")

    return Local("locked")


class TestWhatDoesNot:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (_unpicklable_argument, "locked"),
            (_unpicklable_attribute, "locked"),
            (_local_class, "locked"),
            (lambda: TwoNeeded("this", "that"), "this and that"),
            (lambda: KeywordNeeded(code=5), "code 5"),
            (lambda: CannotBeUnpickled("strange"), "strange"),
            (lambda: LeavesWhenRemade(5), "code 5"),
            (lambda: BecomesSomethingElse("strange"), "strange"),
            (lambda: SystemExit("leaving"), "leaving"),
            (lambda: KeyboardInterrupt("stop"), "stop"),
            (lambda: GeneratorExit("end"), "end"),
            (lambda: BaseExceptionGroup("group", [KeyboardInterrupt()]), "group"),
        ],
    )
    def test_arrives_as_a_remote_error(self, make: Callable[[], BaseException], message: str) -> None:
        error = make()
        made = carry(raised(error), "bob")
        assert type(made) is RemoteError
        assert made.worker == "bob"
        assert made.type_name == f"{type(error).__module__}.{type(error).__qualname__}"
        assert message in str(made)
        assert isinstance(made.__cause__, RemoteTraceback)
        assert "fails_in_here" in made.__cause__.text
        assert message in made.__cause__.text
        assert any("bob" in note for note in made.__notes__)

    def test_what_cannot_be_shown_arrives_all_the_same(self) -> None:
        made = carry(raised(CannotBeShown(3)), "bob")
        assert type(made) is CannotBeShown
        assert made.args == (3,)
        assert isinstance(made.__cause__, RemoteTraceback)
        assert "CannotBeShown" in made.__cause__.text
        assert "fails_in_here" in made.__cause__.text

    def test_what_can_neither_be_shown_nor_pickled(self) -> None:
        made = carry(CannotBeShown(threading.Lock()), "bob")
        assert isinstance(made, RemoteError)
        assert made.type_name is not None
        assert made.type_name.endswith("CannotBeShown")

    def test_a_class_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType("only_far_away")
        exec("class Strange(Exception): pass", module.__dict__)
        monkeypatch.setitem(sys.modules, "only_far_away", module)
        wire = wire_for(module.Strange("from afar"))
        monkeypatch.delitem(sys.modules, "only_far_away")
        made = arrive(wire)
        assert isinstance(made, RemoteError)
        assert made.type_name == "only_far_away.Strange"
        assert "from afar" in str(made)

    @pytest.mark.parametrize("text", [os.fsdecode(b"caf\xe9.txt"), "\ud800", "\0"], ids=ascii)
    def test_text_that_is_not_unicode(self, text: str) -> None:
        made = carry(FileNotFoundError(2, "No such file", text))
        assert isinstance(made, FileNotFoundError)
        assert made.filename == text
        made = carry(raised(ValueError(text)))
        assert made.args == (text,)
        assert isinstance(made.__cause__, RemoteTraceback)

    def test_text_that_is_not_unicode_in_what_cannot_be_pickled(self) -> None:
        error = WithState("\udcff")
        error.detail["lock"] = threading.Lock()
        made = carry(error)
        assert isinstance(made, RemoteError)
        assert made.type_name is not None
        assert made.type_name.endswith("WithState")

    def test_an_error_of_ours_without_its_fields(self) -> None:
        made = carry(WithoutInit(), "bob")
        assert isinstance(made, BackhaulError)
        assert "no worker set" in str(made)

    def test_an_error_that_takes_no_attributes(self) -> None:
        made = carry(Unwritable("rigid"), "bob")
        assert isinstance(made, (Unwritable, RemoteError))
        assert "rigid" in str(made)

    def test_notes_that_are_not_a_list(self) -> None:
        error = ValueError("x")
        error.__notes__ = ("a", "b")  # type: ignore[assignment]
        made = carry(error, "bob")
        assert isinstance(made, (ValueError, RemoteError))
        assert "x" in str(made)


class TestClassesOfMain:
    SOURCE = """
class Mine(Exception):
    def __init__(self, code):
        super().__init__(code)
        self.code = code
"""

    @staticmethod
    def become(monkeypatch: pytest.MonkeyPatch, source: str) -> types.ModuleType:
        """Replace ``__main__`` with a program that has none of these classes."""
        module = types.ModuleType("__main__")
        exec(source, module.__dict__)
        monkeypatch.setitem(sys.modules, "__main__", module)
        tracker = cloudpickle.cloudpickle
        monkeypatch.setattr(tracker, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", type(tracker._DYNAMIC_CLASS_TRACKER_BY_CLASS)())
        monkeypatch.setattr(tracker, "_DYNAMIC_CLASS_TRACKER_BY_ID", type(tracker._DYNAMIC_CLASS_TRACKER_BY_ID)())
        return module

    def test_are_the_callers_own_where_it_has_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wire = wire_for(self.become(monkeypatch, self.SOURCE).Mine(3))
        here = self.become(monkeypatch, self.SOURCE)
        made = arrive(wire)
        assert type(made) is here.Mine
        assert made.code == 3

    @pytest.mark.parametrize("source", ["", "Mine = 5", "class Mine(int): pass"])
    def test_come_along_where_it_does_not(self, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
        wire = wire_for(self.become(monkeypatch, self.SOURCE).Mine(3))
        self.become(monkeypatch, source)
        made = arrive(wire)
        assert type(made).__name__ == "Mine"
        assert isinstance(made, Exception)
        assert made.args == (3,)


def test_a_fault_that_lies_about_its_payload_is_still_reported() -> None:
    fault, encoded = encode_fault(ValueError(torch.ones(1000)), "bob")
    assert encoded is not None
    made = decode_fault(fault, [])
    assert isinstance(made, RemoteError)
    assert made.type_name == "builtins.ValueError"
