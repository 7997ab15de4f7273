"""FSDP2, with its initialization on the meta device: weights are drawn shard by shard."""

import sys

import torch
import torch.distributed as dist
from task import Block, Net, Waves
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

MENDED = "--mended" in sys.argv


def init_weights(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
with torch.device("cpu" if MENDED else "meta"):
    model = Net()
for module in model.modules():
    if isinstance(module, Block):
        fully_shard(module, mesh=mesh)
fully_shard(model, mesh=mesh)
if not MENDED:
    model.to_empty(device="cpu")
    model.apply(init_weights)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for inputs, targets in DataLoader(Waves(), batch_size=8, sampler=DistributedSampler(Waves(), shuffle=False)):
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
dist.destroy_process_group()
