"""A loop over DistributedDataParallel, with a schedule that is stepped after each batch."""

import torch
import torch.distributed as dist
from task import Net, Waves
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
sampler = DistributedSampler(Waves())

for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(Waves(), batch_size=8, sampler=sampler):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
dist.destroy_process_group()
