"""The advice of OSS, ShardedDataParallel and what stands behind FairScale's names, followed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsshard.compat.fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP
from fsshard.compat.fairscale.nn.data_parallel import ShardedDataParallel
from fsshard.compat.fairscale.optim import OSS, AdaScale
from tests.advice.following import Scale, batch, cases, is_trained, plain, refused, square
from tests.models import net

SGD = torch.optim.SGD


def step(model: Any, optimizer: Any) -> None:
    square(model, batch()).backward()
    optimizer.step()


def case_oss_states() -> None:
    module = plain()
    optimizer = OSS(module.parameters(), optim=SGD, lr=0.1, momentum=0.9)
    model = ShardedDataParallel(module, optimizer)
    step(model, optimizer)
    is_trained(module.state_dict(), steps=1)
    with refused("call consolidate_state_dict(recipient_rank) on all ranks before, or state_dict(all_ranks=True) on"):
        optimizer.state_dict()
    optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == 5
    assert len(optimizer.state_dict(all_ranks=True)["state"]) == 5
    with refused("keep its state_dict() (after consolidate_state_dict) and build another"):
        copy.deepcopy(optimizer)
    another = OSS(plain().parameters(), optim=SGD, lr=0.1, momentum=0.9)
    another.load_state_dict(optimizer.state_dict(all_ranks=True))


def case_oss_arguments() -> None:
    with refused("itself, with DistributedDataParallel"):
        OSS(plain().parameters(), optim=torch.optim.LBFGS)
    both = dist.new_group([0, 1])
    groups = [dist.new_group([rank]) for rank in range(2)]
    alone = OSS(plain().parameters(), optim=SGD, lr=0.1, group=groups[dist.get_rank()])
    with refused("give OSS(group=) and "):
        ShardedDataParallel(plain(), alone, process_group=both)
    module = plain()
    optimizer = OSS(module.parameters(), optim=SGD, lr=0.1, group=both)
    step(ShardedDataParallel(module, optimizer, process_group=both), optimizer)
    is_trained(module.state_dict(), steps=1)
    with refused("use torch's DistributedDataParallel with an optimizer that is not sharded"):
        ShardedDataParallel(module, SGD(module.parameters(), lr=0.1))
    with refused("model.to(torch.bfloat16) before OSS is built"):
        OSS(plain().parameters(), optim=SGD, lr=0.1, broadcast_fp16=True)
    module = plain().to(torch.bfloat16)
    optimizer = OSS(module.parameters(), optim=SGD, lr=0.1)
    model = ShardedDataParallel(module, optimizer)
    model(batch().bfloat16()).square().mean().backward()
    optimizer.step()
    module = net()
    optimizer = OSS(module.parameters(), optim=SGD, lr=0.1)
    with refused("use reduce_fp16=False"):
        ShardedDataParallel(module, optimizer, reduce_fp16=True)
    step(ShardedDataParallel(module, optimizer, reduce_fp16=False), optimizer)


def case_fsdp_optimizers() -> None:
    module = plain()
    before = SGD(module.parameters(), lr=0.1)
    model = FSDP(module)
    with refused("build the optimizer after wrapping, over model.parameters(), or wrap with flatten_parameters=False"):
        step(model, before)
    model = FSDP(plain())
    step(model, SGD(model.parameters(), lr=0.1))
    is_trained(model.state_dict(), steps=1)
    module = plain()
    before = SGD(module.parameters(), lr=0.1)
    model = FSDP(module, flatten_parameters=False)
    step(model, before)
    is_trained(model.state_dict(), steps=1)
    model = FSDP(plain())
    with refused("build the optimizer over model.parameters() after wrapping"):
        model.gather_full_optim_state_dict(SGD(plain().parameters(), lr=0.1, momentum=0.9))
    model = FSDP(plain())
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    assert model.gather_full_optim_state_dict(optimizer) is not None or dist.get_rank()
    model.zero_grad()
    square(model, batch()).backward()
    with refused("call fsdp.clip_grad_norm_(max_norm): the FullyShardedDataParallel's own method, on the outermost"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.clip_grad_norm_(1.0)


def case_fsdp_models() -> None:
    with refused("use state_dict() of the wrapper (whole), or local_state_dict() (this rank's part)"):
        wrapped = FSDP(plain())
        wrapped(batch())
        wrapped.module.state_dict()
    model = FSDP(plain())
    assert torch.equal(model.state_dict()["0.weight"], plain()[0].weight) and model.local_state_dict()
    with refused("save its state_dict(), or build the module again, "):
        copy.deepcopy(model)
    again = FSDP(plain())
    again.load_state_dict(model.state_dict())
    with refused("which takes complex ones"):
        FSDP(net())
    with refused("make what is not trained a buffer"):
        FSDP(nn.Sequential(plain(), Scale(torch.ones(2, dtype=torch.int64), requires_grad=False)))
    module = plain()
    module[1].weight.requires_grad_(False)
    with refused("frozen modules in their own FullyShardedDataParallel, or use flatten_parameters=False"):
        FSDP(module)
    module[1] = FSDP(module[1])
    model = FSDP(module)
    square(model, batch()).backward()
    module = plain()
    module[1].weight.requires_grad_(False)
    model = FSDP(module, flatten_parameters=False)
    square(model, batch()).backward()


def case_adascale() -> None:
    from torch.utils.checkpoint import checkpoint

    def build(reentrant: bool) -> tuple[Any, Any]:
        class Recomputed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.unit, self.last = plain()

            def forward(self, x: Any) -> Any:
                return self.last(checkpoint(self.unit, self.first(x), use_reentrant=reentrant))

        module = Recomputed()
        ddp = nn.parallel.DistributedDataParallel(module, find_unused_parameters=False)
        return ddp, AdaScale(SGD(module.parameters(), lr=0.1), num_gradients_to_accumulate=1)

    model, scaled = build(reentrant=True)
    with refused("checkpointing; use fairscale.nn.checkpoint_wrapper, or torch's checkpoint with use_reentrant=False"):
        square(model, batch()).backward()
    model, scaled = build(reentrant=False)
    step(model, scaled)
    with refused("its hooks are on the parameters; use state_dict()"):
        copy.deepcopy(scaled)
    scaled.load_state_dict(scaled.state_dict())


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__)
def test_advice_is_right(ranks: Any, case: Any) -> None:
    ranks.run(case, 2)
