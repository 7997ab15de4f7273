"""The vision transformer against the formulas."""

from __future__ import annotations

import math

import torch

from examples.vit import Attention, ViT


def test_patches_are_squares_row_by_row_and_come_back() -> None:
    model = ViT(channels=2, shape=(8, 12), patch=4, width=8, depth=1, heads=2)
    fields = torch.arange(2 * 2 * 8 * 12.0).reshape(2, 2, 8, 12)
    patches = model.to_patches(fields)
    assert patches.shape == (2, 6, 32)
    assert torch.equal(patches[1, 4], fields[1, :, 4:8, 4:8].flatten())
    assert torch.equal(model.to_fields(patches), fields)


def test_untrained_it_forecasts_persistence_and_every_weight_has_a_gradient_after_a_step() -> None:
    torch.manual_seed(0)
    model = ViT(channels=2, shape=(8, 8), patch=4, width=8, depth=2, heads=2)
    fields = torch.randn(3, 2, 8, 8)
    assert torch.equal(model(fields), fields)
    for _ in range(2):  # the first step moves the last layer away from zero
        loss = (model(fields) - fields.roll(1, 3)).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


def test_attention_is_the_formula_head_by_head() -> None:
    torch.manual_seed(0)
    attention = Attention(width=6, heads=2)
    tokens = torch.randn(2, 5, 6)
    rows = attention.qkv(tokens)
    heads = []
    for head in range(2):
        query, key, value = (rows[..., 9 * head + 3 * n : 9 * head + 3 * (n + 1)] for n in range(3))
        heads.append(torch.softmax(query @ key.transpose(1, 2) / math.sqrt(3), -1) @ value)
    assert torch.allclose(attention(tokens), attention.proj(torch.cat(heads, -1)), atol=1e-6)
