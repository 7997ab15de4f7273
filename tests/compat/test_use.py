"""fsshard.compat.use: FairScale's names served by the real library, with fsshard's mends, where that is asked for.

The numbers in names of tests are the rows of docs/fairscale.md.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from tests.compat.redirect_world import World, build, together

COMPAT = ("-W", "ignore", "-m", "fsshard.compat")
FULL: dict[str, Any] = {"light": False, "library": False, "FSSHARD_REDIRECT": ""}  # torch, and the FairScale installed


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build(tmp_path_factory.mktemp("use"))


# -- the choice ------------------------------------------------------------------------------------------------------

REAL = """
import json, os, pickle, sys
import fsshard.compat
fsshard.compat.use("real")
import fsshard.compat.fairscale as fairscale
from fsshard.compat.errors import NotServed, RedirectError
from fsshard.compat.fairscale.nn.checkpoint import checkpoint_wrapper, disable_checkpointing
from fsshard.compat.fairscale.nn.wrap.auto_wrap import ConfigAutoWrap
from fsshard.compat.fairscale.optim import GradScaler
from fsshard.compat.fairscale.optim.grad_scaler import ShardedGradScaler
import fsshard.compat.fairscale.optim.adascale
import fairscale.nn as library

def refused(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error).splitlines()[0]]

def late():
    fsshard.compat.use("native")

def missing():
    from fsshard.compat.fairscale.optim.adascale import Nothing

fsshard.compat.use("real")
print(json.dumps({
    "version": fairscale.__version__,
    "same": [checkpoint_wrapper is library.checkpoint_wrapper, fairscale.nn.wrap is library.wrap,
             fairscale.nn.FlattenParamsWrapper is library.FlattenParamsWrapper],
    "modules": sorted({each.__module__.partition(".")[0] for each in
                       (disable_checkpointing, ConfigAutoWrap, GradScaler, ShardedGradScaler)}),
    "wrap": [type(fairscale.nn.wrap).__name__, type(sys.modules["fsshard.compat.fairscale.nn.wrap"]).__name__],
    "names": sys.modules["fsshard.compat.fairscale.nn.wrap"].__all__,
    "late": refused(late), "missing": refused(missing), "variable": os.environ["FSSHARD_FAIRSCALE"],
}))
"""


def test_the_names_are_the_real_librarys(runs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    done = runs["use"]
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts.pop("late") == [
        "RedirectError",
        "use('native') comes too late: fsshard.compat.fairscale is imported already, and 'real' serves it; call use() "
        "before the first import of fairscale, or set FSSHARD_FAIRSCALE=native",
    ]
    assert facts.pop("missing")[0] == "NotServed"
    assert facts == {
        "version": "0.4.13",
        "same": [True] * 3,
        "modules": ["fairscale"],
        "wrap": ["function", "module"],
        "names": ["auto_wrap", "config_auto_wrap_policy", "default_auto_wrap_policy", "enable_wrap", "wrap"],
        "variable": "real",
    }


CHILDREN = """
import multiprocessing, sys
import fairscale.nn.checkpoint as checkpoint
from fairscale.nn import checkpoint_wrapper
import fsshard.compat.fairscale.nn.checkpoint as same

def which(name):
    print(name, checkpoint_wrapper.__module__, checkpoint is same, flush=True)

if __name__ == "__main__":
    which("script")
    children = [multiprocessing.get_context(each).Process(target=which, args=(each,)) for each in sys.argv[1:]]
    for child in children:
        child.start()
    for child in children:
        child.join()
"""
SERVED_BY = "fsshard.compat.real.fairscale.nn.checkpoint.checkpoint_activations"


@pytest.fixture(scope="module")
def runs(world: World) -> dict[str, subprocess.CompletedProcess[str]]:
    """Of scripts that need torch and the library itself, each chosen in another way."""
    world.write("real.py", REAL)
    world.write("children.py", CHILDREN)
    launcher = ("-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-port", "0")
    words = {
        "use": ("-W", "ignore", "real.py"),
        "command": (*COMPAT, "--real", "--report", "children.py", "spawn", "forkserver"),
    }
    calls = {name: functools.partial(world.run, *each, **FULL) for name, each in words.items()}
    launched = (*launcher, "-m", "fsshard.compat", "children.py")
    calls["variable"] = functools.partial(world.run, *launched, **FULL, FSSHARD_FAIRSCALE="real")
    return dict(zip(calls, together(*calls.values()), strict=True))


def test_children_have_the_same_and_the_report_says_which(
    runs: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    done = runs["command"]
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{name} {SERVED_BY} True" for name in ("forkserver", "script", "spawn")
    ]
    assert "fairscale  from the real FairScale, mended by fsshard" in done.stderr


def test_torchruns_workers_have_the_same(runs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    done = runs["variable"]
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"script {SERVED_BY} True"]


REFUSED = """
import json, os, sys
import fsshard.compat
from fsshard.compat import engine, redirect

def refused(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, isinstance(error, ImportError), str(error)]

facts = {"use": refused(lambda: fsshard.compat.use("rael"))}
os.environ["FSSHARD_FAIRSCALE"] = "rael"
facts["install"] = refused(fsshard.compat.install)
facts["import"] = refused(lambda: __import__("fsshard.compat.fairscale"))
installed = list(sys.path)
sys.path[:] = [path for path in sys.path if "site-packages" not in path and "library" not in path]
facts["not installed"] = refused(lambda: fsshard.compat.use("real"))
os.environ["FSSHARD_FAIRSCALE"] = "real"
facts["not installed, variable"] = refused(lambda: __import__("fsshard.compat.fairscale"))
sys.path[:] = installed
os.environ["FSSHARD_FAIRSCALE"] = ""
facts["empty"] = engine.chosen()
import multiprocessing
context = multiprocessing.get_context("forkserver")
child = context.Process(target=print)
child.start()
child.join()
facts["fork server"] = refused(lambda: fsshard.compat.use("real"))
facts["no change"] = refused(lambda: fsshard.compat.use("native"))
print(json.dumps(facts))
"""


def test_what_cannot_be_chosen(world: World) -> None:
    world.write("refused.py", "if __name__ == '__main__':\n" + "\n".join(f"    {x}" for x in REFUSED.splitlines()))
    facts = world.facts("refused.py", FSSHARD_REDIRECT="")
    assert facts["use"] == ["ConfigurationError", False, "fsshard.compat.use('rael'): expected 'native' or 'real'"]
    variable = ["ConfigurationError", False, "FSSHARD_FAIRSCALE=rael: expected native or real"]
    assert facts["install"] == facts["import"] == variable
    kind, is_import_error, text = facts["not installed"]
    assert (kind, is_import_error) == ("MissingExtra", True) and text.startswith("fsshard.compat.use() needs")
    kind, is_import_error, text = facts["not installed, variable"]
    assert (kind, is_import_error) == ("MissingExtra", True) and text.startswith("FSSHARD_FAIRSCALE=real needs")
    assert facts["empty"] == "native" and facts["no change"] is None
    assert facts["fork server"][0] == "RedirectError" and "fork server runs already" in facts["fork server"][2]


def test_the_command_refuses_before_the_script_runs(world: World) -> None:
    world.write("script.py", "print('ran')")
    done = world.run("-m", "fsshard.compat", "script.py", FSSHARD_REDIRECT="", FSSHARD_FAIRSCALE="rael")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "fsshard.compat: FSSHARD_FAIRSCALE=rael: expected native or real\n"


# -- the real classes, mended: equal to DDP --------------------------------------------------------------------------


class Net(nn.Module):
    """Checkpointed by FairScale's own, reentrant checkpoint_wrapper: all of it, or but for the first layer."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6, bias=False)  # whose gradient under a norm would be rounding errors
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.norm = nn.BatchNorm1d(6)
        self.extra = nn.Linear(6, 6)
        if checkpointed:
            from fairscale.nn.checkpoint import checkpoint_wrapper

            self.blocks = nn.ModuleList([checkpoint_wrapper(block) for block in self.blocks])

    def forward(self, x: Tensor, extra: bool = False) -> dict[str, Tensor]:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return {"out": self.extra(x) if extra else x}


def job_train(mended: bool, zero: str, micro: int, no_sync: bool, checkpointed: bool, clip: bool) -> list[Tensor]:
    from fsshard.compat.real_classes import OSS, ShardedDataParallel

    net = Net(checkpointed and mended)  # DDP refuses a reentrant one whose parameters may go unused
    parameters: Any = list(net.parameters())
    if mended:
        optimizers: list[Any] = [OSS(parameters[:3], Adam, lr=0.01), OSS(parameters[3:], SGD, lr=0.1, momentum=0.9)]
        model: Any = ShardedDataParallel(net, optimizers)
    else:
        optimizers = [Adam(parameters[:3], lr=0.01), SGD(parameters[3:], lr=0.1, momentum=0.9)]
        model = DistributedDataParallel(net, find_unused_parameters=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(4):
        for index in range(micro):
            silent = model.no_sync() if no_sync and index < micro - 1 else contextlib.nullcontext()
            with silent:
                model(torch.randn(3, 4, generator=generator), extra=step > 1)["out"].square().mean().backward()
        if clip and mended:
            for optimizer in optimizers:
                optimizer.clip_grad_norm(0.1)
        elif clip:
            for optimizer in optimizers:
                group = [p for p in optimizer.param_groups[0]["params"] if p.grad is not None]
                torch.nn.utils.clip_grad_norm_(group, 0.1)
        for optimizer in optimizers:
            optimizer.step()
        if zero == "module":
            model.zero_grad()
        for optimizer in optimizers if zero == "optimizer" else []:
            optimizer.zero_grad()
        for parameter in net.parameters() if zero == "none" else []:
            parameter.grad = None
    # Under no_sync, FairScale sends buffers before the last forward and DDP before the first.
    return [value.detach().clone() for value in (net.parameters() if no_sync else net.state_dict().values())]


SCENARIOS = {
    "row 1, the optimizer's zero_grad": ("optimizer", 1, False, False, False),
    "row 1, grad = None": ("none", 1, False, False, False),
    "row 2, reentrant checkpointing": ("optimizer", 1, False, True, False),
    "no_sync": ("module", 3, True, False, False),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_mended_classes_are_equal_to_ddp(ranks: Any, scenario: str) -> None:
    mended, ddp = (ranks.run(job_train, 2, which, *SCENARIOS[scenario]) for which in (True, False))
    for ours, theirs in zip(mended, ddp, strict=True):
        assert [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(ours)


def test_row_4_the_mended_accumulation_without_no_sync(ranks: Any) -> None:
    # Each backward's mean is added to the sum, where DDP averages the sum again: two roundings of 6e-8 a step, by which
    # momentum and Adam move on. Averaged twice, as by FairScale alone, it is off by 1e-2.
    mended, ddp = (ranks.run(job_train, 2, which, "optimizer", 2, False, False, False)[0] for which in (True, False))
    for ours, theirs in zip(mended, ddp, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_mended_clip_follows_what_has_a_gradient(ranks: Any) -> None:
    # Row 9. The norm of parts is added up in another order than that of the whole: two roundings of 6e-8 a step.
    mended, ddp = (ranks.run(job_train, 2, which, "optimizer", 1, False, False, True)[0] for which in (True, False))
    for ours, theirs in zip(mended, ddp, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def job_refuses_fp16() -> str:
    from fsshard.compat.real_classes import OSS, ShardedDataParallel

    net = nn.Linear(2, 2)
    try:
        ShardedDataParallel(net, OSS(net.parameters(), lr=0.1), reduce_fp16=True)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_reduce_fp16_is_refused(ranks: Any) -> None:
    for text in ranks.run(job_refuses_fp16, 2):
        assert text.startswith("UnsupportedByBackend: ") and "reduce_fp16=True" in text


def job_starts_equal() -> list[Any]:
    from fsshard.compat.real_classes import OSS, ShardedDataParallel

    net: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.fill_(5 + dist.get_rank())
    model = ShardedDataParallel(net, OSS(net.parameters(), lr=0.1))
    seen = [float(tensor.min()) for tensor in (*net.parameters(), *net.buffers())]
    net[1].running_mean.fill_(dist.get_rank())
    with torch.no_grad():
        model.eval()
        model(torch.zeros(1, 2))
    return [*seen, float(net[1].running_mean.min())]


def test_models_start_equal_and_buffers_are_sent(ranks: Any) -> None:
    assert ranks.run(job_starts_equal, 2) == [[5.0] * 7 + [0.0]] * 2


# -- one script, three ways ------------------------------------------------------------------------------------------


def job_script(way: str) -> tuple[list[float], list[Tensor]]:
    """FairScale's tutorial. On the CPU its own scaler turns itself off: a power of two less or more is exact."""
    if way == "raw":
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS
        from fairscale.optim.grad_scaler import ShardedGradScaler
    elif way == "real":
        from fairscale.optim.grad_scaler import ShardedGradScaler

        from fsshard.compat.real_classes import OSS, ShardedDataParallel
    else:
        from fsshard.compat.fairscale.nn.data_parallel import ShardedDataParallel  # type: ignore[assignment]
        from fsshard.compat.fairscale.optim import OSS  # type: ignore[assignment]
        from fsshard.compat.fairscale.optim.grad_scaler import ShardedGradScaler  # type: ignore[assignment]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer: Any = OSS(params=net.parameters(), optim=SGD, lr=0.1, momentum=0.9)
    model: Any = ShardedDataParallel(net, optimizer)
    scaler: Any = ShardedGradScaler()
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(5):
        # What zeroes gradients in any of the three: the optimizer's leaves FairScale's buckets as they are (row 1).
        model.zero_grad()
        inputs, labels = torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm(1e3)
        scaler.step(optimizer)
        scaler.update()
    return losses, [p.detach().clone() for p in net.parameters()]


def test_one_script_has_the_same_losses_three_ways(ranks: Any) -> None:
    raw, real, native = (ranks.run(job_script, 2, way) for way in ("raw", "real", "native"))
    for rank in range(2):
        assert raw[rank][0] == real[rank][0] == native[rank][0]
        for a, b, c in zip(raw[rank][1], real[rank][1], native[rank][1], strict=True):
            assert torch.equal(a, b) and torch.equal(a, c)
