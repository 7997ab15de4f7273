"""fsshard.EMA against torch's own AveragedModel around bare replicas whose gradients are averaged by hand."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsshard
from fsshard.errors import CheckpointError, ConfigurationError, FsshardError, RankMismatch, StateDictError
from fsshard.sharded.averages import KEY
from tests.models import Spectral, take_step, with_adam
from tests.on_ranks import on_backends, on_ranks
from tests.optimizers import average
from tests.training_runs import ranks_of

ENGINES: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("ddp", {}),
    ("fairscale", {}),
    ("fairscale", {"implementation": "native"}),
    ("fsdp", {}),
    ("fsdp2", {}),
]


class Net(nn.Module):
    """Complex weights whose rows two ranks cannot share evenly, a frozen layer, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.spectral = Spectral(7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        return self.last(self.norm(torch.tanh(self.spectral(x))))


def built() -> Net:
    torch.manual_seed(0)
    return Net()


def loss(model: Any, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(31 * step + dist.get_rank())
    return model(torch.randn(4, 5, generator=generator)).square().mean()


def warming(updates: int) -> float:
    return min(0.9, (1 + updates) / (10 + updates))


def train(model: Any, optimizer: Any, steps: range, after: Callable[[], None]) -> None:
    """``average`` stands in for the engine under a bare model."""
    for step in steps:
        loss(model, step).backward()
        if not isinstance(model, fsshard.ShardedModule):
            average(model)
        take_step(optimizer)
        after()


class Bare:
    """A replica and torch's own average, with a decay that may change from update to update."""

    def __init__(self, decay: Any, steps: range, every: int = 1) -> None:
        self.model = built()
        self.averaged = AveragedModel(self.model)
        self.decay, self.every, self.calls, self.updates = decay, every, 0, 0
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        train(self.model, self.optimizer, steps, self.update)

    def update(self) -> None:
        self.calls += 1
        if self.calls % self.every == 0:
            now = self.decay(self.updates) if callable(self.decay) else self.decay
            self.averaged.multi_avg_fn = get_ema_multi_avg_fn(now)
            self.averaged.update_parameters(self.model)
            self.updates += 1

    def average(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.averaged.module.named_parameters()}


def wrapped(backend: str, settings: dict[str, Any]) -> tuple[Any, Any]:
    model = fsshard.wrap(built(), backend=backend, broadcast_buffers=False, **settings)
    return model, fsshard.build_optimizer(model, torch.optim.Adam, lr=1e-2)


def same(got: Any, want: Any) -> bool:
    return all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.covering
@pytest.mark.parametrize(("backend", "settings"), ENGINES)
@pytest.mark.parametrize(("decay", "every"), [(0.9, 1), (warming, 2)])
@on_ranks(ranks_of)
def test_it_is_torchs_average_of_bare_replicas(backend: str, settings: dict[str, Any], decay: Any, every: int) -> None:
    bare = Bare(decay, range(5), every)
    model, optimizer = wrapped(backend, settings)
    ema = fsshard.EMA(model, decay, every=every)
    sent = []

    def update() -> None:
        with CommDebugMode() as mode:
            ema.update()
        sent.append(mode.get_total_counts())

    train(model, optimizer, range(5), update)
    with ema.swapped() as averaged:
        shown = averaged.state_dict()
        with torch.no_grad():
            evaluated = float(loss(averaged.eval(), 9))
    judge = copy.deepcopy(bare.model)
    judge.load_state_dict({**judge.state_dict(), **bare.average()})
    assert same(shown, bare.average()) and evaluated == float(loss(judge.eval(), 9))
    assert same(model.train().state_dict(), bare.model.state_dict()), "weights are back"
    assert same({name: each["average"] for name, each in ema.state_dict()["state"].items()}, bare.average())
    assert sum(sent) == 0 and ema.updates == bare.updates == 5 // every
    held = sum(each[key].nbytes for each in ema.held.state.values() for key in each)
    total = sum(parameter.nbytes for parameter in built().parameters())
    # Padding of FSDP1's flat parameters apart, a rank keeps its share.
    assert held <= (total if backend in ("none", "ddp") else 0.7 * total)


def job_saved(path: Path, backend: str, settings: dict[str, Any]) -> None:
    model, optimizer = wrapped(backend, settings)
    ema = fsshard.EMA(model, warming)
    train(model, optimizer, range(3), ema.update)
    fsshard.save(path, model, optimizer, ema=ema)


def job_resumed(path: Path, backend: str, settings: dict[str, Any]) -> tuple[bool, int]:
    """Goes on under another engine: whether average and weights are those of a replica that has never stopped."""
    bare = Bare(warming, range(5))
    model, optimizer = wrapped(backend, settings)
    ema = fsshard.EMA(model, warming)
    fsshard.load(path, model, optimizer, ema=ema)
    train(model, optimizer, range(3, 5), ema.update)
    with ema.swapped():
        shown = model.state_dict()
    return same(shown, bare.average()), ema.updates


@pytest.mark.parametrize(
    ("one", "other"),
    [(ENGINES[4], ENGINES[5]), (ENGINES[5], ENGINES[3]), (ENGINES[2], ENGINES[1]), (ENGINES[1], ENGINES[4])],
)
def test_it_goes_on_from_a_checkpoint_of_another_engine(ranks: Any, tmp_path: Path, one: Any, other: Any) -> None:
    ranks.run(job_saved, 2, tmp_path / "saved", *one)
    assert ranks.run(job_resumed, 2, tmp_path / "saved", *other) == [(True, 5)] * 2


@on_ranks()
def test_it_is_loaded_to_where_it_is_kept(tmp_path: Path) -> None:
    """And takes no memory beside the weights until the next update."""
    path = tmp_path / "saved"
    model, optimizer = wrapped("fsdp2", {})
    ema = fsshard.EMA(model)
    train(model, optimizer, range(2), ema.update)
    fsshard.save(path, model, optimizer, ema=ema)
    given, loaded = (fsshard.EMA(model, device="meta") for _ in range(2))
    given.load_state_dict(ema.state_dict())
    fsshard.load(path, model, ema=loaded)
    found = [value[KEY].device.type for each in (ema, given, loaded) for value in each.held.state.values()]
    count = len(found) // 3
    assert count and found == ["cpu"] * count + ["meta"] * 2 * count


def job_on_one_rank(path: Path) -> float:
    model, _ = wrapped("none", {})
    ema = fsshard.EMA(model, warming)
    fsshard.load(path, model, ema=ema)
    with ema.swapped():
        return float(model.state_dict()["last.bias"].sum())


def job_sum(path: Path, backend: str) -> float:
    model, optimizer = wrapped(backend, {})
    ema = fsshard.EMA(model, warming)
    train(model, optimizer, range(3), ema.update)
    fsshard.save(path, model, optimizer, ema=ema)
    fsshard.export(path, path.with_suffix(".pt"), average="ema") if dist.get_rank() == 0 else None
    with ema.swapped():
        return float(model.state_dict()["last.bias"].sum())


def test_at_another_number_of_ranks_and_exported(ranks: Any, tmp_path: Path) -> None:
    saved = ranks.run(job_sum, 4, tmp_path / "saved", "fsdp2")
    assert ranks.run(job_on_one_rank, 1, tmp_path / "saved") == saved[:1]
    exported = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert float(exported["last.bias"].sum()) == saved[0] and exported.keys() == built().state_dict().keys()
    with pytest.raises(ConfigurationError, match="the checkpoint has 'ema'"):
        fsshard.export(tmp_path / "saved", tmp_path / "other.pt", average="optimizer")


@on_backends(["fairscale", "fsdp2"])
def test_updates_on_one_rank_are_noticed(backend: str) -> None:
    model, optimizer = wrapped(backend, {})
    ema = fsshard.EMA(model)
    train(model, optimizer, range(2), ema.update if dist.get_rank() == 0 else dict)
    with pytest.raises(RankMismatch) as raised, ema.swapped():
        pass
    with pytest.raises(RankMismatch):
        ema.state_dict()
    told = str(raised.value)
    assert "rank 0 2 of 2 calls, rank 1 0 of 0 calls" in told and "call update() on every rank" in told


@on_ranks()
def test_another_owner_is_noticed() -> None:
    model, optimizer = wrapped("fairscale", {})
    ema = fsshard.EMA(model)
    train(model, optimizer, range(2), ema.update)
    state = ema.state_dict()
    with ema.swapped():
        shown = model.state_dict()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, list(reversed(names))[:4], lr=1e-2)
    rest = fsshard.build_optimizer(model, torch.optim.Adam, list(reversed(names))[4:], lr=1e-2)
    assert rest is not None
    with pytest.raises(FsshardError) as raised, ema.swapped():
        pass
    again = fsshard.EMA(model)  # as the error says
    again.load_state_dict(state)
    with again.swapped():
        assert same(model.state_dict(), shown) and again.updates == 2
    told = str(raised.value)
    assert "call ema.state_dict() before fsshard.build_optimizer" in told


@pytest.mark.parametrize(("backend", "settings"), ENGINES)
@on_ranks(ranks_of)
def test_torchs_average_made_before_wrap(backend: str, settings: dict[str, Any]) -> None:
    bare, module = Bare(0.9, range(3)), built()
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model, optimizer = with_adam(module, backend=backend, broadcast_buffers=False, **settings)
    words = {"fsdp": r"average weights by fsshard\.EMA\(model\)", "fsdp2": r"mixed torch\.Tensor and DTensor"}
    refused = pytest.raises((FsshardError, RuntimeError), match=words[backend]) if backend in words else None
    with refused or contextlib.nullcontext():  # of fsdp2's real weights torch says what a DTensor is
        train(model, optimizer, range(3), lambda: averaged.update_parameters(model))
    assert refused or same(dict(averaged.module.named_parameters()), bare.average())


@on_ranks()
def test_misuse_is_told(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    model, optimizer = wrapped("fsdp2", {})
    ema = fsshard.EMA(model)
    told = []

    def update_the_average() -> None:
        with ema.swapped():
            ema.update()

    for wrong, error in (
        (lambda: fsshard.EMA(built()), ConfigurationError),  # type: ignore[arg-type]
        (lambda: fsshard.EMA(model, 1.5), ConfigurationError),
        (lambda: fsshard.EMA(model, every=0), ConfigurationError),
        (lambda: fsshard.EMA(model, "0.9"), ConfigurationError),  # type: ignore[arg-type]
        (lambda: ema.load_state_dict(optimizer.state_dict()), StateDictError),
        (update_the_average, FsshardError),
        (lambda: fsshard.save(path, wrapped("fsdp2", {})[0], ema=ema), ConfigurationError),
        (lambda: fsshard.save(path, model, {"ema": optimizer}, ema=ema), ConfigurationError),
        (lambda: AveragedModel(model), FsshardError),
        (lambda: fsshard.save(path, model, emas=[ema, ema]), ConfigurationError),
    ):
        with pytest.raises(error) as raised:
            wrong()
        told.append(str(raised.value))
    model, optimizer = wrapped("fsdp2", {})
    fsshard.save(path, model, optimizer)
    with pytest.raises(CheckpointError) as raised:
        fsshard.load(path, model, optimizer, ema=fsshard.EMA(model))
    told = [*told, str(raised.value)]
    texts = [
        "pass what fsshard.wrap returned",
        "from 0 to 1",
        "1 or more",
        "from 0 to 1",
        "calls",
        "within swapped()",
        "another model",
    ]
    texts += [
        "two things",
        "use fsshard.EMA(model)",
        "as in ema=ema, slow=slow_ema",
        "no average was saved as 'ema'",
    ]
    assert len(told) == len(texts)
    for one, text in zip(told, texts, strict=True):
        assert text in one, (one, text)
