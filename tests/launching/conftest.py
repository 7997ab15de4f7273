"""An environment without launchers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.launching.launched import NAMES


@pytest.fixture
def bare() -> Iterator[pytest.MonkeyPatch]:
    """No launcher in the environment and no CUDA; and no group left behind."""
    before, threads = dict(os.environ), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name in NAMES or name.startswith(("SLURM_", "TORCHELASTIC_"))]:
            patch.delenv(name)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        yield patch
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_num_threads(threads)
    # Last, and not by the patch: a variable that init() exported and the test then set goes back to what was exported.
    os.environ.clear()
    os.environ.update(before)
