"""torch.compile unit by unit: the same numbers under every backend, and graphs that complex weights do not break."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import fsshard
import tests.model.recomputed as stacks
from fsshard.backends import backend_class
from fsshard.backends.settings import Settings
from fsshard.errors import ConfigurationError, UnsupportedByBackend
from fsshard.launching.pool import RankPool
from fsshard.model.compiling import check_compilation, compile_units, compiled_units, resolve_compilation
from fsshard.planning.plan import plan
from tests.models import Spectral, batch, net, with_adam
from tests.on_ranks import on_ranks
from tests.sets import often
from tests.training_runs import DISTRIBUTED, Run, check_equal, differences, train
from tests.zoo import ZOO

BF16_LAYERS: dict[str, Any] = {"mixed_precision": "bf16", "auto_wrap_policy": {nn.Linear}}
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


# ------------------------------------------------------------------------------------------------ parity


def job_both_ways(run: Run) -> tuple[list[str], int]:
    """Where a compiled training differs from an eager one, and how many graphs were compiled."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = dataclasses.replace(run, settings={**run.settings, "compile": {"backend": counter}})
    return list(differences(vars(train(run)), vars(train(compiled)))), counter.frame_count


EVERY = [*DISTRIBUTED, "none"]


@pytest.mark.covering
@pytest.mark.parametrize(
    ("backend", "case", "settings", "graphs"),
    [
        *((b, "frozen", {"auto_wrap_policy": None}, 1) for b in EVERY),  # the root is the only unit
        *((b, "recurrent", {}, 2) for b in EVERY),  # called five times; from the second on its input takes a gradient
        *((b, "tied", {}, 1) for b in ("fairscale", "fsdp")),
        *((b, "conv_batchnorm", {"auto_wrap_policy": {"Conv2d", "BatchNorm2d"}}, 2) for b in ("fsdp2", "ddp", "none")),
        *((b, "dropout", BF16_LAYERS, 2) for b in ("ddp", "none")),  # and every backend above, against the others
        *((b, "zero_dim", {"find_unused_parameters": True}, 1) for b in ("fairscale", "fsdp", "fsdp2")),
    ],
    ids=str,
)
def test_as_without(ranks: RankPool, backend: str, case: str, settings: dict[str, Any], graphs: int) -> None:
    """aot_eager runs the operations that were traced, and autograd's of the backward, with the same kernels."""
    run = Run(case, backend, 3, settings=settings)
    for different, compiled in ranks.run(job_both_ways, 1 if backend == "none" else 2, run):
        assert different == []
        assert compiled == graphs


@pytest.mark.long
def test_complex_views_may_cross_a_graph_break(ranks: RankPool) -> None:
    """Under FSDP1 all parameters are views of a flat one, of which dynamo cannot make a stand-in."""
    for different, graphs in ranks.run(job_both_ways, 2, Run("fno", "fsdp", 2)):
        assert different == [] and graphs > 2


@pytest.mark.parametrize(
    ("choice", "backend"),
    often(itertools.product([True, {stacks.Block}], DISTRIBUTED), ({stacks.Block}, "fsdp2")),
    ids=str,
)
@on_ranks()
def test_recomputation_runs_what_was_compiled_again(backend: str, choice: Any) -> None:
    """Dropout and complex weights inside of the graphs, to the last bit as without; no graph more.

    A compiled training with and without recomputation: what differs, and the graphs of each.
    """
    traces, graphs = [], []
    for asked in (None, choice):
        counter = CompileCounterWithBackend("aot_eager")
        how = {"activation_checkpointing": asked, "compile": {"backend": counter}}
        traces.append(stacks.train(backend, steps=2, auto_wrap_policy={stacks.Inner}, **how))
        del traces[-1]["calls"]
        graphs.append(counter.frame_count)
    different = list(differences(*traces))
    (plain, recomputed) = graphs
    assert different == []
    assert plain == recomputed > 0


# ------------------------------------------------------------------------------------------------ what is compiled


def counted(model: nn.Module, **settings: Any) -> CompileCounterWithBackend:
    """Compile the units of a model, as wrap() does it."""
    counter = CompileCounterWithBackend("eager")
    compile_units(dict(model.named_modules()), plan(model, **settings), resolve_compilation({"backend": counter}))
    return counter


def test_units_that_hold_others_are_not_compiled() -> None:
    nested = plan(
        nn.Sequential(nn.Sequential(Spectral(), nn.Linear(6, 6)), Spectral()),
        auto_wrap_policy={"Sequential", "Spectral"},
    )
    assert [unit.name for unit in nested.units] == ["", "0", "0.0", "1"]
    assert compiled_units(nested) == ("0.0", "1")
    assert compiled_units(plan(nn.Linear(2, 2))) == ("",)


def test_nothing_shows() -> None:
    model = net()
    types_before, keys = [type(m) for m in model.modules()], list(model.state_dict())
    counted(model)
    assert [type(m) for m in model.modules()] == types_before and list(model.state_dict()) == keys
    assert [name for name, m in model.named_modules() if "forward" in m.__dict__] == ["middle.0", "middle.1"]
    assert list(inspect.signature(model.middle[0].forward).parameters) == ["x"]


class Scaled(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(2, 2), (2.0,) * times

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * len(self.times)


@pytest.mark.parametrize(("times", "graphs"), [([1] * 9, 2), (list(range(9)), 9)], ids=["equal", "different"])
def test_layers_share_what_they_can_and_none_is_left_out(times: list[int], graphs: int) -> None:
    """The first layer's input takes no gradient, so it has a graph of its own; torch.compile alone stops at eight."""
    for _ in range(2):  # the second model finds nothing used up
        model = nn.Sequential(*map(Scaled, times))
        counter = counted(model, auto_wrap_policy={Scaled})
        model(torch.ones(1, 2)).sum().backward()
        assert counter.frame_count == graphs


# ------------------------------------------------------------------------------------------------ graph breaks


def breaks(build: Callable[[], nn.Module], inputs: Any, flat: bool) -> tuple[int, int]:
    model = build()
    if flat:
        fsshard.tensorfy(model)
    model(*inputs)  # libraries fill caches at first use (opt_einsum), and break graphs while they do it
    counters.clear()
    counter = counted(model)
    model(*inputs)
    return counter.frame_count, sum(counters["graph_break"].values())


@pytest.mark.parametrize("case", ["mlp_complex", "tied", pytest.param("fno", marks=pytest.mark.long)])
def test_flattened_modules_break_no_more_than_native_ones(case: str) -> None:
    inputs = ZOO[case].batch(0, 0)
    native, flat = (breaks(ZOO[case].build, inputs, flag) for flag in (False, True))
    assert native[0] > 0 and flat <= native


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("inductor", "expected a bool, or a dict"),
        ({"bakend": "inductor"}, "unknown keyword 'bakend'; known are backend, dynamic, fullgraph, mode"),
        ({"mode": "fastest"}, "fastest"),
        ({"mode": "default", "options": {"max_autotune": True}}, "mode or options"),
    ],
    ids=str,
)
def test_bad_values(value: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        resolve_compilation(value)


@pytest.mark.covering
@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
@pytest.mark.parametrize(
    "value", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}, {"backend": "cudagraphs"}], ids=str
)
def test_cuda_graphs_want_parameters_that_stay(backend: str, value: dict[str, Any]) -> None:
    def check(name: str, device: torch.device) -> None:
        settings = Settings(plan=plan(net()), group=None, device=device, compilation=resolve_compilation(value))
        backend_class(name, 2).check(settings)

    with pytest.raises(UnsupportedByBackend, match="max-autotune-no-cudagraphs"):
        check(backend, CUDA)
    check(backend, CPU)
    check("ddp", CUDA)


def test_no_cuda_graph_runs_twice() -> None:
    planned = plan(stacks.stack(), auto_wrap_policy={stacks.Inner}, activation_checkpointing=True)
    graphs = resolve_compilation({"mode": "reduce-overhead"})
    with pytest.raises(ConfigurationError, match="max-autotune-no-cudagraphs"):
        check_compilation(graphs, CUDA, planned)
    check_compilation(graphs, CPU, planned)


# ------------------------------------------------------------------------------------------------ compiled before

UNITS: dict[str, Any] = {"auto_wrap_policy": {"Spectral"}}


def whole(how: Any) -> nn.Module:
    return torch.compile(net(), backend=how)


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


def trained_on(model: Any, optimizer: Any, first: int, steps: int) -> list[float]:
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
    model, optimizer = with_adam(BUILT[built](counter), backend=backend, **UNITS)
    losses = trained_on(model, optimizer, 0, 2)
    weights, state = model.state_dict(), optimizer.state_dict()
    shown = [*weights, *state["state"], *(name for name, _ in model.named_parameters())]
    shown += [unit.name for unit in model.plan.units]
    fsshard.save(f"{folder}/{backend}-{built}", model, optimizer)
    graphs = counter.frame_count
    other = fsshard.wrap(BUILT["parts" if built == "bare" else "bare"](counter), backend=backend, **UNITS)
    its = fsshard.build_optimizer(other, torch.optim.Adam, lr=0.5)
    fsshard.load(f"{folder}/{backend}-{built}", other, its)
    losses += trained_on(other, its, 2, 2)
    other.load_state_dict(weights)
    everything = {"losses": losses, "weights": weights, "state": state, "later": other.state_dict()}
    return graphs, everything, [name for name in shown if "_orig_mod" in name]


@pytest.mark.parametrize("backend", often(DISTRIBUTED, "fsdp2"))
def test_as_the_bare_model_and_its_files(ranks: Any, backend: str, tmp_path: Path) -> None:
    """Three trainings that go on under another kind of model each: all the same numbers."""
    found = {built: ranks.run(job_trained, 2, backend, built, str(tmp_path)) for built in BUILT}
    for built, answers in found.items():
        for (graphs, mine, shown), (_, reference, _) in zip(answers, found["bare"], strict=True):
            assert shown == []
            check_equal(reference, mine)
            assert (graphs > 0) == (built != "bare"), "compiled"


@on_ranks(1)
def test_what_is_compiled_is_taken_off_and_compiled_by_unit() -> None:
    counter = CompileCounterWithBackend("eager")
    module = parts(counter)
    model = fsshard.wrap(module, backend="none", **UNITS)
    assert model.module is module and type(module.first) is nn.Linear
    assert "modules: first, middle.0, middle.1" in model.explain()
    compiled = torch.compile(net(), backend=counter)
    model = fsshard.wrap(compiled, backend="none")  # type: ignore[call-overload]
    assert model.module is compiled._orig_mod  # type: ignore[attr-defined]
