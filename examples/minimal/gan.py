"""Train two models at once: a generator with complex Fourier weights, and a critic; one checkpoint holds both.

    python gan.py --nprocs 2 --backend fsdp2
    python gan.py --nprocs 4 --backend ddp --steps 400        # goes on from ckpt/gan where there is one

The generator makes periodic functions out of noise, and the critic, a convolution, tells them from sampled ones: sums
of three waves of random phases. Printed is the share of power in the wavenumbers that the samples have.
"""

import argparse
import os

import torch
from torch import nn
from torch.nn.functional import softplus

import fsshard

POINTS, MODES, NOISE = 32, 8, 16
WAVES = (1, 2, 4)  # of the samples


class Generator(nn.Module):
    """From noise to the Fourier coefficients of a function: the last weight is complex."""

    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(NOISE, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.modes = nn.Parameter(torch.randn(width, MODES, dtype=torch.complex64) / width**0.5)

    def forward(self, z):
        return torch.fft.irfft(self.body(z).to(torch.complex64) @ self.modes, n=POINTS, norm="forward")


def build_critic(width=32):
    layers = [nn.Conv1d(1, width, 5, padding=2, padding_mode="circular"), nn.LeakyReLU(0.2)]
    layers += [nn.Conv1d(width, width, 5, stride=2, padding=2, padding_mode="circular"), nn.LeakyReLU(0.2)]
    return nn.Sequential(nn.Unflatten(1, (1, POINTS)), *layers, nn.Flatten(), nn.Linear(width * POINTS // 2, 1))


def samples(count, generator):
    """Sums of waves of random phases, and noise."""
    x = torch.arange(POINTS) * (2 * torch.pi / POINTS)
    phases = 2 * torch.pi * torch.rand(count, len(WAVES), 1, generator=generator)
    y = sum((k * x + phases[:, i]).cos() / k for i, k in enumerate(WAVES))
    return y, torch.randn(count, NOISE, generator=generator)


@torch.no_grad()
def share_of_power(functions):
    power = torch.fft.rfft(functions).abs().square().mean(dim=0)
    return float(power[list(WAVES)].sum() / power.sum())


def train(ctx, args):
    """Runs on every rank, each in its own process."""
    torch.manual_seed(0)
    g = fsshard.wrap(Generator().to(ctx.device), backend=args.backend)
    d = fsshard.wrap(build_critic().to(ctx.device), backend=args.backend)
    og = fsshard.build_optimizer(g, torch.optim.Adam, lr=2e-3, betas=(0.5, 0.99))
    od = fsshard.build_optimizer(d, torch.optim.Adam, lr=2e-3, betas=(0.5, 0.99))
    ema = fsshard.EMA(g, decay=0.98)
    models, optimizers, done = {"g": g, "d": d}, {"g": og, "d": od}, 0
    found = fsshard.latest(args.path)  # None where there is none yet
    if found is not None:
        done = fsshard.load(found, models, optimizers, ema=ema).state["done"]

    losses = []
    for step in range(done, args.steps):
        seed = torch.Generator().manual_seed(ctx.world_size * step + ctx.rank)
        real, z = (part.to(ctx.device) for part in samples(args.batch_size // ctx.world_size, seed))
        loss_d = softplus(-d(real)).mean() + softplus(d(g(z).detach())).mean()
        loss_d.backward()
        d.clip_grad_norm_(10.0)
        od.step()
        loss_g = softplus(-d(g(z))).mean()
        loss_g.backward()
        g.clip_grad_norm_(10.0)  # fsshard.clip_grad_norm_([g, d], 10.0), where one loss trains both
        og.step()
        ema.update()
        og.zero_grad()
        od.zero_grad()  # of the generator's loss, too, which has gone through the critic
        losses.append((loss_d.item(), loss_g.item()))

    fsshard.save(args.path, models, optimizers, ema=ema, done=max(done, args.steps))
    with ema.swapped(), torch.no_grad():  # all ranks evaluate
        made = g(torch.randn(256, NOISE, generator=torch.Generator().manual_seed(1)).to(ctx.device))
    share = share_of_power(made)
    if ctx.rank == 0 and losses:
        print(f"steps {done} to {args.steps}: losses {losses[-1]}, power in the right waves {share:.3f}", flush=True)
    return losses, share, {name: model.state_dict() for name, model in models.items()}


def parse(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fsdp2", help="fsdp2, fsdp, ddp, fairscale")
    parser.add_argument("--nprocs", type=int, default=os.environ.get("WORLD_SIZE") or torch.cuda.device_count() or 2)
    parser.add_argument("--path", default="ckpt/gan", help="of the checkpoint, on a disk that all ranks see")
    parser.add_argument("--steps", type=int, default=200, help="in all, those before included")
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = parse()
    fsshard.launch(train, args.nprocs, (args,))
