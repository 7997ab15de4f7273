"""What ranks do in the tests of faults: fail, and show that nothing has come of it."""

from __future__ import annotations

import random
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.checkpoint import saving
from fsshard.errors import FsshardError
from tests.portability.runs import Run, unlike

Outcome = tuple[str, str, dict[int, str]]  # kind, message, failures by rank


# ------------------------------------------------------------------------------------------------ tools


def outcome(call: Callable[[], Any]) -> Outcome:
    """How a call ended; an error that is none of ours is not caught."""
    try:
        call()
    except FsshardError as error:
        return type(error).__name__, str(error), getattr(error, "failures", {})
    return "nothing", "", {}


def generators() -> dict[str, Any]:
    """The state of all of this process."""
    numbers = numpy.random.get_state()
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": [str(n) for n in numbers]}


def everything(run: Run) -> dict[str, Any]:
    """All that a failure must leave as it was."""
    return {**run.whole(), "rng": generators()}


def refused(run: Run, call: Callable[[], Any], folder: Path | None = None) -> tuple[Outcome, list[str]]:
    """How a call ended, and what it changed: in the run, and in the names below a folder."""
    before, names = everything(run), listed(folder)
    found = outcome(call)
    changed = unlike(everything(run), before)
    if listed(folder) != names:
        changed.append(f"the folder: {listed(folder)} instead of {names}")
    return found, changed


def listed(folder: Path | None) -> list[str]:
    """All names below, when every rank is here."""
    dist.barrier()
    names = [] if folder is None else sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    dist.barrier()
    return names


@contextmanager
def no_room(on: bool) -> Iterator[None]:
    """Files of this process end at 3000 bytes; what the disk is full of does not matter."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000 if on else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def trained(backend: str = "fsdp2", steps: int = 2, optimizer: str = "adamw") -> Run:
    run = Run(backend, optimizer)
    run.train(steps)
    return run


def comes_back(run: Run, path: Path, before: dict[str, Any]) -> list[str]:
    """What differs from an earlier :func:`everything` after loading, wherever the run has got to."""
    run.train(1)
    run.load(str(path), verify=True)
    return unlike(everything(run), before)


# ------------------------------------------------------------------------------------------------ saving


def job_refused_saves(folder: str, cases: list[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Saves that fail, one after the other, over a checkpoint that stands; and what each has changed."""
    run, place = trained(), Path(folder) / "ckpt"
    run.save(str(place / "last"))
    before = everything(run)
    run.train(1)
    found = {case: refused(run, lambda case=case: FAULTS[case](run, place, options), place) for case in cases}  # type: ignore[misc]
    return {"found": found, "earlier": comes_back(run, place / "last", before), "latest": fsshard.latest(place)}


def _full(run: Run, place: Path, options: Mapping[str, Any]) -> None:
    with no_room(dist.get_rank() in options.get("on", (0, 1))):
        run.save(str(place / "last"), **{key: value for key, value in options.items() if key != "on"})


def _full_later(run: Run, place: Path, options: Mapping[str, Any]) -> None:
    with no_room(dist.get_rank() == 1):
        handle = run.save(str(place / "last"), block=False)
        handle._thread.join()
    assert handle.done()
    run.save(str(place / "other"))  # the failure is told here, and nothing else is done


def _full_waited_for(run: Run, place: Path, options: Mapping[str, Any]) -> None:
    with no_room(dist.get_rank() == 1):
        run.save(str(place / "last"), block=False).wait()


def _full_then_load(run: Run, place: Path, options: Mapping[str, Any]) -> None:
    with no_room(dist.get_rank() == 0):
        handle = run.save(str(place / "last"), block=False)
        handle._thread.join()
    run.load(str(place / "last"))


def _uncopied(run: Run, place: Path, options: Mapping[str, Any]) -> None:
    """Rank 1 has no memory for its copies. Where one cannot copy, the other does not wait for it in the call."""
    with (
        mock.patch.object(saving.Staging, "copy", side_effect=OSError(12, "Cannot allocate memory"))
        if (dist.get_rank() == 1)
        else nullcontext()
    ):
        handle = run.save(str(place / "last"), block=False)
    handle.wait()


def _file_later(run: Run, place: Path, options: Mapping[str, Any]) -> None:
    handle = run.save(str(place / "file"), block=False)  # returns: what is below the path is the thread's affair
    handle.wait()


def _vanished(run: Run, place: Path, options: Mapping[str, Any]) -> None:
    write = saving.write

    def lost(path: Path, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            while path.parent.exists():  # it stays if rank 0 makes its file just when what was there is gone
                shutil.rmtree(path.parent, ignore_errors=True)
        return write(path, *args, **kwargs)

    with mock.patch.object(saving, "write", lost):
        run.save(str(place / "last"))


def _unseen(run: Run, place: Path, options: Mapping[str, Any]) -> None:
    """Rank 1 has another file system there."""
    with mock.patch.object(Path, "is_dir", return_value=False) if dist.get_rank() == 1 else nullcontext():
        run.save(str(place / "last"))


def _function(run: Run, place: Path, options: Mapping[str, Any]) -> None:
    run.save(str(place / "last"), hooks={"at": [1, len]})


def _function_on_one(run: Run, place: Path, options: Mapping[str, Any]) -> None:
    run.save(str(place / "last"), hook=len if dist.get_rank() == 1 else None)


def _another_call(run: Run, place: Path, options: Mapping[str, Any]) -> None:
    run.save(str(place / ("elsewhere" if dist.get_rank() else "last")), timeout=20.0)


def _never_came(run: Run, place: Path, options: Mapping[str, Any]) -> None:
    if dist.get_rank() == 1:
        dist.barrier()  # of training, in which the other one is late
        run.save(str(place / "last"), timeout=20.0)  # hears at once that it is too late
    try:
        run.save(str(place / "last"), timeout=0.3)
    finally:
        dist.barrier()


FAULTS: dict[str, Callable[[Run, Path, Mapping[str, Any]], Any]] = {
    "plain": lambda run, place, options: run.save(str(place / "last")),
    "plain, not blocking": lambda run, place, options: run.save(str(place / "last"), block=False).wait(),
    "full": _full,
    "full for one": lambda run, place, options: _full(run, place, {"on": (1,)}),
    "full for rank 0": lambda run, place, options: _full(run, place, {"on": (0,)}),
    "full, not blocking": _full_later,
    "full, waited for": _full_waited_for,
    "full, then load": _full_then_load,
    "no memory, not blocking": _uncopied,
    "file, not blocking": _file_later,
    "vanished": _vanished,
    "unseen": _unseen,
    "function": _function,
    "function on one": _function_on_one,
    "link": lambda run, place, options: run.save(str(place / "link")),
    "file": lambda run, place, options: run.save(str(place / "file")),
    "below a file": lambda run, place, options: run.save(str(place / "file" / "last")),
    "other things": lambda run, place, options: run.save(str(place / "other things")),
    "keep": lambda run, place, options: run.save(str(place / "last"), keep=1),
    "another call": _another_call,
    "never came": _never_came,
}


def job_saves_again(folder: str) -> list[str]:
    """After failures of all kinds the same ranks save; what differs when it is loaded."""
    run, place = trained(), Path(folder) / "ckpt"
    run.save(str(place / "last"))
    for case in ("full for one", "never came", "vanished", "full, not blocking", "no memory, not blocking"):
        assert outcome(lambda case=case: FAULTS[case](run, place, {}))[0] == "CheckpointError", case  # type: ignore[misc]
        run.train(1)
        before = everything(run)
        run.save(str(place / "last"))
        different = comes_back(run, place / "last", before)
        if different:
            return [case, *different]
    return []


def job_leaves_while_it_saves(folder: str) -> None:
    """The job ends while a thread writes."""
    trained(steps=1).save(f"{folder}/last", block=False, weight=torch.ones(4 << 20))


def job_keep(folder: str) -> list[list[str]]:
    run, found = trained(steps=1), []
    for step in range(5):
        run.save(f"{folder}/step-{step}", keep=2, block=step % 2 == 0)
        fsshard.wait_for_saves()
        found.append(listed_dirs(Path(folder)))
    return found


def listed_dirs(folder: Path) -> list[str]:
    dist.barrier()
    names = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    return names


# ------------------------------------------------------------------------------------------------ loading


def job_save(folder: str) -> None:
    """The checkpoint that is damaged in all ways, and another one of the same shape."""
    run = trained()
    run.save(f"{folder}/good")
    run.train(1)
    run.save(f"{folder}/other")


def job_refused_loads(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Loads that fail, one after the other; what each has changed, and whether the good one loads in the end."""
    run = trained(steps=3)
    found = {
        name: refused(run, lambda name=name, options=options: run.load(f"{folder}/{name}", **options))  # type: ignore[misc]
        for name, options in cases.items()
    }
    run.load(f"{folder}/good", verify=True)
    return {"found": found, "good": unlike(run.whole(), trained().whole())}


class Other(nn.Module):
    """Of tests.portability's net: one layer less, one more, one of another shape, one of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6, bias=False)
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.extra = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self.embed(x)) * self.scale


class Fitting(Other):
    """Nothing is misshaped."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)


def job_another_model(folder: str) -> dict[str, Any]:
    """Strict, not strict with another shape, and not strict."""
    other, fitting = fsshard.wrap(Other(), backend="ddp"), fsshard.wrap(Fitting(), backend="fairscale")
    before = [other.state_dict(), fitting.state_dict()]
    found = {
        "strict": outcome(lambda: fsshard.load(f"{folder}/good", other)),
        "shape": outcome(lambda: fsshard.load(f"{folder}/good", other, strict=False)),
        "dtype": outcome(lambda: fsshard.load(f"{folder}/good", fitting)),
    }
    changed = unlike([other.state_dict(), fitting.state_dict()], before)
    loaded = fsshard.load(f"{folder}/good", fitting, strict=False)
    return {
        **found,
        "changed": changed,
        "missing": loaded.missing,
        "unexpected": loaded.unexpected,
        "extra": unlike(fitting.state_dict()["extra.weight"], before[1]["extra.weight"]),
        "state": {key: value.clone() for key, value in fitting.state_dict().items()},
    }


def job_another_optimizer(folder: str) -> dict[str, Any]:
    """Of another class, with other groups, of another name."""
    sgd, groups = trained(optimizer="sgd"), trained(optimizer="groups")
    adamw = trained()
    path = f"{folder}/good"
    found = {
        "class": refused(sgd, lambda: fsshard.load(path, sgd.model, sgd.optimizer)),
        "class, not strict": refused(sgd, lambda: fsshard.load(path, sgd.model, sgd.optimizer, strict=False)),
        "groups": refused(groups, lambda: fsshard.load(path, groups.model, groups.optimizer, strict=False)),
        "name": refused(adamw, lambda: fsshard.load(path, adamw.model, {"inner": adamw.optimizer})),
        "plain": refused(adamw, lambda: fsshard.load(path, adamw.model, adamw.optimizer.inner)),
        "number": refused(adamw, lambda: fsshard.load(path, adamw.model, step=adamw.step)),
        "unknown": refused(adamw, lambda: fsshard.load(path, adamw.model, nothing=adamw.scheduler)),
    }
    return found


class Stubborn:
    """An object that takes no state, on one rank."""

    def __init__(self, rank: int | None) -> None:
        self.rank, self.value = rank, 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]
        if dist.get_rank() == self.rank:
            raise KeyError("the schedule of another day")


def job_refusing_object(folder: str) -> dict[str, Any]:
    run, thing = trained(), Stubborn(None)
    thing.value = 5
    run.save(f"{folder}/stubborn", thing=thing)
    run.train(1)
    stubborn = Stubborn(1)
    stubborn.value = 7
    found = refused(run, lambda: run.load(f"{folder}/stubborn", thing=stubborn))
    return {"found": found, "value": stubborn.value}


class Choosy(nn.Linear):
    """A module that takes no extra state, on one rank."""

    refusing = False

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("count", torch.zeros(3))

    def get_extra_state(self) -> dict[str, int]:
        return {"turn": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        if self.refusing:
            raise ValueError("not my turn")


def job_refusing_module(folder: str) -> dict[str, Any]:
    """Buffers, schedule and weights after a load that the module's own code ended on rank 1."""
    module = Choosy()
    model = fsshard.wrap(module, backend="ddp")
    thing = Stubborn(None)
    fsshard.save(f"{folder}/choosy", model, thing=thing)
    with torch.no_grad():
        module.count.add_(5)  # type: ignore[operator]
        module.weight.add_(1)
    thing.value, before, drawn = 8, model.state_dict(), generators()
    module.refusing = dist.get_rank() == 1
    found = outcome(lambda: fsshard.load(f"{folder}/choosy", model, thing=thing))
    return {"found": (found, unlike([model.state_dict(), generators()], [before, drawn])), "value": thing.value}


def job_save_by_rank(folder: str) -> None:
    run = trained()
    run.save(f"{folder}/by-rank", place=torch.tensor([dist.get_rank()]), thing=Positioned(dist.get_rank()), lr=0.5)


class Positioned:
    """What differs between ranks."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def job_load_by_rank(folder: str) -> dict[str, Any]:
    run, thing = trained(), Positioned(9)
    if dist.get_world_size() == 2:
        loaded = run.load(f"{folder}/by-rank", thing=thing)
        return {"state": loaded.state["place"].tolist(), "position": thing.position, "lr": loaded.state["lr"]}
    found = refused(run, lambda: run.load(f"{folder}/by-rank", thing=thing))
    loaded = run.load(f"{folder}/by-rank")
    return {"found": found, "position": thing.position, "per_rank": loaded.per_rank, "state": sorted(loaded.state)}


def job_generators(folder: str) -> list[bool]:
    """Whether all three draw what they drew after the save; and whether ``rng=False`` leaves them alone."""

    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(numpy.random.rand())

    run = trained(steps=1)
    run.save(f"{folder}/rng")
    first, second = draw(), draw()
    run.load(f"{folder}/rng")
    again = draw()
    run.load(f"{folder}/rng", rng=False)
    return [again == first, draw() == second]


def job_save_there(path: str) -> None:
    trained().save(path)
