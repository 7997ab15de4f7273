"""The training of fairscale_oss.py without FairScale: by fsshard.wrap, the same to the last bit, on any engine.

    python examples/fairscale_oss_rewritten.py                       # FSDP2
    python examples/fairscale_oss_rewritten.py --backend ddp         # or fsdp, fairscale

``diff examples/fairscale_oss.py examples/fairscale_oss_rewritten.py`` is the whole of the rewriting.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a script from anywhere

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fsshard
from fsshard.demo import darcy

POINTS = 16 * 16


class FeedForward(nn.Module):
    """A residual block, which is most of the network and most of its activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Network(nn.Module):
    """From the picture of the ground to the pressure, point by point."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(POINTS, width)
        self.blocks = nn.Sequential(*(FeedForward(width) for _ in range(blocks)))
        self.last = nn.Linear(width, POINTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


def train(ctx: fsshard.Context, args: argparse.Namespace) -> None:
    """Train on one rank; every rank calls it."""
    device = ctx.device
    loader, test = load(ctx, args)

    torch.manual_seed(0)
    model = Network(args.width, args.blocks).to(device)
    blocks = {FeedForward}
    model = fsshard.wrap(model, backend=args.backend, auto_wrap_policy=blocks, activation_checkpointing=blocks)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=args.lr)
    scaler = fsshard.GradScaler(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    for epoch in range(args.epochs):
        model.train()
        loader.sampler.set_epoch(epoch)
        total = torch.zeros((), dtype=torch.float64)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, enabled=device.type == "cuda"):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach().double().cpu()
        scheduler.step()
        show(ctx.rank, epoch, total / len(loader), device)
    model.eval()
    with torch.no_grad():
        x, y = (each.to(device) for each in test)
        error = ((model(x) - y).norm(dim=1) / y.norm(dim=1)).mean()
    if ctx.rank == 0:
        print(f"relative error on unseen ground: {float(error)!r}", flush=True)


def load(ctx: fsshard.Context, args: argparse.Namespace) -> tuple[DataLoader, tuple[Tensor, Tensor]]:
    """This rank's batches, and the test set; pressures in units of their standard deviation."""
    data = darcy.load(n_train=args.n_train, n_test=args.n_test)
    unit = data.train_y.std()
    train_set = TensorDataset(data.train_x.flatten(1), data.train_y.flatten(1) / unit)
    sampler = DistributedSampler(train_set, ctx.world_size, ctx.rank, seed=0)
    loader = DataLoader(train_set, args.batch_size // ctx.world_size, sampler=sampler)
    x, y = data.tests[16]
    return loader, (x.flatten(1), y.flatten(1) / unit)


def show(rank: int, epoch: int, loss: Tensor, device: torch.device) -> None:
    """Print the mean over the ranks, with all of its digits."""
    loss = loss.to(device)
    dist.all_reduce(loss)
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {float(loss) / dist.get_world_size()!r}", flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fsdp2", help="fsdp2, fsdp, ddp, fairscale")
    parser.add_argument("--nprocs", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=40, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--n-train", type=int, default=1000)
    parser.add_argument("--n-test", type=int, default=50)
    return parser.parse_args()


if __name__ == "__main__":
    args = parse()
    darcy.load(n_train=args.n_train, n_test=args.n_test)  # solved here once; the ranks read the cache
    fsshard.launch(train, args.nprocs, (args,))
