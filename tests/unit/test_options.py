"""Options refuse what makes no sense and tell nobody the secret; names are checked."""

from __future__ import annotations

import copy
import dataclasses
import operator
import pickle
from typing import Any

import pytest

from backhaul._options import Codec, Devices, Limits, Liveness, Options, Security, Tls
from backhaul._types import WorkerId, WorkerInfo, check_name, first_number

SECRET = "hunter2 is the secret"
GROUPS = {"security": Security, "liveness": Liveness, "devices": Devices, "limits": Limits}


def make(given: dict[str, Any]) -> Options:
    """Options of fields such as ``limits.values``."""
    groups: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for name, value in given.items():
        group, _, field = name.rpartition(".")
        (groups.setdefault(group, {}) if group else plain)[field] = value
    return Options(**plain, **{group: GROUPS[group](**fields) for group, fields in groups.items()})


def test_the_defaults_are_allowed() -> None:
    assert Options() == Options()
    assert Options().timeout == 60


@pytest.mark.parametrize(
    "given",
    [
        {"timeout": 0},
        {"timeout": 0.5, "connect_timeout": 0, "rendezvous_timeout": 0.0, "shutdown_timeout": 1e9},
        {"timeout": float("inf")},
        {"threads": 1},
        {"transport": "tcp"},
        {"transport": "tcp", "bind": "10.0.0.1"},
        {"transport": "unix"},
        {"transport": "auto", "bind": "0.0.0.0"},
        {"security.secret": b"bytes"},
        {"limits.frame_bytes": 1 << 16},
        {"limits.values": 4096},
        {"shm_bytes": 0},
        {"spin": "auto"},
        {"spin": 0},
        {"spin": False},
        {"spin": 0.05},
        {"spin": 1},
        {"lanes": 1},
        {"lanes": 64},
        {"devices.slot_bytes": 0},
        {"shm_bytes": 1 << 40},
        {"init_method": "tcp://host:1234"},
        {"liveness.heartbeat_interval": 0, "liveness.suspect_after": 0.001, "liveness.lost_after": 0.002},
        {"liveness.heartbeat_interval": 0.1, "liveness.suspect_after": 0.2, "liveness.lost_after": 0.2},
        {"liveness.suspect_after": 0, "liveness.lost_after": 0},
        {"liveness.suspect_after": 5, "liveness.lost_after": 0},
        {"liveness.lost_after": float("inf")},
        {"compression": Codec(forward="int8", where="always")},
        {"compression": {"a*": Codec(backward="zstd"), "*": None}},
    ],
)
def test_what_is_given_is_kept(given: dict[str, Any]) -> None:
    options = make(given)
    assert {name: operator.attrgetter(name)(options) for name in given} == given


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout", -1),
        ("timeout", -0.001),
        ("timeout", float("-inf")),
        ("timeout", float("nan")),
        ("connect_timeout", -1),
        ("rendezvous_timeout", -1),
        ("shutdown_timeout", -1),
        ("liveness.heartbeat_interval", -1),
        ("liveness.heartbeat_interval", float("inf")),
        ("liveness.heartbeat_interval", 1.5),
        ("liveness.suspect_after", 0.9),
        ("liveness.suspect_after", 11),
        ("liveness.lost_after", float("nan")),
        ("liveness.lost_after", 1.9),
        ("threads", 0),
        ("threads", -3),
        ("transport", "udp"),
        ("transport", ""),
        ("transport", None),
        ("limits.frame_bytes", 0),
        ("shm_bytes", -1),
        ("spin", -0.001),
        ("spin", 1.5),
        ("spin", float("nan")),
        ("spin", float("inf")),
        ("spin", True),
        ("lanes", 0),
        ("lanes", 65),
        ("lanes", 2.0),
        ("lanes", True),
        ("lanes", "many"),
        ("spin", None),
        ("spin", "never"),
        ("devices.slot_bytes", -1),
        ("limits.frame_bytes", (1 << 16) - 1),
        ("limits.values", 0),
        ("limits.values", 4095),
        ("compression", "fp16"),
        ("compression", {"*": "fp16"}),
        ("compression", {1: None}),
    ],
)
def test_what_makes_no_sense_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        make({field: value})
    assert field.rpartition(".")[2] in str(caught.value)


@pytest.mark.parametrize("given", [{"forward": "gzip"}, {"backward": True}, {"forward": ""}, {"where": "tcp"}])
def test_codecs_have_names(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        Codec(**given)


def test_a_unix_socket_has_no_address_to_bind() -> None:
    for given in ({"bind": "127.0.0.1"}, {"advertise": "node7"}):
        with pytest.raises(ValueError):
            Options(transport="unix", **given)


def test_a_worker_that_does_not_listen_has_no_address_to_bind() -> None:
    for given in ({"bind": "127.0.0.1"}, {"advertise": "node7"}):
        with pytest.raises(ValueError, match="listen"):
            Options(listen=False, **given)
    with pytest.raises(ValueError, match="relayed"):
        Limits(relayed=-1)


def test_options_are_given_by_name_and_stay() -> None:
    with pytest.raises(TypeError):
        Options(5.0)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().timeout = 5.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options(time_out=5.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_not_a_dict(group: str) -> None:
    with pytest.raises(TypeError, match=rf"Options\({group}={GROUPS[group].__name__}\(...\)\)"):
        Options(**{group: {}})  # type: ignore[arg-type]


def test_a_change_is_checked_too() -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(Options(), threads=0)


@pytest.mark.parametrize("secret", [SECRET, SECRET.encode()])
def test_the_secret_is_not_shown(secret: str | bytes) -> None:
    options = Options(timeout=12.5, security=Security(secret=secret))
    for shown in (repr(options), str(options), f"{options}", f"{options!r}", f"{[options]}"):
        assert "hunter2" not in shown
        assert "12.5" in shown


def test_keys_are_not_shown() -> None:
    tls = Tls(certificate=b"public", key=SECRET.encode(), authority="authority.pem")
    assert "hunter2" not in repr(Security(tls=tls))
    assert "authority.pem" in repr(tls)


def test_all_else_is_shown() -> None:
    shown = repr(Options())
    for kind in (Options, *GROUPS.values()):
        for field in dataclasses.fields(kind):
            assert (f"{field.name}=" in shown) is (field.name != "secret")


@pytest.mark.parametrize("again", [lambda o: pickle.loads(pickle.dumps(o)), copy.copy, copy.deepcopy])
def test_options_and_workers_survive_pickling(again: Any) -> None:
    options = Options(threads=3, security=Security(secret=b"s"))
    assert again(options) == options
    assert again(options).security.secret == b"s"
    info = WorkerInfo("bob", WorkerId(3))
    assert again(info) == info
    assert hash(again(info)) == hash(info)


@pytest.mark.parametrize("name", ["a", "worker0", "A-b_c:d.9", "x" * 128, "-", "127.0.0.1:80"])
def test_good_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "x" * 129, "two words", "new\nline", "end\n", "\n", "tab\t", "grüße", "a/b", "a'b", "\0", None, 5, b"a"],
)
def test_bad_names(name: Any) -> None:
    with pytest.raises(ValueError) as caught:
        check_name(name)
    assert repr(name) in str(caught.value)


def test_incarnations_count_from_different_numbers() -> None:
    firsts = {first_number(f"{number:016x}") for number in range(1000)}
    assert len(firsts) == 1000
    assert all(0 < first < 1 << 47 for first in firsts)
