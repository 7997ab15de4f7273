"""Disks that are full, files that are damaged, ranks that do not come: an error of ours on every rank, and no loss."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.checkpoint import loading, saving
from fsshard.checkpoint.format.directory import CheckpointTarget
from fsshard.checkpoint.format.index import read_index, sealed
from fsshard.errors import CheckpointError, FsshardError
from fsshard.launching.pool import RankPool
from tests.comm.test_channel import Deaths
from tests.forked import run_script
from tests.on_ranks import on_ranks
from tests.portability.runs import Run, unlike

RANK_0, RANK_1 = "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"
Outcome = tuple[str, str, dict[int, str]]  # kind, message, failures by rank


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


def trained(backend: str = "fsdp2", steps: int = 2, optimizer: str = "adamw") -> Run:
    run = Run(backend, optimizer)
    run.train(steps)
    return run


def check(results: list[dict[str, Any]], expected: dict[str, tuple[str, str]]) -> None:
    """On every rank the error that is expected, and no change."""
    for rank, result in enumerate(results):
        for case, (kind, text) in expected.items():
            (got, message, _), changed = result["found"][case]
            assert got == kind and re.search(text, message), f"rank {rank}, {case}: {got}: {message}"
            assert changed == [], f"rank {rank}, {case}"
    for case in expected:
        assert len({str(result["found"][case][0]) for result in results}) == 1, f"{case}: ranks heard different things"


# ------------------------------------------------------------------------------------------------ saving


@contextmanager
def no_room(*ranks: int) -> Iterator[None]:
    """Files of these ranks end at 3000 bytes; what the disk is full of does not matter."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000 if dist.get_rank() in ranks else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full(run: Run, place: Path, *ranks: int) -> None:
    with no_room(*ranks):
        run.save(str(place / "last"))


def full_later(run: Run, place: Path, then: Callable[[], Any]) -> None:
    with no_room(1):
        handle = run.save(str(place / "last"), block=False)
        handle._thread.join()
    assert handle.done()
    then()  # the failure is told here, and nothing else is done


def uncopied(run: Run, place: Path) -> None:
    """Rank 1 has no memory for its copies. Where one cannot copy, the other does not wait for it in the call."""
    failing = mock.patch.object(saving.Staging, "copy", side_effect=OSError(12, "Cannot allocate memory"))
    with failing if dist.get_rank() == 1 else nullcontext():
        handle = run.save(str(place / "last"), block=False)
    handle.wait()


def file_later(run: Run, place: Path) -> None:
    handle = run.save(str(place / "file"), block=False)  # returns: what is below the path is the thread's affair
    handle.wait()


def vanished(run: Run, place: Path) -> None:
    write = saving.write

    def lost(path: Path, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            while path.parent.exists():  # it stays if rank 0 makes its file just when what was there is gone
                shutil.rmtree(path.parent, ignore_errors=True)
        return write(path, *args, **kwargs)

    with mock.patch.object(saving, "write", lost):
        run.save(str(place / "last"))


def unseen(run: Run, place: Path) -> None:
    """Rank 1 has another file system there."""
    with mock.patch.object(Path, "is_dir", return_value=False) if dist.get_rank() == 1 else nullcontext():
        run.save(str(place / "last"))


def never_came(run: Run, place: Path, block: bool = True) -> None:
    if dist.get_rank() == 1:
        dist.barrier()  # of training, in which the other one is late
        run.save(str(place / "last"), timeout=20.0)  # hears at once that it is too late
    try:
        run.save(str(place / "last"), timeout=0.3, block=block).wait()
    finally:
        dist.barrier()


REFUSED_SAVES: dict[str, tuple[Callable[[Run, Path], Any], str]] = {
    "full for one": (lambda run, place: full(run, place, 1), r"failed\n  rank 1: cannot write .*rank-00001.*too large"),
    "full, then another save": (
        lambda run, place: full_later(run, place, lambda: run.save(str(place / "other"))),
        r"last'\) failed\n  rank 1: cannot write .*too large",
    ),
    "full, then load": (
        lambda run, place: full_later(run, place, lambda: run.load(str(place / "last"))),
        r"save\(.*last'\) failed\n  rank 1: cannot write .*too large",
    ),
    "no memory": (uncopied, r"last'\) failed\n  rank 1: OSError: .*Cannot allocate memory"),
    "file": (file_later, r"rank 0: .*file: expected a directory that is a checkpoint, got a file"),
    "vanished": (vanished, r"rank 1: cannot create .*No such file"),
    "unseen": (unseen, r"rank 1: .*was made by rank 0 and is not there for this rank; path must be on"),
    "function on one": (
        lambda run, place: run.save(str(place / "last"), hook=len if dist.get_rank() == 1 else None),
        r"failed\n  rank 1: objects/hook.*function",
    ),
    "link": (
        lambda run, place: run.save(str(place / "link")),
        r"link is a symbolic link to nothing, or out of its dir",
    ),
    "other things": (
        lambda run, place: run.save(str(place / "other things")),
        r"rank 0: .*holds no checkpoint but other files \(thesis.tex\)",
    ),
    "another call": (
        lambda run, place: run.save(str(place / ("elsewhere" if dist.get_rank() else "last")), timeout=20.0),
        r"must make the same call.*\n  rank 0: called fsshard.save\(.*last.*\n  rank 1: .*elsewhere",
    ),
    "never came later": (lambda run, place: never_came(run, place, block=False), "rank 1: did not come within 0.3 s"),
    "never came": (never_came, r"all 2 ranks must call fsshard.save\(.*\n  rank 1: did not come within 0.3 s"),
}


def job_refused_saves(folder: str) -> dict[str, Any]:
    """Saves that fail, one after the other, over a checkpoint that stands; what each has changed; and saves again."""
    run, place = trained(), Path(folder) / "ckpt"
    run.save(str(place / "last"))
    before = everything(run)
    run.train(1)
    found = {}
    for case, (save, _) in REFUSED_SAVES.items():
        found[case] = refused(run, lambda save=save: save(run, place), place)  # type: ignore[misc]
    run.load(str(place / "last"), verify=True)
    earlier, again = unlike(everything(run), before), []
    for case in ("full for one", "never came", "vanished", "full, then another save", "no memory"):
        assert outcome(lambda case=case: REFUSED_SAVES[case][0](run, place))[0] == "CheckpointError", case  # type: ignore[misc]
        run.train(1)
        before = everything(run)
        run.save(str(place / "last"))
        run.train(1)
        run.load(str(place / "last"), verify=True)
        again += [f"{case}: {line}" for line in unlike(everything(run), before)]
    return {"found": found, "earlier": earlier, "again": again}


def test_a_save_that_fails_has_changed_nothing_and_the_next_succeeds(ranks: RankPool, tmp_path: Path) -> None:
    place, outside = tmp_path / "ckpt", tmp_path / "outside"
    (place / "other things").mkdir(parents=True)
    outside.mkdir()
    (place / "link").symlink_to(outside)
    (place / "file").write_text("mine")
    (place / "other things" / "thesis.tex").write_text("mine")
    results = ranks.run(job_refused_saves, 2, str(tmp_path))
    check(results, {case: ("CheckpointError", text) for case, (_, text) in REFUSED_SAVES.items()})
    for result in results:
        assert result["earlier"] == [] == result["again"]
    assert list(outside.iterdir()) == [] and (place / "file").read_text() == "mine"
    assert os.listdir(place / "other things") == ["thesis.tex"]


def job_save_there(path: str) -> None:
    trained().save(path)


def test_two_jobs_at_one_path(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "ckpt" / "last"
    ranks.run(job_save_there, 2, str(path))
    with CheckpointTarget(path).lock():
        found = ranks.run_expecting_errors(job_save_there, 2, str(path))
    for error in found:
        assert isinstance(error, CheckpointError)
        assert re.search(rf"rank 0: another process is saving to .*last \(process {os.getpid()} on", str(error))
    assert read_index(path).ordinal == 1


# ------------------------------------------------------------------------------------------------ in the background


def test_a_process_that_ends_waits_for_its_save(tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(
        "import sys, torch, fsshard\n"
        "model = fsshard.wrap(torch.nn.Linear(2, 2), backend='none')\n"
        "handle = fsshard.save(sys.argv[1], model, block=False, weight=torch.ones(16 << 20))\n"
        "assert not handle.done()\n"
    )
    done = run_script(script, [str(tmp_path / "last")], {})
    assert done.returncode == 0, done.stderr
    assert sum(file.bytes for file in read_index(tmp_path / "last").files.values()) > 64 << 20


# ------------------------------------------------------------------------------------------------ damaged files


def job_save(folder: str) -> None:
    run = trained()
    run.save(f"{folder}/good")
    run.train(1)
    run.save(f"{folder}/other")


@pytest.fixture(scope="module")
def folder(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With ``good``, a checkpoint of two steps, and ``other``, one of three."""
    folder = tmp_path_factory.mktemp("faults")
    ranks.run(job_save, 2, str(folder))
    return folder


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A change to the index."""

    def apply(place: Path) -> None:
        index = json.loads((place / "index.json").read_bytes())
        del index["sha256"]
        change(index)
        (place / "index.json").write_bytes(sealed(index))

    return apply


def without_scale(index: dict[str, Any]) -> None:
    """A value that is no tensor, under the name of a parameter."""
    index["model"]["keys"]["scale"], index["model"]["extra"]["scale"] = None, 3
    del index["tensors"]["model/scale"]


def flip(place: Path) -> None:
    """One bit of the last tensor."""
    data = bytearray((place / RANK_1).read_bytes())
    data[-5] ^= 4
    (place / RANK_1).write_bytes(data)


def exchange(place: Path) -> None:
    """Rank 0's and rank 1's names for each other; sizes as the index says."""

    def change(index: dict[str, Any]) -> None:
        index["files"][RANK_0], index["files"][RANK_1] = index["files"][RANK_1], index["files"][RANK_0]

    edit(change)(place)
    (place / RANK_0).rename(place / "x"), (place / RANK_1).rename(place / RANK_0), (place / "x").rename(place / RANK_1)


def linked(place: Path) -> None:
    (place / RANK_1).unlink()
    (place / RANK_1).symlink_to(place.parent / "good" / RANK_1)


def no_generators(index: dict[str, Any]) -> None:
    index["rng"]["per_rank"][1] = {"torch": 3, "was": index["rng"]["per_rank"][1]}


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda p: (p / RANK_1).unlink(), rf"{RANK_1}: missing; it holds model/"),
    "no-index": (lambda p: (p / "index.json").unlink(), "index.json: missing"),
    "truncated": (lambda p: os.truncate(p / RANK_1, 5000), rf"{RANK_1}: 5000 bytes where .*; it holds model/"),
    "a-bit": (flip, rf"{RANK_1}: its checksum differs.*; it holds model/"),
    "of-another": (
        lambda p: shutil.copy(p.parent / "other" / RANK_1, p / RANK_1),
        rf"{RANK_1} belongs to another checkpoint than the index next to it, which expects it to hold model/",
    ),
    "exchanged": (exchange, r"does not hold elements .* of model/.*, which the index expects; was the file exchanged"),
    "link": (linked, rf"{RANK_1}: not a regular file: Too many levels of symbolic links"),
    "altered-index": (
        lambda p: (p / "index.json").write_bytes((p / "index.json").read_bytes().replace(b"exp_avg_sq", b"exp_awg_sq")),
        "index.json: its checksum differs from what was written",
    ),
    "no-generators": (edit(no_generators), r"state of the random number generators is invalid"),
    "no-parameter": (edit(without_scale), r"  scale: expected a tensor, got a value that is none"),
    "gone": (shutil.rmtree, "there is no checkpoint at"),
    "many": (lambda p: p.rename(p.with_name("x")).rename(p.mkdir() or p / "step-1"), r"directory of check.*latest\("),
}
KINDS = {"no-parameter": "StateDictError", "gone": "CheckpointError", "many": "CheckpointError"}


def job_refused_loads(folder: str) -> dict[str, Any]:
    """Loads that fail, one after the other; what each has changed, and whether the good one loads in the end."""
    run = trained(steps=3)
    found = {
        name: refused(run, lambda name=name: run.load(f"{folder}/{name}", verify=name == "a-bit"))  # type: ignore[misc]
        for name in DAMAGES
    }
    run.load(f"{folder}/good", verify=True)
    return {"found": found, "good": unlike(run.whole(), trained().whole())}


def test_a_load_that_fails_has_changed_nothing(ranks: RankPool, folder: Path) -> None:
    for name, (damage, _) in DAMAGES.items():
        shutil.copytree(folder / "good", folder / name)
        damage(folder / name)
    results = ranks.run(job_refused_loads, 2, str(folder))
    check(results, {name: (KINDS.get(name, "CorruptCheckpoint"), text) for name, (_, text) in DAMAGES.items()})
    assert [result["good"] for result in results] == [[], []]


def job_dies_while_it_opens(path: str) -> Outcome:
    run, opening = trained(), loading.Reader.check_headers

    def dies(reader: Any, *share: int) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        opening(reader, *share)

    with mock.patch.object(loading.Reader, "check_headers", dies):
        return outcome(lambda: run.load(path))


def test_a_rank_that_is_killed_while_it_opens_is_named(folder: Path, tmp_path: Path) -> None:
    forks = multiprocessing.get_context("forkserver")
    (kind, said, failures), dead = Deaths(forks, tmp_path).run(job_dies_while_it_opens, 2, str(folder / "good"))
    assert dead == -signal.SIGKILL and kind == "CheckpointError" and "lost a rank" in said
    assert list(failures) == [1] and "has ended, hangs, or cannot be reached" in failures[1]


# ------------------------------------------------------------------------------------------------ what does not fit


class Other(nn.Module):
    """Unlike tests.portability's net: one layer less, one more, one of another shape, one of another dtype."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.extra = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self.embed(x)) * self.scale


def job_another_model(folder: str) -> dict[str, Any]:
    """Strict, not strict with another shape, and not strict."""
    other, fitting = fsshard.wrap(Other(), backend="ddp"), fsshard.wrap(Other(6), backend="fairscale")
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


def test_another_models_checkpoint(ranks: RankPool, folder: Path) -> None:
    for result in ranks.run(job_another_model, 2, str(folder)):
        assert result["changed"] == []
        kind, text, _ = result["strict"]
        assert kind == "StateDictError"
        for line in ("missing: extra.weight", "missing: extra.bias", "unexpected: head.weight"):
            assert f"\n  {line}" in text
        for key in ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"):
            assert f"\n  {key}: expected float32 (7,), got float32 (6,)" in text
        assert "\n  scale: expected float64 (), got float32 ()" in text
        kind, text, _ = result["shape"]
        assert kind == "StateDictError" and "norm.weight: expected" in text and "scale" not in text
        kind, text, _ = result["dtype"]
        assert kind == "StateDictError" and "scale: expected float64" in text and "norm" not in text
        assert result["missing"] == ("extra.weight", "extra.bias") and result["extra"] == []
        assert {"head.weight", "blocks.0.weight", "tied.weight"} <= set(result["unexpected"])
        assert result["state"]["scale"].dtype is not result["state"]["embed.weight"].dtype


def job_another_optimizer(folder: str) -> dict[str, Any]:
    """Load into an optimizer of another class, with other groups, of another name."""
    sgd, groups, adamw, path = trained(optimizer="sgd"), trained(optimizer="groups"), trained(), f"{folder}/good"
    found = {
        "class": refused(sgd, lambda: fsshard.load(path, sgd.model, sgd.optimizer)),
        "class, not strict": refused(sgd, lambda: fsshard.load(path, sgd.model, sgd.optimizer, strict=False)),
        "groups": refused(groups, lambda: fsshard.load(path, groups.model, groups.optimizer, strict=False)),
        "name": refused(adamw, lambda: fsshard.load(path, adamw.model, {"inner": adamw.optimizer})),
        "plain": refused(adamw, lambda: fsshard.load(path, adamw.model, adamw.optimizer.inner)),
        "number": refused(adamw, lambda: fsshard.load(path, adamw.model, step=adamw.step)),
        "unknown": refused(adamw, lambda: fsshard.load(path, adamw.model, nothing=adamw.scheduler)),
    }
    return {"found": found}


def test_another_optimizer(ranks: RankPool, folder: Path) -> None:
    another_class = r"is a torch.optim.sgd.SGD, and the state of a torch.optim.adamw.AdamW"
    expected = {
        "class": ("CheckpointError", another_class),
        "class, not strict": ("CheckpointError", another_class),
        "groups": ("StateDictError", r"in group 1(.|\n)*number of param_groups: expected 3, got 1"),
        "name": ("CheckpointError", r"no optimizer was saved as 'inner'; the checkpoint has: 'optimizer'"),
        "plain": ("ConfigurationError", r"build it with fsshard.build_optimizer"),
        "number": ("ConfigurationError", r"step cannot be loaded into"),
        "unknown": ("CheckpointError", r"nothing was saved as nothing; the checkpoint has: scheduler, scaler, step"),
    }
    check(ranks.run(job_another_optimizer, 2, str(folder)), expected)


class Stubborn:
    """An object that takes no state, on one rank."""

    def __init__(self, rank: int | None, value: int) -> None:
        self.rank, self.value = rank, value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]
        if dist.get_rank() == self.rank:
            raise KeyError("the schedule of another day")


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


@on_ranks()
def test_what_refuses_its_state(tmp_path: Path) -> None:
    """An object, and then the module's own code, ends the load on rank 1; what has changed of what had been loaded."""
    folder = str(tmp_path)
    module = Choosy()
    model = fsshard.wrap(module, backend="ddp")
    fsshard.save(f"{folder}/choosy", model, thing=Stubborn(None, 5))
    with torch.no_grad():
        module.count.add_(5)  # type: ignore[operator]
        module.weight.add_(1)
    before, ends = [model.state_dict(), generators()], []
    for thing, refusing in ((Stubborn(1, 7), False), (Stubborn(None, 8), True)):
        module.refusing = refusing and dist.get_rank() == 1
        ended = outcome(lambda thing=thing: fsshard.load(f"{folder}/choosy", model, thing=thing))  # type: ignore[misc]
        ends.append((ended, unlike([model.state_dict(), generators()], before), thing.value))
    of_object, of_module = ends
    (kind, text, failures), changed, value = of_object
    assert kind == "CheckpointError" and list(failures) == [1] and changed == []
    assert "thing (Stubborn) refuses its state: KeyError: 'the schedule of another day'" in text
    assert value == 7, "what had taken it has its own back"
    (kind, text, failures), changed, value = of_module
    assert kind == "CheckpointError" and list(failures) == [1] and "ValueError: not my turn" in text
    assert changed == [] and value == 8


# ------------------------------------------------------------------------------------------------ each rank's own


def job_save_by_rank(folder: str) -> None:
    rank = dist.get_rank()
    trained().save(f"{folder}/by-rank", place=torch.tensor([rank]), thing=Stubborn(None, rank), lr=0.5)


def job_load_by_rank(folder: str) -> dict[str, Any]:
    run, thing = trained(), Stubborn(None, 9)
    if dist.get_world_size() == 2:
        loaded = run.load(f"{folder}/by-rank", thing=thing)
        return {"state": loaded.state["place"].tolist(), "value": thing.value, "lr": loaded.state["lr"]}
    found = refused(run, lambda: run.load(f"{folder}/by-rank", thing=thing))
    loaded = run.load(f"{folder}/by-rank")
    return {"found": found, "value": thing.value, "per_rank": loaded.per_rank, "state": sorted(loaded.state)}


def test_state_of_each_rank_at_another_world_size(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(job_save_by_rank, 2, str(tmp_path))
    same = ranks.run(job_load_by_rank, 2, str(tmp_path))
    assert same == [{"state": [rank], "value": rank, "lr": 0.5} for rank in (0, 1)]
    (alone,) = ranks.run(job_load_by_rank, 1, str(tmp_path))
    (kind, text, _), changed = alone["found"]
    assert kind == "CheckpointError" and "'thing' differed between the 2 ranks" in text and changed == []
    assert alone["value"] == 9 and alone["state"] == ["lr", "step"]
    assert [place.tolist() for place in alone["per_rank"]["place"]] == [[0], [1]]
    assert alone["per_rank"]["thing"] == [{"value": 0}, {"value": 1}]


@on_ranks()
def test_random_numbers_come_back(tmp_path: Path) -> None:
    """Tell whether all three draw what they drew after the save; and whether ``rng=False`` leaves them alone."""
    folder = str(tmp_path)

    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(numpy.random.rand())

    run = trained(steps=1)
    run.save(f"{folder}/rng")
    first, second = draw(), draw()
    run.load(f"{folder}/rng")
    again = draw()
    run.load(f"{folder}/rng", rng=False)
    assert again == first
    assert draw() == second
