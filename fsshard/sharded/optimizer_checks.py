"""Checks before an optimizer is built: can it work on shards, and do all ranks ask for the same one?

Engines give a rank some of the parameters (FairScale's OSS), or a part of each (FSDP1, FSDP2). That is the same
training only for an algorithm that treats every number, or every parameter, by itself. torch's own classes are known;
another class takes two steps over small tensors, once on all of them and once on parts.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.backends.base import Backend
from fsshard.backends.settings import Settings
from fsshard.comm.agreement import per_rank
from fsshard.errors import OptimizerError, RankMismatch, UnsupportedByBackend
from fsshard.nested import leaves as tree_leaves
from fsshard.oss.partition import GLOBAL_OPTIMIZERS
from fsshard.oss.partitioned import unhooked_step

__all__ = [
    "WHOLE_TENSOR_OPTIMIZERS",
    "ProbedGroup",
    "Untried",
    "asked_of",
    "begins_with_closure",
    "check_asked_alike",
    "check_separable",
    "check_settings",
    "rank_independent_text",
    "try_on_parts",
]

WHOLE_TENSOR_OPTIMIZERS = frozenset({"Adafactor", "Muon", "Shampoo", "SOAP", "LAMB", "Lamb", "LARS", "Lars"})
"""Known to use the shape, a norm or a factorisation of each parameter."""
VOUCH = "fsshard.build_optimizer(model, {name}, ..., separable=True)"
BOUND = 1e-9
"""Largest difference between updates, of the largest update. In float64, and with cuts where torch's kernels begin a
vector, what works number by number differs by a few roundings of 2e-16; another norm or mean moves one by 1e-3."""
SCALES = (1.0, 1e-3)
"""Of the gradients of the two steps: norms of hundreds, which what clips does clip, then of tenths."""
SHAPE = (160, 144)
"""Of the matrices, and all others have as many numbers: some algorithms factor from 128 rows and columns on. Fewer than
32768 numbers, which torch gives to one thread."""


class ProbedGroup(NamedTuple):
    """One group of an optimizer: its settings, and of what numbers of dims its parameters are, complex or not."""

    options: Mapping[str, Any]
    kinds: frozenset[tuple[int, bool]]

    @classmethod
    def of(cls, group: Mapping[str, Any], kinds: Iterable[tuple[int, bool]]) -> ProbedGroup:
        """Make it of a group, and of the number of dims of each of its parameters and whether that is complex."""
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        return cls(options, frozenset(kinds))


def check_separable(
    backend: type[Backend],
    settings: Settings,
    optimizer_class: type[Optimizer],
    groups: Sequence[ProbedGroup],
    defaults: Mapping[str, Any],
    separable: bool | None,
) -> None:
    """Raise for an algorithm that would train something else where a rank's optimizer sees parts. Local.

    Args:
        backend: what divides.
        settings: among which ranks; other mesh dimensions than data divide parameters under whatever backend.
        optimizer_class: the user's.
        groups: as it will have them.
        defaults: keyword arguments of its constructor.
        separable: True vouches for it, False refuses it, None finds out.

    Raises:
        UnsupportedByBackend: names the nearest backend that works.
    """
    name, of_torch = optimizer_class.__name__, optimizer_class.__module__.startswith("torch.optim")
    divides = backend.facts.divides if settings.world_size > 1 else "nothing"
    on_mesh = settings.model_mesh is not None and settings.model_mesh.divides
    if (separable and not of_torch) or (divides == "nothing" and not on_mesh):
        return
    ancestry = {base.__name__ for base in optimizer_class.__mro__}
    needs, why = "numbers", ""
    if separable is False:
        needs, why = "everything", "separable=False: it needs all parameters, whole"
    elif ancestry & GLOBAL_OPTIMIZERS:
        needs, why = "everything", "its line search needs all parameters on every rank"
    elif ancestry & WHOLE_TENSOR_OPTIMIZERS:
        needs, why = "parameters", "it needs each parameter whole"
    elif not of_torch and type(torch.empty(0)) is Tensor:  # tensors of an estimate have no values to try it on
        try:
            needs = try_on_parts(optimizer_class, groups, defaults)
        except Untried as error:
            _warn_of_untried(name, backend, error, is_first=settings.is_first)
        some, whole = ("parts of a parameter", "the whole one") if needs != "everything" else ("some", "all parameters")
        why = f"tried on small tensors, its step on {some} is not its step on {whole}; if that is wrong: "
        why += VOUCH.format(name=name)
    if on_mesh and needs != "numbers":
        raise UnsupportedByBackend(
            f"{name}, which needs each parameter whole, where another mesh dimension divides some",
            backend.name,
            "use an optimizer that works number by number, such as torch.optim.AdamW, or a mesh of data alone",
        )
    if (needs == "everything" and divides != "nothing") or (needs == "parameters" and divides == "elements"):
        alternative = "use backend='ddp'" if needs == "everything" else "use backend='fairscale' or 'ddp'"
        raise UnsupportedByBackend(f"{name} ({why})", backend.name, alternative)


def _warn_of_untried(name: str, backend: type[Backend], error: Exception, *, is_first: bool) -> None:
    if is_first:
        warnings.warn(
            f"{name} could not be tried on small tensors ({error}), so it is unknown whether it works under "
            f"backend {backend.name!r}, whose ranks see parts of the parameters. If it treats each element by "
            f"itself, say so: {VOUCH.format(name=name)}; otherwise use backend='ddp'",
            stacklevel=4,
        )


def check_settings(
    optimizer_class: type[Optimizer],
    defaults: Mapping[str, Any],
    parameters: Iterable[tuple[str, torch.Size, bool]],
    *,
    has_complex: bool,
) -> None:
    """Raise for fused kernels over complex numbers, and for torch's Muon over anything but real matrices. Local.

    Args:
        optimizer_class: the user's.
        defaults: keyword arguments of its constructor.
        parameters: the name, the shape and whether it is complex, of each.
        has_complex: whether the optimizer is shown complex numbers.

    Raises:
        OptimizerError: says what to use.
    """
    if defaults.get("fused") and has_complex:
        raise OptimizerError(
            "fused=True: torch's fused kernels take no complex numbers; use foreach=True, or see_complex=False, which "
            "shows the optimizer real pairs"
        )
    # torch's Muon raises by itself, but under OSS on the rank alone that owns the parameter: the others would wait.
    if optimizer_class.__name__ == "Muon" and optimizer_class.__module__.startswith("torch.optim"):
        for name, shape, is_complex in parameters:
            if is_complex or len(shape) != 2:
                raise OptimizerError(
                    f"Muon takes real matrices, and {name!r} is {'complex' if is_complex else 'real'}, of shape "
                    f"{tuple(shape)}; give it the names of matrices, fsshard.build_optimizer(model, torch.optim.Muon, "
                    "[...]), and another optimizer the rest"
                )


# ------------------------------------------------------------------------------------------------ trying a class


class Untried(Exception):
    """Raised for a class that cannot be tried on small tensors; the text says what it raised."""


class _Sample(NamedTuple):
    """A small parameter: the number of its group, its value, and its gradient in each step."""

    group: int
    value: Tensor
    gradients: Sequence[Tensor]

    def half(self, rank: int) -> _Sample:
        """Return a rank's part, a vector that begins at a multiple of 64 numbers: FSDP1 cuts anywhere."""
        return _Sample(self.group, _half(self.value, rank), [_half(gradient, rank) for gradient in self.gradients])


class _Trial(NamedTuple):
    """An optimizer class with the settings that were asked for."""

    optimizer_class: type[Optimizer]
    groups: Sequence[ProbedGroup]
    defaults: Mapping[str, Any]

    def build(self, samples: Sequence[_Sample]) -> tuple[Optimizer, list[nn.Parameter]]:
        """Return the optimizer over copies of the samples, and these."""
        torch.default_generator.manual_seed(0)
        parameters = [nn.Parameter(sample.value.clone()) for sample in samples]
        given = []
        for number, group in enumerate(self.groups):
            mine = [parameter for parameter, sample in zip(parameters, samples, strict=True) if sample.group == number]
            given += [{**_own_copy(group.options), "params": mine}] if mine else []
        optimizer = self.optimizer_class(given, **_own_copy(self.defaults))
        for each in optimizer.param_groups:
            rate = each.get("lr")
            # A warm-up begins with a rate of 0, where no algorithm does anything.
            if isinstance(rate, (float, int, Tensor)) and abs(float(rate)) < 1e-6:
                each["lr"] = rate * 0 + 0.01
        return optimizer, parameters

    def train(self, samples: Sequence[_Sample], closure: bool) -> list[Tensor]:
        """Return the samples as they are after all steps."""
        optimizer, parameters = self.build(samples)
        for step in range(len(SCALES)):
            give = partial(_give_gradients, parameters, [sample.gradients[step] for sample in samples])
            give()
            # Without hooks: a user's hooks for all optimizers are not for this one.
            unhooked_step(self.optimizer_class)(optimizer, *([give] if closure else []))
        return [parameter.detach() for parameter in parameters]

    def agrees(self, samples: Sequence[_Sample], wanted: Sequence[Tensor], closure: bool) -> bool:
        """Return whether a rank with these samples alone computes what is wanted, but for rounding."""
        try:
            trained = self.train(samples, closure)
        except Exception:  # what refuses a vector where it takes a matrix cannot be divided either
            return False
        for sample, one, other in zip(samples, wanted, trained, strict=True):
            moved, size = float((one - sample.value).nan_to_num(0, 0, 0).abs().max()), float(sample.value.abs().max())
            bound = BOUND * moved + 8 * torch.finfo(torch.float64).eps * (moved + size)
            if not torch.allclose(one, other, rtol=0, atol=bound, equal_nan=True):
                return False
        return True


def try_on_parts(
    optimizer_class: type[Optimizer], groups: Sequence[ProbedGroup], defaults: Mapping[str, Any]
) -> Literal["numbers", "parameters", "everything"]:
    """Return what an optimizer can be given by itself: any numbers, whole parameters, or only everything. Local.

    Raises:
        Untried: it raises on whole tensors.
    """
    trial = _Trial(optimizer_class, groups, defaults)
    with _surroundings():
        samples, closure = _samples(groups), False
        try:
            whole = trial.train(samples, closure)
        except Exception as error:
            closure = True  # SAM's step takes nothing else
            try:
                whole = trial.train(samples, closure)
            except Exception:
                raise Untried(f"{type(error).__name__}: {error}") from error
        if not all(trial.agrees(samples[rank::2], whole[rank::2], closure) for rank in range(2)):
            return "everything"
        for rank in range(2):
            parts = [sample.half(rank) for sample in samples]
            if not trial.agrees(parts, [_half(one, rank) for one in whole], closure):
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
                optimizer, parameters = _Trial(optimizer_class, groups, defaults).build(samples)
                trained.append(parameters)

                def closure() -> Tensor:
                    untouched.append(all(torch.equal(p, s.value) for p, s in zip(trained[-1], samples, strict=True)))
                    return _give_gradients(trained[-1], [sample.gradients[0] for sample in samples])

                _give_gradients(parameters, [factor * sample.gradients[0] for sample in samples])
                unhooked_step(optimizer_class)(optimizer, closure)
    except Exception:
        return False
    return bool(untouched) and untouched[0] and all(map(torch.equal, *trained))


def _half(whole: Tensor, rank: int) -> Tensor:
    return whole.reshape(-1).chunk(2)[rank].clone()


def _give_gradients(parameters: list[nn.Parameter], gradients: Sequence[Tensor]) -> Tensor:
    """Stand for a backward pass, of a loss that is a sum over numbers."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient + 0.01 * parameter.detach()  # another one where the parameter is another
    return torch.ones((), dtype=torch.float64, requires_grad=True)


def _samples(groups: Sequence[ProbedGroup]) -> list[_Sample]:
    """Return two tensors of each kind that a group has, since algorithms treat filters otherwise than matrices."""
    generator, samples = torch.Generator().manual_seed(1), []
    for number, group in enumerate(groups):
        for at_end, (dims, is_complex) in itertools.product((False, True), sorted(group.kinds)):
            dtype, ones = torch.complex128 if is_complex else torch.float64, (1,) * (dims - 2)
            # As a matrix whether the first dim stands against the others, or the last two are taken.
            shape = (*ones, *SHAPE) if at_end else (SHAPE[0], *ones, SHAPE[1])
            shape = shape if dims > 1 else (SHAPE[0] * SHAPE[1],)
            # The gradients have a direction in common: algorithms that look for one shall find it.
            value, common, *own = (torch.randn(shape, dtype=dtype, generator=generator) for _ in range(4))
            gradients = [scale * (common + 0.5 * noise) for scale, noise in zip(SCALES, own, strict=True)]
            samples.append(_Sample(number, value, gradients))
    return samples


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


# ------------------------------------------------------------------------------------------------ asked alike


def asked_of(
    optimizer_class: type[Optimizer], groups: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return what a rank asks for, with names in place of parameters: (what, text that is the same on every rank)."""
    asked = [("optimizer", f"{optimizer_class.__module__}.{optimizer_class.__qualname__}")]
    asked += [(key, rank_independent_text(value)) for key, value in sorted(defaults.items())]
    for index, group in enumerate(groups):
        asked += [
            (f"param_groups[{index}][{key!r}]", rank_independent_text(value)) for key, value in sorted(group.items())
        ]
    return asked


def rank_independent_text(value: object) -> str:
    """Return a text that is the same on every rank: of what is no plain value, its type or its name."""
    if isinstance(value, Tensor):
        small = value.numel() <= 16 and not value.is_meta
        return f"tensor({value.tolist()})" if small else f"tensor{tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {rank_independent_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(rank_independent_text(item) for item in value) + ")"
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, Enum)):
        return repr(value)
    if isinstance(value, type) or inspect.isroutine(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return type(value).__name__


def check_asked_alike(
    group: dist.ProcessGroup | None, what: str, asked: Sequence[tuple[str, str]], digests: Sequence[str]
) -> None:
    """Raise on every rank unless all ask for the same; a collective only where they do not.

    Args:
        group: the ranks.
        what: the call, for the text.
        asked: this rank's, from :func:`asked_of`.
        digests: every rank's digest of it, in rank order.
    """
    if group is None or len(set(digests)) == 1:
        return
    tables = [dict(table) for table in per_rank(group, list(asked))]
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    here, there = tables[0], tables[other]
    names = [name for name in dict.fromkeys((*here, *there)) if here.get(name) != there.get(name)]
    told = [f"{name} is {here.get(name, 'not given')} and {there.get(name, 'not given')}"[:200] for name in names[:3]]
    raise RankMismatch(
        f"{what}: ranks 0 and {other} were asked for different things: {'; '.join(told)}; pass the same on every "
        "rank, since each updates a part of one model"
    )
