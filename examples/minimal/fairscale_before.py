"""A script as it is written for FairScale: OSS, ShardedDDP, checkpoint_wrapper. It knows nothing of fsshard.

    python -m fsshard.compat fairscale_before.py              # FairScale need not be installed
    torchrun --nproc-per-node 2 -m fsshard.compat fairscale_before.py
    python -m fsshard.compat --report fairscale_before.py     # what it used of FairScale, and what to write instead

It learns a product of sines. What it became without FairScale is fairscale_after.py; both print the same losses.
Under FairScale itself (``python fairscale_before.py``) these are others from the second step on, and wrong: since torch
2.0 ``optimizer.zero_grad()`` leaves ShardedDDP with the gradients of the step before.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fairscale.nn.checkpoint import checkpoint_wrapper
from fairscale.nn.data_parallel import ShardedDataParallel as ShardedDDP
from fairscale.optim.oss import OSS
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.layers(x)


def build_model(width=32, depth=3):
    torch.manual_seed(0)
    blocks = [checkpoint_wrapper(Block(width)) for _ in range(depth)]
    return nn.Sequential(nn.Linear(2, width), *blocks, nn.Linear(width, 1))


def samples():
    x = torch.rand(256, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (3 * x).sin().prod(dim=1, keepdim=True))


def train(rank, world_size, epochs=5):
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    model = build_model().to(device)
    optimizer = OSS(params=model.parameters(), optim=torch.optim.AdamW, lr=1e-2)
    model = ShardedDDP(model, optimizer)

    sampler = DistributedSampler(samples(), world_size, rank)
    loader = DataLoader(samples(), 32 // world_size, sampler=sampler)
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
        losses.append(float(total) / world_size)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {losses[-1]!r}", flush=True)
    return losses


def spawned(rank, world_size, rendezvous):
    torch.set_num_threads(1)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    train(rank, world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        train(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(spawned, args=(2, f"{folder}/rendezvous"), nprocs=2)
