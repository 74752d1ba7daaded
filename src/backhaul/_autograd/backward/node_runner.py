"""Runs single nodes of the graph with PyTorch's engine, and stops the engine behind them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from backhaul._autograd.messages import PassSpec
from backhaul._autograd.torch_engine.anomaly import StopEngine, begin_stop, end_stop, watching
from backhaul._autograd.torch_engine.hooks import own_hook
from backhaul._autograd.torch_engine.run import Node, run_engine
from backhaul._devices import seam
from backhaul._devices.seam import Mark


class NodeRunner:
    """Runs nodes of one pass, one at a time, with all their hooks.

    Args:
        spec: The pass.
        inner: Tensors inside the graph whose gradients the user wants, by their edges.
        capture: Takes such a gradient.
    """

    def __init__(
        self,
        spec: PassSpec,
        inner: Mapping[tuple[Node, int], torch.Tensor | GradientEdge],
        capture: Callable[[torch.Tensor | GradientEdge, torch.Tensor], None],
    ) -> None:
        self._spec = spec
        self._inner = inner
        self._capture = capture

    def run(self, node: Node, sums: Mapping[int, torch.Tensor]) -> tuple[Any, ...]:
        """Run one node with its inputs; return its outputs."""
        taken: list[tuple[Any, ...]] = []
        thread = threading.get_ident()  # other threads may run the same node in other passes
        streams, silenced = seam.streams, False
        mark: Mark | None = None

        @own_hook
        def take(outputs: tuple[Any, ...], _: object) -> None:
            nonlocal mark, silenced
            if threading.get_ident() != thread:
                return
            taken.append(outputs)
            mark = streams.mark(None)  # of the node's streams, which are current here
            silenced = begin_stop()
            raise StopEngine

        @own_hook
        def capture(grads: tuple[Any, ...]) -> None:
            for number, grad in enumerate(grads) if threading.get_ident() == thread else ():
                wanted = self._inner.get((node, number))
                if wanted is not None and grad is not None:
                    self._capture(wanted, grad)

        edges = [GradientEdge(node, number) for number in sums]
        handles = []
        try:
            with watching([node], self._spec.anomaly):
                handles.append(node.register_hook(take))  # the last: no other hook runs after it
                if self._inner:
                    handles.append(node.register_prehook(capture))
                # The engine is asked for what lies behind, so that the node computes all its outputs. It never gets
                # there.
                behind = [GradientEdge(next_, number) for next_, number in node.next_functions if next_ is not None]
                run_engine(
                    edges,
                    list(sums.values()),
                    behind,
                    retain=self._spec.retain,
                    create=self._spec.create,
                    checkpoints=self._spec.into_grad and not self._spec.restricted,
                )
        except StopEngine:
            return streams.join(mark, taken[0])  # the engine does this at the end of a run; it was stopped
        finally:
            if silenced:
                end_stop()
            for handle in handles:
                handle.remove()
        raise AssertionError("the engine did not run the node")

    def pass_recv(self, node: Node, grad: torch.Tensor) -> torch.Tensor | None:
        """What the hooks of a recv node's tensor make of the gradient that arrived there."""
        edge = GradientEdge(node, 0)
        (found,) = run_engine([edge], [grad], [edge], retain=self._spec.retain, create=self._spec.create)
        wanted = self._inner.get((node, 0))
        if wanted is not None and found is not None:
            self._capture(wanted, found)
        return found
