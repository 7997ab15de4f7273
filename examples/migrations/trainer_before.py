"""A loop of plain torch, with the schedule that Hugging Face's Trainer has by default."""

import torch
from task import Net, Waves
from torch import nn
from torch.utils.data import DataLoader
from transformers import get_scheduler

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Waves(), batch_size=8)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=len(loader))

model.train()
for inputs, targets in loader:
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
