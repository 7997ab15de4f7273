"""Compares a run with the reference's, tensor by tensor and element by element, while it trains. Runs on the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from fsshard.parity.difference import difference, number_difference
from fsshard.parity.engine import WrappedEngine, norm_dtype, total_norm
from fsshard.parity.report import Difference, RankStep
from fsshard.parity.sketch import digest, real_view
from fsshard.parity.trace import INITIAL, RankTrace, Rounding, Shelf
from fsshard.parity.training import Job, SplitTraining, Training

__all__ = ["rerun"]


def rerun(job: Job, reference: list[RankTrace]) -> list[RankStep]:
    """Train and compare with the reference, step by step. On every rank."""
    comparison = _RunComparison(Training(job) if job.mesh is None else SplitTraining(job), reference)
    steps = []
    for number in range(job.steps):
        steps.append(comparison.step(number))
        tell((number + 1) / job.steps)
    return steps


class _RunComparison(StepComparison):
    """One run held against the reference."""

    recorded_in = "the reference"

    def __init__(self, run: Training, reference: list[RankTrace]) -> None:
        job = run.job
        process, regrouped = (0 if job.reference_joined else run.rank), run.joins or job.reference_joined
        own_engine = not isinstance(run.engine, WrappedEngine)
        super().__init__(reference, process, rank=run.rank, regrouped=regrouped, own_engine=own_engine)
        self.run = run
        # The reference's own process once more: nothing can add in another order.
        self.again = job.reference_joined and job.mesh is None and dist.get_world_size() == 1
        self.lost = False  # a difference was beyond its bound: from then on there is no common start to restore
        self.gradients: dict[str, Tensor | None] = {}
        self.clipped: float | None = None
        self.rounding = Rounding()
        self.magnitudes: Mapping[str, Tensor] = {}
        self.near = False  # gradients or norm differ by rounding, and nothing by more
        self.replayed: dict[str, dict[str, Tensor]] | None = None

    def step(self, number: int) -> RankStep:
        """Train and compare one step. Collective."""
        run = self.run
        self.rounding, self.magnitudes = self.ranks[self.process].rounding[number], self._shelf(number, "magnitude")
        if run.joins and not run.job.reference_joined:
            self.rounding = measure(run.shadow(), run.recipe, lambda: run.batches(number), number)
        result = self.compare_step(number, run.stages(number))
        self.lost |= any(self._verdict(quantity) == "different" for quantity in result.differences)
        self._restore()
        self.gradients, self.replayed, self.near = {}, None, False  # their memory is needed for the next step
        return result

    def _shelf(self, step: int, quantity: str) -> Shelf:
        return Shelf(self.run.job.folder, step, quantity, self.process)

    def recorded(self, quantity: str) -> Mapping[str, Tensor]:
        return self._shelf(INITIAL, "weight") if quantity == "initial weight" else self._shelf(self.number, quantity)

    def owned(self, name: str) -> tuple[int, int]:
        return self.run.engine.owned(name)

    def batch(self, batches: list[list[Any]]) -> Found:
        """Raise if the samples are not the reference's."""
        expected = all_batches(self.ranks, self.number)
        for micro, parts in enumerate(batches):
            for place, batch in enumerate(parts):
                rank = place if self.run.joins else self.run.sample_rank
                if digest(batch) != expected[micro, rank][0]:
                    raise RecipeError(
                        f"recipe.batches gave rank {rank} another batch (number {self.number * len(batches) + micro}) "
                        "than in the reference's run: batches must depend on (rank, world_size, number) only, neither "
                        "on the engine nor on random numbers that are not seeded from these three"
                    )
        yield from ()

    def mean_loss(self, loss: float) -> float:
        return loss if self.run.joins else self.run.loss_of_all(loss)

    def number_difference(self, quantity: str, expected: float, got: float) -> Difference:
        bound = self.rounding.loss if quantity == "loss" and self.regrouped else 0.0
        return number_difference(expected, got, bound, rank=self.rank)

    def gradient(self, gradients: Mapping[str, Tensor | None]) -> Found:
        self.gradients = dict(gradients)
        if gradients:
            yield from super().gradient(gradients)
            if isinstance(self.run, SplitTraining):
                _note_causes(self.run.mesh, self.result, self.recorded("gradient"), gradients, self.rounding.gradients)

    def norm(self, value: tuple[float, float | None]) -> Found:
        """Compare the norm by which the engine clipped."""
        # It is the reference's, or, where gradients differ by rounding, that of this run's own gradients.
        self.result.norm, clipped = value
        self.clipped = clipped
        if clipped is None or self.before.clipped_norm is None:
            return
        found = self.number_difference("norm", self.before.clipped_norm, clipped)
        wide = norm_dtype(self.gradients) is torch.float64
        near = self._verdict("gradient") == "bound"
        if found.verdict != "exact" and (near or wide) and self.run.recipe.clipping is not None:
            own = total_norm(self.gradients, self.run.recipe.clipping[1])
            # Summed in another order in float64, then rounded: the next float32 at most. A norm that stays float64
            # shows the order of its sum: at most a rounding per summand.
            summands = sum(g.numel() for g in self.gradients.values() if g is not None)
            ulp = (2.0**-53 * summands if wide else 2.0**-23) * abs(own)
            verdict = "bound" if abs(own - clipped) <= ulp else "different"
            found = replace(found, verdict=verdict, bound=abs(own - self.before.clipped_norm) + ulp)
        yield "", found

    def groups(self, groups: Sequence[Mapping[str, Any]]) -> Found:
        yield from super().groups(groups)
        verdicts = [self._verdict(quantity) for quantity in self.result.differences]
        # Weights and state are the reference's, or what the gradients of this run make of it.
        near = "bound" in (self._verdict("gradient"), self._verdict("norm"))
        self.near = near and "different" not in verdicts and not self.lost

    def state(self, value: tuple[Iterable[tuple[str, Any]], Mapping[str, Any]]) -> Found:
        yield from super().state(value)
        world_size = self.run.job.world_size
        if not self.gradients and world_size > 2 and self._verdict("weight") == "different":
            raise NotComparable(
                f"engine {self.run.engine.name!r} shows no gradients, and on {world_size} ranks its "
                "weights differ: without gradients it cannot be decided whether that is rounding. Let its gradients() "
                "yield them, or compare on two ranks"
            )

    def tensor(self, quantity: str, name: str, expected: Tensor, got: Tensor) -> Difference:
        found = difference(expected, got, self._bound(name, got) if quantity == "gradient" else 0.0, rank=self.rank)
        if found.verdict == "exact" or not self.near or quantity not in ("weight", "state"):
            return found
        if self.replayed is None:
            self.replayed = self._replay()
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
        if self.regrouped:
            return 0.0 if self.again else float(self.rounding.gradients.get(name, 0.0))
        world_size = self.run.job.world_size
        least = underflow(gradient.dtype, world_size, self.run.recipe.accumulate)
        roundings = reduction_roundings(world_size, self.rounding.reductions.get(name, 1))
        if roundings and name in self.magnitudes:
            return reduction_bound(self.magnitudes[name], roundings) + least
        return least

    # -------------------------------------------------------------------------------------- the optimizer's step again

    def _replay(self) -> dict[str, dict[str, Tensor]]:
        """Step the recipe's optimizer on one process, from the reference's state, with this run's gradients."""
        # An update may amplify a rounding error without limit (Adam divides by a square root that can be zero), so no
        # bound is derived for it: these must be this run's weights and state, to the last bit.
        recipe, device, clipping = self.run.recipe, self.run.job.device, self.run.recipe.clipping
        weights, scale = self._shelf(self.number - 1, "weight"), None
        if clipping is not None and self.clipped is not None:
            # torch.nn.utils.clip_grad_norm_'s formula, from the norm that this run clipped with
            norm = torch.tensor(self.clipped, dtype=norm_dtype(self.gradients))
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
        optimizer = recipe.optimizer(groups, **recipe.hyper)
        if self.number > 0:
            for name, state in self._states(self.number - 1).items():
                for key, value in state.items():
                    counter = isinstance(value, Tensor) and not value.dim()  # torch keeps these on the CPU
                    kept = counter or not isinstance(value, Tensor)
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
        for name, value in [*self._shelf(step, "state").items(), *plain.items()]:
            parameter, _, key = name.rpartition(": ")
            states.setdefault(parameter, {})[key] = value
        return states

    # ------------------------------------------------------------------------------------------------- a common start

    def _verdict(self, quantity: str) -> str:
        verdicts = {found.verdict for found in self.result.differences.get(quantity, {}).values()}
        return next((verdict for verdict in ("different", "bound") if verdict in verdicts), "exact")

    def _restore(self) -> None:
        """Go back onto the reference, if this step came apart within its bounds on any rank. Collective."""
        # Every step starts from the reference's weights and state, so that no bound has to follow errors from step to
        # step. After a real difference the run goes on freely, or its loss curve would snap back and hide the fault.
        apart = any(self._verdict(quantity) != "exact" for quantity in ("weight", "state"))
        flags = torch.tensor([float(apart), float(self.lost)], device=self.run.job.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
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
    gradients: Mapping[str, Tensor | None],
    bounds: Mapping[str, float],
) -> None:
    """Note beside the loss and each gradient that differ which usual mistake explains it, if one does. Collective.

    Args:
        mesh: of all ranks.
        step: whose differences get the notes.
        expected: gradients of one process.
        gradients: this rank's, whole.
        bounds: by name, how far rounding may carry an element.
    """
    step.differences["loss"][""] = _loss_cause(mesh, step)
    found, everyone = step.differences.get("gradient", {}), dist.group.WORLD
    assert everyone is not None
    mine = [name for name, difference in found.items() if difference.verdict == "different"]
    asked: Iterable[list[str]] = per_rank(everyone, mine)
    for name in dict.fromkeys(name for each in asked for name in each):
        gradient = gradients.get(name)
        right = name in expected and gradient is not None and gradient.shape == expected[name].shape
        if not all(per_rank(everyone, right)) or gradient is None:
            continue
        note = _cause(mesh, real_view(expected[name]).double(), real_view(gradient).double(), bounds.get(name, 0.0))
        if note and found[name].verdict == "different":
            found[name] = replace(found[name], note=note)


def _loss_cause(mesh: DeviceMesh, step: RankStep) -> Difference:
    found = step.differences["loss"][""]
    for dim in mesh.mesh_dim_names or ():
        ranks = mesh[dim].size()
        if found.verdict != "different" or ranks == 1:
            continue
        if abs(step.loss * ranks - step.reference_loss) <= found.bound * ranks:
            note = f"it is {ranks} times too small: if the losses of {dim!r}'s ranks add up, Split(adds=({dim!r},))"
            return replace(found, note=note)
        if abs(step.loss / ranks - step.reference_loss) <= found.bound:
            note = f"it is {ranks} times too large: if each rank of {dim!r} has all of it, it is not for Split(adds=)"
            return replace(found, note=note)
    return found


def _cause(mesh: DeviceMesh, expected: Tensor, gradient: Tensor, bound: float) -> str:
    """Return the mistake in words, "" if it is none of them. Collective."""

    def near(value: Tensor, within: float) -> bool:
        return bool(((value - expected).abs() <= within).all())

    said = ""
    for dim in mesh.mesh_dim_names or ():
        total = gradient.clone()
        dist.all_reduce(total, group=mesh[dim].get_group())
        ranks = mesh[dim].size()
        if ranks == 1 or said:
            continue
        apart = not torch.equal(total, gradient * ranks)
        if apart and near(total, bound * ranks):
            said = f"the parts that the {ranks} ranks of {dim!r} have add up to it: replicated={{...: mesh[{dim!r}]}}"
        elif apart and near(total / ranks, bound):
            said = f'the mean over {dim!r} is right: replicated={{...: (mesh[{dim!r}], "mean")}}'
        elif near(gradient / ranks, bound):
            said = f"it is {ranks} times too large, the number of ranks of {dim!r}: added up where all have the whole?"
        elif near(gradient * ranks, bound * ranks):
            said = f"it is {ranks} times too small, the number of ranks of {dim!r}: averaged where each has a part?"
    length = float(expected.square().sum())
    ratio = float((gradient * expected).sum()) / length if length else 0.0
    if not said and ratio and near(gradient / ratio, bound / abs(ratio) + bound):
        return f"it is {ratio:.6g} times what it should be"
    return said
