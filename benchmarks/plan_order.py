"""The order of plans by predicted time beside the order by measured time, on CPU ranks.

    python benchmarks/plan_order.py [--rounds 15]

Two dozen plans of one model on two ranks: engines, units, units that stay gathered, recomputed blocks. Times are
predicted by fsshard.estimate, before anything runs, with the constants that ``fsshard doctor`` would write,
measured on the same ranks. Then every plan trains, in turns; measured is the least CPU time of a step, averaged over
the ranks, for time by the clock on a machine that does other things says nothing of a plan. The last lines are rank
correlations (Spearman's) of the sum of the five terms, and of each term alone.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

import fsshard
from benchmarks.pairs import Step, measure
from fsshard.launching.pool import RankPool
from fsshard.recipes.recipe import Recipe
from fsshard.simulation.estimating import estimate_of, job_of
from fsshard.simulation.machine import TERMS, Machine
from fsshard.simulation.measuring import measured_machine
from fsshard.simulation.result import Estimate
from fsshard.simulation.worker import Simulator, run_job

WIDTH, LAYERS, SAMPLES, RANKS = 192, 6, 64, 2
AGREES = 0.9
"""The least rank correlation."""


class Blocks(nn.Module):
    """Residual blocks, and a complex layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.last((x.to(torch.complex64) @ self.mix).abs())
        return result


def samples(rank: int, world_size: int, number: int) -> Tensor:
    """Return a rank's batch."""
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(100 * rank + number))


def square(model: Any, batch: Tensor) -> Tensor:
    """Return a number."""
    loss: Tensor = model(batch).square().mean()
    return loss


def blocks() -> Recipe:
    """Return what is trained."""
    return Recipe(build=Blocks, batches=samples, loss=square, optimizer=torch.optim.AdamW)


def plans() -> list[dict[str, Any]]:
    """Return the settings of every plan."""
    found: list[dict[str, Any]] = []
    for again in (None, {"Sequential"}):
        more: dict[str, Any] = {"activation_checkpointing": again} if again else {}
        found += [{"backend": name, **more} for name in ("ddp", "fairscale")]
        for units in (None, {"Sequential"}, {"Linear"}):
            found.append({"backend": "fsdp2", "auto_wrap_policy": units, **more})
            found.append({"backend": "fsdp2", "auto_wrap_policy": units, "reshard_after_forward": False, **more})
            if not (again and units == {"Linear"}):  # FSDP1 gathers a unit below a recomputed block twice
                found.append({"backend": "fsdp", "auto_wrap_policy": units, **more})
        found.append({"backend": "fsdp2", "auto_wrap_policy": {"Linear"}, "merge_below": 0, **more})
    return found


def predicted(machine: Machine) -> list[Estimate]:
    """Return an estimate of each plan, all made in one process."""
    found = []
    more: dict[str, Any] = {"source": blocks(), "changes": {}, "device": "cpu", "cpu_offload": False, "real": False}
    with Simulator("plan_order", quiet=True) as simulator:
        for settings in plans():
            others = {key: value for key, value in settings.items() if key != "backend"}
            job = job_of(settings["backend"], RANKS, None, settings=others, **more)
            found.append(estimate_of(RANKS, job, simulator.ask(run_job, job), machine))
    return found


def work(rounds: int) -> list[float]:
    """Train every plan in turns; return the least CPU seconds of each one's step on this rank. Collective."""
    warnings.filterwarnings("ignore")
    return [min(times.cpu) for times in measure([_step_of(settings) for settings in plans()], rounds)]


def _step_of(settings: dict[str, Any]) -> Step:
    torch.manual_seed(0)
    model = fsshard.wrap(Blocks(), **settings)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-4)
    batch = samples(torch.distributed.get_rank(), RANKS, 0)

    def step(number: int) -> None:
        square(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def correlation(first: list[float], second: list[float]) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank."""
    pair = torch.tensor([_ranks(first), _ranks(second)], dtype=torch.float64)
    return float(torch.corrcoef(pair)[0, 1])


def _ranks(values: list[float]) -> list[float]:
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


def name_of(settings: dict[str, Any]) -> str:
    """Return a plan's settings as text."""
    return ", ".join(f"{key}={value}" if key != "backend" else str(value) for key, value in settings.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    with RankPool() as pool:
        machine = pool.run(measured_machine, RANKS, "cpu", timeout=600)[0]
        print(machine, end="\n\n", flush=True)
        estimates = predicted(machine)
        by_rank = pool.run(work, RANKS, options.rounds, timeout=600)
    measured = [sum(values) / RANKS for values in zip(*by_rank, strict=True)]
    head = ["plan", "predicted ms", "CPU ms", *(f"{term} ms" for term in TERMS)]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for settings, one, seconds in sorted(zip(plans(), estimates, measured, strict=True), key=lambda row: row[2]):
        numbers = [one.seconds, seconds, *one.terms.values()]
        print("| " + " | ".join([name_of(settings), *(f"{1e3 * each:.2f}" for each in numbers)]) + " |")
    agrees = correlation([one.seconds for one in estimates], measured)
    alone = {term: correlation([one.terms[term] for one in estimates], measured) for term in TERMS}
    print(f"\n{len(measured)} plans, rank correlation with CPU time: {agrees:.3f}; of single terms:")
    print(", ".join(f"{term} {value:.3f}" for term, value in alone.items()))
    print(f"at least {AGREES}: {'yes' if agrees >= AGREES else 'NO'}")
    return 0 if agrees >= AGREES else 1


if __name__ == "__main__":
    sys.exit(main())
