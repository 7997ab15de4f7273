"""Measures the cost of a checkpoint: fsshard.save and load against DCP and torch.save, in turns, in one run.

    python benchmarks/checkpoint.py [--nprocs 2] [--megabytes 400] [--rounds 15] [--folder DIR]

The state is a model under FSDP2 with AdamW (a third weights, two thirds moments). Everything is fsynced: DCP's default
writer does so itself, ``torch.save`` of the gathered dict is followed by a sync. What was written is loaded by as many
ranks and by half as many. Page caches are warm for every side. An asynchronous save holds up training until it has its
copy: that is compared with DCP's ``async_save``, and with copying the state once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fsshard
from benchmarks.pairs import profiled

WIDTH = 1024
TARGETS = {
    "save / DCP": 0.7,
    "load elsewhere / DCP": 0.55,  # two thirds of it are reads from the page cache, which DCP needs as well
    "async blocks / DCP's": 1,
    "async blocks / one copy": 2,  # of the state in memory, below which no save can let training go on
    "disk / state": 1.01,
}


def network(megabytes: int) -> nn.Module:
    """Linear layers whose weights and two moments take ``megabytes``."""
    layers = max(1, round(megabytes * 1e6 / 3 / (4 * WIDTH * WIDTH)))
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])


def ours(megabytes: int) -> tuple[Any, Any]:
    model = fsshard.wrap(network(megabytes), backend="fsdp2", auto_wrap_policy={nn.Linear})
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
    return one_step(model, optimizer)


def theirs(megabytes: int) -> tuple[Any, Any]:
    model = network(megabytes)
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    return one_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def one_step(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """The optimizer has its state then."""
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Ours:
    """fsshard.save and fsshard.load."""

    def __init__(self, megabytes: int) -> None:
        self.model, self.optimizer = ours(megabytes)

    def save(self, path: Path) -> None:
        fsshard.save(path, self.model, self.optimizer)

    def begin(self, path: Path) -> Callable[[], object]:
        """An asynchronous save, and what waits for it."""
        return fsshard.save(path, self.model, self.optimizer, block=False).wait

    def load(self, path: Path) -> None:
        fsshard.load(path, self.model, self.optimizer)


class DCP:
    """torch.distributed.checkpoint with its default writer and reader."""

    def __init__(self, megabytes: int) -> None:
        self.model, self.optimizer = theirs(megabytes)
        self.group = dist.new_group()  # its thread's collectives would get between those of training

    def save(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def begin(self, path: Path) -> Callable[[], object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        saved: Any = dcp.async_save(
            {"model": model, "optimizer": optimizer}, checkpoint_id=path, process_group=self.group
        )
        return saved.result  # type: ignore[no-any-return]

    def load(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


class Full:
    """The whole dict gathered on rank 0, torch.save, and each rank's part of the mapped file."""

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def __init__(self, megabytes: int) -> None:
        self.model, self.optimizer = theirs(megabytes)

    def save(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        if dist.get_rank() == 0:
            path.mkdir()
            with open(path / "state.pt", "wb") as file:
                torch.save({"model": model, "optimizer": optimizer}, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def load(self, path: Path) -> None:
        state = torch.load(path / "state.pt", mmap=True)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )


SIDES: dict[str, Callable[[int], Any]] = {"fsshard": Ours, "DCP": DCP, "torch.save": Full}
ASYNC = {"fsshard": "async blocks", "DCP": "DCP's async blocks"}
CPU = {"blocking": "blocking CPU", "async blocks": "async blocks CPU"}
"""Of the thread that calls, which other processes of the machine do not hold up."""


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of the slowest rank, by the clock and of this thread's processor."""
    dist.barrier()
    start, busy = time.perf_counter(), time.thread_time()
    work()
    taken = torch.tensor([time.perf_counter() - start, time.thread_time() - busy])
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    wall, cpu = taken.tolist()
    return wall, cpu


def on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def remove(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for found in path.parent.glob(f"{path.name}*"):
            shutil.rmtree(found)
        os.sync()  # the disk is at rest when the clock starts
    dist.barrier()


def measure_saves(_: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Saves in turns, and asynchronous ones beside blocking ones; what each side wrote last stays."""
    torch.set_num_threads(1)
    folder = Path(options.folder)
    sides = {name: side(options.megabytes) for name, side in SIDES.items()}
    times: dict[str, list[float]] = {name: [] for name in (*sides, "one copy", *ASYNC.values(), *CPU.values())}
    numbers = [*parts(sides["DCP"])]
    copies = [number.clone() for number in numbers]
    for turn in range(options.rounds + 1):  # the first is for warming up
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            path = folder / name
            remove(path)
            taken, busy = seconds(lambda name=name, path=path: sides[name].save(path))  # type: ignore[misc]
            times[name] += [taken] if turn else []
            if name == "fsshard" and turn:
                times[CPU["blocking"]].append(busy)
        for name in list(ASYNC)[:: 1 if turn % 2 else -1]:
            remove(folder / "async")
            blocked, busy = measure_async(sides[name], folder / "async")
            times[ASYNC[name]] += [blocked] if turn else []
            if name == "fsshard" and turn:
                times[CPU["async blocks"]].append(busy)
        taken, _ = seconds(lambda: [copy.copy_(number) for copy, number in zip(copies, numbers, strict=True)])
        times["one copy"] += [taken] if turn else []
    state = sum(p.numel() for p in network(options.megabytes).parameters()) * 4 * 3
    profile = profiled([lambda number: sides["fsshard"].save(folder / f"profiled{number}")], 3, 5)
    waits: list[Callable[[], object]] = []
    begun = profiled([lambda _: waits.append(sides["fsshard"].begin(folder / "begun"))], 1, 8)
    waits[0]()
    return {
        "times": times,
        "profile": profile,
        "begun": begun,
        "state": state,
        "disk": {name: on_disk(folder / name) for name in sides},
    }


def parts(side: DCP) -> Iterator[torch.Tensor]:
    """Return this rank's parts of weights and of moments."""
    for parameter in side.model.parameters():
        yield parameter.detach().to_local()
        yield from (value.to_local() for value in side.optimizer.state[parameter].values() if value.ndim)


def measure_async(side: Any, path: Path) -> tuple[float, float]:
    """How long an asynchronous save holds up the training, and how long its thread computes in that."""
    waits: list[Callable[[], object]] = []
    blocked = seconds(lambda: waits.append(side.begin(path)))
    waits[0]()
    dist.barrier()
    return blocked


def measure_loads(_: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Loads in turns of what is there."""
    torch.set_num_threads(1)
    folder = Path(options.folder)
    sides = {name: side(options.megabytes) for name, side in SIDES.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(options.rounds + 1):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            taken, _ = seconds(lambda name=name: sides[name].load(folder / name))  # type: ignore[misc]
            times[name] += [taken] if turn else []
    return {"times": times, "profile": profiled([lambda _: sides["fsshard"].load(folder / "fsshard")], 3, 5)}


def ratio(times: dict[str, list[float]], ours: str, base: str) -> float:
    """Median over rounds of ours / base."""
    return statistics.median(a / b for a, b in zip(times[ours], times[base], strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", help="where to write; a temporary directory by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.folder = folder
        saves = fsshard.launch(measure_saves, nprocs=options.nprocs, args=(options,))
        loads = fsshard.launch(measure_loads, nprocs=options.nprocs, args=(options,))
        elsewhere = fsshard.launch(measure_loads, nprocs=max(1, options.nprocs // 2), args=(options,))
    return report(options, saves, loads, elsewhere)


def report(options: argparse.Namespace, saves: Any, loads: Any, elsewhere: Any) -> int:
    state = saves["state"]
    print(f"{options.nprocs} ranks, {state / 1e6:.0f} MB of weights and moments, {options.rounds} rounds, medians")
    heads = [("save s", 9), ("/ DCP", 7), ("load s", 9), ("/ DCP", 7), ("elsewhere s", 13), ("/ DCP", 7)]
    print(" " * 12 + "".join(f"{head:>{width}}" for head, width in [*heads, ("disk", 8)]))
    for name in SIDES:
        row = [statistics.median(found["times"][name]) for found in (saves, loads, elsewhere)]
        ratios = [ratio(found["times"], name, "DCP") for found in (saves, loads, elsewhere)]
        cells = "".join(
            f"{value:{width}.2f}{share:7.2f}" for value, share, width in zip(row, ratios, (9, 9, 13), strict=True)
        )
        print(f"{name:12}{cells}{saves['disk'][name] / state:8.3f}")
    print("elsewhere: at half the world size; disk: bytes written as a share of the state")
    found = {
        "save / DCP": ratio(saves["times"], "fsshard", "DCP"),
        "load elsewhere / DCP": ratio(elsewhere["times"], "fsshard", "DCP"),
        "async blocks / DCP's": ratio(saves["times"], "async blocks", "DCP's async blocks"),
        "async blocks / one copy": ratio(saves["times"], "async blocks", "one copy"),
        "disk / state": saves["disk"]["fsshard"] / state,
    }
    for name, value in found.items():
        print(f"{name:26}{value:7.3f}   (target: {TARGETS[name]:g})")
    print(f"{'async blocks / blocking':26}{ratio(saves['times'], 'async blocks', 'fsshard'):7.3f}")
    print(f"{'the same, CPU time':26}{ratio(saves['times'], CPU['async blocks'], CPU['blocking']):7.3f}")
    for what, profile in (("save", saves["profile"]), ("load", loads["profile"])):
        print("\n".join([f"{what}, ms under cProfile:", *profile]))
    print("\n".join(["asynchronous save until training goes on, ms under cProfile:", *saves["begun"]]))
    missed = [f"{name} is {value:.3f}, not {TARGETS[name]:g}" for name, value in found.items() if value > TARGETS[name]]
    if missed:
        print(f"missed: {'; '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
