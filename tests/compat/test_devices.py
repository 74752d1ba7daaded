"""Devices as in the reference: all workers check the device maps, and no tensor on a device is sent without one.

As in tests/unit/devices, CPU memory acts as a device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backhaul.compat import autograd, nn, rpc
from backhaul.compat.rpc.devices import DeviceDeclaration, check
from backhaul.compat.rpc.options import TensorPipeRpcBackendOptions
from tests.unit.devices.test_workers import World

Start = Callable[..., None]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a group of one worker with the given options."""
    World("handed over", monkeypatch)

    def begin(**options: Any) -> None:
        given = TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store", rpc_timeout=30, **options)
        rpc.init_rpc("single", rank=0, world_size=1, rpc_backend_options=given)

    yield begin
    if rpc.api._is_current_rpc_agent_set():
        rpc.shutdown()


def make(x: int) -> torch.Tensor:
    return torch.full((2,), float(x))


CALLS: list[Callable[..., Any]] = [
    functools.partial(rpc.rpc_sync, "single"),
    lambda *call: rpc.rpc_async("single", *call).wait(),
    lambda *call: rpc.remote("single", *call).remote().add(torch.ones(2)).to_here(),
]


@pytest.mark.parametrize("call", CALLS)
def test_an_argument_without_a_device_map(start: Start, call: Callable[..., Any]) -> None:
    start()
    text = "only supports CPU tensors by default.*`set_device_map` on `TensorPipeRpcBackendOptions`.*Request device"
    with pytest.raises(RuntimeError, match=text):
        call(torch.add, (torch.ones(2), 1))
    assert rpc.rpc_sync("single", max, args=(1, 2)) == 2


def test_a_result_without_a_device_map(start: Start) -> None:
    start()
    with pytest.raises(RuntimeError, match="Response device mapping is not available"):
        rpc.rpc_sync("single", make, args=(1,))


@pytest.mark.parametrize("call", CALLS)
def test_calls_with_a_device_map(start: Start, call: Callable[..., Any]) -> None:
    start(device_maps={"single": {"cuda:0": "cuda:0"}}, devices=["cuda:0"])
    assert call(torch.add, (torch.ones(2), 1)).tolist() in ([2.0, 2.0], [3.0, 3.0])


def test_gradients_use_the_device_map(start: Start) -> None:
    start(device_maps={"single": {"cuda:0": "cuda:0"}})
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync("single", torch.mul, args=(x, 3)).sum()])
        assert autograd.get_gradients(context)[x].tolist() == [3.0, 3.0]


def test_a_worker_with_an_invalid_device_map_does_not_start(start: Start) -> None:
    text = "Node single has source devices with invalid indices in its device map for single"
    with pytest.raises(ValueError, match=text):
        start(device_maps={"single": {"cuda:1": "cuda:0"}})
    assert not rpc.api._is_current_rpc_agent_set()


def declare(name: str, count: int = 2, maps: Any = None, devices: Any = ()) -> DeviceDeclaration:
    return DeviceDeclaration(name, count, maps or {}, devices)


INVALID = {
    "has duplicated devices": declare("a", devices=["cuda:0", "cuda:0"]),
    "has devices with invalid indices": declare("a", devices=["cuda:2"]),
    "has invalid target node names in its device maps": declare("a", maps={"x": {}}),
    "has duplicated target devices in its device map for b": declare(
        "a", maps={"b": {"cuda:0": "cpu", "cuda:1": "cpu"}}
    ),
    "has source devices with invalid indices in its device map for b": declare("a", maps={"b": {"cuda:2": "cuda:0"}}),
    "has target devices with invalid indices in its device map for c": declare("a", maps={"c": {"cuda:0": "cuda:2"}}),
    "has target devices with invalid indices in its device map for a": declare("a", maps={"a": {"cuda:0": "cuda:2"}}),
    "has unexpected source devices in its device map for c": declare(
        "a", maps={"c": {"cuda:0": "cuda:0"}}, devices=["cuda:1"]
    ),
    "has unexpected target devices in its device map for b": declare("a", maps={"b": {"cuda:0": "cuda:0"}}),
}


@pytest.mark.parametrize("text", INVALID)
def test_invalid_declarations(text: str) -> None:
    with pytest.raises(ValueError, match=f"Node a {text}"):
        check([INVALID[text], declare("b", devices=["cuda:1"]), declare("c")], complete=True)


def test_valid_declarations() -> None:
    maps = {"b": {"cuda:0": "cuda:1", "cpu": "cpu"}, "a": {"cuda:1": "cuda:1"}}
    check([declare("a", maps=maps, devices=["cuda:0", "cuda:1"]), declare("b", devices=["cuda:1"])], complete=True)
    check([declare("a", maps={"joins later": {"cuda:0": "cuda:7"}})], complete=False)


def test_device_maps_are_one_to_one() -> None:
    options = TensorPipeRpcBackendOptions(device_maps={"b": {"cuda:0": "cuda:1"}})
    with pytest.raises(ValueError, match="`set_device_map` only supports 1-to-1 mapping"):
        options.set_device_map("b", {"cuda:0": "cuda:0"})
    with pytest.raises(ValueError, match="`device_map` only supports 1-to-1 mapping"):
        options.set_device_map("c", {"cuda:0": "cuda:0", "cuda:1": "cuda:0"})
    assert "c" not in options.device_maps
    with pytest.raises(ValueError, match="expect a list of CUDA devices, but got device type cpu"):
        options.set_devices(["cpu"])


@pytest.mark.parametrize("text", ["worker1/cuda:0/cuda:1", "/", "/cuda:0"])
def test_an_invalid_remote_device(text: str) -> None:
    with pytest.raises(ValueError, match=f"Could not parse remote_device: {text}. The valid format is '<workername>/"):
        nn.RemoteModule(text, torch.nn.Linear, (1, 1))


@pytest.mark.parametrize(
    ("device", "text"),
    [("foo", "Expected one of .+ device type"), ("cpu2", "Invalid device string"), ("", "must not be empty")],
)
def test_an_invalid_device_of_a_remote_module(device: str, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        nn.RemoteModule(f"worker1/{device}", torch.nn.Linear, (1, 1))


def test_a_module_whose_worker_has_a_device_map(start: Start) -> None:
    start(device_maps={"single": {"cuda:0": "cuda:0"}})
    module = nn.RemoteModule("single/cpu", torch.nn.Linear, (2, 1))
    assert module.is_device_map_set
    assert module(torch.ones(2)).shape == (1,)


def test_collect_all_returns_the_same_futures() -> None:
    future: rpc.futures.Future[int] = rpc.futures.Future()
    both = torch.futures.collect_all([future])
    future.set_result(1)
    assert both.wait() == [future]


def test_an_index_means_a_cuda_device_where_torch_sees_none() -> None:
    options = TensorPipeRpcBackendOptions(devices=[1])
    options.set_device_map("worker1", {0: 1})
    assert options.devices == [torch.device("cuda:1")]
    assert options.device_maps == {"worker1": {torch.device("cuda:0"): torch.device("cuda:1")}}


@pytest.mark.parametrize("device_map", ["cpu", [0], None])
def test_a_device_map_that_is_not_a_dict(device_map: Any) -> None:
    with pytest.raises(TypeError, match="a device map must be a dict from devices of this worker"):
        TensorPipeRpcBackendOptions().set_device_map("a", device_map)


@pytest.mark.parametrize("devices", ["cuda:0", 0])
def test_devices_that_are_not_a_list(devices: Any) -> None:
    with pytest.raises(TypeError, match="a list of CUDA devices"):
        TensorPipeRpcBackendOptions(devices=devices)
