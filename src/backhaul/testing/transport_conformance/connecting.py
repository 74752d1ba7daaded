"""Tests that endpoints connect to each other."""

from __future__ import annotations

import functools

import pytest

from backhaul._transport.base import Endpoint, EndpointFactory, Received
from backhaul._wire.frames import Frame
from backhaul.testing.transport_conformance.lines import PATIENCE, Aside, Pollers, content, pattern
from backhaul.testing.transport_conformance.suite import ConformanceSuite


class ConnectingConformance(ConformanceSuite):
    """Endpoints connect to each other."""

    def test_connecting_to_nobody(self, make: EndpointFactory) -> None:
        here, gone = make(), make()
        gone.close()
        for address in gone.addresses:
            with pytest.raises(ConnectionError):
                here.connect(address, timeout=PATIENCE)

    @pytest.mark.parametrize("address", ["", ":", "nonsense", "carrier-pigeon:coop/7", "carrier-pigeon:host:1"])
    def test_connecting_to_a_foreign_address(self, make: EndpointFactory, address: str) -> None:
        with pytest.raises(ValueError):
            make().connect(address, timeout=PATIENCE)

    def test_a_closed_endpoint_connects_to_nobody(self, make: EndpointFactory) -> None:
        here, there = make(), make()
        here.close()
        with Pollers(there), pytest.raises(ConnectionError):
            here.connect(there.addresses[0], timeout=PATIENCE)

    def test_every_address_works(self, make: EndpointFactory) -> None:
        here, there = make(), make()
        assert there.addresses
        with Pollers(there) as theirs:
            for number, address in enumerate(there.addresses):
                here.connect(address, timeout=PATIENCE).send(Frame(3, number))
            theirs.wait_for(frames=len(there.addresses))

    def test_an_endpoint_may_connect_to_itself(self, make: EndpointFactory) -> None:
        here = make()
        with Pollers(here) as ours:
            near = here.connect(here.addresses[0], timeout=PATIENCE)
            near.send(Frame(3, 1))
            ours.wait_for(frames=1)
            near.close()
            ours.wait_for(losses=2)

    def test_many_channels_at_once(self, make: EndpointFactory) -> None:
        hub = make()
        spokes = [make() for _ in range(4)]

        def reply(event: Received) -> None:
            for frame in event.frames:
                event.channel.send(Frame(4, frame.number, frame.body, frame.buffers), timeout=0)

        per_spoke, rounds = 16, 6

        def talk(spoke: Endpoint) -> None:
            with Pollers(spoke) as ours:
                channels = [spoke.connect(hub.addresses[0], timeout=PATIENCE) for _ in range(per_spoke)]
                for number in range(rounds):
                    for index, channel in enumerate(channels):
                        body = pattern(index * 100, number)
                        channel.send(Frame(3, number, body, [pattern(index * 3000, number)]))
                ours.wait_for(frames=per_spoke * rounds)
                for index, channel in enumerate(channels):
                    assert list(map(content, ours.frames(channel))) == [
                        (4, number, pattern(index * 100, number), [pattern(index * 3000, number)])
                        for number in range(rounds)
                    ]
                for channel in channels:
                    channel.close()
                ours.wait_for(losses=per_spoke)

        with Pollers(hub, threads=2, act=reply) as hubs:
            for talking in [Aside(functools.partial(talk, spoke)) for spoke in spokes]:
                talking.result()
            hubs.wait_for(losses=per_spoke * len(spokes))
