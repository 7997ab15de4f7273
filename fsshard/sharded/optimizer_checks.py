"""Checks before an optimizer is built: can it work on shards, and do all ranks ask for the same one?

Engines give a rank some of the parameters (FairScale's OSS), or a part of each (FSDP1, FSDP2). That is the same
training only for an algorithm that treats every number, or every parameter, by itself. torch's own classes are known;
another class takes two steps over small tensors, once on all of them and once on what a rank would have.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.backends.base import Backend
from fsshard.backends.settings import Settings
from fsshard.comm.agreement import described_tensor, raise_differences
from fsshard.errors import OptimizerError, UnsupportedByBackend
from fsshard.oss.partition import GLOBAL_OPTIMIZERS
from fsshard.oss.partitioned import unhooked_step
from fsshard.sharded.optimizer_matrices import Matrices, See, check_equivariant, check_see, is_bias, matrices_of

WHOLE_TENSOR_OPTIMIZERS = frozenset(
    {"Adafactor", "DistributedShampoo", "LAMB", "LARS", "Lamb", "Lars", "Muon", "SOAP", "Shampoo"}
)
"""Known to use the shape, a norm or a factorisation of each parameter."""
BLOCKWISE = frozenset({"bitsandbytes", "torchao"})
"""Packages whose 8-bit optimizers scale blocks of 64 to 2048 numbers, which a rank's part cuts elsewhere; on a CPU most
of them cannot be tried."""
BOUND = 1e-9
"""Largest difference between updates, of the largest update. In float64, and with cuts where torch's kernels begin a
vector, what works number by number differs by a few roundings of 2e-16; another norm or mean moves one by 1e-3."""
BOUND_WITHIN = 1e-4
"""As :data:`BOUND`, where a vector is cut: kernels round the rest otherwise, by 6e-8 what computes in float32."""
SCALES = (1.0, 1e-3)
"""Scales of the gradients of the two steps: norms of hundreds, which what clips does clip, then of tenths."""
SHAPE = (160, 144)
"""Shape of the matrices, and vectors have as many numbers: some algorithms factor from 128 rows and columns on. Fewer
than 32768 numbers, which torch gives to one thread."""
AT_END = (24, 16)
"""Shape of the last two dims, behind dims of one: a factor over all then has 384 by 384 numbers, and a root at once."""


@dataclass(frozen=True)
class OptimizerRequest:
    """An optimizer that is asked for, by the user's names of parameters; the model may be wrapped or not yet.

    Attributes:
        optimizer_class: the user's.
        groups: as the optimizer will have them, with names in place of parameters.
        defaults: keyword arguments of its constructor.
        parameters: name -> shape that its user sees, and whether it is complex, of all of the model's.
        see_complex: complex parameters are shown as such, and not as pairs of reals.
        separable: True vouches that it works on parts, False refuses it there, None finds out.
        whole: ranks that have parts of each parameter are to step some of them whole.
        see: name -> as which matrices the optimizer sees it, of those that it does not see as they are.
    """

    optimizer_class: type[Optimizer]
    groups: Sequence[Mapping[str, Any]]
    defaults: Mapping[str, Any]
    parameters: Mapping[str, tuple[torch.Size, bool]]
    see_complex: bool = True
    separable: bool | None = None
    whole: bool = False
    see: Mapping[str, See] = field(default_factory=dict)

    @property
    def of_torch(self) -> bool:
        """Return whether the class is torch's own."""
        return self.optimizer_class.__module__.startswith("torch.optim")

    @cached_property
    def matrices(self) -> dict[str, Matrices]:
        """Return how weights of more than two dims are shown as matrices, by name."""
        return matrices_of(self)

    def _dims(self, name: str) -> int:
        """Return how many dims the optimizer sees of a parameter."""
        if name in self.matrices:
            return self.matrices[name].dims
        return len(self.parameters[name][0])

    def check_settings(self) -> None:
        """Raise OptimizerError for settings that cannot work, whatever the backend.

        They are fused kernels over complex numbers, torch's Muon over other than matrices, and what ``see`` does not
        go with. Local.
        """
        check_see(self)
        if self.defaults.get("fused") and self.see_complex and any(c for _, c in self.parameters.values()):
            raise OptimizerError(
                "fused=True: torch's fused kernels take no complex numbers; use foreach=True, or see_complex=False, "
                "which shows the optimizer real pairs"
            )
        # torch's Muon raises by itself, but under OSS on the rank alone that owns the parameter: the others would wait.
        if self.optimizer_class is torch.optim.Muon:
            for group in self.groups:
                for name in group["params"]:
                    self._check_matrix(name)
        check_equivariant(self)

    def _check_matrix(self, name: str) -> None:
        shape, is_complex = self.parameters[name]
        if not is_complex and self._dims(name) == 2:
            return
        filters = ""
        if not is_complex and len(shape) > 2 and not is_bias(shape):
            filters = ", or pass whole=True, see='matrix'"
        numbers = "complex" if is_complex else "real"
        raise OptimizerError(
            f"Muon takes real matrices, and {name!r} is {numbers}, of shape {tuple(shape)}; give it the names of "
            "matrices, fsshard.build_optimizer(model, torch.optim.Muon, [...]), and another optimizer the rest"
            + filters
        )

    def check_separable(self, backend: type[Backend], settings: Settings) -> None:
        """Raise for an algorithm that would train something else where a rank's optimizer sees parts. Local.

        Raises:
            UnsupportedByBackend: names the nearest backend that works.
        """
        on_mesh = settings.model_mesh is not None and settings.model_mesh.divides
        divides = self._divides(backend, settings, on_mesh)
        # Over ranks of data the inner products of torch's own are those of all ranks: optimizer_lbfgs.py.
        asks_all = self.optimizer_class is torch.optim.LBFGS and not on_mesh and self.separable is not False
        if (self.separable and not self.of_torch) or divides == "nothing" or asks_all:
            return
        obstacle = self._obstacle(divides, backend, settings)
        if obstacle is None:
            return
        why, instead = obstacle
        if on_mesh:
            instead = (
                "use an optimizer that works element by element, as AdamW does, or a mesh of data alone: another mesh "
                "dimension divides some parameters"
            )
        raise UnsupportedByBackend(f"{self.optimizer_class.__name__} ({why})", backend.name, instead)

    @property
    def _ancestry(self) -> set[str]:
        return {base.__name__ for base in self.optimizer_class.__mro__}

    def _divides(self, backend: type[Backend], settings: Settings, on_mesh: bool) -> str:
        """Return what a rank's optimizer gets: everything (``"nothing"`` is divided), some parameters, some elements.

        Raises:
            UnsupportedByBackend: for ``whole=True`` where no rank can have whole parameters, or needs all of them.
        """
        divides = backend.facts.divides
        if self.whole and self._ancestry & GLOBAL_OPTIMIZERS and divides == "elements":
            told = f"{self.optimizer_class.__name__} with whole=True (it looks at all parameters, and no rank has them)"
            raise UnsupportedByBackend(told, backend.name, "leave whole=True out")
        if on_mesh:
            if self.whole:
                told = "whole=True on a mesh that has dimensions besides data"
                raise UnsupportedByBackend(told, backend.name, "use a mesh of data alone")
            # Under whatever backend.
            return "elements"
        if settings.world_size == 1:
            return "nothing"
        if self.whole and divides == "elements":
            return "owners"
        return divides

    def _obstacle(self, divides: str, backend: type[Backend], settings: Settings) -> tuple[str, str] | None:
        """Return why the algorithm would train something else, and what to do instead; None if it would not."""
        instead = "use backend='ddp'"
        if self.separable is False:
            return "separable=False: it needs all parameters, whole", instead
        if self._ancestry & GLOBAL_OPTIMIZERS:
            return "its line search needs all parameters on every rank", instead
        if self._ancestry & WHOLE_TENSOR_OPTIMIZERS:
            if divides == "owners":
                return None
            advice = "pass whole=True to fsshard.build_optimizer, or use backend='fairscale' or 'ddp'"
            return "it needs each parameter whole", advice
        # Tensors of an estimate have no values to try it on.
        if self.of_torch or type(torch.empty(0)) is not Tensor:
            return None
        vouch = f"fsshard.build_optimizer(model, {self.optimizer_class.__name__}, ..., separable=True)"
        why = self._tried(divides, backend, settings, vouch)
        if not why:
            return None
        if divides == "elements":
            instead = "pass whole=True, if it needs no more than each parameter whole, or use backend='ddp'"
        return why + vouch, instead

    def _tried(self, divides: str, backend: type[Backend], settings: Settings, vouch: str) -> str:
        """Return what is wrong with steps on parts of small tensors, or ""; warn where that cannot be found out."""
        try:
            if self._agrees_on_parts(divides):
                return ""
        except Exception as error:
            packages = {base.__module__.partition(".")[0] for base in self.optimizer_class.__mro__}
            if packages & BLOCKWISE:
                if divides == "owners":
                    return ""
                return "its blocks of numbers with a scale in common would be others on a rank's part; if it has none: "
            if settings.is_first and not self.whole:
                warnings.warn(
                    f"{self.optimizer_class.__name__} could not be tried on small tensors ({type(error).__name__}: "
                    f"{error}), so it is unknown whether it works under backend {backend.name!r}, whose ranks see "
                    f"parts of the parameters. If it treats each element by itself, say so: {vouch}; otherwise use "
                    "backend='ddp'",
                    stacklevel=6,
                )
            return ""
        return "tried on small tensors, its step on a rank's part is not its step on the whole; if that is wrong: "

    # ------------------------------------------------------------------------------------------ trying a class

    def _samples(self) -> list[_Sample]:
        """Return two tensors of each kind that a group has, since algorithms treat filters otherwise than matrices."""
        generator = torch.Generator().manual_seed(1)
        samples = []
        for number, group in enumerate(self.groups):
            kinds = set()
            for name in group["params"]:
                dims = self._dims(name)
                _, is_complex = self.parameters[name]
                if is_complex and not self.see_complex:
                    # Pairs have a dim more, and are real.
                    dims += 1
                    is_complex = False
                kinds.add((dims, is_complex))
            for at_end, (dims, is_complex) in itertools.product((False, True), sorted(kinds)):
                dtype = torch.complex128 if is_complex else torch.float64
                ones = (1,) * (dims - 2)
                # As a matrix whether the first dim stands against the others, or the last two are taken. There of
                # fewer numbers: the factors of Shampoo, for which the first dim stands, are of 1 by all the others.
                # Small ones are among them, since some keep blocks, or a number for all, below or from a size on.
                rows, columns = SHAPE
                shape: tuple[int, ...] = (rows, *ones, columns)
                if at_end:
                    shape = (*ones, *AT_END)
                if dims < 2:
                    shape = (math.prod(shape),)
                value, common, *own = torch.randn((2 + len(SCALES), *shape), dtype=dtype, generator=generator)
                stacked = [value]
                for scale, noise in zip(SCALES, own, strict=True):
                    # The gradients have a direction in common: algorithms that look for one shall find it.
                    stacked.append(scale * (common + 0.5 * noise))
                samples.append((number, torch.stack(stacked)))
        return samples

    def _build(self, samples: Sequence[_Sample]) -> tuple[Optimizer, list[nn.Parameter]]:
        """Return the optimizer over copies of the samples' values, and these."""
        torch.default_generator.manual_seed(0)
        parameters = [nn.Parameter(stacked[0].clone()) for _, stacked in samples]
        groups = []
        for number, group in enumerate(self.groups):
            members = []
            for parameter, sample in zip(parameters, samples, strict=True):
                if sample[0] == number:
                    members.append(parameter)
            if not members:
                continue
            own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            options = copy.deepcopy(own)
            options["params"] = members
            groups.append(options)
        defaults = copy.deepcopy(dict(self.defaults))
        optimizer = self.optimizer_class(groups, **defaults)
        for each in optimizer.param_groups:
            rate = each.get("lr")
            # A warm-up begins with a rate of 0, where no algorithm does anything.
            if isinstance(rate, (float, int, Tensor)) and abs(float(rate)) < 1e-6:
                each["lr"] = rate * 0 + 0.01
        return optimizer, parameters

    def trained(self, samples: Sequence[_Sample]) -> list[Tensor]:
        """Return the values of samples after all steps, each as (group's number, value and gradients). Local."""
        with _surroundings():
            return self._trained(samples, closure=False)

    def _trained(self, samples: Sequence[_Sample], closure: bool) -> list[Tensor]:
        """Return the samples' values as they are after all steps."""
        optimizer, parameters = self._build(samples)
        # Without hooks: a user's hooks for all optimizers are not for this one.
        take_step = unhooked_step(self.optimizer_class)
        rows = 1
        if samples:
            _, first = samples[0]
            rows = len(first)
        for step in range(1, rows):
            gradients = [stacked[step] for _, stacked in samples]
            give = partial(_give_gradients, parameters, gradients)
            give()
            if closure:
                take_step(optimizer, give)
            else:
                take_step(optimizer)
        return [parameter.detach() for parameter in parameters]

    def _agrees_on_parts(self, divides: str) -> bool:
        """Return whether ranks with parts compute what one with everything does, but for rounding. Raises what it does.

        A part is some whole parameters; or a run of each, as a vector, which begins where no block of numbers does.
        """
        with _surroundings():
            samples = self._samples()
            closure = False
            try:
                whole = self._trained(samples, closure)
            except Exception as error:
                # SAM's step takes nothing else.
                closure = True
                try:
                    whole = self._trained(samples, closure)
                except Exception:
                    raise error from None
            for rank in range(2):
                mine = slice(rank, None)
                if divides == "owners":
                    mine = slice(rank, None, 2)
                parts = samples[mine]
                wanted = whole[mine]
                if divides == "elements":
                    parts = [(group, _cut(stacked.flatten(1), rank)) for group, stacked in parts]
                    wanted = [_cut(one.flatten(), rank) for one in wanted]
                try:
                    trained = self._trained(parts, closure)
                except Exception:
                    # What refuses a vector where it takes a matrix cannot be divided either.
                    return False
                bound = BOUND_WITHIN if divides == "elements" and rank == 0 else BOUND
                if not all(map(partial(_is_near, bound), parts, wanted, trained)):
                    return False
        return True

    @cached_property
    def begins_with_closure(self) -> bool:
        """Return whether ``step(closure)`` neither uses a gradient nor changes a parameter before it calls the closure.

        Local. False where that cannot be found out: it takes no closure, or raises on small tensors.
        """
        if self.of_torch:
            return True
        untouched = []
        trained = []
        with contextlib.suppress(Exception), _surroundings():
            samples = self._samples()
            starts = [stacked[0] for _, stacked in samples]
            gradients = [stacked[1] for _, stacked in samples]
            for factor in (1.0, -1e3):  # other gradients before the closure, which gives both the same
                optimizer, parameters = self._build(samples)
                trained.append(parameters)

                def closure() -> Tensor:
                    untouched.append(all(map(torch.equal, trained[-1], starts)))
                    return _give_gradients(trained[-1], gradients)

                _give_gradients(parameters, [factor * gradient for gradient in gradients])
                unhooked_step(self.optimizer_class)(optimizer, closure)
            return bool(untouched) and untouched[0] and all(map(torch.equal, *trained))
        return False

    # ------------------------------------------------------------------------------------------ asked alike

    def asked(self) -> dict[str, str]:
        """Return what a rank asks for: name of the argument -> text that is the same on every rank."""
        settings = dict(self.defaults)
        settings["see_complex"] = self.see_complex
        settings["separable"] = self.separable
        settings["whole"] = self.whole
        if self.see:
            settings["see"] = self.see
        facts = {"optimizer": f"{self.optimizer_class.__module__}.{self.optimizer_class.__qualname__}"}
        for key, value in sorted(settings.items()):
            facts[key] = rank_independent_text(value)
        for index, group in enumerate(self.groups):
            for key, value in sorted(group.items()):
                facts[f"param_groups[{index}][{key!r}]"] = rank_independent_text(value)
        return facts


_Sample = tuple[int, Tensor]  # a small parameter: number of its group; value and gradient of each step, stacked


def _cut(values: Tensor, rank: int) -> Tensor:
    """Return a rank's run along the last dim.

    One begins where torch's kernels begin a vector, but no block of 128 numbers or more; the other ends within a block.
    """
    middle = values.shape[-1] // 256 * 128 + 64
    return values[..., middle:] if rank else values[..., : middle - 45]


def _is_near(relative: float, sample: _Sample, wanted: Tensor, trained: Tensor) -> bool:
    """Return whether two results of training a sample differ by rounding at most."""
    start = sample[1][0]
    moved = float((wanted - start).nan_to_num(0, 0, 0).abs().max())
    size = float(start.abs().max())
    bound = relative * moved + 8 * torch.finfo(torch.float64).eps * (moved + size)
    return torch.allclose(wanted, trained, rtol=0, atol=bound, equal_nan=True)


def _give_gradients(parameters: list[nn.Parameter], gradients: Sequence[Tensor]) -> Tensor:
    """Stand for a backward pass, of a loss that is a sum over numbers."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient + 0.01 * parameter.detach()  # another one where the parameter is another
    return torch.ones((), dtype=torch.float64, requires_grad=True)


@contextlib.contextmanager
def _surroundings() -> Iterator[None]:
    """Context that is as in training, whatever surrounds the call, and leaves torch's random numbers as they were."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        with torch.random.fork_rng(devices=()):
            yield


def rank_independent_text(value: object) -> str:
    """Return a text that is the same on every rank: of what is no plain value, its type or its name."""
    if value is None or isinstance(value, (str, bool, int, float, complex, torch.dtype, Enum)):
        return repr(value)
    if isinstance(value, Tensor):
        small = value.numel() <= 16 and not value.is_meta
        return f"tensor({value.tolist()})" if small else described_tensor(value)
    if isinstance(value, Mapping):
        items = [f"{key!r}: {rank_independent_text(item)}" for key, item in value.items()]
        return "{" + ", ".join(items) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(list(map(rank_independent_text, value))) + ")"
    if isinstance(value, type) or inspect.isroutine(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return type(value).__name__


def check_asked_alike(group: dist.ProcessGroup | None, request: OptimizerRequest, digests: Sequence[str]) -> None:
    """Raise on every rank unless all ask for the same; a collective only where ``digests``, one a rank, differ."""
    if group is not None and len(set(digests)) > 1:
        advice = "pass the same on every rank, since each updates a part of one model"
        raise_differences(group, "build_optimizer", request.asked(), digests, advice)
