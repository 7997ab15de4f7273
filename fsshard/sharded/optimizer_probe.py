"""Finds out, on small tensors, whether an optimizer computes the same on shards as on whole parameters.

Engines give a rank some of the parameters (FairScale's OSS), or a part of each (FSDP1, FSDP2), and its optimizer sees
nothing else. That is the same training only for an algorithm that treats every number, or every parameter, by itself.
It is another one for Muon (a whole matrix), LARS (a norm per parameter), Adafactor (rows and columns), and whatever
divides by a norm over all gradients, and no list of names knows what users write. So the class takes a few steps with
the settings that were asked for: once on all of some small tensors, and once divided as the engine divides them. The
model has no part in it.

*Rounding and algorithms.* Everything is computed in float64, and tensors are cut where torch's kernels begin a vector,
so that what works number by number gives the same bits; what remains possible (kernels compiled for a shape, sums of
another length) is a few roundings of 2e-16. A norm, mean, rank or count over another set of numbers moves an update by
1e-3 of itself or more on these tensors. :data:`BOUND` lies far from both.

*What it cannot see:* algorithms that change only above 160 rows or 144 columns, or after step 64, or by a number of
steps that is not among their settings. ``separable=False`` refuses these by hand, ``separable=True`` vouches for what
cannot be tried.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.complex_params.pairs import complex_dtype
from fsshard.oss.inner_step import unhooked_step

__all__ = ["Cut", "ProbeResult", "ProbedGroup", "Untried", "begins_with_closure", "try_on_parts"]

Cut = Callable[[Tensor], "tuple[Tensor, Tensor] | None"]

BOUND = 1e-9
"""Largest difference between updates, of the largest update of the tensor: see the head of this file."""
SINGLE_BOUND = 1e-4
"""The same for what takes float32 only: more than 1000 roundings of it, still a tenth of what another norm makes."""
SCALES = (1.0, 1e-3, 1e3)
"""Of the gradients, in turn: so that what clips does clip, and what is far below a threshold is so, too."""
ROWS, CUT_AT = 96, 64
"""Of small tensors, and where they are cut: a multiple of what any kernel handles at once, whatever the other sizes."""
LARGE_ROWS, LARGE_COLUMNS = 160, 144
"""Of large ones: some algorithms factor from 128 on only. Fewer than 32768 numbers, which torch gives to one thread."""
FEW_STEPS, LEAST_STEPS, MOST_STEPS = 3, 8, 64
SMALLEST_LR = 1e-6
"""A warm-up begins with 0, where no algorithm does anything; steps below this are tried with 0.01 in its place."""


class Untried(Exception):
    """The class cannot be tried on small tensors; the text says what it raised."""


class ProbedGroup(NamedTuple):
    """One group as the optimizer will have it.

    Attributes:
        options: its settings, without the parameters.
        shapes: (shape, whether complex) of each of its parameters as the optimizer sees them whole.
        in_order: whether all of them lie in memory in the order of their dims.
    """

    options: Mapping[str, Any]
    shapes: Sequence[tuple[torch.Size, bool]]
    in_order: bool = True


class ProbeResult(NamedTuple):
    """What was found.

    Attributes:
        by_parameter: a step on some of the parameters is the same as on all of them, for these.
        by_number: a step on parts of each parameter is the same as on the whole ones; True where it was not asked for.
        random: it draws random numbers, so that two trainings from other seeds differ.
    """

    by_parameter: bool
    by_number: bool
    random: bool


@dataclass(frozen=True)
class _Trial:
    """One way of trying.

    Attributes:
        optimizer_class: whose step it is.
        groups: as they will be.
        defaults: keyword arguments of the constructor.
        dtype: of real tensors.
        closure: call ``step`` with one.
        large: with tensors large enough for what factors large ones only.
        long: with as many steps as its settings ask for.
    """

    optimizer_class: type[Optimizer]
    groups: Sequence[ProbedGroup]
    defaults: Mapping[str, Any]
    dtype: torch.dtype
    closure: bool
    large: bool = False
    long: bool = False

    def steps(self, tensors: list[list[Tensor]]) -> int:
        """Some algorithms begin, or look again, after a number of steps that is one of their settings."""
        if not self.long:
            return FEW_STEPS
        settings = [value for group in _made(self, tensors)[0].param_groups for value in group.values()]
        numbers = [value for value in settings if isinstance(value, int) and not isinstance(value, bool)]
        return min(max([LEAST_STEPS, *(value + 2 for value in numbers)]), MOST_STEPS)

    def tensors(self) -> list[list[Tensor]]:
        """Two of each kind of parameter that a group has."""
        generator = torch.Generator().manual_seed(1)
        made = []
        for group in self.groups:
            kinds = dict.fromkeys((_small(shape, self.large), is_complex) for shape, is_complex in group.shapes)
            made.append([_drawn(*kind, self.dtype, generator) for kind in kinds for _ in range(2)])
        return made


def try_on_parts(
    optimizer_class: type[Optimizer], groups: Sequence[ProbedGroup], defaults: Mapping[str, Any], cut: Cut | None
) -> ProbeResult:
    """Take steps on small tensors, whole and divided. Local; random numbers and the settings are left as they are.

    Args:
        optimizer_class: the user's.
        groups: its groups.
        defaults: what its constructor is given beside them.
        cut: how an engine divides a whole tensor between two ranks; None where it leaves tensors whole.

    Raises:
        Untried: it raises on whole tensors.
    """
    reason: Untried | None = None
    for dtype, closure in itertools.product((torch.float64, torch.float32), (False, True)):
        first = _Trial(optimizer_class, groups, defaults, dtype, closure)
        try:
            with _as_in_training(), _random_numbers_kept():
                return _all_findings(first, cut)
        except Untried as error:
            reason = reason or error
    assert reason is not None
    raise reason


def _all_findings(first: _Trial, cut: Cut | None) -> ProbeResult:
    """Ask what is still open of larger tensors and of more steps: they cost more, and what is no is no.

    Raises:
        Untried: the first trial could not be made.
    """
    found = _findings(first, ProbeResult(True, True, False), cut)
    trials = [dataclasses.replace(first, long=True), dataclasses.replace(first, large=True)]
    if not first.closure:
        trials.append(dataclasses.replace(first, closure=True))
    for trial in trials:
        with contextlib.suppress(Untried):  # it takes no closure, or has no patience for so many steps
            found = _findings(trial, found, cut)
    return found


def _findings(trial: _Trial, before: ProbeResult, cut: Cut | None) -> ProbeResult:
    """What is still so of what was found ``before``."""
    if before.random or not (before.by_parameter or before.by_number):
        return before
    try:
        tensors = trial.tensors()
        gradients = [_gradients(tensors, step) for step in range(trial.steps(tensors))]
        whole = _trained(trial, tensors, gradients, seed=0)
        again = _trained(trial, tensors, gradients, seed=1)
    except Exception as error:
        raise Untried(f"{type(error).__name__}: {error}") from error
    if not _alike(trial, tensors, whole, again):
        return ProbeResult(by_parameter=False, by_number=False, random=True)
    by_parameter = before.by_parameter and _agrees(trial, tensors, gradients, whole, _dealt)
    # What looks at several parameters at once works on no parts of them either.
    by_number = before.by_number and by_parameter
    if by_number and cut is not None:
        by_number = _agrees(trial, tensors, gradients, whole, functools.partial(_cut_up, cut=cut))
    return ProbeResult(by_parameter, by_number, random=False)


def begins_with_closure(
    optimizer_class: type[Optimizer], groups: Sequence[ProbedGroup], defaults: Mapping[str, Any]
) -> bool:
    """Whether ``step(closure)`` neither looks at a gradient nor changes a parameter before it first calls the closure.

    Local. Arguments as for :func:`try_on_parts`.

    Raises:
        Untried: it takes no closure, or raises on small tensors.
    """
    trial = _Trial(optimizer_class, groups, defaults, torch.float64, closure=True)
    try:
        with _as_in_training(), _random_numbers_kept():
            tensors = trial.tensors()
            gradients = [_gradients(tensors, step) for step in range(FEW_STEPS)]
            stale = [[10 * gradient for gradient in group] for group in gradients[-1]]
            first = [_trained(trial, tensors, gradients, seed=0, before=before) for before in (None, stale)]
            untouched = _untouched_before_closure(trial, tensors, gradients[0])
    except Exception as error:
        raise Untried(f"{type(error).__name__}: {error}") from error
    return untouched and _alike(trial, tensors, *first)


def _untouched_before_closure(trial: _Trial, tensors: list[list[Tensor]], gradients: list[list[Tensor]]) -> bool:
    optimizer, parameters = _made(trial, tensors)
    seen: list[bool] = []

    def closure() -> Tensor:
        pairs = zip(itertools.chain(*parameters), itertools.chain(*tensors), strict=True)
        seen.append(all(torch.equal(parameter.detach(), tensor) for parameter, tensor in pairs))
        return _give_gradients(trial, parameters, gradients)

    _give_gradients(trial, parameters, gradients)
    unhooked_step(type(optimizer))(optimizer, closure)
    return bool(seen) and seen[0]


# ------------------------------------------------------------------------------------------------ ways to divide


class _Division(NamedTuple):
    """What each of two ranks has, group by group, and how it is put together again."""

    ranks: list[list[list[Tensor]]]
    joined: Callable[[list[list[list[Tensor]]]], list[list[Tensor]]]


def _dealt(tensors: list[list[Tensor]]) -> _Division:
    """Every other parameter to the one, the rest to the other."""

    def joined(ranks: list[list[list[Tensor]]]) -> list[list[Tensor]]:
        return [
            [tensor for pair in zip(*members, strict=True) for tensor in pair] for members in zip(*ranks, strict=True)
        ]

    return _Division([[group[rank::2] for group in tensors] for rank in range(2)], joined)


def _cut_up(tensors: list[list[Tensor]], cut: Cut) -> _Division:
    """A part of each parameter to either; what cannot be cut to the first."""
    parts = [[cut(tensor) if tensor.dim() else None for tensor in group] for group in tensors]

    def joined(ranks: list[list[list[Tensor]]]) -> list[list[Tensor]]:
        first, second = ([iter(group) for group in rank] for rank in ranks)
        return [
            [
                next(one) if pair is None else torch.cat([next(one), next(other)]).view(tensor.shape)
                for tensor, pair in zip(group, pairs, strict=True)
            ]
            for group, pairs, one, other in zip(tensors, parts, first, second, strict=True)
        ]

    rank0 = [
        [t if pair is None else pair[0] for t, pair in zip(group, pairs, strict=True)]
        for group, pairs in zip(tensors, parts, strict=True)
    ]
    return _Division([rank0, [[pair[1] for pair in pairs if pair is not None] for pairs in parts]], joined)


def _agrees(
    trial: _Trial,
    tensors: list[list[Tensor]],
    gradients: list[list[list[Tensor]]],
    whole: list[list[Tensor]],
    divide: Callable[[list[list[Tensor]]], _Division],
) -> bool:
    """Whether two ranks together do what one does."""
    division = divide(tensors)
    divided = [divide(step).ranks for step in gradients]
    try:
        ranks = [
            _trained(trial, mine, [step[rank] for step in divided], seed=0) for rank, mine in enumerate(division.ranks)
        ]
    except Exception:  # what refuses a vector where it takes a matrix cannot be divided either
        return False
    return _alike(trial, tensors, whole, division.joined(ranks))


# ------------------------------------------------------------------------------------------------ steps


def _trained(
    trial: _Trial,
    tensors: list[list[Tensor]],
    gradients: list[list[list[Tensor]]],
    seed: int,
    before: list[list[Tensor]] | None = None,
) -> list[list[Tensor]]:
    """The tensors after the steps; ``before`` are the gradients that a closure finds, if not those of the step."""
    if not any(tensors):
        return tensors
    _seed(seed)
    optimizer, parameters = _made(trial, tensors)
    for step in gradients:
        _one_step(trial, optimizer, parameters, step, step if before is None else before)
    return [[parameter.detach() for parameter in group] for group in parameters]


def _made(trial: _Trial, tensors: list[list[Tensor]]) -> tuple[Optimizer, list[list[nn.Parameter]]]:
    """The optimizer over copies of the tensors."""
    parameters = [[nn.Parameter(tensor.clone()) for tensor in group] for group in tensors]
    members = [(group, mine) for group, mine in zip(trial.groups, parameters, strict=True) if mine]
    optimizer = trial.optimizer_class(
        [{**_own_copy(group.options), "params": mine} for group, mine in members], **_own_copy(trial.defaults)
    )
    _raise_small_rates(optimizer)
    return optimizer, parameters


def _one_step(
    trial: _Trial,
    optimizer: Optimizer,
    parameters: list[list[nn.Parameter]],
    gradients: list[list[Tensor]],
    before: list[list[Tensor]],
) -> None:
    step = unhooked_step(type(optimizer))  # hooks that a user has registered for all optimizers are not for this one
    _give_gradients(trial, parameters, before)
    if trial.closure:
        step(optimizer, lambda: _give_gradients(trial, parameters, gradients))
    else:
        step(optimizer)


def _give_gradients(trial: _Trial, parameters: list[list[nn.Parameter]], gradients: list[list[Tensor]]) -> Tensor:
    """Stands for a backward pass, of a loss that is a sum over numbers."""
    for parameter, gradient in zip(itertools.chain(*parameters), itertools.chain(*gradients), strict=True):
        parameter.grad = gradient + 0.01 * parameter.detach()  # another one where the parameter is another
    return torch.ones((), dtype=trial.dtype, requires_grad=True)


def _raise_small_rates(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, (int, float)) and not isinstance(rate, bool) and abs(rate) < SMALLEST_LR:
            group["lr"] = 0.01
        elif isinstance(rate, Tensor) and abs(float(rate)) < SMALLEST_LR:
            rate.fill_(0.01)


def _gradients(tensors: list[list[Tensor]], step: int) -> list[list[Tensor]]:
    """They have a direction in common: algorithms that look for one shall find it."""
    base, noise = torch.Generator().manual_seed(2), torch.Generator().manual_seed(3 + step)
    scale = SCALES[step % len(SCALES)]
    return [
        [
            scale * (torch.randn(t.shape, dtype=t.dtype, generator=base))
            + 0.5 * scale * torch.randn(t.shape, dtype=t.dtype, generator=noise)
            for t in group
        ]
        for group in tensors
    ]


def _alike(trial: _Trial, start: list[list[Tensor]], one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    """Whether two trainings have moved the tensors alike, but for rounding."""
    bound = BOUND if trial.dtype == torch.float64 else SINGLE_BOUND
    for before, a, b in zip(itertools.chain(*start), itertools.chain(*one), itertools.chain(*other), strict=True):
        known = torch.isfinite(a)
        if not torch.equal(known, torch.isfinite(b)):
            return False
        if not bool(known.any()):
            continue
        moved, apart = (a - before)[known].abs().max(), (a - b)[known].abs().max()
        size = max(float(a[known].abs().max()), float(before.abs().max()))
        if float(apart) > bound * float(moved) + 8 * torch.finfo(trial.dtype).eps * size:
            return False
    return True


# ------------------------------------------------------------------------------------------------ what it is tried on


def _small(shape: torch.Size, large: bool) -> torch.Size:
    """A shape of as many dimensions; those of one element stay so, for some algorithms look at that."""
    if not shape:
        return shape
    rows, room = (LARGE_ROWS, LARGE_COLUMNS) if large else (ROWS, 4)
    most = room if large else 2 if len(shape) > 2 else 3
    sizes = []
    for size in shape[1:]:
        sizes.append(max(1, min(size, room, most)))
        room //= sizes[-1]
    return torch.Size([rows, *sizes])


def _drawn(shape: torch.Size, is_complex: bool, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    kind = complex_dtype(dtype) if is_complex else dtype
    return torch.randn(shape, dtype=kind, generator=generator)


def _own_copy(value: Any) -> Any:
    """Settings as the probe may use and change them."""
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device)):
        return value
    if isinstance(value, Mapping):
        return {key: _own_copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_own_copy(item) for item in value)
    if isinstance(value, torch.Generator):
        return torch.Generator(value.device).manual_seed(0)
    if isinstance(value, Tensor) and value.numel() <= 1:
        return value.detach().to("cpu", copy=True)
    if isinstance(value, (Tensor, nn.Module, Optimizer)):
        raise Untried(f"a {type(value).__name__} is among its settings")
    if isinstance(value, type) or inspect.isroutine(value):
        return value
    return copy.deepcopy(value)


# ------------------------------------------------------------------------------------------------ surroundings


@contextlib.contextmanager
def _as_in_training() -> Iterator[None]:
    """Whatever surrounds the call: gradients on, no inference mode, no autocast."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        yield


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach the GPUs' generators, too
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Within it random numbers are drawn that nobody misses afterwards."""
    state, python, numpy = torch.default_generator.get_state(), random.getstate(), sys.modules.get("numpy")
    arrays = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)
