"""Bytes of activations that one forward keeps for its backward, with and without recomputed blocks, per backend.

    python benchmarks/activation_memory.py [--world-size 2]

Counted where autograd saves a tensor, every storage once, parameters excluded; of a block that is recomputed its inputs
count. Bytes, not seconds: the table is the same at every run.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

import fsshard
from fsshard.launching.pool import RankPool
from fsshard.recipes.models import small_t5

BACKENDS = ("none", "ddp", "fsdp", "fsdp2", "fairscale")


def t5() -> nn.Module:
    return small_t5(words=384, width=64, heads=4, layers=6)


def words() -> dict[str, Tensor]:
    tokens = torch.randint(1, 384, (4, 2, 128))
    return {"input_ids": tokens[:, 0].contiguous(), "labels": tokens[:, 1, :32].contiguous()}


def tfno() -> nn.Module:
    from neuralop.models import TFNO

    return TFNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16, n_layers=4, factorization="tucker")


def images() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 1, 32, 32)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "t5": (t5, words),
    "tfno": (tfno, images),
}
"""Name -> model and one batch."""


def saved_bytes(name: str, backend: str, choice: Any) -> tuple[int, int]:
    """Bytes saved by one training forward, and how many blocks are recomputed; collective."""
    torch.manual_seed(0)
    build, batch = MODELS[name]
    model = fsshard.wrap(build(), backend=backend, activation_checkpointing=choice)
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    parameters = storages_of_parameters(model.module)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # of FSDP2 (torch 2.13): nobody writes to it
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**batch())  # holds the graph, and so what was saved
    assert output is not None
    return sum(kept.values()), len(model.plan.recomputed)


def storages_of_parameters(module: nn.Module) -> dict[int, torch.UntypedStorage]:
    """Filled during a forward, when engines have put whole parameters in the place of shards.

    The storages are held: an activation could take the place of one that is gone.
    """
    found: dict[int, torch.UntypedStorage] = {}

    def look(current: nn.Module, _: Any) -> None:
        for child in current.modules():
            held = [*child._parameters.values(), *vars(child).values()]
            storages = [tensor.untyped_storage() for tensor in held if isinstance(tensor, Tensor)]
            found.update((storage._cdata, storage) for storage in storages)

    for child in module.modules():
        child.register_forward_pre_hook(look)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=2)
    options = parser.parse_args()
    print("| model | backend | ranks | saved, bytes | with recomputed blocks | share | blocks |")
    print("|---|---|---|---|---|---|---|")
    worst = 0.0
    with RankPool() as pool:
        for name in MODELS:
            for backend in BACKENDS:
                ranks = 1 if backend == "none" else options.world_size
                plain, _ = pool.run(saved_bytes, ranks, name, backend, None)[0]
                recomputed, blocks = pool.run(saved_bytes, ranks, name, backend, True)[0]
                share = recomputed / plain
                worst = max(worst, share)
                print(f"| {name} | {backend} | {ranks} | {plain:,} | {recomputed:,} | {share:.0%} | {blocks} |")
    return int(worst >= 1)


if __name__ == "__main__":
    sys.exit(main())
