"""Checkpoint and resume: a training that was stopped goes on as if it had not been, to the last bit.

    python checkpoint_resume.py --folder ckpt --epochs 3      # trains three epochs
    python checkpoint_resume.py --folder ckpt --epochs 6      # goes on with the fourth
    python checkpoint_resume.py --folder ckpt --epochs 9 --backend ddp
    torchrun --nproc-per-node 2 --max-restarts 3 checkpoint_resume.py --folder ckpt --epochs 20

The last one restarts by itself when a rank dies. SIGTERM, which SLURM and Kubernetes send before they kill, makes
each of them save after the current epoch and leave; ``launch`` passes it on and waits ``grace=`` seconds. A checkpoint
is there whole or not at all, and loads under any engine and on any number of ranks.
``fsshard.export("ckpt/epoch-000006", "model.safetensors")`` makes one file for other tools.
"""

import argparse
import os
import signal
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fsshard


def build_model(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width), nn.Linear(width, 1))


def samples():
    x = torch.rand(256, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (3 * x).sin().prod(dim=1, keepdim=True))


def train(ctx, args):
    """Runs on every rank, each in its own process."""
    model = fsshard.wrap(build_model().to(ctx.device), backend=args.backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    torch.manual_seed(ctx.rank)  # dropout: other masks on each rank; their generators are in the checkpoint, too
    epoch, losses = 0, []
    told_to_leave = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_leave.set())

    found = fsshard.latest(args.folder)  # the newest that is whole, or None
    if found is not None:
        state = fsshard.load(found, model, optimizer, scheduler).state
        epoch, losses = state["epoch"], state["losses"]
        if ctx.rank == 0:
            print(f"goes on from {found}, after epoch {epoch}", flush=True)

    sampler = DistributedSampler(samples(), ctx.world_size, ctx.rank)
    loader = DataLoader(samples(), args.batch_size // ctx.world_size, sampler=sampler)
    while epoch < args.epochs:
        sampler.set_epoch(epoch)  # the order follows from the epoch, so that nothing of the data need be saved
        total = torch.zeros((), device=ctx.device)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(ctx.device)), y.to(ctx.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach() / len(loader)
        scheduler.step()
        leaves = torch.tensor(float(told_to_leave.is_set()), device=ctx.device)
        dist.all_reduce(total)
        dist.all_reduce(leaves)  # the signal reaches one rank before another, and all must leave after the same epoch
        epoch, losses = epoch + 1, [*losses, float(total) / ctx.world_size]
        if ctx.rank == 0:
            print(f"epoch {epoch}: loss {losses[-1]!r}", flush=True)
        # All ranks call it, and each writes its shards, while the training goes on. The two newest stay.
        name = f"{args.folder}/epoch-{epoch:06d}"
        fsshard.save(name, model, optimizer, scheduler, block=False, keep=2, epoch=epoch, losses=losses)
        if leaves:
            break
    fsshard.wait_for_saves()
    return losses, model.state_dict()


def parse(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="checkpoints", help="which all ranks see")
    parser.add_argument("--backend", default="fsdp2", help="fsdp2, fsdp, ddp, fairscale")
    parser.add_argument("--nprocs", type=int, default=os.environ.get("WORLD_SIZE") or torch.cuda.device_count() or 2)
    parser.add_argument("--epochs", type=int, default=6, help="in all, those before included")
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = parse()
    fsshard.launch(train, args.nprocs, (args,), grace=60)
