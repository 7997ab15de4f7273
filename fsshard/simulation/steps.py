"""A few training steps of a recipe under one backend, watched by a tracker: on fake tensors or on real ranks alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsshard.backends.whole import owned
from fsshard.parity.recipe import Recipe, check_loss
from fsshard.planning.plan import Plan
from fsshard.sharded.buffers import buffers_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, build_optimizer
from fsshard.simulation.tracking import Tracker, Usage
from fsshard.torch_private.tensors import LOCAL_TENSOR
from fsshard.wrapping import wrap

__all__ = ["STEPS", "Measured", "Trained", "make_state", "run_steps", "under_backend"]

STEPS = 2
"""The optimizer makes its state in the first step, so the second one is as all that follow; one step is enough after
:func:`make_state`."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One rank's training step.

    Attributes:
        rank: which.
        usage: of the step with the highest peak; its collectives are the last step's.
        state_ratio: bytes of optimizer state per byte of parameter, counters left out.
        in_flight: payloads of the last step's reductions, largest first, where gradients are sent in buffers of their
            own that go when they have arrived; else empty.
        plan: what was executed.
        comm_groups: unit -> the parameters that were sent with it.
        optimizer: the optimizer and its settings, as text.
    """

    rank: int
    usage: Usage
    state_ratio: float
    in_flight: tuple[int, ...]
    plan: Plan
    comm_groups: Mapping[str, tuple[str, ...]]
    optimizer: str


@dataclass(frozen=True)
class Trained:
    """The objects that a step trains.

    Attributes:
        recipe: the training.
        model: under its backend.
        optimizer: over it.
    """

    recipe: Recipe
    model: ShardedModule
    optimizer: ShardedOptimizer


def under_backend(recipe: Recipe, module: nn.Module, settings: Mapping[str, Any], *, fake: bool) -> Trained:
    """The model under its backend, with its optimizer. Collective."""
    given = {"mixed_precision": recipe.precision, "activation_checkpointing": recipe.activation_checkpointing}
    model = wrap(module, **{**given, **recipe.settings, **settings})
    groups = None if recipe.param_groups is None else recipe.param_groups(list(model.backend.entries))
    optimizer = build_optimizer(model, recipe.optimizer, groups, **recipe.hyper)
    model.scaled = True  # a loss scale adds a few numbers, and reads from memory whether a step is taken: left out
    if fake:
        model.simulate()
    return Trained(recipe, model, optimizer)


def make_state(trained: Trained, tracker: Tracker) -> None:
    """Be as after a step: let the optimizer make its state, by a step on gradients of zeros.

    Collective, and within ``tracker``.
    """
    backend, inner = trained.model.backend, trained.optimizer.inner
    trainable = [entry for entry in backend.entries.values() if entry.parameter.requires_grad and owned(backend, entry)]
    entries = [entry for entry in trainable if entry.parameter.numel()]  # FSDP1 gives an empty part no gradient
    for entry in entries:
        entry.parameter.grad = torch.zeros_like(entry.parameter, requires_grad=False)
    inner.step()
    for entry in entries:
        entry.parameter.grad = None
    tracker.mark([list(state.values()) for state in trained.optimizer.state.values()], "optimizer state")
    buffers_of(trained.model).differ = True  # so that the forward sends them


def run_steps(
    trained: Trained,
    tracker: Tracker,
    batch: Callable[[int], Any],
    rank: int,
    *,
    steps: int = STEPS,
    offloaded: bool = False,
) -> Measured:
    """Train ``steps`` steps within ``tracker``. Collective.

    Args:
        trained: from :func:`under_backend`, made within the tracker.
        tracker: entered already.
        batch: number of a batch -> the batch, where the model is.
        rank: of this process.
        steps: how many.
        offloaded: count the device's memory under CPU offload.
    """
    recipe, model, optimizer = trained.recipe, trained.model, trained.optimizer
    tracker.watch(model.module)
    seen: list[Usage] = []
    for step in range(steps):
        batches = [batch(step * recipe.accumulate + number) for number in range(recipe.accumulate)]
        tracker.mark(batches, "inputs")
        tracker.reset()
        _one_step(trained, batches)
        seen.append(tracker.usage(offloaded=offloaded))
    highest = max(reversed(seen), key=lambda usage: usage.peak)
    backend = model.backend
    copied = backend.facts.divides == "owners" or (
        model.plan.precision.reduce_dtype is not None and backend.facts.divides != "elements"
    )
    reduced = (c.nbytes for c in tracker.collectives() if copied and c.kind in ("reduce", "all_reduce"))
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return Measured(
        rank=rank,
        usage=Usage(**{**vars(highest), "traffic": seen[-1].traffic}),
        state_ratio=_state_ratio(optimizer),
        in_flight=tuple(sorted(reduced, reverse=True)),
        plan=model.plan,
        comm_groups=backend.groups,
        optimizer=_optimizer_text(recipe.optimizer, groups),
    )


def _one_step(trained: Trained, batches: list[Any]) -> None:
    recipe, model = trained.recipe, trained.model
    for number, parts in enumerate(batches):
        silent = recipe.no_sync and number + 1 < len(batches)
        with model.no_sync() if silent else contextlib.nullcontext():
            with model.autocast():
                loss = check_loss(recipe.loss(model, parts)) / len(batches)
            loss.backward()
        del loss
    if recipe.clipping is not None:
        model.clip_grad_norm_(*recipe.clipping)
    trained.optimizer.step()
    model.zero_grad()


def _state_ratio(optimizer: ShardedOptimizer) -> float:
    held = state = 0
    for parameter, values in optimizer.state.items():
        local: Any = getattr(parameter, LOCAL_TENSOR, parameter)
        held += local.numel() * local.element_size()
        tensors = [value for value in values.values() if isinstance(value, torch.Tensor) and value.dim()]
        state += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return state / held if held else 0.0


def _optimizer_text(optimizer: type[torch.optim.Optimizer], groups: list[dict[str, Any]]) -> str:
    chosen = {key: groups[0].get(key) for key in ("foreach", "fused", "capturable") if groups and groups[0].get(key)}
    return f"{optimizer.__name__}({', '.join(f'{key}={value}' for key, value in chosen.items())})"
