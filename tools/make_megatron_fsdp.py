"""Made tests/checkpoint/interop/others/megatron_fsdp with megatron-fsdp 0.6.1 and torch 2.13.0, on two CPU ranks.

    pip install torch deepspeed megatron-fsdp
    torchrun --nproc-per-node 2 tools/make_megatron_fsdp.py tests/checkpoint/interop/others

Its training needs CUDA. So three steps are trained by hand, over the mean of the ranks' gradients; weights and moments
become unevenly sharded DTensors, as a flat buffer of Megatron-FSDP cuts them, and its own function prepares these for
DCP. ``megatron_fsdp_next.pt`` has the weights after a fourth step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from make_deepspeed import batch, build
from megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
from torch.distributed.tensor import DTensor, Shard


def sharded(value: Any, mesh: Any) -> Any:
    """One row on rank 0, the others on rank 1; numbers stay numbers, and buffers each rank's."""
    if isinstance(value, dict):
        return {key: each if "running" in str(key) else sharded(each, mesh) for key, each in value.items()}
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    local = value.detach()[:1] if dist.get_rank() == 0 else value.detach()[1:]
    return DTensor.from_local(
        local.clone(), mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride()
    )


def main(out: Path) -> None:
    """Train, save after three steps, and save the weights after four."""
    model = build()
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained[:1], "lr": 1e-2}, {"params": trained[1:], "lr": 2e-2}])
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for number in range(4):
        if number == 3:
            for buffer in model.buffers():  # DCP takes a copy of any rank
                dist.broadcast(buffer, 0)
            whole = {"model": {f"module.{k}": v for k, v in model.state_dict().items()}}
            whole["optimizer"] = optimizer.state_dict()
            dcp.save(
                preprocess_state_dict_for_uneven_dtensor(sharded(whole, mesh)), checkpoint_id=out / "megatron_fsdp"
            )
        model(batch(number, dist.get_rank())).square().mean().backward()
        for value in trained:
            dist.all_reduce(value.grad)
            value.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), out / "megatron_fsdp_next.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
