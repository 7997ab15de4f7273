"""Runs on the ranks: keeps what each step of a training gives, or compares it with the reference's while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsshard.comm.agreement import per_rank
from fsshard.errors import RecipeError
from fsshard.launching.pool_worker import tell
from fsshard.parity.bounds import NotComparable, measure, reduction_bound, reduction_roundings, underflow
from fsshard.parity.comparing import Found, StepComparison, all_batches
from fsshard.parity.engine import (
    WrappedEngine,
    adds_in_tree,
    bare_optimizer,
    check_seen_as_they_are,
    norm_dtype,
    total_norm,
)
from fsshard.parity.one_process import perturbed
from fsshard.parity.report import Difference, RankStep, difference, worst_of
from fsshard.parity.sketch import Sketch, real_view, sketch
from fsshard.parity.trace import INITIAL, RankTrace, Rounding, Step, environment, read_tensors, write_tensors
from fsshard.parity.training import Bare, Job, Training

REFERENCE = "reference"
"""A detail besides :data:`~fsshard.parity.trace.DETAILS`: tensors without sketches, and the bounds of each step."""


def observe(job: Job, detail: str, draw: int = 0) -> tuple[RankTrace, list[str], dict[str, str]]:
    """Train, and return what every step gives, the names of the parameters and where it ran. On every rank.

    Args:
        job: its ``folder`` is where tensors go.
        detail: how much is kept: :data:`REFERENCE`, or one of :data:`~fsshard.parity.trace.DETAILS`.
        draw: if not 0, every operation is rounded otherwise, by generators that this number seeds.
    """
    run, trace, sketched = Training(job), RankTrace(), detail in ("digests", "tensors")
    generator = torch.Generator().manual_seed(1000 * draw + dist.get_rank())

    def keep(step: int, quantity: str, tensors: Mapping[str, Tensor]) -> dict[str, Sketch]:
        if detail in (REFERENCE, "tensors"):
            write_tensors(job.folder, step, quantity, tensors.items())
        return {name: sketch(value) for name, value in tensors.items()} if sketched else {}

    initial = run.weights()
    names, trace.initial = list(initial), keep(INITIAL, "weight", initial)
    del initial  # the whole model
    for number in range(job.steps):
        if detail == REFERENCE or (detail == "tensors" and not run.joins):
            trace.rounding.append(_rounding(run, number))
        rounding = perturbed(generator) if draw else None
        step, tensors = run.step(number, rounding=rounding, sketched=sketched)
        kept = {quantity: keep(number, quantity, named) for quantity, named in tensors.items()}
        step.sketches |= kept if sketched else {}
        step.outputs = [] if detail == "losses" else step.outputs
        trace.steps.append(step)
        if not draw:
            tell((number + 1) / job.steps)
    if detail == "tensors":
        trace.owned = {name: run.engine.owned(name) for name in names}
    return trace, names, environment(job.device)


def observe_perturbed(job: Job, draws: int) -> list[RankTrace]:
    """Train as it is, and ``draws`` times with every operation rounded otherwise. On every rank."""
    traces = []
    for number in range(draws + 1):
        traces.append(observe(job, "digests", number)[0])
        tell((number + 1) / (draws + 1))
    return traces


def _rounding(run: Training, step: int) -> Rounding:
    """Return the bounds of this step as far as this run can give them. Collective."""
    rounding, magnitudes, world_size = Rounding(), {}, run.job.world_size
    if run.joins or isinstance(run.engine, Bare):
        rounding = measure(run.shadow(), run.recipe, lambda: run.batches(step), step)
        rounding.aligned = run.leaves > 0
    elif reduction_roundings(world_size, run.recipe.accumulate):  # else no engine can add in another order
        found, counts = run.magnitudes(step)
        rounding = Rounding(reductions=counts, aligned=adds_in_tree(run.engine))
        magnitudes = {n: value for n, value in found.items() if reduction_roundings(world_size, counts[n])}
    write_tensors(run.job.folder, step, "magnitude", magnitudes.items())
    return rounding


def check_samples_apart(job: Job) -> None:
    """Raise NotComparable if training on the same samples in other batches gives something else. On one process."""
    run = Training(job)
    measure(run.shadow(), run.recipe, lambda: run.batches(0), 0)


# ------------------------------------------------------------------------------------------ beside the reference


def rerun(job: Job, reference: list[RankTrace]) -> list[RankStep]:
    """Train and compare with the reference, step by step. On every rank."""
    comparison = _RunComparison(Training(job), reference)
    return [comparison.step(number) for number in range(job.steps)]


class _RunComparison(StepComparison):
    """One run held against the reference."""

    recorded_in = "the reference"

    def __init__(self, run: Training, reference: list[RankTrace]) -> None:
        self.run, self.ranks, self.rank, self.owned = run, reference, run.rank, run.engine.owned
        # The reference is one process on the joined batch.
        self.joined = len(reference) == 1 and (run.job.world_size > 1 or run.mesh is not None)
        self.process, self.regrouped = 0 if self.joined else run.rank, run.joins or self.joined
        # One process has added up the gradients of the ranks' batches as the ranks do.
        in_order = reference[0].rounding[0].aligned and (run.job.world_size <= 2 or adds_in_tree(run.engine))
        self.by_leaves = run.leaves > 0 or (self.joined and in_order)
        self.own_engine = not isinstance(run.engine, WrappedEngine)
        # The reference's own process once more: nothing can add in another order.
        self.again = self.joined and run.mesh is None and dist.get_world_size() == 1
        self.sees = bool(getattr(getattr(run.engine.optimizer, "request", None), "see", None))
        self.unrepeated = False  # the optimizer sees matrices, so that a step within rounding cannot be judged
        self.lost = False  # a difference was beyond its bound: from then on there is no common start to restore
        self.gradients: Mapping[str, Tensor] = {}
        self.rounding = Rounding()
        self.magnitudes: Mapping[str, Tensor] = {}
        self.replayed: dict[str, dict[str, Tensor]] | None = None

    def step(self, number: int) -> RankStep:
        """Train and compare one step. Collective."""
        run, job = self.run, self.run.job
        self.rounding, self.magnitudes = self.ranks[self.process].rounding[number], self._read(number, "magnitude")
        # Step 0 of leaves is measured to learn whether the model or its loss mixes samples, or draws numbers.
        if run.joins and not self.joined and (number == 0 or not run.leaves):
            self.rounding = measure(run.shadow(), run.recipe, lambda: run.batches(number), number)
        initial = run.weights() if number == 0 else {}
        step, tensors = run.step(number, noted=lambda step: self._check_batches(number, step))
        self.gradients = tensors["gradient"]
        result = self.compare_step(number, step, tensors | ({"initial weight": initial} if number == 0 else {}))
        if run.mesh is not None:
            _note_causes(run.mesh, result, self.recorded("gradient"), self.gradients, self.rounding.gradients)
        if self.own_engine and not self.gradients and job.world_size > 2 and self._verdict("weight") == "different":
            raise NotComparable(
                f"engine {run.engine.name!r} shows no gradients, and on {job.world_size} ranks its "
                "weights differ: without gradients it cannot be decided whether that is rounding. Let its gradients() "
                "yield them, or compare on two ranks"
            )
        self.lost |= self._verdict() == "different"
        self._restore()
        self.gradients, self.replayed = {}, None  # their memory is needed for the next step
        tell((number + 1) / job.steps)
        return result

    def _read(self, step: int, quantity: str) -> dict[str, Tensor]:
        return read_tensors(self.run.job.folder, step, quantity, self.process)

    def _verdict(self, *quantities: str) -> str:
        """Return the worst verdict so far on some quantities, or on all."""
        found = self.result.differences
        return worst_of(d.verdict for quantity in quantities or found for d in found.get(quantity, {}).values())

    def recorded(self, quantity: str) -> Mapping[str, Tensor]:
        return self._read(INITIAL, "weight") if quantity == "initial weight" else self._read(self.number, quantity)

    def batches(self) -> Found:
        yield from ()  # they are the reference's: checked before they were trained on

    def _check_batches(self, number: int, step: Step) -> None:
        """Raise if the samples are not the reference's."""
        expected = all_batches(self.ranks, number)
        for micro, parts in enumerate(step.batches):
            for place, text in enumerate(parts):
                rank = place if self.run.joins else self.run.sample_rank
                if text != expected[micro, rank][0]:
                    raise RecipeError(
                        f"recipe.batches gave rank {rank} another batch (number {number * len(step.batches) + micro}) "
                        "than in the reference's run: batches must depend on (rank, world_size, number) only, neither "
                        "on the engine nor on random numbers that are not seeded from these three"
                    )

    def mean_loss(self) -> float:
        return self.now.loss if self.run.joins else self.run.loss_of_all(self.now.loss)

    def number_bound(self, quantity: str, got: float) -> float:
        return self.rounding.loss if quantity == "loss" and self.regrouped and not self.by_leaves else 0.0

    def norms(self) -> Found:
        """Compare the norm by which the engine clipped."""
        # It is the reference's, or, where gradients differ by rounding, that of this run's own gradients.
        expected, clipped, clipping = self.before.clipped_norm, self.now.clipped_norm, self.run.recipe.clipping
        if clipped is None or expected is None or clipping is None:
            return
        found = self.number_difference("norm", expected, clipped)
        wide = norm_dtype(self.gradients) is torch.float64
        if found.verdict != "exact" and (wide or self._verdict("gradient") == "bound"):
            own = total_norm(self.gradients, clipping[1])
            # Summed in another order in float64, then rounded: the next float32 at most. A norm that stays float64
            # shows the order of its sum: at most a rounding per summand.
            summands = sum(gradient.numel() for gradient in self.gradients.values())
            ulp = (2.0**-53 * summands if wide else 2.0**-23) * abs(own)
            verdict = "bound" if abs(own - clipped) <= ulp else "different"
            found = replace(found, verdict=verdict, bound=abs(own - expected) + ulp)
        yield "", found

    def tensor(self, quantity: str, name: str, expected: Tensor, got: Tensor) -> Difference:
        found = difference(expected, got, self._bound(name, got) if quantity == "gradient" else 0.0, rank=self.rank)
        if found.verdict == "exact" or quantity not in ("weight", "state"):
            return found
        if self.replayed is None:
            # Weights and state are the reference's, or what the gradients of this run make of it: if these, or the
            # norm, differ by rounding, and nothing by more.
            before = [q for q in self.result.differences if q not in ("weight", "state")]
            rounded = self._verdict("gradient", "norm") == "bound" and self._verdict(*before) == "bound"
            self.unrepeated |= rounded and self.sees
            replays = rounded and not self.lost and not self.sees
            self.replayed = self._replay() if replays else {"weight": {}, "state": {}}
        replayed = self.replayed[quantity].get(name)
        if replayed is None:
            return found
        again = difference(replayed, got, rank=self.rank)
        if again.verdict == "exact":  # one process makes exactly these bits of this run's gradients
            return replace(found, verdict="bound", bound=found.max_abs)
        note = f"{again.ulps:.3g} ulp from what the optimizer makes of this run's gradients on one process"
        return replace(found, verdict="different", note=note)

    def _bound(self, name: str, gradient: Tensor) -> Tensor | float:
        """Return how far rounding may carry a gradient, as a number or element by element of the real view."""
        # On other samples, or with a divided model, every operation may round; else only the sum over ranks.
        if self.by_leaves:
            return 0.0
        if self.regrouped:
            return 0.0 if self.again else float(self.rounding.gradients.get(name, 0.0))
        world_size = self.run.job.world_size
        aligned = self.rounding.aligned and adds_in_tree(self.run.engine)
        reductions = self.rounding.reductions.get(name, 1)
        roundings = reduction_roundings(world_size, reductions, aligned=aligned)
        if aligned and not roundings:
            return 0.0
        least = underflow(gradient.dtype, world_size, self.run.recipe.accumulate)
        if roundings and name in self.magnitudes:
            return reduction_bound(self.magnitudes[name], roundings) + least
        return least

    # ------------------------------------------------------------------- the optimizer's step again, a common start

    def _replay(self) -> dict[str, dict[str, Tensor]]:
        """Step the recipe's optimizer on one process, from the reference's state, with this run's gradients."""
        # An update may amplify a rounding error without limit (Adam divides by a square root that can be zero), so no
        # bound is derived for it: these must be this run's weights and state, to the last bit.
        recipe, device, clipping = self.run.recipe, self.run.job.device, self.run.recipe.clipping
        weights, scale = self._read(self.number - 1, "weight"), None
        if clipping is not None and self.now.clipped_norm is not None:
            # torch.nn.utils.clip_grad_norm_'s formula, from the norm that this run clipped with
            norm = torch.tensor(self.now.clipped_norm, dtype=norm_dtype(self.gradients))
            scale = torch.clamp(clipping[0] / (norm + 1e-6), max=1.0)
        held: dict[str, torch.nn.Parameter] = {}
        for name in [name for group in self.before.groups for name in group["params"]]:
            parameter = held[name] = torch.nn.Parameter(weights[name].to(device))
            gradient = self.gradients.get(name)
            if gradient is not None:
                # multiplied where the run multiplied: kernels of another device may round otherwise
                factor = None if scale is None else scale.to(gradient.device, gradient.dtype)
                parameter.grad = gradient.clone() if factor is None else gradient * factor
        groups = [{**group, "params": [held[name] for name in group["params"]]} for group in self.before.groups]
        optimizer = bare_optimizer(recipe, groups)
        if self.number > 0:
            for name, state in self._states(self.number - 1).items():
                for key, value in state.items():
                    kept = not isinstance(value, Tensor) or not value.dim()  # torch keeps counters on the CPU
                    optimizer.state[held[name]][key] = value if kept else value.to(device)
        optimizer.step()
        states = ((name, optimizer.state.get(parameter, {})) for name, parameter in held.items())
        return {
            "weight": {name: parameter.detach() for name, parameter in held.items()},
            "state": {f"{n}: {k}": v for n, state in states for k, v in state.items() if isinstance(v, Tensor)},
        }

    def _states(self, step: int) -> dict[str, dict[str, Any]]:
        """Return the reference's optimizer state after a step, by parameter."""
        states: dict[str, dict[str, Any]] = {}
        plain = self.ranks[self.process].steps[step].plain
        for name, value in [*self._read(step, "state").items(), *plain.items()]:
            parameter, _, key = name.rpartition(": ")
            states.setdefault(parameter, {})[key] = value
        return states

    def _restore(self) -> None:
        """Go back onto the reference, if this step came apart within its bounds on any rank. Collective."""
        # Every step starts from the reference's weights and state, so that no bound has to follow errors from step to
        # step. After a real difference the run goes on freely, or its loss curve would snap back and hide the fault.
        apart = self._verdict("weight", "state") != "exact"
        flags = torch.tensor([apart, self.lost, self.unrepeated], dtype=torch.float32, device=self.run.job.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        if flags[2]:
            check_seen_as_they_are({"see": True})
        if not flags[0] or flags[1]:
            return
        states = self._states(self.number)
        for key, value in [item for state in states.values() for item in state.items()]:
            if isinstance(value, dict):
                raise NotComparable(
                    f"the optimizer's state {key!r} is neither tensor nor number: it cannot be reset to the "
                    "reference's, which a comparison within a rounding bound needs; compare on two ranks"
                )
        self.run.engine.restore(self.recorded("weight").items(), states)


# -------------------------------------------------------------------------------- what a wrong split does to gradients


def _note_causes(
    mesh: DeviceMesh,
    step: RankStep,
    expected: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    bounds: Mapping[str, float],
) -> None:
    """Note at the loss and each gradient that differ which usual mistake explains it, if one does. Collective."""
    sizes = {dim: mesh[dim].size() for dim in mesh.mesh_dim_names or () if mesh[dim].size() > 1}
    loss = step.differences["loss"][""]
    for dim, ranks in sizes.items() if loss.verdict == "different" else ():
        note = ""
        if abs(step.loss * ranks - step.reference_loss) <= loss.bound * ranks:
            note = f"it is {ranks} times too small: if the losses of {dim!r}'s ranks add up, Split(adds=({dim!r},))"
        elif abs(step.loss / ranks - step.reference_loss) <= loss.bound:
            note = f"it is {ranks} times too large: if each rank of {dim!r} has all of it, it is not for Split(adds=)"
        if note:
            step.differences["loss"][""] = replace(loss, note=note)
            break
    found, everyone = step.differences.get("gradient", {}), dist.group.WORLD
    assert everyone is not None
    # All ranks ask about the same gradients, in one order, since they add them up to find out.
    whole = [n for n, gradient in gradients.items() if n in expected and gradient.shape == expected[n].shape]
    told = per_rank(everyone, ([name for name, d in found.items() if d.verdict == "different"], whole))
    for name in dict.fromkeys(name for different, _ in told for name in different):
        if all(name in held for _, held in told):
            one, other = (real_view(side[name]).double() for side in (expected, gradients))
            note = _cause(mesh, sizes, one, other, bounds.get(name, 0.0))
            if note and found[name].verdict == "different":
                found[name] = replace(found[name], note=note)


def _cause(mesh: DeviceMesh, sizes: Mapping[str, int], expected: Tensor, gradient: Tensor, bound: float) -> str:
    """Return the mistake in words, "" if it is none of them. Collective."""

    def near(value: Tensor, within: float) -> bool:
        return bool(((value - expected).abs() <= within).all())

    causes: list[tuple[bool, str]] = []
    for dim, ranks in sizes.items():
        total, where = gradient.clone(), f"mesh[{dim!r}]"
        dist.all_reduce(total, group=mesh[dim].get_group())
        apart, times = not torch.equal(total, gradient * ranks), f"the number of ranks of {dim!r}"
        parts = f"the parts that the {ranks} ranks of {dim!r} have add up to it: replicated={{...: {where}}}"
        causes += [
            (apart and near(total, bound * ranks), parts),
            (
                apart and near(total / ranks, bound),
                f'the mean over {dim!r} is right: replicated={{...: ({where}, "mean")}}',
            ),
            (
                near(gradient / ranks, bound),
                f"it is {ranks} times too large, {times}: added up where all have the whole?",
            ),
            (
                near(gradient * ranks, bound * ranks),
                f"it is {ranks} times too small, {times}: averaged where each has a part?",
            ),
        ]
    length = float(expected.square().sum())
    ratio = float((gradient * expected).sum()) / length if length else 0.0
    if ratio:
        causes.append(
            (near(gradient / ratio, bound / abs(ratio) + bound), f"it is {ratio:.6g} times what it should be")
        )
    return next((text for right, text in causes if right), "")
