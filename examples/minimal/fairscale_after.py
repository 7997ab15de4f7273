"""The training of fairscale_before.py without FairScale, the same to the last bit, under any engine.

    python fairscale_after.py
    python fairscale_after.py --backend ddp                    # or fsdp, fairscale
    torchrun --nproc-per-node 2 fairscale_after.py

``diff fairscale_before.py fairscale_after.py`` shows what changed: ``checkpoint_wrapper``, ``OSS`` and ``ShardedDDP``
became ``wrap`` and ``build_optimizer``, and what started the processes became ``launch``.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fsshard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.layers(x)


def build_model(width=32, depth=3):
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(depth)]
    return nn.Sequential(nn.Linear(2, width), *blocks, nn.Linear(width, 1))


def samples():
    x = torch.rand(256, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (3 * x).sin().prod(dim=1, keepdim=True))


def train(ctx, args, epochs=5):
    device = ctx.device
    model = build_model().to(device)
    model = fsshard.wrap(model, backend=args.backend, auto_wrap_policy={Block}, activation_checkpointing={Block})
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-2)

    sampler = DistributedSampler(samples(), ctx.world_size, ctx.rank)
    loader = DataLoader(samples(), 32 // ctx.world_size, sampler=sampler)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader)
        dist.all_reduce(total)
        losses.append(float(total) / ctx.world_size)
        if ctx.rank == 0:
            print(f"epoch {epoch + 1}: loss {losses[-1]!r}", flush=True)
    return losses


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fsdp2", help="fsdp2, fsdp, ddp, fairscale")
    parser.add_argument("--nprocs", type=int, default=os.environ.get("WORLD_SIZE") or torch.cuda.device_count() or 2)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = parse()
    fsshard.launch(train, args.nprocs, (args,))
