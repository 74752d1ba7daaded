"""The fixtures that all tests of the kit share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

import pytest

from backhaul._transport.base import Channel, Endpoint, EndpointFactory
from backhaul.testing.transport_conformance.lines import Line, join


class ConformanceSuite:
    """Makes the endpoints under test. Subclasses add tests.

    Attributes:
        can_hold: Whether channels of this transport offer ``acquire`` and ``receive``.
        overtakes: Whether small frames may arrive before a large frame that another thread is sending.
    """

    can_hold: ClassVar[bool] = False
    overtakes: ClassVar[bool] = False

    @pytest.fixture
    def endpoints(self) -> EndpointFactory:
        """Makes the endpoints under test. Each can reach the others."""
        raise NotImplementedError("override the fixture ``endpoints`` to name the transport under test")

    @pytest.fixture
    def make(self, endpoints: EndpointFactory) -> Iterator[EndpointFactory]:
        """Like ``endpoints``. The endpoints are closed after the test."""
        with contextlib.ExitStack() as stack:

            def make_one() -> Endpoint:
                endpoint = endpoints()
                stack.callback(endpoint.close)
                return endpoint

            yield make_one

    @pytest.fixture
    def line(self, make: EndpointFactory) -> Line:
        """Two endpoints and a channel between them."""
        return join(make(), make())

    def hold_or_skip(self, channel: Channel, holder: object = None) -> None:
        """Hold the channel. Skips the test if the transport does not offer that."""
        if not self.can_hold:
            pytest.skip("this transport does not offer ``acquire``")
        assert channel.acquire(holder)
