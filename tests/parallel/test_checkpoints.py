"""One directory for a whole mesh: saved over data, cp and tp, loaded over another mesh, or on one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fsshard
from fsshard.checkpoint.inspecting import Inspection, inspect
from fsshard.errors import StateDictError
from tests.parallel.split_vit import batch, group_of, loss_of, mesh_of, said_of, serial, split
from tests.training_runs import check_equal

BOUND = 4e-6
"""Bound for numbers of order 1 in float32: each mesh adds in another order."""
SAMPLES = 4  # ranks of data that the batch is made for


def built(backend: str, shape: tuple[int, int, int]) -> tuple[Any, Any, Any, int]:
    """Model, optimizer, the group of cp and this rank's place along data."""
    mesh = mesh_of(*shape)
    said = said_of(mesh)
    model = fsshard.wrap(split(mesh), backend=backend, device_mesh=mesh["data"], **said)
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=1e-3, eps=1e-4)
    return model, optimizer, group_of(mesh, "cp"), mesh["data"].get_local_rank()


def steps(model: Any, optimizer: Any, cp: Any, rank: int, ranks: int, numbers: range) -> None:
    for number in numbers:
        x = batch(SAMPLES, number).chunk(ranks)[rank]
        optimizer.zero_grad()
        loss_of(model, x, cp).backward()
        optimizer.step()


def job_save(path: str, backend: str, shape: tuple[int, int, int]) -> dict[str, Tensor]:
    model, optimizer, cp, rank = built(backend, shape)
    steps(model, optimizer, cp, rank, shape[0], range(2))
    fsshard.save(path, model, optimizer, steps=2)
    return model.state_dict()


def job_resume(path: str, backend: str, shape: tuple[int, int, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer, cp, rank = built(backend, shape)
    found = fsshard.load(path, model, optimizer)
    assert found.state["steps"] == 2
    loaded = model.state_dict()
    steps(model, optimizer, cp, rank, shape[0], range(2, 4))
    return loaded, model.state_dict()


def serial_states() -> list[dict[str, Tensor]]:
    """After two and after four steps on one process."""
    model = serial()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
    found = []
    for numbers in (range(2), range(2, 4)):
        steps(model, optimizer, None, 0, 1, numbers)
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


def _distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert list(ours) == list(theirs)
    return max(float((ours[name] - value).abs().max()) for name, value in theirs.items())


ANY_TO_ANY = [
    ("fsdp2", (2, 1, 2), "fsdp", (1, 1, 4)),
    pytest.param("fsdp", (1, 2, 2), "fairscale", (4, 1, 1), marks=pytest.mark.long),
    ("fairscale", (2, 1, 2), "ddp", (1, 2, 1)),
    pytest.param("ddp", (1, 1, 2), "fsdp2", (2, 1, 2), marks=pytest.mark.long),
    pytest.param("fsdp2", (2, 1, 2), "none", (1, 1, 1), marks=pytest.mark.long),
]


@pytest.mark.parametrize(("saver", "at", "loader", "there"), ANY_TO_ANY)
def test_any_mesh_to_any(
    ranks: Any, tmp_path: Path, saver: str, at: tuple[int, int, int], loader: str, there: tuple[int, int, int]
) -> None:
    path = str(tmp_path / "last")
    size = at[0] * at[1] * at[2]
    after_two, after_four = serial_states()
    (saved, *others) = ranks.run(job_save, size, path, saver, at)
    assert _distance(saved, after_two) < BOUND
    assert all(torch.equal(saved[name], other[name]) for other in others for name in saved)
    for loaded, trained in ranks.run(job_resume, there[0] * there[1] * there[2], path, loader, there):
        check_equal(dict(saved), dict(loaded))
        assert _distance(trained, after_four) < BOUND
    shown = inspect(path)
    assert isinstance(shown, Inspection) and shown.ok
    origin = shown.contents["origin"]
    sizes = {"data": at[0]} | {name: n for name, n in (("cp", at[1]), ("tp", at[2])) if n > 1}
    assert origin["mesh"] == sizes and origin["world_size"] == size
    assert any(f'"mesh": {json.dumps(sizes)}' in line for line in shown.render())


def test_the_same_mesh_goes_on_to_the_bit(ranks: Any, tmp_path: Path) -> None:
    path, shape = str(tmp_path / "last"), (1, 2, 2)
    ranks.run(job_save, 4, path, "fsdp2", shape)
    resumed = ranks.run(job_resume, 4, path, "fsdp2", shape)
    whole = ranks.run(job_uninterrupted, 4, "fsdp2", shape)
    for (_, ours), theirs in zip(resumed, whole, strict=True):
        check_equal(dict(theirs), dict(ours))


def job_uninterrupted(backend: str, shape: tuple[int, int, int]) -> dict[str, Tensor]:
    model, optimizer, cp, rank = built(backend, shape)
    steps(model, optimizer, cp, rank, shape[0], range(4))
    return model.state_dict()


def _without_dimension(mesh: Any) -> dict[str, Any]:
    said = said_of(mesh)
    return {**said, "sharded": dict.fromkeys(said["sharded"], mesh["tp"])}


def job_side_by_side(path: str, parts: int, load: bool) -> dict[str, Tensor]:
    mesh = mesh_of(1, 1, parts)
    model = fsshard.wrap(split(mesh), backend="fsdp2", device_mesh=mesh["data"], **_without_dimension(mesh))
    if load:
        fsshard.load(path, model)
    else:
        fsshard.save(path, model)
    return model.state_dict()


def test_parts_whose_dimension_nobody_said(ranks: Any, tmp_path: Path) -> None:
    """Side by side: the same split loads them, another one says what it found."""
    path = str(tmp_path / "last")
    saved = ranks.run(job_side_by_side, 2, path, 2, False)[0]
    assert saved["blocks.0.fc1.weight"].shape == (2, 16, 16)
    for loaded in ranks.run(job_side_by_side, 2, path, 2, True):
        check_equal(dict(saved), dict(loaded))
    for error in ranks.run_expecting_errors(job_side_by_side, 4, path, 4, True):
        assert isinstance(error, StateDictError) and "blocks.0.fc1.weight" in str(error)
