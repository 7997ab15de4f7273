"""Tries, on small tensors, whether an optimizer computes the same on shards as on whole parameters.

Engines give a rank some of the parameters (FairScale's OSS), or a part of each (FSDP1, FSDP2), and its optimizer sees
nothing else. That is the same training only for an algorithm that treats every number, or every parameter, by itself.
So a class that is not known takes two steps with the settings that were asked for: once on all of some small tensors,
and once on parts of them. What it begins to do in a later step, or does from another size on, is not seen.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.nested import leaves as tree_leaves
from fsshard.oss.inner_step import unhooked_step

__all__ = ["ProbedGroup", "Untried", "begins_with_closure", "try_on_parts"]

BOUND = 1e-9
"""Largest difference between updates, of the largest update. In float64, and with cuts where torch's kernels begin a
vector, what works number by number differs by a few roundings of 2e-16; another norm or mean moves one by 1e-3."""
SCALES = (1.0, 1e-3)
"""Of the gradients of the steps: norms of hundreds in the first, which what clips does clip, and tenths in the next."""
ROWS, SIDE, LARGE, FEW = 160, 144, 128, 4
"""Sizes of the tensors: of dims from LARGE on, from where some algorithms factor, and of others. Fewer than 32768
numbers in a matrix, which torch gives to one thread."""
SMALLEST_LR = 1e-6
"""A warm-up begins with 0, where no algorithm does anything; steps below this are tried with 0.01 in its place."""


class Untried(Exception):
    """Raised for a class that cannot be tried on small tensors; the text says what it raised."""


class ProbedGroup(NamedTuple):
    """One group as the optimizer will have it.

    Attributes:
        options: its settings, without the parameters.
        shapes: (shape, whether complex) of each of its parameters as the optimizer sees them whole.
    """

    options: Mapping[str, Any]
    shapes: Sequence[tuple[torch.Size, bool]]


class _Sample(NamedTuple):
    """A small parameter: the number of its group, its value, and its gradient in each step."""

    group: int
    value: Tensor
    gradients: Sequence[Tensor]


_Build = Callable[[Sequence[_Sample]], tuple[Optimizer, list[nn.Parameter]]]


def try_on_parts(
    optimizer_class: type[Optimizer], groups: Sequence[ProbedGroup], defaults: Mapping[str, Any]
) -> Literal["numbers", "parameters", "everything"]:
    """Return what of a model an optimizer can be given by itself: any numbers, whole parameters, or only everything.

    Local; random numbers and the settings are left as they are.

    Args:
        optimizer_class: the user's.
        groups: its groups.
        defaults: what its constructor is given beside them.

    Raises:
        Untried: it raises on whole tensors.
    """
    build = partial(_build, optimizer_class, groups, defaults)
    with _surroundings():
        samples, closure = _samples(groups), False
        try:
            whole = _train(build, samples, closure)
        except Exception as error:
            closure = True  # SAM's step takes nothing else
            try:
                whole = _train(build, samples, closure)
            except Exception:
                raise Untried(f"{type(error).__name__}: {error}") from error
        ranks = [(samples[rank::2], whole[rank::2]) for rank in range(2)]
        if not all(_agrees(build, closure, *each) for each in ranks):
            return "everything"
        # As vectors, cut at a multiple of 64 numbers: FSDP1 cuts anywhere, FSDP2 complex weights too.
        for rank in range(2):
            parts = [_Sample(group, _part(value, rank), [_part(g, rank) for g in gs]) for group, value, gs in samples]
            there = [place for place, sample in enumerate(parts) if sample.value.numel()]
            if not _agrees(build, closure, [parts[i] for i in there], [_part(whole[i], rank) for i in there]):
                return "parameters"
        return "numbers"


def begins_with_closure(
    optimizer_class: type[Optimizer], groups: Sequence[ProbedGroup], defaults: Mapping[str, Any]
) -> bool:
    """Return whether ``step(closure)`` neither uses a gradient nor changes a parameter before it calls the closure.

    Local. False where that cannot be found out: it takes no closure, or raises on small tensors.
    """
    if optimizer_class.__module__.startswith("torch.optim"):
        return True
    untouched: list[bool] = []
    trained: list[list[nn.Parameter]] = []
    try:
        with _surroundings():
            samples = _samples(groups)
            for factor in (1.0, -1e3):  # other gradients before the closure, which gives both the same
                optimizer, parameters = _build(optimizer_class, groups, defaults, samples)
                trained.append(parameters)

                def closure() -> Tensor:
                    untouched.append(all(torch.equal(p, s.value) for p, s in zip(trained[-1], samples, strict=True)))
                    return _give_gradients(trained[-1], [sample.gradients[0] for sample in samples])

                _give_gradients(parameters, [factor * sample.gradients[0] for sample in samples])
                unhooked_step(optimizer_class)(optimizer, closure)
    except Exception:
        return False
    return bool(untouched) and untouched[0] and all(map(torch.equal, *trained))


def _build(
    optimizer_class: type[Optimizer],
    groups: Sequence[ProbedGroup],
    defaults: Mapping[str, Any],
    samples: Sequence[_Sample],
) -> tuple[Optimizer, list[nn.Parameter]]:
    """Return the optimizer over copies of the samples, and these."""
    torch.default_generator.manual_seed(0)
    parameters = [nn.Parameter(sample.value.clone()) for sample in samples]
    given = []
    for number, group in enumerate(groups):
        mine = [parameter for parameter, sample in zip(parameters, samples, strict=True) if sample.group == number]
        given += [{**_own_copy(group.options), "params": mine}] if mine else []
    optimizer = optimizer_class(given, **_own_copy(defaults))
    for each in optimizer.param_groups:
        rate = each.get("lr")
        if isinstance(rate, (float, int, Tensor)) and abs(float(rate)) < SMALLEST_LR:
            each["lr"] = rate * 0 + 0.01
    return optimizer, parameters


def _train(build: _Build, samples: Sequence[_Sample], closure: bool) -> list[Tensor]:
    """Return what the samples are after all steps."""
    optimizer, parameters = build(samples)
    for step in range(len(SCALES)):
        give = partial(_give_gradients, parameters, [sample.gradients[step] for sample in samples])
        give()
        # Without hooks: a user's hooks for all optimizers are not for this one.
        unhooked_step(type(optimizer))(optimizer, *([give] if closure else []))
    return [parameter.detach() for parameter in parameters]


def _agrees(build: _Build, closure: bool, part: Sequence[_Sample], wanted: Sequence[Tensor]) -> bool:
    """Return whether one rank does with its part what is wanted, but for rounding."""
    try:
        trained = _train(build, part, closure) if part else []
    except Exception:  # what refuses a vector where it takes a matrix cannot be divided either
        return False
    for sample, one, other in zip(part, wanted, trained, strict=True):
        moved, size = float((one - sample.value).nan_to_num(0, 0, 0).abs().max()), float(sample.value.abs().max())
        bound = BOUND * moved + 8 * torch.finfo(torch.float64).eps * (moved + size)
        if not torch.allclose(one, other, rtol=0, atol=bound, equal_nan=True):
            return False
    return True


def _part(whole: Tensor, rank: int) -> Tensor:
    middle = max(64, whole.numel() // 128 * 64)
    return whole.reshape(-1)[rank * middle :][: middle if rank == 0 else None].clone()


def _give_gradients(parameters: list[nn.Parameter], gradients: Sequence[Tensor]) -> Tensor:
    """Stand for a backward pass, of a loss that is a sum over numbers."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient + 0.01 * parameter.detach()  # another one where the parameter is another
    return torch.ones((), dtype=torch.float64, requires_grad=True)


def _samples(groups: Sequence[ProbedGroup]) -> list[_Sample]:
    """Return two samples of each kind of parameter that a group has.

    Their gradients have a direction in common: algorithms that look for one shall find it.
    """
    generator, made = torch.Generator().manual_seed(1), []
    for number, group in enumerate(groups):
        for shape, is_complex in dict.fromkeys((_small(shape), is_complex) for shape, is_complex in group.shapes):
            dtype = torch.complex128 if is_complex else torch.float64
            for _ in range(2):
                value, common, *own = (torch.randn(shape, dtype=dtype, generator=generator) for _ in range(4))
                gradients = [scale * (common + 0.5 * noise) for scale, noise in zip(SCALES, own, strict=True)]
                made.append(_Sample(number, value, gradients))
    return made


def _small(shape: torch.Size) -> torch.Size:
    """Return a shape of as many dimensions; those of one element stay so, for some algorithms look at that."""
    side = round(SIDE ** (1 / max(1, sum(size >= LARGE for size in shape[1:]))))
    sizes = [side if size >= LARGE else min(size, FEW) for size in shape[1:]]
    return torch.Size([ROWS, *sizes]) if shape else shape


def _own_copy(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that the trial may use and change."""
    for value in tree_leaves(dict(settings)):
        if isinstance(value, (nn.Module, Optimizer)) or (isinstance(value, Tensor) and value.numel() > 1):
            raise Untried(f"a {type(value).__name__} is among its settings")
    return copy.deepcopy(dict(settings))


@contextlib.contextmanager
def _surroundings() -> Iterator[None]:
    """Context that is as in training, whatever surrounds the call, and leaves torch's random numbers as they were."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        state = torch.default_generator.get_state()
        try:
            yield
        finally:
            torch.default_generator.set_state(state)
