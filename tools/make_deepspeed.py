"""Made tests/checkpoint/interop/others/zero1, zero2 and zero3 with DeepSpeed 0.19.8 and torch 2.13.0, on two CPU ranks.

    pip install torch deepspeed
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 tools/make_deepspeed.py tests/checkpoint/interop/others

Each folder is what ``engine.save_checkpoint`` writes after three steps; ``zero1_next.pt`` and so on have the weights
after a fourth.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


def build(seed: int = 0) -> nn.Sequential:
    """A model whose parameters divide over two ranks with a rest; its last layer is frozen."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.Linear(3, 3, bias=False))
    model[3].requires_grad_(False)
    return model


def batch(number: int, rank: int) -> torch.Tensor:
    """The batch of a rank in a step."""
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * number + rank))


def train(stage: int, folder: Path) -> dict[str, Any]:
    """Train three steps, save, train a fourth; the weights then."""
    model = build()
    groups = [
        {"params": list(model[0].parameters()), "lr": 1e-2},
        {"params": list(model[1:3].parameters()), "lr": 2e-2},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(groups)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for number in range(4):
        if number == 3:
            engine.save_checkpoint(str(folder), client_state={"epoch": 3})
        engine.backward(engine(batch(number, dist.get_rank())).square().mean())
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        return {name: value.clone() for name, value in engine.module.state_dict().items()}


if __name__ == "__main__":
    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None  # which would be compiled, for minutes
    deepspeed.init_distributed(dist_backend="gloo")
    out = Path(sys.argv[1])
    for stage in (1, 2, 3):
        folder = out / f"zero{stage}"
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        after = train(stage, folder)
        if dist.get_rank() == 0:
            torch.save(after, out / f"zero{stage}_next.pt")
            for script in folder.glob("zero_to_*.py"):
                script.unlink()
