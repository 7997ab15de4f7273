"""Match optimizers with the models that prepare() is given, and with those that it was given before."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.errors import ConfigurationError, OptimizerError
from fsshard.sharded.controller import controller_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, check_unstepped, name_groups

from ..trainers import State, by_name, by_number, split_over

# A model and its optimizers, which go into one call of fsshard.wrap.
Share = tuple[nn.Module, list[Optimizer]]
# Former parameters of wrapped models -> model and name: an optimizer that was made before may come later.
Former = MutableMapping[Tensor, tuple["weakref.ref[ShardedModule]", str]]


class PreparedOptimizer(AcceleratedOptimizer):
    """Accelerate's, whose steps wait for gradients, over one of :func:`fsshard.wrap`.

    Attributes:
        held: its state while files are written, so that writing needs no other rank; None at other times.

    Raises:
        ConfigurationError: its class has methods that switch whole weights, of which a rank may have parts.
    """

    def __init__(self, optimizer: ShardedOptimizer, scaler: Any) -> None:
        kind = optimizer.optimizer_class
        # Optimizers without a schedule have train() and eval().
        if callable(getattr(kind, "train", None)):
            raise ConfigurationError(
                f"{kind.__name__}.train() swaps whole weights, which belong to the engine; use an optimizer without it"
            )
        # Placing would send its state once around.
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self.held: State | None = None

    def state_dict(self) -> State:
        """Return a torch optimizer's state, with whole tensors and a number for each parameter. Collective."""
        if self.held is None:
            return by_number(self.optimizer)
        return self.held

    def load_state_dict(self, state_dict: Any) -> None:
        """Take a torch optimizer's, or one by name. Collective.

        Raises:
            StateDictError: groups of other sizes, or state of another shape; nothing has changed.
        """
        self.optimizer.load_state_dict(by_name(state_dict, self.optimizer))


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
    shares: list[Share] = [(model, []) for model in models]
    others = []
    for optimizer in optimizers:
        owners = set()
        for group in optimizer.param_groups:
            owners.update([owner.get(id(parameter)) for parameter in group["params"]])
        if owners == {None}:
            others.append(optimizer)
            continue
        if len(owners) > 1:
            raise ConfigurationError(
                f"prepare(): the {type(optimizer).__name__} has parameters of several models, or of one that is not "
                "prepared with it; make an optimizer for each, or prepare one nn.Module that has the models"
            )
        shares[owners.pop() or 0][1].append(optimizer)
    return shares, others


def late(optimizer: Optimizer, models: Iterable[Any], former: Former) -> tuple[Optimizer, ShardedModule, list[State]]:
    """Find the model of an optimizer that comes after it, over parameters from before or after. Local.

    Returns:
        The optimizer, the model, and the optimizer's groups with names in place of parameters.

    Raises:
        ConfigurationError: its parameters are no prepared model's, or several models'.
        OptimizerError: it has taken steps.
    """
    check_unstepped(optimizer)
    models = [model for model in models if isinstance(model, ShardedModule)]
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found[id(parameter)] = _find(parameter, models, former)
    owners = {id(each[0]): each[0] for each in found.values() if each is not None}
    others = " and others" if None in found.values() else ""
    if len(owners) != 1 or others:
        raise ConfigurationError(
            f"prepare(): the {type(optimizer).__name__} has parameters of {len(owners)} prepared models{others}; an "
            "optimizer takes the parameters of one: prepare(model, optimizer)"
        )
    (model,) = owners.values()
    return optimizer, model, name_groups(optimizer, {key: each[1] for key, each in found.items() if each is not None})


def _find(parameter: Tensor, models: Iterable[ShardedModule], former: Former) -> tuple[ShardedModule, str] | None:
    for model in models:
        try:
            return model, controller_of(model).find_entry(parameter).name
        except OptimizerError:
            continue
    reference, name = former.get(parameter, (None, ""))
    found = None if reference is None else reference()
    if found is None:
        return None
    return (found, name)
