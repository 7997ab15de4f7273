"""Measures fsshard beside the engine that it drives: step time, side by side in one run.

    python benchmarks/overhead.py [--nprocs 2] [--rounds 40] [--starts 1] [--models ...] [--engines ddp ...] [--fast]
        [--profile N]

Each pair trains the same model on the same batches: once as one would write it against the engine itself (which for
FSDP and FairScale means with complex weights stored as pairs of reals, by ``fsshard.tensorfy``, since they refuse
complex ones), once through ``fsshard.wrap``. Both have the same units and the same optimizer, and neither clips.

* Without ``--fast`` what fsshard does to be faster than the engine is switched off (:data:`PLAIN`), and FSDP2's own
  side has ``foreach=True``, without which every operation of its optimizer goes through DTensor: what is left is the
  price of the wrapper.
* With ``--fast`` the raw side is as it comes, and fsshard's with its defaults. A third side, ``alone``, trains
  the same on every rank without any engine, so that nothing is sent: what is above it is what sharding and sending
  cost, and only that can be saved (but for the optimizer's share, since every rank steps the whole there).
* ``--profile`` lists the functions in which ours spends more than another side, by the clock, by cProfile on rank 0.
* ``fixed`` has 1,000 parameters of at most eight numbers in one unit: the cost of a step that no size of a model hides.

Steps alternate, each side goes first every other round; ``tfno``, whose steps are short, has five times the rounds.
Where memory happens to lie moves all steps of a process by some percent, so ``--starts`` starts the ranks several
times, in which either side is made first, and all rounds count as one sample. A ratio is the median over rounds of
ours / raw, between the bounds of its 95% interval (order statistics); once by the wall clock, once by the CPU time of
the process, which other processes on the machine disturb less.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from benchmarks.pairs import Step, Times, measure, pooled, profiled
from fsshard.planning.plan import plan
from fsshard.recipes.models import small_t5

PLAIN: dict[str, dict[str, Any]] = {
    "ddp": {"gradient_as_bucket_view": False, "fast_collectives": False},
    "fsdp2": {"fast_collectives": False},
}
"""Per engine, the settings of ``fsshard.wrap`` that switch its speed-ups off."""


@dataclass(frozen=True)
class Job:
    """A model, the same weights at every call, and the loss of one of this rank's batches.

    Attributes:
        build: the model.
        loss: of a batch, drawn by the generator.
        often: rounds for one of other jobs; the shorter a step, the more the machine's own noise is of it.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator], Tensor]
    often: int = 1


def operator(kind: str, width: int, size: int, **settings: Any) -> Job:
    """One of neuraloperator's models on images, by the name of its class."""

    def build() -> nn.Module:
        import neuralop.models

        network: nn.Module = getattr(neuralop.models, kind)(
            n_modes=(12, 12),
            in_channels=1,
            out_channels=1,
            hidden_channels=width,
            projection_channel_ratio=2,
            **settings,
        )
        return network

    def loss(network: nn.Module, generator: torch.Generator) -> Tensor:
        output: Tensor = network(torch.randn(8, 1, size, size, generator=generator))
        return output.square().mean()

    return Job(build, loss)


def tfno(width: int, size: int) -> Job:
    """A Tucker TFNO on images."""
    return operator("TFNO", width, size, rank=0.42)


def t5() -> Job:
    """Hugging Face's T5, three layers on either side and 1.4 million parameters, on pairs of token sequences."""

    def build() -> nn.Module:
        return small_t5(words=512, width=128, heads=4, layers=3)

    def loss(network: nn.Module, generator: torch.Generator) -> Tensor:
        tokens = torch.randint(1, 512, (8, 64), generator=generator)
        found: Tensor = network(input_ids=tokens, labels=tokens[:, :32].contiguous()).loss
        return found

    return Job(build, loss)


def gpt(batch: int, length: int) -> Job:
    """Hugging Face's GPT-2 with 18.1 million parameters in eight blocks."""

    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=10_000, n_positions=256, n_embd=384, n_layer=8, n_head=6, use_cache=False, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)

    def loss(network: nn.Module, generator: torch.Generator) -> Tensor:
        tokens = torch.randint(1, 10_000, (batch, length), generator=generator)
        found: Tensor = network(input_ids=tokens, labels=tokens).loss
        return found

    return Job(build, loss)


class Joined(nn.Module):
    """Parameters of one to eight numbers each, in one module, and next to nothing to compute with them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(1 + index % 8)) for index in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(tuple(self.weights)) * x


def fixed(count: int) -> Job:
    """A model whose step is what an engine and its wrapper do for each parameter, whatever its size."""

    def loss(network: nn.Module, generator: torch.Generator) -> Tensor:
        output: Tensor = network(torch.randn(1, generator=generator))
        return output.square().mean()

    return Job(lambda: Joined(count), loss)


JOBS: dict[str, Job] = {
    "tfno": replace(tfno(16, 16), often=5),
    "tfno48": tfno(48, 32),
    "t5": t5(),
    "gpt": gpt(8, 128),
    "gpt-short": gpt(4, 64),
    "fixed": fixed(1000),
}


def built(job: Job) -> nn.Module:
    """The job's model."""
    torch.manual_seed(0)
    return job.build()


def step_of(job: Job, network: Any, optimizer: Any) -> Step:
    """One training step on this rank's batch."""

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        torch.manual_seed(number)  # the same dropout on every side
        job.loss(network, generator).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# ------------------------------------------------------------------------------------------------ the two sides


def raw(job: Job, engine: str, *, fast: bool) -> tuple[Any, Any]:
    """Model and optimizer as written against the engine itself."""
    network = built(job)
    return by_hand(network, engine, plan(network).unit_names, fast=fast)


def by_hand(network: nn.Module, engine: str, units: tuple[str, ...], *, fast: bool) -> tuple[Any, Any]:
    """``network`` under the engine and its optimizer, without fsshard but for flattened complex weights."""
    if engine == "none":
        return network, torch.optim.Adam(network.parameters(), lr=1e-3)
    if engine == "ddp":
        wrapped: Any = nn.parallel.DistributedDataParallel(network)
        return wrapped, torch.optim.Adam(wrapped.parameters(), lr=1e-3)
    fsshard.tensorfy(network)
    if engine == "fsdp":
        return _raw_fsdp1(network, units)
    if engine == "fsdp2":
        return _raw_fsdp2(network, units, foreach=None if fast else True)
    from fairscale.nn.data_parallel import ShardedDataParallel

    from fsshard.backends.fairscale_patched import PatchedOSS  # the raw OSS packs complex weights unaligned

    optimizer = PatchedOSS(network.parameters(), optim=torch.optim.Adam, lr=1e-3)
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


def _raw_fsdp2(network: nn.Module, units: tuple[str, ...], foreach: bool | None) -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    for name in units:
        fully_shard(network.get_submodule(name))
    fully_shard(network)
    return network, torch.optim.Adam(network.parameters(), lr=1e-3, foreach=foreach)


def ours(job: Job, engine: str, *, fast: bool) -> tuple[Any, Any]:
    """The same through fsshard."""
    wrapped = fsshard.wrap(built(job), backend=engine, **({} if fast else PLAIN.get(engine, {})))
    return wrapped, fsshard.build_optimizer(wrapped, torch.optim.Adam, lr=1e-3)


# ------------------------------------------------------------------------------------------------ measuring


def report(name: str, engine: str, found: list[Times]) -> None:
    """One row: medians in ms and both ratios; what training alone takes of raw, where that was measured."""
    before, after, *alone = found
    cells = [
        f"{raw:>9.1f} {ours:>9.1f} {ratio!s:>22}"
        for raw, ours, ratio in zip(before.milliseconds(), after.milliseconds(), after.over(before), strict=True)
    ]
    cells += [f"{times.over(before)[0].median:>11.3f}" for times in alone]
    print(f"{name:<10} {engine:<10} " + "   ".join(cells), flush=True)


def work(
    ctx: fsshard.Context, args: argparse.Namespace, name: str, engine: str, start: int
) -> tuple[list[Times], list[str]]:
    """The times of the sides, of which either is made first in turn, and rows of a profile."""
    job, makes = JOBS[name], {"raw": raw, "ours": ours}
    made = {which: makes[which](job, engine, fast=args.fast) for which in sorted(makes, reverse=bool(start % 2))}
    sides = [step_of(job, *made[which]) for which in makes]
    made.clear()
    if args.fast and engine != "none":
        sides.append(step_of(job, *raw(job, "none", fast=True)))
    times = measure(sides, args.rounds * job.often)
    if not args.profile or start:
        return times, []
    return times, profiled([*sides[2:], sides[0], sides[1]], 10 * job.often, args.profile)


def main() -> None:
    """One process, then several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=list(JOBS), default=["tfno", "tfno48", "t5"])
    engines = ["none", "ddp", "fsdp", "fsdp2", "fairscale"]
    parser.add_argument("--engines", nargs="+", choices=engines, default=engines)
    parser.add_argument("--fast", action="store_true", help="with the speed-ups, against the engine's defaults")
    parser.add_argument(
        "--profile", type=int, default=0, metavar="N", help="list N functions that take more time with ours"
    )
    args = parser.parse_args()
    head = f"{'raw':>9} {'ours':>9} {'ours / raw [95%]':>22}"
    print(f"{'':<21} {'ms by the clock':<42}   ms of CPU time")
    print(f"{'model':<10} {'engine':<10} {head}   {head}" + ("   alone / raw" if args.fast else ""))
    profiles: list[str] = []
    for name in args.models:
        for engine in args.engines:
            nprocs = 1 if engine == "none" else args.nprocs
            seen = [
                fsshard.launch(work, nprocs, (args, name, engine, start), threads=1, timeout=600)
                for start in range(args.starts)
            ]
            report(name, engine, [pooled(times) for times in zip(*(times for times, _ in seen), strict=True)])
            profiles += [
                "",
                f"{name} under {engine}, {'alone, ' * args.fast}raw and ours: ms of a step under cProfile",
                *seen[0][1],
            ]
    if args.profile:
        print("\n".join(profiles))


if __name__ == "__main__":
    main()
