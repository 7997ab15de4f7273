"""Fixtures that the tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def alone() -> Iterator[None]:
    """A test that wraps models in the process of the tests; the group of one rank that wrap makes goes with it.

    Others look whether there is one: neuraloperator takes it for a sign of CUDA.
    """
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
