"""FairScale as its tutorial has it: OSS, ShardedDDP, and a loss that is divided by the number of ranks."""

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS
from task import Net, Waves
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
model = Net()
optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=1e-2, momentum=0.9)
model = ShardedDataParallel(model, optimizer)

for inputs, targets in DataLoader(Waves(), batch_size=8, sampler=DistributedSampler(Waves(), shuffle=False)):
    model.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss /= dist.get_world_size()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
