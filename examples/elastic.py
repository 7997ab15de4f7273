"""Training that outlives its ranks: every start goes on from the latest checkpoint, as if nothing had happened.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py --folder build/elastic
    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py --folder build/elastic --kill 1:13

The second command has rank 1 killed (SIGKILL) in the middle of its 13th step. torchrun starts all ranks again, they
find the latest whole checkpoint, and the losses in ``losses.txt`` are those of the first command to the last digit.
A checkpoint is written every few steps while training goes on; a kill in the middle of that leaves the one before.

Over several hosts, all of which see the folder: on each of them

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 5 --rdzv-id 1 \\
        --rdzv-backend c10d --rdzv-endpoint host0:29400 examples/elastic.py --folder build/elastic

The variable gives every start a store of its own. Without it ranks of torch 2.13 find the addresses of ranks that are
gone, and each restart costs another one.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a script from anywhere

import torch
import torch.distributed as dist
from torch import Tensor

import fsshard
from fsshard.demo import darcy
from fsshard.demo.common import progress, replace_file


def build_model() -> torch.nn.Module:
    """A small FNO; the same weights at every call."""
    from neuralop.models import FNO

    torch.manual_seed(0)
    return FNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16, projection_channel_ratio=2)  # type: ignore[no-any-return]


def batch_of(data: darcy.DarcyData, step: int, size: int, ctx: fsshard.Context) -> tuple[Tensor, Tensor]:
    """This rank's part of the step's batch. It follows from the step alone, so the step is the data's position."""
    per_epoch = len(data.train_x) // size
    order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(step // per_epoch))
    place = step % per_epoch * size
    chosen = order[place : place + size][ctx.rank :: ctx.world_size]
    return data.train_x[chosen].to(ctx.device), data.train_y[chosen].to(ctx.device)


def train(ctx: fsshard.Context, args: argparse.Namespace) -> list[float]:
    """The whole job, from wherever the last one got to; the global batch's loss at every step."""
    data = darcy.load(n_train=args.n_train, n_test=10)
    model = fsshard.wrap(build_model().to(ctx.device), backend=args.backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    first, losses = 0, []
    found = fsshard.latest(args.folder)
    if found is not None:
        state = fsshard.load(found, model, optimizer, scheduler).state
        first, losses = state["step"], state["losses"]
        if ctx.rank == 0:
            print(f"goes on from {found.name}, step {first}", flush=True)
    with progress(ctx, f"{args.backend}, {ctx.world_size} ranks", args.steps - first) as advance:
        for step in range(first, args.steps):
            x, y = batch_of(data, step, args.batch_size, ctx)
            loss = (model(x) - y).square().mean() / data.train_y.square().mean()
            die_if_asked(ctx, args, step)
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(mean_over_ranks(loss))
            advance(losses[-1])
            if (step + 1) % args.save_every == 0:
                fsshard.save(
                    args.folder / f"step-{step + 1:06d}",
                    model,
                    optimizer,
                    scheduler,
                    block=False,
                    keep=2,
                    timeout=args.timeout,
                    step=step + 1,
                    losses=losses,
                )
    return losses


def die_if_asked(ctx: fsshard.Context, args: argparse.Namespace, step: int) -> None:
    """``--kill RANK:STEP`` in the first life of the job; the other ranks wait in backward then.

    Not before the first checkpoint is there, if one was begun: it is written while training goes on.
    """
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first_life and args.kill == (ctx.rank, step + 1):
        while step >= args.save_every and fsshard.latest(args.folder) is None:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def mean_over_ranks(loss: Tensor) -> float:
    """Average over the global batch; float64, so that the order of ranks does not show."""
    total = loss.detach().double()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def job(ctx: fsshard.Context, args: argparse.Namespace) -> None:
    """Train on one rank; every rank calls it."""
    if ctx.rank == 0:
        args.folder.mkdir(parents=True, exist_ok=True)
        darcy.load(n_train=args.n_train, n_test=10)  # so that one process solves and the others find the cache
    dist.barrier()
    losses = train(ctx, args)
    if ctx.rank == 0:
        text = "".join(f"{loss!r}\n" for loss in losses)
        replace_file(args.folder / "losses.txt", lambda file: file.write_text(text))
        print(f"{len(losses)} steps, last loss {losses[-1]:.6f}; {args.folder / 'losses.txt'}", flush=True)


def rank_and_step(text: str) -> tuple[int, int]:
    """``1:13`` as (1, 13)."""
    rank, _, step = text.partition(":")
    return int(rank), int(step)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints, and the losses at the end")
    parser.add_argument("--backend", default="fsdp2")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="of all ranks together")
    parser.add_argument("--n-train", type=int, default=200)
    parser.add_argument("--kill", type=rank_and_step, metavar="RANK:STEP", help="that rank is killed there, once")
    parser.add_argument("--nprocs", type=int, default=2, help="ranks to start (ignored under torchrun)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a collective may take")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Join the ranks that torchrun started, or start some here."""
    args = parser().parse_args(arguments)
    fsshard.launch(job, None if "RANK" in os.environ else args.nprocs, (args,), timeout=args.timeout)


if __name__ == "__main__":
    main()
