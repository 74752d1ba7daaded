"""Observers play CartPole; one agent chooses their actions and learns (REINFORCE).

Each move of an observer makes two calls through the RRef of the agent: it asks for an action and reports the reward.
A step is one move of every observer. Each observer has random numbers of its own at the agent, so the losses do not
depend on which observer is first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from programs.api import call_method, rpc, run_method, seeded

WORKERS = ("agent", "observer1", "observer2")
GAMMA = 0.98


class CartPole:
    """A cart on a rail, with a pole that must not fall."""

    def __init__(self, seed: int) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.begin()

    def begin(self) -> torch.Tensor:
        """Start a game."""
        self.place, self.speed, self.angle, self.turn = (torch.rand(4, generator=self.draw) * 0.1 - 0.05).tolist()
        return self.state()

    def state(self) -> torch.Tensor:
        """What the agent sees."""
        return torch.tensor([self.place, self.speed, self.angle, self.turn])

    def push(self, right: int) -> tuple[torch.Tensor, float, bool]:
        """Push the cart for a fiftieth of a second: the new state, the reward, and whether the pole has fallen."""
        sin, cos = self.angle - self.angle**3 / 6, 1 - self.angle**2 / 2
        swing = ((10.0 if right else -10.0) + 0.05 * self.turn**2 * sin) / 1.1
        turning = (9.8 * sin - cos * swing) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        moving = swing - 0.05 * turning * cos / 1.1
        self.place, self.speed = self.place + 0.02 * self.speed, self.speed + 0.02 * moving
        self.angle, self.turn = self.angle + 0.02 * self.turn, self.turn + 0.02 * turning
        return self.state(), 1.0, abs(self.place) > 2.4 or abs(self.angle) > 0.2095


class Observer:
    """Plays, on a worker of its own."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.game = CartPole(number)

    def play(self, agent: Any, moves: int) -> None:
        """Make so many moves. A new game begins whenever the pole has fallen."""
        state = self.game.begin()
        for _ in range(moves):
            action = call_method(Agent.choose, agent, self.number, state)
            state, reward, fallen = self.game.push(action)
            call_method(Agent.report, agent, self.number, reward)
            if fallen:
                state = self.game.begin()


class Agent:
    """The policy."""

    def __init__(self) -> None:
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
        seeded(self.policy, 1)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.rref = rpc.RRef(self)
        self.observers = {
            number: rpc.remote(name, Observer, args=(number,)) for number, name in enumerate(WORKERS) if number
        }
        self.draws = {number: torch.Generator().manual_seed(number) for number in self.observers}
        self.said: dict[int, list[torch.Tensor]] = {number: [] for number in self.observers}
        self.rewards: dict[int, list[float]] = {number: [] for number in self.observers}

    def choose(self, number: int, state: torch.Tensor) -> int:
        """An action for the state of an observer."""
        said = self.policy(state.unsqueeze(0)).log_softmax(1)
        action = int(torch.multinomial(said.detach().exp(), 1, generator=self.draws[number]))
        self.said[number].append(said[0, action])
        return action

    def report(self, number: int, reward: float) -> None:
        """What an action was worth."""
        self.rewards[number].append(reward)

    def learn(self) -> float:
        """Make actions more likely after which much reward came. Returns the loss."""
        to_come, said, after = [], [], 0.0
        for number in self.observers:
            said += self.said[number]
            returns = []
            for reward in reversed(self.rewards[number]):
                after = reward + GAMMA * after
                returns.append(after)
            to_come += returns[::-1]
            self.said[number], self.rewards[number] = [], []
        worth = torch.tensor(to_come)
        loss = -(torch.stack(said) * (worth - worth.mean())).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


class Driver:
    """The agent's worker."""

    def __init__(self) -> None:
        self.agent = Agent()

    def run(self, steps: int) -> list[float]:
        playing = [
            rpc.rpc_async(each.owner(), run_method, args=(Observer.play, each, self.agent.rref, steps))
            for each in self.agent.observers.values()
        ]
        for each in playing:
            each.wait()
        return [self.agent.learn()]
