"""Train an FNO on Darcy flow twice: with AdamW, and with a Muon per mode of its spectral weights beside AdamW.

    python examples/muon_per_mode.py
    python examples/muon_per_mode.py --backend fsdp --n-train 1000 --epochs 20
    torchrun --nproc-per-node 2 examples/muon_per_mode.py

A spectral weight multiplies the channels of each Fourier mode by a complex matrix of its own, which is what Muon makes
orthogonal. ``see="modes"`` shows the class these matrices, whole and complex, under every engine: the class below knows
nothing of shards. Both errors on unseen samples are printed, whichever is less. The data are solved for on this
machine, once.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from neuralop import H1Loss, LpLoss
from neuralop.models import FNO
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fsshard
from fsshard.demo import darcy


class Muon(torch.optim.Optimizer):
    """Muon for groups with ``muon=True``, AdamW for the others; complex numbers count as such in both.

    Matrices come one by one or in a stack: all is done to the last two dims.
    """

    def __init__(self, params: Any, lr: float, muon: bool = False, weight_decay: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "muon": muon, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    update = self.muon if group["muon"] else self.adam
                    parameter.sub_(group["lr"] * update(parameter.grad, self.state[parameter]))

    def muon(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the momentum with all singular values near 1, by Newton-Schulz (kellerjordan.github.io/posts/muon)."""
        momentum = state.setdefault("momentum", torch.zeros_like(gradient)).lerp_(gradient, 0.05)
        x = gradient.lerp(momentum, 0.95)  # Nesterov's
        x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-12)
        for _ in range(5):
            square = x @ x.mH  # .mH, not .mT: of complex matrices it is another algorithm
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        return x

    def adam(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        """Return Adam's direction, with |g|^2 of complex numbers."""
        if not state:
            state.update(step=0, mean=torch.zeros_like(gradient), square=torch.zeros_like(gradient.abs()))
        state["step"] += 1
        state["mean"].lerp_(gradient, 0.1)
        state["square"].lerp_(gradient.abs().square(), 0.001)
        size = (state["square"] / (1 - 0.999 ** state["step"])).sqrt() + 1e-8
        return state["mean"] / (1 - 0.9 ** state["step"]) / size


def build_optimizer(model: nn.Module, name: str, args: argparse.Namespace) -> Any:
    """Return AdamW over all weights, or one optimizer in which the spectral ones have Muon."""
    names = [name for name, _ in model.named_parameters()]
    if name == "AdamW":
        return fsshard.build_optimizer(model, Muon, whole=True, lr=args.lr)  # its groups without muon=True
    spectral = [name for name in names if name.endswith("weight.tensor")]  # (in, out, *modes)
    groups = [
        {"params": spectral, "see": "modes", "muon": True, "lr": args.muon_lr},
        {"params": [name for name in names if name not in spectral]},
    ]
    return fsshard.build_optimizer(model, Muon, groups, whole=True, lr=args.lr)


def train(ctx: fsshard.Context, args: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Return, by optimizer, the relative L2 error at each resolution. Runs on every rank."""
    data = darcy.load(n_train=args.n_train, n_test=args.n_test)
    mean, std = data.train_y.mean(), data.train_y.std()  # the network predicts pressures in these units
    loss_of = H1Loss(d=2, reduction="mean", periodic_in_x=False, periodic_in_y=False)
    error_of = LpLoss(d=2, p=2, reduction="mean")
    samples = TensorDataset(data.train_x, data.train_y)
    errors: dict[str, dict[int, float]] = {}
    for name in ("AdamW", "Muon per mode"):
        torch.manual_seed(args.seed)
        model = FNO(n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=32, projection_channel_ratio=2)
        model = fsshard.wrap(model.to(ctx.device), backend=args.backend)
        optimizer = build_optimizer(model, name, args)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
        sampler: Any = DistributedSampler(samples, ctx.world_size, ctx.rank, seed=args.seed)
        loader: Any = DataLoader(samples, args.batch_size // ctx.world_size, sampler=sampler)
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                loss_of(model(x.to(ctx.device)) * std + mean, y.to(ctx.device)).backward()
                model.clip_grad_norm_(1.0)
                optimizer.step()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            predicted = {size: model(x.to(ctx.device)).cpu() * std + mean for size, (x, _) in data.tests.items()}
        errors[name] = {size: float(error_of(y, data.tests[size][1])) for size, y in predicted.items()}
        if ctx.rank == 0:
            told = ", ".join(f"{error:.1%} at {size} x {size}" for size, error in errors[name].items())
            print(f"{name}: relative L2 error {told}", flush=True)
    return errors


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the settings of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fsdp2", help="fsdp2, fsdp, ddp, fairscale")
    parser.add_argument("--nprocs", type=int, default=os.environ.get("WORLD_SIZE") or torch.cuda.device_count() or 2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=8e-3, help="of AdamW")
    parser.add_argument("--muon-lr", type=float, default=8e-3)
    parser.add_argument("--n-train", type=int, default=200)
    parser.add_argument("--n-test", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = parse()
    darcy.load(n_train=args.n_train, n_test=args.n_test)  # solved here, so that the ranks find the data
    fsshard.launch(train, args.nprocs, (args,))
