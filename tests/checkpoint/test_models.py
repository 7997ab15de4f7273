"""Several models in one checkpoint and under one clip; bare replicas, whose gradients are averaged by hand, judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim.lr_scheduler import ExponentialLR

import fsshard
from fsshard.checkpoint.inspecting import inspect
from fsshard.cli import app as cli
from fsshard.errors import AlreadyWrapped, CheckpointError, ConfigurationError, StateDictError
from tests.models import Spectral, take_step
from tests.on_ranks import on_ranks
from tests.optimizers import average
from tests.sets import often
from tests.training_runs import ENGINES, NAMES, check_equal

FSDP1, FSDP2 = ENGINES[3], ENGINES[4]


def generator() -> nn.Module:
    """Complex rows that ranks cannot share evenly, and statistics."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Tanh(), Spectral(7), nn.Linear(7, 5))


def critic(*, tied: bool = False) -> nn.Module:
    """Two layers share their weight, where that is asked for (FSDP1 then sums two forwards' parts in another order)."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(5, 5), nn.LeakyReLU(), nn.Linear(5, 5), nn.LeakyReLU(), nn.Linear(5, 1))
    if tied:
        layers[2].weight = layers[0].weight
    return layers


class Training:
    """A GAN, of bare replicas where there is no engine."""

    def __init__(
        self, engine: dict[str, Any] | None, other: dict[str, Any] | None = None, *, tied: bool = False
    ) -> None:
        adam, self.bare = torch.optim.Adam, engine is None
        g, d = generator(), critic(tied=tied)
        if engine is not None:
            g = fsshard.wrap(g, broadcast_buffers=False, **engine)
            d = fsshard.wrap(d, broadcast_buffers=False, **(other or engine))
        build = (lambda model: adam(model.parameters(), 1e-2)) if self.bare else self.build
        self.models: dict[str, Any] = {"g": g, "d": d}
        self.optimizers = {name: build(model) for name, model in self.models.items()}
        self.schedulers = {name: ExponentialLR(each, 0.9) for name, each in self.optimizers.items()}

    @staticmethod
    def build(model: Any) -> Any:
        return fsshard.build_optimizer(model, torch.optim.Adam, lr=1e-2)

    def run(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            seed = torch.Generator().manual_seed(31 * step + dist.get_rank())
            real, z = torch.randn(4, 5, generator=seed), torch.randn(4, 3, generator=seed)
            g, d = self.models.values()
            losses += [self.step("d", softplus(-d(real)).mean() + softplus(d(g(z).detach())).mean())]
            losses += [self.step("g", softplus(-d(g(z))).mean())]
            for scheduler in self.schedulers.values():
                scheduler.step()
        return losses

    def step(self, name: str, loss: Tensor) -> float:
        loss.backward()
        if self.bare:
            average(self.models[name])
        self.optimizers[name].step()
        for optimizer in self.optimizers.values():  # the generator's loss has gone through the critic
            optimizer.zero_grad()
        return loss.item()

    def same(self, bare: Training) -> bool:
        found = [self.models[name].state_dict() for name in bare.models]
        wanted = [model.state_dict() for model in bare.models.values()]
        # BatchNorm's statistics are each rank's own; a state dict has rank 0's.
        keys = [[key for key in want if "running" not in key] for want in wanted]
        return all(torch.equal(f[key], w[key]) for f, w, own in zip(found, wanted, keys, strict=True) for key in own)


def job_saved(
    folder: Path, engine: dict[str, Any], other: dict[str, Any] | None, block: bool, tied: bool = False
) -> bool:
    bare, ours = Training(None, tied=tied), Training(engine, other, tied=tied)
    exact = ours.run(range(2)) == bare.run(range(2))
    ema = fsshard.EMA(ours.models["g"], 0.5)
    ema.update()
    for number in (1, 2, 3):
        state = {"ema": ema, "step": 2, "keep": 2, "block": block}
        fsshard.save(folder / f"step-{number}", ours.models, ours.optimizers, ours.schedulers, **state)
    exact &= ours.run(range(2, 3)) == bare.run(range(2, 3))  # while it is written
    fsshard.wait_for_saves()
    return exact and ours.same(bare)


def job_loaded(folder: Path, engine: dict[str, Any], other: dict[str, Any] | None) -> bool:
    """Goes on as replicas that have never stopped."""
    bare, ours = Training(None), Training(engine, other)
    bare.run(range(2))
    path, ema = folder / "step-3", fsshard.EMA(ours.models["g"], 0.5)
    backwards = dict(reversed(ours.models.items()))  # the order of a mapping means nothing
    found = fsshard.load(path, backwards, ours.optimizers, ours.schedulers, ema=ema, verify=True)
    # Statistics of another rank than 0 were not saved: a state dict has rank 0's.
    ours.models["g"].load_state_dict(bare.models["g"].state_dict())
    assert found.state == {"step": 2} and ema.updates == 1 and not found.missing
    return ours.run(range(2, 4)) == bare.run(range(2, 4)) and ours.same(bare)


PAIRS = [
    (FSDP2, None, FSDP1, None),
    (FSDP1, None, ENGINES[1], None),
    (ENGINES[2], None, FSDP2, None),
    (ENGINES[0], None, FSDP2, FSDP1),
    (FSDP2, ENGINES[0], ENGINES[2], None),
]


@pytest.mark.parametrize(("engine", "other", "next_engine", "next_other"), often(PAIRS, PAIRS[0], PAIRS[4]))
def test_two_models_go_on_under_another_engine(
    ranks: Any, tmp_path: Path, engine: Any, other: Any, next_engine: Any, next_other: Any
) -> None:
    assert ranks.run(job_saved, 2, tmp_path, engine, other, engine is FSDP1) == [True] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]  # keep=2
    assert ranks.run(job_loaded, 2, tmp_path, next_engine, next_other) == [True] * 2


def job_one_of_them(folder: Path, name: str) -> dict[str, Tensor]:
    """Loads one model, with its optimizer, on other numbers of ranks."""
    ours = Training({"backend": "none" if dist.get_world_size() == 1 else "fsdp2"}, tied=True)
    before = {other: model.state_dict() for other, model in ours.models.items() if other != name}
    optimizer = ours.optimizers[name]
    fsshard.load(folder / "step-3", {name: ours.models[name]}, {name: optimizer}, rng=False)
    assert int(next(iter(optimizer.state_dict()["state"].values()))["step"]) == 2
    for other, weights in before.items():
        check_equal(dict(ours.models[other].state_dict()), dict(weights))
    return ours.models[name].state_dict()


def test_one_of_them_on_other_numbers_of_ranks_and_for_others(ranks: Any, tmp_path: Path, capsys: Any) -> None:
    assert ranks.run(job_saved, 2, tmp_path, FSDP2, ENGINES[0], True, True) == [True] * 2
    path = tmp_path / "step-3"
    for name, count in (("g", 4), ("d", 1)):
        weights = ranks.run(job_one_of_them, count, tmp_path, name)[0]
        fsshard.export(path, tmp_path / f"{name}.pt", model=name, optimizer=name)
        exported = torch.load(tmp_path / f"{name}.pt", weights_only=True)["model"]
        assert list(exported) == list(weights)
        check_equal(dict(weights), dict(exported))
    assert cli.main(["export", str(path), str(tmp_path / "again.pt"), "--model", "g"]) == 0
    fsshard.export(path, tmp_path / "averaged.pt", model="g", average="ema")
    assert torch.load(tmp_path / "averaged.pt", weights_only=True).keys() == generator().state_dict().keys()
    found = inspect(path, verify=True)
    assert found.ok and found.contents["models"] == {"d": ["d"], "g": ["g", "ema"]}  # type: ignore[union-attr]
    assert cli.main(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert 'models: {"d": ["d"], "g": ["g", "ema"]}' in said and 'tied: {"d.2.weight": "d.0.weight"}' in said
    assert '"backend": "fsdp2, ddp"' in said or '"backend": "ddp, fsdp2"' in said


def job_misused(folder: Path) -> dict[str, str]:
    ours, path, said = Training(FSDP2), folder / "several", {}
    models, optimizers = ours.models, ours.optimizers
    fsshard.save(path, models, optimizers)
    fsshard.save(folder / "one", models["g"], optimizers["g"])
    if dist.get_rank() == 0:
        torch.save(generator().state_dict(), folder / "plain.pt")
    dist.barrier()
    before = {name: model.state_dict() for name, model in models.items()}
    wrong = fsshard.wrap(nn.Linear(2, 2), backend="fsdp2")
    load, save = fsshard.load, fsshard.save
    for text, error, call in (
        ("has the models 'd', 'g'; pass a mapping", CheckpointError, lambda: load(path, models["g"])),
        ("has one model, which has no name", CheckpointError, lambda: load(folder / "one", {"g": models["g"]})),
        ("no model was saved as 'h'", CheckpointError, lambda: load(path, {"h": models["g"]})),
        ("the checkpoint has: 'g'", CheckpointError, lambda: load(path, {"g": models["g"]}, {"d": optimizers["g"]})),
        ("the model 'g'", StateDictError, lambda: load(path, {"g": wrong, "d": models["d"]})),
        ("has one model; pass it alone", ConfigurationError, lambda: load(folder / "plain.pt", models)),
        ("by name, got none", ConfigurationError, lambda: save(path, {})),
        ("different models by name", ConfigurationError, lambda: save(path, {"g": models["g"], "h": models["g"]})),
        ("without '.' and '/'", ConfigurationError, lambda: save(path, {"g.1": models["g"]})),
        ("expected model 'g' to be", ConfigurationError, lambda: save(path, {"g": generator()})),
        ("to be this model's", ConfigurationError, lambda: save(path, {"g": models["g"]}, {"d": optimizers["d"]})),
        ("export each alone", ConfigurationError, lambda: fsshard.export(models, "all.pt")),  # type: ignore[arg-type]
    ):
        with pytest.raises(error) as raised:
            call()
        said[text] = str(raised.value)
    for name, model in models.items():  # all or nothing
        check_equal(dict(model.state_dict()), dict(before[name]))
    load(path, {"g": models["g"], "d": models["d"]}, optimizers)  # as the first says
    load(folder / "one", models["g"])  # and the second
    return said


def test_misuse_is_told(ranks: Any, tmp_path: Path) -> None:
    for said in ranks.run(job_misused, 2, tmp_path):
        assert not [(text, told) for text, told in said.items() if text not in told]
    with pytest.raises(CheckpointError, match="pass model= with one of these names"):
        fsshard.export(tmp_path / "several", tmp_path / "all.pt")
    with pytest.raises(CheckpointError, match="has one model, which has no name"):
        fsshard.export(tmp_path / "one", tmp_path / "all.pt", model="g")


# ------------------------------------------------------------------------------------------------ one clip over both


def job_clipped(engine: dict[str, Any], other: dict[str, Any] | None, p: float) -> None:
    bare, ours = Training(None), Training(engine, other)
    found = []
    for training in (bare, ours):
        g, d = training.models.values()
        d(g(torch.randn(4, 3, generator=torch.Generator().manual_seed(dist.get_rank())))).square().mean().backward()
        if training is bare:
            average(g)
            average(d)
            union = [*g.parameters(), *d.parameters()]
            wide = torch.cat(
                [parameter.grad.abs().double().reshape(-1) for parameter in union if parameter is not None]
            )
            found += [float(torch.linalg.vector_norm(wide, p).float()), float(nn.utils.clip_grad_norm_(union, 0.01, p))]
        else:
            found.append(float(fsshard.clip_grad_norm_({"g": g, "d": d}, 0.01, p)))
            found.append(float(fsshard.clip_grad_norm_([d, g], 1.0, p)))
    exact, torchs, norm, clipped = found
    assert norm == exact and norm == pytest.approx(torchs, rel=1e-6) and clipped == pytest.approx(0.01, rel=1e-4)
    for name, model in bare.models.items():
        ours.optimizers[name].step()
        bare.optimizers[name].step()
        weights = ours.models[name].state_dict()
        for key, value in model.state_dict().items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_one_clip_over_both_is_torchs_over_the_union(ranks: Any, engine: dict[str, Any]) -> None:
    for p in (2.0, float("inf")) if engine in (FSDP1, FSDP2) else (2.0,):
        ranks.run(job_clipped, 2, engine, ENGINES[0] if engine is FSDP2 and p == 2 else None, p)


@on_ranks()
def test_what_cannot_be_clipped_is_told() -> None:
    model, said = fsshard.wrap(critic(), backend="ddp"), []
    for models in ([model, model], [critic()], []):
        with pytest.raises(ConfigurationError) as raised:
            fsshard.clip_grad_norm_(models, 1.0)  # type: ignore[arg-type]
        said.append(str(raised.value))
    for told, text in zip(said, ("one of them twice", "got Sequential", "got none"), strict=True):
        assert text in told


# ------------------------------------------------------------------------------------------------ student and teacher


class Distilled(nn.Module):
    """A student that learns from a frozen teacher, which it has, or is given."""

    def __init__(self, teacher: nn.Module | None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.student = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
        if teacher is not None:
            self.teacher = teacher

    def forward(self, z: Tensor, taught: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(z) if taught is None else taught
        return (self.student(z) - taught).square().mean()


def distil(model: Any, teacher: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(3):
        z = torch.randn(4, 3, generator=torch.Generator().manual_seed(7 * step + dist.get_rank()))
        taught = None
        if teacher is not None:
            with torch.no_grad():
                taught = teacher(z)
        loss = model(z, taught)
        loss.backward()
        if not isinstance(model, fsshard.ShardedModule):
            average(model)
        take_step(optimizer)
        losses.append(loss.item())
    return losses


def frozen() -> nn.Module:
    return generator().eval().requires_grad_(False)


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
@on_ranks()
def test_a_frozen_teacher_beside_a_student_or_inside_of_it(tmp_path: Path, engine: dict[str, Any]) -> None:
    path = tmp_path / "both"
    bare = Distilled(frozen())
    expected = distil(bare, None, torch.optim.Adam(bare.student.parameters(), 1e-2))
    inside = fsshard.wrap(Distilled(frozen()), **engine)
    assert distil(inside, None, Training.build(inside)) == expected
    beside, teacher = fsshard.wrap(Distilled(None), **engine), fsshard.wrap(frozen(), **engine)
    optimizer = Training.build(beside)
    assert distil(beside, teacher, optimizer) == expected
    weights = bare.student.state_dict()
    for model in (inside, beside):
        found = model.state_dict()
        assert all(torch.equal(found[f"student.{key}"], value) for key, value in weights.items())
    fsshard.save(path, {"student": beside, "teacher": teacher}, {"student": optimizer})
    again = fsshard.wrap(Distilled(None), **engine)
    fsshard.load(path, {"student": again})
    check_equal(dict(beside.state_dict()), dict(again.state_dict()))
    with pytest.raises(AlreadyWrapped, match="once"):
        fsshard.wrap(Distilled(teacher), **engine)
