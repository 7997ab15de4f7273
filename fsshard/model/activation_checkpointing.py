"""Activation checkpointing with one rule for all backends: exactly the matched block is recomputed.

:func:`fsshard.plan` says which blocks; here their forwards are replaced, before any engine takes the model. A unit
is then the block with its checkpoint inside: what torch recommends for FSDP, and the only order in which one gather
serves the whole recomputation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from fsshard.complex_params.slots import ModuleTable
from fsshard.errors import ConfigurationError
from fsshard.model.activation_offload import OffloadedForward
from fsshard.model.host_copies import HOST
from fsshard.model.recomputation import RecomputedForward, adopt_fairscale
from fsshard.planning.arguments import Recomputed, WrapPolicy
from fsshard.planning.plan import Plan, is_offloading, plan_table, shaped_slots
from fsshard.planning.policies import Checkpointing, resolve_checkpointing
from fsshard.torch_private.modules import Dropout

log = logging.getLogger("fsshard")


def checkpoint_blocks(
    model: nn.Module,
    choice: Recomputed,
    *,
    auto_wrap_policy: WrapPolicy = "auto",
    preserve_rng_state: bool = True,
) -> list[str]:
    """Recompute the activations of chosen blocks in the backward pass of a bare model, or keep them in host memory.

    What ``fsshard.wrap(model, activation_checkpointing=choice)`` does, for a model that gets no engine.

    Args:
        model: changed in place: the ``forward`` of the blocks, nothing else.
        choice: as ``activation_checkpointing`` of :func:`fsshard.plan`.
        auto_wrap_policy: what the plan's units are, as for :func:`fsshard.plan`.
        preserve_rng_state: recompute dropout with the random numbers of the forward.

    Returns:
        Names of the blocks.

    Raises:
        ConfigurationError: nothing was matched.
    """
    asked = resolve_checkpointing(choice)
    if not isinstance(choice, Checkpointing):
        asked = Checkpointing(policy=choice, preserve_rng_state=preserve_rng_state)
    table = ModuleTable(model)
    planned = plan_table(table, shaped_slots(table), auto_wrap_policy, None, asked)
    apply_checkpointing(table, planned, asked)
    return [*planned.recomputed, *planned.offloaded]


def check_checkpointing(checkpointing: Checkpointing, device: torch.device) -> None:
    """Raise for what cannot be honoured on ``device``."""
    if checkpointing.offload_to_cpu and checkpointing.policy and device.type == HOST.get():
        raise ConfigurationError(
            "Checkpointing(offload_to_cpu=True) on a CPU device: activations are in host memory already; leave it off"
        )


def apply_checkpointing(table: ModuleTable, planned: Plan, checkpointing: Checkpointing) -> None:
    """Replace the forwards of the blocks that the plan names; before sharding."""
    modules = table.by_public_name()
    for name, module in modules.items():
        adopt_fairscale(module, name)
    blocks = [modules[name] for name in planned.recomputed]
    for name in (*planned.recomputed, *planned.offloaded):
        block = modules[name]
        kind = RecomputedForward if name in planned.recomputed else OffloadedForward
        block.forward = kind(
            block,
            block.__dict__.get("forward"),
            checkpointing.offload_to_cpu,
            checkpointing.preserve_rng_state,
            name,
        )
    if planned.recomputed or not all(map(is_offloading, planned.recomputed_before.values())):
        _turn_caches_off(table.modules.values())
    if not checkpointing.preserve_rng_state:
        _warn_of_dropout(blocks)


def _turn_caches_off(modules: Iterable[nn.Module]) -> None:
    """Set ``use_cache`` of the modules' configs to False, and say so."""
    # A recomputation would add the keys and values of a forward once more. transformers 5.23 under torch 2.13: T5
    # raises CheckpointError (56 tensors saved, 52 recomputed), GPT-2's cache holds everything twice.
    found = [getattr(module, "config", None) for module in modules]
    configs = {id(config): config for config in found if getattr(config, "use_cache", None) is True}
    for config in configs.values():
        config.use_cache = False  # type: ignore[union-attr]
    if configs and not (dist.is_initialized() and dist.get_rank()):
        log.warning("use_cache=False is set in the model's config: blocks that are recomputed cannot fill a cache")


def _warn_of_dropout(blocks: Iterable[nn.Module]) -> None:
    found = set()
    for block in blocks:
        found.update([type(module).__name__ for module in block.modules() if _drops(module)])
    if found:
        log.warning(
            "Checkpointing(preserve_rng_state=False): %s in recomputed blocks will drop different elements in the "
            "backward pass than in the forward, so gradients will be wrong",
            ", ".join(sorted(found)),
        )


def _drops(module: nn.Module) -> bool:
    rate = getattr(module, "p" if isinstance(module, Dropout) else "dropout", 0.0)
    return isinstance(rate, float) and rate > 0
