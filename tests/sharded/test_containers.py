"""What Python looks up on types falls through to the user's model as attributes do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsshard
from fsshard.errors import ModelError
from tests.models import net
from tests.training_runs import DISTRIBUTED, ranks_of


class Named(nn.ModuleDict):
    """A container that is called; FSDP2 takes no others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self["a"](x)  # type: ignore[no-any-return]


def job_containers(backend: str) -> list[bool]:
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]
    model: Any = fsshard.wrap(nn.Sequential(*layers), backend=backend)
    found = [isinstance(model, fsshard.ShardedModule), isinstance(model.module, nn.Sequential)]
    found += [len(model) == 3, len(list(model)) == 3, model[1] is layers[1], model[-1] is model.module[-1], bool(model)]
    found += [len(model[:2]) == 2, layers[1] in model, nn.Tanh() not in model, type(model).__name__ == "ShardedModule"]
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    found.append(model(torch.ones(1, 4)).shape == (1, 2))
    model[1] = nn.ReLU()
    found.append(model(torch.ones(1, 4)).shape == (1, 2))
    model.append(nn.Linear(2, 2))
    with pytest.raises(ModelError, match=r"added: 3\.weight"):
        model(torch.ones(1, 4))
    plain: Any = fsshard.wrap(net(), backend=backend)
    found += [bool(plain), not hasattr(type(plain), "__len__"), type(plain) is fsshard.ShardedModule]
    for use in (lambda: plain[0], lambda: len(plain), lambda: iter(plain)):
        with pytest.raises(TypeError):
            use()
    named: Any = fsshard.wrap(Named({"a": nn.Linear(2, 2)}), backend=backend)
    return [*found, "a" in named, list(named) == ["a"], named["a"] is named.module["a"]]


@pytest.mark.parametrize("backend", [*DISTRIBUTED, "none"])
def test_a_container_is_one_when_wrapped(ranks: Any, backend: str) -> None:
    assert all(all(found) for found in ranks.run(job_containers, ranks_of(backend), backend))
