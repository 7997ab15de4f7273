r"""One script under python, torchrun and SLURM: ``fsshard.launch`` without a number of ranks joins what was started.

    python torchrun_slurm.py --nprocs 2          # starts the ranks itself: one for each GPU by default, two on CPU
    torchrun --nproc-per-node 8 torchrun_slurm.py
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host0:29500 torchrun_slurm.py
    srun --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 --gpu-bind none python torchrun_slurm.py

As a batch job, ``sbatch job.sh`` with this in ``job.sh``::

    #!/bin/bash
    #SBATCH --nodes=2
    #SBATCH --ntasks-per-node=8
    #SBATCH --gpus-per-node=8
    #SBATCH --time=00:10:00
    srun --gpu-bind=none python torchrun_slurm.py

Every rank prints where it is, then they train together. Of several failures the first one is told, with its rank.
"""

import argparse
import os
import socket

import torch
import torch.distributed as dist
from torch import nn

import fsshard


def train(ctx, args):
    """Runs on every rank; ``ctx`` says which one this is."""
    place = f"rank {ctx.rank} of {ctx.world_size}, {ctx.local_rank} of {ctx.local_world_size} on {socket.gethostname()}"
    print(f"{place}: {ctx.device}, {ctx.backend}", flush=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).to(ctx.device)
    model = fsshard.wrap(model)  # backend="auto": fsdp2, or none on one process
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-2)
    losses = []
    for step in range(args.steps):
        x = torch.rand(32, 2, generator=torch.Generator().manual_seed(1000 * step + ctx.rank)).to(ctx.device)
        loss = nn.functional.mse_loss(model(x), (3 * x).sin().prod(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / ctx.world_size)
    if ctx.rank == 0:
        print(f"{model.backend.name}: loss {losses[0]:.4f} in step 1, {losses[-1]:.4f} in step {len(losses)}")
    return losses


def parse(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    launched = "RANK" in os.environ or "SLURM_STEP_ID" in os.environ
    ranks = None if launched else torch.cuda.device_count() or 2
    parser.add_argument("--nprocs", type=int, default=ranks, help="ranks to start here; not under torchrun and SLURM")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a rank waits for the others")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = parse()
    fsshard.launch(train, args.nprocs, (args,), timeout=args.timeout)
