"""A neural operator with complex weights on Darcy flow, in a plain training loop on two ranks.

    python tfno_loop.py
    python tfno_loop.py --backend ddp --n-train 1000 --epochs 20
    torchrun --nproc-per-node 2 tfno_loop.py

It prints the loss of every epoch, the error on samples that it has not seen, at two resolutions, and what is in each
rank's memory. The data are solved for on this machine, once. The losses are the same under every engine.
"""

import argparse
import os

import torch
import torch.distributed as dist
from neuralop import H1Loss, LpLoss
from neuralop.models import TFNO
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fsshard
from fsshard.demo import darcy


def train(ctx, args):
    """Runs on every rank, each in its own process."""
    data = darcy.load(n_train=args.n_train, n_test=args.n_test)
    mean, std = data.train_y.mean(), data.train_y.std()  # the network predicts pressures in these units

    torch.manual_seed(0)
    model = TFNO(n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=32, projection_channel_ratio=2)
    model = fsshard.wrap(model.to(ctx.device), backend=args.backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=args.lr, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    loss_of = H1Loss(d=2, reduction="mean", periodic_in_x=False, periodic_in_y=False)

    samples = TensorDataset(data.train_x, data.train_y)
    sampler = DistributedSampler(samples, ctx.world_size, ctx.rank)  # each rank sees other samples
    loader = DataLoader(samples, args.batch_size // ctx.world_size, sampler=sampler)
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=ctx.device)
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model(x.to(ctx.device)) * std + mean, y.to(ctx.device))
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            total += loss.detach() / len(loader)
        scheduler.step()
        dist.all_reduce(total)  # for the print only: gradients have been averaged by the engine
        losses.append(float(total) / ctx.world_size)
        if ctx.rank == 0:
            print(f"epoch {epoch + 1}: loss {losses[-1]:.4f}", flush=True)
    memory = model.memory_report(all_ranks=True)
    errors = evaluate(ctx, model, data, mean, std)
    weights = model.state_dict()  # whole, complex, under neuralop's names; on every rank
    if ctx.rank == 0:
        print(*(f"relative L2 error at {size} x {size}: {error:.1%}" for size, error in errors.items()), sep="\n")
        print(memory, flush=True)
    return losses, errors, weights


@torch.no_grad()
def evaluate(ctx, model, data, mean, std):
    """On pictures of the resolution of the training, and of twice that."""
    model.eval()
    l2 = LpLoss(d=2, p=2, reduction="mean")
    return {size: float(l2(model(x.to(ctx.device)).cpu() * std + mean, y)) for size, (x, y) in data.tests.items()}


def parse(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fsdp2", help="fsdp2, fsdp, ddp, fairscale")
    parser.add_argument("--nprocs", type=int, default=os.environ.get("WORLD_SIZE") or torch.cuda.device_count() or 2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--n-train", type=int, default=200)
    parser.add_argument("--n-test", type=int, default=20)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = parse()
    darcy.load(n_train=args.n_train, n_test=args.n_test)  # solved here, so that the ranks find the data
    fsshard.launch(train, args.nprocs, (args,))
