"""Records training scripts of public repositories as they are, on a CPU with little data, and compares them.

python examples/prove_migration/public/run.py CHECKOUTS                        # all scripts whose checkout is there
python examples/prove_migration/public/run.py CHECKOUTS minGPT nanoGPT
python examples/prove_migration/public/run.py CHECKOUTS --table docs/data/public-scripts.md

CHECKOUTS is a folder with checkouts of repositories by their names ("examples", "nanoGPT", ...). Each script is
recorded twice, which must be the same training, and once with one number changed, which must not. Three of them are
also moved to fsshard under fsdp2: `migration` below has the lines to replace, and the record must be that of the script
before. Needed beside fsshard's own requirements: hydra-core, boto3, datasets, evaluate, zencfg<1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
WRAP = 'fsshard.wrap(model, optimizer, backend="fsdp2")'

Edits = dict[str, list[tuple[str, str]]]
"""File -> lines to replace, and with what."""


def letters(folder: Path) -> None:
    """Write a text for models of characters, and its tokens as nanoGPT reads them."""
    import numpy

    text = "".join(chr(97 + (7 * index * index + index // 3) % 26) for index in range(6000))
    (folder / "letters.txt").write_text(text)
    tokens = folder / "data/letters"
    tokens.mkdir(parents=True, exist_ok=True)
    numbers = numpy.frombuffer(text.encode(), dtype=numpy.uint8).astype(numpy.uint16) - 97
    for split in ("train", "val"):
        numbers.tofile(tokens / f"{split}.bin")


def sentence_pairs(folder: Path) -> None:
    """Lay what scripts take from Hugging Face's hub beside them: a small BERT, MRPC's columns, a metric."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    torch.manual_seed(0)
    words = [first + second for first in "bcdfg" for second in "aeiou"]
    model = folder / "bert-base-cased"
    model.mkdir()
    (model / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizer(str(model / "vocab.txt")).save_pretrained(model)
    config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    BertForSequenceClassification(config).save_pretrained(model)
    glue = folder / "nyu-mll/glue"
    glue.mkdir(parents=True)
    splits = "\n".join(f"  - split: {split}\n    path: {split}.csv" for split in ("train", "validation", "test"))
    (glue / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{splits}\n---\n")
    rows = ["idx,sentence1,sentence2,label"]
    for index in range(64):
        one = " ".join(words[(index + place) % len(words)] for place in range(3 + index % 4))
        two = " ".join(words[(3 * index + place) % len(words)] for place in range(4))
        rows.append(f"{index},{one},{two},{index % 2}")
    for split in ("train", "validation", "test"):
        (glue / f"{split}.csv").write_text("\n".join(rows) + "\n")
    metric = folder / "glue"
    metric.mkdir()
    (metric / "glue.py").write_text(METRIC)


METRIC = """import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(a == b for a, b in zip(predictions, references)) / len(references)}
"""


def wikitext(folder: Path) -> None:
    """Write a text of as many words as the script's splits need."""
    (folder / "data").mkdir()
    words = " ".join(f"word{7 * index % 31}" for index in range(35 * 4080))
    (folder / "data/wikitext-2.txt").write_text(words)


@dataclass(frozen=True)
class Script:
    """A public training script: where it is, how it is made small, how it is changed and moved."""

    name: str
    folder: str
    """What is copied and run in, below CHECKOUTS."""
    path: str
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    """Processes of torchrun; 0: the script starts its own."""
    prepare: Callable[[Path], None] | None = None
    small: Edits = field(default_factory=dict)
    """Fewer steps, where no argument says so."""
    change: tuple[str, str, str] = ("", "", "")
    """A file, and a number in it with another one: another training."""
    migration: Edits = field(default_factory=dict)
    asks: str = "accelerator"
    """What the script asks for GPUs: "accelerator", "cuda", or "" where it runs on a CPU as it is."""

    def command(self) -> list[str]:
        """Return the command line to run in the script's folder."""
        if self.ranks == 0:
            return [sys.executable, self.path, *self.arguments]
        ranks = ["--standalone", f"--nproc-per-node={self.ranks}"]
        return [str(BIN / "torchrun"), *ranks, self.path, *self.arguments]


TUTORIAL = "examples/distributed/ddp-tutorial-series"
RATE = "torch.optim.SGD(model.parameters(), lr=1e-3)"
LOWER = "torch.optim.SGD(model.parameters(), lr=9e-4)"
# minGPT and nanoGPT clip by torch's norm, which is made of norms in float32, and under fsdp2 by that of all ranks at
# once: the last bits of a clipped step differ. Here gradients are not clipped.
MINGPT = (
    "data_config.path=letters.txt",
    "data_config.truncate=1.0",
    "data_config.block_size=16",
    "gpt_config.n_layer=2",
    "gpt_config.n_head=2",
    "gpt_config.n_embd=32",
    "trainer_config.max_epochs=1",
    "trainer_config.data_loader_workers=0",
    "trainer_config.use_amp=False",
    "trainer_config.grad_norm_clip=1000.0",
)
NANOGPT = (
    "--device=cpu",
    "--backend=gloo",
    "--dtype=float32",
    "--dataset=letters",
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=32",
    "--block_size=16",
    "--batch_size=4",
    "--eval_iters=2",
    "--max_iters=5",
    "--gradient_accumulation_steps=4",
    "--grad_clip=0.0",
)

SCRIPTS = [
    Script("DDP tutorial, one GPU", TUTORIAL, "single_gpu.py", ("1", "1"), 0, change=("single_gpu.py", RATE, LOWER)),
    Script("DDP tutorial, mp.spawn", TUTORIAL, "multigpu.py", ("1", "1"), 0, change=("multigpu.py", RATE, LOWER)),
    Script(
        "DDP tutorial, torchrun",
        TUTORIAL,
        "multigpu_torchrun.py",
        ("1", "1"),
        change=("multigpu_torchrun.py", RATE, LOWER),
    ),
    Script(
        "DDP tutorial, several nodes",
        TUTORIAL,
        "multinode.py",
        ("1", "1"),
        change=("multinode.py", RATE, LOWER),
    ),
    Script(
        "DDP example",
        "examples/distributed/ddp",
        "example.py",
        change=("example.py", "lr=0.001", "lr=0.002"),
        migration={
            "example.py": [
                ("import torch\n", "import fsshard\nimport torch\n"),
                ("ddp_model = DDP(model, device_ids=[rank])", 'ddp_model = fsshard.wrap(model, backend="fsdp2")'),
                (
                    "optim.SGD(ddp_model.parameters(), lr=0.001)",
                    "fsshard.build_optimizer(ddp_model, optim.SGD, lr=0.001)",
                ),
            ]
        },
    ),
    Script("FSDP2 example", "examples/distributed/FSDP2", "example.py", change=("example.py", "lr=1e-2", "lr=9e-3")),
    Script(
        "FSDP2 example, bf16",
        "examples/distributed/FSDP2",
        "example.py",
        ("--mixed-precision",),
        change=("example.py", "lr=1e-2", "lr=9e-3"),
    ),
    Script(
        "tensor parallel example",
        "examples/distributed/tensor_parallelism",
        "tensor_parallel_example.py",
        change=("tensor_parallel_example.py", "lr = 0.25", "lr = 0.2"),
    ),
    Script(
        "sequence parallel example",
        "examples/distributed/tensor_parallelism",
        "sequence_parallel_example.py",
        change=("sequence_parallel_example.py", "lr = 0.25", "lr = 0.2"),
    ),
    Script(
        "minGPT-ddp",
        "examples/distributed/minGPT-ddp/mingpt",
        "main.py",
        MINGPT,
        prepare=letters,
        change=("gpt2_train_cfg.yaml", "learning_rate: 0.0003", "learning_rate: 0.0002"),
        migration={
            "trainer.py": [
                ("import torch\n", "import fsshard\nimport torch\n"),
                (
                    "self.model = DDP(self.model, device_ids=[self.local_rank])",
                    f"self.model, self.optimizer = {WRAP.replace('model, opt', 'self.model, self.opt')}",
                ),
                ("torch.nn.utils.clip_grad_norm_(self.model.parameters(), ", "self.model.clip_grad_norm_("),
                ("if self.local_rank == 0 and epoch % self.save_every == 0:", "if epoch % self.save_every == 0:"),
            ]
        },
    ),
    Script(
        "nanoGPT",
        "nanoGPT",
        "train.py",
        (*NANOGPT, "--compile=False"),
        prepare=letters,
        asks="cuda",
        change=("train.py", "learning_rate = 6e-4", "learning_rate = 5e-4"),
        migration={
            "train.py": [
                ("import torch\n", "import fsshard\nimport torch\n"),
                ("model = DDP(model, device_ids=[ddp_local_rank])", f"model, optimizer = {WRAP}"),
                # All ranks evaluate, since each holds a part of the weights. Rank 1's random numbers, from which it
                # draws its batches, stay those of before.
                (
                    "    if iter_num % eval_interval == 0 and master_process:\n        losses = estimate_loss()\n",
                    "    if iter_num % eval_interval == 0:\n"
                    "        with torch.random.fork_rng(devices=[], enabled=not master_process):\n"
                    "            losses = estimate_loss()\n",
                ),
                (
                    "model.require_backward_grad_sync = (micro_step == gradient_accumulation_steps - 1)",
                    "last = micro_step == gradient_accumulation_steps - 1",
                ),
                # A forward and its backward are both inside of no_sync, or both outside.
                (
                    "        with ctx:\n            logits, loss = model(X, Y)\n            loss = loss / grad",
                    "        silent = nullcontext if last else model.no_sync\n"
                    "        with ctx, silent():\n"
                    "            logits, loss = model(X, Y)\n            loss = loss / grad",
                ),
                (
                    "        scaler.scale(loss).backward()\n",
                    "        with silent():\n            scaler.scale(loss).backward()\n",
                ),
                ("torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)", "model.clip_grad_norm_(grad_clip)"),
            ]
        },
    ),
    Script(
        "Accelerate, nlp_example",
        "accelerate/examples",
        "nlp_example.py",
        ("--cpu",),
        prepare=sentence_pairs,
        asks="",
        change=("nlp_example.py", '"lr": 2e-5', '"lr": 1e-5'),
    ),
    Script(
        "Accelerate, gradient accumulation",
        "accelerate/examples/by_feature",
        "gradient_accumulation.py",
        ("--cpu", "--gradient_accumulation_steps=2"),
        prepare=sentence_pairs,
        asks="",
        change=("gradient_accumulation.py", '"lr": 2e-5', '"lr": 1e-5'),
    ),
    Script(
        "Accelerate, checkpointing",
        "accelerate/examples/by_feature",
        "checkpointing.py",
        ("--cpu", "--checkpointing_steps=epoch"),
        prepare=sentence_pairs,
        asks="",
        change=("checkpointing.py", '"lr": 2e-5', '"lr": 1e-5'),
    ),
    Script(
        "Accelerate, local SGD",
        "accelerate/examples/by_feature",
        "local_sgd.py",
        ("--cpu", "--local_sgd_steps=2"),
        prepare=sentence_pairs,
        asks="",
        change=("local_sgd.py", '"lr": 2e-5', '"lr": 1e-5'),
    ),
    Script(
        "Lightning, transformer",
        "lightning/examples/pytorch/basics",
        "transformer.py",
        ranks=0,
        prepare=wikitext,
        asks="",
        small={"transformer.py": [("max_epochs=20", "max_epochs=1"), ("2000, 2000]", "10, 3990]")]},
        change=("transformer.py", "lr=0.1", "lr=0.09"),
    ),
    Script(
        "Fabric, language model",
        "lightning/examples/fabric/language_model",
        "train.py",
        ranks=0,
        prepare=wikitext,
        asks="",
        small={"train.py": [("max_epochs=20", "max_epochs=1"), ("2000, 2000]", "10, 3990]")]},
        change=("train.py", "lr=0.1", "lr=0.09"),
    ),
    Script(
        "neuraloperator, Darcy",
        "neuraloperator",
        "scripts/train_darcy.py",
        ("--data.folder", "neuralop/data/datasets/data", "--data.n_train", "16", "--opt.n_epochs", "1"),
        ranks=0,
        asks="",
        small={
            "scripts/train_darcy.py": [
                ("import wandb\n", ""),
                ('"../"', '"."'),
                # It asks Zenodo even where all of its files are there.
                (
                    "import load_darcy_flow_small\n",
                    "import darcy, load_darcy_flow_small\ndarcy.download_from_zenodo_record = lambda **_: None\n",
                ),
            ]
        },
        change=("config/darcy_config.py", "learning_rate: float = 5e-3", "learning_rate: float = 4e-3"),
    ),
    Script(
        "nanoGPT, compiled",
        "nanoGPT",
        "train.py",
        (*NANOGPT, "--compile=True"),
        prepare=letters,
        asks="cuda",
        change=("train.py", "learning_rate = 6e-4", "learning_rate = 5e-4"),
    ),
]


class Runs:
    """Runs one script in copies of its folder."""

    def __init__(self, script: Script, checkouts: Path, place: Path) -> None:
        self.script = script
        self.source = checkouts / script.folder
        self.place = place

    def copy(self, name: str, edits: Edits) -> Path:
        """Return a copy of the script's folder, with lines replaced; ValueError where a line is not there."""
        folder = self.place / name
        shutil.copytree(self.source, folder, ignore=shutil.ignore_patterns(".git"))
        if self.script.prepare is not None:
            self.script.prepare(folder)
        for file, lines in [*self.script.small.items(), *edits.items()]:
            text = (folder / file).read_text()
            for old, new in lines:
                if old not in text:
                    raise ValueError(f"{self.script.path}: {file} has no line {old!r}")
                text = text.replace(old, new, 1)
            (folder / file).write_text(text)
        return folder

    def run(self, folder: Path, prefix: list[str]) -> float:
        """Run the script in ``folder``, and return the seconds of CPU that it took."""
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "WITHOUT_GPUS": self.script.asks,
            "GPUS": str(self.script.ranks or 2),
            "OMP_NUM_THREADS": "1",
        }
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        job = subprocess.run(
            [*prefix, *self.script.command()],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if job.returncode:
            raise RuntimeError(f"{self.script.name} ended with {job.returncode}:\n{job.stdout[-3000:]}")
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def record(self, name: str, edits: Edits) -> tuple[Path, float]:
        """Return the record of a changed copy, and the seconds of CPU that it took."""
        trace = self.place / f"{name}.trace"
        seconds = self.run(self.copy(name, edits), [str(BIN / "fsshard"), "trace", str(trace), "--"])
        return trace, seconds


def compare(old: Path, new: Path) -> str:
    """Return the first line of what ``fsshard compare`` says, without the records' names."""
    command = [str(BIN / "fsshard"), "compare", old.name, new.name]
    answer = subprocess.run(command, cwd=old.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    line = answer.stdout.splitlines()[0]
    line = re.sub(rf" {re.escape(old.name)} and {re.escape(new.name)}", "", line)
    # The sentence's first half: where they part is enough, how far they are apart there is in the report.
    return line.partition(" (off by")[0].removesuffix(".")


def size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def prove(script: Script, checkouts: Path) -> dict[str, str]:
    """Record a script as it is, again, changed and moved; return a row of the table."""
    with tempfile.TemporaryDirectory() as place:
        runs = Runs(script, checkouts, Path(place))
        bare = runs.run(runs.copy("bare", {}), [])
        record, seconds = runs.record("before", {})
        again, _ = runs.record("again", {})
        row = {"script": script.name, "record": f"{size(record) / 1024:.0f} KiB", "CPU time": f"{seconds / bare:.2f}"}
        row["again"] = compare(record, again)
        file, old, new = script.change
        changed, _ = runs.record("changed", {file: [(old, new)]})
        row["changed"] = f"`{old}` is `{new}`: {compare(record, changed)}"
        if script.migration:
            moved, _ = runs.record("moved", script.migration)
            row["under fsdp2"] = compare(record, moved)
        return row


NOT_RUN = {
    "FairScale's benchmarks, timm's train": "need torchvision, whose wheel does not import beside torch for CPUs",
    "FSDP T5 tutorial": "needs data and a tokenizer from Hugging Face's hub",
    "FSDP2 with tensor parallel": "torch 2.13 has no sharding rule for attention on a CPU",
    "torchtitan": "its main branch needs a nightly torch, grain and spmd_types",
    "transformers' run_glue": "Accelerate's nlp_example above is the same training",
}
COLUMNS = ("script", "record", "CPU time", "again", "changed", "under fsdp2")
HEADS = (
    "script",
    "size of the record",
    "CPU time, recorded / bare",
    "recorded again",
    "one number changed",
    "moved to fsdp2",
)
START = "<!-- public scripts -->\n"
END = "<!-- end of public scripts -->"


def _short(cell: str) -> str:
    """Return at most 24 words: on a phone a longer cell is a column of single words."""
    words = cell.split()
    return cell if len(words) <= 25 else f"{' '.join(words[:24])} …"


def table(rows: list[dict[str, str]]) -> str:
    """Return the rows in Markdown."""
    lines = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    for row in rows:
        cells = [_short(row.get(column, "")) for column in COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    for script, reason in NOT_RUN.items():
        lines.append(f"| {script} | not run: {reason} | | | | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("names", nargs="*", help="words of scripts' names; all without")
    parser.add_argument("--table", type=Path, help="a page whose table of public scripts is written anew")
    asked = parser.parse_args()
    rows = []
    for script in SCRIPTS:
        if asked.names and not any(name in script.name for name in asked.names):
            continue
        try:
            row = prove(script, asked.checkouts)
        except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired) as error:
            row = {"script": script.name, "again": f"not run: {str(error).splitlines()[0]}"}
            print(error, flush=True)
        print(json.dumps(row, indent=1), flush=True)
        rows.append(row)
    if asked.table is not None:
        page = asked.table.read_text("utf-8")
        before, _, rest = page.partition(START)
        _, _, after = rest.partition(END)
        asked.table.write_text(f"{before}{START}{table(rows)}{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
