"""One training for ranks of the tests, described by a small frozen object, and everything it computed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fsshard
from fsshard.backends.whole import gather_grads


def zoo() -> Any:
    """The table of models; imported on the ranks, where it is used."""
    from tests.zoo import ZOO

    return ZOO


DISTRIBUTED = ("ddp", "fsdp", "fsdp2", "fairscale")
"""The backends that share work between ranks; the first is the reference."""
ENGINES: list[dict[str, Any]] = [
    {"backend": "ddp"},
    {"backend": "fairscale", "implementation": "real"},
    {"backend": "fairscale", "implementation": "native"},
    {"backend": "fsdp"},
    {"backend": "fsdp2"},
]
"""Settings of wrap for each of them, and both implementations of FairScale's."""
NAMES = [str(engine.get("implementation", engine["backend"])) for engine in ENGINES]


def ranks_of(backend: str) -> int:
    """How many ranks a test of this backend takes."""
    return 1 if backend == "none" else 2


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """``"Adam"``: torch's; ``"neuralop.AdamW"``: neuraloperator's."""
    if name == "neuralop.AdamW":
        from neuralop.training import AdamW

        return AdamW  # type: ignore[no-any-return]
    return getattr(torch.optim, name)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        case: a name in the zoo.
        backend: a backend's name.
        micro_batches: backward passes per step; all but the last under ``no_sync`` if ``no_sync``.
        clip: (max_norm, norm_type), or None.
        groups: split the parameters into two groups, the second with another learning rate and weight decay.
        scaled: with ``fsshard.GradScaler``.
        autocast: the forward runs under ``model.autocast()``.
        joined: train on all ranks' batches at once, in this order of samples' ranks (for one process).
    """

    case: str
    backend: str = "ddp"
    steps: int = 3
    optimizer: str = "Adam"
    lr: float = 1e-2
    micro_batches: int = 1
    no_sync: bool = True
    clip: tuple[float, float] | None = None
    groups: bool = False
    scaled: bool = False
    autocast: bool = False
    joined: int = 0
    order: tuple[int, ...] | None = None
    hyper: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trace:
    """All that a training computed, whole and as the user sees it."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def wrapped(run: Run) -> tuple[fsshard.ShardedModule, fsshard.ShardedOptimizer]:
    """The model and its optimizer."""
    # The models are small: with FSDP2's default all their units would be joined into one.
    apart = {"merge_below": 0} if run.backend == "fsdp2" else {}
    model = fsshard.wrap(zoo()[run.case].build(), backend=run.backend, **{**apart, **run.settings})
    names = [name for name, _ in model.named_parameters()]
    groups = None
    if run.groups:
        groups = [{"params": names[::2]}, {"params": names[1::2], "lr": run.lr / 3, "weight_decay": 0.05}]
    return model, fsshard.build_optimizer(model, optimizer_class(run.optimizer), groups, lr=run.lr, **run.hyper)


def train(run: Run) -> Trace:
    """Train and record; collective."""
    torch.manual_seed(dist.get_rank())  # dropout
    model, optimizer = wrapped(run)
    scaler = fsshard.GradScaler(model, init_scale=2.0**8, enabled=run.scaled)
    trace = Trace()
    for step in range(run.steps):
        trace.losses.append(accumulate(run, model, step, scaler))
        scaler.unscale_(optimizer)
        if run.clip is not None:
            trace.norms.append(float(model.clip_grad_norm_(*run.clip)))
        trace.gradients.append(gradients(model))
        scaler.step(optimizer)
        if run.scaled:
            scaler.update()
        optimizer.zero_grad()
    trace.weights, trace.state = model.state_dict(), optimizer.state_dict()
    return trace


def accumulate(run: Run, model: fsshard.ShardedModule, step: int, scaler: fsshard.GradScaler) -> float:
    """All backward passes of one step; returns the mean loss over ranks and micro batches."""
    total = torch.zeros((), dtype=torch.float64)
    for micro in range(run.micro_batches):
        silent = run.no_sync and micro + 1 < run.micro_batches
        with model.no_sync() if silent else contextlib.nullcontext():
            with model.autocast() if run.autocast else contextlib.nullcontext():
                loss = loss_of(run, model, step * run.micro_batches + micro) / run.micro_batches
            scaler.scale(loss).backward()
        total += loss.detach().double()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return float(total / dist.get_world_size())


def loss_of(run: Run, model: Callable[..., Any], step: int) -> Tensor:
    """The loss on this rank's batch, or on the joined one."""
    case = zoo()[run.case]
    if not run.joined:
        return case.loss(call(model, case.batch(dist.get_rank(), step)))
    order = run.order or tuple(range(run.joined))
    return case.loss(call(model, join([case.batch(rank, step) for rank in order])))


def call(model: Callable[..., Any], batch: Any) -> Any:
    """Apply a model to a batch of the zoo: a dict of keywords or a tuple of positions."""
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def join(batches: list[Any]) -> Any:
    """One batch out of several, along dim 0."""
    if isinstance(batches[0], dict):
        return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def gradients(model: fsshard.ShardedModule) -> dict[str, Tensor | None]:
    """Whole gradients by original name, complex where the parameter is; collective."""
    found = gather_grads(model.backend)
    return {e.name: None if gradient is None else e.kind.to_user(gradient).clone() for e, gradient in found}


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Paths at which two nested results are not equal to the last bit, in dtype, or in shape."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            yield f"{where}: {one.dtype}{tuple(one.shape)} != {other.dtype}{tuple(other.shape)}"
        elif not torch.equal(one, other):
            yield f"{where}: max difference {(one - other).abs().max().item():.3g}"
    elif isinstance(one, dict) and isinstance(other, dict):
        if list(one) != list(other):
            yield f"{where}: keys {sorted(set(one) ^ set(other)) or 'in another order'}"
        for key in one.keys() & other.keys():
            yield from differences(one[key], other[key], f"{where}[{key}]")
    elif isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            yield f"{where}: {len(one)} != {len(other)} items"
        for index, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, f"{where}[{index}]")
    elif type(one) is not type(other) or (one != other and not _same_object(one, other)):
        yield f"{where}: {one!r} != {other!r}"


def check_equal(one: Any, other: Any, where: str = "") -> None:
    """Raise if two nested results differ, with the paths at which they do."""
    found = list(differences(one, other, where))
    assert not found, found


def _same_object(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """An empty folder that all ranks see."""
    with tempfile.TemporaryDirectory() as mine:
        names = [mine]
        dist.broadcast_object_list(names)
        yield Path(names[0])
        dist.barrier()


def lost_by_saving(
    model: fsshard.ShardedModule,
    optimizer: fsshard.ShardedOptimizer,
    build: Callable[[], Any],
    kind: type[torch.optim.Optimizer],
    **hyper: Any,
) -> list[str]:
    """Return what a checkpoint does not give back to a new model and optimizer under the same backend; collective."""
    other = fsshard.wrap(build(), backend=model.backend.name)
    theirs = fsshard.build_optimizer(other, kind, **hyper)
    with shared_folder() as folder:
        fsshard.save(folder / "saved", model, optimizer)
        fsshard.load(folder / "saved", other, theirs)
    found = list(differences(dict(model.state_dict()), dict(other.state_dict())))
    return found + list(differences(optimizer.state_dict()["state"], theirs.state_dict()["state"]))


def compare(runs: list[Run]) -> list[str]:
    """Run all and say where any differs from the first; empty when all are equal to the last bit."""
    first = train(runs[0])
    found = []
    for run in runs[1:]:
        trace = train(run)
        found += [f"{run.backend} against {runs[0].backend}: {d}" for d in differences(vars(first), vars(trace))]
    return found
