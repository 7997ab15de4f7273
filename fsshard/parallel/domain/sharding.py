"""shard_domain(): changes the layers of an operator in place, so that every rank needs a slab of the field."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from fsshard.comm.agreement import agree
from fsshard.errors import ConfigurationError, ModelError
from fsshard.parallel.domain.accepted import check_operator, order_of, replacements
from fsshard.parallel.domain.domain import Domain
from fsshard.parallel.domain.entering import Entrance, Exit, guard_losses
from fsshard.parallel.domain.exchange import Axis
from fsshard.parallel.domain.modes import check_sliceable, shared_parameters, slice_weights
from fsshard.parallel.meshes import shape_text


def shard_domain(
    model: nn.Module,
    mesh: Any,
    *,
    weights: str = "whole",
    pointwise: Sequence[Any] = (),
    timeout: float | None = None,
) -> Domain:
    """Split the field that an operator works on among ranks, exactly. Call it before :func:`fsshard.wrap`. Collective.

    Afterwards the model takes this rank's slab (batch, channels, d1 / ranks, d2, ...) and returns that of the output.
    Parameters, their names, dtypes and the state dict stay what they were, whole on every rank; ``wrap`` over all ranks
    (data x domain) shards them, and averages gradients rightly. Ranks of one domain need the same samples:
    :func:`fsshard.data_rank` of the whole mesh tells which. Dropout draws another mask for each slab.

    Args:
        model: neuraloperator's ``FNO``, ``TFNO``, ``FNOBlocks`` or ``SpectralConv``, or a ``Sequential`` of such and
            pointwise layers; of two spatial dimensions or more. It is changed in place. One that comes out of
            ``torch.save`` split is given its ranks again.
        mesh: a slice of a ``DeviceMesh``: of one dimension, along which d1 is split, or of two, for d1 and d2 (in three
            dimensions and more).
        weights: ``"whole"``: what a rank has of them is up to ``wrap``, over all ranks. ``"modes"``, for dense ones: a
            rank keeps the modes that it multiplies, as DTensors; then ``wrap(model, backend="fsdp2",
            device_mesh=mesh["data"], replicated=domain.replicated)``.
        pointwise: classes of modules, and functions, that treat every point by itself.
        timeout: seconds that a rank waits in a forward, or a loss of the domain, for one that is alive and does
            something else, such as writing a file; None: as long as the process group does. Where ranks wait for each
            other in other collectives, the forward raises within fifteen seconds whatever it is.

    Returns:
        The domain: ``scatter``, ``gather``, losses.

    Raises:
        ModelError: a module is not known to be right on slabs, or the model is split already. Nothing was changed.
        ConfigurationError: the mesh is none, or has too many dimensions.
        MissingExtra: neuraloperator is not installed.
    """
    groups = _groups(mesh)
    if weights not in ("whole", "modes"):
        raise ConfigurationError(f"shard_domain(weights={weights!r}): expected 'whole' or 'modes'")
    if timeout is not None and not timeout > 0:
        raise ConfigurationError(f"shard_domain(timeout={timeout!r}): expected seconds above 0, or None")
    first: Any = None

    def check() -> tuple[int, Domain | None]:
        before = domain_of(model.modules())
        if before is None:
            check_operator(model, len(groups), tuple(pointwise))
            if weights == "modes":
                check_sliceable(model, mesh)
        elif before.attached:
            raise ModelError("shard_domain: the model is split already")
        elif len(before.axes) != len(groups):
            raise ConfigurationError(
                f"shard_domain: the model was split along {len(before.axes)} dimensions, and the mesh has {len(groups)}"
            )
        return order_of(model), before

    for group in groups:
        first = agree(group, check)
    order, before = first
    axes = [Axis(dim, group, mesh.device_type, timeout) for dim, group in enumerate(groups)]
    if before is not None:
        found: Domain = before
        found.axes = tuple(axes)
        guard_losses(found)
        return found
    domain = Domain(axes, order)
    guard_losses(domain)
    _replace(model, domain)
    if weights == "modes":
        slice_weights(model, mesh)
        domain.replicated = shared_parameters(model, mesh)
    model.register_forward_pre_hook(Entrance(domain), with_kwargs=True)
    model.register_forward_hook(Exit(domain))
    return domain


def _groups(mesh: Any) -> list[dist.ProcessGroup]:
    if not hasattr(mesh, "get_group") or getattr(mesh, "ndim", 0) not in (1, 2):
        told = shape_text(mesh) if hasattr(mesh, "get_group") else repr(mesh)
        raise ConfigurationError(
            f"shard_domain(mesh={told}): expected a slice of a DeviceMesh of one or two dimensions, such as "
            "mesh['domain'] or mesh['dx', 'dy']"
        )
    if mesh.get_coordinate() is None:
        raise ConfigurationError(f"shard_domain: rank {dist.get_rank()} is not in {shape_text(mesh)}")
    return list(map(mesh.get_group, range(mesh.ndim)))


def domain_of(modules: Iterable[nn.Module]) -> Domain | None:
    """Return the domain that a model with these modules is split over; None if it is whole."""
    for module in modules:
        domain = module.__dict__.get("domain")
        if isinstance(domain, Domain):
            return domain
    return None


def _replace(model: nn.Module, domain: Domain) -> None:
    """Give modules the classes that compute the same of slabs. Nothing of theirs is copied, or renamed."""
    kinds = replacements()
    for name, module in model.named_modules():
        if type(module) in kinds:
            module.__class__ = kinds[type(module)]
            module.__dict__.update(domain=domain, domain_name=name)
