"""Errors on Darcy flow with weights and gradients sent in half the bytes, beside those of other seeds.

    python benchmarks/darcy_seeds.py [--seeds 5] [--epochs 15]

The demo's TFNO, nearly all of it complex, is trained on one rank from each seed in float32 and with
``Precision(send=...)``: what is rounded is the same on any number of ranks and under every engine that takes it. The
last line says whether the change by rounding is within the spread of the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import fsshard
from fsshard.demo import darcy
from fsshard.demo.tfno_darcy import decode, losses

PRECISIONS: dict[str, Any] = {
    "float32": None,
    "bfloat16": fsshard.Precision(send=torch.bfloat16),
    "float16": fsshard.Precision(send=torch.float16),
}
BATCH = 20


def train(seed: int, precision: Any, epochs: int, data: darcy.DarcyData) -> float:
    """Return the relative L2 error on the test set of the training resolution."""
    from neuralop.models import TFNO

    torch.manual_seed(seed)
    model = TFNO(n_modes=(12, 12), in_channels=1, out_channels=1, hidden_channels=24, factorization="tucker", rank=0.42)
    sharded = fsshard.wrap(model, backend="ddp", mixed_precision=precision)
    optimizer = fsshard.build_optimizer(sharded, torch.optim.Adam, lr=5e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    h1, l2 = losses()
    for epoch in range(epochs):
        order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for batch in order.split(BATCH):
            h1(decode(sharded(data.train_x[batch]), data), data.train_y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    sharded.eval()
    x, y = data.tests[min(data.tests)]
    with torch.no_grad():
        return float(l2(decode(sharded(x), data), y))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    fsshard.init(process_group_backend="gloo", device="cpu")
    data = darcy.load(None, n_train=200, n_test=50)
    print(f"| seed | {' | '.join(PRECISIONS)} |\n|{'---|' * (len(PRECISIONS) + 1)}", flush=True)
    errors: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    for seed in range(options.seeds):
        for name, precision in PRECISIONS.items():
            errors[name].append(train(seed, precision, options.epochs, data))
        cells = [f"{100 * found[-1]:.2f} %" for found in errors.values()]
        print(f"| {seed} | {' | '.join(cells)} |", flush=True)
    spread = statistics.stdev(errors["float32"])
    within = True
    for name, found in errors.items():
        change = statistics.mean(found) - statistics.mean(errors["float32"])
        within = within and abs(change) <= spread
        print(f"{name}: mean {100 * statistics.mean(found):.2f} %, changed by {100 * change:+.2f} %")
    print(f"standard deviation over seeds {100 * spread:.2f} %; changes within it: {'yes' if within else 'NO'}")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
