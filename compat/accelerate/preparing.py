"""Match optimizers with the models that prepare() is given, and put both under an engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

import fsshard
from fsshard.errors import ConfigurationError, OptimizerError
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, check_unstepped, constructor_arguments, retire
from fsshard.wrapping import check_wrap

from ..trainers import by_name, by_number, name_calls, split_over

__all__ = ["Late", "Names", "PreparedOptimizer", "Share", "adopted", "check_shares", "late", "shares_of", "wrapped"]

SAVE = "on every rank call accelerator.get_state_dict(model), or accelerator.save_model(model, folder)"
LOAD = "load it before prepare(), or on every rank call accelerator.load_state(folder)"


class PreparedOptimizer(AcceleratedOptimizer):
    """Accelerate's, whose steps wait for gradients, over one of :func:`fsshard.wrap`.

    Attributes:
        held: its state while files are written, so that writing needs no other rank; None at other times.
    """

    def __init__(self, optimizer: ShardedOptimizer, scaler: Any) -> None:
        # Placing would send its state once around.
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self.held: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return a torch optimizer's state, with whole tensors and a number for each parameter. Collective."""
        return by_number(self.optimizer) if self.held is None else self.held

    def load_state_dict(self, state_dict: Any) -> None:
        """Take a torch optimizer's, or one by name. Collective.

        Raises:
            StateDictError: groups of other sizes, or state of another shape; nothing has changed.
        """
        self.optimizer.load_state_dict(by_name(state_dict, self.optimizer))

    def train(self) -> None:
        """Do nothing, as for most optimizers.

        Raises:
            ConfigurationError: its class switches weights, of which a rank may have parts.
        """
        kind = self.optimizer.optimizer_class
        for name in ("train", "eval"):
            if callable(getattr(kind, name, None)):
                raise ConfigurationError(
                    f"{kind.__name__}.{name}() switches whole weights, which an engine keeps; use an optimizer without "
                    "it"
                )

    eval = train


@dataclass
class Share:
    """A model and its optimizers, which go into one call of ``fsshard.wrap``."""

    model: nn.Module
    optimizers: list[Optimizer] = field(default_factory=list)


@dataclass
class Late:
    """An optimizer whose model was prepared before, and its groups with names in place of parameters."""

    optimizer: Optimizer
    model: ShardedModule
    groups: list[dict[str, Any]]


class Names:
    """Former parameters of wrapped models, by name: an optimizer that was made before may come later."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], weakref.ref[ShardedModule], str]] = {}

    def remember(self, parameters: Mapping[str, Tensor], model: ShardedModule) -> None:
        """Remember the parameters that a model had."""
        self._known = {key: known for key, known in self._known.items() if known[0]() is not None}
        for name, parameter in parameters.items():
            self._known[id(parameter)] = (weakref.ref(parameter), weakref.ref(model), name)

    def find(self, parameter: Tensor) -> tuple[ShardedModule, str] | None:
        """Return the model that took a parameter, and its name there."""
        was, model, name = self._known.get(id(parameter), (None, None, ""))
        if was is None or was() is not parameter or model is None:
            return None
        found = model()
        return None if found is None else (found, name)


def shares_of(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> tuple[list[Share], list[Optimizer]]:
    """Return each model with its optimizers, and optimizers of none of them. Local.

    Raises:
        ConfigurationError: an optimizer, or a parameter, of two models; or ranks that share a model's samples.
    """
    owner: dict[int, int] = {}
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            if owner.setdefault(id(parameter), number) != number:
                raise ConfigurationError(
                    f"prepare(): parameter {name!r} is in two of the models; prepare one nn.Module that has both"
                )
        if split_over(model) is not None:
            raise ConfigurationError(
                "prepare(): shard_domain has split the model, and the ranks of a domain share samples, which "
                "Accelerate gives to no two ranks; write the loop over fsshard.wrap, or use "
                "fsshard.compat.lightning.FabricStrategy"
            )
    shares, others = [Share(model) for model in models], []
    for optimizer in optimizers:
        owners = {owner.get(id(p)) for group in optimizer.param_groups for p in group["params"]}
        if owners == {None}:
            others.append(optimizer)
            continue
        if len(owners) > 1:
            raise ConfigurationError(
                f"prepare(): the {type(optimizer).__name__} has parameters of several models, or of one that is not "
                "prepared with it; make an optimizer for each, or prepare one nn.Module that has the models"
            )
        shares[owners.pop() or 0].optimizers.append(optimizer)
    return shares, others


def check_shares(shares: Sequence[Share], settings: Sequence[dict[str, Any]]) -> None:
    """Raise what any of several models is refused for, before the first one is wrapped. Collective."""
    if len(shares) > 1:
        for share, given in zip(shares, settings, strict=True):
            check_wrap(share.model, share.optimizers or None, **given)


def wrapped(share: Share, settings: dict[str, Any], names: Names) -> tuple[ShardedModule, list[ShardedOptimizer]]:
    """Wrap the model with its optimizers. Collective."""
    parameters = dict(share.model.named_parameters())
    given: Any = settings
    if share.optimizers:
        model, found = fsshard.wrap(share.model, share.optimizers, **given)
    else:
        model, found = fsshard.wrap(share.model, **given), []
    name_calls(model, SAVE, LOAD)
    names.remember(parameters, model)
    return model, found


def late(optimizer: Optimizer, models: Iterable[Any], names: Names) -> Late:
    """Find the model of an optimizer that comes after it, over parameters from before or after. Local.

    Raises:
        ConfigurationError: its parameters are no prepared model's, or several models'.
        OptimizerError: it has taken steps.
    """
    check_unstepped(optimizer)
    models = list(models)
    found = [[_find(p, models, names) for p in group["params"]] for group in optimizer.param_groups]
    owners = {id(each[0]): each[0] for group in found for each in group if each is not None}
    others = any(each is None for group in found for each in group)
    if len(owners) != 1 or others:
        raise ConfigurationError(
            f"prepare(): the {type(optimizer).__name__} has parameters of {len(owners)} prepared models"
            f"{' and others' if others else ''}; an optimizer takes those of one: prepare(model, optimizer)"
        )
    (model,) = owners.values()
    groups = [
        {**group, "params": [each[1] for each in members if each is not None]}
        for group, members in zip(optimizer.param_groups, found, strict=True)
    ]
    return Late(optimizer, model, groups)


def adopted(given: Late) -> ShardedOptimizer:
    """Build the optimizer that replaces one that comes after its model. Collective."""
    old = given.optimizer
    new = fsshard.build_optimizer(given.model, type(old), given.groups, **constructor_arguments(old))
    retire(old, new)
    return new


def _find(parameter: Tensor, models: Iterable[Any], names: Names) -> tuple[ShardedModule, str] | None:
    for model in models:
        if isinstance(model, ShardedModule):
            try:
                return model, model.find_entry(parameter).name
            except OptimizerError:
                continue
    return names.find(parameter)
