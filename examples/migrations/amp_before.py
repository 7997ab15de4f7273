"""Mixed precision by the names that torch 2.4 has deprecated, those of one device."""

import torch
from task import Net, Waves
from torch import nn
from torch.utils.data import DataLoader

amp = torch.cuda.amp if torch.cuda.is_available() else torch.cpu.amp
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = amp.GradScaler()

for inputs, targets in DataLoader(Waves(), batch_size=8):
    with amp.autocast():
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
