"""The tensors of a trace on disk: one file per step, quantity and rank while the training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsshard.parity.trace import Shelf, write_tensors


def job_write(folder: str) -> None:
    """Rank 1 differs in one tensor."""
    rank = dist.get_rank()
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor([1 + 2j, 3.0]).conj(),
        "c": torch.tensor(float(rank)),
        "t": torch.arange(6.0).reshape(2, 3).t(),
    }
    write_tensors(folder, 0, "weight", tensors.items())
    write_tensors(folder, 0, "state", [])


def test_tensors_come_back_and_replicas_are_kept_once(ranks: Any, tmp_path: Path) -> None:
    ranks.run(job_write, 2, str(tmp_path))
    for rank in (0, 1):
        shelf = Shelf(str(tmp_path), 0, "weight", rank)
        assert list(shelf) == ["a", "b", "c", "t"]
        assert torch.equal(shelf["a"], torch.arange(6.0).reshape(2, 3))
        assert torch.equal(shelf["b"], torch.tensor([1 - 2j, 3.0]))
        assert float(shelf["c"]) == rank
        assert torch.equal(shelf["t"], torch.arange(6.0).reshape(2, 3).t())
        assert "nothing" not in shelf
        with pytest.raises(KeyError):
            shelf["nothing"]
        assert len(Shelf(str(tmp_path), 0, "state", rank)) == 0
    sizes = [(tmp_path / f"step0-weight-rank{rank}.safetensors").stat().st_size for rank in (0, 1)]
    assert sizes[1] < sizes[0]
