"""Mixed precision: bfloat16, or float16 with a loss scaler; the same lines under every engine.

    python mixed_precision.py                               # bf16
    python mixed_precision.py --precision fp16 --backend ddp
    torchrun --nproc-per-node 2 mixed_precision.py

It prints the dtype of each sharding unit, and the losses beside those of float32. Weights, optimizer state and
checkpoints stay float32, and units that own complex weights compute in it. With float16 the first step or two are
skipped, until the scaler has found a scale that does not overflow.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import fsshard
from fsshard.model.precision import bf16_ready


def build_model(width=64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, 1),
    )  # fmt: skip


def batch(ctx, step, samples=32):
    """Other samples on each rank and in each step."""
    x = torch.rand(samples, 2, generator=torch.Generator().manual_seed(1000 * step + ctx.rank))
    return x.to(ctx.device), (3 * x).sin().prod(dim=1, keepdim=True).to(ctx.device)


def run(ctx, backend, precision, steps):
    """Train; the model, and the mean loss over the ranks of every step."""
    model = fsshard.wrap(build_model().to(ctx.device), backend=backend, mixed_precision=precision)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-2)
    # float16 has no small numbers: gradients below 6e-8 would be 0. A step that overflows is skipped, by all ranks.
    scaler = fsshard.GradScaler(model, enabled=precision == "fp16")
    losses = []
    for step in range(steps):
        x, y = batch(ctx, step)
        with model.autocast():  # for operations outside of the units; nothing in float32
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # before gradients are looked at
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / ctx.world_size)
    return model, losses


def train(ctx, args):
    """Runs on every rank, each in its own process."""
    if args.precision == "bf16" and not (ready := bf16_ready(ctx.device)):
        raise SystemExit(f"no bfloat16 here: {ready.reason}")
    model, losses = run(ctx, args.backend, args.precision, args.steps)
    _, reference = run(ctx, args.backend, "fp32", args.steps)
    if ctx.rank == 0:
        print(model.explain())
        for step in range(0, args.steps, max(1, args.steps // 8)):
            print(f"step {step + 1}: loss {losses[step]:.6f} in {args.precision}, {reference[step]:.6f} in fp32")
    return losses, reference, {name: value.dtype for name, value in model.state_dict().items()}


def parse(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--backend", default="fsdp2", help="fsdp2, fsdp, ddp, fairscale")
    parser.add_argument("--nprocs", type=int, default=os.environ.get("WORLD_SIZE") or torch.cuda.device_count() or 2)
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = parse()
    fsshard.launch(train, args.nprocs, (args,))
