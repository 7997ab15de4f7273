"""Models of some hundred MiB, for the memory estimate: transformers with random weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from fsshard.parity.recipe import Recipe

__all__ = ["t5", "vit"]


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=8192,
        d_model=512,
        d_ff=2048,
        d_kv=64,
        num_layers=6,
        num_heads=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=96, num_labels=10, num_hidden_layers=6))


def _words(rank: int, world_size: int, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    words = torch.randint(0, 8192, (8, 128), generator=generator)
    return {"input_ids": words, "labels": words[:, :64].contiguous()}


def _images(rank: int, world_size: int, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return {"pixel_values": torch.randn(32, 3, 96, 96, generator=generator), "labels": torch.arange(32) % 10}


def _own_loss(model: Any, batch: Any) -> Any:
    return model(**batch).loss


_recipe = functools.partial(Recipe, loss=_own_loss, optimizer=torch.optim.Adam, hyper={"lr": 1e-3})


def t5() -> Recipe:
    return _recipe(build=_t5, batches=_words)


def vit() -> Recipe:
    return _recipe(build=_vit, batches=_images)
