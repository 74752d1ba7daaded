"""Which functions a peer may call, and how much it may ask for at once."""

from __future__ import annotations

import pytest
import torch

from backhaul._options import Limits, Options, Security
from backhaul._rpc.security import policy
from backhaul._rpc.security.policy import Policy, expose, internal
from backhaul._rpc.security.rate_limits import PeerUsage, RateLimits
from backhaul.errors import LimitError, PermissionDeniedError


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_exposed", "_names", "_internal"):
        monkeypatch.setattr(policy, table, dict(getattr(policy, table)))


def open_function() -> str:
    return "open"


def test_exposed_functions_are_found_by_their_names() -> None:
    expose(open_function)
    expose(torch.add)
    expose(lambda: 5, name="five")
    rules = Policy("server", None)
    assert rules.find(f"{__name__}:open_function", "anyone") is open_function
    assert rules.find("five", "anyone")() == 5
    for name in ("os:system", "builtins:eval", "", "five:", f"{__name__}:registry"):
        with pytest.raises(PermissionDeniedError) as caught:
            rules.find(name, "caller")
        assert (caught.value.worker, caught.value.caller, caught.value.function) == ("server", "caller", name)
        assert isinstance(caught.value, PermissionError)


def test_patterns() -> None:
    expose(open_function, name="train", to=("trainer*", "admin"))
    expose(open_function, name="look")
    rules = Policy("server", None)
    for caller in ("trainer", "trainer17", "admin"):
        rules.find("train", caller)
    for caller in ("Trainer", "administrator", "x-trainer"):
        rules.find("look", caller)
        with pytest.raises(PermissionDeniedError, match="exposed only to"):
            rules.find("train", caller)
    listed = Policy("server", {"admin": ["*"], "view*": ["look"]})
    assert listed.find("train", "admin") is open_function
    listed.find("look", "viewer")
    for caller, name in (("viewer", "train"), ("trainer1", "train"), ("trainer1", "look")):
        with pytest.raises(PermissionDeniedError):
            listed.find(name, caller)


def test_what_cannot_be_exposed() -> None:
    with pytest.raises(TypeError):
        expose(5)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="name="):
        expose(lambda: 1)
    with pytest.raises(ValueError, match="colon"):
        expose(open_function, name="os:system")
    with pytest.raises(TypeError, match="list"):
        expose(open_function, to="trainer")
    expose(open_function, name="mine")
    expose(open_function, name="mine", to=["a"])
    with pytest.raises(ValueError, match="another"):
        expose(torch.add, name="mine")


def test_internal_functions_accept_exactly_their_types() -> None:
    @internal(int, str)
    def ours(number: int, text: str) -> str:
        return text * number

    found = Policy("server", {}).find(f"{__name__}:{ours.__qualname__}", "anyone")
    assert found(2, "a") == "aa"
    for wrong in ((2,), ("a", 2), (True, "a"), (2, "a", 3)):
        with pytest.raises(TypeError):
            found(*wrong)


def test_limits_apply_without_trust_or_where_options_give_them() -> None:
    assert not RateLimits.of(Options()).any
    assert None not in [
        getattr(RateLimits.of(Options(security=Security(trusted=False))), name) for name in RateLimits.__slots__
    ]
    given = RateLimits.of(Options(limits=Limits(calls=5)))
    assert (given.calls, given.tensors) == (5, None)
    for wrong in ({"calls": 0}, {"depth": 0}, {"depth": 300}):
        with pytest.raises(ValueError):
            Limits(**wrong)
    for unsafe in ({"allow": {}}, {"tls": "none"}):
        with pytest.raises(ValueError):
            Security(**unsafe)  # type: ignore[arg-type]


def test_usage() -> None:
    usage = PeerUsage("server", RateLimits(None, 2, 100, None))
    usage.take(1, "a", 1000)  # the first call is limited only by the size of frames
    with pytest.raises(LimitError) as caught:
        usage.take(1, "a", 1)
    assert (caught.value.option, caught.value.value) == ("limits.bytes_in_flight", 100)
    usage.take(2, "b", 60)
    usage.take(2, "b", 40)
    with pytest.raises(LimitError) as caught:
        usage.take(2, "b", 0)
    assert caught.value.option == "limits.calls"
    usage.take(2, "b", 50, must=True)
    for nbytes in (60, 40, 50):
        usage.give_back(2, nbytes)
    usage.take(2, "b", 100)
    assert usage.calls == 2
