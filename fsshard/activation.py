"""Activation checkpointing before sharding: one rule for all backends, the matched block itself."""

from __future__ import annotations

import functools
from collections.abc import Collection

from torch import nn

from fsshard.errors import ConfigurationError
from fsshard.plan import plan

__all__ = ["checkpoint_blocks"]


def checkpoint_blocks(
    model: nn.Module, choice: object, *, auto_wrap_policy: object = "auto", preserve_rng_state: bool = True
) -> list[str]:
    """Recompute the activations of chosen blocks in the backward pass. Call it before :func:`fsshard.wrap`.

    Args:
        model: changed in place; names of parameters stay as they are in state dicts.
        choice: True (the plan's own units), module classes, or a predicate on modules; None and False choose nothing.
        auto_wrap_policy: what the plan's units are, as for :func:`fsshard.plan`.
        preserve_rng_state: recompute dropout with the random numbers of the forward.

    Returns:
        Names of the blocks that are recomputed.

    Raises:
        ConfigurationError: nothing was matched.
    """
    # Not public in torch 2.13, and the only wrapper whose prefix torch's own state dicts take out again.
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    if choice is None or choice is False:
        return []
    blocks = _blocks(model, choice, auto_wrap_policy)
    if not blocks:
        raise ConfigurationError(
            f"activation_checkpointing={choice!r} matches no block of this model; name the classes of the blocks to "
            "recompute, for example {torch.nn.TransformerEncoderLayer}"
        )
    wrapper = functools.partial(
        checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=preserve_rng_state
    )
    chosen = set(blocks.values())
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: module in chosen)
    return list(blocks)


def _blocks(model: nn.Module, choice: object, auto_wrap_policy: object) -> dict[str, nn.Module]:
    named = {name: module for name, module in model.named_modules() if name}
    if choice is True:
        return {
            name: named[name] for name in plan(model, auto_wrap_policy=auto_wrap_policy).unit_names if name in named
        }
    if isinstance(choice, type):
        choice = {choice}
    if isinstance(choice, Collection) and not isinstance(choice, str):
        classes: tuple[type[nn.Module], ...] = tuple(item for item in choice if isinstance(item, type))
        if len(classes) == len(choice):
            return {name: module for name, module in named.items() if isinstance(module, classes)}
    elif callable(choice):
        return {name: module for name, module in named.items() if choice(module)}
    raise ConfigurationError(f"activation_checkpointing={choice!r}: expected True, module classes or a predicate")
