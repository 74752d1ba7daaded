"""Broken input: a sample of ``make fuzz``, all inputs of the corpus, and bytes sent before the handshake is done."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

import pytest

from backhaul._transport.sockets.addresses import parse
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.sockets.handshake import ClientHandshake
from backhaul._wire.frame_reader import FrameReader
from backhaul.testing.transport_conformance import Pollers
from tools.fuzz.mutator import Mutator
from tools.fuzz.run import corpus_of, main, run, targets
from tools.fuzz.target import FindingError, Target, feed

CORPUS = Path(__file__).parent / "corpus"
TARGETS = targets()

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns about unusual tensors


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_sample(target: Target) -> None:
    report = run([target], inputs=4000, seed=7, corpus=CORPUS)
    assert report.findings == []
    assert len(report.outcomes[target.name]) > 1


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_what_is_kept(target: Target) -> None:
    for data in corpus_of(CORPUS, target):
        feed(target, data)


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 300 << 10


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_valid_inputs_are_read(target: Target) -> None:
    if target.name not in ("server", "client", "slots"):
        assert {feed(target, data) for data in target.seeds()} <= {"read", "ignored"}
    assert feed(target, target.seeds()[0]) in ("read", "ProtocolError")


class Careless(Target):
    name = "careless"

    def seeds(self) -> list[bytes]:
        return [bytes(8)]

    def take(self, data: bytes) -> object:
        if data.count(0) < 5:
            raise FindingError("too few zeros")
        return [1, 2, 3][data[0]] if data else None


def test_what_must_not_come_out_is_found_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.fuzz.run.targets", lambda: [Careless()])
    lines: list[str] = []
    assert main(["--inputs", "4000", "--corpus", str(tmp_path)], lines.append) == 1
    kinds = {word for line in lines for word in ("IndexError", "too few zeros") if word in line}
    assert kinds == {"IndexError", "too few zeros"}
    assert corpus_of(tmp_path, Careless())


def test_a_seed_makes_the_same_inputs() -> None:
    makes = [Mutator([b"abc" * 30, b"xyz" * 9], random.Random(3)) for _ in range(2)]
    assert [makes[0].make() for _ in range(50)] == [makes[1].make() for _ in range(50)]


def test_bytes_before_the_proof_never_reach_the_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    monkeypatch.setattr(FrameReader, "fed", lambda self, count: fed.append(count) or [])
    (server,) = (target for target in TARGETS if target.name == "server")
    make = Mutator(server.seeds(), random.Random(5)).make
    endpoint = SocketEndpoint(secret=b"what strangers do not know", unix=True, bind="127.0.0.1")
    greeting = ClientHandshake(b"another").start()
    try:
        with Pollers(endpoint):
            for number in range(40):
                family, where = parse(endpoint.addresses[number % 2])
                with socket.socket(family) as sock, contextlib.suppress(ConnectionError):
                    sock.settimeout(10)
                    sock.connect(where)
                    sock.sendall((greeting if number % 3 else b"") + make())
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1 << 12):
                        pass
    finally:
        endpoint.close()
    assert fed == []
