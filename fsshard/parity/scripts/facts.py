"""Reads off live models and optimizers what a record says of them besides their numbers.

Everything is by the user's names, whatever engine holds the model; nothing here is collective.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn

from fsshard.checkpoint.format.tensors_file import dtype_name
from fsshard.checkpoint.interop.foreign_names import clean_path
from fsshard.nested import tensors
from fsshard.parity.scripts.store import in_model
from fsshard.parity.trace import Texts, Values
from fsshard.parity.whole import prefix_of, user_names
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, groups_by_name
from fsshard.torch_private.fake_tensors import FakeTensor
from fsshard.torch_private.fsdp1 import FLAT_NAME

# Libraries whose optimizers only hand on what another one, which they hold, does.
ENGINES = ("fsshard.", "fairscale.", "torch.distributed.", "accelerate.", "lightning.", "pytorch_lightning.")
# Modules that are no layers: a loss or a metric may as well be computed outside of the model.
OUTSIDE = ("torch.nn.modules.loss", "torchmetrics", "torch.nn.modules.linear.Identity", "torch.nn.parallel")
# What names of a model's copies, such as averages of its weights, begin with.
COPY = "copy"
# Kind of fact -> name of a parameter or path of a module -> the fact.
Facts = dict[str, dict[str, str]]


def outermost(module: nn.Module) -> nn.Module:
    """Return the module whose own method is calling ``module``, as ``model.loss(x)`` does, or ``module`` itself."""
    module_of_call = module
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = _first_argument(frame)
        # By its type: a proxy's __class__ may run the user's code.
        is_module = issubclass(type(owner), nn.Module)
        if is_module and any(one is module_of_call for one in owner.modules()):
            module_of_call = owner
        frame = frame.f_back
    return module_of_call


def _first_argument(frame: FrameType) -> Any:
    """Return the first argument of the function that is running, which is ``self`` of a method."""
    code = frame.f_code
    if not code.co_argcount:
        return None
    name = code.co_varnames[0]
    return frame.f_locals.get(name)


def running_step() -> FrameType | None:
    """Return the frame in which an optimizer's step is running, the innermost one; None outside of steps."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("optim/optimizer.py"):
            return frame
        frame = frame.f_back
    return None


def is_below(frame: FrameType | None, below: FrameType | None) -> bool:
    """Return whether ``frame`` is running, and has called what has called ``below``."""
    while below is not None and below is not frame:
        below = below.f_back
    return frame is not None and below is frame


def simulated(values: Any) -> bool:
    """Return whether a tensor has no numbers: FLOPs and memory are counted on such before the training."""
    # Numbers and texts say nothing of whether tensors are simulated.
    return any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors(values))


def is_simulated(module: nn.Module) -> bool:
    """Return whether a model has no numbers; fsshard's shows parameters that are cut on the meta device."""
    if isinstance(module, ShardedModule):
        return False
    return simulated([*module.parameters()])


def groups_of(optimizer: Any) -> list[Values]:
    """Return what an optimizer's groups say, such as learning rates, and its class."""
    groups = []
    for group in getattr(optimizer, "param_groups", ()):
        settings = {"optimizer": class_of(optimizer), **group}
        settings.pop("params", None)
        settings.pop("param_names", None)
        groups.append(settings)
    return groups


def class_of(optimizer: Any) -> str:
    """Return the name of the class that computes, below what engines put around it."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.optimizer_class.__name__
    cls = type(optimizer)
    if cls.__module__.startswith(ENGINES):
        inner = getattr(optimizer, "optim", getattr(optimizer, "optimizer", None))
        if hasattr(inner, "param_groups"):
            return class_of(inner)
    return cls.__name__


def members_of(optimizer: Any, names: Mapping[int, str]) -> list[list[str]]:
    """Return names of the parameters of each group; no groups if a parameter has no name."""
    if isinstance(optimizer, ShardedOptimizer):
        return [group["params"] for group in groups_by_name(optimizer)]
    groups = []
    for group in getattr(optimizer, "param_groups", ()):
        members = [names.get(id(parameter), "") for parameter in group["params"]]
        if not all(members):
            return []
        groups.append(members)
    return groups


def names_of(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all models' parameters by the user's names, but flat ones, which have none."""
    for place, model in enumerate(models):
        for name, parameter in user_names(model, prefix_of(model)):
            if not name.endswith(FLAT_NAME):
                yield in_model(place, name), parameter


def names_by_id(models: Sequence[nn.Module]) -> dict[int, str]:
    """Return the user's name of each parameter by its id."""
    return {id(parameter): name for name, parameter in names_of(models)}


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    """Yield what an optimizer steps."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def trained_of(models: Sequence[nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield of each parameter by its name whether it is trained or frozen."""
    for name, parameter in names_of(models):
        yield name, _trained(parameter)
    for place, model in enumerate(models):
        if isinstance(model, ShardedModule):
            for name, parameter in model.named_parameters():
                yield in_model(place, name), _trained(parameter)


def _trained(parameter: Tensor) -> str:
    return "trained" if parameter.requires_grad else "frozen"


class OnlyInOptimizer(nn.Module):
    """Stands for the module that parameters of an optimizer are in which no recorded model has."""

    def __init__(self, optimizer: Any, known: set[int]) -> None:
        super().__init__()
        for number, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    self._parameters[f"parameter {k} of group {number}"] = parameter


def modules_of(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield all models' modules by their paths; of an engine's wrapper and what it wraps the last one, as a dict does.

    The path of the model itself is empty.
    """
    for place, model in enumerate(models):
        prefix = prefix_of(model)
        for name, module in model.named_modules():
            own = f"{name}.".removeprefix(prefix)
            path = clean_path(own.removesuffix("."))
            yield in_model(place, path).removesuffix("."), module


def layers_of(modules: Mapping[str, nn.Module]) -> Texts:
    """Return by its path how each module without children prints: torch's with their settings, others by class."""
    layers = {}
    for path, module in modules.items():
        cls = type(module)
        kind = f"{cls.__module__}.{cls.__name__}"
        if [*module.children()]:
            continue
        if kind.startswith(OUTSIDE):
            continue
        settings = ""
        if kind.startswith("torch.nn.") and "Parameter" not in kind:
            settings = repr(module).removeprefix(cls.__name__)
        layers[path] = own_class(module) + (settings or "()")
    return layers


def own_class(module: nn.Module) -> str:
    """Return the name of the user's class; FSDP2 makes one called ``FSDP...`` of it (torch 2.13)."""
    classes = type(module).__mro__
    cls = classes[0]
    if classes[1].__name__ == "FSDPModule":
        cls = classes[2]
    return cls.__name__


def mode_of(module: nn.Module) -> str:
    """Return whether a module is in training mode."""
    return "training" if module.training else "evaluation"


def dtype_of(output: Any) -> str:
    """Return the dtype of the first tensor in a module's output; "" without one."""
    for tensor in tensors(output):
        return dtype_name(tensor.dtype)
    return ""
