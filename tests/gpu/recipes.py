"""Models of some hundred MiB, for the memory estimate: transformers with random weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsshard.recipes.recipe import Recipe


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


STEPS = 6
"""That a measurement takes."""


def _settle(number: int) -> None:
    """Count the memory of the last step alone, on a GPU.

    DDP makes its buckets anew in the second step, and in a process that has trained before the first ones were seen to
    live on for some steps (torch 2.11); probably NCCL holds them until its watchdog has looked, every 100 ms.
    """
    if number == STEPS - 1 and dist.is_initialized() and dist.get_backend() == "nccl":
        assert dist.group.WORLD is not None
        dist.group.WORLD._wait_for_pending_works()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def _words(rank: int, world_size: int, number: int) -> dict[str, torch.Tensor]:
    _settle(number)
    generator = torch.Generator().manual_seed(1000 * rank + number)
    words = torch.randint(0, 8192, (8, 128), generator=generator)
    return {"input_ids": words, "labels": words[:, :64].contiguous()}


def _images(rank: int, world_size: int, number: int) -> dict[str, torch.Tensor]:
    _settle(number)
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return {"pixel_values": torch.randn(32, 3, 96, 96, generator=generator), "labels": torch.arange(32) % 10}


def _own_loss(model: Any, batch: Any) -> Any:
    return model(**batch).loss


_recipe = functools.partial(Recipe, loss=_own_loss, optimizer=torch.optim.Adam, hyper={"lr": 1e-3})


def t5() -> Recipe:
    return _recipe(build=_t5, batches=_words)


def vit() -> Recipe:
    return _recipe(build=_vit, batches=_images)
