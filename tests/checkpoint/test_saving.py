"""fsshard.save and fsshard.load: what ranks must agree on, and what a checkpoint takes.

Tests fsshard/checkpoint/rng.py too.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import fsshard
from fsshard.checkpoint import dividing, parts, saving
from fsshard.checkpoint.arguments import combine_states
from fsshard.checkpoint.format.division import Division
from fsshard.checkpoint.format.index import read_index
from fsshard.checkpoint.rng import capture, derive, restore
from fsshard.comm.agreement import Channel
from fsshard.errors import CheckpointError, ConfigurationError, CorruptCheckpoint
from fsshard.launching.leaving import finish_before_leaving
from fsshard.launching.pool import RankPool
from tests.models import Spectral, batch, net, take_step
from tests.on_ranks import on_backends, on_ranks
from tests.portability.runs import unlike
from tests.sets import often
from tests.training_runs import check_equal


class Growing(nn.Module):
    """Its extra state is a tensor whose size is its own affair."""

    def __init__(self, history: int) -> None:
        super().__init__()
        self.layer, self.history = nn.Linear(4, 2), torch.arange(float(history))

    def get_extra_state(self) -> Tensor:
        return self.history

    def set_extra_state(self, state: Tensor) -> None:
        self.history = state

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def trained(module: nn.Module, backend: str = "fsdp2") -> tuple[fsshard.ShardedModule, fsshard.ShardedOptimizer]:
    model = fsshard.wrap(module, backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: fsshard.ShardedModule, optimizer: fsshard.ShardedOptimizer) -> None:
    dtype = next(model.parameters()).dtype
    model(batch(0).to(torch.float64 if dtype == torch.float64 else torch.float32)).square().mean().backward()
    take_step(optimizer)


def refused(work: Callable[[], Any]) -> str:
    """The error's kind and text, the same on every rank."""
    try:
        work()
    except (CheckpointError, ConfigurationError) as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


@on_ranks()
def test_ranks_that_call_differently_are_told_how(tmp_path: Any) -> None:
    folder = str(tmp_path)
    model, optimizer = trained(net())
    rank, path = dist.get_rank(), f"{folder}/last"
    fsshard.save(path, model, optimizer)
    more = {"extra": torch.ones(3)} if rank else {}
    first = optimizer if rank == 0 else None
    found = {
        "key": refused(lambda: fsshard.save(path, model, optimizer, timeout=20, **more)),
        "optimizer": refused(lambda: fsshard.save(path, model, first, timeout=20)),
        "block": refused(lambda: fsshard.save(path, model, optimizer, timeout=20, block=rank == 0).wait()),
        "load": refused(lambda: fsshard.load(path, model, first, timeout=20)),
        "strict": refused(lambda: fsshard.load(path, model, strict=rank == 0, timeout=20)),
        "afterwards": refused(lambda: fsshard.load(path, model, optimizer)),
    }
    assert found.pop("afterwards") == "taken"
    for case, text in found.items():
        assert text.startswith("CheckpointError: all 2 ranks must make the same call; nothing was done"), case
    assert "extra=" in found["key"] and "block=False" in found["block"] and "strict=False" in found["strict"]


@on_ranks()
def test_each_argument_says_what_it_takes(tmp_path: Any) -> None:
    folder = str(tmp_path)
    model, optimizer = trained(net())
    path = f"{folder}/last"
    fsshard.save(path, model, optimizer)
    ema = {name: parameter.detach() for name, parameter in model.named_parameters()}
    unknown = model
    scaler, rates = torch.amp.GradScaler("cpu"), ExponentialLR(optimizer, 0.9)
    places = {
        "got a int; pass it by name: step=3": (3,),
        "got a dict; pass it by name: NAME=...": ({"step": 3},),
        "got a GradScaler; pass it by name: scaler=...": (scaler,),
        "in the place of scaler, or None, got a ExponentialLR; pass it by name: scheduler=...": (None, rates),
        "in the place of scheduler, or None, got a EMA; pass it by name: ema=...": (fsshard.EMA(model),),
    }
    for text, given in places.items():
        assert all(
            text in refused(lambda given=given, call=call: call(path, model, optimizer, *given))
            for call in (fsshard.save, fsshard.load)
        )
    fsshard.save(path, model, optimizer, rates, scaler, step=3, seen={"step": 3}, ema=fsshard.EMA(model))
    found = fsshard.load(path, model, optimizer, rates, scaler)
    assert found.state["step"] == 3 and found.state["seen"] == {"step": 3}
    fsshard.save(path, model, optimizer)
    found = {
        "a path first": refused(lambda: fsshard.save(unknown, path)),  # type: ignore[arg-type]
        "expected seconds": refused(lambda: fsshard.save(path, model, timeout="1")),  # type: ignore[arg-type]
        "takes True or False": refused(lambda: fsshard.load(path, model, strict=optimizer)),  # type: ignore[arg-type]
        "an option of fsshard.load": refused(lambda: fsshard.save(path, model, verify=3)),
        "several models come by name": refused(lambda: fsshard.save(path, model, other=model)),
        "without '/'": refused(lambda: fsshard.save(path, model, {"a/b": optimizer})),
        "at least 2": refused(lambda: fsshard.save(f"{path}-1", model, keep=1)),
        "a name with a number": refused(lambda: fsshard.save(path, model, keep=2)),
        "objects/ema[": refused(lambda: fsshard.save(path, model, ema=ema)),
        "a function": refused(lambda: fsshard.save(path, model, fn=refused)),
    }
    for text, said in found.items():
        assert text in said


def job_remembered(folder: str, backend: str, block: bool) -> list[tuple[str, int, bool, bool]]:
    """How often ranks tell what they hold, if training waits for others, and whether what is loaded was saved."""
    model, optimizer = trained(net(), backend)
    rank, found, done, waits = dist.get_rank(), [], Channel._done, []

    def counted(*given: Any) -> None:
        waits.append(threading.current_thread() is threading.main_thread())
        done(*given)

    counting = mock.patch.object(Channel, "_done", counted)
    for what, state in {
        "first": {},
        "again": {},
        "with more": {"weight": torch.ones(4)},
        "with its own on each rank": {"weight": torch.ones(4) * rank},
        "the same again": {"weight": torch.ones(4) * (1 + rank)},
        "one has more": {"weight": torch.ones(4 + rank) * rank},
        "and again": {"weight": torch.ones(4 + rank) * rank},
    }.items():
        step(model, optimizer)
        waits.clear()
        with mock.patch.object(dividing, "announced_by", side_effect=dividing.announced_by) as told, counting:
            handle = fsshard.save(f"{folder}/last", model, optimizer, block=block, **state)
            own = {key: value.clone() for key, value in model.state_dict().items()}
            step(model, optimizer)  # of what was saved nothing
            handle.wait()
        loaded = fsshard.load(f"{folder}/last", model, optimizer)
        same = not unlike([dict(model.state_dict()), loaded.state], [own, state])
        found.append((what, told.call_count, any(waits), same))
    return found


# Calls of training's thread over the channel are none where a rank holds what it held.
REMEMBERED = {
    "first": (1, 1, True, True),
    "again": (0, 0, False, False),
    "with more": (1, 1, True, True),
    "with its own on each rank": (1, 1, False, False),
    "the same again": (0, 1, True, True),
    "one has more": (1, 1, False, True),
    "and again": (0, 1, True, False),  # rank 0 has nothing to remember: it had copied, and the ranks divided copies
}


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_who_writes_what_is_agreed_once(ranks: RankPool, tmp_path: Any, backend: str, block: bool) -> None:
    for rank, found in enumerate(ranks.run(job_remembered, 2, str(tmp_path), backend, block)):
        for what, told, waits, same in found:
            expected = REMEMBERED[what]
            assert (told, waits, same) == (expected[0 if block else 1], block or expected[2 + rank], True), what


@on_backends(["ddp", "fairscale", "fsdp", "fsdp2"])
def test_what_is_loaded_in_inference_mode_can_be_trained(tmp_path: Any, backend: str) -> None:
    folder = str(tmp_path)
    model, optimizer = trained(net(), backend)
    fsshard.save(f"{folder}/last", model, optimizer)
    with torch.inference_mode():
        fsshard.load(f"{folder}/last", model, optimizer)
    step(model, optimizer)  # raises "Inplace update to inference tensor" if anything was made in that mode


@on_ranks()
def test_not_strict_casts_state_with_its_parameter(tmp_path: Any) -> None:
    folder = str(tmp_path)
    model, optimizer = trained(nn.Linear(4, 3).double())
    fsshard.save(f"{folder}/double", model, optimizer)
    other, its = trained(nn.Linear(4, 3))
    fsshard.load(f"{folder}/double", other, its, strict=False)
    whole = [value.float() for value in model.state_dict().values()]
    same = all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), whole, strict=True))
    step(other, its)
    assert [str(state["exp_avg"].dtype) for state in its.state_dict()["state"].values()] == ["torch.float32"] * 2
    assert same


@on_ranks()
def test_extra_state_is_as_large_as_it_was(tmp_path: Any) -> None:
    folder = str(tmp_path)
    model, optimizer = trained(Growing(3))
    fsshard.save(f"{folder}/last", model, optimizer)
    other, _ = trained(Growing(0))
    fsshard.load(f"{folder}/last", other)
    history = other.history
    assert history.tolist() == [0.0, 1.0, 2.0]


@on_ranks()
def test_ranks_keep_their_own_kinds_of_tensors(tmp_path: Path) -> None:
    """Zeros of another dtype and shape on each rank have the same bytes."""
    model, _ = trained(net())
    rank = dist.get_rank()
    mine = torch.zeros(3, 2, dtype=torch.int32) if rank else torch.zeros(2, 3)
    torch.set_default_device("meta")  # what a script sets for its models is none of a checkpoint's business
    try:
        fsshard.save(tmp_path / "last", model, mine=mine)
        found = fsshard.load(tmp_path / "last", model).state["mine"]
    finally:
        torch.set_default_device(None)  # "cpu" would have every call of torch go through Python from then on
    assert str(found.device) == "cpu"
    check_equal(mine, found)


@on_ranks()
def test_two_jobs_that_save_into_one_folder(tmp_path: Path) -> None:
    """Each rank is a job of its own, and they save in turns; return after each save the latest, and what is kept."""
    folder = str(tmp_path)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("jobs", "data"))
    model = fsshard.wrap(net(), backend="fsdp2", device_mesh=mesh["data"], replicated={})
    found = []
    for number, job in enumerate([0, 0, 0, 1, 1, 0, 1, 0, 0], start=1):
        if dist.get_rank() == job:
            fsshard.save(f"{folder}/step-{number}", model, keep=2)
        dist.barrier()
        newest = fsshard.latest(folder)
        found.append((newest.name, sorted(path.name for path in Path(folder).glob("step-*"))))
        dist.barrier()
    for number, (newest, kept) in enumerate(found, start=1):
        assert newest == f"step-{number}"
        assert kept == [f"step-{n}" for n in (number - 1, number) if n]


class TwoParts(nn.Module):
    """Two parts, of which a loss reaches one or both, as in a GAN; their complex layers are units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 6), Spectral(6))
        self.second = nn.Sequential(Spectral(6), nn.Linear(6, 1))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        made = self.first(x)
        return self.second(made if both else made.detach()).mean()


@pytest.mark.parametrize("order", [[True, False], [False], [False, True]])
@pytest.mark.parametrize(("backend", "world_size"), [("fsdp", 1), ("fsdp", 2), ("fsdp2", 1), ("fsdp2", 2), ("none", 1)])
@on_ranks()
def test_behind_a_backward_that_stops_before_a_unit(
    tmp_path: Path, backend: str, world_size: int, order: list[bool]
) -> None:
    """Save behind backward passes, of which some end before the first part."""
    models = [fsshard.wrap(TwoParts(), backend=backend, find_unused_parameters=True) for _ in range(2)]
    optimizers = [fsshard.build_optimizer(model, torch.optim.Adam, lr=0.01) for model in models]
    for both in order:
        models[0](batch(0), both).backward()
        take_step(optimizers[0])
    pending = models[0](batch(0), order[0])  # its backward comes later
    fsshard.save(tmp_path / "saved", models[0], optimizers[0])
    pending.backward()
    fsshard.load(tmp_path / "saved", models[1], optimizers[1])
    for one, other in (models, optimizers):
        check_equal(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("whole", [True, False])
@on_ranks()
def test_a_checkpoint_without_all_weights_is_an_error_of_the_save(tmp_path: Path, whole: bool) -> None:
    """A rank that forgets its part of a weight, or all of it, as a fault of an engine's would have it."""
    path = str(tmp_path / "last")
    model, _ = trained(net())
    fsshard.save(path, model)
    real = parts._add_model

    def lacks(collected: Any, *rest: Any) -> None:
        real(collected, *rest)
        if whole or dist.get_rank():
            del collected.parts["model/first.weight"]

    with mock.patch.object(parts, "_add_model", lacks), pytest.raises(CheckpointError) as told:
        fsshard.save(path, model)
    fsshard.load(path, model)
    told = str(told.value)
    assert "the ranks do not hold all of model/first.weight; nothing was saved" in told


# ------------------------------------------------------------------------------------------------ leaving


class Stuck:
    """A save on a file system that does not answer: nothing moves until it is released."""

    call, patience, path, total, bytes_written = "fsshard.save('ckpt/last')", 0.05, Path("ckpt/last"), 4, 1

    def __init__(self) -> None:
        self.ticks, self.released, self.hurried = 0, threading.Event(), False
        self.channel, self.staging = self, self
        self.items: list[Any] = []

    def run(self) -> None:
        self.released.wait()

    def hurry(self) -> None:
        self.hurried = True

    def give_back(self) -> None:
        pass


def test_leaving_waits_for_a_save_no_longer_than_its_limit() -> None:
    job = Stuck()
    handle = saving.SaveHandle(job)
    handle._start()
    with pytest.raises(CheckpointError, match=r"save\('ckpt/last'\) has not moved for 0\.05 s, 25% written; it was"):
        finish_before_leaving(lost=True)
    assert job.hurried and not handle.done() and handle._guard is not None and not handle._guard.is_alive()
    finish_before_leaving()  # it is told once
    job.released.set()
    handle.wait(60)


def end_with_a_stuck_save() -> None:
    job = Stuck()
    saving.SaveHandle(job)._start()


def test_a_process_ends_with_a_save_that_is_stuck() -> None:
    process = multiprocessing.get_context("forkserver").Process(target=end_with_a_stuck_save)
    process.start()
    process.join(100)
    ended = process.exitcode
    process.kill()
    assert ended == 0


# ------------------------------------------------------------------------------------------------ several


def schedulers(optimizer: fsshard.ShardedOptimizer, how: str) -> Any:
    both = [StepLR(optimizer, 2), ExponentialLR(optimizer, 0.5)]
    return both if how == "list" else dict(zip(("body", "head"), both, strict=True))


def states(several: Any) -> list[Any]:
    return [one.state_dict() for one in (several.values() if isinstance(several, dict) else several)]


@pytest.mark.parametrize("how", ["list", "dict"])
@on_ranks()
def test_several_schedulers(tmp_path: Path, how: str) -> None:
    path = str(tmp_path / "c")
    model, optimizer = trained(net())
    mine, fresh = schedulers(optimizer, how), schedulers(optimizer, how)
    for _ in range(3):
        optimizer.step()
        for one in mine.values() if how == "dict" else mine:
            one.step()
    fsshard.save(path, model, optimizer, mine)
    fsshard.load(path, model, optimizer, fresh)
    other = schedulers(optimizer, "dict" if how == "list" else "list")
    few = fresh[:1] if how == "list" else {"body": fresh["body"]}
    wrong = [refused(lambda given=given: fsshard.load(path, model, optimizer, given)) for given in (other, few)]
    saved = states(mine)
    loaded = states(fresh)
    (other, few) = wrong
    assert saved == loaded and saved[0]["last_epoch"] == 3
    assert "was given" in other and "was given" in few and other.startswith("CheckpointError")


def test_what_is_no_group_of_objects_stays() -> None:
    given = {"numbers": [1, 2], "mixed": [1, torch.nn.Linear(1, 1)], "none": [], "module": torch.nn.ModuleList()}
    assert all(combine_states(value) is value for value in given.values())


# ------------------------------------------------------------------------------------------------ paths


@on_ranks()
def test_paths_from_the_home_directory(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        model, optimizer = trained(net())
        saved = fsshard.save("~/runs/c", model, optimizer).path
        paths = [saved, fsshard.load("~/runs/c", model, optimizer).path, fsshard.latest("~/runs")]
    assert [*map(str, paths)] == 3 * [str(tmp_path / "runs" / "c")]


# ------------------------------------------------------------------------------------------------ generators


def draws() -> list[Any]:
    gauss = [random.gauss(0, 1), float(numpy.random.normal())]  # both keep the second of a pair for later
    return [torch.rand(3).tolist(), torch.randn(20).tolist(), random.random(), numpy.random.rand(3).tolist(), gauss]


@pytest.fixture
def as_before() -> Any:
    state = capture(torch.device("cpu"))
    yield
    restore(state, torch.device("cpu"))


@pytest.mark.usefixtures("as_before")
def test_new_ranks_differ_and_are_always_alike() -> None:
    state = capture(torch.device("cpu"))
    drawn = []
    for rank in (2, 3, 2):
        derive(state, rank, torch.device("cpu"))
        drawn.append(draws())
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("key", ["torch", "python", "numpy"])
def test_a_state_that_is_none(key: str) -> None:
    state = capture(torch.device("cpu"))
    for wrong in ({**state, key: 3}, {k: v for k, v in state.items() if k != key}):
        with pytest.raises(CorruptCheckpoint, match="state of the random number generators"):
            restore(wrong, torch.device("cpu"))


# ------------------------------------------------------------------------------------------------ quantization


def observed() -> nn.Module:
    """Fake-quantized, whose observers have a shape after the first forward only."""
    import torch.ao.quantization as quantization

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).train()
    module.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    return quantization.prepare_qat(module)


@on_backends(["ddp", "fsdp2"])
def test_observers_that_take_their_shape_from_data_resume(backend: str, tmp_path: Path) -> None:
    def step(model: Any, optimizer: Any, number: int) -> None:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        model(x).square().mean().backward()
        take_step(optimizer)

    def made() -> tuple[Any, Any]:
        model = fsshard.wrap(observed(), backend=backend)
        return model, fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-2)

    stayed = made()
    for number in range(2):
        step(*stayed, number)
    fsshard.save(tmp_path / "saved", *stayed)
    moved = made()
    fsshard.load(tmp_path / "saved", *moved)
    for run in (stayed, moved):
        step(*run, 2)
    check_equal(*(run[0].state_dict() for run in (stayed, moved)))


SHAPES: dict[str, dict[str, Any]] = {
    "ddp": {"backend": "ddp"},
    "fsdp": {"backend": "fsdp"},
    "fsdp2": {"backend": "fsdp2"},
    "fairscale": {"backend": "fairscale", "implementation": "native"},
    "hybrid fsdp": {"backend": "fsdp", "hybrid": True},
    "hybrid fsdp2": {"backend": "fsdp2", "hybrid": True},
}


def job_by_rule(folder: str, settings: dict[str, Any]) -> tuple[dict[str, str], dict[str, int], bool]:
    """Which tensors of the index are divided by a rule or listed, how many each rank told, and whether all is read."""
    settings = dict(settings)
    if settings.pop("hybrid", False):
        settings["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fsshard.wrap(net(), **settings)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=0.1)
    step(model, optimizer)
    told = []
    rows = dividing.announced_by

    def counted(*given: Any, **options: Any) -> Any:
        found = rows(*given, **options)
        told.append(len(found))
        return found

    with mock.patch.object(dividing, "announced_by", counted):
        fsshard.save(f"{folder}/last", model, optimizer)
    own = {key: value.clone() for key, value in model.state_dict().items()}
    kinds = {
        name: "rule" if isinstance(info.pieces, Division) else "list"
        for name, info in read_index(f"{folder}/last").tensors.items()
    }
    step(model, optimizer)
    fsshard.load(f"{folder}/last", model, optimizer, verify=True)
    same = all(torch.equal(own[key], value) for key, value in model.state_dict().items())
    return kinds, {"told": sum(told)}, same


@pytest.mark.parametrize("shape", often(SHAPES, "ddp", "fairscale", "hybrid fsdp", "hybrid fsdp2"))
def test_ranks_are_divided_by_rules_and_one_speaks_for_all(ranks: RankPool, tmp_path: Path, shape: str) -> None:
    answers = ranks.run(job_by_rule, 4, str(tmp_path), SHAPES[shape])
    for kinds, _, same in answers:
        assert same
        for name, kind in kinds.items():
            is_weight = name.startswith("model/") and name != "model/steps"  # a buffer, which is rank 0's
            is_moment = name.endswith(("/exp_avg", "/exp_avg_sq")) and shape != "fairscale"
            if is_weight or is_moment:
                assert kind == "rule", name
    # Each tensor is told once; counts of steps by each copy of the first shard.
    tensors = len(answers[0][0])
    counts = sum(name.endswith("/step") for name in answers[0][0])
    assert tensors <= sum(told["told"] for _, told, _ in answers) <= tensors + counts


@on_ranks()
def test_an_optimizers_state_dict_is_state_like_any_other(tmp_path: Path) -> None:
    folder = str(tmp_path)
    model, optimizer = trained(net(), "fsdp2")
    given = optimizer.state_dict()
    fsshard.save(f"{folder}/last", model, extra=given)
    taken = fsshard.load(f"{folder}/last", model)["extra"]
    assert taken["param_groups"] == given["param_groups"]
    check_equal(taken["state"], given["state"])
