"""Models that were compiled before wrap: names without _orig_mod, files for and from bare ones, the same training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fsshard
from tests.models import batch, net
from tests.training_runs import DISTRIBUTED, differences

UNITS: dict[str, Any] = {"auto_wrap_policy": {"Spectral"}}


def whole(how: Any) -> nn.Module:
    compiled: nn.Module = torch.compile(net(), backend=how)  # type: ignore[assignment]
    return compiled


def parts(how: Any) -> nn.Module:
    """A unit, a part of one, and one in the other's place twice."""
    model = net()
    for index in (0, 1):
        model.middle[index] = torch.compile(model.middle[index], backend=how)  # type: ignore[assignment]
    model.first = torch.compile(model.first, backend=how)  # type: ignore[assignment]
    return model


def bare(how: Any) -> nn.Module:
    return net()


BUILT: dict[str, Callable[[Any], nn.Module]] = {"whole": whole, "parts": parts, "bare": bare}


def trained(model: Any, optimizer: Any, first: int, steps: int) -> list[float]:
    losses = []
    for number in range(first, first + steps):
        loss = model(batch(number)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def job_trained(backend: str, built: str, folder: str) -> tuple[int, dict[str, Any], list[str]]:
    """Train, save, go on under the other kind of model: how many graphs, everything, and names that show compiling."""
    counter = CompileCounterWithBackend("eager")
    model = fsshard.wrap(BUILT[built](counter), backend=backend, **UNITS)
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=0.01)
    losses = trained(model, optimizer, 0, 2)
    weights, state = model.state_dict(), optimizer.state_dict()
    shown = [*weights, *state["state"], *(name for name, _ in model.named_parameters())]
    shown += [unit.name for unit in model.plan.units]
    fsshard.save(f"{folder}/{backend}-{built}", model, optimizer)
    graphs = counter.frame_count
    other = fsshard.wrap(BUILT["parts" if built == "bare" else "bare"](counter), backend=backend, **UNITS)
    its = fsshard.build_optimizer(other, torch.optim.Adam, lr=0.5)
    fsshard.load(f"{folder}/{backend}-{built}", other, its)
    losses += trained(other, its, 2, 2)
    other.load_state_dict(weights)
    everything = {"losses": losses, "weights": weights, "state": state, "later": other.state_dict()}
    return graphs, everything, [name for name in shown if "_orig_mod" in name]


@pytest.mark.parametrize(
    "backend", [b if b in ("fsdp2", "fairscale") else pytest.param(b, marks=pytest.mark.long) for b in DISTRIBUTED]
)
def test_as_the_bare_model_and_its_files(ranks: Any, backend: str, tmp_path: Path) -> None:
    """Three trainings that go on under another kind of model each: all the same numbers."""
    found = {built: ranks.run(job_trained, 2, backend, built, str(tmp_path)) for built in BUILT}
    for built, answers in found.items():
        for (graphs, mine, shown), (_, reference, _) in zip(answers, found["bare"], strict=True):
            assert shown == []
            assert list(differences(reference, mine)) == []
            assert (graphs > 0) == (built != "bare"), "compiled"


def job_taken_off() -> None:
    counter = CompileCounterWithBackend("eager")
    module = parts(counter)
    model = fsshard.wrap(module, backend="none", **UNITS)
    assert model.module is module and type(module.first) is nn.Linear
    assert "modules: first, middle.0, middle.1" in model.explain()
    compiled = torch.compile(net(), backend=counter)
    model = fsshard.wrap(compiled, backend="none")  # type: ignore[call-overload]
    assert model.module is compiled._orig_mod  # type: ignore[attr-defined]


def test_what_is_compiled_is_taken_off_and_compiled_by_unit(ranks: Any) -> None:
    ranks.run(job_taken_off, 1)


@pytest.mark.parametrize(
    ("arguments", "uses_graphs"),
    [
        ({"mode": "reduce-overhead"}, True),
        ({"options": {"triton.cudagraphs": True}, "dynamic": False}, True),
        ({"fullgraph": True}, False),
        ({"backend": "aot_eager", "fullgraph": True, "dynamic": True}, False),
    ],
    ids=str,
)
def test_its_arguments_are_those_of_compile(arguments: dict[str, Any], uses_graphs: bool) -> None:
    from fsshard.model.compiled_before import _asked_by

    found = _asked_by(torch.compile(net(), **arguments), False)  # type: ignore[arg-type]
    assert found.uses_cuda_graphs == uses_graphs
    assert found.backend == arguments.get("backend", "inductor")
    assert {name: found.keywords.get(name) for name in ("fullgraph", "dynamic")} == {
        name: arguments.get(name) for name in ("fullgraph", "dynamic")
    }
