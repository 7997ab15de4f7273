"""The same training after the migration: FSDP2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)

for step in range(20):
    samples = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))[rank::ranks]
    loss = nn.functional.mse_loss(model(samples), samples.sin().sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    optimizer.step()
    schedule.step()
dist.destroy_process_group()
