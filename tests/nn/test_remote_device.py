from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backhaul.nn.remote_device import RemoteDevice, parse_place

names = st.from_regex(r"[A-Za-z0-9_.-]{1,20}", fullmatch=True)
devices = st.sampled_from(["cpu", "cuda", "cuda:0", "cuda:3", "meta", "cpu:0"])


@given(names, devices)
def test_worker_and_device(name: str, device: str) -> None:
    assert parse_place(f"{name}/{device}") == RemoteDevice(name, torch.device(device))


@given(names)
def test_a_worker_alone_means_its_cpu(name: str) -> None:
    assert parse_place(name) == RemoteDevice(name, torch.device("cpu"))


@given(st.integers(0, 10**6), devices)
def test_ranks(rank: int, device: str) -> None:
    assert parse_place(f"rank:{rank}/{device}") == RemoteDevice(rank, torch.device(device))
    assert parse_place(f"rank:{rank}") == RemoteDevice(rank, torch.device("cpu"))


@given(st.text(max_size=30))
def test_anything_is_a_place_or_a_value_error(text: str) -> None:
    try:
        place = parse_place(text)
    except ValueError:
        return
    worker, _, device = text.partition("/")
    assert worker in (place.worker, f"rank:{place.worker}") or worker.startswith("rank:0")
    assert not device or torch.device(device) == place.device


@pytest.mark.parametrize(
    "text", ["", "/", "/cpu", "worker1/", "worker1/foo", "worker1/cpu2", "worker1/cuda:0/cuda:1", "wörker", "a b/cpu"]
)
def test_no_place(text: str) -> None:
    with pytest.raises(ValueError, match="remote_device"):
        parse_place(text)


def test_no_text() -> None:
    with pytest.raises(TypeError, match="not a device"):
        parse_place(torch.device("cpu"))  # type: ignore[arg-type]
