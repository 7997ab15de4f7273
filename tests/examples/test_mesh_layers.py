"""Tensor and context parallel layers against the whole model on one rank; gradients are summed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from examples.mesh_layers import sharded_parameters, split_sequence, split_tensors
from examples.vit import ViT

SIZE = {"channels": 2, "shape": (8, 16), "patch": 4, "width": 16, "depth": 2, "heads": 4}


def build() -> ViT:
    torch.manual_seed(0)
    model = ViT(**SIZE)  # type: ignore[arg-type]
    torch.nn.init.normal_(model.head.weight, std=0.1)  # zeros would let no gradient through
    return model


def loss_of(model: ViT) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 3, 2, 8, 16, generator=generator)
    return (model(x) - y).square().mean()


def cut(tensor: Tensor, name: str, mesh: Any) -> Tensor:
    """This rank's part of a whole parameter or gradient."""
    import re

    for pattern, (_, dim) in sharded_parameters(mesh).items():
        if re.search(pattern, name):
            return tensor.chunk(mesh.size(), dim)[mesh.get_local_rank()]
    return tensor


def split_and_compare(cp: int, tp: int) -> tuple[float, float]:
    """The largest differences of loss and of gradients from the whole model's."""
    mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
    whole, model = build(), build()
    if tp > 1:
        split_tensors(model, mesh["tp"])
    if cp > 1:
        split_sequence(model, mesh["cp"])
    expected, loss = loss_of(whole), loss_of(model)
    expected.backward()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    gap = 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=mesh["cp"].get_group())
        mine = cut(gradients[name], name, mesh["tp"])  # type: ignore[arg-type]
        assert mine.shape == parameter.shape, name
        gap = max(gap, float((parameter.grad - mine).abs().max() / mine.abs().max()))
    held = sum(parameter.numel() for parameter in model.parameters())
    assert tp == 1 or held < 0.7 * sum(parameter.numel() for parameter in whole.parameters())
    return abs(float(loss - expected)), gap


@pytest.mark.parametrize(("cp", "tp"), [(1, 2), (2, 1), (2, 2)])
def test_a_split_model_has_the_loss_and_the_gradients_of_the_whole(ranks: Any, cp: int, tp: int) -> None:
    for loss, gradient in ranks.run(split_and_compare, cp * tp, cp, tp):
        # float32 sums of at most 64 products in another order: 64 * 2^-24 = 4e-6 of their size, a few layers deep.
        assert loss < 1e-6 and gradient < 1e-4
