"""The engines that are compared: fsshard's backends, and classes of the user."""

from __future__ import annotations

import contextlib
import math
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fsshard.backends.whole import gather_grads, owned
from fsshard.errors import ConfigurationError, RecipeError, UnsupportedByBackend
from fsshard.model.activation_checkpointing import checkpoint_blocks
from fsshard.parity.bounds import NotComparable
from fsshard.parity.trace import TensorItems, Values
from fsshard.parity.whole import whole_state, whole_tensors, whole_weights
from fsshard.recipes.recipe import Arguments, Recipe
from fsshard.sharded.controller import controller_of
from fsshard.sharded.grad_scaler import GradScaler
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, build_optimizer, groups_by_name
from fsshard.wrapping import wrap

NamedTensors = Iterator[tuple[str, Tensor]]
State = dict[str, Any]
Groups = list[State]


def total_norm(gradients: Mapping[str, Tensor], norm_type: float) -> float:
    """Return the norm of whole gradients, in float64; a complex number counts by its modulus."""
    powers = []
    for gradient in gradients.values():
        if not gradient.numel():
            continue
        wide = torch.complex128 if gradient.is_complex() else torch.float64
        moduli = gradient.to(wide).abs()
        if norm_type == math.inf:
            powers.append(float(moduli.max()))
        else:
            powers.append(float(moduli.pow(norm_type).sum()))
    if norm_type == math.inf:
        return max(powers, default=0.0)
    return math.pow(sum(powers), 1.0 / norm_type)


def norm_dtype(gradients: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype of the norm that training clips by: float32, or float64 if a gradient has that precision."""
    for gradient in gradients.values():
        if gradient.dtype in (torch.float64, torch.complex128):
            return torch.float64
    return torch.float32


class Engine(ABC):
    """One way of training a recipe, on one rank.

    Subclass it to compare a training of your own with fsshard's backends (``parity.compare(recipe, backends=["fsdp2",
    MyEngine])``): in ``__init__`` set ``model``, ``module`` and ``optimizer``; what is written here then trains a
    replica on every rank. Override what your engine does otherwise. An engine that cannot show a quantity yields
    nothing for it, and that quantity is not compared.

    Attributes:
        name: what reports call it.
        model: what ``recipe.loss`` is given.
        module: the model with the user's parameter names.
        optimizer: what updates it.
    """

    name: ClassVar[str]
    model: Callable[..., Any]
    module: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        """Take a fresh ``module``, the same on every rank, under the engine."""
        self.recipe = recipe

    def accumulating(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of all batches of a step but the last: the model's ``no_sync``, if it has one."""
        no_sync = getattr(self.model, "no_sync", None)
        if no_sync is None or not self.recipe.no_sync:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = no_sync()
        return context

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward and its loss."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run the backward of one batch's share of the loss."""
        loss.backward()

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Clip the gradients and return their norm before, summed in float64. Collective."""
        gradients = {name: gradient for name, gradient in self.gradients() if gradient is not None}
        norm = torch.tensor(total_norm(gradients, norm_type), dtype=norm_dtype(gradients))
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients.values():
            gradient.mul_(scale.to(gradient.device, gradient.dtype))
        return float(norm)

    def step(self) -> None:
        """Update the weights. Collective."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield whole gradients by name, before clipping. Collective, as all that follow."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter.grad

    def weights(self) -> NamedTensors:
        """Yield whole weights by name, of parameters that FSDP1 or FSDP2 has divided too."""
        for whole in whole_tensors(self.module):
            if whole.quantity == "weight":
                yield whole.name, whole.value

    def states(self) -> Iterator[tuple[str, State]]:
        """Yield the optimizer's state by parameter, whole as the weights are; a parameter comes once per key.

        Nothing of an optimizer with another one in it, whose ranks have a share each: torch's ZeroRedundancyOptimizer,
        FairScale's OSS.
        """
        if hasattr(self.optimizer, "optim"):
            return iter(())
        return whole_state(self.module, self.optimizer)

    def buffers(self) -> NamedTensors:
        """Yield this rank's buffers by name."""
        yield from self.module.named_buffers()

    def groups(self) -> Groups:
        """Return the optimizer's groups as they are now, names for parameters."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        groups = []
        for group in self.optimizer.param_groups:
            members = [names.get(id(parameter), "?") for parameter in group["params"]]
            groups.append({**group, "params": members})
        return groups

    def owned(self, name: str) -> tuple[int, int]:
        """Return [start, stop) of the real numbers of a parameter that this rank updates."""
        return 0, 2**62

    def restore(self, weights: TensorItems, states: Mapping[str, State]) -> None:
        """Take over the reference's weights and optimizer state.

        Needed where engines agree within a bound only: every step is judged from a common start.
        """
        raise UnsupportedByBackend(
            "restore(), which a comparison within a rounding bound needs",
            self.name,
            "compare at two ranks or less",
        )


def optimizer_of(recipe: Recipe, make: Callable[[], Any]) -> Any:
    """Return the optimizer that ``make`` makes, or raise RecipeError where it does not take ``recipe.hyper``."""
    try:
        return make()
    except TypeError as error:
        raise RecipeError(f"recipe.optimizer does not take recipe.hyper {dict(recipe.hyper)!r}: {error}") from error


def check_seen_as_they_are(*settings: Arguments) -> None:
    """Raise NotComparable where settings of an optimizer, or of a group, let it see weights as matrices."""
    if any(each.get("see") for each in settings):
        raise NotComparable(
            "see= shows the optimizer matrices, and a comparison within rounding, or with one process, repeats its "
            "step on weights as they are; compare backends with 'ddp' on two ranks"
        )


def bare_optimizer(recipe: Recipe, groups: Groups) -> Any:
    """Return the recipe's optimizer over whole parameters, without what build_optimizer alone is told."""
    check_seen_as_they_are(recipe.hyper, *groups)
    hyper = {key: value for key, value in recipe.hyper.items() if key not in ("whole", "separable", "see")}
    return optimizer_of(recipe, lambda: recipe.optimizer(groups, **hyper))


class WrappedEngine(Engine):
    """An fsshard backend."""

    name: ClassVar[str] = "fsshard"
    model: ShardedModule
    optimizer: ShardedOptimizer

    def __init__(self, recipe: Recipe, module: nn.Module, settings: Arguments) -> None:
        super().__init__(recipe, module)
        arguments = {"mixed_precision": recipe.precision, **recipe.settings, **settings}
        self.model = wrap(module, **arguments)
        self.module = self.model
        groups = None
        if recipe.param_groups is not None:
            names = [name for name, _ in self.model.named_parameters()]
            groups = recipe.param_groups(names)

        def make() -> ShardedOptimizer:
            return build_optimizer(self.model, recipe.optimizer, groups, **recipe.hyper)

        self.optimizer = optimizer_of(recipe, make)
        precision = self.model.plan.precision
        halves = torch.float16 in (precision.param, precision.reduce_dtype)
        # Gradients in float16 would be zero below 6e-8 without a scale.
        self.scaler = GradScaler(self.model, init_scale=LOSS_SCALE, enabled=halves)
        # Whether there are gradients that are multiplied by the scale.
        self._scaled = False

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        return self.model.autocast()

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()
        self._scaled = True

    def step(self) -> None:
        self._unscale()
        self.scaler.step(self.optimizer)
        if self.scaler.is_enabled():
            self.scaler.update()

    def _unscale(self) -> None:
        if self._scaled:
            self.scaler.unscale_(self.optimizer)
            self._scaled = False

    def clip(self, max_norm: float, norm_type: float) -> float:
        self._unscale()
        return float(self.model.clip_grad_norm_(max_norm, norm_type))

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        backend = self.model.backend
        controller_of(self.model).finish_gradients(backend.entries.values())
        self._unscale()
        for entry, gradient in gather_grads(backend):
            if gradient is None:
                yield entry.name, None
            else:
                yield entry.name, entry.put_together(entry.kind.to_user(gradient))

    def weights(self) -> NamedTensors:
        return whole_weights(self.model)

    def states(self) -> Iterator[tuple[str, State]]:
        return self.optimizer.iterate_state()

    def groups(self) -> Groups:
        return groups_by_name(self.optimizer)

    def owned(self, name: str) -> tuple[int, int]:
        backend = self.model.backend
        entry = backend.entries.get(name)
        if entry is None or not owned(backend, entry):
            return 0, 0
        # Its ranges are those of this rank's part, which is no range of the whole.
        if entry.divided_over:
            return 0, 2**62
        if entry.in_order:
            return entry.here
        # It has elements from all over, so rank 0 speaks for all.
        stop = 0 if backend.settings.rank else entry.stored_shape.numel()
        return 0, stop

    def restore(self, weights: TensorItems, states: Mapping[str, State]) -> None:
        backend = self.model.backend
        backend.reshard()
        with torch.no_grad():
            for name, value in weights:
                entry = backend.entries[name]
                part = entry.take_part(value.to(backend.settings.device))
                entry.put(entry.kind.to_stored(part))
        # The groups are not restored: no engine computes what is in them.
        self.optimizer.load_state_dict({"state": states, "param_groups": self.groups()})


# A power of two, which changes no bit, and small enough that no recipe of few steps overflows float16.
LOSS_SCALE = 2.0**8

# A backend's name, a mapping of wrap's arguments with "backend" among them, or an Engine class.
EngineSpec = Any


def engine_name(spec: EngineSpec) -> str:
    """Return what reports call ``spec``, or raise ConfigurationError if it names no engine."""
    if isinstance(spec, str):
        return spec
    if isinstance(spec, Mapping) and "backend" in spec:
        backend = str(spec["backend"])
        others = [f"{key}={value!r}" for key, value in spec.items() if key != "backend"]
        return f"{backend}({', '.join(others)})" if others else backend
    if isinstance(spec, type) and issubclass(spec, Engine):
        return getattr(spec, "name", spec.__name__)
    raise ConfigurationError(
        f"backends holds {spec!r}: expected a backend's name, a dict of fsshard.wrap's arguments with 'backend' among "
        "them, or a subclass of fsshard.parity.Engine"
    )


def backend_of(spec: EngineSpec) -> str:
    """Return the backend that ``spec`` names; "" for an engine of the user's own."""
    if isinstance(spec, str):
        return spec
    return str(spec["backend"]) if isinstance(spec, Mapping) else ""


def make_engine(
    spec: EngineSpec,
    recipe: Recipe,
    module: nn.Module,
    settings: Arguments,
) -> Engine:
    """Return the engine that ``spec`` means, over a fresh model; the recipe says what it recomputes. Collective.

    ``settings`` are further arguments of :func:`fsshard.wrap`, of a divided model.
    """
    if isinstance(spec, type):
        policy = recipe.settings.get("auto_wrap_policy", "auto")
        checkpoint_blocks(module, recipe.activation_checkpointing, auto_wrap_policy=policy)
        engine: Engine = spec(recipe, module)
        return engine
    arguments: Values = {"activation_checkpointing": recipe.activation_checkpointing}
    arguments |= settings
    arguments |= {"backend": spec} if isinstance(spec, str) else spec
    return WrappedEngine(recipe, module, arguments)


def adds_in_tree(engine: Engine) -> bool:
    """Return whether the engine adds up gradients over ranks in the order of :mod:`fsshard.comm.tree`."""
    if not isinstance(engine, WrappedEngine):
        return False
    backend = engine.model.backend
    # torch's own collectives have an order of their own, and so may backends of the user.
    return backend.facts.adds_in_tree and backend.settings.options.get("fast_collectives", True)
