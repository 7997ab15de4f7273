"""Steps of models that were split before: through fsshard, and by torch's own API written by hand.

    python benchmarks/meshes.py [--rounds 30] [--width 256] [--tokens 64]

Two ranks. ``tp``: blocks of a transformer by ``parallelize_module`` over both ranks, then ``fully_shard`` by hand (the
other side: ``fsshard.wrap(backend="fsdp2")``, which keeps local parts and shows DTensors over them). ``shared``: the
same perceptrons, plain, whose tokens are divided among the ranks; by hand their gradients are summed one by one after
the backward (the other side: ``replicated=``). Steps of both sides in turns; medians of the ratios of pairs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsshard
from benchmarks.pairs import Step, measure

BLOCKS = 4


class Block(nn.Module):
    """A norm and a perceptron around a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return found


def blocks(width: int) -> nn.Sequential:
    """The model, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(BLOCKS)))


def in_parts(width: int, tp: DeviceMesh) -> nn.Sequential:
    """It over tp."""
    model = blocks(width)
    for block in model:
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def stepping(model: Any, optimizer: Any, x: Tensor, shared: Any = None) -> Step:
    """A training step; ``shared``: the group over which gradients are summed by hand."""

    def step(_: int) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if shared is not None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad.to_local(), group=shared)
        optimizer.step()

    return step


def sides(what: str, mesh: DeviceMesh, args: argparse.Namespace) -> list[Step]:
    """By hand, and through fsshard."""
    data, other = mesh["data"], mesh["other"]
    x = torch.randn(4, args.tokens, args.width, generator=torch.Generator().manual_seed(1))
    if what == "tp":
        raw, mine, said = in_parts(args.width, other), in_parts(args.width, other), {}
    else:
        raw, mine, said = blocks(args.width), blocks(args.width), {"replicated": {".": other}}
        x = x.chunk(2, dim=1)[other.get_local_rank()]
    for block in raw:
        fully_shard(block, mesh=data)
    fully_shard(raw, mesh=data)
    by_hand = torch.optim.AdamW(raw.parameters(), lr=1e-3)
    model = fsshard.wrap(mine, backend="fsdp2", device_mesh=data, auto_wrap_policy={Block}, **said)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
    shared = other.get_group() if what == "shared" else None
    return [stepping(raw, by_hand, x, shared), stepping(model, optimizer, x)]


def work(ctx: fsshard.Context, args: argparse.Namespace) -> None:
    """Both comparisons; printed by rank 0."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "other"))
    for what in ("tp", "shared"):
        by_hand, ours = measure(sides(what, mesh, args), args.rounds)
        wall, cpu = ours.over(by_hand)
        if ctx.rank == 0:
            times = f"{by_hand.milliseconds()[0]:.1f} | {ours.milliseconds()[0]:.1f}"
            print(f"| {what} | {times} | {wall} | {cpu} |", flush=True)


def main() -> None:
    """One job of two ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    print("| split | by hand, ms | fsshard, ms | ours / by hand, by the clock | by CPU time |")
    print("|---|---|---|---|---|", flush=True)
    fsshard.launch(work, 2, (args,), timeout=120)


if __name__ == "__main__":
    main()
