"""Learns to balance poles: observers play, and one agent chooses all their actions in one batch and learns (REINFORCE).

``Agent.select`` is marked with ``async_execution``: it returns a future and frees its thread. When the states of the
last observer have arrived, the policy runs once for all observers, and every observer gets its actions.

    python examples/cartpole_actors.py
    python examples/cartpole_actors.py --observers 4 --poles 8 --iterations 60
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

import torch
from torch import nn

import backhaul as bh

MAX_STEPS = 200  # of an episode
GAMMA = 0.98


class CartPoles:
    """Carts on rails. Each cart has a pole that must not fall. All carts move at once."""

    def __init__(self, count: int, draw: torch.Generator) -> None:
        self.states = torch.rand(count, 4, generator=draw) * 0.1 - 0.05  # position, speed, angle, angular speed
        self.up = torch.ones(count, dtype=torch.bool)

    def push(self, right: torch.Tensor) -> None:
        """Push each cart to the right or to the left, for a fiftieth of a second."""
        gravity, pole, total, half, force, tick = 9.8, 0.1, 1.1, 0.5, 10.0, 0.02
        place, speed, angle, turn = self.states.unbind(1)
        push = torch.where(right.bool(), force, -force)
        sin, cos = angle.sin(), angle.cos()
        swing = (push + pole * half * turn**2 * sin) / total
        turning = (gravity * sin - cos * swing) / (half * (4 / 3 - pole * cos**2 / total))
        moving = swing - pole * half * turning * cos / total
        self.states = torch.stack(
            [place + tick * speed, speed + tick * moving, angle + tick * turn, turn + tick * turning], dim=1
        )
        # A pole that has fallen stays down.
        self.up &= (self.states[:, 0].abs() <= 2.4) & (self.states[:, 2].abs() <= 0.2095)


def play(agent: bh.RRef[Agent], observer: int, poles: int, seed: int) -> None:
    """Play one episode on each pole of an observer. The agent chooses the actions."""
    game = CartPoles(poles, torch.Generator().manual_seed(seed))
    lasted = []
    while game.up.any() and len(lasted) < MAX_STEPS:
        lasted.append(game.up.float())
        game.push(agent.rpc_sync().select(observer, game.states))
    agent.rpc_sync().finish(observer, torch.stack(lasted))


class Agent:
    """The policy. All observers call its methods at the same time."""

    def __init__(self, observers: int) -> None:
        torch.manual_seed(0)
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.observers = observers
        self.lock = threading.Lock()  # guards all attributes below
        self.begin()

    def begin(self) -> None:
        """Discard the recorded episodes."""
        self.playing = set(range(self.observers))
        self.waiting: dict[int, tuple[torch.Tensor, bh.Future[torch.Tensor]]] = {}
        self.said: dict[int, list[torch.Tensor]] = {observer: [] for observer in self.playing}  # log probabilities
        self.lasted: dict[int, torch.Tensor] = {}

    @bh.async_execution
    def select(self, observer: int, states: torch.Tensor) -> bh.Future[torch.Tensor]:
        """Return one action for each state, once the states of all playing observers have arrived."""
        actions: bh.Future[torch.Tensor] = bh.Future()
        with self.lock:
            self.waiting[observer] = states, actions
        self.answer_if_complete()
        return actions

    def finish(self, observer: int, lasted: torch.Tensor) -> None:
        """End the episodes of an observer. ``lasted`` says for each step which poles were up."""
        with self.lock:
            self.playing.discard(observer)
            self.lasted[observer] = lasted
        self.answer_if_complete()

    def answer_if_complete(self) -> None:
        """Choose the actions of all waiting observers, unless another observer still plays and does not wait yet."""
        with self.lock:
            if not self.waiting or len(self.waiting) < len(self.playing):
                return
            asked, self.waiting = dict(sorted(self.waiting.items())), {}
            choice = torch.distributions.Categorical(logits=self.policy(torch.cat([s for s, _ in asked.values()])))
            actions = choice.sample()
            sizes = [len(states) for states, _ in asked.values()]
            for observer, said in zip(asked, choice.log_prob(actions).split(sizes), strict=True):
                self.said[observer].append(said)
        for (_, future), part in zip(asked.values(), actions.split(sizes), strict=True):
            future.set_result(part)

    def learn(self) -> float:
        """Make actions that led to long episodes more likely. Returns the average length of an episode."""
        pairs = [(torch.stack(self.said[observer]), lasted) for observer, lasted in self.lasted.items()]
        said, lasted = (
            torch.cat([nn.functional.pad(part, (0, 0, 0, MAX_STEPS - len(part))) for part in parts], dim=1)
            for parts in zip(*pairs, strict=True)
        )
        to_come = torch.zeros_like(lasted)
        later = torch.zeros(lasted.shape[1])
        for step in reversed(range(MAX_STEPS)):
            later = lasted[step] * (1 + GAMMA * later)
            to_come[step] = later
        better = (to_come - to_come.sum() / lasted.sum()) * lasted
        better = better / (better.square().sum() / lasted.sum()).sqrt().clamp(min=1e-6)
        self.optimizer.zero_grad()
        (-(said * better).sum() / lasted.sum()).backward()
        self.optimizer.step()
        return lasted.sum(0).mean().item()


def drive(poles: int, iterations: int, enough: float) -> dict[str, Any] | None:
    """Runs on every worker. The agent starts the observers in each iteration; the observers only serve."""
    torch.set_num_threads(1)
    if bh.get_worker_info().name != "agent":
        return None
    observers = [info for info in bh.get_worker_infos() if info.name != "agent"]
    agent = bh.RRef(Agent(len(observers)))
    returns: list[float] = []
    start = time.perf_counter()
    for iteration in range(iterations):
        agent.local_value().begin()
        bh.wait_all(
            [
                bh.rpc_async(info, play, args=(agent, number, poles, 1000 * iteration + number), timeout=0)
                for number, info in enumerate(observers)
            ]
        )
        returns.append(agent.local_value().learn())
        last = returns[-5:]
        if iteration % 5 == 4:
            print(
                f"{(iteration + 1) * poles * len(observers):5d} episodes, {time.perf_counter() - start:5.1f} s: "
                f"average return {sum(last) / len(last):.0f}",
                flush=True,
            )
            if sum(last) / len(last) >= enough:
                break
    return {"returns": returns, "seconds": time.perf_counter() - start}


def main() -> None:
    """Start the agent and the observers, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--observers", type=int, default=3, help="number of observers (default 3)")
    parser.add_argument("--poles", type=int, default=8, help="poles of each observer (default 8)")
    parser.add_argument("--iterations", type=int, default=200, help="maximum number of iterations (default 200)")
    parser.add_argument("--enough", type=float, default=195, help="average return to stop at (default 195: solved)")
    options = parser.parse_args()
    if min(options.observers, options.poles, options.iterations) < 1:
        parser.error("at least 1 observer, 1 pole and 1 iteration")
    names = ["agent", *(f"observer{number}" for number in range(options.observers))]
    result = bh.launch(drive, names, args=(options.poles, options.iterations, options.enough))[0]
    last = result["returns"][-5:]
    print(f"{result['seconds']:.0f} s; average return of the last episodes: {sum(last) / len(last):.0f} of {MAX_STEPS}")


if __name__ == "__main__":
    main()
