"""Tries, on small tensors, whether an optimizer computes the same on shards as on whole parameters.

Engines give a rank some of the parameters (FairScale's OSS), or a part of each (FSDP1, FSDP2), and its optimizer sees
nothing else. That is the same training only for an algorithm that treats every number, or every parameter, by itself,
and no list of names knows what users write. So a class that is not known takes three steps with the settings that were
asked for: once on all of some small tensors, and once on parts of them. What it begins to do in a later step, or does
from another size on, is not seen.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.nested import leaves as tree_leaves
from fsshard.oss.inner_step import unhooked_step

__all__ = ["ProbedGroup", "Untried", "begins_with_closure", "try_on_parts"]

Tensors = list[list[Tensor]]
"""Group by group."""

BOUND = 1e-9
"""Largest difference between updates, of the largest update. In float64, and with cuts where torch's kernels begin a
vector, what works number by number differs by a few roundings of 2e-16; another norm or mean moves one by 1e-3."""
SCALES = (1.0, 1e-3, 1e3)
"""Of the gradients, in turn: so that what clips does clip, and what is far below a threshold is so, too."""
ROWS, SIDE, LARGE, FEW = 160, 144, 128, 4
"""Sizes of the tensors: of dims from LARGE on, from where some algorithms factor, and of others. Fewer than 32768
numbers in a matrix, which torch gives to one thread."""
SMALLEST_LR = 1e-6
"""A warm-up begins with 0, where no algorithm does anything; steps below this are tried with 0.01 in its place."""


class Untried(Exception):
    """The class cannot be tried on small tensors; the text says what it raised."""


class ProbedGroup(NamedTuple):
    """One group as the optimizer will have it.

    Attributes:
        options: its settings, without the parameters.
        shapes: (shape, whether complex) of each of its parameters as the optimizer sees them whole.
    """

    options: Mapping[str, Any]
    shapes: Sequence[tuple[torch.Size, bool]]


@dataclass(frozen=True)
class _Trial:
    """An optimizer on tensors of its own.

    Attributes:
        optimizer_class: the user's.
        groups: as they will be.
        defaults: keyword arguments of the constructor.
        closure: call ``step`` with one.
    """

    optimizer_class: type[Optimizer]
    groups: Sequence[ProbedGroup]
    defaults: Mapping[str, Any]
    closure: bool

    def build(self, tensors: Tensors) -> tuple[Optimizer, list[nn.Parameter]]:
        """Return the optimizer over copies of the tensors, and these."""
        torch.default_generator.manual_seed(0)
        parameters = [[nn.Parameter(tensor.clone()) for tensor in group] for group in tensors]
        members = [(group, mine) for group, mine in zip(self.groups, parameters, strict=True) if mine]
        optimizer = self.optimizer_class(
            [{**_own_copy(group.options), "params": mine} for group, mine in members], **_own_copy(self.defaults)
        )
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, (float, int, Tensor)) and abs(float(rate)) < SMALLEST_LR:
                group["lr"] = rate * 0 + 0.01
        return optimizer, list(itertools.chain(*parameters))

    def train(self, tensors: Tensors, part: Callable[[list[Tensor]], list[Tensor]] = list) -> Tensors:
        """Return what ``part`` takes of each group after a step with gradients of each scale."""
        mine = [part(group) for group in tensors]
        if not any(mine):
            return mine
        optimizer, parameters = self.build(mine)
        for number in range(len(SCALES)):
            gradients = [part(group) for group in _gradients(tensors, number)]
            give = partial(_give_gradients, parameters, gradients)
            give()
            _step(optimizer, *([give] if self.closure else []))
        trained = iter(parameter.detach() for parameter in parameters)
        return [[next(trained) for _ in group] for group in mine]

    def agrees(self, tensors: Tensors, whole: Tensors, divide: Callable[[list[Tensor], int], list[Tensor]]) -> bool:
        """Return whether two ranks, each with its part of each group, together do what one does."""
        for rank in range(2):
            try:
                trained = self.train(tensors, lambda group, rank=rank: divide(group, rank))  # type: ignore[misc]
            except Exception:  # what refuses a vector where it takes a matrix cannot be divided either
                return False
            before, wanted = ([part for group in each for part in divide(group, rank)] for each in (tensors, whole))
            if not all(map(_alike, before, wanted, itertools.chain(*trained))):
                return False
        return True


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
    with _surroundings():
        tensors = _tensors(groups)
        trial = _Trial(optimizer_class, groups, defaults, closure=False)
        try:
            whole = trial.train(tensors)
        except Exception as error:
            trial = _Trial(optimizer_class, groups, defaults, closure=True)  # SAM's step takes nothing else
            try:
                whole = trial.train(tensors)
            except Exception:
                raise Untried(f"{type(error).__name__}: {error}") from error
        if not trial.agrees(tensors, whole, lambda group, rank: group[rank::2]):
            return "everything"
        return "numbers" if trial.agrees(tensors, whole, _part) else "parameters"


def _part(group: list[Tensor], rank: int) -> list[Tensor]:
    """As vectors, cut at a multiple of 64 numbers: FSDP1 cuts anywhere, FSDP2 complex weights too."""
    parts = []
    for flat in (tensor.reshape(-1) for tensor in group):
        middle = max(64, flat.numel() // 128 * 64)
        parts += [part.clone() for part in (flat[:middle], flat[middle:])[rank : rank + 1] if part.numel()]
    return parts


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
            tensors = _tensors(groups)
            given = _gradients(tensors, 0)
            for before in (given, [[-1e3 * gradient for gradient in group] for group in given]):
                optimizer, parameters = _Trial(optimizer_class, groups, defaults, closure=True).build(tensors)
                trained.append(parameters)

                def closure() -> Tensor:
                    untouched.append(all(map(torch.equal, trained[-1], itertools.chain(*tensors))))
                    return _give_gradients(trained[-1], given)

                _give_gradients(parameters, before)
                _step(optimizer, closure)
    except Exception:
        return False
    return bool(untouched) and untouched[0] and all(map(torch.equal, *trained))


def _step(optimizer: Optimizer, *closure: Any) -> None:
    unhooked_step(type(optimizer))(optimizer, *closure)  # a user's hooks for all optimizers are not for this one


def _give_gradients(parameters: list[nn.Parameter], gradients: Tensors) -> Tensor:
    """Stand for a backward pass, of a loss that is a sum over numbers."""
    for parameter, gradient in zip(parameters, itertools.chain(*gradients), strict=True):
        parameter.grad = gradient + 0.01 * parameter.detach()  # another one where the parameter is another
    return torch.ones((), dtype=torch.float64, requires_grad=True)


def _gradients(tensors: Tensors, step: int) -> Tensors:
    """They have a direction in common: algorithms that look for one shall find it."""
    base, noise = torch.Generator().manual_seed(2), torch.Generator().manual_seed(3 + step)

    def drawn(tensor: Tensor) -> Tensor:
        common, own = (torch.randn(tensor.shape, dtype=tensor.dtype, generator=each) for each in (base, noise))
        return SCALES[step] * (common + 0.5 * own)

    return [[drawn(tensor) for tensor in group] for group in tensors]


def _alike(before: Tensor, one: Tensor, other: Tensor) -> bool:
    """Whether two trainings have moved a tensor alike, but for rounding."""
    moved, size = ((one - before).nan_to_num(0, 0, 0).abs().max(), before.abs().max())
    bound = BOUND * float(moved) + 8 * torch.finfo(torch.float64).eps * float(moved + size)
    return torch.allclose(one, other, rtol=0, atol=bound, equal_nan=True)


def _tensors(groups: Sequence[ProbedGroup]) -> Tensors:
    """Two of each kind of parameter that a group has."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for group in groups:
        kinds = dict.fromkeys((_small(shape), is_complex) for shape, is_complex in group.shapes)
        dtypes = {False: torch.float64, True: torch.complex128}
        made.append([torch.randn(shape, dtype=dtypes[c], generator=generator) for shape, c in kinds for _ in range(2)])
    return made


def _small(shape: torch.Size) -> torch.Size:
    """A shape of as many dimensions; those of one element stay so, for some algorithms look at that."""
    side = round(SIDE ** (1 / max(1, sum(size >= LARGE for size in shape[1:]))))
    sizes = [side if size >= LARGE else min(size, FEW) for size in shape[1:]]
    return torch.Size([ROWS, *sizes]) if shape else shape


def _own_copy(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as the trial may use and change them."""
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
