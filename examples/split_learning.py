"""A bank, a shop and a lab train one model together. None of them shows its data to another.

The bank and the shop know different things about the same customers. The lab knows one label for each customer. So the
model is in three parts (vertical split learning):

    bank    its features ─▶ bottom ─┐
                                    ├─▶ lab    top ─▶ loss ◀─ labels
    shop    its features ─▶ bottom ─┘

Activations travel to the lab, and gradients travel back. Features, labels, weights and optimizers stay where they are.
No process trusts another one (``trusted=False``): each runs only the functions that it exposes, and unpickles nothing.
Either owner alone could only guess: the label depends on the features of both.

docs/security.md says what activations and gradients still give away.

    python examples/split_learning.py

starts three processes on this machine and compares the result with one process that has all the data. On hosts of their
own, each party starts its part, with RANK (lab 0, bank 1, shop 2), WORLD_SIZE=3, MASTER_ADDR and MASTER_PORT (the lab),
BACKHAUL_SECRET, and a certificate, which proves its name to the others:

    python examples/split_learning.py --role bank --certificates folder    # bank.pem, bank.key, authority.pem
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import nn

import backhaul as bh

ROLES = ["lab", "bank", "shop"]  # by rank
OWNERS = ["bank", "shop"]
CUSTOMERS, TRAINED_ON, FEATURES, WIDTH, BATCH = 2500, 2000, 8, 32, 100
SECONDS = 90  # after which the parts count as stuck

# The data. Here they come from random generators, so that one process can check the result. In earnest,
# ``read_features`` reads the database of an owner, and ``read_labels`` that of the lab.


def read_features(owner: str) -> torch.Tensor:
    """What one owner knows of each customer. The owners have agreed on the order of the customers before."""
    draw = torch.Generator().manual_seed(ROLES.index(owner))
    return torch.randn(CUSTOMERS, FEATURES, generator=draw)


def read_labels() -> torch.Tensor:
    """What the lab knows of each customer. It depends on what the bank knows and on what the shop knows."""
    bank, shop = (read_features(owner)[:, :2].sum(1) for owner in OWNERS)
    return (bank * shop > 0).float()


# The model. Each party makes its own part, and the optimizer of that part.


def make_part(role: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make the bottom of an owner, or the top of the lab, with an ordinary optimizer."""
    torch.manual_seed(ROLES.index(role))
    size, out = (2 * 8, 1) if role == "lab" else (FEATURES, 8)
    part = nn.Sequential(nn.Linear(size, WIDTH), nn.ReLU(), nn.Linear(WIDTH, out))
    return part, torch.optim.Adam(part.parameters(), lr=3e-3)


def fingerprint(part: nn.Module) -> str:
    """A text that two modules have in common only if all their weights are equal, to the last bit."""
    weights = b"".join(weight.detach().numpy().tobytes() for weight in part.parameters())
    return hashlib.sha256(weights).hexdigest()[:16]


# The owners of features. They only serve.


def own_features(owner: str, options: bh.Options) -> None:
    """Runs at the bank and at the shop: answer the lab until it is done."""
    features = read_features(owner)
    bottom, optimizer = make_part(owner)

    # Only the lab may call this function, and the lab is not trusted either: check what it sends.
    @bh.expose(name=f"{owner}.activations", to=("lab",))
    def activations(customers: torch.Tensor) -> torch.Tensor:
        if customers.dtype != torch.int64 or customers.dim() != 1 or len(customers) > BATCH:
            raise ValueError(f"customers must be at most {BATCH} numbers in one dimension")
        if ((customers < 0) | (customers >= CUSTOMERS)).any():
            raise ValueError(f"customers have numbers from 0 to {CUSTOMERS - 1}")
        return bottom(features[customers])  # this call is a part of the lab's graph

    # The lab says when to step. How to step, and over which weights, is decided here.
    bh.optim.expose(optimizer, f"{owner}.bottom", to=("lab",))

    bh.init(owner, options=options)  # from here on, others can call what is exposed
    bh.serve()  # until the lab calls bh.shutdown()
    print(f"weights of the {owner}: {fingerprint(bottom)}")


# The owner of the labels. It trains.


def train(
    activations: Callable[[str, torch.Tensor], torch.Tensor],
    top: nn.Module,
    optimizer: bh.optim.JointOptimizer | torch.optim.Optimizer,
) -> None:
    """Train, and print the result. The loop is that of any PyTorch program."""
    labels = read_labels()

    def predict(customers: torch.Tensor) -> torch.Tensor:
        return top(torch.cat([activations(owner, customers) for owner in OWNERS], dim=1)).flatten()

    losses = []
    order = torch.Generator().manual_seed(0)
    for _ in range(20):
        for customers in torch.randperm(TRAINED_ON, generator=order).split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(predict(customers), labels[customers])
            loss.backward()  # runs at the owners too, and leaves gradients in the .grad of their weights
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        new = torch.arange(TRAINED_ON, CUSTOMERS)
        right = torch.cat([(predict(batch) > 0) == (labels[batch] > 0) for batch in new.split(BATCH)])
    print(f"loss of the first step {losses[0]:.3f}, of the last {losses[-1]:.3f}")
    print(f"accuracy on new customers: {right.float().mean():.3f}")


def own_labels(options: bh.Options) -> None:
    """Runs at the lab."""
    top, own = make_part("lab")
    bh.init("lab", options=options)

    def activations(owner: str, customers: torch.Tensor) -> torch.Tensor:
        return bh.rpc_sync(owner, f"{owner}.activations", args=(customers,))

    # Steps the lab's own optimizer and those that the owners expose, all at once.
    train(activations, top, bh.optim.JointOptimizer({owner: f"{owner}.bottom" for owner in OWNERS}, own))
    bh.shutdown()
    print(f"weights of the lab: {fingerprint(top)}")


# The same in one process, which has all the data.


def train_in_one_process() -> dict[str, str]:
    """Train without Backhaul. Returns the fingerprint of each part."""
    parts = {role: make_part(role)[0] for role in ROLES}
    everything = [weight for part in parts.values() for weight in part.parameters()]
    features = {owner: read_features(owner) for owner in OWNERS}

    def activations(owner: str, customers: torch.Tensor) -> torch.Tensor:
        return parts[owner](features[owner][customers])

    train(activations, parts["lab"], torch.optim.Adam(everything, lr=3e-3))
    return {role: fingerprint(part) for role, part in parts.items()}


def run_part(role: str, certificates: str | None) -> None:
    """One of the three processes."""
    tls = None
    if certificates is not None:
        tls = bh.Tls(
            certificate=f"{certificates}/{role}.pem",
            key=f"{certificates}/{role}.key",
            authority=f"{certificates}/authority.pem",
        )
    options = bh.Options(security=bh.Security(trusted=False, tls=tls))
    if role == "lab":
        own_labels(options)
    else:
        own_features(role, options)


def run_all(certificates: str | None) -> str:
    """Start the three processes, and return what they print."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {**os.environ, **meeting, "BACKHAUL_SECRET": secrets.token_hex(32)}
    files = [] if certificates is None else ["--certificates", certificates]
    parts = [
        subprocess.Popen(
            [sys.executable, __file__, "--role", role, *files],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, role in enumerate(ROLES)
    ]
    try:
        printed = [part.communicate(timeout=SECONDS)[0] for part in parts]
    finally:
        for part in parts:
            part.kill()
            part.wait()
    if any(part.returncode for part in parts):
        sys.exit("a part has failed; its error is above")
    return "".join(printed)


def main() -> None:
    """Start one part, or all of them and a comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--role", choices=ROLES, help="run only this part (default: start all three here)")
    parser.add_argument("--certificates", help="a folder with <role>.pem, <role>.key and authority.pem")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.role is not None:
        run_part(options.role, options.certificates)
        return
    print("three processes, each with its own data:")
    printed = run_all(options.certificates)
    print(printed)
    print("one process with all data:")
    wanted = train_in_one_process()
    same = all(f"weights of the {role}: {mark}" in printed for role, mark in wanted.items())
    print(f"all weights are equal to the last bit: {'yes' if same else 'no'}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
