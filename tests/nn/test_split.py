"""A model that is split compared with the same model in one process."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import backhaul as bh
from backhaul.errors import SerializationError, UnknownWorkerError
from backhaul.nn import RemoteModule, gather, split

from . import split_models
from .conftest import DEADLINE_SECONDS, await_references
from .split_models import CASES, Encoder, EncoderModel, SharedLayers, Transformer, make, vectors

pytestmark = pytest.mark.usefixtures("workers")


def parts_of(model: nn.Module) -> list[RemoteModule]:
    return [part for part in model.modules() if isinstance(part, RemoteModule)]


def losses(model: nn.Module, inputs: Any, steps: int) -> list[torch.Tensor]:
    """Train as users do."""
    found = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(steps):
        optimizer.zero_grad()
        loss = model(inputs(number)).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found.append(loss.detach())
    return found


def assert_same(found: Any, wanted: Any) -> None:
    """To the last bit."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def assert_same_state(found: nn.Module, wanted: nn.Module) -> None:
    """The same names in the same order, values, and torch's metadata."""
    ours, theirs = found.state_dict(), wanted.state_dict()
    assert list(ours) == list(theirs)
    assert_same(dict(ours), dict(theirs))
    assert [tensor.dtype for tensor in ours.values()] == [tensor.dtype for tensor in theirs.values()]
    assert {name: ours._metadata[name] for name in theirs._metadata} == dict(theirs._metadata)


def assert_same_model(found: nn.Module, wanted: nn.Module) -> None:
    """All that there is to a local model."""
    assert_same_state(found, wanted)
    ours, theirs = list(found.named_modules()), list(wanted.named_modules())
    assert [(name, type(each), each.training) for name, each in ours] == [
        (name, type(each), each.training) for name, each in theirs
    ]
    assert repr(found) == repr(wanted)
    ours, theirs = dict(found.named_parameters()), dict(wanted.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        assert type(parameter) is nn.Parameter
        assert parameter.requires_grad == theirs[name].requires_grad, name
        assert_same(parameter.grad, theirs[name].grad)
    assert_same(dict(found.named_buffers()), dict(wanted.named_buffers()))


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case: str) -> None:
    model, places, inputs = make(case)
    if case in ("elements", "tied parts"):
        model.eval()  # without dropout
    wanted = copy.deepcopy(model)
    for each in (model, wanted):
        each(inputs(0)).sum().backward()  # gradients before the split
    part = split(model, places)
    assert (part is model) == ("" not in places)
    assert_same_state(part, wanted)
    assert len(parts_of(part)) == len({id(wanted.get_submodule(name)) for name in places})
    back = gather(part)
    assert parts_of(back) == []
    assert_same_model(back, wanted)
    assert_same(back(inputs(1)), wanted(inputs(1)))


@pytest.mark.parametrize("case", CASES)
def test_training(case: str) -> None:
    model, places, inputs = make(case)
    if case in ("elements", "tied parts"):
        model.eval()  # without dropout
    wanted = copy.deepcopy(model)
    model = split(model, places)
    assert_same(losses(model, inputs, 3), losses(wanted, inputs, 3))
    assert_same_state(model, wanted)
    model = gather(model)
    assert_same_model(model, wanted)
    assert_same(losses(model, inputs, 1), losses(wanted, inputs, 1))
    model = split(model, places)  # a second time
    assert_same(losses(model, inputs, 1), losses(wanted, inputs, 1))
    assert_same_state(model, wanted)


@pytest.mark.parametrize("case", CASES)
def test_modes(case: str) -> None:
    model, places, inputs = make(case)
    wanted = copy.deepcopy(model)
    model = split(model, places)
    for name, part in dict(model.named_modules(remove_duplicate=False)).items():
        assert part.training == wanted.get_submodule(name).training
    for mode in (False, True, False):
        model.train(mode)
        wanted.train(mode)
    assert_same(model(inputs(0)), wanted(inputs(0)))
    assert_same_model(gather(model), wanted)


def test_modes_that_are_set_module_by_module() -> None:
    """As Lightning does after an evaluation: modules that were frozen stay frozen, also inside a part."""
    model, wanted = split_models.convolutions(), split_models.convolutions()
    wanted.load_state_dict(model.state_dict())
    for each in (model, wanted):
        each[1][1].eval()
    split(model, {"1": "worker1"})
    for each in (model, wanted):
        modes = {name: module.training for name, module in each.named_modules()}
        each.eval()
        each(vectors(0))
        for name, module in each.named_modules():
            module.training = modes[name]
        each(vectors(1))
    assert model[1].training
    assert_same_model(gather(model), wanted)


@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.bfloat16, lambda model: model.to(torch.float64)])
def test_the_type_of_the_model(convert: Any) -> None:
    model, wanted = EncoderModel(), EncoderModel()
    wanted.load_state_dict(model.state_dict())
    split(model, {"encoder": "worker1"})
    for each in (model, wanted):
        convert(each)
        each.cpu()
        each(vectors(0).to(each.head.weight.dtype)).sum().backward()
    assert_same_model(gather(model), wanted)


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_of_both(case: str) -> None:
    """A checkpoint of the plain model is loaded into a split one, and the reverse."""
    model, places, inputs = make(case)
    plain = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
    model = split(model, places).eval()
    assert str(model.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert_same(model(inputs(0)), plain(inputs(0)))
    fresh = make(case)[0].eval()
    fresh.load_state_dict(model.state_dict())
    assert_same(fresh(inputs(0)), plain(inputs(0)))
    state = plain.state_dict()
    gone = next(iter(state))
    del state[gone]
    with pytest.raises(RuntimeError, match=gone):
        model.load_state_dict(state)


def test_what_a_part_keeps() -> None:
    """Flags, types, attributes of parameters, gradients, buffers that are in no state, and plain data."""
    model = EncoderModel()
    model.encoder.double().inner.bias.requires_grad_(False)
    model.encoder.inner.weight.tag = "mine"
    model.encoder.calls = 7
    model.encoder.dropped.fill_(4)
    model.encoder.inner.weight.grad = torch.ones(8, 8, dtype=torch.float64)
    there = split(model, {"encoder": "worker1"}).encoder
    (weight, bias) = bh.rpc_sync("worker1", split_models.grads_there, (there.module_rref,))
    assert_same(weight, torch.ones(8, 8, dtype=torch.float64))
    assert bias is None
    encoder = gather(model).encoder
    assert type(encoder) is Encoder
    assert encoder.inner.weight.tag == "mine"
    assert encoder.calls == 7
    assert encoder.inner.weight.dtype is torch.float64
    assert [parameter.requires_grad for parameter in encoder.parameters()] == [True, False]
    assert_same(encoder.dropped, torch.full((8,), 4.0, dtype=torch.float64))
    assert_same(encoder.inner.weight.grad, torch.ones(8, 8, dtype=torch.float64))


def test_no_gradient_flows_through_a_move() -> None:
    model = split(EncoderModel(), {"encoder": "worker1"})
    assert bh.get_debug_info()["num_plain_records"] == 0
    gather(model)
    assert bh.get_debug_info()["num_plain_records"] == 0
    assert all(parameter.is_leaf for parameter in model.parameters())


def test_weights_move() -> None:
    """The memory here is free once nobody refers to the originals. On the owner no memory of a message stays."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    original = weakref.ref(model[0].weight)
    split(model, {"0": "worker1", "1": "worker2"})
    gc.collect()
    assert original() is None
    assert bh.get_debug_info()["shm_lent"] == 0


def test_tied_parts_stay_tied() -> None:
    model, places, _ = make("tied parts")
    split(model, places)
    assert model.embed.module_rref is not model.out.module_rref
    (embed,) = bh.rpc_sync("worker2", split_models.memory_of, (model.embed.module_rref,))
    (out,) = bh.rpc_sync("worker2", split_models.memory_of, (model.out.module_rref,))
    assert embed == out
    gather(model)
    assert model.embed.weight is model.out.weight


def test_one_module_under_two_names_is_one_part() -> None:
    model = split(SharedLayers(), {"again.second": "worker1"})
    assert model.second is model.again["second"]
    gather(model)
    assert model.second is model.again["second"]
    assert type(model.second) is nn.Linear


def test_hooks_travel() -> None:
    model, wanted = EncoderModel(), EncoderModel()
    wanted.load_state_dict(model.state_dict())
    for each in (model, wanted):
        each.encoder.inner.register_forward_hook(split_models.add_one)
        each.encoder.register_forward_hook(split_models.note_worker)
        each.encoder.inner.weight.register_hook(split_models.double)
    split(model, {"encoder": "worker1"})
    again = [model.encoder.register_forward_hook(split_models.add_one)]
    wanted.encoder.register_forward_hook(split_models.add_one)
    model.encoder.register_remote_forward_hook(split_models.add_one)
    wanted.encoder.register_forward_hook(split_models.add_one)
    assert_same(losses(model, vectors, 2), losses(wanted, vectors, 2))
    assert model.encoder.ran_on == "worker1"
    gather(model)
    assert_same(losses(model, vectors, 2), losses(wanted, vectors, 2))
    assert model.encoder.ran_on == "worker0"
    again[0].remove()  # the handle of a hook of this side is good after gather
    list(wanted.encoder._forward_hooks)
    wanted.encoder._forward_hooks.popitem()
    assert_same(losses(model, vectors, 1), losses(wanted, vectors, 1))


def test_attributes_and_methods() -> None:
    encoder = split(EncoderModel(), {"encoder": "worker1"}).encoder
    assert encoder.d_model == 8
    assert encoder.version == 3
    assert encoder.shape == (8, 8)
    assert encoder.calls == 0
    encoder(vectors(0))
    assert encoder.calls == 1
    encoder.calls = 10
    encoder(vectors(0))
    assert encoder.calls == 11
    assert encoder.encode(vectors(0)).shape == (6, 8)
    assert encoder.encode_async(vectors(0)).wait().shape == (6, 8)
    assert_same(encoder.kept, torch.full((8,), 0.5))
    assert not hasattr(encoder, "nothing")
    encoder.mine = 5  # nothing of the module: it stays here until gather
    assert encoder.mine == 5


def test_attributes_set_here_come_along() -> None:
    model = split(EncoderModel(), {"encoder": "worker1"})
    model.encoder.mine = 5
    model.encoder.d_model = 4
    gather(model)
    assert (model.encoder.mine, model.encoder.d_model) == (5, 4)


def test_a_tensor_that_a_part_sets_is_part_of_the_graph() -> None:
    """As in models with an auxiliary loss."""
    model, wanted = EncoderModel(), EncoderModel()
    wanted.load_state_dict(model.state_dict())
    split(model, {"encoder": "worker1"})
    for each in (model, wanted):
        (each(vectors(0)).sum() + each.encoder.auxiliary).backward()
    assert_same_model(gather(model), wanted)


def test_modules_inside_a_part_are_not_here() -> None:
    model = split(EncoderModel(), {"encoder": "worker1"})
    with pytest.raises(RuntimeError, match=r"split 'encoder\.inner' itself"):
        model.encoder.inner(vectors(0))
    with pytest.raises(RuntimeError, match=r"hooks of 'encoder\.inner'"):
        model.encoder.inner.register_forward_hook(print)
    with pytest.raises(ValueError, match=r"'encoder\.inner' is inside a module that is on worker 'worker1'"):
        split(model, {"encoder.inner": "worker2"})
    with pytest.raises(ValueError, match="worker1"):
        model.encoder.inner = nn.Linear(8, 8)


@pytest.mark.parametrize("case", CASES)
def test_modules_are_listed_as_before(case: str) -> None:
    """Programs choose parameters by the class of their module, such as those without weight decay."""
    model, places, _ = make(case)
    wanted = copy.deepcopy(model)
    model = split(model, places)
    for remove in (True, False):
        found, known = (list(each.named_modules(remove_duplicate=remove)) for each in (model, wanted))
        assert [name for name, _ in found] == [name for name, _ in known]
        for (_, one), (_, other) in zip(found, known, strict=True):
            assert isinstance(one, type(other))
            assert one.training == other.training
            assert [n for n, p in one._parameters.items() if p is not None] == [
                n for n, p in other._parameters.items() if p is not None
            ]
            assert [n for n, _ in one.named_buffers(recurse=False)] == [
                n for n, _ in other.named_buffers(recurse=False)
            ]
            if isinstance(other, nn.Linear):
                assert one.in_features == other.in_features
                assert_same(one.weight.detach() + 0, other.weight.detach())


def test_the_mode_and_attributes_of_a_module_inside_a_part() -> None:
    model, wanted = split_models.convolutions(), split_models.convolutions()
    wanted.load_state_dict(model.state_dict())
    split(model, {"1": "worker1"})
    for each in (model, wanted):
        parts = {name: part for name, part in each.named_modules()}
        parts["1.1"].eval()
        parts["1.1"].eps = 0.1
        parts["1.0"].requires_grad_(False)
        each(vectors(0))
    assert not parts["1.1"].training
    assert_same_model(gather(model), wanted)
    assert model[1][1].eps == 0.1


@pytest.mark.parametrize("use", [iter, len, lambda layers: layers[0], list])
def test_elements_of_a_part_are_not_here(use: Any) -> None:
    model = split(Transformer(), {"blocks.0": "worker1"})
    with pytest.raises(TypeError, match=r"blocks\.0\.0"):
        use(model.blocks[0])
    assert model.blocks[0]
    assert len(model.blocks) == 2


def test_sequential_as_a_whole() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2))
    wanted = copy.deepcopy(model)
    split(model, {"0": "worker1"})
    assert_same(model(vectors(0)), wanted(vectors(0)))


def test_a_part_travels() -> None:
    model, wanted = make("one part")[0], make("one part")[0]
    split(model, {"encoder": "worker1"})
    assert_same(bh.rpc_sync("worker2", use_part, (model.encoder, vectors(0))), wanted.encoder.encode(vectors(0)) / 8)


def use_part(part: Any, x: torch.Tensor) -> torch.Tensor:
    return part.encode(x) / part.d_model


def test_repr() -> None:
    assert repr(split(EncoderModel(), {"encoder": "worker1"})) == (
        "EncoderModel(\n"
        "  (encoder): RemoteModule(Encoder, on='worker1', device='cpu')\n"
        "  (head): Linear(in_features=8, out_features=2, bias=True)\n"
        ")"
    )


def test_nothing_to_do() -> None:
    model = EncoderModel()
    encoder = model.encoder
    assert gather(model) is model
    assert split(model, {}) is model
    assert model.encoder is encoder


def test_gather_brings_other_remote_modules_too() -> None:
    model = nn.Sequential(RemoteModule("worker1", nn.Linear, (8, 8)), nn.Linear(8, 2))
    state = copy.deepcopy(model.state_dict())
    gather(model)
    assert type(model[0]) is nn.Linear
    assert_same(dict(model.state_dict()), dict(state))


# What cannot be split. The model stays as it was.


class Referring(nn.Module):
    """Refers to its submodules in ways of which torch knows nothing."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        if how == "list":
            self.layers = [self.first]
        elif how == "dict":
            self.by_name = {"first": (self.first,)}
        elif how == "optimizer":
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        elif how == "parent":
            self.first.parents = [self]
        elif how == "hook":
            self.first.register_forward_hook(self.hook)
        elif how == "closure":
            second = self.second
            self.first.register_forward_hook(lambda *_: second.weight)
        elif how == "storage":
            self.second.weight = nn.Parameter(self.first.weight.detach()[:])
        elif how == "buffer":
            self.register_buffer("table", torch.ones(3))
            self.first.register_buffer("table", self.table)

    def hook(self, *_: Any) -> None: ...


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "places", "error", "text"),
    [
        (EncoderModel, {"encodr": "worker1"}, ValueError, "similar names: encoder"),
        (EncoderModel, {"zzz": "worker1"}, ValueError, "its children: encoder, head"),
        (EncoderModel, {"head.weight": "worker1"}, ValueError, "'head.weight' is a tensor; name .* 'head'"),
        (EncoderModel, {"encoder": "worker1", "encoder.inner": "worker2"}, ValueError, "'encoder.inner' is inside"),
        (EncoderModel, {"encoder.inner": "worker2", "": "worker1"}, ValueError, "inside ''"),
        (EncoderModel, {"encoder": "worker7"}, UnknownWorkerError, "worker7"),
        (EncoderModel, {"encoder": "worker1", "head": "rank:9"}, UnknownWorkerError, "9"),
        (EncoderModel, {"encoder": "worker1/nothing"}, ValueError, "the place of 'encoder'"),
        (EncoderModel, {"encoder": 1}, TypeError, "the place of 'encoder'"),
        (EncoderModel, {1: "worker1"}, TypeError, "not a int"),
        (EncoderModel, [("encoder", "worker1")], TypeError, "must be a dict"),
        (SharedLayers, {"second": "worker1", "again.second": "worker2"}, ValueError, "the same module"),
        (Transformer, {"embed": "worker1"}, ValueError, "'embed.weight' and 'out.weight' share"),
        (Transformer, {"embed": "worker1", "out": "worker2"}, ValueError, "'embed.weight' and 'out.weight' share"),
        (lambda: Referring("storage"), {"first": "worker1"}, ValueError, "'first.weight' and 'second.weight' share"),
        (lambda: Referring("buffer"), {"first": "worker1"}, ValueError, "'table' and 'first.table' share"),
        (lambda: Referring("list"), {"first": "worker1"}, ValueError, r"'layers\[0\]' refers to 'first'"),
        (lambda: Referring("dict"), {"first": "worker1"}, ValueError, r"'by_name\['first'\]\[0\]' refers"),
        (lambda: Referring("optimizer"), {"first": "worker1"}, ValueError, "'optimizer.*first.weight'"),
        (lambda: Referring("parent"), {"first": "worker1"}, ValueError, "'first.parents.* refers to 'the model'"),
        (lambda: Referring("hook"), {"first": "worker1"}, ValueError, "__self__' refers to 'the model'"),
        (lambda: Referring("closure"), {"first": "worker1"}, ValueError, "variable second.* refers to 'second'"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), {"0": "worker1"}, ValueError, "'0.weight' is not initialized"),
        (
            lambda: nn.Sequential(nn.Linear(8, 8), split_models.Opaque()),
            {"0": "worker2", "1": "worker1"},
            SerializationError,
            "'1' cannot move to worker 'worker1'.*lock",
        ),
        (
            lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
            {"0": "worker1"},
            Exception,
            "parametrized",
        ),
        (
            lambda: torch.jit.trace(nn.Sequential(nn.Linear(8, 8)), vectors(0)),
            {"0": "worker1"},
            ValueError,
            "is a script module",
        ),
        (lambda: 5, {"0": "worker1"}, TypeError, "must be a torch.nn.Module"),
    ],
)
def test_refused(model: Any, places: Any, error: type[Exception], text: str) -> None:
    model = model()
    before = list(model.modules()) if isinstance(model, nn.Module) else []
    with pytest.raises(error, match=text):
        split(model, places)
    assert all(now is then for now, then in zip(list(model.modules()) if before else [], before, strict=True))


def test_a_part_is_not_split_twice() -> None:
    model = split(EncoderModel(), {"encoder": "worker1"})
    with pytest.raises(ValueError, match="'encoder' is on worker 'worker1' already"):
        split(model, {"encoder": "worker2"})
    with pytest.raises(ValueError, match="'encoder' is on worker 'worker1' already"):
        split(model, {"": "worker2"})
    split(model, {"head": "worker2"})
    assert len(parts_of(model)) == 2


def test_a_reference_inside_what_moves_together() -> None:
    model, wanted = Referring("closure"), Referring("closure")
    split(model, {"first": "worker1", "second": "worker1"})
    gather(model)
    (hook,) = model.first._forward_hooks.values()
    assert hook() is model.second.weight
    assert repr(model) == repr(wanted)


def test_an_optimizer_that_was_made_before_says_so() -> None:
    model = EncoderModel()
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    split(model, {"encoder": "worker1"})
    with pytest.raises(RuntimeError, match="moved to worker 'worker1'"):
        before.step()
    between = torch.optim.SGD(model.parameters(), lr=0.1)
    between.step()
    gather(model)
    with pytest.raises(RuntimeError, match="brought back from worker 'worker1'"):
        between.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_listed_as_before(case: str) -> None:
    model, places, _ = make(case)
    model.register_parameter("extra", nn.Parameter(torch.ones(3)))
    wanted = copy.deepcopy(model)
    model = split(model, places)
    for remove in (True, False):
        found, known = ([*each.named_parameters(remove_duplicate=remove)] for each in (model, wanted))
        assert [name for name, _ in found] == [name for name, _ in known]
        assert [(p.shape, p.dtype, p.requires_grad) for _, p in found] == [
            (p.shape, p.dtype, p.requires_grad) for _, p in known
        ]
        assert_same([parameter.detach() + 0 for _, parameter in found], [parameter + 0 for _, parameter in known])
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in wanted.named_buffers()]
    assert len({id(parameter) for parameter in model.parameters()}) == len(list(wanted.parameters()))


def test_gather_waits_for_changes_of_gradients() -> None:
    model = split(EncoderModel(), {"encoder": "worker1"})
    model(vectors(0)).sum().backward()
    model.zero_grad()
    gather(model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_averaged_weights() -> None:
    """As in stochastic weight averaging: the average is a copy, whose statistics are computed anew."""
    found = []
    for places in (None, {"1": "worker1", "3": "worker2"}):
        model = make("convolutions")[0]
        model = model if places is None else split(model, places)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(2):
            losses(model, vectors, 2)
            averaged.update_parameters(model)
        torch.optim.swa_utils.update_bn([vectors(5), vectors(6)], averaged)
        found.append(dict(averaged.state_dict()))
    assert_same(*found)


def test_copies() -> None:
    model = make("all parts")[0]
    wanted = copy.deepcopy(model)
    split(model, {"encoder": "worker1"})
    copied = copy.deepcopy(model)
    losses(model, vectors, 2)
    assert_same_state(copied, wanted)
    assert_same_model(gather(copied), wanted)
    model, places, _ = make("tied parts")
    with pytest.raises(ValueError, match="shares parameters"):
        copy.deepcopy(split(model, places))


def test_a_worker_that_fails_leaves_the_model_as_it_was() -> None:
    """The second worker cannot put its part on its device, when the first has its part already."""
    model, wanted = EncoderModel(), EncoderModel()
    wanted.load_state_dict(model.state_dict())
    with pytest.raises((RuntimeError, AssertionError)):
        split(model, {"encoder": "worker1", "head": "worker2/cuda:7"})
    assert_same_model(model, wanted)
    assert_same(losses(model, vectors, 1), losses(wanted, vectors, 1))


def test_a_worker_that_is_gone(workers: list[bh.Worker]) -> None:
    model, wanted = EncoderModel(), EncoderModel()
    wanted.load_state_dict(model.state_dict())
    with workers[2]:
        bh.leave()
    with pytest.raises(UnknownWorkerError):
        split(model, {"encoder": "worker1", "head": "worker2"})
    assert_same_model(model, wanted)


def test_the_default_timeout_can_be_changed() -> None:
    model = EncoderModel()
    gather(split(model, {"encoder": "worker1"}, timeout=0), timeout=0)
    assert type(model.encoder) is Encoder


# Over real processes.


def train_over_processes(case: str) -> list[Any] | None:
    """Runs on all workers. The first trains a split model, and the same model alone."""
    if bh.get_worker_info().id != 0:
        return None
    torch.set_num_threads(1)
    model, places, inputs = make(case)
    model.eval()
    wanted = copy.deepcopy(model)
    model = split(model, places)
    found = losses(model, inputs, 3), losses(wanted, inputs, 3)
    states = dict(model.state_dict()), dict(wanted.state_dict())
    model = gather(model)
    local = type(model) is type(wanted)
    await_references(0)
    return [found, states, local]


@pytest.mark.parametrize("case", ["elements", "tied parts", "all parts"])
def test_processes(case: str) -> None:
    found, states, local = bh.launch(train_over_processes, 3, args=(case,), start_method="forkserver", timeout=100)[0]
    assert_same(*found)
    assert_same(*states)
    assert local


def move_large_weights() -> bool | None:
    """Runs on both workers. The weights are large enough for shared memory, also the second time."""
    if bh.get_worker_info().id != 0:
        return None
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    wanted = copy.deepcopy(model.state_dict())
    for _ in range(3):
        split(model, {"0": "worker1", "1": "worker1"})
        await_shared_memory("worker0")
        gather(model)
        await_shared_memory("worker1")
    return all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def await_shared_memory(worker: str) -> None:
    """Wait until no worker uses memory of a message of ``worker``. The handler that got it may still be ending."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while bh.rpc_sync(worker, split_models.memory_lent):
        assert time.monotonic() < deadline


def test_weights_do_not_stay_in_shared_memory() -> None:
    assert bh.launch(move_large_weights, 2, start_method="forkserver", timeout=100)[0]
