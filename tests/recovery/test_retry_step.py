"""Steps that fail and are made again, in one process: whatever a step has changed is as if it had been made once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import backhaul as bh

DEADLINE_SECONDS = 30.0


@pytest.fixture
def workers() -> Iterator[list[bh.Worker]]:
    with bh.cluster(["trainer", "w1", "w2"]) as made:
        yield made


class Layer(nn.Module):
    """Counts its calls, waits if it is told to, and has all kinds of state."""

    begun = threading.Event()
    go_on = threading.Event()

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor, wait: bool = False) -> torch.Tensor:
        if wait:
            Layer.begun.set()
            assert Layer.go_on.wait(DEADLINE_SECONDS)
        self.calls += 1
        self.seen += x.detach().sum()
        return x + self.drop(self.norm(self.linear(x)))


class Run:
    """A model with a part on each worker, and its optimizer, scheduler and scaler."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = bh.nn.split(nn.Sequential(Layer(), Layer(), Layer()), {"0": "w1", "1": "w2"})
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.state = self.model, self.optimizer, self.scheduler, self.scaler
        self.tries = 0

    def step(self, disturb: Callable[[str], object] = lambda where: None) -> float:
        self.tries += 1
        loss = self.model(torch.ones(3, 4) + torch.randn(3, 4)).square().mean()
        disturb("forward")
        self.scaler.scale(loss).backward()
        disturb("backward")
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        disturb("unscale")
        self.scaler.step(self.optimizer)
        disturb("update")
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        disturb("end")
        return loss.item()

    def all_state(self) -> list[Any]:
        """All that steps change, as plain data."""
        model = bh.nn.gather(self.model)
        tensors = [*model.state_dict().values(), *(layer.seen for layer in model)]
        grads = [parameter.grad for parameter in model.parameters()]
        calls = [layer.calls for layer in model]
        others = [each.state_dict() for each in (self.scheduler, self.scaler)]
        return [tensors, grads, calls, self.optimizer.state_dict(), others, torch.rand(1)]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def undisturbed(steps: int) -> tuple[list[float], list[Any]]:
    run = Run()
    losses = [run.step() for _ in range(steps)]
    return losses, run.all_state()


def lose(worker: str = "w1") -> None:
    raise bh.PeerLostError(f"lost worker '{worker}'", worker=worker)


def once(where: str, what: Callable[[], object]) -> Callable[[str], None]:
    """Calls ``what`` the first time that a step is at ``where``."""
    left = [where]

    def disturb(here: str) -> None:
        if here in left:
            left.clear()
            what()

    return disturb


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("where", ["forward", "backward", "unscale", "update", "end"])
def test_a_step_that_is_made_again_counts_once(workers: list[bh.Worker], where: str, every: int) -> None:
    """Weights, buffers, counters, gradients, momenta, learning rate, scale and random numbers."""
    losses, wanted = undisturbed(4)
    run = Run()
    made = [
        bh.retry_step(run.step, run.state, (once(where, lose) if n in (0, 2) else print_nothing,), snapshot_every=every)
        for n in range(4)
    ]
    assert made == losses
    assert same(run.all_state(), wanted)
    assert run.tries == (6 if every == 1 else 8)  # with 3, the third step also repeats the two before


def print_nothing(where: str) -> None: ...


def test_an_error_of_the_step_leaves_the_state_before_it(workers: list[bh.Worker]) -> None:
    _, wanted = undisturbed(2)
    run = Run()
    for _ in range(2):
        bh.retry_step(run.step, run.state)
    with pytest.raises(KeyError, match="no batch"):
        bh.retry_step(run.step, run.state, (once("update", lambda: {}["no batch"]),))
    assert run.tries == 3
    assert same(run.all_state(), wanted)


@pytest.mark.parametrize("attempts", [1, 3])
def test_attempts_are_limited(workers: list[bh.Worker], attempts: int) -> None:
    _, wanted = undisturbed(1)
    run = Run()
    bh.retry_step(run.step, run.state)
    with pytest.raises(bh.PeerLostError, match="lost worker 'w2'"):
        bh.retry_step(run.step, run.state, (lambda where: where == "update" and lose("w2"),), attempts=attempts)
    assert run.tries == 1 + attempts
    assert same(run.all_state(), wanted)


def test_an_interrupted_step_is_undone_by_the_next(workers: list[bh.Worker]) -> None:
    losses, wanted = undisturbed(2)
    run = Run()
    made = [bh.retry_step(run.step, run.state)]
    state = torch.get_rng_state()

    with pytest.raises(KeyboardInterrupt):
        bh.retry_step(run.step, run.state, (once("update", interrupt),))
    torch.set_rng_state(state)
    made.append(bh.retry_step(run.step, run.state))
    assert made == losses
    assert same(run.all_state(), wanted)


def test_a_change_whose_snapshot_was_interrupted_is_not_forgotten(
    workers: list[bh.Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers have noted the changed state, and no snapshot has it."""
    plain = Run()
    losses = [plain.step()]
    change(plain)
    losses.append(plain.step())
    wanted = plain.all_state()
    run = Run()
    made = [bh.retry_step(run.step, run.state)]
    change(run)
    with monkeypatch.context() as patch:
        patch.setattr("backhaul._recovery.cluster_snapshot.ClusterSnapshot", interrupt)
        with pytest.raises(KeyboardInterrupt):
            bh.retry_step(run.step, run.state)
    made.append(bh.retry_step(run.step, run.state, (once("update", lose),)))
    assert made == losses
    assert same(run.all_state(), wanted)


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def test_steps_inside_steps(workers: list[bh.Worker]) -> None:
    run = Run()
    with pytest.raises(RuntimeError, match="has not ended"):
        bh.retry_step(lambda: bh.retry_step(run.step, run.state), run.state)
    bh.retry_step(run.step, run.state)


def change(run: Run) -> None:
    """What a program may do between two steps."""
    run.optimizer.param_groups[0]["lr"] = 0.03
    run.model.load_state_dict({name: value * 2 for name, value in run.model.state_dict().items()})
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.model.eval()


@pytest.mark.parametrize("every", [1, 5])
def test_what_the_program_changes_between_steps_stays(workers: list[bh.Worker], every: int) -> None:
    plain = Run()
    losses = [plain.step()]
    change(plain)
    losses.append(plain.step())
    wanted = plain.all_state()
    run = Run()
    made = [bh.retry_step(run.step, run.state, snapshot_every=every)]
    change(run)
    made.append(bh.retry_step(run.step, run.state, (once("update", lose),), snapshot_every=every))
    assert made == losses
    assert same(run.all_state(), wanted)


class Scaled(torch.optim.SGD):
    """Its step is not torch's: each of its operations runs on the owners by itself."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter].setdefault("kept", torch.zeros_like(parameter))
                kept.mul_(0.5).add_(parameter.grad)
                parameter.data.add_(kept, alpha=-group["lr"])


def trained(make: Callable[[], tuple[Any, Any]], steps: int, *, disturbed: bool) -> list[torch.Tensor]:
    """The weights after some steps. With ``disturbed``, each step is made twice."""
    torch.manual_seed(2)
    state, step = make()
    for _ in range(steps):
        if disturbed:
            bh.retry_step(step, state, (once("update", lose),))
        else:
            step(print_nothing)
        optimizer = state[-1]
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.load_state_dict(optimizer.state_dict())
    model = next(each for each in state if isinstance(each, nn.Module))
    found = [each.rpc_sync().state_dict() for each in state if isinstance(each, bh.RRef)]
    return [value for each in (*found, model.state_dict()) for value in each.values()]


def own_optimizer() -> tuple[Any, Any]:
    model = bh.nn.split(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)), {"0": "w1", "1": "w2"})
    optimizer = Scaled(model.parameters(), lr=0.1)

    def step(disturb: Callable[[str], object]) -> None:
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        disturb("update")
        optimizer.zero_grad()

    return (model, optimizer), step


class Referred(nn.Linear):
    def rrefs(self) -> list[bh.RRef[Any]]:
        return [bh.RRef(parameter) for parameter in self.parameters()]


def keep(module: nn.Module) -> nn.Module:
    return module


def distributed_optimizer() -> tuple[Any, Any]:
    parts = [bh.remote(name, keep, args=(Referred(3, 3),)) for name in ("w1", "w2")]
    head = Referred(3, 1)
    params = [rref for part in parts for rref in part.rpc_sync().rrefs()]
    optimizer = bh.optim.DistributedOptimizer(torch.optim.Adam, [*params, *head.rrefs()], lr=0.1)

    def step(disturb: Callable[[str], object]) -> None:
        with bh.context() as ctx:
            x = torch.ones(2, 3)
            for part in parts:
                x = part.rpc_sync().forward(x)
            ctx.backward(head(x).square().mean())
            optimizer.step(ctx)
            disturb("update")

    return (*parts, head, optimizer), step


@pytest.mark.parametrize("make", [own_optimizer, distributed_optimizer])
def test_other_optimizers(workers: list[bh.Worker], make: Callable[[], tuple[Any, Any]]) -> None:
    """Between the steps the program changes options, and loads a state."""
    expected = trained(make, 3, disturbed=False)
    assert all(map(torch.equal, trained(make, 3, disturbed=True), expected))


def test_two_states_with_the_same_modules(workers: list[bh.Worker]) -> None:
    """A restore must not bring back what was before the last step of the other."""
    run = Run()
    other = torch.optim.SGD(run.model.parameters(), lr=0.5)

    def step(disturb: Callable[[str], object] = print_nothing) -> None:
        run.model(torch.ones(3, 4)).sum().backward()
        other.step()
        disturb("update")
        other.zero_grad()

    run.step(), step(), run.step(), step()
    wanted = run.all_state()
    again = Run()
    run.model, other = again.model, torch.optim.SGD(again.model.parameters(), lr=0.5)
    for _ in range(2):
        bh.retry_step(again.step, again.state, (once("update", lose),))
        bh.retry_step(step, (run.model, other), (once("update", lose),))
    assert same(again.all_state(), wanted)


def test_a_call_of_a_failed_try_that_ends_late_changes_nothing(workers: list[bh.Worker]) -> None:
    """It would change running statistics, and count."""
    _, wanted = undisturbed(2)
    run, late = Run(), []
    Layer.begun.clear()
    Layer.go_on.clear()

    def leave_a_call() -> None:
        late.append(run.model[0].forward_async(torch.ones(3, 4), wait=True))
        assert Layer.begun.wait(DEADLINE_SECONDS)
        lose()

    random = torch.get_rng_state()
    bh.retry_step(run.step, run.state, (once("forward", leave_a_call),))
    after = torch.get_rng_state()
    Layer.go_on.set()
    late[0].wait()  # it draws random numbers of this process, which all workers share here
    assert not torch.equal(random, after)
    torch.set_rng_state(after)
    bh.retry_step(run.step, run.state)
    assert same(run.all_state(), wanted)


def test_a_worker_that_leaves(workers: list[bh.Worker]) -> None:
    """Another could come under its name. None does, so that the state stays what it was here."""
    run = Run()
    bh.retry_step(run.step, run.state)
    before = [parameter.detach().clone() for parameter in run.model[2].parameters()]

    def leave() -> None:
        workers[2].run(bh.leave)

    with pytest.raises(bh.BackhaulError, match="w2") as caught:
        bh.retry_step(run.step, run.state, (once("forward", leave),), wait=0.1)
    assert "the state could not be restored: UnknownWorkerError" in "\n".join(caught.value.__notes__)
    assert all(map(torch.equal, run.model[2].parameters(), before))


def test_a_state_that_is_not_complete(workers: list[bh.Worker]) -> None:
    run = Run()
    with pytest.raises(ValueError, match=r"Adam.*not in `state`"):
        bh.retry_step(run.step, run.model)
    with pytest.raises(ValueError, match="worker 'w1' whose module is not in `state`"):
        bh.retry_step(run.step, run.optimizer)
    with pytest.raises(TypeError, match="a float, which cannot be saved"):
        bh.retry_step(run.step, (run.model, 1.0))
    with pytest.raises(ValueError, match="no optimizer and no module"):
        bh.retry_step(run.step, [])


def test_a_module_that_refers_to_another_worker_is_refused(workers: list[bh.Worker]) -> None:
    """A restore would leave it with the old module of that worker."""
    inner = bh.nn.RemoteModule("w2", nn.Linear, (4, 4))
    outer = bh.nn.RemoteModule("w1", Wrapper, (inner,))
    with pytest.raises(ValueError, match=r"on worker 'w1' refers to worker 'w2' \(in 'inner'\)"):
        bh.retry_step(print_nothing, outer, ("",))


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"attempts": 0}, ValueError),
        ({"attempts": 1.5}, ValueError),
        ({"snapshot_every": 0}, ValueError),
        ({"wait": -1.0}, ValueError),
        ({"restore": 3}, TypeError),
        ({"step": 3}, TypeError),
    ],
)
def test_wrong_arguments(workers: list[bh.Worker], wrong: dict[str, Any], error: type[Exception]) -> None:
    given = {"step": print_nothing, "state": nn.Linear(1, 1), **wrong}
    with pytest.raises(error, match=next(iter(wrong))):
        bh.retry_step(**given)


def test_copies_of_the_model_have_no_snapshot(workers: list[bh.Worker]) -> None:
    import copy

    run = Run()
    bh.retry_step(run.step, run.state)
    model, optimizer = copy.deepcopy((run.model, run.optimizer))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    other = run
    other.model, other.optimizer, other.scheduler = model, optimizer, scheduler
    other.state = model, optimizer, scheduler, other.scaler
    before = other.model.state_dict()
    with pytest.raises(bh.PeerLostError):
        bh.retry_step(other.step, other.state, (lambda where: where == "end" and lose(),))
    assert same(dict(other.model.state_dict()), dict(before))
