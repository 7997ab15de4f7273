"""Lightning's Trainer, which steps a schedule after each epoch unless it is told otherwise."""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from task import Net, Waves
from torch import nn
from torch.utils.data import DataLoader

MENDED = "--mended" in sys.argv


class LitModel(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, number):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        if MENDED:
            scheduler = {"scheduler": scheduler, "interval": "step"}
        return [optimizer], [scheduler]


if __name__ == "__main__":
    torch.manual_seed(0)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", **quiet)
    trainer.fit(LitModel(), DataLoader(Waves(), batch_size=8))
