"""One training that moves between numbers of ranks and engines, and keeps its bits: 2 ranks, then 8, then 1.

python examples/same_bits.py                    # two minutes on two cores; prints two sha256, which are equal
python examples/same_bits.py --plot curve.svg   # and draws the losses
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fsshard

LEAVES, SAMPLES = 8, 4
X = torch.linspace(-3, 3, 640).unsqueeze(1)
Y = torch.sin(2 * X) + 0.3 * X
MOVES = [("fairscale", 2, 20), ("fsdp2", 8, 40), ("none", 1, 60)]
"""Engine, ranks, and the step up to which they train."""


def train(context: Any, backend: str, until: int, folder: str) -> None:
    """Go on from the newest checkpoint in ``folder`` up to step ``until``; ranks share the leaves of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Dropout(0.05), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    model = fsshard.wrap(model, backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    newest = fsshard.latest(folder)
    losses = [] if newest is None else fsshard.load(newest, model, optimizer, scheduler=scheduler)["losses"]
    for step in range(len(losses), until):
        for leaf in model.leaves(LEAVES):
            samples = fsshard.leaf_samples(len(X), SAMPLES, leaves=LEAVES, step=step, leaf=leaf)
            nn.functional.mse_loss(model(X[samples]), Y[samples]).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        with torch.no_grad():
            losses.append(float(nn.functional.mse_loss(model.eval()(X), Y)))
        model.train()
    fsshard.save(f"{folder}/step{until}", model, optimizer, scheduler=scheduler, losses=losses)
    state = model.state_dict()
    if context.rank == 0:
        bits = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()
        Path(folder, "result.json").write_text(json.dumps({"sha256": bits, "losses": losses}))


def run(moves: list[tuple[str, int, int]]) -> dict[str, Any]:
    """Train one part after the other, and return the last one's losses and the weights' sha256."""
    with tempfile.TemporaryDirectory() as folder:
        for backend, ranks, until in moves:
            fsshard.launch(train, nprocs=ranks, args=(backend, until, folder), oversubscribe=True)
        result: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
        return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", help="a file for the picture")
    asked = parser.parse_args()
    moved, stayed = run(MOVES), run([("none", 1, 60)])
    print(f"2, 8 and 1 ranks: {moved['sha256']}\nnever moved:      {stayed['sha256']}")
    if asked.plot:
        from same_bits_picture import draw  # beside this file

        draw(asked.plot, MOVES, moved["losses"], stayed["losses"])
