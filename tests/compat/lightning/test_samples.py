"""Samplers that Lightning makes, for ranks that share samples: compat/samples.py."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")
pytest.importorskip("neuralop")

from tests.compat.lightning import trainings


@pytest.mark.long
def test_ranks_that_share_samples_get_the_same_ones(ranks: Any) -> None:
    for rank, told in enumerate(ranks.run(trainings.sampled, 4)):
        shared = {"num_replicas": 2, "rank": rank % 2}
        assert told["mesh"] == told["domain"] == shared
        assert told["plain"] == {"num_replicas": 4, "rank": rank} and told["loader first"] == 4
        assert "use_distributed_sampler=False" in told["refused"]
