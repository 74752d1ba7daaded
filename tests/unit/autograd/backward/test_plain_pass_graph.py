"""What a pass outside contexts keeps of a worker's graph: nothing, once all that has arrived has run."""

from __future__ import annotations

import torch

import backhaul as bh
from backhaul._autograd.backward.engine import Engine
from backhaul._autograd.backward.plain_pass_graph import PlainPassGraph
from backhaul._autograd.ids import PLAIN, MessageId
from backhaul._autograd.messages import PassSpec
from backhaul._autograd.plan.plan import Orders

received: list[torch.Tensor] = []


def keep(x: torch.Tensor) -> None:
    received.append(x)


def near(which: int) -> torch.Tensor:
    """Leads to the same message as the other results of this number: their gradients go back together."""
    return received[which] + 1


def apart() -> torch.Tensor:
    return torch.ones(2, requires_grad=True) * 2


def test_sources_that_the_core_has_run_are_forgotten_with_their_groups() -> None:
    received.clear()
    with bh.cluster(2) as (_, there):
        for _ in range(2):
            bh.rpc_sync("worker1", keep, args=(torch.ones(2, requires_grad=True),))
        context = there.part(Engine).container.plain
        kept: list[torch.Tensor] = []
        sources: list[MessageId] = []
        for call in (lambda: near(0), lambda: near(0), lambda: near(1), lambda: near(1), apart):
            kept.append(bh.rpc_sync("worker1", call))
            sources += context.sends.keys() - sources
        first, second, third, fourth, alone = sources
        ran: dict[MessageId, dict[int, int]] = {}
        graph = PlainPassGraph(PassSpec(PLAIN, 0, 1), context, lambda _: None, ran=ran)

        assert graph.find(second) is not None  # waits for the first
        graph.follow(Orders(frozenset((first, second, alone)), frozenset()))
        ran[alone] = {}  # as the native core does, which knows no groups
        assert graph.find(first) is not None
        assert graph.find(fourth) is not None
        assert graph.find(third) is not None
        assert alone in graph.ends
        graph.leave([first, second])
        graph.leave([third, fourth])
        assert graph.ends == {}
        assert graph.orders == {}
        assert len(kept) == 5
    received.clear()
