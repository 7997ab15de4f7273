"""Hybrid sharding (HSDP): the model is sharded within a node, and each node has a replica of it.

    python hybrid_sharding.py                                   # 4 ranks: two replicas of two shards
    python hybrid_sharding.py --nprocs 2 --replicas 1           # one replica: all ranks share the model
    torchrun --nnodes 2 --nproc-per-node 8 [...] hybrid_sharding.py --replicas 2

Weights are gathered over the fast links within a node only, gradients are summed over both; the price is memory: a
rank holds 1 / (ranks per replica) of the model, in place of 1 / (all ranks). It prints who shares what, the losses, and
the memory of each rank.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsshard


def build_model(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))


def batch(ctx, step, samples=16):
    """Other samples on every rank, whichever replica it is in."""
    x = torch.rand(samples, 2, generator=torch.Generator().manual_seed(1000 * step + ctx.rank))
    return x.to(ctx.device), (3 * x).sin().prod(dim=1, keepdim=True).to(ctx.device)


def train(ctx, args):
    """Runs on every rank, each in its own process."""
    if ctx.world_size % args.replicas:
        raise SystemExit(f"{ctx.world_size} ranks cannot be divided into {args.replicas} replicas")
    # Consecutive ranks, which are those of one node, are along the last dimension. The names say what each is for.
    shape = (args.replicas, ctx.world_size // args.replicas)
    mesh = init_device_mesh(ctx.device.type, shape, mesh_dim_names=("replicate", "shard"))
    model = fsshard.wrap(build_model().to(ctx.device), backend=args.backend, device_mesh=mesh)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-2)

    losses = []
    for step in range(args.steps):
        x, y = batch(ctx, step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / ctx.world_size)
        if ctx.rank == 0 and step % 5 == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
    memory = model.memory_report(all_ranks=True)
    if ctx.rank == 0:
        print(f"replicas, each of the ranks that share one model: {mesh.mesh.tolist()}")
        print(memory, flush=True)
    return losses, [rank.by_kind["parameters"] for rank in memory.ranks], model.state_dict()


def parse(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2, help="one per node, usually")
    parser.add_argument("--backend", default="fsdp2", help="fsdp2, fsdp, fairscale")
    parser.add_argument("--nprocs", type=int, default=os.environ.get("WORLD_SIZE") or torch.cuda.device_count() or 4)
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = parse()
    fsshard.launch(train, args.nprocs, (args,))
