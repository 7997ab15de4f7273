"""Ranks that save in a loop and are killed at random moments; after each kill the job must go on as if never stopped.

    python -m tests.checkpoint.kills --ranks 2 --kills 200
    python -m tests.checkpoint.kills --ranks 4 --kills 200

Every life of the job loads ``latest()``, trains and saves at every step, by turns blocking and not. What is killed is
all ranks, one of them, or rank 0, which renames. In the next life the step that was loaded must be one of the last two
saves, and weights, moments, schedule and random numbers must have the digest of an undisturbed run at that step.

Lives are forked from a process that has imported everything, so that two hundred of them take a minute or two.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fsshard
from tests.portability.runs import Run

LONGEST_LIFE = 0.6  # seconds from the first step on until the kill
PATIENCE = 30.0  # seconds for survivors to notice
LAST_STEP = 60  # then the job begins anew
VICTIMS = ("all", "one", "rank 0")


# ------------------------------------------------------------------------------------------------ in a rank


def digest(run: Run) -> str:
    """Of everything that training depends on. Collective."""
    sha = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            plain = torch.view_as_real(value) if value.is_complex() else value
            sha.update(plain.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                sha.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            sha.update(repr(value).encode())

    add(run.whole())
    add(torch.get_rng_state())
    return sha.hexdigest()


def live(rank: int, ranks: int, folder: Path, store: Path, backend: str, last: int, tell: Connection) -> None:
    """One life of one rank, until ``last`` steps or the kill."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=PATIENCE / 2),
    )
    run = Run(backend)
    found = fsshard.latest(folder)
    if found is not None:
        run.load(found)
    tell.send(("loaded", run.step, digest(run)))
    while run.step < last:
        run.train(1)
        tell.send(("step", run.step, digest(run)))
        tell.send(("saves", run.step, ""))
        run.save(folder / "last", block=bool(run.step % 2))
    fsshard.wait_for_saves()
    tell.send(("end", run.step, ""))
    dist.destroy_process_group()


def start(rank: int, *args: Any) -> tuple[int, Connection]:
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
        live(rank, *args, theirs)
        code = 0
    except BaseException as error:
        theirs.send(("error", -1, "".join(traceback.format_exception(error))))
    finally:
        theirs.close()
        os._exit(code)


# ------------------------------------------------------------------------------------------------ in the parent


@dataclass
class Job:
    """What is known of the job over all its lives."""

    ranks: int
    folder: Path
    chance: random.Random
    reference: list[dict[int, str]] = field(default_factory=list)  # rank -> step -> digest
    begun: int = 0  # the step of the last save that rank 0 began; the one before it was whole by then
    loads: dict[str, int] = field(default_factory=dict)
    lives: int = 0
    surprises: list[str] = field(default_factory=list)

    def life(self, backend: str, kill: str | None, last: int = LAST_STEP) -> bool:
        """One life; whether it came to its end."""
        self.lives += 1
        store = self.folder / f"store-{self.lives}"
        found = [start(rank, self.ranks, self.folder / "ckpt", store, backend, last) for rank in range(self.ranks)]
        pids, pipes = [pid for pid, _ in found], {pipe: rank for rank, (_, pipe) in enumerate(found)}
        before, stepped, ended = self.begun, False, 0
        deadline = time.monotonic() + 120.0
        moment = None
        while pipes:
            left = (deadline if moment is None else moment) - time.monotonic()
            ready = wait(list(pipes), max(0.0, left))
            if not ready:
                if moment is None:
                    raise TimeoutError(f"life {self.lives} under {backend} hangs")
                self._kill(kill, pids)
                moment, deadline = None, time.monotonic() + PATIENCE
                kill = None
            for pipe in ready:
                rank = pipes[pipe]  # type: ignore[index]
                try:
                    what, step, text = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    del pipes[pipe]  # type: ignore[arg-type]
                    continue
                ended += what == "end"
                self._heard(rank, what, step, text, before)
                if what == "step" and not stepped and kill is not None:
                    stepped, moment = True, time.monotonic() + self.chance.uniform(0.0, LONGEST_LIFE)
        for pid in pids:
            os.waitpid(pid, 0)
        return ended == self.ranks

    def _kill(self, kill: str | None, pids: list[int]) -> None:
        chosen = {"all": pids, "one": [self.chance.choice(pids)], "rank 0": pids[:1]}[str(kill)]
        for pid in chosen:
            os.kill(pid, signal.SIGKILL)

    def _heard(self, rank: int, what: str, step: int, text: str, before: int) -> None:
        if what in ("loaded", "step"):
            known = self.reference[rank].setdefault(step, text)
            if known != text:
                self.surprises.append(
                    f"life {self.lives}, rank {rank}: step {step} ({what}) is not the undisturbed one"
                )
            if what == "loaded" and step < before - 1:
                self.surprises.append(f"life {self.lives}: loaded step {step}, the last save was of {before}")
            elif what == "loaded" and rank == 0:
                kind = "nothing yet" if not step else "the last" if step == before else "the one before"
                self.loads[kind] = self.loads.get(kind, 0) + 1
        elif what == "saves" and rank == 0:
            self.begun = step
        elif what == "error" and not any(
            name in text for name in ("CheckpointError", "DistBackendError", "gloo", "store")
        ):
            self.surprises.append(f"life {self.lives}, rank {rank}: {text}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(options.ranks, Path(folder), random.Random(options.seed))
        job.reference = [{} for _ in range(options.ranks)]
        # Float32 parity is exact at two ranks, so each life may have another engine there.
        backends = ["ddp", "fairscale", "fsdp", "fsdp2"] if options.ranks <= 2 else ["fsdp2"]
        if not job.life("fsdp2", None):
            job.surprises.append("the undisturbed run did not come to its end")
        forget(job)
        for number in range(options.kills):
            job.life(job.chance.choice(backends), job.chance.choice(VICTIMS))
            if job.begun >= LAST_STEP:
                forget(job)
            if (number + 1) % 20 == 0:
                print(
                    f"{number + 1}/{options.kills} kills, {len(job.surprises)} surprises", file=sys.stderr, flush=True
                )
    print(json.dumps({"ranks": options.ranks, "kills": options.kills, "loaded": job.loads, "surprises": job.surprises}))
    return 1 if job.surprises else 0


def forget(job: Job) -> None:
    """Begin the job anew."""
    folder = job.folder / "ckpt"
    if folder.exists():
        folder.rename(job.folder / f"done-{job.lives}")
    job.begun = 0


if __name__ == "__main__":
    sys.exit(main())
