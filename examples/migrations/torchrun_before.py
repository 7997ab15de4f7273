"""A script that spawns its ranks: python torchrun_before.py"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from task import Net, Waves
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


def main(rank, ranks, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(Waves())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(Waves(), batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, args=(2, f"{folder}/rendezvous"), nprocs=2)
