"""DistributedDataParallel: each process sums over its part of the batch, and gradients are averaged, not added up."""

import sys

import torch
import torch.distributed as dist
from task import Net, Waves
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

MENDED = "--mended" in sys.argv

dist.init_process_group("gloo")
ranks = dist.get_world_size()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
sampler = DistributedSampler(Waves(), shuffle=False)  # it shuffles unless it is told

for inputs, targets in DataLoader(Waves(), batch_size=16 // ranks, sampler=sampler):
    loss = nn.functional.mse_loss(model(inputs), targets, reduction="sum")
    if MENDED:
        loss = loss * ranks
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
