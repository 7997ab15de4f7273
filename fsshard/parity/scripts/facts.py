"""Reads off live models and optimizers what a record says of them besides their numbers.

Everything is by the user's names, whatever engine holds the model; nothing here is collective.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn

from fsshard.checkpoint.interop.foreign_names import clean_path
from fsshard.nested import leaves
from fsshard.parity.scripts.store import in_model
from fsshard.parity.whole import prefix_of, user_names
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, groups_by_name
from fsshard.torch_private.fake_tensors import FakeTensor
from fsshard.torch_private.fsdp1 import FLAT_NAME

ENGINES = ("fsshard.", "fairscale.", "torch.distributed.", "accelerate.", "lightning.", "pytorch_lightning.")
"""Libraries whose optimizers only hand on what another one, which they hold, does."""
OUTSIDE = ("torch.nn.modules.loss", "torchmetrics", "torch.nn.modules.linear.Identity", "torch.nn.parallel")
"""Modules that are no layers: a loss or a metric may as well be computed outside of the model."""
COPY = "copy"
"""What names of a model's copies, such as averages of its weights, begin with."""
Facts = dict[str, dict[str, str]]
"""Kind of fact -> name of a parameter or path of a module -> the fact."""


def outermost(module: nn.Module) -> nn.Module:
    """Return the module whose own method is calling ``module``, as ``model.loss(x)`` does, or ``module`` itself."""
    found = module
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        owner: Any = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        # By its type: a proxy's __class__ may run the user's code.
        if issubclass(type(owner), nn.Module) and any(one is found for one in owner.modules()):
            found = owner
        frame = frame.f_back
    return found


def running_step() -> FrameType | None:
    """Return the frame in which an optimizer's step is running, the innermost one; None outside of steps."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith("optim/optimizer.py"):
        frame = frame.f_back
    return frame


def is_below(frame: FrameType | None, below: FrameType | None) -> bool:
    """Return whether ``frame`` is running, and has called what has called ``below``."""
    while below is not None and below is not frame:
        below = below.f_back
    return frame is not None and below is frame


def simulated(*given: Any) -> bool:
    """Return whether a tensor has no numbers: FLOPs and memory are counted on such before the training."""
    return any(one.is_meta or isinstance(one, FakeTensor) for one in leaves(given) if isinstance(one, Tensor))


def is_simulated(module: nn.Module) -> bool:
    """Return whether a model has no numbers; fsshard's shows parameters that are cut on the meta device."""
    return not isinstance(module, ShardedModule) and simulated([*module.parameters()])


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return what an optimizer's groups say, such as learning rates, and its class."""
    groups = [{"optimizer": class_of(optimizer)} for _ in getattr(optimizer, "param_groups", ())]
    for told, group in zip(groups, getattr(optimizer, "param_groups", ()), strict=True):
        told |= {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return groups


def class_of(optimizer: Any) -> str:
    """Return the name of the class that computes, below what engines put around it."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.optimizer_class.__name__
    within = getattr(optimizer, "optim", getattr(optimizer, "optimizer", None))
    if type(optimizer).__module__.startswith(ENGINES) and hasattr(within, "param_groups"):
        return class_of(within)
    return type(optimizer).__name__


def members_of(optimizer: Any, names: Mapping[int, str]) -> list[list[str]]:
    """Return names of the parameters of each group; no groups if a parameter has no name."""
    if isinstance(optimizer, ShardedOptimizer):
        return [group["params"] for group in groups_by_name(optimizer)]
    groups = [[names.get(id(one), "") for one in group["params"]] for group in getattr(optimizer, "param_groups", ())]
    return groups if all(map(all, groups)) else []


def names_of(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all models' parameters by the user's names, but flat ones, which have none."""
    for place, model in enumerate(models):
        for name, parameter in user_names(model, prefix_of(model)):
            if not name.endswith(FLAT_NAME):
                yield in_model(place, name), parameter


def trained_of(models: Sequence[nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield of each parameter by its name whether it is trained or frozen."""
    for place, model in enumerate(models):
        own = model.named_parameters() if isinstance(model, ShardedModule) else ()
        for name, parameter in own:
            yield in_model(place, name), "trained" if parameter.requires_grad else "frozen"
    for name, parameter in names_of(models):
        yield name, "trained" if parameter.requires_grad else "frozen"


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
            path = clean_path(f"{name}.".removeprefix(prefix).removesuffix("."))
            yield in_model(place, path).removesuffix("."), module


def layers_of(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return by its path how each module without children prints: torch's with their settings, others by class."""
    found = {}
    for path, module in modules.items():
        kind = f"{type(module).__module__}.{type(module).__name__}"
        if next(module.children(), None) is None and not kind.startswith(OUTSIDE):
            shown = repr(module) if kind.startswith("torch.nn.") and "Parameter" not in kind else ""
            found[path] = own_class(module) + (shown.removeprefix(type(module).__name__) or "()")
    return found


def own_class(module: nn.Module) -> str:
    """Return the name of the user's class; FSDP2 makes one called ``FSDP...`` of it (torch 2.13)."""
    cls = type(module)
    return cls.__mro__[2].__name__ if cls.__mro__[1].__name__ == "FSDPModule" else cls.__name__


def copies_of(models: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights and buffers of all that is as large as a model and is none, such as averages of its weights.

    That are modules, and lists and dicts of tensors.
    """
    own = {id(one) for model in models for one in model.modules()}
    held = {id(parameter) for model in models for parameter in model.parameters()}
    held |= {id(parameter.grad) for _, parameter in names_of(models)}
    shapes = [_shapes(model.parameters()) for model in models]
    if not next(_alike(shapes, own, held), None):
        return
    gc.collect()  # what a script has dropped is no copy that it keeps
    numbers: Counter[str] = Counter()
    for one, named in [*_alike(shapes, own, held)]:
        if id(one) in own:
            continue
        if isinstance(one, nn.Module):
            own.update(map(id, one.modules()))  # an average's own module is no further copy
            named |= dict(one.named_buffers())
        kind = type(one).__name__
        numbers[kind] += 1
        for name, value in named.items():
            yield f"{COPY} {numbers[kind]} of the weights in a {kind}, {name}", value.detach()


def _alike(shapes: list[Any], own: set[int], held: set[int]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield objects with their tensors, if those have the shapes of a model's parameters and are others."""
    kinds: set[Any] = {dict, list, *_subclasses(nn.Module)}
    # Most of a process's objects are dicts and lists, and few of those hold tensors.
    objects: list[Any] = [each for each in gc.get_objects() if type(each) in kinds]
    for one in objects:
        if type(one) is dict:
            named = one if one and type(next(iter(one.values()))) is Tensor else {}
        elif type(one) is list:
            named = dict(enumerate(one)) if one and type(one[0]) is Tensor else {}
        else:
            named = dict(one.named_parameters()) if id(one) not in own else {}
        if not named or not all(isinstance(value, Tensor) for value in named.values()) or simulated(named):
            continue
        others = all(type(value) in (Tensor, nn.Parameter) and id(value) not in held for value in named.values())
        if others and _shapes(named.values()) in shapes and (len(named) > 1 or type(one) not in (dict, list)):
            yield one, {str(name): value for name, value in named.items()}


def _subclasses(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = type.__subclasses__(kind)
    for one in below:
        yield from _subclasses(one)


def _shapes(tensors: Iterable[Tensor]) -> list[Any]:
    return [(one.shape, one.dtype) for one in tensors]


def mode_of(module: nn.Module) -> str:
    """Return whether a module is in training mode."""
    return "training" if module.training else "evaluation"


def dtype_of(output: Any) -> str:
    """Return the dtype of the first tensor in a module's output; "" without one."""
    tensors = (leaf for leaf in leaves(output) if isinstance(leaf, Tensor))
    return next((str(one.dtype).removeprefix("torch.") for one in tensors), "")
