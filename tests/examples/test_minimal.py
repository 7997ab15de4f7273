"""The examples to copy: each runs on two ranks, in any folder, and gives what plain torch gives on one."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import math
import os
import re
import runpy
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

import fsshard
from fsshard.launching.pool import RankPool
from tests.conftest import PATIENCE
from tests.examples.test_parity_ci import lend
from tests.models import take_step
from tests.on_ranks import on_ranks
from tests.training_runs import check_equal

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDER = EXAMPLES / "minimal"
SCRIPTS = sorted(FOLDER.glob("*.py"))
DARCY = ["--n-train", "16", "--n-test", "4", "--batch-size", "8"]


def trained(name: str, *arguments: str) -> tuple[Any, str]:
    """Return what a script's ``train`` returns on this rank of the pool, and what it prints."""
    code = runpy.run_path(str(FOLDER / name))
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        returned = code["train"](fsshard.init(), code["parse"](list(arguments)))
    return returned, printed.getvalue()


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """New tensors are: what is left of a difference is no matter of the order of sums."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


CLIPPED = 6
CLOSE = CLIPPED * 2**-24
"""Bound for losses and weights in float64 after six steps: clip_grad_norm_ rounds the norm to float32 in each."""

# ------------------------------------------------------------------------------------------------------- as they are


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_one_short_file(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    tree = ast.parse(text)
    assert script.name in (ast.get_docstring(tree) or ""), "says how it is run"
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    others = {"torch", "fsshard", "neuralop", "transformers", "tqdm", "pytest", "fairscale"}
    assert {name.partition(".")[0] for name in names} <= {*others, *sys.stdlib_module_names}


def test_the_readme_has_all() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w.]+)\)", text)) == {script.name for script in SCRIPTS}


# ------------------------------------------------------------------------------------------------------------- models


def job_t5(file: str) -> tuple[list[tuple[float, float]], float, str]:
    """Two epochs; and the validation loss of a bare model with the weights that were saved."""
    sizes = ["--samples", "32", "--epochs", "2", "--test-batch-size", "1", "--save-model", file]
    history, printed = trained("t5_tutorial.py", *sizes, "--run-validation", "--track-memory")
    lower, _ = trained("t5_tutorial.py", "--samples", "16", "--bf16", "--backend", "fsdp2", "--no-cuda")
    assert math.isfinite(lower[0][0])
    code = runpy.run_path(str(FOLDER / "t5_tutorial.py"))
    model, tokenizer = code["setup_model"]()
    model.load_state_dict(torch.load(file, weights_only=True))
    model.eval()
    with torch.no_grad():
        losses = [float(model(**code["collate"](tokenizer, [pair])).loss) for pair in code["texts"]()[:32:8]]
    return history, sum(losses) / len(losses), printed


@needs("transformers")
def test_t5(ranks: RankPool, tmp_path: Path) -> None:
    (history, bare, printed), other = ranks.run(job_t5, 2, str(tmp_path / "t5.pt"))
    assert history == other[0] and history[1][0] < history[0][0]
    assert min(validation for _, validation in history) == pytest.approx(bare, rel=1e-14)
    assert re.findall(r"epoch (\d): train [\d.]+, [\d.]+ s, validation [\d.]+, [\d.]+ MB", printed) == ["1", "2"]


def job_tfno(cache: str, folder: str) -> tuple[Any, ...]:
    """Both loops, the Trainer's in one go and in two; and the errors of bare models with their weights."""
    from neuralop import LpLoss
    from neuralop.models import TFNO

    from fsshard.demo import darcy

    os.environ["XDG_CACHE_HOME"] = cache
    fsdp2, ddp = (
        trained("tfno_loop.py", "--epochs", "2", "--backend", backend, *DARCY)[0] for backend in ("fsdp2", "ddp")
    )
    trainer = ["tfno_trainer.py", *DARCY, "--save-dir"]
    whole = trained(*trainer, f"{folder}/whole", "--epochs", "2")[0]
    trained(*trainer, f"{folder}/parts", "--epochs", "1")
    parts = trained(*trainer, f"{folder}/parts", "--epochs", "2", "--backend", "fairscale")[0]
    data = darcy.load(n_train=16, n_test=4)
    mean, std = data.train_y.mean(), data.train_y.std()
    sizes = {"n_modes": (16, 16), "in_channels": 1, "out_channels": 1, "hidden_channels": 32}
    bare = TFNO(**sizes, projection_channel_ratio=2)
    bare.load_state_dict(fsdp2[2])
    of_trainer = TFNO.from_checkpoint(f"{folder}/parts", "model")
    errors = []
    for model in (bare, of_trainer):
        with torch.no_grad():
            l2 = LpLoss(d=2, p=2, reduction="mean")
            errors.append({size: float(l2(model.eval()(x) * std + mean, y)) for size, (x, y) in data.tests.items()})
    return fsdp2[:2], ddp[:2], errors, whole, parts


@needs("neuralop")
def test_tfno(ranks: RankPool, cache: Path, tmp_path: Path) -> None:
    (fsdp2, ddp, errors, whole, parts), other = ranks.run(job_tfno, 2, str(cache), str(tmp_path))
    assert fsdp2 == ddp == other[0]
    losses, plain = fsdp2
    assert losses[-1] < losses[0]
    assert plain == errors[0]
    assert whole == parts, "a training in two parts, under two engines"
    for size, error in whole.items():
        # The Trainer sums over the samples of each rank, then over the ranks: four float32 numbers in another order.
        assert error == pytest.approx(errors[1][size], rel=4 * 2**-24)


# ---------------------------------------------------------------------------------------------------------- FairScale


@on_ranks()
def test_fairscale_before_and_after() -> None:
    """The old script on what ``python -m fsshard.compat`` serves; the new one under two engines."""
    text = (FOLDER / "fairscale_before.py").read_text(encoding="utf-8")
    names = {"__name__": "script"}
    exec(text.replace("from fairscale.", "from fsshard.compat.fairscale."), names)
    ctx = fsshard.init()
    with contextlib.redirect_stdout(io.StringIO()):
        before = names["train"](ctx.rank, ctx.world_size, epochs=3)
    for name in ("fsdp2", "fairscale"):
        assert trained("fairscale_after.py", "--backend", name)[0][:3] == before
    assert before[-1] < before[0]


# --------------------------------------------------------------------------------------------------- ways of training


@on_ranks()
def test_mixed_precision() -> None:
    bf16, fp16 = [trained("mixed_precision.py", "--precision", name, "--steps", "20")[0] for name in ("bf16", "fp16")]
    assert bf16[1] == fp16[1], "float32 beside both"
    for losses, reference, dtypes in (bf16, fp16):
        assert losses != reference and losses[-1] < 0.5 * losses[0]
        assert set(dtypes.values()) == {torch.float32}


@on_ranks()
def test_resumed_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    folder = str(tmp_path)

    def run(name: str, epochs: int, backend: str = "fsdp2") -> tuple[list[float], dict[str, Tensor]]:
        arguments = ["--folder", f"{folder}/{name}", "--epochs", str(epochs), "--backend", backend]
        return trained("checkpoint_resume.py", *arguments)[0]

    def set_epoch(sampler: Any, epoch: int) -> None:
        if epoch == 1 and dist.get_rank() == 1:
            signal.raise_signal(signal.SIGTERM)  # one rank gets it, in the second epoch
        before(sampler, epoch)

    whole = run("whole", 3)
    before, handler = DistributedSampler.set_epoch, signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedSampler, "set_epoch", set_epoch)
        run("parts", 9)
    signal.signal(signal.SIGTERM, handler)
    losses, weights = whole
    resumed, others = run("parts", 3, "ddp")
    assert losses == resumed and len(losses) == 3 and losses[-1] < losses[0]
    assert weights.keys() == others.keys()
    check_equal(dict(weights), dict(others))


@on_ranks()
def test_a_gan_goes_on_under_another_engine(tmp_path: Path) -> None:
    folder = str(tmp_path)

    def run(name: str, steps: int, *more: str) -> Any:
        arguments = ["--path", f"{folder}/{name}", "--steps", str(steps), "--batch-size", "16", *more]
        return trained("gan.py", *arguments)

    (losses, share, weights), said = run("whole", 20)
    run("parts", 12, "--backend", "fsdp")
    (rest, _, others), _ = run("parts", 20, "--backend", "fairscale")
    run("parts", 6)  # which it has behind it
    assert run("parts", 20)[0][0] == []
    assert rest == losses[12:] and len(losses) == 20
    for name in ("g", "d"):
        check_equal(dict(weights[name]), dict(others[name]))
    assert weights["g"]["modes"].dtype == torch.complex64
    assert share > 0.38  # of noise: 3 of 9 wavenumbers
    assert dist.get_rank() or "steps 0 to 20" in said


def serial(name: str, batch: Callable[[dict[str, Any], int], tuple[Tensor, Tensor]], steps: int, clip: float) -> Any:
    """The same in plain torch, on one process with the batches of all ranks: losses, norms, weights."""
    code = runpy.run_path(str(FOLDER / name))
    model = code["build_model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        x, y = batch(code, step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        take_step(optimizer)
        losses.append(float(loss.detach()))
    return losses, norms, model.state_dict()


@on_ranks()
def test_parts_are_the_whole_batch() -> None:
    with float64():
        parts = trained("accumulate_and_clip.py", "--steps", str(CLIPPED), "--accumulate", "4")[0]
        losses, norms, _ = serial(
            "accumulate_and_clip.py", lambda code, step: code["global_batch"](step, 64), CLIPPED, 0.5
        )
    whole = list(zip(losses, norms, strict=True))
    assert any(norm > 0.5 for _, norm in whole), "something is clipped"
    for mine, plain in zip(parts, whole, strict=True):
        assert mine == pytest.approx(plain, rel=CLOSE)


def job_hybrid(replicas: int) -> tuple[Any, Any]:
    from types import SimpleNamespace

    ctx = fsshard.init()

    def batch(code: dict[str, Any], step: int) -> tuple[Tensor, Tensor]:
        places = [SimpleNamespace(rank=rank, device=ctx.device) for rank in range(ctx.world_size)]
        x, y = zip(*(code["batch"](place, step) for place in places), strict=True)
        return torch.cat(x), torch.cat(y)

    with float64():
        mine = trained("hybrid_sharding.py", "--replicas", str(replicas), "--steps", str(CLIPPED))[0]
        return mine, serial("hybrid_sharding.py", batch, CLIPPED, 1.0)


@pytest.mark.parametrize(("world_size", "replicas"), [(2, 1), (2, 2), (4, 2)])
def test_hybrid_sharding(ranks: RankPool, world_size: int, replicas: int) -> None:
    (losses, held, weights), (plain, _, others) = ranks.run(job_hybrid, world_size, replicas)[0]
    assert losses == pytest.approx(plain, rel=CLOSE)
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=0, atol=CLOSE)
    whole = sum(value.nbytes for value in weights.values())
    shards = world_size // replicas
    assert all(whole / shards <= bytes_ < whole / shards + 8 * 64 * len(weights) for bytes_ in held), (
        "dim 0 is filled up"
    )


def test_launched(ranks: RankPool) -> None:
    outcomes = ranks.run(trained, 2, "torchrun_slurm.py")
    for rank, (losses, printed) in enumerate(outcomes):
        assert losses == outcomes[0][0] and losses[-1] < 0.5 * losses[0]
        assert printed.startswith(f"rank {rank} of 2, {rank} of 2 on ") and ": cpu, gloo\n" in printed
    assert "fsdp2: loss " in outcomes[0][1] and "fsdp2" not in outcomes[1][1]


# -------------------------------------------------------------------------------------------- in pytest, in a notebook


def test_parity_in_pytest(pytester: pytest.Pytester, ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(FOLDER / "test_parity.py", pytester.path / "test_copied_parity.py")  # a name of its own on the pool
    lend(pytester, ranks, monkeypatch)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1)
    assert "fairscale exact, fsdp exact, fsdp2 exact, ddp exact (2 ranks)" in "\n".join(result.outlines)


@pytest.mark.long
@needs("nbclient", "ipykernel", "neuralop", "matplotlib")
def test_the_notebook(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own, from a folder that has nothing else."""
    import nbformat
    from jupyter_client import AsyncKernelManager
    from nbclient import NotebookClient

    for name, folder in (("JUPYTER_RUNTIME_DIR", "runtime"), ("IPYTHONDIR", "ipython"), ("JUPYTER_PLATFORM_DIRS", "1")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    nbformat.validate(notebook)
    _, *cells = [cell for cell in notebook.cells if cell.cell_type == "code"]  # fsshard is installed
    cells[0].source = cells[0].source.replace("n_train=200, n_test=20", "n_train=16, n_test=4")
    cells[1].source = cells[1].source.replace("n_train=200, n_test=20", "n_train=16, n_test=4")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=str(tmp_path / "kernel"))
    NotebookClient(notebook, km=kernel, timeout=PATIENCE, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in cells for output in cell.outputs]
    texts = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "largest difference in loss, fsdp2 - ddp: 0.0\n" in texts
    assert "backend 'fsdp2', 2 ranks" in texts and "backend 'ddp', 2 ranks" in texts
    assert [output for output in outputs if "image/png" in output.get("data", {})]
