"""What is run on a GPU as on the CPU: jobs of the CPU's tests, whose judges are bare replicas on the same GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint import test_models
from tests.gpu import jobs
from tests.gpu.offloading import job_average_on_host
from tests.gpu.on_gpu import Case, OnGpu
from tests.model import test_lora
from tests.parity import test_second_derivatives as second
from tests.sharded import (
    test_averages,
    test_forward_methods,
    test_join,
    test_optimizer_lbfgs,
    test_optimizer_matrices,
    test_optimizer_whole,
    test_term_gradients,
)
from tests.training_runs import DISTRIBUTED, ENGINES, differences

LOSSES = (second.penalty, second.penalty_alone, second.wgan_gp, second.burgers)
APART = {name: {"merge_below": 0} if name == "fsdp2" else {} for name in DISTRIBUTED}


def averaged(found: dict[str, Any]) -> bool:
    """Return whether an average is torch's own, made without collectives."""
    numbers = {"updates", "held", "sent"}
    return found["sent"] == 0 and all(value for key, value in found.items() if key not in numbers)


def job_second(backend: str) -> dict[str, Any]:
    """Return what is not right of losses that hold derivatives."""
    found = {}
    for kind in ("real", "complex"):
        told = second.job(backend, LOSSES, kind, **APART[backend])
        found |= {f"{kind} {name}": right for name, right in told.items() if right is not True}
    return found


def job_models(folder: Path, engine: dict[str, Any], other: dict[str, Any]) -> bool:
    """Save a GAN under one engine, and go on under another."""
    saved = test_models.job_saved(folder, engine, None, False)
    return saved and test_models.job_loaded(folder, other, None)


def job_lora(folder: Path) -> list[str]:
    """Train adapters under each engine, and go on under the next."""
    return test_lora.job_trained("net", str(folder))


def job_terms(engine: str) -> None:
    """Compare gradients of a boundary term and of derivatives, in float64 and float32."""
    test_term_gradients.job(engine, test_term_gradients.burgers, torch.float64, False)
    test_term_gradients.job(engine, test_term_gradients.supervised, torch.float32, True)


def job_as_ddp(settings: dict[str, Any]) -> list[str]:
    """Return where weights differ from those that ddp trains."""
    one, other = (jobs.train(device="cuda:0", **each) for each in ({"backend": "ddp"}, settings))
    return list(differences(one, other))


def slopes(several: bool) -> list[torch.Tensor]:
    """Return the gradients of a loss that holds second derivatives; no engine.

    Args:
        several: let torch compute on the device by a thread of its own.
    """
    with OnGpu(), torch.autograd.set_multithreading_enabled(several):
        model = second.build(second.Smooth, numbers="complex")
        second.burgers(model, 0)
    return [torch.view_as_real(p.grad) if p.is_complex() else p.grad for p in model.parameters() if p.grad is not None]


def job_numbered_by_thread() -> dict[str, bool]:
    """Return whether gradients are the same in a thread that has numbered many nodes of graphs, and in a new one."""
    x, found = torch.ones((), requires_grad=True), {}
    for _ in range(10_000):
        x + 1
    for name, several in (("one thread", False), ("the device's own thread", True)):
        with ThreadPoolExecutor(1) as new:
            rounds = slopes(several), new.submit(slopes, several).result()
        found[name] = all(torch.equal(one, other) for one, other in zip(*rounds, strict=True))
    return found


def nothing_wrong(found: dict[str, list[str]]) -> bool:
    """Return whether no engine differs."""
    return not any(found.values())


def through_all(told: list[Any]) -> bool:
    """Return whether a rank has taken as many steps as the rank with the most batches."""
    return len(told) == 4


WHOLE = test_optimizer_whole.job_exact
CASES: dict[str, Case] = {
    **{f"whole {kind}": Case(WHOLE, (kind, *DISTRIBUTED), nothing_wrong) for kind in ("Muon", "SOAP", "mixed")},
    "matrix per mode": Case(test_optimizer_matrices.job_exact, ("Single", *DISTRIBUTED), nothing_wrong),
    "LBFGS": Case(test_optimizer_lbfgs.job_exact, ("searching",), nothing_wrong),
    **{
        f"EMA {' '.join((name, *settings.values()))}": Case(
            test_averages.job, (name, settings, test_averages.warming, 2), averaged
        )
        for name, settings in test_averages.ENGINES[1:]
    },
    **{f"terms {name}": Case(job_terms, (name,)) for name in ("ddp", "fairscale", "native", "fsdp2", "fsdp")},
    **{f"second derivatives {name}": Case(job_second, (name,), {}) for name in DISTRIBUTED},
    **{
        f"EMA on the host {' '.join((name, *settings.values()))}": Case(job_average_on_host, (name, settings), [])
        for name, settings in test_averages.ENGINES[1:]
    },
    "lora": Case(job_lora, ("FOLDER",), []),
    "models fsdp2, fsdp": Case(job_models, ("FOLDER", ENGINES[4], ENGINES[3]), True),
    "models native, ddp": Case(job_models, ("FOLDER", ENGINES[2], ENGINES[0]), True),
    **{
        f"generate {name}": Case(test_forward_methods.job_generate_unevenly, (name, test_forward_methods.small_gpt2))
        for name in DISTRIBUTED
    },
}
TOGETHER: dict[str, Case] = {
    **{f"steps {name}": Case(job_as_ddp, (settings,), []) for name, settings in jobs.ENGINES.items()},
    **{
        f"join {' '.join(engine.values())}": Case(test_join.job_uneven, (engine, [2, 4], True, True), through_all)
        for engine in ENGINES
    },
}
"""For two ranks."""
