"""Step time beside Accelerate and Lightning Fabric, in turns, on CPU ranks; what they refuse there is told.

    python benchmarks/peers.py [--nprocs 2] [--rounds 20] [--models tfno gpt] [--engines ddp fsdp fsdp2]
        [--profile N]

Needs the extra ``peers``. Every side trains the same model on the same batches with Adam, as its own documentation
writes it: ``accelerator.prepare``, ``fabric.setup``, and ``fsshard.wrap`` with its defaults and what
``benchmarks/overhead.py --fast`` adds. Under FSDP all have the same units, which Fabric's FSDP2 asks the user to make
(``parallelize_fn``) and Accelerate takes by the classes of the modules.

What a peer refuses, with the first line of its error, stands below the table; so does what it turns into another engine
without a word. Where complex weights are what it refuses, it gets a model that ``fsshard.tensorfy`` has flattened, and
its name says so. A ratio below 1 means that ours is faster: the median over rounds, and its 95% interval.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn

import fsshard
from benchmarks.overhead import JOBS, Job, built, ours, step_of
from benchmarks.pairs import Step, Times, measure, profiled
from fsshard.planning.plan import plan

ENGINES = ("ddp", "fsdp", "fsdp2")


class NotThatEngine(Exception):
    """A peer gave another engine than it was asked for."""


def adam(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(network.parameters(), lr=1e-3)


def step_with(job: Job, network: Any, optimizer: Any, backward: Callable[[Any], object]) -> Step:
    """One training step on this rank's batch, by the peer's own ``backward``."""

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        backward(job.loss(network, generator))
        optimizer.step()
        optimizer.zero_grad()

    return step


# ------------------------------------------------------------------------------------------------ the peers


def accelerate(job: Job, network: nn.Module, engine: str) -> Step:
    """Accelerate, as in its quick tour and its guide to FSDP."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # one process, several accelerators
    plugin = None
    if engine != "ddp":
        modules = dict(network.named_modules())
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2 if engine == "fsdp2" else 1,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=sorted({type(modules[name]).__name__ for name in plan(network).unit_names}),
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    prepared, optimizer = accelerator.prepare(network, adam(network))
    check_engine(prepared, engine)
    return step_with(job, prepared, optimizer, accelerator.backward)


def fabric(job: Job, network: nn.Module, engine: str) -> Step:
    """Lightning Fabric, as in its guides to DDP, FSDP and FSDP2."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import FSDPStrategy, ModelParallelStrategy

    ranks = dist.get_world_size()
    strategy: Any = "ddp"
    if engine == "fsdp":
        chosen = set(plan(network).unit_names)
        classes = {type(module) for name, module in network.named_modules() if name in chosen}
        strategy = FSDPStrategy(auto_wrap_policy=classes)
    if engine == "fsdp2":
        strategy = ModelParallelStrategy(parallelize, data_parallel_size=ranks, tensor_parallel_size=1)
    runner = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, plugins=[TorchElasticEnvironment()])
    runner.launch()
    prepared = runner.setup_module(network)
    check_engine(prepared._forward_module, engine)  # torch's own; .module is what was given
    return step_with(job, prepared, runner.setup_optimizers(adam(prepared)), runner.backward)


def parallelize(network: nn.Module, mesh: Any) -> nn.Module:
    """Shard as a user of Fabric's ModelParallelStrategy does: fully_shard on every unit."""
    from torch.distributed.fsdp import fully_shard

    for name in plan(network).unit_names:
        fully_shard(network.get_submodule(name), mesh=mesh["data_parallel"])
    return fully_shard(network, mesh=mesh["data_parallel"])


def check_engine(network: nn.Module, engine: str) -> None:
    """Raise if ``network`` is not under ``engine``."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    wanted: Any = {"ddp": nn.parallel.DistributedDataParallel, "fsdp": FullyShardedDataParallel, "fsdp2": FSDPModule}
    if not isinstance(network, wanted[engine]):
        raise NotThatEngine(f"asked for {wanted[engine].__name__}, it silently gave {type(network).__name__}")


PEERS: dict[str, Callable[[Job, nn.Module, str], Step]] = {"Accelerate": accelerate, "Fabric": fabric}


# ------------------------------------------------------------------------------------------------ measuring


def sides_of(job: Job, engine: str) -> tuple[dict[str, Step], list[str]]:
    """The peers' steps by name, those that run, and what was refused. Collective."""
    found: dict[str, Step] = {}
    refused: list[str] = []
    for name, peer in PEERS.items():
        has_complex = any(parameter.is_complex() for parameter in built(job).parameters())
        for flat in (False, True) if has_complex else (False,):
            label = f"{name}, flattened" if flat else name
            try:
                step = peer(job, fsshard.tensorfy(built(job)) if flat else built(job), engine)
                step(0)
            except Exception as error:  # whatever a peer raises is what is to be told
                lines = str(error).strip().splitlines() or [""]
                refused.append(f"{label}: {type(error).__name__}: {lines[0]}")
                if isinstance(error, NotThatEngine):
                    break  # nothing to do with the weights
                continue
            found[label] = step
            break
    return found, refused


def row(model: str, engine: str, peer: str, theirs: Times, mine: Times) -> str:
    """One line of the table."""
    wall, cpu = mine.over(theirs)
    return (
        f"| {model} | {engine} | {peer} | {theirs.milliseconds()[0]:.1f} | {mine.milliseconds()[0]:.1f} "
        f"| {wall} | {cpu} |"
    )


def work(ctx: fsshard.Context, args: argparse.Namespace) -> None:
    """Every model and engine, printed by rank 0."""
    quiet(ctx)
    refusals: list[str] = []
    profiles: list[str] = []
    for name in args.models:
        for engine in args.engines:
            job = JOBS[name]
            peers, refused = sides_of(job, engine)
            refusals += [f"* {name}, {engine}, {each}" for each in refused]
            if not peers:
                continue
            mine = step_of(job, *ours(job, engine, fast=True))
            torch.set_num_threads(1)  # Accelerate sets it
            times = measure([*peers.values(), mine], args.rounds * JOBS[name].often)
            if args.profile:
                sides = ", ".join([*peers, "ours"])
                profiles += ["", f"{name} under {engine}, {sides}: ms of a step under cProfile"]
                profiles += profiled([*peers.values(), mine], 10 * JOBS[name].often, args.profile)
            if ctx.rank == 0:
                for peer, theirs in zip(peers, times, strict=False):
                    print(row(name, engine, peer, theirs, times[-1]), flush=True)
    if ctx.rank == 0:
        print("\n".join(["", "Not run, and why:", *(refusals or ["* nothing was refused"]), *profiles]), flush=True)


def quiet(ctx: fsshard.Context) -> None:
    """Say where this rank is, as torchrun does, and stop the peers' chatter."""
    os.environ.update(
        RANK=str(ctx.rank),
        WORLD_SIZE=str(ctx.world_size),
        LOCAL_RANK=str(ctx.local_rank),
        LOCAL_WORLD_SIZE=str(ctx.local_world_size),
        OMP_NUM_THREADS="1",
    )
    warnings.filterwarnings("ignore")
    for name in ("lightning_fabric", "lightning.fabric", "accelerate"):
        with contextlib.suppress(ImportError):
            __import__(name)
        logging.getLogger(name).setLevel(logging.ERROR)


def check_installed() -> None:
    """Raise before any rank has started."""
    for module, package in (("accelerate", "accelerate"), ("lightning_fabric", "lightning-fabric")):
        try:
            __import__(module)
        except ImportError:
            raise fsshard.MissingExtra(package, "peers", "benchmarks/peers.py") from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=list(JOBS), default=["tfno", "gpt"])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument(
        "--profile", type=int, default=0, metavar="N", help="list N functions that take more time with ours"
    )
    args = parser.parse_args()
    check_installed()
    print("| model | engine | peer | its ms | our ms | ours / its, by the clock | CPU time |\n|" + "---|" * 7)
    fsshard.launch(work, args.nprocs, (args,), threads=1, timeout=600)
    return 0


if __name__ == "__main__":
    sys.exit(main())
