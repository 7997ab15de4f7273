"""Who could do what an engine cannot: named from the registry, and asked of the classes themselves."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import fsshard
from fsshard.backends.alternatives import who_has_option, who_has_strategy
from fsshard.errors import ConfigurationError, UnsupportedByBackend


def test_options_and_strategies_are_those_of_the_classes() -> None:
    assert set(who_has_option("fast_collectives")) == {"ddp", "fsdp2"}
    assert who_has_option("no_such_option") == []
    assert who_has_strategy("SHARD_GRAD_OP").startswith("use backend=")
    assert who_has_strategy("no such strategy").startswith("the nearest is 'HYBRID_SHARD'")
    assert "ddp" in who_has_strategy("FULL_SHARD").partition("They have: ")[2]


def refused(**arguments: Any) -> str:
    with pytest.raises((ConfigurationError, UnsupportedByBackend)) as caught:
        fsshard.wrap(nn.Linear(2, 2), backend="ddp", **arguments)
    return str(caught.value)


def test_an_error_names_who_can(ranks: Any) -> None:
    for text in ranks.run(refused, 2, reshard_after_forward=True):
        assert "backend='fsdp2'" in text or "'fsdp2'" in text
    for text in ranks.run(refused, 2, sharding_strategy="HYBRID_SHARD"):
        assert "use backend='fsdp" in text
