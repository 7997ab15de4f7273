"""torch's FSDP, which FairScale recommends instead, in the loop of torch's tutorial: its loss is not divided."""

import sys

import torch
import torch.distributed as dist
from task import Block, Net, Waves
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler

MENDED = "--mended" in sys.argv

dist.init_process_group("gloo")
torch.manual_seed(0)
model = FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

for inputs, targets in DataLoader(Waves(), batch_size=8, sampler=DistributedSampler(Waves(), shuffle=False)):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    if MENDED:
        loss /= dist.get_world_size()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
