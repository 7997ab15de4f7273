"""The reference on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fsshard.parity.trace import TraceReader, TraceWriter, digest


def job_write(folder: str) -> None:
    """Rank 1 differs in one tensor."""
    rank = dist.get_rank()
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor([1 + 2j, 3.0]).conj(),
        "c": torch.tensor(float(rank)),
        "t": torch.arange(6.0).reshape(2, 3).t(),
    }
    assert TraceWriter(folder).tensors(0, "weight", tensors.items()) == list(tensors)
    TraceWriter(folder).tensors(0, "state", [])
    TraceWriter(folder).facts(0, {"loss": 0.5 + rank})


def test_round_trip(ranks: Any, tmp_path: Path) -> None:
    ranks.run(job_write, 2, str(tmp_path))
    for rank in (0, 1):
        reader = TraceReader(str(tmp_path), rank)
        shelf = reader.open(0, "weight")
        assert list(shelf) == ["a", "b", "c", "t"]
        assert torch.equal(shelf["a"], torch.arange(6.0).reshape(2, 3))
        assert torch.equal(shelf["b"], torch.tensor([1 - 2j, 3.0]))
        assert float(shelf["c"]) == rank
        assert torch.equal(shelf["t"], torch.arange(6.0).reshape(2, 3).t())
        assert reader.facts(0)["loss"] == 0.5 + rank
        assert reader.facts(0, rank=0)["loss"] == 0.5
        assert "nothing" not in shelf
        with pytest.raises(KeyError):
            shelf["nothing"]
        assert len(reader.open(0, "state")) == 0


def test_replicas_are_kept_once(ranks: Any, tmp_path: Path) -> None:
    ranks.run(job_write, 2, str(tmp_path))
    sizes = [(tmp_path / f"step0-weight-rank{rank}.safetensors").stat().st_size for rank in (0, 1)]
    assert sizes[1] < sizes[0]


def test_digests_tell_bits_apart() -> None:
    values: list[Any] = [
        torch.tensor([1.0]),
        torch.tensor([1.0 + 2**-23]),
        torch.tensor([1.0]).double(),
        torch.tensor([[1.0]]),
        {"x": torch.tensor([1.0])},
        {"y": torch.tensor([1.0])},
        [torch.tensor([1.0])],
        (torch.tensor([1.0]),),
        np.array([1.0]),
        1.0,
        "1.0",
        None,
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(torch.arange(4.0)[::2]) == digest(torch.tensor([0.0, 2.0]))
    assert digest(torch.tensor([1.0]).bfloat16()) == digest(torch.tensor([1.0]).bfloat16())
