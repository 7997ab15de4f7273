"""The memory table of neuraloperator's FSDP tutorial, for every backend, without a GPU.

    python benchmarks/tfno_memory.py [--world-size 4] [--samples 32] [--plot tfno.png]

TFNO(n_modes=(64, 64), hidden_channels=256, projection_channels=512, factorization="tucker", rank=0.42), Adam as it is
on a GPU (foreach=True), 32 samples of 16 x 16 per rank, float32, 4 ranks. The tutorial measured 10.498061 GB under DDP
and 6.566593 GB under FSDP with the whole model as one unit: a ratio of 0.6255. It says GB and means
GiB: 6.554 GiB are 7.037 GB. It does not say how many samples a rank had when it measured, of the 10 that it loads in
batches of 32; up to 32 they do not matter, as the lines below the table show. Estimates count tensors; what CUDA and
cuBLAS take for themselves is not in them. The last row is the plan that fsshard.tune finds for the least peak, and what
it sends for that; as code it is printed below the table.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from fsshard.recipes.recipe import Recipe
from fsshard.simulation.estimating import estimate
from fsshard.simulation.result import Estimate
from fsshard.simulation.tuning.tuning import tune

TUTORIAL = {"ddp": 10.498061, "fsdp, one unit": 6.566593}
"""GiB, where the tutorial says GB."""

OTHER_SAMPLES = (3, 8, 10)

ROWS: dict[str, Mapping[str, Any]] = {
    "ddp": {"backend": "ddp"},
    "ddp, bucket views": {"backend": "ddp", "gradient_as_bucket_view": True},
    "fairscale": {"backend": "fairscale"},
    "fsdp, one unit": {"backend": "fsdp", "auto_wrap_policy": None},
    "fsdp": {"backend": "fsdp"},
    "fsdp2, one unit": {"backend": "fsdp2", "auto_wrap_policy": None},
    "fsdp2": {"backend": "fsdp2"},
    "fsdp2, blocks recomputed": {"backend": "fsdp2", "activation_checkpointing": True},
}
"""Arguments of the runs that are estimated; by default each convolution is a unit (``auto_wrap_policy="auto"``)."""


def build() -> nn.Module:
    """The tutorial's model; neuraloperator 2.0 takes the width of the projection as a ratio."""
    from neuralop.models import TFNO

    model: nn.Module = TFNO(
        n_modes=(64, 64),
        in_channels=1,
        out_channels=1,
        hidden_channels=256,
        projection_channel_ratio=2,
        factorization="tucker",
        rank=0.42,
    )
    return model


def batches(samples: int, rank: int, world_size: int, number: int) -> dict[str, Tensor]:
    """Fields as large as the tutorial's."""
    return {"x": torch.zeros(samples, 1, 16, 16), "y": torch.zeros(samples, 1, 16, 16)}


def loss(model: Callable[..., Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Mean square of the error."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def tutorial(samples: int = 32) -> Recipe:
    """``fsshard estimate benchmarks.tfno_memory:tutorial --device cuda --world-size 4``."""
    hyper = {"lr": 8e-3, "weight_decay": 1e-4}
    made = functools.partial(batches, samples)
    return Recipe(build=build, batches=made, loss=loss, hyper=hyper, name="TFNO of the tutorial")


def line(name: str, one: Estimate, reference: Estimate) -> str:
    """A row of the table."""
    told = f"{TUTORIAL[name]:.3f}" if name in TUTORIAL else ""
    cells = [
        name,
        f"{one.peak / 2**30:.3f}",
        told,
        f"{one.peak / reference.peak:.4f}",
        f"{one.peak / one.bounds.peak:.2f}",
        f"{one.sent / one.parameters:.2f}",
        str(sum(traffic.count for traffic in one.collectives)),
        str(one.moment),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--samples", type=int, default=32, help="per rank")
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    head = ["", "GiB per rank", "tutorial", "of ddp", "of its bound", "sent / parameters", "collectives", "peak at"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    found: dict[str, Estimate] = {}
    for name, settings in ROWS.items():
        found[name] = estimate(tutorial(options.samples), world_size=options.world_size, device="cuda", **settings)
        print(line(name, found[name], found["ddp"]), flush=True)
    tuned = tune(tutorial(options.samples), backend="fsdp2", world_size=options.world_size, device="cuda")
    print(line("fsdp2, tuned", tuned.winner.estimate, found["ddp"]), flush=True)
    best = tuned.winner.estimate
    kinds = {kind: (held / 2**30, best.bounds.by_kind.get(kind, 0) / 2**30) for kind, held in best.by_kind.items()}
    told = ", ".join(f"{kind} {held:.3f} ({bound:.3f})" for kind, (held, bound) in kinds.items() if held > 0.001)
    print(f"\nThe tuned plan's peak by kind, in GiB, and the bound of each: {told}.\n\n{tuned.code()}", flush=True)
    print("\nIts two rows with other numbers of samples per rank, in GiB:\n")
    for samples in OTHER_SAMPLES:
        peaks = [
            estimate(tutorial(samples), world_size=options.world_size, device="cuda", **ROWS[n]).peak for n in TUTORIAL
        ]
        print(f"- {samples}: " + ", ".join(f"{n} {peak / 2**30:.3f}" for n, peak in zip(TUTORIAL, peaks, strict=True)))
    if options.plot:
        from fsshard.simulation.result import plot

        plot([one for name, one in found.items() if name in ("ddp", "fairscale", "fsdp", "fsdp2")], options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
