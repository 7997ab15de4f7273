"""Runs on the ranks: keeps what each step of a training gives, or compares it with the reference's while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsshard.comm.agreement import per_rank
from fsshard.errors import RecipeError
from fsshard.launching.pool_worker import tell
from fsshard.parity.bounds import NotComparable, measure, reduction_bound, reduction_roundings, underflow
from fsshard.parity.comparing import Differences, StepComparison, all_batches
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
from fsshard.parity.trace import (
    INITIAL,
    NamedTensors,
    RankTrace,
    Rounding,
    Step,
    Values,
    environment,
    read_tensors,
    write_tensors,
)
from fsshard.parity.training import Bare, Job, Training
from fsshard.recipes.recipe import Sizes

# What a rank saw, the names of the parameters, and where it ran.
Observation = tuple[RankTrace, list[str], dict[str, str]]
# A detail besides DETAILS: tensors without sketches, and the bounds of each step.
REFERENCE = "reference"


def observe(job: Job, detail: str, draw: int = 0) -> Observation:
    """Train, and return what every step gives, the names of the parameters and where it ran. On every rank.

    Args:
        job: its ``folder`` is where tensors go.
        detail: how much is kept: :data:`REFERENCE`, or one of :data:`~fsshard.parity.trace.DETAILS`.
        draw: if not 0, every operation is rounded otherwise, by generators that this number seeds.
    """
    run = Training(job)
    trace = RankTrace()
    sketched = detail in ("digests", "tensors")
    seed = 1000 * draw + dist.get_rank()
    generator = torch.Generator().manual_seed(seed)

    def keep(
        step: int,
        quantity: str,
        tensors: NamedTensors,
    ) -> dict[str, Sketch]:
        if detail in (REFERENCE, "tensors"):
            write_tensors(job.folder, step, quantity, tensors.items())
        if not sketched:
            return {}
        return {name: sketch(value) for name, value in tensors.items()}

    initial = run.weights()
    names = list(initial)
    trace.initial = keep(INITIAL, "weight", initial)
    # It is the whole model, whose memory the training needs.
    del initial
    for number in range(job.steps):
        if detail == REFERENCE or (detail == "tensors" and not run.joins):
            bounds = _rounding(run, number)
            trace.rounding.append(bounds)
        rounding = perturbed(generator) if draw else None
        step, tensors = run.step(number, rounding=rounding, sketched=sketched)
        for quantity, values in tensors.items():
            sketches = keep(number, quantity, values)
            if sketched:
                step.sketches[quantity] = sketches
        if detail == "losses":
            step.outputs = []
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
        trace, *_ = observe(job, "digests", number)
        traces.append(trace)
        tell((number + 1) / (draws + 1))
    return traces


def _rounding(run: Training, step: int) -> Rounding:
    """Return the bounds of this step as far as this run can give them. Collective."""
    rounding = Rounding()
    magnitudes = {}
    world_size = run.job.world_size
    if run.joins or isinstance(run.engine, Bare):
        rounding = _measured(run, step)
        rounding.aligned = run.leaves > 0
    # Without roundings no engine can add in another order.
    elif reduction_roundings(world_size, run.recipe.accumulate):
        sums, counts = run.magnitudes(step)
        rounding = Rounding(reductions=counts, aligned=adds_in_tree(run.engine))
        for name, value in sums.items():
            if reduction_roundings(world_size, counts[name]):
                magnitudes[name] = value
    write_tensors(run.job.folder, step, "magnitude", magnitudes.items())
    return rounding


def _measured(run: Training, step: int) -> Rounding:
    shadow = run.shadow()
    return measure(shadow, run.recipe, lambda: run.batches(step), step)


def check_samples_apart(job: Job) -> None:
    """Raise NotComparable if training on the same samples in other batches gives something else. On one process."""
    run = Training(job)
    _measured(run, 0)


# ------------------------------------------------------------------------------------------ beside the reference


def rerun(job: Job, reference: list[RankTrace]) -> list[RankStep]:
    """Train and compare with the reference, step by step. On every rank."""
    comparison = _RunComparison(Training(job), reference)
    return list(map(comparison.step, range(job.steps)))


class _RunComparison(StepComparison):
    """One run held against the reference."""

    recorded_in = "the reference"

    def __init__(self, run: Training, reference: list[RankTrace]) -> None:
        self.run = run
        self.ranks = reference
        self.rank = run.rank
        self.owned = run.engine.owned
        several = run.job.world_size > 1 or run.mesh is not None
        # The reference is one process on the joined batch.
        self.joined = several and len(reference) == 1
        self.process = 0 if self.joined else run.rank
        self.regrouped = run.joins or self.joined
        # One process has added up the gradients of the ranks' batches as the ranks do.
        in_order = reference[0].rounding[0].aligned
        # Of two ranks there is one order, whatever the engine.
        if run.job.world_size > 2:
            in_order = in_order and adds_in_tree(run.engine)
        self.by_leaves = run.leaves > 0 or (self.joined and in_order)
        self.is_users_engine = not isinstance(run.engine, WrappedEngine)
        alone = run.mesh is None and dist.get_world_size() == 1
        # The reference's own process once more: nothing can add in another order.
        self.again = self.joined and alone
        request = getattr(run.engine.optimizer, "request", None)
        # Only fsshard's optimizers know what they were asked for.
        self.sees = bool(getattr(request, "see", None))
        # The optimizer sees matrices, so that a step within rounding cannot be judged.
        self.unrepeated = False
        # A difference was beyond its bound: from then on there is no common start to restore.
        self.lost = False
        self.gradients: NamedTensors = {}
        self.rounding = Rounding()
        self.magnitudes: NamedTensors = {}
        self.replayed: dict[str, NamedTensors] | None = None

    def step(self, number: int) -> RankStep:
        """Train and compare one step. Collective."""
        run = self.run
        self.rounding = self.ranks[self.process].rounding[number]
        self.magnitudes = self._read(number, "magnitude")
        # Step 0 of leaves is measured to learn whether the model or its loss mixes samples, or draws numbers.
        if run.joins and not self.joined and (number == 0 or not run.leaves):
            self.rounding = _measured(run, number)
        initial = {}
        if number == 0:
            initial["initial weight"] = run.weights()
        check = partial(self._check_batches, number)
        step, tensors = run.step(number, noted=check)
        self.gradients = tensors["gradient"]
        result = self.compare_step(number, step, tensors | initial)
        if run.mesh is not None:
            expected = self.recorded("gradient")
            bounds = self.rounding.gradients
            _note_causes(run.mesh, result, expected, self.gradients, bounds)
        if self.is_users_engine and not self.gradients:
            self._check_weights()
        self.lost |= self._verdict() == "different"
        self._restore()
        # Their memory is needed for the next step.
        self.gradients = {}
        self.replayed = None
        tell((number + 1) / run.job.steps)
        return result

    def _check_weights(self) -> None:
        """Raise if they differ under an engine that shows no gradients, on ranks that may add in another order."""
        world_size = self.run.job.world_size
        if world_size > 2 and self._verdict("weight") == "different":
            raise NotComparable(
                f"engine {self.run.engine.name!r} shows no gradients, and on {world_size} ranks its "
                "weights differ: without gradients it cannot be decided whether that is rounding. Let its gradients() "
                "yield them, or compare on two ranks"
            )

    def _read(self, step: int, quantity: str) -> NamedTensors:
        return read_tensors(self.run.job.folder, step, quantity, self.process)

    def _verdict(self, *quantities: str) -> str:
        """Return the worst verdict so far on some quantities, or on all."""
        differences = self.result.differences
        verdicts = set()
        for quantity in quantities or differences:
            for item in differences.get(quantity, {}).values():
                verdicts.add(item.verdict)
        return worst_of(verdicts)

    def recorded(self, quantity: str) -> NamedTensors:
        if quantity == "initial weight":
            return self._read(INITIAL, "weight")
        return self._read(self.number, quantity)

    def batches(self) -> Differences:
        # They are the reference's, which was checked before they were trained on.
        yield from ()

    def _check_batches(self, number: int, step: Step) -> None:
        """Raise if the samples are not the reference's."""
        expected = all_batches(self.ranks, number)
        first = number * len(step.batches)
        for micro, digests in enumerate(step.batches):
            batch = first + micro
            for place, digest in enumerate(digests):
                rank = place if self.run.joins else self.run.sample_rank
                expected_digest, _ = expected[micro, rank]
                if digest != expected_digest:
                    raise RecipeError(
                        f"recipe.batches gave rank {rank} another batch (number {batch}) "
                        "than in the reference's run: batches must depend on (rank, world_size, number) only, neither "
                        "on the engine nor on random numbers that are not seeded from these three"
                    )

    def mean_loss(self) -> float:
        if self.run.joins:
            return self.now.loss
        return self.run.loss_of_all(self.now.loss)

    def number_bound(self, quantity: str, got: float) -> float:
        # On the same samples, or with their sums in the ranks' order, nothing rounds otherwise.
        if quantity != "loss" or self.by_leaves or not self.regrouped:
            return 0.0
        return self.rounding.loss

    def norms(self) -> Differences:
        """Compare the norm by which the engine clipped."""
        # It is the reference's, or, where gradients differ by rounding, that of this run's own gradients.
        expected = self.before.clipped_norm
        clipped = self.now.clipped_norm
        clipping = self.run.recipe.clipping
        if clipped is None or expected is None or clipping is None:
            return
        _, norm_type = clipping
        item = self.number_difference("norm", expected, clipped)
        wide = norm_dtype(self.gradients) is torch.float64
        if item.verdict != "exact" and (wide or self._verdict("gradient") == "bound"):
            own = total_norm(self.gradients, norm_type)
            # Summed in another order in float64, then rounded: the next float32 at most. A norm that stays float64
            # shows the order of its sum: at most a rounding per summand.
            relative = 2.0**-23
            if wide:
                summands = sum(map(Tensor.numel, self.gradients.values()))
                relative = 2.0**-53 * summands
            ulp = relative * abs(own)
            gap = abs(own - clipped)
            verdict = "bound" if gap <= ulp else "different"
            bound = abs(own - expected) + ulp
            item = replace(item, verdict=verdict, bound=bound)
        yield "", item

    def tensor(
        self,
        quantity: str,
        name: str,
        expected: Tensor,
        got: Tensor,
    ) -> Difference:
        bound = self._bound(name, got) if quantity == "gradient" else 0.0
        item = difference(expected, got, bound, rank=self.rank)
        if item.verdict == "exact" or quantity not in ("weight", "state"):
            return item
        if self.replayed is None:
            self.replayed = {"weight": {}, "state": {}}
            # Weights and state are the reference's, or what the gradients of this run make of it: if these, or the
            # norm, differ by rounding, and nothing by more.
            before = [other for other in self.result.differences if other not in self.replayed]
            gradients_round = self._verdict("gradient", "norm") == "bound"
            rounded = gradients_round and self._verdict(*before) == "bound"
            self.unrepeated |= rounded and self.sees
            if rounded and not self.lost and not self.sees:
                self.replayed = self._replay()
        replayed = self.replayed[quantity].get(name)
        if replayed is None:
            return item
        again = difference(replayed, got, rank=self.rank)
        # One process makes exactly these bits of this run's gradients, so the optimizer's step is right.
        if again.verdict == "exact":
            return replace(item, verdict="bound", bound=item.max_abs)
        note = f"{again.ulps:.3g} ulp from what the optimizer makes of this run's gradients on one process"
        return replace(item, verdict="different", note=note)

    def _bound(self, name: str, gradient: Tensor) -> Tensor | float:
        """Return how far rounding may carry a gradient, as a number or element by element of the real view."""
        if self.again or self.by_leaves:
            return 0.0
        # On other samples, or with a divided model, every operation may round; else only the sum over ranks.
        if self.regrouped:
            return self.rounding.gradients.get(name, 0.0)
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

    def _replay(self) -> dict[str, NamedTensors]:
        """Step the recipe's optimizer on one process, from the reference's state, with this run's gradients."""
        # An update may amplify a rounding error without limit (Adam divides by a square root that can be zero), so no
        # bound is derived for it: these must be this run's weights and state, to the last bit.
        device = self.run.job.device
        weights = self._read(self.number - 1, "weight")
        gradients = self._clipped_gradients()
        parameters = {}
        groups = []
        for group in self.before.groups:
            members = []
            for name in group["params"]:
                weight = weights[name].to(device)
                parameter = torch.nn.Parameter(weight)
                parameter.grad = gradients.get(name)
                parameters[name] = parameter
                members.append(parameter)
            groups.append({**group, "params": members})
        optimizer = bare_optimizer(self.run.recipe, groups)
        if self.number > 0:
            for name, state in self._states(self.number - 1).items():
                for key, value in state.items():
                    # torch keeps counters on the CPU.
                    if isinstance(value, Tensor) and value.dim():
                        value = value.to(device)
                    optimizer.state[parameters[name]][key] = value
        optimizer.step()
        states = {}
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    states[f"{name}: {key}"] = value
        # What was trained here is compared, and nothing more is computed with it.
        stepped = {name: parameter.detach() for name, parameter in parameters.items()}
        return {"weight": stepped, "state": states}

    def _clipped_gradients(self) -> NamedTensors:
        """Return copies of the gradients as this run clipped them."""
        clipping = self.run.recipe.clipping
        if clipping is None or self.now.clipped_norm is None:
            return {name: gradient.clone() for name, gradient in self.gradients.items()}
        # torch.nn.utils.clip_grad_norm_'s formula, from the norm that this run clipped with
        norm = torch.tensor(self.now.clipped_norm, dtype=norm_dtype(self.gradients))
        scale = torch.clamp(clipping[0] / (norm + 1e-6), max=1.0)
        clipped = {}
        for name, gradient in self.gradients.items():
            # Multiplied where the run multiplied: kernels of another device may round otherwise.
            factor = scale.to(gradient.device, gradient.dtype)
            clipped[name] = gradient * factor
        return clipped

    def _states(self, step: int) -> dict[str, Values]:
        """Return the reference's optimizer state after a step, by parameter."""
        states: dict[str, Values] = {}
        recorded = self.ranks[self.process].steps[step]
        values = {**self._read(step, "state"), **recorded.plain}
        for name, value in values.items():
            parameter, _, key = name.rpartition(": ")
            states.setdefault(parameter, {})[key] = value
        return states

    def _restore(self) -> None:
        """Go back onto the reference, if this step came apart within its bounds on any rank. Collective."""
        # Every step starts from the reference's weights and state, so that no bound has to follow errors from step to
        # step. After a real difference the run goes on freely, or its loss curve would snap back and hide the fault.
        apart = self._verdict("weight", "state") != "exact"
        flags = torch.tensor(
            [apart, self.lost, self.unrepeated],
            dtype=torch.float32,
            device=self.run.job.device,
        )
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        if flags[2]:
            check_seen_as_they_are({"see": True})
        if not flags[0] or flags[1]:
            return
        states = self._states(self.number)
        for state in states.values():
            for key, value in state.items():
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
    expected: NamedTensors,
    gradients: NamedTensors,
    bounds: Mapping[str, float],
) -> None:
    """Note at the loss and each gradient that differ which usual mistake explains it, if one does. Collective."""
    sizes = {}
    for dim in mesh.mesh_dim_names or ():
        size = mesh[dim].size()
        # Along a dimension of one rank nothing is divided.
        if size > 1:
            sizes[dim] = size
    losses = step.differences["loss"]
    loss = losses[""]
    if loss.verdict == "different":
        note = _cause_of_loss(sizes, step, loss.bound)
        losses[""] = replace(loss, note=note or loss.note)
    items = step.differences.get("gradient", {})
    everyone = dist.group.WORLD
    assert everyone is not None
    # All ranks ask about the same gradients, in one order, since they add them up to find out.
    comparable = set()
    for name, gradient in gradients.items():
        if name in expected and gradient.shape == expected[name].shape:
            comparable.add(name)
    different = [name for name, item in items.items() if item.verdict == "different"]
    names: dict[str, None] = {}
    for different_there, comparable_there in per_rank(everyone, (different, comparable)):
        names |= dict.fromkeys(different_there)
        comparable &= comparable_there
    for name in names:
        if name not in comparable:
            continue
        reference = real_view(expected[name]).double()
        gradient = real_view(gradients[name]).double()
        note = _cause(mesh, sizes, reference, gradient, bounds.get(name, 0.0))
        if note and name in different:
            items[name] = replace(items[name], note=note)


def _cause_of_loss(sizes: Sizes, step: RankStep, bound: float) -> str:
    for dim, ranks in sizes.items():
        gap = abs(step.loss * ranks - step.reference_loss)
        if gap <= bound * ranks:
            return f"it is {ranks} times too small: if the losses of {dim!r}'s ranks add up, Split(adds=({dim!r},))"
        gap = abs(step.loss / ranks - step.reference_loss)
        if gap <= bound:
            return f"it is {ranks} times too large: if each rank of {dim!r} has all of it, it is not for Split(adds=)"
    return ""


def _cause(
    mesh: DeviceMesh,
    sizes: Sizes,
    expected: Tensor,
    gradient: Tensor,
    bound: float,
) -> str:
    """Return the mistake in words, "" if it is none of them. Collective."""

    def near(value: Tensor, within: float) -> bool:
        return bool(((value - expected).abs() <= within).all())

    # Every rank adds up along every dimension: what it finds before may be what another one does not.
    causes = []
    for dim, ranks in sizes.items():
        total = gradient.clone()
        dist.all_reduce(total, group=mesh[dim].get_group())
        where = f"mesh[{dim!r}]"
        times = f"the number of ranks of {dim!r}"
        # Equal gradients add up to their multiple, which tells nothing of parts or of a mean.
        if not torch.equal(total, gradient * ranks):
            if near(total, bound * ranks):
                parts = f"the parts that the {ranks} ranks of {dim!r} have"
                causes.append(f"{parts} add up to it: replicated={{...: {where}}}")
            if near(total / ranks, bound):
                causes.append(f'the mean over {dim!r} is right: replicated={{...: ({where}, "mean")}}')
        if near(gradient / ranks, bound):
            causes.append(f"it is {ranks} times too large, {times}: added up where all have the whole?")
        if near(gradient * ranks, bound * ranks):
            causes.append(f"it is {ranks} times too small, {times}: averaged where each has a part?")
    if causes:
        return causes[0]
    length = float(expected.square().sum())
    projection = float((gradient * expected).sum())
    if not length or not projection:
        return ""
    ratio = projection / length
    within = bound / abs(ratio) + bound
    if near(gradient / ratio, within):
        return f"it is {ratio:.6g} times what it should be"
    return ""
