"""A loop of plain torch in one process."""

import torch
from task import Net, Waves
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
loader = DataLoader(Waves(), batch_size=8)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

model.train()
for inputs, targets in loader:
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
