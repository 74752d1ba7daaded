"""Errors keep their text and fields when they are pickled or copied, and have the documented base classes."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from backhaul import errors
from backhaul.errors import BackhaulError, RemoteTraceback

KINDS = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BackhaulError)),
    key=lambda kind: kind.__name__,
)


def fields_of(kind: type[BackhaulError]) -> list[str]:
    parameters = inspect.signature(kind).parameters.values()
    return [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]


def values_of(kind: type[BackhaulError]) -> dict[str, Any]:
    """A different value for each field."""
    return {field: (field, index) for index, field in enumerate(fields_of(kind))}


def make(kind: type[BackhaulError]) -> BackhaulError:
    return kind("what happened", **values_of(kind))


def through_pickle(error: BackhaulError, protocol: int = pickle.HIGHEST_PROTOCOL) -> BackhaulError:
    made = pickle.loads(pickle.dumps(error, protocol))
    assert isinstance(made, BackhaulError)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [through_pickle, lambda e: through_pickle(e, 2), copy.copy, copy.deepcopy])
def test_everything_survives(kind: type[BackhaulError], again: Callable[[BackhaulError], BackhaulError]) -> None:
    error = make(kind)
    error.add_note("a note")
    made = again(error)
    assert made is not error
    assert type(made) is kind
    assert str(made) == "what happened"
    assert made.args == ("what happened",)
    assert {field: getattr(made, field) for field in fields_of(kind)} == values_of(kind)
    assert made.__notes__ == ["a note"]


@pytest.mark.parametrize("kind", KINDS)
def test_fields_have_defaults_and_names(kind: type[BackhaulError]) -> None:
    error = kind("only a message")
    assert "worker" in fields_of(kind)
    assert all(getattr(error, field) in (None, (), {}) for field in fields_of(kind))
    with pytest.raises(TypeError):
        kind("message", "bob")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "also"),
    [
        ("UnknownWorkerError", LookupError),
        ("CallTimeoutError", TimeoutError),
        ("PeerLostError", ConnectionError),
        ("AuthenticationError", ConnectionError),
        ("SerializationError", TypeError),
        ("FunctionNotFoundError", AttributeError),
        ("ShutdownTimeoutError", TimeoutError),
        ("UnknownContextError", LookupError),
        ("BackwardTimeoutError", TimeoutError),
    ],
)
def test_errors_are_also_what_python_calls_them(name: str, also: type[Exception]) -> None:
    assert isinstance(make(getattr(errors, name)), also)


@pytest.mark.parametrize("kind", KINDS)
def test_all_are_runtime_errors_of_ours(kind: type[BackhaulError]) -> None:
    error = make(kind)
    with pytest.raises(BackhaulError) as caught:
        raise error
    assert isinstance(caught.value, RuntimeError)
    assert caught.value is error


def test_a_remote_traceback_survives_and_names_its_worker() -> None:
    made = pickle.loads(pickle.dumps(RemoteTraceback("bob", "Traceback ...\nValueError: x\n")))
    assert (made.worker, made.text) == ("bob", "Traceback ...\nValueError: x\n")
    assert "bob" in str(made)
    assert str(made).endswith("ValueError: x")
    assert not isinstance(made, BackhaulError)
