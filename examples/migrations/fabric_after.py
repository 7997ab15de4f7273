"""Fabric on two processes, which gives each of them a whole batch."""

import sys

import torch
from lightning.fabric import Fabric
from task import Net, Waves
from torch import nn
from torch.utils.data import DataLoader

MENDED = "--mended" in sys.argv

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
torch.manual_seed(0)
loader = DataLoader(Waves(), batch_size=8 // fabric.world_size if MENDED else 8)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)

model.train()
for inputs, targets in loader:
    loss = nn.functional.mse_loss(model(inputs), targets)
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
