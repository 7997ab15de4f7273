"""Counts graph breaks of units with complex weights under torch.compile, and times steps side by side in one run.

    python benchmarks/compile.py [--rounds 30] [--backend inductor] [--models spectral fno tfno]

Each model trains four times on the same batches: with native complex weights and with flattened ones, eagerly and with
its units compiled as ``fsshard.wrap(model, compile=True)`` compiles them. Steps alternate, the order turns from round
to round, and each ratio is the median over rounds. Graphs and breaks are counted after one eager step, since libraries
that fill caches at first use (opt_einsum) break graphs while they do it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import fsshard
from fsshard.model.compiling import compile_units, resolve_compilation
from fsshard.planning.plan import plan


class Spectral(nn.Module):
    """A complex linear layer between real tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.complex64) / width)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x.to(torch.complex64) @ self.weight).real + self.bias)


def spectral(width: int, size: int) -> tuple[nn.Module, Tensor]:
    """Four layers and a batch."""
    return nn.Sequential(*(Spectral(4 * width) for _ in range(4))), torch.randn(size * size, 4 * width)


def fno(width: int, size: int, **settings: Any) -> tuple[nn.Module, Tensor]:
    """neuraloperator's FNO and a batch of images."""
    from neuralop.models import FNO

    modes = (size // 2, size // 2)
    model = FNO(modes, 1, 1, width, n_layers=2, projection_channel_ratio=2, **settings)
    return model, torch.randn(8, 1, size, size)


def tfno(width: int, size: int) -> tuple[nn.Module, Tensor]:
    """The same with Tucker-factorized weights."""
    return fno(width, size, factorization="tucker", implementation="factorized", rank=0.42)


MODELS: dict[str, Callable[[int, int], tuple[nn.Module, Tensor]]] = {"spectral": spectral, "fno": fno, "tfno": tfno}


class Contestant(NamedTuple):
    """One way to train a model; graphs and breaks are 0 where it is not compiled."""

    step: Callable[[], None]
    graphs: int = 0
    breaks: int = 0


def contestant(name: str, width: int, size: int, *, flat: bool, backend: str | None) -> Contestant:
    """A model, the same one each time; ``backend`` None is eager."""
    torch.manual_seed(0)
    model, batch = MODELS[name](width, size)
    if flat:
        fsshard.tensorfy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    if backend is None:
        return Contestant(step)
    counters.clear()
    counter = CompileCounterWithBackend(backend)
    compile_units(dict(model.named_modules()), plan(model), resolve_compilation({"backend": counter}))
    step()
    return Contestant(step, counter.frame_count, sum(counters["graph_break"].values()))


def medians(pairs: Sequence[tuple[Contestant, Contestant]], rounds: int) -> list[str]:
    """Per pair the median over rounds of the first one's time by the second one's."""
    steps = list(dict.fromkeys(one.step for pair in pairs for one in pair))
    seconds: dict[Callable[[], None], list[float]] = {step: [] for step in steps}
    for number in range(rounds):
        for step in steps if number % 2 else reversed(steps):
            start = time.perf_counter()
            step()
            seconds[step].append(time.perf_counter() - start)
    if not rounds:
        return ["-" for _ in pairs]
    ratios = [[x / y for x, y in zip(seconds[a.step], seconds[b.step], strict=True)] for a, b in pairs]
    return [f"{statistics.median(ratio):.3f}" for ratio in ratios]


def row(name: str, width: int, size: int, backend: str, rounds: int) -> list[str]:
    """One line of the table."""
    torch._dynamo.reset()  # what it has seen vary in one model it takes as variable in the next, and opt_einsum fails
    native, flat = (contestant(name, width, size, flat=flag, backend=None) for flag in (False, True))
    native_compiled, flat_compiled = (
        contestant(name, width, size, flat=flag, backend=backend) for flag in (False, True)
    )
    pairs = [(native, native_compiled), (flat, flat_compiled), (native_compiled, flat_compiled), (native, flat)]
    counts = (native_compiled.graphs, flat_compiled.graphs, native_compiled.breaks, flat_compiled.breaks)
    return [name, *map(str, counts), *medians(pairs, rounds)]


HEAD = (
    "model",
    "graphs native",
    "graphs flat",
    "breaks native",
    "breaks flat",
    "eager/compiled native",
    "eager/compiled flat",
    "native/flat compiled",
    "native/flat eager",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table; ratios above 1 mean that what stands below the line is faster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="0: count graphs only")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--size", type=int, default=16)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("  ".join(HEAD))
    for name in args.models:
        cells = row(name, args.width, args.size, args.backend, args.rounds)
        print("  ".join(f"{cell:>{len(head)}}" for cell, head in zip(cells, HEAD, strict=True)), flush=True)


if __name__ == "__main__":
    main()
