"""Where tensors arrive, for every kind of map, and the errors if they cannot arrive."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from backhaul._devices.placement import Maps, backward, check, maps_of, onward, same_device
from backhaul._options import Devices, Options
from backhaul._types import device_name
from backhaul.errors import ProtocolError, SerializationError


@dataclass
class Someone:
    name: str
    devices: tuple[str, ...] = ()
    maps: Maps = field(default_factory=dict)


def worker(name: str, count: int, device_maps: Any = None, devices: str = "auto") -> Someone:
    return Someone(name, tuple(f"GPU-{index}" for index in range(count)), maps_of(device_maps, devices))


def around(one: Someone, other: Someone, device: str) -> tuple[str, str]:
    """Where a tensor of ``one`` arrives at ``other``, and where its result arrives back."""
    there = onward(one, other).target(device)
    return there, backward(other, one).target(there)


class TestWithoutAMap:
    def test_the_index_stays(self) -> None:
        assert around(worker("a", 2), worker("b", 2), "cuda:1") == ("cuda:1", "cuda:1")

    def test_the_cpu_stays(self) -> None:
        assert around(worker("a", 2), worker("b", 0), "cpu") == ("cpu", "cpu")
        assert not onward(worker("a", 2), worker("b", 2)).takes_host

    def test_a_device_the_peer_does_not_have(self) -> None:
        with pytest.raises(SerializationError) as caught:
            onward(worker("a", 2), worker("b", 1)).target("cuda:1")
        assert caught.value.worker == "b"
        text = str(caught.value)
        assert "cuda:1" in text
        assert "'b', which has 1 CUDA device;" in text
        assert "Options.devices.maps to {'b': {'cuda:1': 'cuda:0'}}" in text
        assert "Options.devices.maps to {'b': 'cpu'}" in text

    def test_a_peer_without_devices(self) -> None:
        with pytest.raises(
            SerializationError, match=r"has no CUDA devices; set Options.devices.maps to {'b': 'cpu'} to"
        ):
            onward(worker("a", 2), worker("b", 0)).target("cuda:0")

    def test_a_reply_says_whose_option_it_is(self) -> None:
        with pytest.raises(SerializationError, match=r"Options.devices.maps of worker 'a' to {'b': 'cpu'}"):
            backward(worker("b", 1), worker("a", 0)).target("cuda:0")


class TestMapped:
    def test_nothing_goes_without_a_map(self) -> None:
        one, other = worker("a", 2, devices="mapped"), worker("b", 2, {"a": {0: 1}}, devices="mapped")
        with pytest.raises(SerializationError) as caught:
            onward(one, other).target("cuda:1")
        assert caught.value.device == "cuda:1"
        assert onward(one, other).target("cpu") == "cpu"
        with pytest.raises(SerializationError):
            backward(other, one).target("cuda:0")

    def test_what_is_mapped_goes_there_and_back(self) -> None:
        one, other = worker("a", 2, {"b": {0: 1}}, devices="mapped"), worker("b", 2, devices="mapped")
        assert around(one, other, "cuda:0") == ("cuda:1", "cuda:0")
        check(one, [one, other])


class TestWithAMap:
    def test_replies_go_back_the_other_way(self) -> None:
        one, other = worker("a", 2, {"b": {0: 1, 1: 0}}), worker("b", 2)
        assert around(one, other, "cuda:0") == ("cuda:1", "cuda:0")
        assert around(one, other, "cuda:1") == ("cuda:0", "cuda:1")

    def test_one_map_is_enough_for_both(self) -> None:
        one, other = worker("a", 2, {"b": {0: 1}}), worker("b", 2)
        assert around(other, one, "cuda:1") == ("cuda:0", "cuda:1")

    def test_each_has_its_own(self) -> None:
        one, other = worker("a", 2, {"b": {0: 1}}), worker("b", 2, {"a": {0: 1}})
        assert around(one, other, "cuda:0") == ("cuda:1", "cuda:0")
        assert around(other, one, "cuda:0") == ("cuda:1", "cuda:0")

    def test_is_for_that_peer_only(self) -> None:
        assert around(worker("a", 2, {"c": {0: 1}}), worker("b", 2), "cuda:0") == ("cuda:0", "cuda:0")

    def test_a_device_that_is_not_in_it(self) -> None:
        with pytest.raises(SerializationError, match=r"'b': its map says cuda:0 -> cuda:1; set"):
            onward(worker("a", 2, {"b": {0: 1}}), worker("b", 2)).target("cuda:1")

    def test_a_reply_from_a_device_that_is_not_in_it(self) -> None:
        route = backward(worker("b", 2), worker("a", 2, {"b": {0: 1}}))
        with pytest.raises(SerializationError, match=r"of worker 'a' to {'b': {'cuda:0': 'cuda:0'}}"):
            route.target("cuda:0")

    def test_a_device_that_who_joined_later_does_not_have(self) -> None:
        with pytest.raises(SerializationError, match=r"says cuda:0 -> cuda:9 and that worker has 1 CUDA device; set"):
            onward(worker("a", 1, {"later": {0: 9}}), worker("later", 1)).target("cuda:0")

    def test_between_cpu_and_devices(self) -> None:
        one, other = worker("a", 1, {"b": {"cpu": 0}}), worker("b", 1)
        assert onward(one, other).takes_host
        assert around(one, other, "cpu") == ("cuda:0", "cpu")
        one = worker("a", 1, {"b": {0: "cpu"}})
        assert around(one, other, "cuda:0") == ("cpu", "cuda:0")
        assert backward(other, one).takes_host

    def test_to_oneself(self) -> None:
        one = worker("a", 2, {"a": {0: 1}})
        assert around(one, one, "cuda:0") == ("cuda:1", "cuda:0")


class TestCpu:
    def test_for_one_peer(self) -> None:
        one, other = worker("a", 2, {"b": "cpu"}), worker("b", 2)
        assert around(one, other, "cuda:1") == ("cpu", "cpu")
        assert backward(other, one).target("cuda:1") == "cpu"
        assert onward(other, one).target("cuda:1") == "cpu"
        assert around(one, worker("c", 2), "cuda:1") == ("cuda:1", "cuda:1")

    def test_for_all_but_those_with_a_map(self) -> None:
        one = worker("a", 1, {"c": {0: 0}}, devices="cpu")
        assert around(one, worker("b", 1), "cuda:0") == ("cpu", "cpu")
        assert onward(worker("b", 1), one).target("cuda:0") == "cpu"
        assert around(one, worker("c", 1), "cuda:0") == ("cuda:0", "cuda:0")


class TestCheck:
    @pytest.mark.parametrize("maps", [{"b": {0: 0, 1: 1}}, {"b": {"cpu": 1}}, {"b": "cpu"}, {"later": {0: 9}}, {}])
    def test_what_is_right(self, maps: Any) -> None:
        check(worker("a", 2, maps), [worker("a", 2, maps), worker("b", 2)])

    def test_devices_here(self) -> None:
        with pytest.raises(
            ValueError, match=r"of worker 'a' for 'b' names cuda:3 of worker 'a', which has cuda:0, cuda:1"
        ):
            check(worker("a", 2, {"b": {3: 0}}), [worker("b", 2)])

    def test_devices_there(self) -> None:
        with pytest.raises(ValueError, match="names cuda:0 of worker 'b', which has no CUDA devices"):
            check(worker("a", 2, {"b": {0: 0}}), [worker("b", 0)])

    @pytest.mark.parametrize("found", [{0: 0}, "cpu"])
    def test_names(self, found: Any, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "backhaul"):
            check(worker("a", 2, {"later": found}), [worker("b", 0)])
        assert "of worker 'a' for 'later': there is no worker of that name yet; known workers: b" in caplog.text

    def test_nothing_is_said_of_names_that_are_there(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "backhaul"):
            check(worker("a", 2, {"b": "cpu"}, devices="cpu"), [worker("b", 0)])
        assert not caplog.text

    @pytest.mark.parametrize("bad", [{"x": "cuda:0"}, {"cuda:0": "cuda"}, {"cuda:0": "cuda:1", "cuda:1": "cuda:1"}])
    def test_what_a_peer_says(self, bad: dict[str, str]) -> None:
        with pytest.raises(ProtocolError):
            onward(worker("a", 2), Someone("b", ("x", "y"), {"a": bad}))


class TestOptions:
    @pytest.mark.parametrize(
        "maps",
        [
            {"b": {0: 1, 1: 1}},
            {"b": {0: 1, "cuda:0": 2}},
            {"b": {"cuda": 1, "cuda:0": 2}},
            {"b": {0: "gpu"}},
            {"b": {-1: 0}},
            {"b": {0: "xpu:0"}},
            {"b": {True: 0}},
            {"b": "cuda"},
            {"b": 3},
            {"b c": {0: 0}},
        ],
    )
    def test_what_cannot_be(self, maps: Any) -> None:
        with pytest.raises(ValueError):
            Options(devices=Devices(maps=maps))

    @pytest.mark.parametrize("maps", ["cpu", [("b", {0: 0})], 3])
    def test_what_is_no_map_at_all(self, maps: Any) -> None:
        with pytest.raises(ValueError, match="maps must give for each worker name a map"):
            Options(devices=Devices(maps=maps))

    @pytest.mark.parametrize("size", [-1, 1.5, "1GiB", True, float("inf")])
    def test_slot_bytes(self, size: Any) -> None:
        with pytest.raises(ValueError, match="slot_bytes must be a number of bytes"):
            Options(devices=Devices(slot_bytes=size))

    def test_devices(self) -> None:
        with pytest.raises(ValueError, match="placement must be"):
            Options(devices=Devices(placement="cuda"))  # type: ignore[arg-type]

    def test_names(self) -> None:
        assert device_name(torch.device("cuda", 3)) == "cuda:3"
        assert device_name(torch.device("cuda")) == "cuda:0"
        assert maps_of({"b": {torch.device("cuda", 1): "cpu"}}, "auto") == {"b": {"cuda:1": "cpu"}}


def test_the_same_hardware_is_known_again() -> None:
    one, other = Someone("a", ("X", "Y")), Someone("b", ("Y", "Z"))
    assert same_device(one, other, "cuda:0") == 1
    assert same_device(one, other, "cuda:1") is None
    assert same_device(one, other, "cuda:7") is None
