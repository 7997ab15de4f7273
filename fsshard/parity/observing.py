"""What runs on the ranks to record a training, or to train once more for a comparison with a recorded one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.launching.pool_worker import tell
from fsshard.model.nested import is_array, leaves
from fsshard.parity.environment import environment
from fsshard.parity.perturbed import perturbed
from fsshard.parity.recipe import Recipe, RecipeLike, resolve
from fsshard.parity.recorded import RankTrace, StepTrace
from fsshard.parity.rounding import NotComparable, measure, reordered, samples_of
from fsshard.parity.seeding import random_state
from fsshard.parity.shadow import Shadow
from fsshard.parity.sketch import Sketch, sketch
from fsshard.parity.trace import TraceWriter, digest
from fsshard.parity.training import INITIAL, Job, Training, gradients_of, groups_of, norm_of, states_of

__all__ = [
    "BatchFacts",
    "Observed",
    "batch_facts",
    "check_regrouping",
    "observe",
    "observe_perturbed",
    "recorded_batches",
    "regrouped",
]


BatchFacts = tuple[list[list[str]], dict[str, Sketch]]


@dataclass(kw_only=True)
class Observed:
    """One rank's training, the names of the parameters, and where it ran."""

    trace: RankTrace
    parameters: list[str]
    environment: dict[str, str]


def observe(job: Job, detail: str) -> Observed:
    """Train, and note what every step gives. On every rank.

    Args:
        job: its ``folder`` is where tensors go.
        detail: one of :data:`fsshard.parity.recorded.DETAILS`.
    """
    return _Observer(job, detail).observed()


def observe_perturbed(job: Job, draws: int) -> list[RankTrace]:
    """The training as it is, and ``draws`` times with every operation rounded otherwise. On every rank."""
    found = []
    for number in range(draws + 1):
        found.append(_Observer(job, "digests", perturbed_by=number).observed().trace)
        tell((number + 1) / (draws + 1))
    return found


class _Observer:
    def __init__(self, job: Job, detail: str, perturbed_by: int = 0) -> None:
        self._job, self._run = job, Training(job)
        self._sketched = detail != "losses"
        self._writer = TraceWriter(job.folder) if detail == "tensors" else None
        self._generator = torch.Generator().manual_seed(1000 * perturbed_by + dist.get_rank()) if perturbed_by else None

    def observed(self) -> Observed:
        run = self._run
        named = [(name, value.detach().clone()) for name, value in run.engine.weights()]
        trace = RankTrace(initial=self._sketches(INITIAL, "weight", named))
        if self._writer is not None:
            trace.owned = {name: run.engine.owned(name) for name, _ in named}
        for step in range(self._job.steps):
            trace.steps.append(self._step(step))
            if self._generator is None:
                tell((step + 1) / self._job.steps)
        return Observed(trace=trace, parameters=[name for name, _ in named], environment=environment(self._job.device))

    def _step(self, number: int) -> StepTrace:
        run, batches = self._run, self._run.batches(number)
        digests, samples = batch_facts(batches)
        run.watch.take()
        with self._rounding():
            loss = run.losses(batches)
        outputs = run.watch.take() if self._sketched else []
        gradients = gradients_of(run.engine)
        found = {
            "batch": samples,
            "gradient": self._sketches(number, "gradient", [(n, g) for n, g in gradients.items() if g is not None]),
        }
        step = StepTrace(batches=digests, loss=loss, norm=norm_of(gradients), outputs=outputs, sketches=found)
        step.clipped_norm, step.groups = run.clip(), groups_of(run.engine)
        run.finish()
        tensors, step.plain = states_of(run.engine)
        found["weight"] = self._sketches(number, "weight", run.engine.weights())
        found["state"] = self._sketches(number, "state", tensors)
        found["buffer"] = self._sketches(number, "buffer", run.engine.buffers())
        step.random = random_state()
        if not self._sketched:
            step.sketches = {}
        return step

    def _rounding(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._generator is None else perturbed(self._generator)

    def _sketches(self, step: int, quantity: str, items: Iterable[tuple[str, Tensor]]) -> dict[str, Sketch]:
        """Of all tensors, which are taken also where nothing is kept: taking them may be collective."""
        if self._writer is None:
            return {name: sketch(value) for name, value in items if self._sketched}
        held = list(items)
        self._writer.tensors(step, quantity, held)
        return {name: sketch(value) for name, value in held}


# ------------------------------------------------------------------------------------------ other numbers of ranks


def regrouped(source: RecipeLike, world_size: int) -> Recipe:
    """The recipe with the batches of ``world_size`` ranks as one, divided evenly among however many ranks train."""
    recipe = resolve(source)

    def batches(rank: int, ranks: int, number: int) -> Any:
        joined = recipe.joined([recipe.batches(r, world_size, number) for r in range(world_size)])
        samples = samples_of(joined)
        if samples % ranks:
            raise NotComparable(
                f"the {samples} samples of a batch of {world_size} ranks cannot be divided evenly among {ranks}; "
                "compare with a number of ranks that divides them"
            )
        share = samples // ranks
        return reordered(joined, list(range(rank * share, (rank + 1) * share)))

    return dataclasses.replace(recipe, batches=batches)


def at_world_size(source: RecipeLike, recorded: int) -> Any:
    """A source of :func:`regrouped` that reaches the ranks."""
    return functools.partial(regrouped, source, recorded)


def batch_facts(batches: list[list[Any]]) -> BatchFacts:
    """Digests per accumulated batch and rank; and sketches of their tensors by "accumulated batch.rank.tensor"."""
    found = {}
    for micro, parts in enumerate(batches):
        for rank, batch in enumerate(parts):
            arrays = [leaf for leaf in leaves(batch) if is_array(leaf)]
            found.update({f"{micro}.{rank}.{number}": sketch(torch.as_tensor(x)) for number, x in enumerate(arrays)})
    return [[digest(batch) for batch in parts] for parts in batches], found


def recorded_batches(source: RecipeLike, world_size: int, steps: int) -> list[BatchFacts]:
    """Per step, what :func:`batch_facts` says of the batches of ``world_size`` ranks. On one rank."""
    recipe = resolve(source)
    ranks = range(world_size)
    return [
        batch_facts(
            [[recipe.batches(r, world_size, step * recipe.accumulate + n) for r in ranks] for n in _micro(recipe)]
        )
        for step in range(steps)
    ]


def _micro(recipe: Recipe) -> Iterator[int]:
    return iter(range(recipe.accumulate))


def check_regrouping(source: RecipeLike, world_size: int, device: str) -> None:
    """Raise if other numbers of ranks train something else on the same samples. On one rank.

    Raises:
        NotComparable: the model draws random numbers, mixes samples, or is in low precision.
    """
    recipe = resolve(source)
    shadow = Shadow(recipe, device)
    shadow.load(dict(shadow.module.named_parameters()).items(), shadow.module.named_buffers())
    ranks = range(world_size)
    measure(shadow, recipe, lambda: [[recipe.batches(r, world_size, n) for r in ranks] for n in _micro(recipe)], 0)
