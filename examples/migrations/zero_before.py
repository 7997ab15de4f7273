"""DistributedDataParallel, with an optimizer for all parameters on each rank."""

import torch
import torch.distributed as dist
from task import Net, Waves
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

for inputs, targets in DataLoader(Waves(), batch_size=8, sampler=DistributedSampler(Waves(), shuffle=False)):
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
dist.destroy_process_group()
