"""The conformance kit: what every transport must do, as tests. It knows ``_transport.base`` and no backend.

A backend passes if a subclass of ``TransportConformance`` that names it passes under pytest. Nothing here sleeps or
measures time: each wait ends as soon as the awaited event is there, and fails after ``PATIENCE`` seconds.

[Note: progress] A transport has no threads of its own, so an endpoint accepts, reads and writes only while a thread
polls it. Tests that leave bytes to be sent later therefore poll both ends.
"""

from __future__ import annotations

from backhaul.testing.transport_conformance.connecting import ConnectingConformance
from backhaul.testing.transport_conformance.delivery import DeliveryConformance
from backhaul.testing.transport_conformance.holding import HoldingConformance
from backhaul.testing.transport_conformance.lines import (
    PATIENCE,
    Aside,
    Line,
    Pollers,
    join,
    next_frames,
    send_all,
)
from backhaul.testing.transport_conformance.losses import LossConformance
from backhaul.testing.transport_conformance.polling import PollingConformance
from backhaul.testing.transport_conformance.sending import SendingConformance

__all__ = ["PATIENCE", "Aside", "Line", "Pollers", "TransportConformance", "join", "next_frames", "send_all"]


class TransportConformance(
    DeliveryConformance,
    HoldingConformance,
    LossConformance,
    ConnectingConformance,
    SendingConformance,
    PollingConformance,
):
    """Tests that every transport passes. Subclass it, and let the fixture ``endpoints`` make endpoints of yours.

    Example:
        >>> import pytest
        >>> from backhaul._transport.inproc import InprocEndpoint
        >>> class TestInproc(TransportConformance):
        ...     @pytest.fixture
        ...     def endpoints(self):
        ...         return InprocEndpoint
    """
