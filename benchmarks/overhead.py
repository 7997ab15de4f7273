"""What fsshard costs on top of the engine it drives: step time and bytes held, side by side in one run.

    python benchmarks/overhead.py [--nprocs 2] [--rounds 40]

Each pair trains the same TFNO on the same batches: once as one would write it against the engine itself (which for
FSDP and FairScale means with ``fsshard.tensorfy``, since they refuse complex weights), once through ``fsshard.wrap``.
Steps alternate, each side goes first every other round, and the ratio is the median over rounds of ours / raw.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn

import fsshard
from fsshard.plan import plan

Step = Callable[[int], None]


def model(width: int) -> nn.Module:
    """A Tucker TFNO; the same weights at every call."""
    from neuralop.models import TFNO

    torch.manual_seed(0)
    return TFNO(  # type: ignore[no-any-return]
        n_modes=(12, 12), in_channels=1, out_channels=1, hidden_channels=width, projection_channel_ratio=2, rank=0.42
    )


def step_of(network: Any, optimizer: Any, size: int) -> Step:
    """One training step on this rank's batch."""

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        network(torch.randn(8, 1, size, size, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def raw(engine: str, width: int) -> tuple[Any, Any]:
    """Model and optimizer as written against the engine itself."""
    network = model(width)
    units = plan(network).unit_names
    if engine == "none":
        return network, torch.optim.Adam(network.parameters(), lr=1e-3)
    if engine == "ddp":
        wrapped: Any = nn.parallel.DistributedDataParallel(network)
        return wrapped, torch.optim.Adam(wrapped.parameters(), lr=1e-3)
    fsshard.tensorfy(network)
    if engine == "fsdp":
        return _raw_fsdp1(network, units)
    if engine == "fsdp2":
        return _raw_fsdp2(network, units)
    from fairscale.nn.data_parallel import ShardedDataParallel

    from fsshard.backends.fairscale_mended import MendedOSS  # the raw OSS packs complex weights unaligned

    optimizer = MendedOSS(network.parameters(), optim=torch.optim.Adam, lr=1e-3)
    return ShardedDataParallel(network, optimizer, sync_models_at_startup=False, reduce_buffer_size=0), optimizer


def _raw_fsdp1(network: nn.Module, units: tuple[str, ...]) -> tuple[Any, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import CustomPolicy

    chosen = {id(network.get_submodule(name)) for name in units}
    wrapped = FullyShardedDataParallel(
        network,
        use_orig_params=True,
        device_id=torch.device("cpu"),
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in chosen),
    )
    return wrapped, torch.optim.Adam(wrapped.parameters(), lr=1e-3)


def _raw_fsdp2(network: nn.Module, units: tuple[str, ...]) -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    for name in units:
        fully_shard(network.get_submodule(name))
    fully_shard(network)
    return network, torch.optim.Adam(network.parameters(), lr=1e-3, foreach=True)


def ours(engine: str, width: int) -> tuple[Any, Any]:
    """The same through fsshard."""
    wrapped = fsshard.wrap(model(width), backend=engine)
    return wrapped, fsshard.build_optimizer(wrapped, torch.optim.Adam, lr=1e-3)


def compare(ctx: fsshard.Context, engine: str, width: int, size: int, rounds: int) -> tuple[float, float, float]:
    """(seconds raw, seconds ours, median ratio)."""
    pair = [step_of(*make(engine, width), size) for make in (raw, ours)]
    seconds: list[list[float]] = [[], []]
    for number in range(rounds + 5):
        for which in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            pair[which](number)
            if number >= 5:
                seconds[which].append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(*seconds, strict=True)]
    return statistics.median(seconds[0]), statistics.median(seconds[1]), statistics.median(ratios)


def job(ctx: fsshard.Context, args: argparse.Namespace) -> None:
    """Every pair, printed by rank 0."""
    engines = ("ddp", "fsdp", "fsdp2", "fairscale") if ctx.world_size > 1 else ("none",)
    for width, size in ((16, 16), (48, 32)):
        for engine in engines:
            before, after, ratio = compare(ctx, engine, width, size, args.rounds)
            if ctx.rank == 0:
                row = f"{engine:<10} {width:>5} {size:>5} {1e3 * before:>9.1f} {1e3 * after:>9.1f} {ratio:>7.3f}"
                print(row, flush=True)


def main() -> None:
    """One process, then several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    print(f"{'engine':<10} {'width':>5} {'size':>5} {'raw ms':>9} {'ours ms':>9} {'ratio':>7}")
    for nprocs in (1, args.nprocs):
        fsshard.launch(job, nprocs, (args,), threads=1)


if __name__ == "__main__":
    main()
