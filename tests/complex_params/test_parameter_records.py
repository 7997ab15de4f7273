"""Records of tensors: by identity, weakly, and never on the tensors themselves."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import fsshard
from fsshard.complex_params.parameter_records import forget_record, mark_stale, new_record, record_of
from tests.models import net
from tests.on_ranks import on_ranks
from tests.sharded.training import ALL


def test_a_record_is_of_one_tensor_and_goes_with_it() -> None:
    one, equal = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    mark_stale(one, "use another")
    new_record(one).is_shard = True
    assert record_of(one).refusal == "use another" and record_of(one).is_stale and record_of(one).is_shard
    assert record_of(equal).refusal == "" and not record_of(equal).is_stale
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None
    new_record(equal).refusal = "no"
    forget_record(equal)
    assert record_of(equal).refusal == ""


@pytest.mark.parametrize("backend", ALL)
@on_ranks(1)
def test_nothing_is_written_on_the_users_parameters(backend: str) -> None:
    module = net()
    users = list(module.parameters())
    fsshard.build_optimizer(fsshard.wrap(module, backend=backend), torch.optim.SGD, lr=0.1)
    marks = [name for parameter in users for name in vars(parameter) if name.startswith("_fsshard")]
    assert marks == []
