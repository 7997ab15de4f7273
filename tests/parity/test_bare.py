"""Every model beside bare replicas: training, and every way in and out of the wrapped model, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsshard
from fsshard.errors import FsshardError, MissingExtra
from tests.models import take_step
from tests.parity import bare
from tests.parity.trainings import TOGETHER, TRAININGS, Training
from tests.training_runs import DISTRIBUTED, differences

STEPS = range(2)
AFTER = range(2, 3)
"""The step after a checkpoint."""


def wrapped(training: Training, backend: str) -> tuple[Any, Any]:
    """The model and its optimizer under a backend; units of few bytes travel by themselves."""
    apart = {"merge_below": 0} if backend == "fsdp2" else {}
    model = fsshard.wrap(training.build(), backend=backend, **{**apart, **training.settings})
    return model, fsshard.build_optimizer(model, torch.optim.Adam, **training.hyper)


def go_on(training: Training, model: Any, optimizer: Any, steps: range, *, by_hand: bool = False) -> list[float]:
    """Train under an engine, as a user would, or a replica whose gradients are averaged by hand. Collective."""
    losses = []
    for step in steps:
        found = training.loss(model, dist.get_rank(), step)
        found.backward()
        if by_hand:
            bare.average(model)
        take_step(optimizer)
        if by_hand:
            bare.same_buffers(model)
        losses.append(float(found.detach()))
    return losses


def seed() -> None:
    """Dropout draws other numbers on each rank."""
    torch.manual_seed(dist.get_rank())


Reference = tuple[bare.Trained, bare.Trained]
"""After the first steps, and after one more."""


def by_hand(training: Training) -> Reference:
    """Bare replicas. Collective."""
    model = bare.pack(training.build())
    optimizer = torch.optim.Adam(model.parameters(), **training.hyper)
    seed()
    found = []
    for steps in (STEPS, AFTER):
        losses = go_on(training, model, optimizer, steps, by_hand=True)
        found.append(bare.Trained(losses, bare.copied(model.state_dict()), bare.state_of(model, optimizer)))
    return found[0], found[1]


def apart(reference: bare.Trained, model: Any, optimizer: Any, losses: list[float] | None, where: str) -> Iterator[str]:
    """Where a model under an engine differs from the bare one. Collective."""
    if losses is not None:
        yield from differences(reference.losses, losses, f"{where}: losses")
    yield from differences(plain(reference.weights), plain(model.state_dict()), f"{where}: weights")
    yield from differences(in_order(reference.state), in_order(optimizer.state_dict()["state"]), f"{where}: state")


def plain(state: Any) -> dict[str, Any]:
    """Without what neuralop's models put beside their weights."""
    return {key: value for key, value in state.items() if key != "_metadata"}


def in_order(state: Any) -> dict[str, Any]:
    """States by name: engines have them in orders of their own."""
    return {name: {key: state[name][key] for key in sorted(state[name])} for name in sorted(state)}


def under(backend: str, training: Training, reference: Reference, path: str) -> Iterator[str]:
    """Train, and go in and out by every way; where anything differs from the bare model. Collective."""
    first, second = reference
    model, optimizer = wrapped(training, backend)
    fresh = plain(training.build().state_dict())
    yield from differences(fresh, plain(model.state_dict()), f"{backend}, fresh")
    seed()
    losses = go_on(training, model, optimizer, STEPS)
    draws = torch.get_rng_state()
    yield from apart(first, model, optimizer, losses, f"{backend}, trained")
    with model.full_parameters() as whole:
        known = {name: first.weights[name] for name in whole}
        yield from differences(known, dict(whole), f"{backend}, full_parameters")
    fsshard.save(path, model, optimizer)
    for way in ("load", "load_state_dict"):
        model, optimizer = wrapped(training, backend)
        if way == "load":
            fsshard.load(path, model, optimizer)
        else:
            model.load_state_dict(first.weights)
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": first.state, "param_groups": groups})
            torch.set_rng_state(draws)
        yield from apart(first, model, optimizer, None, f"{backend}, {way}")
    losses = go_on(training, model, optimizer, AFTER)
    yield from apart(second, model, optimizer, losses, f"{backend}, after {way}")


def job(name: str, folder: str) -> list[str]:
    """One training by hand and under every backend: what differs."""
    training = TRAININGS[name]()
    reference = by_hand(training)
    found = []
    for backend in DISTRIBUTED:
        if backend in training.refused:
            found += refusal(backend, training)
        else:
            found += under(backend, training, reference, f"{folder}/{backend}")
    return found


def refusal(backend: str, training: Training) -> list[str]:
    """Return what is wrong with how a backend refuses a training: "" if a typed error says what is expected."""
    try:
        go_on(training, *wrapped(training, backend), STEPS)
    except FsshardError as error:
        return [] if training.refused[backend] in str(error) else [f"{backend}: {error}"]
    return [f"{backend}: trained, and should have said: {training.refused[backend]}"]


ONCE = [name for name in TRAININGS if not name.startswith("zoo-") or name.replace("zoo-", "recipe-") not in TRAININGS]
"""Models that are in the examples' recipes and in the tests' zoo are trained as the former."""


LATER = {
    *("fno", "tfno_tt", "tfno_cp", "uno", "sfno", "gino", "vit", "mlp", "t5"),
    *("fno_dense", "fno_complex_tucker", "fno_complex_tt", "tfno_tucker"),
    *("orthogonal", "plain", "buffered", "conv_batchnorm"),
    *TOGETHER,
}
"""Left to ``make test-all``: kin of others that are trained at every commit, or parts of one model that is."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name.partition("-")[2] in LATER else name for name in ONCE]
)
def test_as_bare_replicas(ranks: Any, tmp_path: Path, name: str) -> None:
    try:
        TRAININGS[name]()
    except MissingExtra as error:
        pytest.skip(str(error))
    for found in ranks.run(job, 2, name, str(tmp_path)):
        assert not found, "\n".join(found[:20])
