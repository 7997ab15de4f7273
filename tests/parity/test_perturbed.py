"""Other rounding: one unit in the last place, in what is differentiated, and nowhere else."""

from __future__ import annotations

import torch
from torch import nn

from fsshard.parity.difference import ulps_between
from fsshard.parity.perturbed import perturbed


def source(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_result_is_one_unit_off() -> None:
    x = torch.rand(1000, generator=source(0)).requires_grad_()
    exact = x * 3.0
    with perturbed(source(1)):
        moved = x * 3.0
    apart = (moved - exact).detach()
    assert 1 <= ulps_between(moved.detach(), exact.detach()) <= 2  # at a power of two a unit has two sizes
    assert bool((apart != 0).all()) and 300 < int((apart > 0).sum()) < 700


def test_the_backward_pass_too_and_complex_numbers() -> None:
    found = []
    for seed in (1, 1, 2):
        w = torch.tensor([1 + 1j, 2 - 1j], requires_grad=True)
        with perturbed(source(seed)):
            (w * torch.tensor([0.3 + 0.1j, 0.7j])).abs().square().sum().backward()
        found.append(w.grad)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.allclose(found[0], found[2], rtol=1e-5)


def test_what_is_not_differentiated_is_left_alone() -> None:
    """An index that is computed in float must not become another one."""
    before = torch.get_rng_state()
    with perturbed(source(3)):
        place = (torch.arange(8.0) * 2 / 2).long()
        view = torch.ones(4, requires_grad=True).view(2, 2)
    assert place.tolist() == list(range(8)) and view.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert torch.equal(before, torch.get_rng_state())


def test_half_precision_moves_by_its_own_units() -> None:
    x = torch.ones(100, dtype=torch.bfloat16, requires_grad=True)
    with perturbed(source(4)):
        moved = nn.functional.relu(x)
    assert set(moved.tolist()) == {1 + 2**-7, 1 - 2**-7}
