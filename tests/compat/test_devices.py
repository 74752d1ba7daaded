"""Devices as the reference has them: maps that all workers check, and no tensor without one. CPU memory stands for a
device, as in tests/unit/devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backhaul.compat import autograd, nn, rpc
from backhaul.compat.rpc.devices import Said, check
from backhaul.compat.rpc.options import TensorPipeRpcBackendOptions
from tests.unit.devices.test_workers import World

Start = Callable[..., None]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a group of one worker, with these options."""
    World("handed over", monkeypatch)

    def begin(**options: Any) -> None:
        given = TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store", rpc_timeout=30, **options)
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=given)

    yield begin
    if rpc.api._is_current_rpc_agent_set():
        rpc.shutdown()


def make(x: int) -> torch.Tensor:
    return torch.full((2,), float(x))


WAYS: list[Callable[..., Any]] = [
    functools.partial(rpc.rpc_sync, "alone"),
    lambda *call: rpc.rpc_async("alone", *call).wait(),
    lambda *call: rpc.remote("alone", *call).remote().add(torch.ones(2)).to_here(),
]


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_without_a_map_is_refused(start: Start, way: Callable[..., Any]) -> None:
    start()
    text = "only supports CPU tensors by default.*`set_device_map` on `TensorPipeRpcBackendOptions`.*Request device"
    with pytest.raises(RuntimeError, match=text):
        way(torch.add, (torch.ones(2), 1))
    assert rpc.rpc_sync("alone", max, args=(1, 2)) == 2


def test_so_is_a_result(start: Start) -> None:
    start()
    with pytest.raises(RuntimeError, match="Response device mapping is not available"):
        rpc.rpc_sync("alone", make, args=(1,))


@pytest.mark.parametrize("way", WAYS)
def test_with_a_map_it_goes(start: Start, way: Callable[..., Any]) -> None:
    start(device_maps={"alone": {"cuda:0": "cuda:0"}}, devices=["cuda:0"])
    assert way(torch.add, (torch.ones(2), 1)).tolist() in ([2.0, 2.0], [3.0, 3.0])


def test_gradients_follow_the_map(start: Start) -> None:
    start(device_maps={"alone": {"cuda:0": "cuda:0"}})
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync("alone", torch.mul, args=(x, 3)).sum()])
        assert autograd.get_gradients(context)[x].tolist() == [3.0, 3.0]


def test_maps_that_cannot_be_start_nothing(start: Start) -> None:
    with pytest.raises(ValueError, match="Node alone has source devices with invalid indices in its device map for al"):
        start(device_maps={"alone": {"cuda:1": "cuda:0"}})
    assert not rpc.api._is_current_rpc_agent_set()


def said(name: str, count: int = 2, maps: Any = None, devices: Any = ()) -> Said:
    return Said(name, count, maps or {}, devices)


WRONG = {
    "has duplicated devices": said("a", devices=["cuda:0", "cuda:0"]),
    "has devices with invalid indices": said("a", devices=["cuda:2"]),
    "has invalid target node names in its device maps": said("a", maps={"x": {}}),
    "has duplicated target devices in its device map for b": said("a", maps={"b": {"cuda:0": "cpu", "cuda:1": "cpu"}}),
    "has source devices with invalid indices in its device map for b": said("a", maps={"b": {"cuda:2": "cuda:0"}}),
    "has target devices with invalid indices in its device map for c": said("a", maps={"c": {"cuda:0": "cuda:2"}}),
    "has target devices with invalid indices in its device map for a": said("a", maps={"a": {"cuda:0": "cuda:2"}}),
    "has unexpected source devices in its device map for c": said(
        "a", maps={"c": {"cuda:0": "cuda:0"}}, devices=["cuda:1"]
    ),
    "has unexpected target devices in its device map for b": said("a", maps={"b": {"cuda:0": "cuda:0"}}),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match=f"Node a {text}"):
        check([WRONG[text], said("b", devices=["cuda:1"]), said("c")], complete=True)


def test_what_can_be() -> None:
    maps = {"b": {"cuda:0": "cuda:1", "cpu": "cpu"}, "a": {"cuda:1": "cuda:1"}}
    check([said("a", maps=maps, devices=["cuda:0", "cuda:1"]), said("b", devices=["cuda:1"])], complete=True)
    check([said("a", maps={"later": {"cuda:0": "cuda:7"}})], complete=False)


def test_a_device_has_one_place() -> None:
    options = TensorPipeRpcBackendOptions(device_maps={"b": {"cuda:0": "cuda:1"}})
    with pytest.raises(ValueError, match="`set_device_map` only supports 1-to-1 mapping"):
        options.set_device_map("b", {"cuda:0": "cuda:0"})
    with pytest.raises(ValueError, match="`device_map` only supports 1-to-1 mapping"):
        options.set_device_map("c", {"cuda:0": "cuda:0", "cuda:1": "cuda:0"})
    assert "c" not in options.devices.maps
    with pytest.raises(ValueError, match="expect a list of CUDA devices, but got device type cpu"):
        options.set_devices(["cpu"])


@pytest.mark.parametrize("place", ["worker1/cuda:0/cuda:1", "/", "/cuda:0"])
def test_places_that_are_none(place: str) -> None:
    with pytest.raises(ValueError, match=f"Could not parse remote_device: {place}. The valid format is '<workername>/"):
        nn.RemoteModule(place, torch.nn.Linear, (1, 1))


@pytest.mark.parametrize(
    ("device", "text"),
    [("foo", "Expected one of .+ device type"), ("cpu2", "Invalid device string"), ("", "must not be empty")],
)
def test_devices_that_are_none(device: str, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        nn.RemoteModule(f"worker1/{device}", torch.nn.Linear, (1, 1))


def test_modules_say_whether_there_is_a_map(start: Start) -> None:
    start(device_maps={"alone": {"cuda:0": "cuda:0"}})
    module = nn.RemoteModule("alone/cpu", torch.nn.Linear, (2, 1))
    assert module.is_device_map_set
    assert module(torch.ones(2)).shape == (1,)


def test_futures_collected_are_those_given() -> None:
    future: rpc.futures.Future[int] = rpc.futures.Future()
    both = torch.futures.collect_all([future])
    future.set_result(1)
    assert both.wait() == [future]


def test_an_index_is_one_of_cuda_where_torch_sees_no_device() -> None:
    given = TensorPipeRpcBackendOptions(devices=[1])
    given.set_device_map("worker1", {0: 1})
    assert given.devices == [torch.device("cuda:1")]
    assert given.device_maps == {"worker1": {torch.device("cuda:0"): torch.device("cuda:1")}}


@pytest.mark.parametrize("wrong", ["cpu", [0], None])
def test_what_is_no_map_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="a device map is a dict from our devices to theirs"):
        TensorPipeRpcBackendOptions().set_device_map("a", wrong)


@pytest.mark.parametrize("wrong", ["cuda:0", 0])
def test_what_is_no_list_of_devices_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="a list of CUDA devices"):
        TensorPipeRpcBackendOptions(devices=wrong)
