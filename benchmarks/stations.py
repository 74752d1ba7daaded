"""Times the four stations of a call (encode and read a request, encode and read a reply), in Python and in the native
core. Programs compute between calls, so each station also runs after other work, which leaves the caches cold.

    .venv/bin/python benchmarks/stations.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from backhaul._native import core
from backhaul._wire import call_frames, frame_reader
from backhaul._wire.frame_reader import FrameReader
from backhaul._wire.frames import Frame

Station = Callable[[], Any]

_NAMES = ("function", "args[0]", "args[1]")


class Twin:
    """The functions of one twin."""

    def __init__(self, name: str, source: Any, suffix: str) -> None:
        self.name = name
        self.encode, self.request, self.reply, self.read_request, self.read_reply = (
            getattr(source, f"{each}{suffix}")
            for each in ("encode_values", "request_frame", "reply_frame", "read_request", "read_reply")
        )
        self.cut = frame_reader.cut_frames_in_python if suffix else source.cut_frames

    def stations(self, values: tuple[Any, ...], note: bytes) -> dict[str, Station]:
        """The stations of a call of a function with these values, whose result is the first of them."""
        notes = {"autograd": note}

        def encode_request() -> Frame:
            encoded = self.encode(values, _NAMES, False, False, None, False)
            frame: Frame = self.request(17, "torch:mul", encoded, False, notes, 60.0)
            return frame

        def encode_reply() -> Frame:
            encoded = self.encode(values[:1], _NAMES[:1], False, False, None, False)
            frame: Frame = self.reply(17, encoded, notes)
            return frame

        request, reply = (b"".join(frame.parts()) for frame in (encode_request(), encode_reply()))

        def read_request() -> Any:
            frame_reader.cut_frames = self.cut
            read = self.read_request(_received(request))
            return read.values(read.tensors(None), None)

        def read_reply() -> Any:
            frame_reader.cut_frames = self.cut
            read = self.read_reply(_received(reply))
            return read.value(read.tensors(None), None)

        return {
            "encode request": lambda: encode_request().parts(),
            "read request": read_request,
            "encode reply": lambda: encode_reply().parts(),
            "read reply": read_reply,
        }


_reader = FrameReader(1 << 30)


def _received(wire: bytes) -> Frame:
    """The frame as it arrives: cut out of the memory that bytes were received into."""
    _reader.space[: len(wire)] = wire
    (found,) = _reader.fed(len(wire))
    return found


def _cold(stations: Sequence[Station], work: Callable[[], object], rounds: int) -> list[float]:
    """The median time of each station, in microseconds, each time after ``work``. The stations take turns."""
    took: list[list[float]] = [[] for _ in stations]
    for _ in range(rounds):
        for station, times in zip(stations, took, strict=True):
            work()
            begun = time.perf_counter()
            station()
            times.append(time.perf_counter() - begun)
    return [statistics.median(times) * 1e6 for times in took]


def _hot(station: Station, rounds: int) -> float:
    """The time of a station in a loop, in microseconds: the best of a few loops."""
    best = float("inf")
    for _ in range(7):
        begun = time.process_time()
        for _ in range(rounds):
            station()
        best = min(best, (time.process_time() - begun) / rounds)
    return best * 1e6


def _works() -> dict[str, Callable[[], object]]:
    lstm, inputs = torch.nn.LSTM(64, 256, 2), torch.randn(20, 8, 64)

    def run_lstm() -> None:
        with torch.no_grad():
            lstm(inputs)

    def run_python() -> None:
        ",".join(map(str, {number: str(number) for number in range(4000)}.values()))

    return {"an LSTM forward": run_lstm, "1 ms of Python": run_python, "2 ms of sleep": lambda: time.sleep(0.002)}


_CASES: dict[str, tuple[Any, ...]] = {
    "a 16-float tensor": (torch.ones(16, requires_grad=True), 2.0),
    "a dict in a tuple": (({"a": torch.ones(16), "b": [1, 2.0, "three"]}, None), 2.0),
}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    twins = [Twin("Python", call_frames, "_in_python")]
    if core is not None:
        twins.append(Twin("core", core, ""))
    print(f"{'microseconds':<18} {'after':<16} {'station':<15}", *(f"{twin.name:>7}" for twin in twins))
    for case, values in _CASES.items():
        stations = [twin.stations(values, b"n" * 30) for twin in twins]
        for after, work in {**_works(), "nothing": None}.items():
            for station in stations[0]:
                runs = [each[station] for each in stations]
                took = [_hot(run, 10 * rounds) for run in runs] if work is None else _cold(runs, work, rounds)
                print(f"{case:<18} {after:<16} {station:<15}", *(f"{each:7.1f}" for each in took), flush=True)


if __name__ == "__main__":
    main()
