"""Every block of Python that README and docs show runs here, or in a test that is named; commands have their options.

A block that is part of a training is preceded by what its reader has: a model, a loader. Meshes are as large as the
ranks that there are, on the CPU; trainers of other libraries, and searches, stop after a few steps.
"""

from __future__ import annotations

import io
import os
import re
import shlex
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fsshard.cli.app import application
from tests.documents import ROOT, blocks
from tests.forked import forking

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

IMPORTS = """
import sys
from types import SimpleNamespace
import fsshard, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
ctx = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
x = batch = torch.randn(2, 4)
dataset = TensorDataset(torch.randn(8, 4))
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
"""

WRAPPED = """
model = fsshard.wrap(model, backend="fsdp2")
optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
"""

FNO = """
from neuralop.models import FNO
model = FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=4, n_layers=1)
"""

BLOCK = """
from collections import OrderedDict
parts = {"qkv": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "up": nn.Linear(4, 4)}
model = nn.Sequential(OrderedDict(block=nn.ModuleDict(parts)))
plan = {"block.up": ColwiseParallel()}
"""

VIT = """
from examples.mesh_layers import split_sequence, split_tensors
from examples.vit import ViT
model = ViT(channels=3, shape=(8, 16), patch=4, width=16, depth=1, heads=4)
"""

LIGHTNING = """
import lightning

class MyModule(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, number):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

module, loader = MyModule(), DataLoader(dataset, 2)
"""

HUGGING_FACE = """
import transformers

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}

model = Named()
data = dataset = [{"x": row} for row in torch.randn(8, 4)]
args = transformers.TrainingArguments(
    "out", max_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no"
)
"""

PARITY = """
import pytest
def recipe(): ...
sys.modules["train"] = SimpleNamespace(recipe=recipe, tfno=recipe)
"""

ASKS_FOR_PARITY = """
del sys.modules["train"]
(mark,) = test_parity.pytestmark
assert mark.kwargs == {"backends": ["fairscale", "fsdp", "fsdp2"], "world_size": 2}
"""


@dataclass(frozen=True)
class Shown:
    """How a block runs.

    Attributes:
        ranks: on how many.
        before: what its reader has by then.
        after: what is to hold then.
        instead: pairs of a text of the block and what it is here.
        needs: a package that may not be installed.
    """

    ranks: int
    before: str = ""
    after: str = ""
    instead: tuple[tuple[str, str], ...] = ()
    needs: str = "torch"


REGRESSION = blocks(ROOT / "docs" / "ten-minutes.md", "python")[0].partition("def train")[0]
"""What the second script of a page has from the first."""

STEP = "loss = model(torch.randn(2, 4)).square().mean(); loss.backward()"

RUN: dict[str, Shown] = {
    "README.md 1": Shown(1, PARITY, ASKS_FOR_PARITY),
    "docs/adapters.md 0": Shown(
        2,
        "from neuralop.models import TFNO\nfields = torch.randn(2, 1, 8, 8)\n"
        "model = TFNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=4, n_layers=1, rank=1.0)",
        "assert 'fno_blocks.convs.0.weight.factors.factor_0' in __import__('safetensors.torch').torch.load_file("
        "'merged.safetensors')",
        needs="neuralop",
    ),
    "docs/averages.md 0": Shown(
        2,
        f"{WRAPPED}\nloader = [{{'x': torch.randn(2, 4), 'y': torch.randn(2, 4)}}] * 2\n"
        "loss_fn, evaluate = nn.functional.mse_loss, lambda model: model(x)",
        "fsshard.load('ckpt/last', model, optimizer, ema=ema)\nassert ema.updates == 2",
    ),
    "docs/checkpoints.md 0": Shown(
        2,
        f"{WRAPPED}\nscheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
        "scaler, step = fsshard.GradScaler(model), 3",
        "assert step == 3",
    ),
    "docs/checkpoints.md 1": Shown(
        2,
        "generator, critic = (fsshard.wrap(nn.Linear(4, 4), backend=each) for each in ('fsdp', 'fsdp2'))\n"
        "og, od = (fsshard.build_optimizer(each, torch.optim.Adam) for each in (generator, critic))\n"
        "schedulers = [torch.optim.lr_scheduler.StepLR(each, 1) for each in (og, od)]\n"
        "ema = fsshard.EMA(generator)\ncritic(generator(x)).sum().backward()",
        "assert fsshard.latest('ckpt').name == 'gan'",
    ),
    "docs/checkpoints.md 2": Shown(2, WRAPPED, "assert len(list(DataLoader(dataset, sampler=sampler))) == 4"),
    "docs/checkpoint-files.md 0": Shown(2, WRAPPED, "assert {*both['optimizer']['state']} == {*both['model']}"),
    "docs/data.md 0": Shown(2, f"{WRAPPED}\nctx = fsshard.init()", "assert len(loader) == 2"),
    "docs/data.md 1": Shown(
        2, f"{WRAPPED}\nctx = fsshard.init()", "assert epoch == 0 and len(list(again)) == 2 and sampler.yielded == 2"
    ),
    "docs/darcy.md 0": Shown(
        2, "from fsshard.demo.tfno_darcy import build_model", "scheduler.optimizer", needs="neuralop"
    ),
    "docs/domain.md 0": Shown(
        2,
        f"{FNO}\ndata, domain_ranks, loader = 1, 2, [(torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8))]",
        "assert found.size == 1 and loss.isfinite()",
        needs="neuralop",
    ),
    "docs/domain.md 1": Shown(
        2, f'{FNO}\nmesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "domain"))', needs="neuralop"
    ),
    "docs/estimate.md 0": Shown(1, after="assert forecast.peak > 0", instead=(("=64", "=2"),), needs="matplotlib"),
    "docs/recompute.md 0": Shown(
        1,
        "class Block(nn.Linear): pass\nbare = nn.Sequential(Block(4, 4))",
        "assert list(fsshard.plan(bare, activation_checkpointing=blocks).offloaded) == ['0']",
        (("activation_checkpointing=blocks, ", ""),),  # which a CPU refuses
    ),
    "docs/launching.md 0": Shown(1, after="train(ctx)"),
    "docs/launching.md 1": Shown(
        1,
        f"{WRAPPED}\nimport os, signal, threading\nbefore = signal.getsignal(signal.SIGTERM)\n"
        "epochs, train_epoch = 3, lambda *_: os.kill(os.getpid(), signal.SIGTERM)",
        "signal.signal(signal.SIGTERM, before)\nassert leaves and epoch == 0 and fsshard.latest('ckpt').name == 'last'",
    ),
    "docs/launching.md 2": Shown(
        1,
        "import os\ntrain = lambda ctx: ctx.world_size\nhere = dict(os.environ)",
        "start(0, 1, 29500)\nassert os.environ['RANK'] == '0'\nos.environ.clear(), os.environ.update(here)",
    ),
    "docs/launching.md 3": Shown(1, "build_model = lambda: nn.Linear(4, 4)", "train_loop({})"),
    "docs/lightning.md 0": Shown(
        2,
        LIGHTNING,
        "assert trainer.global_step == 2",
        (("devices=2)", 'devices=2, max_epochs=1, logger=False, enable_progress_bar=False, default_root_dir=".")'),),
        "lightning",
    ),
    "docs/lightning.md 1": Shown(
        2,
        f"{LIGHTNING}\nimport fsshard.compat.lightning\nmodel = nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "fabric.backward(model(torch.randn(2, 4)).square().mean()); optimizer.step()",
        needs="lightning",
    ),
    "docs/meshes.md 0": Shown(
        4,
        after=STEP,
        instead=(
            ("(4, 2)", "(2, 2)"),
            ("\n\nmesh", "\n\nmodel = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\nmesh"),
            ("(2, 4)", "(2, 2)"),
        ),
    ),
    "docs/meshes.md 1": Shown(4, BLOCK, instead=(("(2, 2, 2)", "(1, 2, 2)"),)),
    "docs/meshes.md 2": Shown(
        4, after=STEP, instead=(("\n# or", "\nmodel = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n# or"),)
    ),
    "docs/meshes.md 3": Shown(
        4,
        f'{BLOCK}\nmesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("data", "cp", "tp"))',
        'fsshard.wrap(model, backend="fsdp2", **split(model, mesh))',
    ),
    "docs/meshes.md 4": Shown(
        2,
        "from fsshard.parity import Split\nsplit_sequence = lambda model, mesh: None\n"
        'mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "cp"))',
        'told = split(model, mesh)\nmodel = fsshard.wrap(model, backend="fsdp2", **told.settings)\n'
        'told.loss(model, {"x": torch.randn(2, 4, 4)}).backward()',
    ),
    "docs/meshes.md 5": Shown(
        4,
        'mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))',
        "assert (found.size, found.rank) == (2, dist.get_rank() // 2) and len(sampler) == 4",
    ),
    "docs/optimizers.md 0": Shown(2, after="model(x).sum().backward(); muon.step(); adamw.step()"),
    "docs/optimizers.md 1": Shown(
        2,
        f"{FNO}\nfrom examples.muon_per_mode import Muon",
        "assert spectral; model(torch.randn(1, 1, 8, 8)).sum().backward(); optimizer.step()",
        needs="neuralop",
    ),
    "docs/physics.md 0": Shown(
        2,
        "model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))\n"
        "inside, border, known, steps = torch.rand(3, 2), torch.rand(3, 2), torch.rand(3, 1), 2",
        "assert (found.norms > 0).all() and found.cosines.shape == (2, 2) and weights.isfinite().all()",
    ),
    "docs/physics.md 1": Shown(
        2,
        "model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))\n"
        "points, known, steps = torch.rand(3, 2), torch.rand(3, 1), 2",
        "assert closure() <= loss < 1e-3",
    ),
    "docs/precision.md 0": Shown(2, after=STEP),
    "docs/proof.md 0": Shown(
        1,
        'def darcy_batch(rank, number): return {"x": torch.randn(2, 1, 16, 16), "y": torch.zeros(2, 1, 16, 16)}',
        "recipe = tfno()\nassert recipe.loss(recipe.build(), recipe.batches(0, 1, 0)).isfinite()",
        needs="neuralop",
    ),
    "docs/proof.md 1": Shown(1, PARITY, ASKS_FOR_PARITY),
    "docs/same-bits.md 0": Shown(
        2, f"{WRAPPED}\ndata, steps = torch.randn(64, 4), 2\nloss_fn = torch.Tensor.mean", "assert model.state_dict()"
    ),
    "docs/uneven.md 0": Shown(
        2,
        f"{WRAPPED}\nloader = [(torch.randn(2, 4), torch.randn(2, 4))] * (1 + dist.get_rank())\n"
        "loss_fn, losses = nn.functional.mse_loss, []",
        "assert len(losses) == 1 + dist.get_rank()",
    ),
    "docs/uneven.md 1": Shown(
        2,
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "config = GPT2Config(vocab_size=16, n_positions=16, n_embd=8, n_layer=1, n_head=1)\n"
        "model = fsshard.wrap(GPT2LMHeadModel(config).eval(), backend='fsdp2')\nprompts = torch.arange(3)[None]",
        "assert tokens.shape == (1, 9)",
        needs="transformers",
    ),
    "docs/ten-minutes.md 0": Shown(1, after="train(epochs=1)"),
    "docs/ten-minutes.md 1": Shown(
        2,
        f"{REGRESSION}\nctx = SimpleNamespace(rank=dist.get_rank(), world_size=2, device=torch.device('cpu'))",
        "assert train(ctx) < 0.2 and train(ctx, 6) > 0 and fsshard.latest('ckpt').name == 'epoch-0006'",
    ),
    "docs/token-mean.md 0": Shown(
        2,
        "from fsshard.recipes.models import small_t5\nfrom torch.nn.functional import cross_entropy\n"
        "model = small_t5(words=8, width=8, heads=2, layers=1, dropout_rate=0.0, pad_token_id=0)\n"
        f"{WRAPPED}\nwords = torch.randint(1, 8, (2, 6))\n"
        "steps = [[{'input_ids': words, 'labels': words[:, :size].contiguous()} for size in (2, 5 - dist.get_rank())]]",
        "assert factor == 2 / 26",
        needs="transformers",
    ),
    "docs/token-mean.md 1": Shown(
        2,
        f"{WRAPPED}\nstep = 0\ndef count(step, leaf): return leaf\n"
        "def loss_sum(model, step, leaf): return model(x).sum() * leaf",
        "assert factor == 8 / 28",
    ),
    "docs/token-mean.md 2": Shown(
        1,
        "from torch.nn.functional import cross_entropy",
        "found = SimpleNamespace(logits=torch.zeros(1, 3, 4))\n"
        "assert token_mean(found, torch.tensor([[1, 2, -100]]), 2).allclose(torch.tensor(4.0).log())",
    ),
    "docs/transformers.md 0": Shown(2, HUGGING_FACE, "assert trainer.state.global_step == 2", needs="transformers"),
    "docs/transformers.md 1": Shown(
        2,
        f"{HUGGING_FACE}\nfrom fsshard.compat.transformers import Trainer\n"
        "trainer = Trainer(model, args, train_dataset=data, eval_dataset=data, fsshard={'backend': 'fsdp2'})\n"
        "folder = 'averaged'",
        "assert average.ema.updates == 2",
        needs="transformers",
    ),
    "docs/estimate.md 1": Shown(1, after="assert forecast.seconds > 0", instead=(("=64", "=2"), ('"h100"', '"cpu"'))),
    "docs/nodes.md 0": Shown(
        1, after="assert 0 < forecast.utilisation < 1", instead=(("=64", "=8"), ('"a100"', '"cpu"'))
    ),
    "docs/nodes.md 1": Shown(
        1,
        "forecast = fsshard.estimate(nn.Linear(4, 4), batch=torch.ones(2, 4), backend='ddp')\n"
        "batches = (1, 2, 3)\ntrain = torch.ones",
        "assert speed.report().steps == 2",
    ),
    "docs/tuning.md 0": Shown(1, after=STEP, instead=(("=64", "=1, limit=2"),)),
    "docs/weather.md 0": Shown(4, f"{VIT}\ndata, cp, tp = 1, 2, 2", "assert place.size == 1"),
}
"""Page and number of its block of Python -> how it runs here."""

RUNS_IN = {
    "README.md 0": "tests/test_docs.py",
    "docs/memory.md 0": "tests/test_docs.py",
    "docs/memory.md 1": "tests/sharded/test_reports.py",
    "docs/prove-migration.md 0": "tests/examples/test_prove_migration.py",
    "docs/own-backend.md 0": "tests/backends/test_sixth_backend.py",
}
"""Blocks that other tests run: in each, what the block calls, with files or models that it needs."""


def all_blocks() -> dict[str, str]:
    found = {}
    for page in PAGES:
        for number, code in enumerate(blocks(page, "python")):
            found[f"{page.relative_to(ROOT)} {number}"] = code
    return found


def test_every_block_is_run_somewhere() -> None:
    assert sorted(all_blocks()) == sorted([*RUN, *RUNS_IN])
    assert [name for name in RUNS_IN.values() if not (ROOT / name).is_file()] == []
    for name, shown in RUN.items():
        assert [text for text, _ in shown.instead if text not in all_blocks()[name]] == [], name


def job_blocks(codes: dict[str, tuple[str, str, str]], folder: str) -> list[str]:
    """Run them, one after the other: those that fail, and how."""
    failed, home = [], Path.cwd()
    for name, parts in codes.items():
        own = Path(folder, re.sub(r"\W", "-", name))
        own.mkdir(exist_ok=True)
        names = {"__name__": "docs"}
        try:
            os.chdir(own)
            with redirect_stdout(io.StringIO()), forking():  # what a search starts
                for code in (IMPORTS, *parts):
                    exec(compile(code, name, "exec"), names)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
            break  # other ranks may be elsewhere by now
        finally:
            os.chdir(home)
    return failed


@pytest.mark.parametrize("number", [1, 2, 4])
def test_blocks_run(ranks: Any, tmp_path: Path, number: int) -> None:
    codes, left_out = {}, []
    for name, shown in RUN.items():
        if shown.ranks == number and find_spec(shown.needs):
            code = all_blocks()[name].replace('"cuda"', '"cpu"')
            for text, other in shown.instead:
                code = code.replace(text.replace('"cuda"', '"cpu"'), other)
            codes[name] = (shown.before, code, shown.after)
        elif shown.ranks == number:
            left_out.append(f"{name} needs {shown.needs}")
    assert ranks.run(job_blocks, number, codes, str(tmp_path), timeout=120) == [[]] * number
    if left_out:
        pytest.skip(f"all others ran, but {'; '.join(left_out)}, which is not installed")


def commands() -> set[str]:
    """Return the commands that pages have a reader type: lines of blocks without a language, and code within lines."""
    found = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for block in blocks(page, "") for line in block.splitlines()]
        within = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        found |= {line.partition("  #")[0].strip() for line in (*lines, *within)}
    return {line for line in found if re.match(r"(fsshard|python|torchrun) [a-z-]", line) and "..." not in line}


def options(command: str) -> list[str]:
    """The options that a command is given; what a script or a command of the reader's is given is left out."""
    words = shlex.split(command.partition(" -- ")[0])
    script = next((word for word in words if word.endswith("train.py")), None)
    words = words[: words.index(script)] if script else words
    return [word.partition("=")[0] for word in words if word.startswith("--")]


TORCHRUN = {"--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--max-restarts"}


def known_options(command: str, app: Any) -> set[str]:
    """Return the options of the program that a command calls: what typer knows, or the source of a script names."""
    words = shlex.split(command)
    torchrun = TORCHRUN if words[0] == "torchrun" else set()
    if "fsshard" in words:
        name = words[words.index("fsshard") + 1]
        called = app if name.startswith("-") else app.commands[name]
        known = {name for parameter in called.params for name in (*parameter.opts, *parameter.secondary_opts)}
        return known | torchrun | {"--help"}
    scripts = [word for word in words if word.endswith(".py")]  # make demo leaves its picture here, which is none
    module = words[words.index("-m") + 1] if "-m" in words else ""
    if module:
        scripts.append(f"{'compat/__main__' if module == 'fsshard.compat' else module.replace('.', '/')}.py")
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in scripts if (ROOT / name).is_file())
    return set(re.findall(r"[\"'](--[\w-]+)", text)) | torchrun


def test_commands_have_the_options_that_pages_give_them() -> None:
    typer = pytest.importorskip("typer")
    app, found = typer.main.get_command(application()), commands()
    assert len(found) > 25
    wrong = {line: missing for line in found if (missing := sorted({*options(line)} - known_options(line, app)))}
    assert wrong == {}
