"""The core runs code of the user's in the middle of its work, and shares memory with tensors."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from backhaul._wire import pickling
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Recycler
from backhaul.errors import SerializationError
from tools.fuzz.twins import CORE, PYTHON, Twin, by_core, describe, wire_of

from .twins import needs_core

pytestmark = needs_core


class Hook:
    """A value whose reducer calls a function."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act


def made(number: int) -> int:
    return number


@pytest.fixture(autouse=True)
def hooks() -> Iterator[None]:
    def reduce(value: Hook, parcels: list[Any]) -> Any:
        value.act()
        return made, (1,)

    pickling.reducers[Hook] = reduce
    yield
    del pickling.reducers[Hook]


def both(make: Callable[[], list[Any]]) -> list[Any]:
    """What arrives, or the type of the error, by each twin."""
    found: list[Any] = []
    for twin in (PYTHON, CORE):
        try:
            found.append(describe(twin.values_of(wire_of(twin.request(make())))))
        except Exception as error:
            found.append(type(error))
    return found


def test_a_list_may_change_while_it_is_encoded() -> None:
    def make(change: Callable[[list[Any]], object]) -> list[Any]:
        values: list[Any] = ["first", object.__new__(Hook), torch.ones(500), ["last", torch.zeros(500)]]
        values[1].act = lambda: (change(values), gc.collect(), [torch.full((500,), 9.0) for _ in range(20)])
        return [values]

    for change in (list.clear, lambda values: values.extend([1] * 1000), lambda values: values.pop()):
        both(lambda change=change: make(change))
    outcomes = both(lambda: make(lambda values: None))
    assert outcomes[0] == outcomes[1]


def test_a_dict_may_change_while_it_is_encoded() -> None:
    def make(change: Callable[[dict[str, Any]], object]) -> list[Any]:
        values: dict[str, Any] = {"a": object.__new__(Hook), "b": torch.ones(500), "c": ["last"]}
        values["a"].act = lambda: (change(values), gc.collect())
        return [values]

    def swap(values: dict[str, Any]) -> None:
        for key in [*values]:
            del values[key]
        values.update({str(number): [number] for number in range(3)})

    for change in (dict.clear, lambda values: values.update(x=1, y=2), dict.popitem, swap):
        both(lambda change=change: make(change))


def test_the_values_may_change_while_they_are_encoded() -> None:
    values: list[Any] = [Hook(lambda: None), [torch.ones(500)], torch.zeros(500)]
    values[0].act = values.clear
    encoded = CORE.encode_values(values, ["a", "b", "c"], False, False, None, False)
    assert len(encoded.tensors) == 2
    assert values == []


def test_an_error_of_a_reducer_names_the_value() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    for twin in (PYTHON, CORE):
        with pytest.raises(SerializationError) as failure:
            twin.encode([1, [Hook(fail)]])
        assert failure.value.path == "values[1][0]"


def test_an_interrupt_passes() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CORE.encode([[Hook(interrupt)]])


def test_an_error_of_a_builder_passes() -> None:
    def build(worker: Any, number: int) -> Any:
        raise ZeroDivisionError(worker)

    wire = wire_of(CORE.request([[Hook(lambda: None)]]))
    pickling.builders[__name__, "made"] = build
    try:
        for twin in (PYTHON, CORE):
            with pytest.raises(ZeroDivisionError, match="here"):
                twin.values_of(wire, "here")
    finally:
        del pickling.builders[__name__, "made"]


def test_a_builder_may_change_the_tensors() -> None:
    tensors: list[torch.Tensor] = []

    def build(worker: Any, number: int) -> int:
        tensors.clear()
        gc.collect()
        return 5

    frame = CORE.request([[Hook(lambda: None), torch.ones(5)]])
    pickling.builders[__name__, "made"] = build
    try:
        request = CORE.read_request(Frame(3, 1, bytearray(frame.body), [bytearray(b) for b in frame.buffers]))
        tensors = request.tensors(None)
        with pytest.raises(IndexError):
            request.values(tensors, None)
    finally:
        del pickling.builders[__name__, "made"]


def received(twin: Twin, value: torch.Tensor, buffer: Any) -> tuple[Any, list[torch.Tensor]]:
    frame = CORE.request([value])
    request = twin.read_request(Frame(3, 1, bytearray(frame.body), [buffer]))
    return request, request.tensors(None)


def test_a_large_tensor_is_on_the_memory_of_its_buffer_and_keeps_it() -> None:
    value = torch.arange(1000.0)
    buffer = Recycler().allocate(1 << 18)
    large = torch.zeros(1 << 16)
    request, (tensor,) = received(CORE, large, buffer)
    buffer[:4] = value[3:4].numpy().tobytes()  # type: ignore[index]
    assert tensor[0] == 3.0
    gone = weakref.ref(buffer)
    del buffer
    assert gone() is not None
    view = tensor[5:]
    del tensor, request
    assert gone() is not None
    thread = threading.Thread(target=lambda views: views.clear(), args=([view],))
    del view
    thread.start()
    thread.join()
    assert gone() is None


def test_a_small_tensor_leaves_its_buffer_alone() -> None:
    buffer = bytearray(torch.ones(5).numpy().tobytes())
    _, (tensor,) = received(CORE, torch.ones(5), buffer)
    buffer.clear()  # nothing refers to it
    assert torch.equal(tensor, torch.ones(5))


def test_a_message_keeps_its_bytes_until_it_is_read() -> None:
    frame = CORE.request(["text" * 50])
    body = bytearray(frame.body)
    request = CORE.read_request(Frame(3, 1, body, []))
    with pytest.raises(BufferError):
        body.clear()
    assert request.values([], None) == ["text" * 50]
    del request
    body.clear()


def test_the_memory_of_a_sent_tensor_stays() -> None:
    frame = CORE.request([torch.full((50_000,), 3.0)])
    gc.collect()
    noise = [torch.full((50_000,), 9.0) for _ in range(20)]
    assert len(noise) == 20
    (made,) = CORE.values_of(wire_of(frame))
    assert torch.equal(made, torch.full((50_000,), 3.0))
    with pytest.raises(TypeError):
        memoryview(frame.buffers[0])[0] = 1


def test_a_small_tensor_is_copied_when_it_is_encoded() -> None:
    tensor = torch.ones(5)
    frame = CORE.request([tensor])
    tensor.fill_(2)
    assert torch.equal(CORE.values_of(b"".join(frame.parts()))[0], torch.ones(5))


def test_memory_that_is_shared_until_it_is_written() -> None:
    tensor = torch.arange(5000.0)
    copy = tensor._lazy_clone()
    frame = CORE.request([copy])
    tensor.fill_(1)
    copy.add_(1)
    assert torch.equal(CORE.values_of(wire_of(frame))[0], torch.arange(5000.0) + 1)


def test_a_tensor_whose_memory_is_gone_is_refused() -> None:
    tensor = torch.ones(5000)
    tensor.untyped_storage().resize_(0)
    outcomes = both(lambda: [tensor])
    assert outcomes[0] == outcomes[1]


def test_received_tensors_are_ordinary() -> None:
    values = [torch.ones(3), torch.ones(2, 2, requires_grad=True), torch.zeros(1).expand(3, 3), torch.ones(5000)]
    found = CORE.values_of(wire_of(CORE.request(values)))
    assert by_core(CORE.encode(found))
    for tensor, value in zip(found, values, strict=True):
        assert tensor.is_leaf
        assert tensor.stride() == value.stride()
        assert torch._C._dispatch_keys(tensor) == torch._C._dispatch_keys(torch.ones(1))
    found[0].add_(1)
    found[1].sum().backward()
    assert torch.equal(found[1].grad, torch.ones(2, 2))


def test_the_core_is_loaded_the_same_in_inference_mode() -> None:
    program = """
import torch
with torch.inference_mode():
    from backhaul._wire import call_frames
    call_frames.encode_values((torch.ones(1),), "a", False, False, None, False)
found = call_frames.encode_values((torch.ones(1),), "a", False, False, None, False)
assert type(found).__name__ == "Outgoing"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_nothing_stays() -> None:
    tensor, label = torch.ones(5000), "a text that is not interned " * 3
    tracked = weakref.ref(tensor)
    before = sys.getrefcount(label)
    for _ in range(50):
        frame = CORE.request([tensor, [label, (tensor, {label: 1})], Hook(lambda: None)])
        CORE.values_of(wire_of(frame))
        CORE.encode([[1] * 600, tensor, label])  # Python encodes it
    assert sys.getrefcount(label) == before
    del tensor, frame
    assert tracked() is None
