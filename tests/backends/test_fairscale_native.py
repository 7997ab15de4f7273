"""backend="fairscale" by FairScale, patched, and by fsshard's own OSS and ShardedDDP: under both the bits of DDP."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.errors import ConfigurationError, MissingExtra, RankMismatch
from fsshard.model.precision import bfSixteen, fpSixteen
from tests.forked import run_script
from tests.models import take_step, with_sgd
from tests.on_ranks import on_ranks
from tests.training_runs import Run, check_equal, compare, wrapped

BOTH = ("real", "native")


def both(case: str, **what: Any) -> list[Run]:
    """DDP, and the two implementations."""
    settings = what.pop("settings", {})
    return [
        Run(case, "ddp", settings=settings, **what),
        *(Run(case, "fairscale", settings={**settings, "implementation": name}, **what) for name in BOTH),
    ]


RUNS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "micro-batches under no_sync": {"micro_batches": 3},
    "clipped": {"clip": (0.05, 2.0)},
    "clipped by the largest": {"clip": (0.01, float("inf")), "groups": True},
    "scaled": {"scaled": True, "clip": (0.5, 2.0)},
    "momentum in two groups": {"optimizer": "SGD", "groups": True, "hyper": {"momentum": 0.9}},
    "an optimizer that is not torch's": {"optimizer": "neuralop.AdamW"},
    "recomputed": {"settings": {"activation_checkpointing": True}},
}


@pytest.mark.fairscale_row(35, 36)
@pytest.mark.covering
@pytest.mark.parametrize("what", RUNS)
@pytest.mark.parametrize("case", ["mlp_complex", "tfno_tucker"])
def test_losses_gradients_weights_and_state_are_ddps(ranks: Any, case: str, what: str) -> None:
    assert ranks.run(compare, 2, both(case, steps=3, **RUNS[what])) == [[]] * 2


@pytest.mark.parametrize("case", ["tied", "odd_first", "zero_dim", "buffered", "frozen", "transposed", "dropout"])
def test_models_of_every_kind(ranks: Any, case: str) -> None:
    assert ranks.run(compare, 2, both(case, steps=3)) == [[]] * 2


@pytest.mark.parametrize(("case", "precision"), [("fno", "bf16"), ("uno", fpSixteen), ("dropout", bfSixteen)], ids=str)
def test_gradients_that_are_added_up_in_another_dtype(ranks: Any, case: str, precision: Any) -> None:
    """uno has gradients that are subnormal in float16: rounding before dividing gives other bits than the reverse."""
    scaled = precision is fpSixteen
    assert (
        ranks.run(compare, 2, both(case, steps=3, scaled=scaled, settings={"mixed_precision": precision})) == [[]] * 2
    )


# ------------------------------------------------------------------------------------------------ several dtypes


def job_dtypes(settings: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = wrapped(Run("two_precisions", settings=settings, backend=settings.pop("backend")))
    for _ in range(3):
        model(torch.ones(2, 4) * (1 + dist.get_rank())).square().mean().backward()
        take_step(optimizer)
    return {"weights": model.state_dict(), "state": optimizer.state_dict()}


def test_one_optimizer_over_several_dtypes(ranks: Any) -> None:
    """The real OSS has one buffer for all, and is refused."""
    native = {"backend": "fairscale", "implementation": "native"}
    for one, other in zip(ranks.run(job_dtypes, 2, {"backend": "ddp"}), ranks.run(job_dtypes, 2, native), strict=True):
        check_equal(one, other)
    for error in ranks.run_expecting_errors(job_dtypes, 2, {**native, "implementation": "real"}):
        assert "implementation='native'" in str(error)


# ------------------------------------------------------------------------------------------------ which one


class Blocked:
    """As where FairScale is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "fairscale":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextlib.contextmanager
def uninstalled() -> Iterator[None]:
    parts = ("fairscale.", "fsshard.backends.fairscale_patched.")
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if f"{name}.".startswith(parts)}
    blocked = Blocked()
    sys.meta_path.insert(0, blocked)
    try:
        yield
    finally:
        sys.meta_path.remove(blocked)
        sys.modules.update(hidden)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def job_default(without: bool) -> tuple[str, str]:
    with uninstalled() if without else contextlib.nullcontext():
        model = fsshard.wrap(net(), backend="fairscale")
    return model.explain().splitlines()[0], model.backend.settings.options["implementation"]


@pytest.mark.parametrize("without", [False, True])
def test_the_default_is_what_is_installed_and_explain_says_which(ranks: Any, without: bool) -> None:
    if not without:
        pytest.importorskip("fairscale")
    for head, name in ranks.run(job_default, 2, without):
        assert name == ("native" if without else "real")
        whose = "fsshard's own OSS and ShardedDDP" if without else "FairScale 0.4.13, patched"
        assert head == f"backend 'fairscale' ({whose}) on 2 ranks, device cpu"


def job_different() -> None:
    with uninstalled() if dist.get_rank() else contextlib.nullcontext():
        fsshard.wrap(net(), backend="fairscale")


def test_ranks_with_and_without_fairscale_are_told(ranks: Any) -> None:
    pytest.importorskip("fairscale")
    for error in ranks.run_expecting_errors(job_different, 2):
        assert type(error) is RankMismatch and "implementation" in str(error)


def job_asked(implementation: object) -> None:
    with uninstalled():
        fsshard.wrap(net(), backend="fairscale", implementation=implementation)


@pytest.mark.parametrize("asked", ["rael", True])
def test_what_is_neither_is_refused(ranks: Any, asked: object) -> None:
    for error in ranks.run_expecting_errors(job_asked, 2, asked):
        assert type(error) is ConfigurationError and f"implementation={asked!r}: expected 'real'" in str(error)


def test_the_real_one_must_be_installed(ranks: Any) -> None:
    for error in ranks.run_expecting_errors(job_asked, 2, "real"):
        assert type(error) is MissingExtra and "pip install 'fsshard[fairscale]'" in str(error)


REDIRECTED = """
import fsshard.compat
fsshard.compat.install()
import fsshard.compat.fall_through as beside
beside._find_root = lambda: None
import torch, fsshard, fairscale
model = fsshard.wrap(torch.nn.Linear(3, 1), backend="fairscale")
print(fairscale.__name__, model.backend.settings.about)
"""


def test_under_the_redirect_what_serves_fairscales_names_is_not_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(REDIRECTED)
    done = run_script(tmp_path / "script.py", [], {})
    assert done.stdout.strip() == "fsshard.compat.fairscale fsshard's own OSS and ShardedDDP", done.stderr


# ------------------------------------------------------------------------------------------------ after an error


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("on purpose")


@pytest.mark.parametrize("implementation", BOTH)
@on_ranks()
def test_training_goes_on_after_a_backward_that_failed(implementation: str) -> None:
    model, optimizer = with_sgd(net(), backend="fairscale", implementation=implementation)
    x = torch.ones(2, 6) * (1 + dist.get_rank())
    with contextlib.suppress(ValueError):
        Fails.apply(model(x)).sum().backward()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    reference, plain = with_sgd(net(), backend="ddp")
    reference(x).square().mean().backward()
    plain.step()
    check_equal(reference.state_dict(), model.state_dict())


# ------------------------------------------------------------------------------------------------ where memory moves


def job_frozen_before_the_step(backend: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """If OSS laid its parts out anew by itself, the backend would not know, and would undo it."""
    model = fsshard.wrap(net(), backend=backend, **options)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    x = torch.ones(2, 6) * (1 + dist.get_rank())
    weight = next(model.module.parameters())
    for step in range(4):
        if step == 2:
            weight.requires_grad_(True)
        model(x).square().mean().backward()
        if step == 0:
            weight.requires_grad_(False)
        take_step(optimizer)
    return model.state_dict()


def test_a_layer_that_is_frozen_between_backward_and_step(ranks: Any) -> None:
    plain = ranks.run(job_frozen_before_the_step, 2, "ddp", {})
    native = ranks.run(job_frozen_before_the_step, 2, "fairscale", {"implementation": "native"})
    check_equal(plain, native)
