"""Gradient accumulation and clipping: a batch that is too large for memory, in parts; the norm over all ranks.

    python accumulate_and_clip.py
    python accumulate_and_clip.py --accumulate 8 --backend fairscale
    torchrun --nproc-per-node 2 accumulate_and_clip.py

It prints loss and gradient norm of each step. They do not depend on the number of parts, but for rounding.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn

import fsshard


def build_model(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))


def global_batch(step, size):
    """The samples of all ranks."""
    x = torch.rand(size, 2, generator=torch.Generator().manual_seed(step))
    return x, (3 * x).sin().prod(dim=1, keepdim=True)


def train(ctx, args):
    """Runs on every rank, each in its own process."""
    model = fsshard.wrap(build_model().to(ctx.device), backend=args.backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=args.lr)
    steps = []
    for step in range(args.steps):
        x, y = (each.chunk(ctx.world_size)[ctx.rank].to(ctx.device) for each in global_batch(step, args.batch_size))
        parts = list(zip(x.chunk(args.accumulate), y.chunk(args.accumulate), strict=True))
        total = torch.zeros((), device=ctx.device)
        for number, (x, y) in enumerate(parts, 1):
            # Ranks exchange gradients in the last backward only; no_sync() saves that traffic in the others.
            with model.no_sync() if number < len(parts) else contextlib.nullcontext():
                loss = nn.functional.mse_loss(model(x), y) / len(parts)  # so that the parts add up to the mean
                loss.backward()
            total += loss.detach()
        norm = model.clip_grad_norm_(args.clip)  # of all ranks' gradients, before it was clipped
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        steps.append((float(total) / ctx.world_size, float(norm)))
        if ctx.rank == 0:
            print(f"step {step + 1}: loss {steps[-1][0]:.6f}, gradient norm {steps[-1][1]:.6f}", flush=True)
    return steps


def parse(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accumulate", type=int, default=4, help="parts of a rank's batch")
    parser.add_argument("--clip", type=float, default=0.5, help="the largest norm of the gradients of all ranks")
    parser.add_argument("--backend", default="fsdp2", help="fsdp2, fsdp, ddp, fairscale")
    parser.add_argument("--nprocs", type=int, default=os.environ.get("WORLD_SIZE") or torch.cuda.device_count() or 2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks and parts together")
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args(arguments)
    if args.batch_size % (args.nprocs * args.accumulate):
        parser.error(f"--batch-size must be a multiple of --nprocs x --accumulate = {args.nprocs * args.accumulate}")
    return args


if __name__ == "__main__":
    args = parse()
    fsshard.launch(train, args.nprocs, (args,))
