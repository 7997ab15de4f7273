"""The global random generators that a training may draw from."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fsshard.parity.trace import digest

__all__ = ["kept_random_numbers", "random_state", "seed_all"]


def seed_all(number: int) -> None:
    """Seed every global generator that a training may draw from."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)  # every CUDA device's too


def random_state() -> str:
    """A digest of the state of every global generator that a training on this rank could draw from."""
    return digest([torch.get_rng_state(), *_cuda_states(), repr(random.getstate()), np.random.get_state(legacy=True)])


@contextlib.contextmanager
def kept_random_numbers() -> Iterator[None]:
    """Put every global generator back afterwards."""
    torch_state, cuda, python, numpy = torch.get_rng_state(), _cuda_states(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        if cuda:
            torch.cuda.set_rng_state(cuda[0])
        random.setstate(python)
        np.random.set_state(numpy)


def _cuda_states() -> list[Tensor]:
    return [torch.cuda.get_rng_state()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
