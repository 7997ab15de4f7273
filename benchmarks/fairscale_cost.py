"""Measures our OSS, ShardedDataParallel and checkpoint_wrapper beside the real FairScale's, in one run.

    python benchmarks/fairscale_cost.py [--nprocs 2] [--rounds 40] [--case mlp t5 tfno checkpoint] [--check]

Each case trains the same model on the same batches twice, by FairScale 0.4.13 and by ``fsshard.compat.fairscale``.
Steps alternate, each side goes first every other round, and the time's ratio is the median over rounds of ours / real.
Both sides' weights are compared at the end: at two ranks they are equal to the last bit, so both did the same work.

- *state*: bytes of the optimizers' tensors on the rank that holds most.
- *sent*: bytes that gloo wrote to its sockets per step, mean over ranks, from ``/proc/self/io``.
- *least*: bytes that a rank must send per step for the collectives that were called, mean over ranks, whatever carries
  them out: broadcast and reduce (N-1)/N of the tensor, all_reduce twice that, all_to_all what goes to others. Counted
  where the calls reach the process group, so that none is missed. Ours may have more than the real library by a flag
  for each parameter (whether a rank used it: DDP has such a map, the real library has none and updates what no rank
  used), and by the padding of what goes to a rank to 16 bytes.
- *cpu*: processor time of all threads of a rank per step, which other work on the machine disturbs less.

TFNO has complex weights, which the real library trains only with an OSS per dtype and without gradient buckets; ours
has one OSS, and its defaults. In brackets: where the true median lies with 95 % confidence. ``--check`` exits with 1
where a bound (state 1.02, sent 1.00, time 1.00) is broken.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsshard.launching.pool import RankPool
from fsshard.recipes.models import small_t5

STATE_BOUND, SENT_BOUND, TIME_BOUND = 1.02, 1.00, 1.00
PADDING = 16
WARM_UP = 5
SIDES = ("real", "ours")

Step = Callable[[int], None]


# ------------------------------------------------------------------------------------------------ what is trained


@dataclass(frozen=True)
class Case:
    """One model and its batches.

    Attributes:
        build: the model, the same weights at every call; the argument asks for a tiny one.
        loss: of a model on the batch of a generator.
        oss_per_dtype: the real library needs an OSS for each dtype of the parameters.
    """

    build: Callable[[bool], nn.Module]
    loss: Callable[[Any, torch.Generator, bool], Tensor]
    oss_per_dtype: bool = False


def mlp(tiny: bool) -> nn.Module:
    """Eight layers of 512 x 512 (2.1 million parameters)."""
    width = 16 if tiny else 512
    return nn.Sequential(*itertools.chain(*((nn.Linear(width, width), nn.GELU()) for _ in range(8))))


def mlp_loss(model: Any, generator: torch.Generator, tiny: bool) -> Tensor:
    loss: Tensor = model(torch.randn(32, 16 if tiny else 512, generator=generator)).square().mean()
    return loss


def t5(tiny: bool) -> nn.Module:
    """Two layers on each side, shared embeddings (2.6 million parameters)."""
    width, words = (16, 64) if tiny else (192, 4096)
    return small_t5(words, width, heads=4, layers=2, dropout_rate=0.0)


def t5_loss(model: Any, generator: torch.Generator, tiny: bool) -> Tensor:
    words = torch.randint(0, 64 if tiny else 4096, (8, 24), generator=generator)
    loss: Tensor = model(input_ids=words, labels=words[:, :12].contiguous()).loss
    return loss


def tfno(tiny: bool) -> nn.Module:
    """A Tucker TFNO: complex64 cores and factors."""
    from neuralop.models import TFNO

    modes, width = ((4, 4), 8) if tiny else ((12, 12), 32)
    return TFNO(  # type: ignore[no-any-return]
        n_modes=modes, in_channels=1, out_channels=1, hidden_channels=width, projection_channel_ratio=2, rank=0.42
    )


def tfno_loss(model: Any, generator: torch.Generator, tiny: bool) -> Tensor:
    size = 8 if tiny else 32
    loss: Tensor = model(torch.randn(4, 1, size, size, generator=generator)).square().mean()
    return loss


CASES = {"mlp": Case(mlp, mlp_loss), "t5": Case(t5, t5_loss), "tfno": Case(tfno, tfno_loss, oss_per_dtype=True)}


# ------------------------------------------------------------------------------------------------ both sides


class Side:
    """A model and its optimizers under one of the libraries."""

    def __init__(self, which: str, case: Case, tiny: bool) -> None:
        torch.manual_seed(0)
        self.case, self.tiny = case, tiny
        self.module = case.build(tiny)
        root = "fairscale" if which == "real" else "fsshard.compat.fairscale"
        oss = importlib.import_module(f"{root}.optim").OSS
        sharded = importlib.import_module(f"{root}.nn.data_parallel").ShardedDataParallel
        parameters = list(self.module.parameters())
        if which == "real" and case.oss_per_dtype:
            parts = [[p for p in parameters if p.is_complex() == flag] for flag in (False, True)]
            self.optimizers = [oss(part, optim=torch.optim.Adam, lr=1e-3) for part in parts]
            # reduce_buffer_size: buckets of mixed dtypes stop at "Different types for the bucket and the param";
            # sync_models_at_startup: TypeError on the state dict's metadata (FairScale 0.4.13).
            arguments = {"reduce_buffer_size": 0, "sync_models_at_startup": False}
        else:
            self.optimizers = [oss(parameters, optim=torch.optim.Adam, lr=1e-3)]
            arguments = {"sync_models_at_startup": False}
        self.model = sharded(self.module, self.optimizers, **arguments)

    def step(self, number: int) -> None:
        """One training step on this rank's batch, as FairScale's tutorial writes it."""
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        self.model.zero_grad()
        self.case.loss(self.model, generator, self.tiny).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def state_bytes(self) -> int:
        """Return the bytes that this rank keeps for its optimizers."""
        states = [o.optim.state for o in self.optimizers] + [o.state for o in self.optimizers]
        held = {id(v): v for state in states for item in state.values() for v in item.values() if isinstance(v, Tensor)}
        return sum(tensor.numel() * tensor.element_size() for tensor in held.values())


# ------------------------------------------------------------------------------------------------ what is sent


class TrafficCounter(TorchDispatchMode):
    """Adds up what this rank has to send for the collectives that reach its process group.

    Attributes:
        least: bytes.
        calls: how many of each collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self.least, self.calls = 0.0, dict[str, int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = function.overloadpacket.__name__
            self.calls[name] = self.calls.get(name, 0) + 1
            self.least += must_send(name, args)
        return function(*args, **(kwargs or {}))


def must_send(name: str, args: Any) -> float:
    """Bytes that leave this rank. A broadcast is counted at its root alone, so that the mean is right."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if name == "broadcast_":
        return (ranks - 1) * volume(args[0]) if args[2] == rank else 0
    if name == "reduce_":
        return volume(args[0]) if args[3] != rank else 0
    if name in ("allreduce_", "allreduce_coalesced_"):
        return 2 * volume(args[0]) * (ranks - 1) / ranks
    if name in ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"):
        return (ranks - 1) * volume(args[1])
    if name in ("reduce_scatter_", "_reduce_scatter_base_"):
        return volume(args[1]) * (ranks - 1) / ranks
    if name == "alltoall_base_":
        splits = args[4] or [args[1].shape[0] // ranks] * ranks
        row = volume(args[1]) / max(args[1].shape[0], 1)
        return row * (sum(splits) - splits[rank])
    if name == "alltoall_":
        return volume([tensor for other, tensor in enumerate(args[1]) if other != rank])
    if name in ("barrier", "monitored_barrier_"):
        return 0
    raise NotImplementedError(f"how many bytes {name} sends")


def volume(tensors: Any) -> int:
    """Bytes of a tensor, or of all in nested lists."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(volume(tensor) for tensor in tensors)


def written() -> int | None:
    """Bytes that this process has written, to sockets above all; None where the machine does not count."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return int(dict(line.split(": ") for line in lines)["wchar"])


# ------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class Times:
    """Seconds of each step of both sides, real first: by the clock, and of the processor."""

    wall: tuple[list[float], list[float]]
    cpu: tuple[list[float], list[float]]


@dataclass(frozen=True)
class Cost:
    """Measurements of one rank of both sides, real first."""

    state: tuple[int, int]
    least: tuple[float, float]
    calls: tuple[dict[str, int], dict[str, int]]
    parameters: int
    sent: tuple[float, float] | None
    times: Times
    equal: bool


def measure(name: str, rounds: int, tiny: bool) -> Cost:
    """One case; runs on every rank."""
    case = CASES[name]
    sides = [Side(which, case, tiny) for which in SIDES]
    times = paired([side.step for side in sides], rounds)
    number = rounds + WARM_UP
    counters, sent = [], []
    for side in sides:
        with TrafficCounter() as counter:
            side.step(number)
        counters.append(counter)
    for side in sides:
        dist.barrier()
        before = written()
        for later in range(number + 1, number + 6):
            side.step(later)
        after = written()
        sent.append(None if before is None or after is None else (after - before) / 5)
    weights = [list(side.module.parameters()) for side in sides]
    return Cost(
        state=tuple(side.state_bytes() for side in sides),  # type: ignore[arg-type]
        least=tuple(counter.least for counter in counters),  # type: ignore[arg-type]
        calls=tuple(counter.calls for counter in counters),  # type: ignore[arg-type]
        parameters=len(weights[0]),
        sent=None if None in sent else tuple(sent),  # type: ignore[arg-type]
        times=times,
        equal=all(torch.equal(a, b) for a, b in zip(*weights, strict=True)),
    )


def paired(steps: list[Step], rounds: int) -> Times:
    """Each step of both, in turns; all ranks begin and end together."""
    times = Times(wall=([], []), cpu=([], []))
    for number in range(rounds + WARM_UP):
        for which in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            steps[which](number)
            dist.barrier()
            if number >= WARM_UP:
                times.wall[which].append(time.perf_counter() - start)
                times.cpu[which].append(time.process_time() - cpu)
    return times


def measure_checkpoint(rounds: int, tiny: bool) -> Times:
    """Forward and backward of checkpointed blocks under both wrappers, without communication but the common start."""
    steps: list[Step] = []
    for root in ("fairscale", "fsshard.compat.fairscale"):
        wrap = importlib.import_module(f"{root}.nn.checkpoint").checkpoint_wrapper
        width = 16 if tiny else 256
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(6)]
        model = nn.Sequential(nn.Linear(width, width), *(wrap(block) for block in blocks))

        def step(number: int, model: nn.Module = model, width: int = width) -> None:
            model(torch.randn(64, width)).square().mean().backward()
            model.zero_grad()

        steps.append(step)
    return paired(steps, rounds)


def ratios(seconds: tuple[list[float], list[float]]) -> list[float]:
    """Ours / real of every round, in ascending order."""
    return sorted(ours / real for real, ours in zip(*seconds, strict=True))


def interval(values: list[float]) -> tuple[float, float]:
    """Where the true median lies with 95 % confidence, from the ranks of ascending values (normal approximation)."""
    reach = 1.96 * math.sqrt(len(values)) / 2
    low, high = math.floor(len(values) / 2 - reach), math.ceil(len(values) / 2 + reach) - 1
    return values[max(low, 0)], values[min(max(high, 0), len(values) - 1)]


# ------------------------------------------------------------------------------------------------ reporting


@dataclass(frozen=True)
class Row:
    """One line: a quantity of a case."""

    case: str
    what: str
    real: str
    ours: str
    ratio: float | None
    bound: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def kept(self) -> bool:
        """Return whether the bound holds; True where there is none."""
        return self.bound is None or (self.ratio is not None and self.ratio <= self.bound)


def rows_of(name: str, costs: list[Cost]) -> Iterator[Row]:
    """Yield a line for each quantity that the ranks measured."""
    state = [max(cost.state[side] for cost in costs) for side in (0, 1)]
    yield Row(name, "state, kB", kilo(state[0]), kilo(state[1]), state[1] / state[0], STATE_BOUND)
    if all(cost.sent is not None for cost in costs):
        sent = [statistics.mean(cost.sent[side] for cost in costs if cost.sent) for side in (0, 1)]
        yield Row(
            name, "sent, kB/step", kilo(sent[0]), kilo(sent[1]), sent[1] / sent[0] if sent[0] else None, SENT_BOUND
        )
    least = [statistics.mean(cost.least[side] for cost in costs) for side in (0, 1)]
    bound = 1 + flags(costs[0], len(costs)) / least[0]
    yield Row(name, "least, kB/step", kilo(least[0]), kilo(least[1]), least[1] / least[0], bound)
    yield Row(name, "collectives/step", told(costs[0].calls[0]), told(costs[0].calls[1]), None)
    yield from time_rows(name, costs[0].times)
    yield Row(name, "weights at the end", "", "equal" if all(cost.equal for cost in costs) else "DIFFERENT", None)


def flags(cost: Cost, ranks: int) -> float:
    """Bytes that a rank of ours sends besides gradients and parameters, at most."""
    return (cost.parameters + (PADDING - 1) * ranks * cost.calls[1].get("alltoall_base_", 0)) * (ranks - 1) / ranks


def time_rows(name: str, times: Times) -> Iterator[Row]:
    """Medians of both, and of the ratio."""
    for what, seconds, bound in (("time", times.wall, TIME_BOUND), ("cpu", times.cpu, None)):
        real, ours = (f"{1e3 * statistics.median(side):.2f}" for side in seconds)
        found = ratios(seconds)
        yield Row(name, f"{what}, ms/step", real, ours, statistics.median(found), bound, interval(found))


def kilo(number: float) -> str:
    """Bytes as kB."""
    return f"{number / 1000:.1f}"


def told(calls: dict[str, int]) -> str:
    """``3 broadcast, 2 reduce``."""
    return ", ".join(f"{count} {name.strip('_')}" for name, count in sorted(calls.items()))


def show(rows: list[Row], title: str) -> None:
    """The table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in ("case", "", "real", "ours", "ours / real", "bound"):
        table.add_column(column, justify="left" if column in ("case", "") else "right")
    for row in rows:
        found = "" if row.ratio is None else f"{row.ratio:.3f}"
        found += "" if row.interval is None else " ({:.2f} to {:.2f})".format(*row.interval)
        bound = "" if row.bound is None else f"{row.bound:.3f}{'' if row.kept else '  broken'}"
        table.add_row(row.case, row.what, row.real, row.ours, found, bound)
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)


def run(pool: RankPool, nprocs: int, names: list[str], rounds: int, tiny: bool = False) -> list[Row]:
    """All lines of the cases asked for."""
    rows: list[Row] = []
    for name in names:
        if name == "checkpoint":
            rows += time_rows(name, pool.run(measure_checkpoint, nprocs, rounds, tiny, timeout=600)[0])
        else:
            rows += rows_of(name, pool.run(measure, nprocs, name, rounds, tiny, timeout=600))
    return rows


def main() -> int:
    """Measure, print, and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--case", nargs="+", choices=[*CASES, "checkpoint"], default=[*CASES, "checkpoint"])
    parser.add_argument("--tiny", action="store_true", help="tiny models, for a look at how it works")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is broken")
    options = parser.parse_args()
    with RankPool() as pool:
        rows = run(pool, options.nprocs, options.case, options.rounds, options.tiny)
    load = os.getloadavg()[0]
    busy = f"; load average {load:.0f} on {os.cpu_count()} cores" if load > options.nprocs + 1 else ""
    show(rows, f"FairScale 0.4.13 and fsshard.compat.fairscale, {options.nprocs} ranks, {options.rounds} rounds{busy}")
    return 1 if options.check and not all(row.kept for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
