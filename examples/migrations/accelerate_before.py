"""A loop of plain torch in one process."""

import torch
from task import Net, Waves
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
loader = DataLoader(Waves(), batch_size=16)
loss_function = torch.nn.MSELoss()

for inputs, targets in loader:
    optimizer.zero_grad()
    loss = loss_function(model(inputs), targets)
    loss.backward()
    optimizer.step()
    scheduler.step()
