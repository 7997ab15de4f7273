"""DataParallel: one process divides each batch among GPUs, and the loss is a sum over the whole batch."""

import torch
from task import Net, Waves
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = nn.DataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

for inputs, targets in DataLoader(Waves(), batch_size=16):
    loss = nn.functional.mse_loss(model(inputs), targets, reduction="sum")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
