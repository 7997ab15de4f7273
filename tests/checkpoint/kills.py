"""Ranks that save in a loop and are killed at random moments; after each kill the job must go on as if never stopped.

    python -m tests.checkpoint.kills --ranks 2 --kills 200
    python -m tests.checkpoint.kills --ranks 4 --kills 200
    python -m tests.checkpoint.kills --ranks 4 --kills 200 --moving

Every life of a job loads ``latest()``, trains and saves at every step, by turns blocking and not. All ranks are killed,
one of them, or rank 0, which renames. Those left are killed a moment later, as an elastic launcher does, or must end by
themselves with an error that says why. In the next life the step that was loaded must be one of the last two saves, and
weights, moments, schedule and random numbers must have the digest of an undisturbed run at that step and at those that
follow. With ``--moving`` each life has another number of ranks, and trains by ``model.leaves``. Every second job saves
to ever new names and keeps two of them. In the end nothing may be left of the saves that were cut short. Lives are
forked from a process that has imported everything, and two jobs run side by side.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

import fsshard
from fsshard.checkpoint.loading import Loaded
from fsshard.errors import FsshardError
from tests.portability.runs import Net, Run

LONGEST_LIFE = 0.5  # seconds from the first step on until the kill
LONGEST_SURVIVAL = 0.2  # seconds until a launcher would kill those left
PATIENCE = 20.0  # seconds for those that are left to notice; they take three where the machine has nothing else to do
SLOWEST_START = 120.0  # seconds of silence of a life until it is said to hang
VICTIMS = ("all", "one", "rank 0")
ENGINES = ("fsdp2", "ddp", "fairscale", "fsdp")
"""Lives change between them: their bits are the same on any number of ranks."""


def digest(run: Run) -> str:
    """Hash everything that training depends on. Collective."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (torch.view_as_real(value) if value.is_complex() else value).tolist()
        if isinstance(value, dict):
            return sorted((str(key), plain(item)) for key, item in value.items())
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else repr(value)

    # The state of a rank's generator belongs to a number of ranks; leaves are seeded by their steps.
    random_numbers = None if isinstance(run, MovingRun) else torch.get_rng_state()
    return hashlib.sha256(repr(plain([run.whole(), random_numbers])).encode()).hexdigest()


class MovingRun(Run):
    """A training that is the same on any number of ranks, with an average of its weights."""

    def __init__(self, backend: str) -> None:
        super().__init__(backend, net=Steady)
        self.average = fsshard.EMA(self.model, decay=0.9)

    def train(self, steps: int = 1) -> list[float]:
        for _ in range(steps):
            for leaf in self.model.leaves(LEAVES, seed=self.step):
                rows = fsshard.leaf_samples(len(DATA), 3, leaves=LEAVES, step=self.step, leaf=leaf)
                loss = (self.model(DATA[rows]) - DATA[rows].roll(1, 1)).square().mean()
                self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            self.model.clip_grad_norm_(1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.average.update()
            self.scheduler.step()
            self.step += 1
        return []

    def save(self, path: str, **options: Any) -> Any:
        return super().save(path, **options, ema=self.average)

    def load(self, path: str, **options: Any) -> Loaded:
        return super().load(path, **options, ema=self.average)

    def whole(self) -> dict[str, Any]:
        return {**super().whole(), "average": self.average.state_dict()}


class Steady(Net):
    """Without running statistics, which would be those of the leaves that rank 0 has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.GroupNorm(2, 6)


LEAVES = 4
DATA = torch.randn(60, 5, generator=torch.Generator().manual_seed(5))


def expected(error: BaseException) -> bool:
    """Tell whether a rank whose neighbour was killed may end so: a typed error, or torch's own out of training."""
    frames = [frame.filename.replace(os.sep, "/") for frame in traceback.extract_tb(error.__traceback__)]
    lost = isinstance(error, RuntimeError) and any(text in str(error) for text in ("gloo", "Timed out", "peer"))
    return isinstance(error, FsshardError) or (lost and not any("fsshard/checkpoint/" in file for file in frames))


@dataclass
class Job:
    """A job over all its lives."""

    ranks: int
    folder: Path
    chance: random.Random
    steps: int  # then it begins anew
    reference: list[dict[int, str]]  # rank -> step -> digest
    rotates: bool = False  # saves to ever new names
    moves: bool = False  # lives have other numbers of ranks, up to `ranks`
    now: int = 0  # ranks of this life
    begun: int = 0  # the step of the last save that rank 0 began; the one before it was whole by then
    lives: int = 0
    kills: int = 0
    loads: Counter[str] = field(default_factory=Counter)
    surprises: list[str] = field(default_factory=list)

    # -- in a rank

    def live(self, backend: str, saves: bool, rank: int, tell: Connection) -> None:
        """One life of one rank, until its last step or the kill."""
        torch.set_num_threads(1)
        logging.getLogger("fsshard").setLevel(logging.CRITICAL)  # of failed saves, which are what is asked for here
        store = dist.FileStore(str(self.folder / f"store-{self.lives}"), self.now)
        patience = timedelta(seconds=PATIENCE / 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.now, timeout=patience)
        run = MovingRun(backend) if self.moves else Run(backend)
        folder = self.folder / "ckpt"
        run.scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.02, total_steps=10_000)
        newest = fsshard.latest(folder)
        if newest is not None:
            run.load(str(newest), verify=True, timeout=PATIENCE / 2)
        tell.send(("loaded", run.step, digest(run)))
        while run.step < self.steps:
            run.train(1)
            tell.send(("step", run.step, digest(run)))
            if saves:
                fsshard.wait_for_saves()
                tell.send(("saves", run.step, ""))
                name, keep = (f"step-{run.step:04d}", 2) if self.rotates else ("last", None)
                run.save(str(folder / name), block=bool(run.step % 2), timeout=PATIENCE / 2, keep=keep)
        fsshard.wait_for_saves()
        tell.send(("end", run.step, ""))
        dist.destroy_process_group()

    def start(self, backend: str, saves: bool, rank: int) -> tuple[int, Connection]:
        """Fork a rank."""
        ours, theirs = Pipe(duplex=False)
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            theirs.close()
            return pid, ours
        code = 1
        try:
            ours.close()
            self.live(backend, saves, rank, theirs)
            code = 0
        except BaseException as error:
            if not expected(error):
                theirs.send(("error", 0, "".join(traceback.format_exception(error))))
        finally:
            theirs.close()
            os._exit(code)

    # -- in the parent

    def go_on(self, kills: int) -> Job:
        """Lives that are cut short, until there were that many kills."""
        fruitless = 0
        while self.kills < kills and fruitless < 10 and len(self.surprises) < 20:
            before = self.kills
            backend, victim = self.chance.choice(ENGINES), self.chance.choice(VICTIMS)
            self.life(backend, victim, patient=self.chance.random() < 0.3)
            fruitless = 0 if self.kills > before else fruitless + 1
            if self.begun >= self.steps:
                self.look_for_leaks()
                if (self.folder / "ckpt").exists():
                    (self.folder / "ckpt").rename(self.folder / f"done-{self.lives}")
                self.begun = 0
        self.look_for_leaks()
        if self.kills < kills:
            self.surprises.append(f"{self.kills} kills of {kills}")
        return self

    def look_for_leaks(self) -> None:
        """Note what latest() leaves other than two checkpoints, and a third where a kill came before the removal."""
        folder = self.folder / "ckpt"
        if folder.exists():
            fsshard.latest(folder)
            names = {path.name for path in folder.iterdir()}
            names -= {name for name in names if name.endswith(".lock") and not (folder / name).read_bytes()}  # unsigned
            if len(names) > 3 or any(name[0] == "." for name in names):
                self.surprises.append(f"after life {self.lives} there are {sorted(names)}")

    def life(self, backend: str, kill: str | None, *, patient: bool = False, saves: bool = True) -> bool:
        """One life, in which one of VICTIMS is killed, or none; tell whether it came to its end.

        ``patient``: those that are left may end by themselves. ``saves``: at every step, or never.
        """
        self.lives += 1
        sizes = [size for size in (1, 2, 4) if size <= self.ranks]
        self.now = self.chance.choice(sizes) if self.moves else self.ranks
        started = [self.start(backend, saves, rank) for rank in range(self.now)]
        pids = [pid for pid, _ in started]
        try:
            return self._watch(backend, kill, patient, pids, {pipe: rank for rank, (_, pipe) in enumerate(started)})
        finally:
            kill_all(pids)
            for pid in pids:
                os.waitpid(pid, 0)

    def _watch(
        self, backend: str, kill: str | None, patient: bool, pids: list[int], pipes: dict[Connection, int]
    ) -> bool:
        begun, ended = self.begun, 0
        plan = []  # what is done to the ranks, and when
        silence = time.monotonic() + SLOWEST_START
        while pipes:
            moment, deed = plan[0] if plan else (silence, "give up")
            ready = cast("list[Connection]", wait(list(pipes), max(0.0, moment - time.monotonic())))
            if not ready and deed == "give up":
                left = sorted(pipes.values())
                self.surprises.append(f"life {self.lives} under {backend}, {kill} killed: ranks {left} hang")
                return False
            if not ready:
                self.kills += deed != "rest"
                kill_all({"one": [self.chance.choice(pids)], "rank 0": pids[:1]}.get(deed, pids))
                plan.pop(0)
                silence = time.monotonic() + PATIENCE
            for pipe in ready:
                try:
                    what, step, text = pipe.recv()
                except (EOFError, ConnectionResetError):
                    del pipes[pipe]
                    continue
                ended += what == "end"
                if what == "step" and kill is not None:
                    moment = time.monotonic() + self.chance.uniform(0.0, LONGEST_LIFE)
                    plan = [(moment, kill)]
                    if kill != "all" and not patient:
                        plan.append((moment + self.chance.uniform(0.0, LONGEST_SURVIVAL), "rest"))
                    kill = None
                self._heard(pipes[pipe], what, step, text, begun)
        return ended == self.now

    def _heard(self, rank: int, what: str, step: int, text: str, begun: int) -> None:
        where = f"life {self.lives}, rank {rank}"
        reference = self.reference[0 if self.moves else rank]
        if what in ("loaded", "step") and reference.setdefault(step, text) != text:
            self.surprises.append(f"{where}: step {step} ({what}) is not the undisturbed one")
        if what == "loaded" and step not in (begun, max(0, begun - 1)):
            self.surprises.append(f"{where}: loaded step {step}, the last save was of {begun}")
        elif what == "loaded" and rank == 0 and begun:
            self.loads["the last" if step == begun else "the one before"] += 1
        elif what == "saves" and rank == 0:
            self.begun = step
        elif what == "error":
            self.surprises.append(f"{where}: {text}")


def kill_all(pids: list[int]) -> None:
    """Kill those that live still; none was waited for yet, so no number can be another process's."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def campaign(ranks: int, kills: int, seed: int, steps: int, moves: bool = False) -> dict[str, Any]:
    """Kill that often, in jobs side by side; return what was loaded how often, and all surprises."""
    with warnings.catch_warnings():  # all imports of a life, in this process: 3 of its 3.3 seconds
        warnings.simplefilter("ignore")
        for name in ("torch._dynamo", "torch.distributed.fsdp", "fairscale.nn"):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(number) for number in range(3)]
        for place in places:
            place.mkdir()
        undisturbed = Job(ranks, places.pop(), random.Random(seed), steps, [{} for _ in range(ranks)], moves=moves)
        if not undisturbed.life(ENGINES[0], None, saves=False):
            undisturbed.surprises.append("the undisturbed run did not come to its end")
        done = [undisturbed]
        if not undisturbed.surprises:
            with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
                running = []
                for number, place in enumerate(places):
                    chance = random.Random(f"{seed} {number}")
                    rotates = bool(number % 2)
                    job = Job(ranks, place, chance, steps, undisturbed.reference, rotates=rotates, moves=moves)
                    running.append(pool.submit(job.go_on, (kills + number) // 2))
                done += [job.result() for job in running]
    return {
        "ranks": ranks,
        "kills": sum(job.kills for job in done),
        "loaded": dict(sum((job.loads for job in done), Counter())),
        "surprises": [text for job in done for text in job.surprises],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], choices=(2, 4), help="one campaign each")
    parser.add_argument("--kills", type=int, nargs="+", default=[200], help="of each campaign")
    parser.add_argument("--steps", type=int, default=60, help="then a job begins anew")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--moving", action="store_true", help="lives have 1, 2 or 4 ranks, up to those of the campaign")
    options = parser.parse_args(arguments)
    code = 0
    for ranks, kills in zip(options.ranks, options.kills, strict=True):
        report = campaign(ranks, kills, options.seed, options.steps, options.moving)
        print(json.dumps(report), flush=True)
        code |= bool(report["surprises"])
    return code


if __name__ == "__main__":
    sys.exit(main())
