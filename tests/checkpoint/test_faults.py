"""Disks that are full, files that are damaged, ranks that do not come: an error of ours on every rank, and no loss."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fsshard
from fsshard.checkpoint.format.directory import CheckpointTarget
from fsshard.checkpoint.format.index import read_index, sealed
from fsshard.launching.pool import RankPool
from tests.checkpoint import faults

RANK_0, RANK_1 = "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"


# ------------------------------------------------------------------------------------------------ saving

REFUSED_SAVES: dict[str, tuple[str, str]] = {
    "full": ("CheckpointError", r"rank 0: .*too large(.|\n)*rank 1: .*too large"),
    "full for one": ("CheckpointError", r"failed\n  rank 1: cannot write .*rank-00001.*too large"),
    "full for rank 0": ("CheckpointError", r"failed\n  rank 0: cannot write .*rank-00000.*too large"),
    "full, not blocking": ("CheckpointError", r"last'\) failed\n  rank 1: cannot write .*too large"),
    "full, waited for": ("CheckpointError", r"last'\) failed\n  rank 1: cannot write .*too large"),
    "full, then load": ("CheckpointError", r"save\(.*last'\) failed\n  rank 0: cannot write .*too large"),
    "no memory, not blocking": ("CheckpointError", r"last'\) failed\n  rank 1: OSError: .*Cannot allocate memory"),
    "file, not blocking": ("CheckpointError", r"rank 0: .*file is a file; a checkpoint is a directory"),
    "vanished": ("CheckpointError", r"rank 1: cannot create .*No such file"),
    "unseen": ("CheckpointError", r"rank 1: .*was made by rank 0 and is not there for rank 1; path must be on"),
    "function": ("CheckpointError", r"objects/hooks.*at.*1.*function"),
    "function on one": ("CheckpointError", r"failed\n  rank 1: objects/hook.*function"),
    "link": ("CheckpointError", r"link is a symbolic link out of its directory"),
    "file": ("CheckpointError", r"rank 0: .*file is a file; a checkpoint is a directory"),
    "below a file": ("CheckpointError", r"rank 0: .*file is not a directory"),
    "other things": ("CheckpointError", r"rank 0: .*holds no checkpoint but other files \(thesis.tex\)"),
    "keep": ("ConfigurationError", r"keep=1: at least 2"),
    "another call": (
        "CheckpointError",
        r"must make the same call.*\n  rank 0: called fsshard.save\(.*last.*\n  rank 1: .*elsewhere",
    ),
    "never came": ("CheckpointError", r"all 2 ranks must call fsshard.save\(.*\n  rank 1: did not come within 0.3 s"),
}


def check(results: list[dict[str, Any]], expected: dict[str, tuple[str, str]]) -> None:
    """On every rank the error that is expected, and no change."""
    for rank, result in enumerate(results):
        for case, (kind, text) in expected.items():
            (got, message, _), changed = result["found"][case]
            assert got == kind and re.search(text, message), f"rank {rank}, {case}: {got}: {message}"
            assert changed == [], f"rank {rank}, {case}"
    for case in expected:
        assert len({str(result["found"][case][0]) for result in results}) == 1, f"{case}: ranks heard different things"


def test_a_save_that_fails_has_changed_nothing(ranks: RankPool, tmp_path: Path) -> None:
    place, outside = tmp_path / "ckpt", tmp_path / "outside"
    (place / "other things").mkdir(parents=True)
    outside.mkdir()
    (place / "link").symlink_to(outside)
    (place / "file").write_text("mine")
    (place / "other things" / "thesis.tex").write_text("mine")
    results = ranks.run(faults.job_refused_saves, 2, str(tmp_path), list(REFUSED_SAVES), {})
    check(results, REFUSED_SAVES)
    for result in results:
        assert result["earlier"] == [] and result["latest"] == place / "last"
    assert list(outside.iterdir()) == [] and (place / "file").read_text() == "mine"
    assert os.listdir(place / "other things") == ["thesis.tex"]


def test_ranks_save_again_after_failures(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(faults.job_saves_again, 2, str(tmp_path)) == [[], []]


def test_two_jobs_at_one_path(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    text = "plain"
    with CheckpointTarget(tmp_path / "ckpt" / "held").lock():
        pass  # gives it up
    results = ranks.run(faults.job_refused_saves, 2, str(tmp_path), [text], {})
    assert [result["found"][text][0][0] for result in results] == ["nothing", "nothing"]
    with CheckpointTarget(tmp_path / "ckpt" / "last").lock():
        found = ranks.run_expecting_errors(faults.job_save_there, 2, str(tmp_path / "ckpt" / "last"))
    for error in found:
        assert isinstance(error, fsshard.errors.CheckpointError)
        assert re.search(rf"rank 0: another process is saving to .*last \(process {os.getpid()} on", str(error))
    assert read_index(tmp_path / "ckpt" / "last").ordinal == 2


# ------------------------------------------------------------------------------------------------ in the background


def test_a_job_that_ends_waits_for_its_save(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(faults.job_leaves_while_it_saves, 2, str(tmp_path))
    assert read_index(tmp_path / "last").origin.world_size == 2


def test_a_process_that_ends_waits_for_its_save(tmp_path: Path) -> None:
    script = (
        "import sys, torch, fsshard\n"
        "model = fsshard.wrap(torch.nn.Linear(2, 2), backend='none')\n"
        "handle = fsshard.save(sys.argv[1], model, block=False, weight=torch.ones(16 << 20))\n"
        "assert not handle.done()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "last")], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0
    assert sum(file.bytes for file in read_index(tmp_path / "last").files.values()) > 64 << 20


def test_the_oldest_of_a_pattern_go(ranks: RankPool, tmp_path: Path) -> None:
    names = [[f"step-{step}" for step in range(max(0, last - 1), last + 1)] for last in range(5)]
    assert ranks.run(faults.job_keep, 2, str(tmp_path)) == [names, names]


# ------------------------------------------------------------------------------------------------ loading


@pytest.fixture(scope="module")
def folder(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With ``good``, a checkpoint of two steps, and ``other``, one of three."""
    folder = tmp_path_factory.mktemp("faults")
    ranks.run(faults.job_save, 2, str(folder))
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


def flip(name: str, place: Path) -> None:
    """One bit of the last tensor."""
    data = bytearray((place / name).read_bytes())
    data[-5] ^= 4
    (place / name).write_bytes(data)


def exchange(place: Path) -> None:
    """Rank 0's and rank 1's names for each other; sizes as the index says."""

    def change(index: dict[str, Any]) -> None:
        index["files"][RANK_0], index["files"][RANK_1] = index["files"][RANK_1], index["files"][RANK_0]

    edit(change)(place)
    (place / RANK_0).rename(place / "x"), (place / RANK_1).rename(place / RANK_0), (place / "x").rename(place / RANK_1)


def linked(place: Path) -> None:
    (place / RANK_1).unlink()
    (place / RANK_1).symlink_to(place.parent / "good" / RANK_1)


def piped(place: Path) -> None:
    (place / RANK_1).unlink()
    os.mkfifo(place / RANK_1)


def no_generators(index: dict[str, Any]) -> None:
    index["rng"]["per_rank"][1] = {"torch": 3, "was": index["rng"]["per_rank"][1]}


DAMAGES: dict[str, tuple[Callable[[Path], Any], str, dict[str, Any]]] = {
    "missing": (lambda p: (p / RANK_1).unlink(), rf"{RANK_1}: missing; it holds model/", {}),
    "missing-0": (lambda p: (p / RANK_0).unlink(), rf"{RANK_0}: missing; it holds model/", {}),
    "no-index": (lambda p: (p / "index.json").unlink(), "index.json: missing", {}),
    "truncated": (lambda p: os.truncate(p / RANK_1, 5000), rf"{RANK_1}: 5000 bytes where .*; it holds model/", {}),
    "empty": (lambda p: os.truncate(p / RANK_0, 0), rf"{RANK_0}: 0 bytes where .*; it holds model/", {}),
    "longer": (lambda p: os.truncate(p / RANK_0, 10**6), rf"{RANK_0}: 1000000 bytes where", {}),
    "bit-0": (lambda p: flip(RANK_0, p), rf"{RANK_0}: its checksum differs.*; it holds model/", {"verify": True}),
    "bit-1": (lambda p: flip(RANK_1, p), rf"{RANK_1}: its checksum differs.*; it holds model/", {"verify": True}),
    "of-another": (
        lambda p: shutil.copy(p.parent / "other" / RANK_1, p / RANK_1),
        rf"{RANK_1} belongs to another checkpoint than the index beside it; the index has it hold model/",
        {},
    ),
    "exchanged": (exchange, r"does not hold elements .* of model/.* as the index says; was the file exchanged", {}),
    "link": (linked, rf"{RANK_1}: not a regular file: a symbolic link", {}),
    "pipe": (piped, rf"{RANK_1}: not a regular file", {}),
    "altered-index": (
        lambda p: (p / "index.json").write_bytes((p / "index.json").read_bytes().replace(b"exp_avg_sq", b"exp_awg_sq")),
        "index.json: its checksum differs from what was written",
        {},
    ),
    "no-generators": (edit(no_generators), r"state of the random number generators is invalid", {}),
    "no-parameter": (
        edit(without_scale),
        r"  scale: expected a tensor, got a value that is none",
        {},
    ),
}
HELD_UP = {"no-parameter": "StateDictError"}


def test_a_load_that_fails_has_changed_nothing(ranks: RankPool, folder: Path) -> None:
    for name, (damage, _, _) in DAMAGES.items():
        shutil.copytree(folder / "good", folder / name)
        damage(folder / name)
    (folder / "file").write_text("mine")
    (folder / "many").mkdir()
    shutil.copytree(folder / "good", folder / "many" / "step-1")
    cases = {name: options for name, (_, _, options) in DAMAGES.items()}
    results = ranks.run(faults.job_refused_loads, 2, str(folder), {**cases, "file": {}, "gone": {}, "many": {}})
    expected = {name: (HELD_UP.get(name, "CorruptCheckpoint"), text) for name, (_, text, _) in DAMAGES.items()}
    expected |= {
        "file": ("CheckpointError", "file is a file"),
        "gone": ("CheckpointError", "there is no checkpoint at"),
        "many": ("CheckpointError", r"directory of checkpoints, not one.*latest\("),
    }
    check(results, expected)
    assert [result["good"] for result in results] == [[], []]


def test_another_models_checkpoint(ranks: RankPool, folder: Path) -> None:
    for result in ranks.run(faults.job_another_model, 2, str(folder)):
        assert result["changed"] == []
        kind, text, _ = result["strict"]
        assert kind == "StateDictError"
        for line in (
            "missing: extra.weight",
            "missing: extra.bias",
            "unexpected: head.weight",
            "unexpected: tied.weight",
        ):
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


def test_another_optimizer(ranks: RankPool, folder: Path) -> None:
    expected = {
        "class": ("CheckpointError", r"is a torch.optim.sgd.SGD, saved was the state of a torch.optim.adamw.AdamW"),
        "class, not strict": (
            "CheckpointError",
            r"is a torch.optim.sgd.SGD, saved was the state of a torch.optim.adamw.AdamW",
        ),
        "groups": ("StateDictError", r"in group 1(.|\n)*number of param_groups: expected 3, got 1"),
        "name": ("CheckpointError", r"no optimizer was saved as 'inner'; saved were: 'optimizer'"),
        "plain": ("ConfigurationError", r"build it with fsshard.build_optimizer"),
        "number": ("ConfigurationError", r"step cannot be loaded into"),
        "unknown": ("CheckpointError", r"nothing was saved as nothing; saved were: scheduler, scaler, step"),
    }
    results = ranks.run(faults.job_another_optimizer, 2, str(folder))
    check([{"found": result} for result in results], expected)


def test_an_object_that_refuses_its_state(ranks: RankPool, tmp_path: Path) -> None:
    for result in ranks.run(faults.job_refusing_object, 2, str(tmp_path)):
        (kind, text, failures), changed = result["found"]
        assert kind == "CheckpointError" and "rank 1" in text and list(failures) == [1]
        assert "thing (Stubborn) refuses its state: KeyError: 'the schedule of another day'" in text
        assert changed == [] and result["value"] == 7, "what had taken it has its own back"


def test_a_module_that_refuses_its_state(ranks: RankPool, tmp_path: Path) -> None:
    for result in ranks.run(faults.job_refusing_module, 2, str(tmp_path)):
        (kind, text, failures), changed = result["found"]
        assert kind == "CheckpointError" and list(failures) == [1] and "ValueError: not my turn" in text
        assert changed == [] and result["value"] == 8


def test_state_of_each_rank_at_another_world_size(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(faults.job_save_by_rank, 2, str(tmp_path))
    same = ranks.run(faults.job_load_by_rank, 2, str(tmp_path))
    assert same == [{"state": [rank], "position": rank, "lr": 0.5} for rank in (0, 1)]
    (alone,) = ranks.run(faults.job_load_by_rank, 1, str(tmp_path))
    (kind, text, _), changed = alone["found"]
    assert kind == "CheckpointError" and "'thing' differed between the 2 ranks" in text and changed == []
    assert alone["position"] == 9 and alone["state"] == ["lr", "step"]
    assert [place.tolist() for place in alone["per_rank"]["place"]] == [[0], [1]]
    assert alone["per_rank"]["thing"] == [{"position": 0}, {"position": 1}]


def test_random_numbers_come_back(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(faults.job_generators, 2, str(tmp_path)) == [[True, True], [True, True]]
