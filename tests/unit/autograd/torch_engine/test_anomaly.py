"""torch's switch of anomaly mode: who has it on, and that it is left as the program wants it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from backhaul._autograd.torch_engine.anomaly import CHECK_NAN, OFF, ON, begin_stop, end_stop, level
from backhaul._autograd.torch_engine.anomaly import hold_for_handler as hold


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    assert level() == OFF
    yield
    assert not torch.is_anomaly_enabled()
    assert torch.is_anomaly_check_nan_enabled()


def switch(wanted: int) -> None:
    """As the program does it."""
    torch.set_anomaly_enabled(wanted != OFF, wanted != ON)


def test_it_is_on_while_somebody_holds_it() -> None:
    first, second = hold(ON), hold(CHECK_NAN)
    assert level() == CHECK_NAN
    first.release()
    first.release()
    assert level() == CHECK_NAN
    second.release()
    assert level() == OFF


@pytest.mark.parametrize("wanted", [ON, CHECK_NAN])
def test_what_the_program_has_switched_on_stays_as_it_is(wanted: int) -> None:
    switch(wanted)
    held = hold(CHECK_NAN)
    assert level() == wanted
    held.release()
    assert level() == wanted
    switch(OFF)


def test_what_the_program_has_switched_off_stays_off() -> None:
    switch(CHECK_NAN)
    early = hold(CHECK_NAN)
    switch(OFF)
    late = hold(CHECK_NAN)
    assert level() == CHECK_NAN
    early.release()
    late.release()
    assert level() == OFF


@pytest.mark.parametrize("wanted", [ON, CHECK_NAN])
def test_it_is_off_for_torch_while_the_engine_is_stopped(wanted: int) -> None:
    switch(wanted)
    assert begin_stop()
    assert begin_stop()
    assert not torch.is_anomaly_enabled()
    assert level() == wanted
    end_stop()
    assert not torch.is_anomaly_enabled()
    end_stop()
    assert torch.is_anomaly_enabled()
    assert level() == wanted
    switch(OFF)
    assert not begin_stop()


def test_holders_that_come_and_go_while_the_engine_is_stopped() -> None:
    early = hold(CHECK_NAN)
    assert begin_stop()
    late = hold(CHECK_NAN)
    early.release()
    assert not torch.is_anomaly_enabled()
    end_stop()
    assert torch.is_anomaly_enabled()
    assert begin_stop()
    late.release()
    end_stop()
    assert level() == OFF
