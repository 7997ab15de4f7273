"""The same script for torchrun, which sets the rank and the number of ranks, and one thread for each."""

import os
import sys

import torch
import torch.distributed as dist
from task import Net, Waves
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

MENDED = "--mended" in sys.argv


def main():
    if MENDED:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    dist.init_process_group("gloo")
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
    main()
