"""A record is whole after each line; one that is damaged says where."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from fsshard.errors import TraceError
from fsshard.parity.scripts.store import (
    Header,
    Model,
    Record,
    Samples,
    ScriptTrace,
    append,
    digest_alone,
    read_tensor,
    tensor_file,
    write_tensor,
)
from fsshard.parity.sketch import sketch

HEADER = Header(rank=0, world_size=1, command=["train.py"], commit="", device="cpu", environment={})
WEIGHT = sketch(torch.arange(3.0))
MODEL = Model(engine="Linear", weights={"weight": WEIGHT})
STEP = Record(
    models=[MODEL],
    step=0,
    losses=[float("nan"), 0.1],
    samples=[Samples(digest="a", rows=2, total="0f", computed="float32")],
    groups=[{"lr": 0.1, "betas": [0.9, 0.99], "name": None}],
    random="b",
    skipped=False,
    gradients={"weight": (0.25, 3)},
    sketches={"weight": {"weight": WEIGHT}},
)


LATER = dataclasses.replace(STEP, step=1, models=[])


def write(folder: Path, *records: Record, rank: int = 0, size: int = 1) -> Path:
    """Write a rank's file."""
    file = folder / f"rank{rank}.jsonl"
    for one in (dataclasses.replace(HEADER, rank=rank, world_size=size), *records):
        append(file, one)
    return file


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, STEP, LATER)
    (rank,) = ScriptTrace.load(tmp_path).ranks
    assert (rank.header, rank.models) == (HEADER, [MODEL])
    assert repr(rank.steps) == repr({0: STEP, 1: LATER})  # NaN equals itself as a text


def test_a_script_that_dies_while_it_writes_loses_that_step_alone(tmp_path: Path) -> None:
    file = write(tmp_path, STEP, LATER)
    file.write_text(file.read_text()[:-20])
    assert ScriptTrace.load(tmp_path).steps == [0]


def test_a_step_that_is_written_again_counts_as_it_was_last(tmp_path: Path) -> None:
    write(tmp_path, STEP, dataclasses.replace(STEP, losses=[7.0]))
    (rank,) = ScriptTrace.load(tmp_path).ranks
    assert (rank.steps[0].losses, rank.models, [*rank.initial]) == ([7.0], [MODEL], ["weight"])


def test_what_json_does_not_know_is_a_text(tmp_path: Path) -> None:
    write(
        tmp_path, dataclasses.replace(STEP, groups=[{"names": ({1},), "lr": torch.tensor(0.5), "dtype": torch.float32}])
    )
    (group,) = ScriptTrace.load(tmp_path).ranks[0].steps[0].groups
    assert group == {"names": ["{1}"], "lr": 0.5, "dtype": "torch.float32"}


def test_a_rank_is_recorded_once(tmp_path: Path) -> None:
    write(tmp_path, STEP)
    with pytest.raises(FileExistsError):
        append(tmp_path / "rank0.jsonl", HEADER)


def test_what_one_rank_has_sketched_the_others_have_too(tmp_path: Path) -> None:
    other = digest_alone("another")
    write(tmp_path, STEP, rank=0, size=3)
    write(
        tmp_path,
        dataclasses.replace(STEP, sketches={"weight": {"weight": digest_alone(WEIGHT.digest)}}),
        rank=1,
        size=3,
    )
    write(tmp_path, dataclasses.replace(STEP, sketches={"weight": {"weight": other}}), rank=2, size=3)
    ranks = ScriptTrace.load(tmp_path).ranks
    weights = [one.steps[0].weights["weight"] for one in ranks]
    assert weights[:2] == [WEIGHT, WEIGHT] and repr(weights[2]) == repr(other)


@pytest.mark.parametrize("value", [torch.arange(3.0), torch.tensor([[1 + 2j]])])
def test_whole_tensors(tmp_path: Path, value: torch.Tensor) -> None:
    file = tensor_file(tmp_path, 3, "blocks.0.a/b")
    write_tensor(file, value)
    assert torch.equal(read_tensor(file), torch.view_as_real(value) if value.is_complex() else value)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"losses":[', '"losses":["x",', r"line 2, losses\[0\]: expected a number, got 'x'"),
        ('"format":"fsshard script trace"', '"format":"x"', "line 1, format: expected 'fsshard script trace'"),
        ('{"record"', '{"record', "line 2: this is no JSON"),
        ('\n{"record"', '\n[]\n{"record"', r"line 2, content: expected an object, got \[\]"),
        ('"rank":0', '"rank":1', "expected 1 files of ranks, got 1"),
    ],
)
def test_what_is_damaged_is_named(tmp_path: Path, old: str, new: str, told: str) -> None:
    file = write(tmp_path, STEP)
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(TraceError, match=told):
        ScriptTrace.load(tmp_path)


def test_a_folder_without_a_record(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="there is no such folder; record it again: fsshard trace FOLDER -- COMMAND"):
        ScriptTrace.load(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="no step of an optimizer is recorded here"):
        ScriptTrace.load(tmp_path)
    (tmp_path / "rank0.jsonl").touch()
    with pytest.raises(TraceError, match="the file is empty"):
        ScriptTrace.load(tmp_path)
