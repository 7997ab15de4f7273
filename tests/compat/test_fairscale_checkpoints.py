"""Checkpoints of the real FairScale under every backend of ours, and ours under the real FairScale."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("fairscale")

import fsshard
from fsshard.checkpoint.interop.foreign_names import clean_path
from fsshard.compat import fairscale_checkpoints as old
from fsshard.errors import ConfigurationError, FsshardError, StateDictError
from tests.models import Spectral, batch, take_step
from tests.on_ranks import on_ranks
from tests.sets import often
from tests.training_runs import DISTRIBUTED, check_equal, differences

STEPS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "betas": (0.8, 0.95)},
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adagrad": {"lr": 0.05},
    "NAdam": {"lr": 0.01},
}
"""Optimizers with a counter, without one, with state from the start, and with 0-dim state besides the counter."""


class Text(nn.Module):
    """Shared weights, a frozen one, a 0-dim one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.hidden = nn.Linear(6, 6)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        codes = (x * 100).long().remainder(8)
        return self.head(torch.tanh(self.hidden(self.embed(codes) * self.frozen))) * self.temperature


class Waves(nn.Module):
    """Real and complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 5), Spectral(5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self.first(x))))


class Nested(nn.Module):
    """Parameters of its own before and after those of a part, and a buffer in that."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.block = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
        self.last = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.block(self.first(x))))


def build(kind: type[nn.Module], seed: int = 0) -> Any:
    """The same weights at every call."""
    torch.manual_seed(seed)
    return kind()


def parts(module: nn.Module) -> list[list[dict[str, Any]]]:
    """The groups of each optimizer, as names: two groups of one, or an optimizer for each dtype."""
    named = dict(module.named_parameters())
    if isinstance(module, Waves):
        return [[{"params": [n for n, p in named.items() if p.is_complex() is kind]}] for kind in (False, True)]
    wide = [name for name in named if name.endswith("weight")]
    narrow = [name for name in named if name not in wide]  # first: another order than the model's
    return [[{"params": narrow, "weight_decay": 0.0}, {"params": wide, "weight_decay": 0.1}]]


def optimizers(module: nn.Module, setting: str, cls: Callable[..., Any]) -> list[Any]:
    named = dict(module.named_parameters())
    groups = [[{**group, "params": [named[n] for n in group["params"]]} for group in part] for part in parts(module)]
    return [cls(each, **SETTINGS[setting]) for each in groups]


def ours(kind: type[nn.Module], setting: str, backend: str, seed: int = 9, lr: float = 1e-9) -> tuple[Any, Any]:
    """A model with other weights and another learning rate than those of the checkpoint."""
    module = build(kind, seed)
    groups = parts(module)[0] if kind is Text else None
    model = fsshard.wrap(module, backend=backend)
    return model, fsshard.build_optimizer(
        model, getattr(torch.optim, setting), groups, **{**SETTINGS[setting], "lr": lr}
    )


def sharded_ddp(module: nn.Module, setting: str, root: str = "fairscale") -> tuple[Any, list[Any]]:
    """The real ShardedDataParallel and its OSS, or our fronts of them."""
    nn_, optim = importlib.import_module(f"{root}.nn"), importlib.import_module(f"{root}.optim")
    cls = functools.partial(optim.OSS, optim=getattr(torch.optim, setting))
    made = optimizers(module, setting, cls)
    return nn_.ShardedDataParallel(module, made, reduce_buffer_size=0), made


def run(model: Any, optimizers: list[Any], first: int) -> dict[str, Any]:
    """Train; the weights at the end."""
    for number in range(first, first + STEPS):
        model(batch(number)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()  # FairScale's own way to drop gradients
    return plain(model.state_dict())


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """A model's state dict as a snapshot of its own, without wrappers' prefixes."""
    return {key.removeprefix("module."): value.detach().clone() for key, value in state.items()}


def save(folder: str, **parts: Any) -> None:
    """As users do; rank 0 alone."""
    if dist.get_rank() == 0:
        for name, part in parts.items():
            torch.save(part, Path(folder) / f"{name}.pt")
    dist.barrier()


def read(folder: str, name: str) -> Any:
    return torch.load(Path(folder) / f"{name}.pt", map_location="cpu", weights_only=True)


# ------------------------------------------------------------------------------------------------ OSS, ShardedDDP


def job_write_oss(kind: type[nn.Module], setting: str, folder: str) -> dict[str, Any]:
    """Train, save, train on; the weights at the end."""
    model, made = sharded_ddp(build(kind), setting)
    run(model, made, 0)
    for optimizer in made:
        optimizer.consolidate_state_dict(0)
    states = [optimizer.state_dict() for optimizer in made] if dist.get_rank() == 0 else []
    save(folder, model=model.state_dict(), optimizer=states)
    return run(model, made, STEPS)


def job_resume_oss(kind: type[nn.Module], setting: str, folder: str, backend: str, aged: bool = False) -> Any:
    """Load what FairScale wrote, train on; ``aged``: as torch 1.11 wrote it, with what groups had then."""
    model, optimizer = ours(kind, setting, backend)
    states = read(folder, "optimizer")
    if aged:
        for group in states[0]["param_groups"]:
            for key in ("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
                group.pop(key, None)
        for item in states[0]["state"].values():
            item |= {"step": int(item["step"])} if "step" in item else {}  # counts as numbers
    old.load_model_state(model, read(folder, "model"))
    names = [part[0]["params"] for part in parts(build(kind))] if kind is Waves else None
    old.load_optimizer_state(optimizer, states[0] if aged else states, names=names)
    return run(model, [optimizer], STEPS)


@pytest.fixture(scope="module", params=list(SETTINGS))
def text(request: pytest.FixtureRequest, ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of a training by the real OSS with two groups: setting, folder, the weights had it gone on."""
    folder = str(tmp_path_factory.mktemp("oss"))
    return request.param, folder, ranks.run(job_write_oss, 2, Text, request.param, folder)[0]


@pytest.mark.covering
@pytest.mark.parametrize("aged", [False, True])
@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_oss_goes_on(ranks: Any, text: Any, backend: str, aged: bool) -> None:
    setting, folder, expected = text
    for weights in ranks.run(job_resume_oss, 2, Text, setting, folder, backend, aged):
        check_equal(expected, weights)


def test_one_oss_per_dtype_goes_on_as_one_optimizer(ranks: Any, tmp_path: Any) -> None:
    """Complex weights: the real library needs an OSS of their own for them."""
    expected = ranks.run(job_write_oss, 2, Waves, "AdamW", str(tmp_path))[0]
    for backend in DISTRIBUTED:
        for weights in ranks.run(job_resume_oss, 2, Waves, "AdamW", str(tmp_path), backend):
            check_equal(expected, weights)


@pytest.mark.covering
@pytest.mark.parametrize(("setting", "backend"), [*itertools.product(SETTINGS, DISTRIBUTED)])
@on_ranks()
def test_back_to_oss_and_to_torch(setting: str, backend: str) -> None:
    """Train under fsshard, hand over to the real library and to torch; the weights of each at the end."""
    model, optimizer = ours(Text, setting, backend, seed=0, lr=SETTINGS[setting]["lr"])
    run(model, [optimizer], 0)
    weights, state = old.sharded_ddp_state(model), old.oss_state(optimizer)
    theirs, (oss,) = sharded_ddp(build(Text, 9), setting)
    theirs.load_state_dict(weights)
    oss.load_state_dict(copy.deepcopy(state))
    alone = build(Text, 9)
    alone.load_state_dict(plain(weights))
    made = optimizers(alone, setting, getattr(torch.optim, setting))
    made[0].load_state_dict(state)
    ddp = nn.parallel.DistributedDataParallel(alone)
    here = run(model, [optimizer], STEPS)
    real = run(theirs, [oss], STEPS)
    alone = run(ddp, made, STEPS)
    assert list(differences(here, real)) == list(differences(here, alone)) == []


@on_ranks()
def test_oss_goes_on_under_the_front(text: Any) -> None:
    """The same script, on our OSS and ShardedDataParallel; and back under the real ones."""
    setting, folder, expected = text
    model, (optimizer,) = sharded_ddp(build(Text, 9), setting, "fsshard.compat.fairscale")
    model.load_state_dict(read(folder, "model"))
    optimizer.load_state_dict(read(folder, "optimizer")[0])
    weights, state = copy.deepcopy([model.state_dict(), optimizer.state_dict(all_ranks=True)])
    theirs, (oss,) = sharded_ddp(build(Text, 9), setting)
    theirs.load_state_dict(weights)
    oss.load_state_dict(state)
    check_equal(expected, run(model, [optimizer], STEPS))
    check_equal(expected, run(theirs, [oss], STEPS))


# ------------------------------------------------------------------------------------------------ FSDP


def real_fsdp(module: Any, units: tuple[str, ...]) -> Any:
    """FairScale's FullyShardedDataParallel around ``units`` and the whole; it can do all but forward on the CPU.

    Its forward (FairScale 0.4.13, torch 2.13) stops at KeyError 'all_gather'. ``_full_param_padded``, which only that
    sets, tells its gathering of states the size of a whole flat parameter.
    """
    from fairscale.nn import FullyShardedDataParallel

    # Its own default group it keeps for the life of the process, and the pool's ranks make new ones for every job.
    groups = {"process_group": dist.group.WORLD, "process_group_reduce_scatter": dist.group.WORLD}
    wrapped = functools.partial(FullyShardedDataParallel, compute_device=torch.device("cpu"), **groups)
    for name in units:
        setattr(module, name, wrapped(getattr(module, name)))
    sharded = wrapped(module)
    for parameter in sharded.parameters():
        parameter._full_param_padded = parameter.new_zeros(parameter.numel() * dist.get_world_size())
    return sharded


def step_fsdp(sharded: Any, optimizer: Any, gradients: dict[str, Tensor]) -> None:
    """One step by the given whole gradients, of which each rank keeps its shards."""
    from fairscale.nn.data_parallel import get_fsdp_instances

    units = old.names_in_metadata(sharded.local_metadata_dict())
    for instance, names in zip(get_fsdp_instances(sharded), units, strict=True):
        flat = torch.cat([gradients[name].reshape(-1) for name in names])
        instance.params[0].grad = instance._get_shard(flat)[0]
    optimizer.step()


def per_rank(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def whole_fsdp(sharded: Any) -> dict[str, Any]:
    """FairScale's own joining."""
    weights, metadata = per_rank(dict(sharded.local_state_dict())), per_rank(sharded.local_metadata_dict())
    return dict(sharded.consolidate_shard_weights(copy.deepcopy(weights), metadata))


def train_and_record(model: Any, module: nn.Module, optimizer: Any, first: int) -> list[dict[str, Tensor]]:
    """As :func:`run`, keeping the whole gradients of every step."""
    kept = []
    for number in range(first, first + STEPS):
        model(batch(number)).square().mean().backward()
        kept.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
        take_step(optimizer)
    return kept


def job_write_fsdp(setting: str, folder: str, units: tuple[str, ...]) -> dict[str, Any]:
    """DDP trains; the real FSDP steps by the same gradients and saves; the weights at the end."""
    cls = functools.partial(getattr(torch.optim, setting), **SETTINGS[setting])
    module = build(Nested)
    model, optimizer = nn.parallel.DistributedDataParallel(module), cls(module.parameters())
    gradients = train_and_record(model, module, optimizer, 0)
    sharded = real_fsdp(build(Nested), units)
    theirs = cls(sharded.parameters())
    for each in gradients:
        step_fsdp(sharded, theirs, each)
    buffers = {key: value.clone() for key, value in module.named_buffers()}  # what a forward would have left there
    for key, value in sharded.named_buffers():
        value.copy_(buffers[clean_path(key)])
    save(folder, shards=per_rank(dict(sharded.local_state_dict())), metadata=per_rank(sharded.local_metadata_dict()))
    save(folder, model=whole_fsdp(sharded), local=per_rank(theirs.state_dict()))
    # FairScale 0.4.13 gathers all kinds into one buffer and moves each to the CPU, which copies on a GPU only.
    with mock.patch.object(Tensor, "cpu", Tensor.clone):
        save(folder, optimizer=sharded.gather_full_optim_state_dict(theirs))
    train_and_record(model, module, optimizer, STEPS)
    return plain(model.state_dict())


def job_resume_fsdp(setting: str, folder: str, backend: str, form: str) -> dict[str, Any]:
    """Load what FSDP wrote: whole, or each rank's shards; train on; the weights at the end."""
    model, optimizer = ours(Nested, setting, backend)
    metadata = read(folder, "metadata")
    if form == "shards":
        old.load_model_state(model, old.join_model_shards(read(folder, "shards"), metadata))
        old.load_optimizer_state(optimizer, old.join_optimizer_shards(read(folder, "local"), metadata))
    else:
        old.load_model_state(model, read(folder, "model"))
        names = old.fsdp_names(model, ["block"]) if form == "units" else old.names_in_metadata(metadata[0])
        old.load_optimizer_state(optimizer, read(folder, "optimizer"), names=names)
    return run(model, [optimizer], STEPS)


def job_back_to_fsdp(setting: str, backend: str, units: tuple[str, ...]) -> list[dict[str, Any]]:
    """Train under fsshard, hand over to the real FSDP; the weights of both at the end."""
    cls = functools.partial(getattr(torch.optim, setting), **SETTINGS[setting])
    model, optimizer = ours(Nested, setting, backend, seed=0, lr=SETTINGS[setting]["lr"])
    run(model, [optimizer], 0)
    weights = plain(model.state_dict())
    state = old.fsdp_optimizer_state(optimizer, old.fsdp_names(model, units))
    module, started = build(Nested, 9), build(Nested, 9)
    module.load_state_dict(weights)
    started.load_state_dict(weights)
    plain_optimizer = cls(module.parameters())  # the same training goes on in torch, for its gradients
    plain_optimizer.load_state_dict(old.oss_state(optimizer))
    gradients = train_and_record(nn.parallel.DistributedDataParallel(module), module, plain_optimizer, STEPS)
    sharded = real_fsdp(started, units)
    theirs = cls(sharded.parameters(), lr=1e-9)
    theirs.load_state_dict(sharded.get_shard_from_optim_state_dict(copy.deepcopy(state)))
    for each in gradients:
        step_fsdp(sharded, theirs, each)
    here, whole = run(model, [optimizer], STEPS), plain(whole_fsdp(sharded))
    return [{name: each[name] for name, _ in module.named_parameters()} for each in (here, whole)]


@pytest.fixture(scope="module", params=["AdamW", "SGD"])
def nested(request: pytest.FixtureRequest, ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of the real FSDP: setting, folder, the weights had it gone on."""
    folder = str(tmp_path_factory.mktemp("fsdp"))
    return request.param, folder, ranks.run(job_write_fsdp, 2, request.param, folder, ("block",))[0]


@pytest.mark.covering
@pytest.mark.parametrize("form", ["metadata", "units", "shards"])
@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_fsdp_goes_on(ranks: Any, nested: Any, backend: str, form: str) -> None:
    setting, folder, expected = nested
    check_equal(expected, ranks.run(job_resume_fsdp, 2, setting, folder, backend, form)[0])


@pytest.mark.parametrize(
    ("setting", "units"),
    often(itertools.product(["AdamW", "SGD", "NAdam"], [(), ("block",)]), ("AdamW", ()), ("NAdam", ("block",))),
)
def test_back_to_fsdp(ranks: Any, setting: str, units: tuple[str, ...]) -> None:
    for backend in DISTRIBUTED:
        for here, real in ranks.run(job_back_to_fsdp, 2, setting, backend, units):
            check_equal(here, real)


# ------------------------------------------------------------------------------------------------ what does not fit

SPOILT: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "none": (lambda state: None, ["a NoneType", "on every rank"]),
    # What FairScale's load_state_dict leaves in the dict that it is given.
    "partial": (lambda state: state["state"].update({2: {}}) or state, ["missing: state of hidden.bias", "strict="]),
    "gone": (lambda state: state["state"].pop(2) and state, ["missing: state of hidden.bias"]),
    "fewer": (
        lambda state: state["param_groups"][1]["params"].pop() and state,
        ["parameters of group 1: expected 2, got 1"],
    ),
    "shape": (
        lambda state: state["state"][2].update(exp_avg=torch.zeros(7)) or state,
        ["hidden.bias: exp_avg: expected (6,), got (7,)"],
    ),
    "groups": (lambda state: state["param_groups"].pop() and state, ["number of param_groups: expected 2, got 1"]),
    "uncollected": (lambda state: {**state, "uncollected_local_ids": [1]}, ["rank 0's part only"]),
}
"""Files as users have them: what is wrong with a state, and what is said."""


def trained() -> tuple[Any, Any, dict[str, Any]]:
    """A trained model with its optimizer, and the state in FairScale's form."""
    model, optimizer = ours(Text, "AdamW", "fsdp2", seed=0, lr=0.01)
    run(model, [optimizer], 0)
    return model, optimizer, old.oss_state(optimizer)


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except FsshardError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def job_spoilt(only_rank: int | None) -> dict[str, list[Any]]:
    """By what is wrong: what was said, and what has changed."""
    _, optimizer, state = trained()
    found = {}
    for how, (spoil, _) in SPOILT.items():
        before, given = copy.deepcopy([optimizer.state_dict(), state])
        if only_rank in (None, dist.get_rank()):
            given = spoil(given)
        text = said(lambda given=given: old.load_optimizer_state(optimizer, given))  # type: ignore[misc]
        found[how] = [text, list(differences(before, optimizer.state_dict()))]
    return found


@pytest.mark.parametrize("only_rank", [None, 1])
def test_a_state_that_does_not_fit(ranks: Any, only_rank: int | None) -> None:
    """Said on every rank, the one with a good file too, before anything is changed."""
    for rank, found in enumerate(ranks.run(job_spoilt, 2, only_rank)):
        for how, (_, texts) in SPOILT.items():
            told, changed = found[how]
            assert told.startswith("StateDictError: ") and all(text in told for text in texts), told
            assert only_rank in (None, rank) or f"rank {only_rank}:" in told
            assert changed == []


@on_ranks()
def test_a_parameter_without_state_starts_anew_if_one_says_so() -> None:
    model, optimizer, state = trained()
    old.load_optimizer_state(optimizer, SPOILT["gone"][0](state), strict=False)
    with_state = list(optimizer.state_dict()["state"])
    every = [name for name, _ in model.named_parameters()]
    assert set(every) - set(with_state) == {"frozen", "hidden.bias"}


@on_ranks()
def test_names_that_do_not_go_with_the_state() -> None:
    model, optimizer = ours(Nested, "AdamW", "ddp")
    run(model, [optimizer], 0)
    shared = fsshard.wrap(build(Text), backend="ddp")
    state, others = old.fsdp_optimizer_state(optimizer, old.fsdp_names(model, ["block"])), ["block", "last"]
    calls = {
        "fsdp_names(model, units)": lambda: old.load_optimizer_state(optimizer, state),
        "parameters of each wrapped module: expected [2, 4, 2], got [4, 4]": lambda: old.load_optimizer_state(
            optimizer, state, names=old.fsdp_names(model, others)
        ),
        "no module 'blok'": lambda: old.fsdp_names(model, ["blok"]),
        "'embed.weight' is shared by modules of different units": lambda: old.fsdp_names(shared, ["embed", "head"]),
        "missing: last.bias": lambda: old.fsdp_optimizer_state(optimizer, [["first.weight"]]),
    }
    told = {case: said(call) for case, call in calls.items()}
    assert all(text in of_call for text, of_call in told.items()), told


@on_ranks()
def test_names_that_the_state_itself_has() -> None:
    """A torch optimizer over named parameters of the wrapped model says itself which is which, in any order."""
    model = nn.parallel.DistributedDataParallel(build(Nested))
    theirs = torch.optim.AdamW(list(model.named_parameters())[::-1], lr=0.01)
    run(model, [theirs], 0)
    target, optimizer = ours(Nested, "AdamW", "fsdp2")
    old.load_model_state(target, model.state_dict())
    old.load_optimizer_state(optimizer, theirs.state_dict())
    expected = run(model, [theirs], STEPS)
    found = run(target, [optimizer], STEPS)
    if dist.get_rank() == 0:  # whose statistics a state dict has
        check_equal(expected, found)


def metadata(padding: int = 0, **changes: Any) -> dict[str, Any]:
    """As local_metadata_dict() of a rank with one linear layer."""
    flat = {"names": ["weight", "bias"], "shapes": [(2, 2), (2,)], "numels": [4, 2], "padding": padding}
    module = {"fsdp_path": "", "params": {"flat_param_0": flat}, "no_broadcast_optim_state": False, **changes}
    return {"param_metadata": [{**module, "shared_param_info": []}], "buffer_names": []}


def test_shards_that_do_not_add_up() -> None:
    shards = [{"flat_param_0": torch.zeros(3)}, {"flat_param_0": torch.zeros(3)}]
    assert set(old.join_model_shards(shards, [metadata(), metadata()])) == {"weight", "bias"}
    for bad, about, error, text in (
        (shards, [metadata(), metadata(padding=1)], StateDictError, "flat_param_0: expected 6, got 5"),
        ([shards[0], {}], [metadata(), metadata()], StateDictError, "missing: flat_param_0 of rank 1"),
        (shards, [metadata()], ConfigurationError, "2 shards with 1 metadata"),
        (shards, [metadata(no_broadcast_optim_state=True)] * 2, ConfigurationError, "no_broadcast_optim_state=True"),
    ):
        with pytest.raises(error, match=text):
            old.join_model_shards(bad, about)
