"""Did the upgrade change the trainings of the examples? Recorded under one torch, compared under another.

python -m tests.parity.versions --record build/traces                                # under the old torch
python -m tests.parity.versions --against build/traces --table docs/data/parity.md        # under the new one
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fsshard import recipes
from fsshard.launching.pool import RankPool
from fsshard.parity import Cell, ParityReport, Trace, compare, record
from fsshard.parity.trace import environment
from tests.parity import page

BACKENDS = ("fairscale", "fsdp", "fsdp2", "ddp")
STEPS, WORLD_SIZE = 5, 2


def record_all(folder: Path, pool: RankPool) -> None:
    """Each recipe under ddp, whose bits are those of every engine on two ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in recipes.__all__:
        record(name, steps=STEPS, world_size=WORLD_SIZE, pool=pool).save(folder / f"{name}.json")
        print(f"{name}: recorded", flush=True)


def compare_all(folder: Path, pool: RankPool) -> dict[str, ParityReport]:
    """Recipe -> what all engines made of it here, beside what was recorded."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        trace = Trace.load(file)
        report = compare(file.stem, backends=BACKENDS, against=trace, pool=pool)
        print(f"{file.stem}: {[cell.verdict for cell in report]}\n{report}\n", flush=True)
        found[file.stem] = report
    return found


def document(found: dict[str, ParityReport]) -> str:
    """The table, with what differs first."""
    told = (text for report in found.values() for text in report.changes if not text.startswith("commit "))
    changes = list(dict.fromkeys(told))
    here = environment()
    rows = [[name, *(cell.verdict for cell in report), _first(report.cells)] for name, report in found.items()]
    lines = [["recipe", *BACKENDS, "first difference"], ["---"] * (len(BACKENDS) + 2), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    where = f"{STEPS} steps on {WORLD_SIZE} ranks, on {here['processor']}, kernels {here['kernels']}."
    return f"{where} Between the two: {'; '.join(changes)}.\n\n{table}"


def _first(cells: Sequence[Cell]) -> str:
    """Where the last engine's bits differ first, and the module that computed them."""
    first = cells[-1].first_divergence
    if first is None:
        return "none"
    where = f"step {first.step}, {first.quantity}" + (f" of `{first.name}`" if first.name else "")
    return f"{where}; {cells[-1].reason}" if cells[-1].reason else where


def main(given: Sequence[str] | None = None) -> int:
    """0 only if every training is the same."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.versions", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--record", type=Path, metavar="DIR", help="record here")
    parser.add_argument("--against", type=Path, metavar="DIR", help="compare with what was recorded here")
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="write the table here")
    options = parser.parse_args(given)
    with RankPool() as pool:
        if options.record is not None:
            record_all(options.record, pool)
            return 0
        found = compare_all(options.against, pool)
    if options.table is not None:
        page.write_part(options.table, "versions", document(found))
    return int(not all(report.ok for report in found.values()))


if __name__ == "__main__":
    sys.exit(main())
