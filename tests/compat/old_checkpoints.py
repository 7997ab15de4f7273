"""Trainings of the real FairScale that write checkpoints, and ones that go on from them; run on the pool's ranks."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.checkpoint.interop.foreign_names import clean_path
from fsshard.compat import fairscale_checkpoints as old
from tests.models import Spectral, batch
from tests.training_runs import differences

STEPS = 3
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {"lr": 0.01, "betas": (0.8, 0.95)}),
    "SGD": ("SGD", {"lr": 0.05, "momentum": 0.9}),
    "Adagrad": ("Adagrad", {"lr": 0.05}),
    "NAdam": ("NAdam", {"lr": 0.01}),
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


def split(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups, in another order than the model's, as names."""
    names = [name for name, _ in module.named_parameters()]
    wide = [name for name in names if name.endswith("weight")]
    return [{"params": [n for n in names if n not in wide], "weight_decay": 0.0}, {"params": wide, "weight_decay": 0.1}]


def dtypes(module: nn.Module) -> list[list[str]]:
    """Names of the real parameters, and of the complex ones."""
    named = list(module.named_parameters())
    return [[n for n, p in named if not p.is_complex()], [n for n, p in named if p.is_complex()]]


def resolve(module: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    parameters = dict(module.named_parameters())
    return [{**group, "params": [parameters[name] for name in group["params"]]} for group in groups]


def run(model: Any, optimizers: list[Any], first: int, steps: int = STEPS) -> None:
    """Train; FairScale's own way to drop gradients is the model's."""
    for number in range(first, first + steps):
        model(batch(number)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


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


def sharded_ddp(module: nn.Module, setting: str, root: str = "fairscale") -> tuple[Any, list[Any]]:
    """The real ShardedDataParallel, or ours, and its OSS: one, with two groups, or one per dtype."""
    ShardedDataParallel = importlib.import_module(f"{root}.nn").ShardedDataParallel
    OSS = importlib.import_module(f"{root}.optim").OSS
    name, arguments = SETTINGS[setting]
    cls = getattr(torch.optim, name)
    if any(parameter.is_complex() for parameter in module.parameters()):
        parts = [resolve(module, [{"params": names}]) for names in dtypes(module)]
    else:
        parts = [resolve(module, split(module))]
    optimizers = [OSS(part, optim=cls, **arguments) for part in parts]
    return ShardedDataParallel(module, optimizers, reduce_buffer_size=0), optimizers


def job_write_oss(kind: type[nn.Module], setting: str, folder: str) -> dict[str, Any]:
    """Train, save, train on; the weights at the end."""
    model, optimizers = sharded_ddp(build(kind), setting)
    run(model, optimizers, 0)
    for optimizer in optimizers:
        optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        states = [optimizer.state_dict() for optimizer in optimizers]
        save(folder, model=model.state_dict(), optimizer=states)
    else:
        dist.barrier()
    run(model, optimizers, STEPS)
    return plain(model.state_dict())


def ours(kind: type[nn.Module], setting: str, backend: str, seed: int = 9) -> tuple[Any, Any]:
    """A model with other weights and other hyper-parameters than those of the checkpoint."""
    name, arguments = SETTINGS[setting]
    module = build(kind, seed)
    groups = None if kind is Waves else split(module)
    model = fsshard.wrap(module, backend=backend)
    return model, fsshard.build_optimizer(model, getattr(torch.optim, name), groups, **{**arguments, "lr": 1e-9})


def job_resume_oss(kind: type[nn.Module], setting: str, folder: str, backend: str) -> dict[str, Any]:
    """Load what FairScale wrote, train on; the weights at the end."""
    model, optimizer = ours(kind, setting, backend)
    names = dtypes(build(kind)) if kind is Waves else None
    old.load_model_state(model, read(folder, "model"))
    old.load_optimizer_state(optimizer, read(folder, "optimizer"), names=names)
    run(model, [optimizer], STEPS)
    return plain(model.state_dict())


def job_resume_aged(setting: str, folder: str, backend: str) -> dict[str, Any]:
    """As :func:`job_resume_oss`, from a state as torch 1.11 wrote it: counts as numbers, and what groups had then."""
    model, optimizer = ours(Text, setting, backend)
    (state,) = read(folder, "optimizer")
    then = {"lr", "betas", "eps", "weight_decay", "amsgrad", "momentum", "dampening", "nesterov", "momentum_decay"}
    then |= {"lr_decay", "initial_accumulator_value", "params"}
    state["param_groups"] = [{k: v for k, v in group.items() if k in then} for group in state["param_groups"]]
    for item in state["state"].values():
        if "step" in item:
            item["step"] = int(item["step"])
    old.load_model_state(model, read(folder, "model"))
    old.load_optimizer_state(optimizer, state)
    run(model, [optimizer], STEPS)
    return plain(model.state_dict())


def job_resume_plain(kind: type[nn.Module], setting: str, folder: str) -> dict[str, Any]:
    """The same in torch alone, on one process."""
    module = build(kind, 9)
    module.load_state_dict(plain(read(folder, "model")))
    name, arguments = SETTINGS[setting]
    parts = [[{"params": names}] for names in dtypes(module)] if kind is Waves else [split(module)]
    optimizers = [getattr(torch.optim, name)(resolve(module, part), **arguments) for part in parts]
    for optimizer, state in zip(optimizers, read(folder, "optimizer"), strict=True):
        optimizer.load_state_dict(state)
    run(module, optimizers, STEPS)
    return plain(module.state_dict())


def job_back_to_oss(kind: type[nn.Module], setting: str, backend: str) -> list[dict[str, Any]]:
    """Train under fsshard, hand over to the real library and to torch; the weights of each at the end."""
    name, arguments = SETTINGS[setting]
    model, optimizer = ours(kind, setting, backend, seed=0)
    for group in optimizer.param_groups:
        group["lr"] = arguments["lr"]
    run(model, [optimizer], 0)
    weights, state = old.sharded_ddp_state(model), old.oss_state(optimizer)
    run(model, [optimizer], STEPS)

    module = build(kind, 9)
    theirs, (oss,) = sharded_ddp(module, setting)
    theirs.load_state_dict(weights)
    oss.load_state_dict(copy.deepcopy(state))
    run(theirs, [oss], STEPS)

    alone = build(kind, 9)
    alone.load_state_dict(plain(weights))
    theirs_plain = getattr(torch.optim, name)(resolve(alone, split(alone)), **arguments)
    theirs_plain.load_state_dict(state)
    run(nn.parallel.DistributedDataParallel(alone), [theirs_plain], STEPS)
    return [plain(model.state_dict()), plain(theirs.state_dict()), plain(alone.state_dict())]


def job_front(kind: type[nn.Module], setting: str, folder: str) -> list[dict[str, Any]]:
    """The script goes on under our front; then what that saves goes on under the real library; the weights of each."""
    model, optimizers = sharded_ddp(build(kind, 9), setting, "fsshard.compat.fairscale")
    model.load_state_dict(read(folder, "model"))
    for optimizer, state in zip(optimizers, read(folder, "optimizer"), strict=True):
        optimizer.load_state_dict(state)
    weights = copy.deepcopy(model.state_dict())
    states = [copy.deepcopy(optimizer.state_dict(all_ranks=True)) for optimizer in optimizers]
    run(model, optimizers, STEPS)

    theirs, real_optimizers = sharded_ddp(build(kind, 9), setting)
    theirs.load_state_dict(weights)
    for optimizer, state in zip(real_optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    run(theirs, real_optimizers, STEPS)
    return [plain(model.state_dict()), plain(theirs.state_dict())]


# ------------------------------------------------------------------------------------------------ FSDP


def real_fsdp(module: Any, units: tuple[str, ...]) -> Any:
    """FairScale's FullyShardedDataParallel around ``units`` and the whole; it can do all but forward on the CPU.

    Its forward (FairScale 0.4.13, torch 2.13) stops at KeyError 'all_gather'. ``_full_param_padded``, which only that
    sets, tells its gathering of states the size of a whole flat parameter.
    """
    from fairscale.nn import FullyShardedDataParallel

    # Its own default group it keeps for the life of the process, and the pool's ranks make new ones for every job.
    world = dist.group.WORLD
    wrapped = functools.partial(
        FullyShardedDataParallel,
        process_group=world,
        process_group_reduce_scatter=world,
        compute_device=torch.device("cpu"),
    )
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
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def whole_fsdp(sharded: Any) -> dict[str, Any]:
    """FairScale's own joining."""
    weights, metadata = per_rank(dict(sharded.local_state_dict())), per_rank(sharded.local_metadata_dict())
    return dict(sharded.consolidate_shard_weights(copy.deepcopy(weights), metadata))


class _OneOf:
    """An optimizer of whose tensors in the state only one kind is shown."""

    def __init__(self, optimizer: Any, key: str) -> None:
        self.optimizer, self.key = optimizer, key

    def state_dict(self) -> dict[str, Any]:
        whole = copy.deepcopy(self.optimizer.state_dict())
        for number, item in whole["state"].items():
            shown = {k: v for k, v in item.items() if k == self.key or not isinstance(v, Tensor) or not v.dim()}
            whole["state"][number] = shown
        return whole


def gather_full(sharded: Any, optimizer: Any) -> dict[str, Any] | None:
    """``gather_full_optim_state_dict``, one kind of tensor at a time.

    FairScale 0.4.13 gathers all kinds into one buffer and moves each to the CPU, which copies on a GPU only: on the CPU
    ``exp_avg`` would be what ``exp_avg_sq`` is.
    """
    states = optimizer.state_dict()["state"].values()
    keys = {key for item in states for key, value in item.items() if isinstance(value, Tensor) and value.dim()}
    found = [sharded.gather_full_optim_state_dict(_OneOf(optimizer, key)) for key in sorted(keys)]
    if dist.get_rank():
        return None
    for other in found[1:]:
        for number, item in other["state"].items():
            found[0]["state"][number].update(item)
    return dict(found[0])


def train_and_record(model: Any, module: nn.Module, optimizer: Any, first: int) -> list[dict[str, Tensor]]:
    """As :func:`run`, keeping the whole gradients of every step."""
    kept = []
    for number in range(first, first + STEPS):
        model(batch(number)).square().mean().backward()
        kept.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return kept


def job_write_fsdp(setting: str, folder: str, units: tuple[str, ...]) -> dict[str, Any]:
    """DDP trains; the real FSDP steps by the same gradients and saves; the weights at the end."""
    name, arguments = SETTINGS[setting]
    module = build(Nested)
    model = nn.parallel.DistributedDataParallel(module)
    optimizer = getattr(torch.optim, name)(module.parameters(), **arguments)
    gradients = train_and_record(model, module, optimizer, 0)

    sharded = real_fsdp(build(Nested), units)
    theirs = getattr(torch.optim, name)(sharded.parameters(), **arguments)
    for each in gradients:
        step_fsdp(sharded, theirs, each)
    buffers = {key: value.clone() for key, value in module.named_buffers()}  # what a forward would have left there
    for key, value in sharded.named_buffers():
        value.copy_(buffers[clean_path(key)])
    save(folder, shards=per_rank(dict(sharded.local_state_dict())), metadata=per_rank(sharded.local_metadata_dict()))
    save(folder, model=whole_fsdp(sharded), local=per_rank(theirs.state_dict()))
    if setting != "NAdam":  # whose 0-dim state FairScale 0.4.13 gathers into tensors of size 1, which gloo refuses
        save(folder, optimizer=gather_full(sharded, theirs))
    train_and_record(model, module, optimizer, STEPS)
    return plain(model.state_dict())


def job_resume_fsdp(setting: str, folder: str, backend: str, form: str) -> dict[str, Any]:
    """Load what FSDP wrote: whole, or each rank's shards; train on; the weights at the end."""
    name, arguments = SETTINGS[setting]
    model = fsshard.wrap(build(Nested, 9), backend=backend)
    optimizer = fsshard.build_optimizer(model, getattr(torch.optim, name), **{**arguments, "lr": 1e-9})
    metadata = read(folder, "metadata")
    if form == "shards":
        old.load_model_state(model, old.join_model_shards(read(folder, "shards"), metadata))
        old.load_optimizer_state(optimizer, old.join_optimizer_shards(read(folder, "local"), metadata))
    else:
        old.load_model_state(model, read(folder, "model"))
        names = old.fsdp_names(model, ["block"]) if form == "units" else old.names_in_metadata(metadata[0])
        old.load_optimizer_state(optimizer, read(folder, "optimizer"), names=None if form == "alone" else names)
    run(model, [optimizer], STEPS)
    return plain(model.state_dict())


def job_back_to_fsdp(setting: str, backend: str, units: tuple[str, ...]) -> list[dict[str, Any]]:
    """Train under fsshard, hand over to the real FSDP; the weights of both at the end."""
    name, arguments = SETTINGS[setting]
    model = fsshard.wrap(build(Nested), backend=backend)
    optimizer = fsshard.build_optimizer(model, getattr(torch.optim, name), **arguments)
    run(model, [optimizer], 0)
    weights = model.state_dict()
    state = old.fsdp_optimizer_state(optimizer, old.fsdp_names(model, units))

    module = build(Nested, 9)  # the same training goes on in torch, for its gradients
    module.load_state_dict(weights)
    plain_optimizer = getattr(torch.optim, name)(module.parameters(), **arguments)
    plain_optimizer.load_state_dict(old.oss_state(optimizer))
    gradients = train_and_record(nn.parallel.DistributedDataParallel(module), module, plain_optimizer, STEPS)

    started = build(Nested, 9)
    started.load_state_dict(weights)
    sharded = real_fsdp(started, units)
    theirs = getattr(torch.optim, name)(sharded.parameters(), **{**arguments, "lr": 1e-9})
    theirs.load_state_dict(sharded.get_shard_from_optim_state_dict(copy.deepcopy(state)))
    for each in gradients:
        step_fsdp(sharded, theirs, each)
    run(model, [optimizer], STEPS)
    parameters = [name for name, _ in module.named_parameters()]
    whole = plain(whole_fsdp(sharded))
    return [{name: each[name] for name in parameters} for each in (plain(model.state_dict()), whole)]


# ------------------------------------------------------------------------------------------------ what does not fit


def text_model(backend: str) -> tuple[Any, Any, dict[str, Any]]:
    """A trained model with its optimizer, and the state in FairScale's form."""
    model, optimizer = ours(Text, "AdamW", backend, seed=0)
    run(model, [optimizer], 0)
    return model, optimizer, old.oss_state(optimizer)


def spoil(state: dict[str, Any], how: str) -> Any:
    """What is wrong with files, as users have them."""
    groups, items = state["param_groups"], state["state"]
    if how == "none":
        return None
    if how == "partial":  # what FairScale's load_state_dict leaves in the dict that it is given
        items[2] = {}
    elif how == "gone":
        del items[2]
    elif how == "fewer":
        groups[1]["params"] = groups[1]["params"][1:]
    elif how == "shape":
        items[2]["exp_avg"] = torch.zeros(7)
    elif how == "groups":
        del groups[1]
    elif how == "uncollected":
        state["uncollected_local_ids"] = [1]
    return state


SPOILT = ("none", "partial", "gone", "fewer", "shape", "groups", "uncollected")


def job_spoilt(only_rank: int | None) -> dict[str, list[Any]]:
    """By what is wrong: what was said, and what has changed."""
    _, optimizer, state = text_model("fsdp2")
    found = {}
    for how in SPOILT:
        before, given = copy.deepcopy([optimizer.state_dict(), state])
        if only_rank in (None, dist.get_rank()):
            given = spoil(given, how)
        said = _said(lambda given=given: old.load_optimizer_state(optimizer, given))  # type: ignore[misc]
        found[how] = [said, list(differences(before, optimizer.state_dict()))]
    return found


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except fsshard.errors.FsshardError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def job_not_strict() -> list[Any]:
    """A parameter without state starts anew if one says so."""
    model, optimizer, state = text_model("fsdp2")
    old.load_optimizer_state(optimizer, spoil(state, "gone"), strict=False)
    return [list(optimizer.state_dict()["state"]), [name for name, _ in model.named_parameters()]]


def job_names() -> dict[str, str]:
    """Case -> what is said of names that do not go with a state."""
    model = fsshard.wrap(build(Nested), backend="ddp")
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=0.01)
    run(model, [optimizer], 0)
    shared = fsshard.wrap(build(Text), backend="ddp")
    state, others = old.fsdp_optimizer_state(optimizer, old.fsdp_names(model, ["block"])), ["block", "last"]
    calls: dict[str, Callable[[], object]] = {
        "needed": lambda: old.load_optimizer_state(optimizer, state),
        "other units": lambda: old.load_optimizer_state(optimizer, state, names=old.fsdp_names(model, others)),
        "unknown module": lambda: old.fsdp_names(model, ["blok"]),
        "shared": lambda: old.fsdp_names(shared, ["embed", "head"]),
        "left out": lambda: old.fsdp_optimizer_state(optimizer, [["first.weight"]]),
    }
    return {case: _said(call) for case, call in calls.items()}


def job_named() -> list[dict[str, Any]]:
    """A torch optimizer over named parameters of the wrapped model says itself which is which, in any order."""
    module = build(Nested)
    model = nn.parallel.DistributedDataParallel(module)
    pairs = list(model.named_parameters())[::-1]
    theirs = torch.optim.AdamW(pairs, lr=0.01)
    run(model, [theirs], 0)
    target = fsshard.wrap(build(Nested, 9), backend="fsdp2")
    optimizer = fsshard.build_optimizer(target, torch.optim.AdamW, lr=1e-9)
    old.load_model_state(target, model.state_dict())
    old.load_optimizer_state(optimizer, theirs.state_dict())
    run(target, [optimizer], STEPS)
    run(model, [theirs], STEPS)
    return [plain(model.state_dict()), plain(target.state_dict())]
