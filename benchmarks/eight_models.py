"""The estimator and the tuner, judged by eight models that are not in the recipes, on two CPU ranks.

    python benchmarks/eight_models.py [--models unet,gpt] [--limit 6] [--rounds 0]

Of every model fsshard.tune simulates plans, and each of them is followed: wrapped, trained, its peak counted. Counted
are the bytes of all storages that are alive after an operator, by a dispatch mode that knows nothing of fsshard, in the
third step of the rank that has most. With ``--rounds`` plans also train in turns; then the rank correlation
(Spearman's) of predicted times with the least CPU time of a step is printed: on a machine that does nothing else. What
the error says that nothing fits advises is followed too.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsshard
from benchmarks.pairs import Step, measure
from benchmarks.plan_order import correlation
from fsshard.launching.pool import RankPool
from fsshard.planning.text import size
from fsshard.simulation.measuring import measured_machine

RANKS = 2
PEAK = 0.02
"""How far a peak may be off, where gloo's threads hold nothing."""
BACKENDS = ("ddp", "fairscale", "fsdp", "fsdp2")


class UNet(nn.Module):
    """Convolutions down and up, with a connection across."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(32, 64, 3, 2, 1), nn.GroupNorm(4, 64), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.SiLU())
        self.up = nn.ConvTranspose2d(64, 32, 2, 2)
        self.last = nn.Conv2d(64, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        deep = self.up(self.middle(self.down(first)))
        result: Tensor = self.last(torch.cat([first, deep], 1))
        return result


class Attention(nn.Module):
    """A block of a transformer, written out."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Causal blocks; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 96)
        self.blocks = nn.ModuleList(Attention(96, True) for _ in range(4))
        self.head = nn.Linear(96, 512, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


class Residual(nn.Module):
    """A block of a ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(nn.functional.gelu(self.wide(y)))
        return x + y.permute(0, 3, 1, 2)


class LSTM(nn.Module):
    """A recurrent network over words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.cells = nn.LSTM(64, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.cells(self.embedding(tokens))[0])
        return result


class Graph(nn.Module):
    """Messages along the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 96)
        self.messages = nn.ModuleList(nn.Linear(192, 96) for _ in range(4))
        self.updates = nn.ModuleList(nn.Linear(192, 96) for _ in range(4))
        self.last = nn.Linear(96, 2)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.first(nodes)
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat([x[edges[0]], x[edges[1]]], -1)).relu()
            received = torch.zeros_like(x).index_add(0, edges[1], sent)
            x = x + update(torch.cat([x, received], -1)).relu()
        result: Tensor = self.last(x)
        return result


class DeepONet(nn.Module):
    """A branch for the function, a trunk for the points."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(100, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 128))
        self.trunk = nn.Sequential(nn.Linear(2, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 128))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, function: Tensor, points: Tensor) -> Tensor:
        return self.branch(function) @ self.trunk(points).T + self.bias


class Experts(nn.Module):
    """Every expert takes the tokens that it is most sure of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 96)
        self.gate = nn.Linear(96, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        weights, chosen = self.gate(x).softmax(-1).topk(64, dim=0)
        for number, expert in enumerate(self.experts):
            mine = chosen[:, number]
            x = x.index_add(0, mine, weights[:, number, None] * expert(x[mine]))
        return x


class ViT(nn.Module):
    """Patches, blocks, classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 96, 4, 4)
        self.place = nn.Parameter(torch.zeros(64, 96))
        self.blocks = nn.Sequential(*(Attention(96, False) for _ in range(4)))
        self.head = nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2) + self.place).mean(1))
        return result


def convnext() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 64, 4, 4), *(Residual(64) for _ in range(4)))


def words(high: int) -> Tensor:
    return torch.randint(0, high, (8, 64))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "unet": (UNet, lambda: torch.randn(4, 2, 32, 32)),
    "gpt": (GPT, lambda: words(512)),
    "convnext": (convnext, lambda: torch.randn(8, 3, 32, 32)),
    "lstm": (LSTM, lambda: words(256)),
    "graph": (Graph, lambda: (torch.randn(256, 8), torch.randint(0, 256, (2, 1024)))),
    "deeponet": (DeepONet, lambda: (torch.randn(32, 100), torch.randn(400, 2))),
    "experts": (Experts, lambda: torch.randn(256, 16)),
    "vit": (ViT, lambda: torch.randn(8, 3, 32, 32)),
}


class Alive(TorchDispatchMode):
    """The bytes of the storages that are alive, by weak references to all that operators took or made."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._look((args, kwargs, out))
        nbytes = 0
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[key]
            else:
                nbytes += storage.nbytes()  # anew, for engines resize storages to nothing
        self.peak = max(self.peak, nbytes)
        return out

    def _look(self, values: Any) -> None:
        for leaf in tree_leaves(values):
            if type(leaf) in (Tensor, nn.Parameter) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)


def trained(name: str, settings: dict[str, Any]) -> Step:
    """Return a step of a plan that is followed to the letter."""
    torch.manual_seed(0)
    build, make = MODELS[name]
    batch = make()
    inputs = batch if isinstance(batch, tuple) else (batch,)
    model = fsshard.wrap(build(), **settings)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-3)

    def step(number: int) -> None:
        model(*inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak(name: str, settings: dict[str, Any]) -> int | str:
    """Return the most bytes of the third step on this rank, or what it raises. Collective."""
    warnings.filterwarnings("ignore")
    counter = Alive()
    try:
        with counter:
            step = trained(name, settings)
            for number in range(3):
                counter.peak = 0
                step(number)
    except Exception as error:  # any at all is the tuner's fault
        return f"{type(error).__name__}: {error}"
    return counter.peak


def times(name: str, plans: list[dict[str, Any]], rounds: int) -> list[float]:
    """Train plans in turns; return the least CPU seconds of each one's step on this rank. Collective."""
    warnings.filterwarnings("ignore")
    return [min(each.cpu) for each in measure([trained(name, settings) for settings in plans], rounds)]


def advised(name: str) -> list[dict[str, Any]]:
    """Return the settings that the error advises for too little memory, which it must."""
    build, make = MODELS[name]
    try:
        fsshard.tune(build(), batch=make(), backend="fsdp2", world_size=RANKS, memory=1024, limit=1)
    except fsshard.DoesNotFit as error:
        told = re.findall(r"(mixed_precision)='(\w+)'", str(error))
        return [{"backend": "fsdp2", key: value} for key, value in told]
    raise AssertionError("a plan of 1 KiB")


def judged(name: str, pool: RankPool, options: argparse.Namespace, machine: Any) -> bool:
    """Print what the plans of a model need, and whether all of it is as predicted."""
    build, make = MODELS[name]
    result = fsshard.tune(
        build(),
        batch=make(),
        backend=list(BACKENDS),
        world_size=RANKS,
        optimizer=torch.optim.AdamW,
        machine=machine,
        limit=options.limit,
    )
    plans = [{"backend": one.candidate.backend, **one.candidate.settings} for one in result.tried]
    worst = 0.0
    failed: list[str] = []
    for one, settings in zip(result.tried, plans, strict=True):
        counted = pool.run(peak, RANKS, name, settings, timeout=300)
        errors = [each for each in counted if isinstance(each, str)]
        least, most = one.estimate.interval
        if errors:
            failed.append(f"{one.candidate.code()}: {errors[0]}")
            continue
        real = max(counted)
        off = 0.0 if least <= real <= most else min(abs(least / real - 1), abs(most / real - 1))
        worst = max(worst, off)
        if off > PEAK:
            failed.append(f"{one.candidate.code()}: predicted {size(least)} to {size(most)}, counted {size(real)}")
    for settings in advised(name):
        counted = pool.run(peak, RANKS, name, settings, timeout=300)
        failed += [f"advice {settings}: {each}" for each in counted if isinstance(each, str)]
    cells = [name, str(len(plans)), f"{worst:.3%}", str(len(failed))]
    if options.rounds:
        by_rank = pool.run(times, RANKS, name, plans, options.rounds, timeout=600)
        measured = [sum(values) / RANKS for values in zip(*by_rank, strict=True)]
        cells.append(f"{correlation([one.estimate.seconds for one in result.tried], measured):.3f}")
    print("| " + " | ".join(cells) + " |", flush=True)
    for text in failed:
        print(f"  NOT TRUE: {text}", flush=True)
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    with RankPool() as pool:
        machine = pool.run(measured_machine, RANKS, "cpu", timeout=600)[0] if options.rounds else None
        head = ["model", "plans followed", "peak off at most", "not true", *(["order"] if options.rounds else [])]
        print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
        alike = [judged(name, pool, options, machine) for name in options.models.split(",")]
    return 0 if all(alike) else 1


if __name__ == "__main__":
    sys.exit(main())
