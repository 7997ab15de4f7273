"""The model and the samples of all pairs, which guides take as given."""

import torch
from torch import nn
from torch.utils.data import Dataset


class Block(nn.Module):
    """A unit of FSDP."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(4, 16), nn.Sequential(Block(), Block()), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))


class Waves(Dataset):
    """64 samples: four numbers, and the sum of their sines."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, x.sin().sum(0, keepdim=True)
