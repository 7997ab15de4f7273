"""A FairScale script as its tutorial writes one: OSS, ShardedDDP, checkpoint_wrapper and ShardedGradScaler, mp.spawn.

It learns the pressure of Darcy flow (see darcy.py) from the picture of the ground, with a network of dense layers. It
knows nothing of fsshard; both of these train the same, to the last bit::

    python examples/fairscale_oss.py                       # FairScale 0.4.13 itself
    python -m fsshard.compat examples/fairscale_oss.py     # the same names, served by torch and fsshard

``--zero-grad optimizer`` is the other way to forget gradients that scripts use. Under FairScale it trains on gradients
of the step before, silently, since torch 2.0. What this script is without FairScale: fairscale_oss_rewritten.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a script from anywhere

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fairscale.nn.checkpoint.checkpoint_activations import checkpoint_wrapper
from fairscale.nn.data_parallel import ShardedDataParallel as ShardedDDP
from fairscale.optim.grad_scaler import ShardedGradScaler
from fairscale.optim.oss import OSS
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
        self.blocks = nn.Sequential(*(checkpoint_wrapper(FeedForward(width)) for _ in range(blocks)))
        self.last = nn.Linear(width, POINTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


def train(rank: int, args: argparse.Namespace, rendezvous: str) -> None:
    """Train on one rank; every rank calls it."""
    on_gpu = torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=args.nprocs
    )
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    torch.set_num_threads(1)
    loader, test = load(rank, args)

    torch.manual_seed(0)
    model = Network(args.width, args.blocks).to(device)
    optimizer = OSS(params=model.parameters(), optim=torch.optim.AdamW, lr=args.lr)
    model = ShardedDDP(model, optimizer)
    scaler = ShardedGradScaler()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    for epoch in range(args.epochs):
        model.train()
        loader.sampler.set_epoch(epoch)
        total = torch.zeros((), dtype=torch.float64)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            if args.zero_grad == "model":
                model.zero_grad()
            else:
                optimizer.zero_grad()
            with torch.autocast(device.type, enabled=on_gpu):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach().double().cpu()
        scheduler.step()
        show(rank, epoch, total / len(loader), device)
    model.eval()
    with torch.no_grad():
        x, y = (each.to(device) for each in test)
        error = ((model(x) - y).norm(dim=1) / y.norm(dim=1)).mean()
    if rank == 0:
        print(f"relative error on unseen ground: {float(error)!r}", flush=True)
    dist.destroy_process_group()


def load(rank: int, args: argparse.Namespace) -> tuple[DataLoader, tuple[Tensor, Tensor]]:
    """This rank's batches, and the test set; pressures in units of their standard deviation."""
    data = darcy.load(n_train=args.n_train, n_test=args.n_test)
    unit = data.train_y.std()
    train_set = TensorDataset(data.train_x.flatten(1), data.train_y.flatten(1) / unit)
    sampler = DistributedSampler(train_set, args.nprocs, rank, seed=0)
    loader = DataLoader(train_set, args.batch_size // args.nprocs, sampler=sampler)
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
    parser.add_argument("--nprocs", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=40, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--n-train", type=int, default=1000)
    parser.add_argument("--n-test", type=int, default=50)
    parser.add_argument("--zero-grad", choices=["model", "optimizer"], default="model")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse()
    darcy.load(n_train=args.n_train, n_test=args.n_test)  # solved here once; the ranks read the cache
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(args, f"{folder}/rendezvous"), nprocs=args.nprocs, join=True)
