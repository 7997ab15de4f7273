"""Samplers that Lightning makes, for ranks that share samples: compat/trainers.py."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")
pytest.importorskip("neuralop")

from tests.compat.lightning import trainings


@pytest.mark.parametrize(("domain", "data"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.long)])
def test_ranks_that_share_samples_get_the_same_ones(ranks: Any, domain: int, data: int) -> None:
    size = domain * data
    for rank, told in enumerate(ranks.run(trainings.sampled, size, domain, data)):
        shared = {"num_replicas": data, "rank": rank % data}
        assert told["mesh"] == told["domain"] == shared
        assert told["plain"] == {"num_replicas": size, "rank": rank} and told["loader first"] == size
        assert "use_distributed_sampler=False" in told["refused"]
