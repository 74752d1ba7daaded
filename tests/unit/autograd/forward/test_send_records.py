"""What the sending end of a message does with its gradients."""

from __future__ import annotations

import torch

from backhaul._autograd.forward.functions import SendRecord, ends_of
from backhaul._autograd.ids import MessageId


def test_gradients_come_to_where_their_tensors_are() -> None:
    record = SendRecord(MessageId(1), 1, (1,), kept_ends=ends_of([torch.ones(2, requires_grad=True) for _ in range(3)]))
    here = torch.ones(2)
    assert record.devices is None
    assert record.bring([here, None, here])[0] is here
    record.devices = [torch.device("meta"), torch.device("meta"), torch.device("cpu")]
    moved, missing, kept = record.bring([here, None, here])
    assert moved is not None
    assert moved.is_meta
    assert missing is None
    assert kept is here


def test_gradients_that_are_brought_stay_recorded_whatever_the_mode_of_the_thread_is() -> None:
    record = SendRecord(MessageId(1), 1, (1,), kept_ends=ends_of([torch.ones(2, requires_grad=True)]))
    record.devices = [torch.device("meta")]
    with torch.no_grad():
        (moved,) = record.bring([torch.ones(2, requires_grad=True)])
    assert moved is not None
    assert moved.requires_grad
