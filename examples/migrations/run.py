"""Ten public migration guides: the script before and the one after, recorded as they are, and compared.

python examples/migrations/run.py                             # all of them, without a GPU
python examples/migrations/run.py accelerate zero             # some of them
python examples/migrations/run.py --page docs/data/migration.md    # writes the table and the answers of the page
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@dataclass(frozen=True)
class Pair:
    """A guide, and how its two scripts are started."""

    guide: str
    url: str
    before: list[str]
    after: list[str]
    rounds: bool = False  # it adds up in another order, which further runs of the script before bound


PAIRS = {
    "accelerate": Pair(
        "Accelerate, from a loop",
        "https://huggingface.co/docs/accelerate/basic_tutorials/migration",
        PYTHON,
        TORCHRUN,
        rounds=True,
    ),
    "ddp": Pair(
        "DDP, from DataParallel",
        "https://docs.pytorch.org/tutorials/beginner/ddp_series_multigpu.html",
        PYTHON,
        TORCHRUN,
        rounds=True,
    ),
    "fsdp2": Pair(
        "FSDP2, from FSDP1",
        "https://github.com/pytorch/torchtitan/blob/main/docs/fsdp.md",
        TORCHRUN,
        TORCHRUN,
        rounds=True,
    ),
    "fairscale": Pair(
        "torch's FSDP, from FairScale",
        "https://fairscale.readthedocs.io/en/latest/tutorials/oss.html",
        TORCHRUN,
        TORCHRUN,
    ),
    "lightning": Pair(
        "Lightning, from a loop", "https://lightning.ai/docs/pytorch/stable/starter/converting.html", TORCHRUN, TORCHRUN
    ),
    "fabric": Pair(
        "Fabric, from a loop",
        "https://lightning.ai/docs/fabric/stable/fundamentals/convert.html",
        PYTHON,
        PYTHON,
        rounds=True,
    ),
    "trainer": Pair(
        "Hugging Face's Trainer, from a loop", "https://huggingface.co/learn/llm-course/chapter3/4", PYTHON, PYTHON
    ),
    "amp": Pair("torch.amp, from torch.cuda.amp", "https://docs.pytorch.org/docs/stable/amp.html", PYTHON, PYTHON),
    "zero": Pair(
        "ZeroRedundancyOptimizer, from DDP",
        "https://docs.pytorch.org/tutorials/recipes/zero_redundancy_optimizer.html",
        TORCHRUN,
        TORCHRUN,
    ),
    "torchrun": Pair(
        "torchrun, from mp.spawn",
        "https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html",
        PYTHON,
        TORCHRUN,
    ),
}
WORDS = {"exact": "the same, to the last bit", "bound": "the same, within rounding"}


def is_mended(name: str) -> bool:
    """Return whether the script after has an option to train as the one before."""
    return "--mended" in (HERE / f"{name}_after.py").read_text(encoding="utf-8")


def answers(name: str, folder: Path) -> list[dict]:
    """Record a pair in a folder, and compare: as the guide says, and mended."""
    pair = PAIRS[name]
    _record(folder / "before.trace", [*pair.before, f"{name}_before.py"], repeat=4 * pair.rounds)
    _record(folder / "after.trace", [*pair.after, f"{name}_after.py"])
    found = [_compare(folder, "after.trace")]
    if is_mended(name):
        _record(folder / "mended.trace", [*pair.after, f"{name}_after.py", "--mended"])
        found.append(_compare(folder, "mended.trace"))
    return found


def _record(trace: Path, command: list[str], repeat: int = 0) -> None:
    options = ["--quiet", "--repeat", str(repeat)]
    subprocess.run([*PYTHON, "-m", "fsshard", "trace", str(trace), *options, "--", *command], cwd=HERE, check=True)


def _compare(folder: Path, after: str) -> dict:
    command = [*PYTHON, "-m", "fsshard", "compare", "before.trace", after, "--json", "-"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return {**json.loads(done.stdout), "text": f"$ fsshard compare before.trace {after}\n{done.stderr.strip()}"}


def block(found: list[dict]) -> str:
    """Return what the tool said, as the page shows it."""
    return "\n".join(["```console", *(one["text"] for one in found), "```"])


def row(name: str, found: list[dict]) -> str:
    """Return the pair's row of the table."""
    cells = [f"[{PAIRS[name].guide}]({PAIRS[name].url})"]
    cells += [", ".join(f"[{side}](../../examples/migrations/{name}_{side}.py)" for side in ("before", "after"))]
    cells += [WORDS.get(one["verdict"]) or f"**not the same**: {_first(one)}" for one in found]
    return f"| {' | '.join([*cells, ''][:4])} |"


def _first(one: dict) -> str:
    return [*one["causes"], *one["report"]["changes"], "bits alone"][0]


def write(page: Path, name: str, found: list[dict]) -> None:
    """Replace a pair's row of the page's table, and what the tool said, which is between two comments."""
    begin, end = f"<!-- recorded: {name} -->", f"<!-- end of recorded: {name} -->"
    line = re.compile(rf"^\| \[{re.escape(PAIRS[name].guide)}\].*$", re.MULTILINE)
    text = line.sub(lambda _: row(name, found), page.read_text(encoding="utf-8"))
    before, _, rest = text.partition(begin)
    page.write_text(f"{before}{begin}\n\n{block(found)}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def main() -> None:
    """Run the pairs that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *PAIRS], metavar="NAME", help=", ".join(PAIRS))
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="write what was found here")
    options = parser.parse_args()
    for name in options.names or PAIRS:
        with tempfile.TemporaryDirectory() as folder:
            found = answers(name, Path(folder))
        print(f"{PAIRS[name].guide}\n{block(found)}\n", flush=True)
        if options.page is not None:
            write(options.page, name, found)


if __name__ == "__main__":
    main()
