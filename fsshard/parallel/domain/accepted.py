"""List the modules that a split operator may consist of.

A module that is not known here might read its neighbours' points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsshard.errors import MissingExtra, ModelError

POINTWISE_MODULES = (
    *(nn.Identity, nn.Dropout, nn.GELU, nn.ReLU, nn.ReLU6, nn.LeakyReLU),
    *(nn.ELU, nn.CELU, nn.SELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign),
    *(nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid),
)
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
POINTWISE_FUNCTIONS = (
    *(F.gelu, F.relu, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.silu, F.mish),
    *(F.tanh, F.sigmoid, F.softplus, F.softsign),
    *(F.hardtanh, F.hardswish, F.hardsigmoid, F.logsigmoid),
    *(torch.relu, torch.tanh, torch.sigmoid),
    *(torch.sin, torch.cos, torch.selu, torch.celu),
)


def replacements() -> dict[type, type]:
    """neuraloperator's layer -> the one that computes the same of slabs.

    Raises:
        MissingExtra: neuraloperator is not installed.
    """
    try:
        from neuralop.layers import embeddings, normalization_layers, padding, spectral_convolution
    except ImportError as error:
        raise MissingExtra("neuraloperator", "neuralop", "fsshard.parallel.shard_domain") from error
    from fsshard.parallel.domain import layers
    from fsshard.parallel.domain.spectral_convolution import DomainSpectralConv

    return {
        spectral_convolution.SpectralConv: DomainSpectralConv,
        embeddings.GridEmbeddingND: layers.DomainGridEmbeddingND,
        embeddings.GridEmbedding2D: layers.DomainGridEmbedding2D,
        padding.DomainPadding: layers.DomainPaddingOfSlabs,
        normalization_layers.InstanceNorm: layers.DomainInstanceNorm,
        normalization_layers.AdaIN: layers.DomainAdaIN,
        nn.GroupNorm: layers.DomainGroupNorm,
    }


def _known() -> tuple[type, ...]:
    from neuralop.layers import channel_mlp, complex, fno_block, skip_connections
    from neuralop.models import fno

    models = (fno.FNO, fno.TFNO, fno_block.FNOBlocks)
    skips = (skip_connections.SoftGating, skip_connections.Flattened1dConv)
    return (*models, *skips, channel_mlp.ChannelMLP, complex.ComplexValued, *CONTAINERS, *POINTWISE_MODULES)


def _on_no_field(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that see no field: factors of weights, and what makes scales of an embedding."""
    from neuralop.layers.normalization_layers import AdaIN
    from tltorch.factorized_tensors.core import FactorizedTensor

    for module in model.modules():
        if isinstance(module, FactorizedTensor):
            yield from module.modules()
        elif isinstance(module, AdaIN):
            yield from module.mlp.modules()


def order_of(model: nn.Module) -> int:
    """Return how many spatial dimensions the operator has.

    Raises:
        ModelError: it has no spectral convolution, or they differ.
    """
    from neuralop.layers.spectral_convolution import SpectralConv

    orders = {module.order for module in model.modules() if isinstance(module, SpectralConv)}
    if len(orders) == 1:
        return int(orders.pop())
    reason = "spectral convolutions in several numbers of dimensions" if orders else "no spectral convolution"
    raise ModelError(f"shard_domain splits neuraloperator's FNO and TFNO; {type(model).__name__} has {reason}")


def check_operator(model: nn.Module, split: int, pointwise: Sequence[Any]) -> None:
    """Raise unless the model computes, of slabs, what it computes of the whole.

    Args:
        model: not changed.
        split: how many of its spatial dimensions are to be split.
        pointwise: modules' classes and functions that the caller says treat every point by itself.

    Raises:
        ModelError: names the first module that is not known to.
    """
    from neuralop.layers import complex

    classes = [kind for kind in pointwise if isinstance(kind, type)]
    accepted = (*_known(), *replacements(), *classes)
    functions = (*POINTWISE_FUNCTIONS, *pointwise, complex.CGELU, complex.ctanh)
    left_out = set(map(id, _on_no_field(model)))
    for name, module in model.named_modules():
        if id(module) in left_out:
            continue
        if type(module) in CONVOLUTIONS:
            _check_convolution(name, module)
        elif type(module) not in accepted:
            _refuse(
                name,
                module,
                "is not known to treat every point by itself; if it does, pass pointwise=(its class,), and if it only "
                "contains an operator, split that (docs/domain.md lists what is taken)",
            )
        _check_settings(name, module, functions)
    order = order_of(model)
    if order <= split:
        raise ModelError(
            f"the operator has {order} spatial dimension(s), of which {split} cannot be split: the last one has to be "
            "whole on each rank, since its transform is that of real numbers"
        )


def _refuse(name: str, module: nn.Module, why: str) -> None:
    raise ModelError(
        f"shard_domain: module {name or '(the model)'!r}, {type(module).__name__}, {why}; nothing was changed"
    )


def _check_convolution(name: str, module: Any) -> None:
    reads_one_point = {*module.kernel_size, *module.stride} == {1}
    if not reads_one_point or any(part != 0 for part in module.padding):
        _refuse(name, module, "reads neighbouring points (kernel, stride or padding), which another rank may have")


def _check_settings(name: str, module: Any, functions: Sequence[Any]) -> None:
    """Raise for what modules hold that is no module: precisions, functions, statistics."""
    from neuralop.layers.normalization_layers import InstanceNorm
    from neuralop.layers.padding import DomainPadding

    precision = getattr(module, "fno_block_precision", "full")
    if precision != "full":
        _refuse(name, module, f"has fno_block_precision={precision!r}; only 'full' is split")
    function = getattr(module, "non_linearity", None)
    if function is not None and not isinstance(function, nn.Module) and function not in functions:
        text = getattr(function, "__name__", function)
        _refuse(name, module, f"has non_linearity={text}, not known to be pointwise; if it is, pass pointwise=(it,)")
    if isinstance(module, InstanceNorm):
        foreign = set(module.kwargs) - {"eps", "weight", "bias", "momentum"}
        if foreign:
            _refuse(name, module, f"has {sorted(module.kwargs)}; only eps, weight and bias are taken")
    if isinstance(module, DomainPadding) and set(_factors(module.resolution_scaling_factor)) != {1}:
        _refuse(name, module, "pads a field whose resolution is scaled as well, which neuraloperator cannot take away")


def _factors(value: Any) -> Iterator[float]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _factors(one)
    else:
        yield 1.0 if value is None else float(value)
