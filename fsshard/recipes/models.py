"""The models of the recipes that come with fsshard: real ones, made small, with random weights."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
from torch import Tensor, nn


class ComplexMLP(nn.Module):
    """Real numbers in and out, one complex layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 12)
        self.turn = nn.Linear(12, 12, dtype=torch.complex64)
        self.leave = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.turn(torch.tanh(self.enter(x)).to(torch.complex64))
        left: Tensor = self.leave(torch.tanh(torch.view_as_real(turned).flatten(-2)))
        return left


class DropoutBlock(nn.Sequential):
    """A layer and its dropout; worth recomputing as a whole."""


class ConvBlock(nn.Sequential):
    """A convolution, its BatchNorm and what follows; worth recomputing as a whole."""


def dropout_model() -> nn.Module:
    block = DropoutBlock(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2))
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), block, nn.Linear(16, 2))


def convnet_model() -> nn.Module:
    return nn.Sequential(
        ConvBlock(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        ConvBlock(nn.Conv2d(4, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(4 * 16, 4),
    )


def vit_model() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(  # type: ignore[call-arg, unused-ignore]
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,  # the usual 0.02 is meant for widths of hundreds
    )
    return ViTForImageClassification(config)


def small_t5(words: int, width: int, heads: int, layers: int, **changes: Any) -> nn.Module:
    """Hugging Face's T5 with random weights and tied embeddings, for examples, tests and benchmarks.

    Args:
        words: size of the vocabulary.
        width: of the embeddings; that of all heads together too, and four times as much between.
        heads: of each attention.
        layers: of the encoder, and as many of the decoder.
        **changes: what else transformers' ``T5Config`` takes, or instead.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    settings: dict[str, Any] = {
        "vocab_size": words,
        "d_model": width,
        "d_kv": width // heads,
        "d_ff": 4 * width,
        "num_layers": layers,
        "num_heads": heads,
        "use_cache": False,
        "tie_word_embeddings": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }
    return T5ForConditionalGeneration(T5Config(**(settings | changes)))


def t5_model() -> nn.Module:
    return small_t5(words=20, width=16, heads=2, layers=1, d_ff=32, dropout_rate=0.0)


SMALL: dict[str, Any] = {
    "in_channels": 1,
    "out_channels": 1,
    "hidden_channels": 6,
    "n_layers": 2,
    "projection_channel_ratio": 2,
    "use_channel_mlp": False,
}
"""Arguments that the operators on regular grids share."""


def fno_model() -> nn.Module:
    from neuralop.models import FNO

    model: nn.Module = FNO(n_modes=(4, 4), **SMALL)
    return model


def tfno_model(factorization: str) -> nn.Module:
    from neuralop.models import TFNO

    model: nn.Module = TFNO(n_modes=(4, 4), factorization=factorization, rank=0.4, **SMALL)
    return model


def uno_model() -> nn.Module:
    from neuralop.models import UNO

    # It prints its skips.
    with contextlib.redirect_stdout(io.StringIO()):
        model: nn.Module = UNO(
            in_channels=1,
            out_channels=1,
            hidden_channels=4,
            uno_out_channels=[4, 4, 4],
            uno_n_modes=[[4, 4]] * 3,
            uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2, 2]],
            horizontal_skips_map={2: 0},
            n_layers=3,
            channel_mlp_skip="linear",
            lifting_channels=4,
            projection_channels=4,
        )
    return model


def sfno_model() -> nn.Module:
    from neuralop.models import SFNO

    # Without it the model learns little.
    model: nn.Module = SFNO(n_modes=(4, 8), **{**SMALL, "use_channel_mlp": True})
    return model


def gino_model() -> nn.Module:
    from neuralop.models import GINO

    model: nn.Module = GINO(
        in_channels=1,
        out_channels=1,
        gno_coord_dim=2,
        in_gno_radius=0.5,
        out_gno_radius=0.5,
        gno_embed_channels=4,
        in_gno_channel_mlp_hidden_layers=[8],
        out_gno_channel_mlp_hidden_layers=[8],
        gno_use_open3d=False,
        gno_use_torch_scatter=False,
        fno_n_modes=(3, 3),
        fno_hidden_channels=6,
        fno_n_layers=1,
        fno_use_channel_mlp=False,
        projection_channel_ratio=2,
    )
    return model
