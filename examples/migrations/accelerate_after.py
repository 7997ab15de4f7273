"""The same on two processes: Accelerate gives each a batch of its own, and steps the schedule once per process."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from task import Net, Waves
from torch.utils.data import DataLoader

MENDED = "--mended" in sys.argv

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=MENDED))
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
loader = DataLoader(Waves(), batch_size=16 if MENDED else 16 // accelerator.num_processes)
loss_function = torch.nn.MSELoss()
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

for inputs, targets in loader:
    optimizer.zero_grad()
    loss = loss_function(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
accelerator.end_training()
