"""A transformer that is split by hand over tp and cp trains as on one process, under every engine."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsshard
from tests.parallel.split_vit import batch, group_of, loss_of, mesh_of, said_of, serial, split
from tests.sets import often
from tests.training_runs import DISTRIBUTED

STEPS = 5
BOUND = 4e-6
"""Bound for losses of order 1 in float32: tp, cp and data each add in another order than one process."""
ADDED_UP = 10 * BOUND
"""Bound for weights, state and gradients' norms after five steps of that."""

OPTIMIZERS: dict[str, Any] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    # The gradient of a bias of keys is zero but for rounding, of which a smaller eps would make whole steps.
    "adam": (torch.optim.Adam, {"lr": 1e-3, "eps": 1e-4}),
}


def serial_run(optimizer: str, data_ranks: int, clip: float) -> dict[str, Any]:
    """On one process: losses, norms, weights and optimizer state by name."""
    model = serial()
    kind, arguments = OPTIMIZERS[optimizer]
    stepped = kind(model.parameters(), **arguments)
    losses, norms = [], []
    for step in range(STEPS):
        x = batch(data_ranks, step)
        stepped.zero_grad()
        loss = loss_of(model, x, None)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        stepped.step()
        losses.append(float(loss.detach()))
    names = [name for name, _ in model.named_parameters()]
    state = {names[at]: found for at, found in stepped.state_dict()["state"].items()}
    return {"losses": losses, "norms": norms, "weights": model.state_dict(), "state": state}


def split_run(backend: str, shape: tuple[int, int, int], optimizer: str, clip: float) -> dict[str, Any]:
    """The same over a mesh."""
    mesh = mesh_of(*shape)
    cp, data = group_of(mesh, "cp"), mesh["data"]
    model = fsshard.wrap(split(mesh), backend=backend, device_mesh=data, **said_of(mesh))
    kind, arguments = OPTIMIZERS[optimizer]
    stepped = fsshard.build_optimizer(model, kind, **arguments)
    losses, norms = [], []
    for step in range(STEPS):
        x = batch(shape[0], step).chunk(shape[0])[data.get_local_rank()]
        stepped.zero_grad()
        loss = loss_of(model, x, cp)
        loss.backward()
        norms.append(float(model.clip_grad_norm_(clip)))
        stepped.step()
        losses.append(_joined(loss, shape, mesh))
    with model.full_parameters() as held:
        bits = {name: value.clone() for name, value in held.items()}
    return {
        "losses": losses,
        "norms": norms,
        "weights": model.state_dict(),
        "state": stepped.state_dict()["state"],
        "held": bits,
    }


def _joined(loss: Tensor, shape: tuple[int, int, int], mesh: Any) -> float:
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return float(whole) / shape[0] / shape[2]  # the ranks of tp have the same, those of cp parts


def _distance(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    assert list(ours) == list(theirs)
    return max(float((ours[name] - value).abs().max()) for name, value in theirs.items())


@pytest.mark.parametrize(
    ("backend", "shape"),
    often(
        itertools.product(DISTRIBUTED, [(2, 1, 2), (2, 2, 1), (1, 2, 2)]),
        ("fsdp2", (1, 2, 2)),
        ("fairscale", (2, 1, 2)),
    ),
)
def test_trains_as_on_one_process(ranks: Any, backend: str, shape: tuple[int, int, int]) -> None:
    for optimizer in OPTIMIZERS if shape == (1, 2, 2) else ["adam"]:
        theirs = serial_run(optimizer, shape[0], 0.05)
        results = ranks.run(split_run, 4, backend, shape, optimizer, 0.05)
        for ours in results:
            assert ours["losses"] == pytest.approx(theirs["losses"], abs=BOUND)
            assert ours["norms"] == pytest.approx(theirs["norms"], abs=ADDED_UP)
            assert _distance(ours["weights"], theirs["weights"]) < ADDED_UP
            for name, state in theirs["state"].items():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dim():
                        assert float((ours["state"][name][key] - value).abs().max()) < ADDED_UP, (name, key)
        _same_to_the_bit(results)
        assert _distance(theirs["weights"], serial().state_dict()) > 10 * ADDED_UP, "it has learned something"


def _same_to_the_bit(results: list[dict[str, Any]]) -> None:
    """Assert that after clipped steps replicated parts and whole weights are equal to the last bit on all ranks."""
    for ours in results[1:]:
        for name, value in results[0]["held"].items():
            if value.shape == results[0]["weights"][name].shape:
                assert torch.equal(value, ours["held"][name]), name
        for name, value in results[0]["weights"].items():
            assert torch.equal(value, ours["weights"][name]), name
