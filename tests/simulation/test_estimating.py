"""estimate() against real ranks, and what it says of what it cannot estimate.

Tests fsshard/simulation/collectives.py too.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsshard
from fsshard.backends import fsdp2
from fsshard.cli import app as cli
from fsshard.errors import ConfigurationError, ModelError, RecipeError, UnknownBackend, UnsupportedByBackend
from fsshard.model import host_copies
from fsshard.simulation.estimating import estimate
from fsshard.simulation.machine import Machine
from fsshard.simulation.result import figure, overview
from fsshard.simulation.simulation import Job, simulate
from fsshard.simulation.worker import Simulator, rebuilt, run_job, simulate_all
from tests.forked import run_script
from tests.sets import often
from tests.simulation.recipes import (
    Adapted,
    Branching,
    Broken,
    Converted,
    Copied,
    HalfFrozen,
    Net,
    Recurrent,
    Selecting,
    Unused,
    Wide,
    net,
    real_run,
)
from tests.simulation.test_machine import UNIT
from tests.training_runs import DISTRIBUTED

PEAK, BYTES = 0.03, 0.01
BATCH = torch.zeros(8, 16)

OTHERS = {"fno": "fsdp2", "vit": "fsdp", "t5": "fairscale"}
LAYERS = {"auto_wrap_policy": {nn.Linear}}
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bf16": ("fsdp2", {"precision": "bf16"}, LAYERS),
    "replicas that reduce in bf16": ("ddp", {"precision": fsshard.Precision(param=torch.bfloat16)}, {}),
    "accumulation": ("fairscale", {"accumulate": 2}, {}),
    "OSS of ours": ("fairscale", {}, {"implementation": "native"}),
    "OSS of ours, accumulation": ("fairscale", {"accumulate": 2}, {"implementation": "native"}),
    "recomputed": ("fsdp", {"activation_checkpointing": True}, LAYERS),
    "kept gathered": ("fsdp2", {}, {**LAYERS, "sharding_strategy": "SHARD_GRAD_OP"}),
    "one unit": ("fsdp", {}, {"auto_wrap_policy": None}),
    "SGD and clipping": (
        "fsdp2",
        {"optimizer": torch.optim.SGD, "hyper": {"lr": 0.1, "momentum": 0.9}, "clip": 1.0},
        {},
    ),
}


pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations in this process, which has imported torch already."""

    def simulated(jobs: list[Job], progress: Any = None) -> list[Any]:
        if progress is not None:
            progress(0, len(jobs))
        return [run_job(job) for job in jobs]

    monkeypatch.setattr("fsshard.simulation.estimating.simulate_all", simulated)


def check(ranks: Any, job: Job, simulated: Any = None) -> None:
    """The simulation against the rank of a real run with the highest peak."""
    simulated = simulated or simulate(job)
    heaviest = max(ranks.run(real_run, job.ranks, job, timeout=120), key=lambda m: m.usage.peak)
    mine, real = simulated.usage, heaviest.usage
    late = sum(simulated.in_flight[:2])  # buffers that gloo's threads may hold on to: the printed interval
    assert mine.peak * (1 - PEAK) <= real.peak <= (mine.peak + late) * (1 + PEAK)
    if not late:
        assert (mine.moment.phase, mine.moment.module) == (real.moment.phase, real.moment.module)
    for kind, nbytes in real.by_kind.items():
        assert mine.by_kind[kind] == pytest.approx(nbytes, abs=PEAK * real.peak + late), kind
    assert [(t.kind, t.count) for t in mine.collectives] == [(t.kind, t.count) for t in real.collectives]
    for one, other in zip(mine.collectives, real.collectives, strict=True):
        assert one.nbytes == pytest.approx(other.nbytes, rel=BYTES)
    assert simulated.plan == heaviest.plan


def check_sent(ranks: Any, job: Job) -> None:
    """Compare bytes sent and bytes held; for models so small the peak is a matter of when gloo's threads let go."""
    mine = simulate(job)
    real = ranks.run(real_run, job.ranks, job, timeout=120)[mine.rank]
    assert [(t.kind, t.count, t.nbytes) for t in mine.usage.collectives] == [
        (t.kind, t.count, t.nbytes) for t in real.usage.collectives
    ]
    assert mine.plan == real.plan and mine.state_ratio == real.state_ratio


def test_every_backend_is_as_simulated_at_two_ranks(ranks: Any) -> None:
    for backend in DISTRIBUTED:
        check(ranks, Job(source="tfno", changes={}, backend=backend, mesh=(2,)))


@pytest.mark.long
def test_other_models_are_as_simulated(ranks: Any) -> None:
    for model, backend in OTHERS.items():
        check(ranks, Job(source=model, changes={}, backend=backend, mesh=(2,)))


@pytest.mark.parametrize("backend", often(["fairscale", "fsdp2"], "fsdp2"))
def test_four_ranks_are_as_simulated(ranks: Any, backend: str) -> None:
    check(ranks, Job(source=net(), changes={}, backend=backend, mesh=(4,)))


@pytest.mark.parametrize("name", often(SETTINGS, "bf16", "OSS of ours, accumulation", "recomputed", "kept gathered"))
def test_settings_are_as_simulated(ranks: Any, name: str) -> None:
    backend, changes, settings = SETTINGS[name]
    source = net(build=functools.partial(Net, 256))
    check(ranks, Job(source=source, changes=changes, backend=backend, mesh=(2,), settings=settings))


def matrices() -> nn.Module:
    """Three, of which one rank owns the largest."""
    torch.manual_seed(0)
    layers = (nn.Linear(*shape, bias=False) for shape in ((16, 256), (256, 256), (256, 16)))
    return nn.Sequential(*(layer for each in layers for layer in (each, nn.Tanh())))


@pytest.mark.parametrize("backend", often(["fsdp", "fsdp2"], "fsdp2"))
def test_optimizers_over_whole_matrices_are_as_simulated(ranks: Any, backend: str) -> None:
    """Owners' copies and state, and what is sent to them and back."""
    changes = {"optimizer": torch.optim.Muon, "hyper": {"lr": 0.01, "whole": True}}
    job = Job(source=net(build=matrices), changes=changes, backend=backend, mesh=(2,))
    check(ranks, job)
    plain = simulate(dataclasses.replace(job, changes={}))
    more = {t.kind: t.count for t in simulate(job).usage.collectives}
    less = {t.kind: t.count for t in plain.usage.collectives}
    assert more.get("all_to_all", 0) == less.get("all_to_all", 0) + 2


@pytest.mark.parametrize("backend", often(["ddp", "fairscale", "fsdp", "fsdp2"], "fairscale"))
def test_an_average_of_the_weights_is_as_simulated(ranks: Any, backend: str) -> None:
    """A rank has one of what it holds of the weights, under FairScale of what it owns."""
    job = Job(source=net(build=functools.partial(Net, 256)), changes={}, backend=backend, mesh=(2,), average=True)
    simulated = simulate(job)
    check(ranks, job, simulated)
    plain = simulate(dataclasses.replace(job, average=False))
    more = simulated.usage.highest["optimizer state"] - plain.usage.highest["optimizer state"]
    share = 1.0 if backend == "ddp" else 0.5
    assert more == pytest.approx(share * plain.plan.nbytes, rel=0.1)
    assert simulated.usage.work.operators > plain.usage.work.operators
    assert simulated.usage.collectives == plain.usage.collectives


def test_units_that_fsdp_keeps_gathered_are_as_simulated(ranks: Any) -> None:
    """In the process that estimates are made in: FSDP1 asked for addresses there, and failed."""
    settings = {**LAYERS, "sharding_strategy": "SHARD_GRAD_OP"}
    job = Job(source=net(build=functools.partial(Net, 256)), changes={}, backend="fsdp", mesh=(2,), settings=settings)
    check(ranks, job, simulate_all([job])[0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "backend", "mesh"),
    [
        pytest.param("examples.mesh_recipes:perceptron", "ddp", {"data": 2, "tp": 2}, marks=pytest.mark.long),
        ("examples.mesh_recipes:weather", "fsdp2", {"data": 1, "cp": 2, "tp": 2}),
        pytest.param("examples.mesh_recipes:weather", "ddp", {"data": 2, "cp": 2}, marks=pytest.mark.long),
    ],
)
def test_divided_models_are_as_simulated(ranks: Any, recipe: str, backend: str, mesh: dict[str, int]) -> None:
    """DTensors and parts by hand; what is sent along all dimensions, with the sums over shared parameters."""
    check_sent(ranks, Job(source=recipe, changes={}, backend=backend, mesh=(mesh["data"],), whole_mesh=mesh))


@pytest.mark.long
def test_an_operator_on_slabs_is_as_simulated_on_real_tensors(ranks: Any) -> None:
    """Ranks tell each other the sizes of their slabs, which are numbers."""
    pytest.importorskip("neuralop")
    mesh = {"data": 2, "domain": 2}
    job = Job(source="examples.mesh_recipes:fno", changes={}, backend="fsdp2", mesh=(2,), whole_mesh=mesh, real=True)
    check_sent(ranks, job)
    real, fake = (
        {one.kind: one for one in simulate(each).usage.collectives}
        for each in (job, dataclasses.replace(job, real=False))
    )
    assert fake["all_to_all"] == real["all_to_all"] and fake.keys() == real.keys() - {"all_gather"}


def test_what_a_simulation_has_imported_does_not_slow_the_next() -> None:
    """Half of a small simulation was garbage collection, through all that torch and the model's library had made."""
    with Simulator("fsshard.estimate") as simulator:
        counts = []
        for _ in range(2):
            simulator.ask(run_job, Job(source=net(), changes={}, backend="ddp", mesh=(2,)))
            counts.append(simulator.ask(gc.get_freeze_count))
        assert counts[1] > counts[0]


def test_meshes(here: None, capfd: Any) -> None:
    found = estimate("examples.mesh_recipes:weather", backend="fsdp2", mesh={"data": 2, "cp": 2, "tp": 2})
    assert (found.world_size, found.mesh) == (8, (2, 2, 2))
    assert "mesh of data 2, cp 2, tp 2" in str(found)
    assert (
        cli.main(["estimate", "examples.mesh_recipes:weather", "--mesh", "data=2,tp=2", "-q", "--backends", "ddp"]) == 0
    )
    assert re.search(r"^ddp +4 ", capfd.readouterr().out, re.MULTILINE)
    for options, message in [
        ({"mesh": {"data": 2, "tp": 2}, "world_size": 2}, "has 4 ranks; leave world_size out"),
        ({"mesh": {"data": 2, "tp": 2}, "device_mesh": (2,)}, "leave device_mesh out"),
        ({"mesh": {"tp": 2}}, "no dimension is data-parallel"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            estimate("examples.mesh_recipes:weather", **options)
    with pytest.raises(RecipeError, match="does not say how its model is divided over tp"):
        estimate("mlp", mesh={"data": 2, "tp": 2})


def test_a_module_on_many_ranks_and_nothing_is_left_behind() -> None:
    module = Net(1024)
    before = (dist.is_initialized(), torch.UntypedStorage.resize_, torch.get_rng_state())
    one, many = estimate(module, backend="fsdp2", world_size=[4, 16], batch=BATCH, device="cuda")
    assert one.parameters == sum(p.nbytes for p in module.parameters())
    assert one.by_kind["parameters"] == pytest.approx(one.parameters / 4, rel=0.05)
    assert many.by_kind["parameters"] == pytest.approx(one.by_kind["parameters"] / 4, rel=0.1)
    assert one.bounds.peak <= one.peak and many.bounds.peak <= many.peak
    assert dist.is_initialized() == before[0] and torch.UntypedStorage.resize_ == before[1]
    assert torch.equal(torch.get_rng_state(), before[2]) and module.a.weight.device.type == "cpu"


@pytest.mark.usefixtures("here")
def test_the_loss_of_a_bare_module_is_the_mean_square() -> None:
    """And keeps no more than that for its backward."""
    module, batch = nn.Linear(8, 4096), torch.randn(64, 8)
    given = estimate(module, batch=batch, loss=lambda model, batch: model(batch).square().mean())
    assert estimate(module, batch=batch).peak == given.peak


@pytest.mark.usefixtures("here")
def test_a_plan_is_its_model_without_activations() -> None:
    module = Net(1024)
    whole = estimate(module, backend="fsdp2", world_size=4, batch=BATCH, device="cuda")
    bare = estimate(fsshard.plan(module), backend="fsdp2", world_size=4, device="cuda")
    assert bare.parameters == whole.parameters and bare.by_kind["parameters"] == whole.by_kind["parameters"]
    assert whole.collectives[:2] == bare.collectives  # but for the buffer's broadcast
    assert bare.highest["activations"] < whole.highest["activations"]


@pytest.mark.usefixtures("here")
def test_the_estimate_as_text_json_and_picture() -> None:
    found = estimate(net(), backend=["ddp", "fairscale"], world_size=[2, 8], device="cuda", accumulation=2)
    one = found[-1]
    assert one.optimizer == "Adam(foreach=True)" and one.peak % 512 == 0
    assert "activations" in one.table() and "bound" in one.table() and "reduce" in str(one)
    assert len(overview(found).splitlines()) == 1 + len(found)
    parsed = json.loads(one.to_json())
    assert one.machine == "h100" and parsed["seconds"] == one.seconds and parsed["work"]["operators"] > 0
    assert parsed["peak"] == one.peak and parsed["moment"]["phase"] == one.moment.phase
    bars, lines, speeds = figure(found, at=8).axes
    assert [label.get_text() for label in bars.get_xticklabels()] == ["ddp", "fairscale"]
    assert sum(patch.get_height() for patch in bars.patches) * 1024 == pytest.approx(found[1].peak + one.peak)
    assert lines.get_xscale() == "log" and len(lines.lines) == 4
    assert bars.get_ylabel() == lines.get_ylabel() and lines.get_xlabel() == "ranks"
    drawn = [float(line.get_ydata()[-1]) for line in speeds.lines[::2]]
    assert drawn == [found[1].samples_per_second, one.samples_per_second]
    padded = dataclasses.replace(one, highest={**one.highest, "gathered units": 4 * one.parameters})
    assert "from 8 on gathered units are mostly padding" in figure([*found[:-1], padded]).axes[1].get_xlabel()


class Pair(nn.Sequential):
    """Two products."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


@pytest.mark.usefixtures("here")
def test_samples_and_utilisation() -> None:
    """Flops of a forward are counted by hand; what is recomputed is none of the model's own."""
    model = nn.Sequential(Pair(), nn.Identity())
    batch = torch.ones(4, 8)
    arguments = {"batch": batch, "backend": "ddp", "machine": UNIT, "accumulation": 3}
    one = estimate(model, world_size=2, **arguments)
    assert one.samples == 4 * 3 * 2 and one.samples_per_second == one.samples / one.seconds
    forward = 3 * 2 * (2 * 4 * 8 * 8)
    assert one.work.forward == {"float32": forward}
    assert one.best_seconds == 3 * forward / UNIT.flops["float32"]
    assert one.utilisation == one.best_seconds / one.seconds
    recomputed = estimate(model, world_size=2, activation_checkpointing={Pair}, **arguments)
    assert recomputed.work.flops["float32"] > one.work.flops["float32"]
    assert recomputed.best_seconds == one.best_seconds
    parsed = json.loads(one.to_json())
    assert parsed["utilisation"] == one.utilisation and parsed["collectives"][0]["by_ranks"][0]["ranks"] == 2
    assert "samples/s, MFU" in one.table() and "1.00" in overview([one])


@pytest.mark.usefixtures("here")
def test_a_gpu_computes_and_sends_at_once() -> None:
    nodes = dataclasses.replace(UNIT, device="cuda")
    one = estimate(net(), backend="fsdp2", world_size=8, device="cuda", machine=nodes, auto_wrap_policy={nn.Linear})
    terms = one.terms
    calls = sum(traffic.count for traffic in one.collectives)
    sending = terms["sent"] + terms["collectives"]
    computing = sum(terms.values()) - sending
    assert calls > 2 and one.hidden == pytest.approx(min(sending, computing) * (1 - 1 / calls))
    assert one.seconds == pytest.approx(sum(terms.values()) - one.hidden)
    assert "hidden" in one.table()


@pytest.mark.usefixtures("here")
def test_what_spans_nodes_takes_longer() -> None:
    """Replicas between nodes and shards within are faster than shards over all, where links between nodes are slow."""
    slow = dataclasses.replace(UNIT, device="cuda", per_node=4, between=UNIT.sent / 100)
    arguments = {"backend": "fsdp2", "world_size": 8, "device": "cuda"}

    def sending(machine: Machine, **more: Any) -> float:
        return estimate(net(), machine=machine, **arguments, **more).terms["sent"]

    assert sending(slow) > 2 * sending(slow, device_mesh=(2, 4))
    assert sending(dataclasses.replace(slow, per_node=8)) == sending(dataclasses.replace(UNIT, device="cuda"))


@pytest.mark.usefixtures("here")
def test_an_estimate_by_constants() -> None:
    plan = fsshard.plan(nn.Linear(8, 8))
    one = fsshard.estimate(plan, world_size=2, backend="ddp", machine=UNIT)
    assert one.machine == "unit" and one.seconds == sum(one.terms.values())
    (traffic,) = one.collectives
    assert one.terms["sent"] == traffic.sent / 4 and one.terms["collectives"] == 2 * traffic.count
    assert one.terms["operators"] == one.work.operators / 2 and one.terms["written"] == one.work.written / 5
    away = fsshard.estimate(plan, world_size=2, backend="fsdp2", machine=UNIT, accumulation=3, cpu_offload=True)
    assert away.terms["offloaded"] == 3 * plan.nbytes / 2 and "offloaded" in away.table()
    assert "time by 'unit'" in one.table() and "operators" in one.table()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Branching, r"_local_scalar_dense.*recipes\.py:\d+ in forward.*real=True"),
        (Selecting, r"nonzero.*recipes\.py:\d+ in forward"),
        (Broken, r"fails under backend 'ddp', at .*recipes\.py:\d+ in forward"),
    ],
)
def test_a_step_that_cannot_be_simulated_names_operation_place_and_way_out(model: type[nn.Module], said: str) -> None:
    job = Job(source=net(build=model), changes={}, backend="ddp", mesh=(2,))
    with pytest.raises(ModelError, match=said):
        run_job(job)
    assert not dist.is_initialized()


def test_a_step_that_reads_numbers_runs_on_real_tensors() -> None:
    job = Job(source=net(build=Branching), changes={}, backend="fsdp2", mesh=(2,))
    real, fake = run_job(dataclasses.replace(job, real=True)), simulate(dataclasses.replace(job, source=net()))
    assert real.usage.peak == pytest.approx(fake.usage.peak, rel=0.1)


def test_bad_input_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsshard.simulation.estimating.simulate_all", lambda *_: pytest.fail("it ran"))
    wrong = [
        ({"backend": "fsdp9"}, UnknownBackend, "fsdp9"),
        ({"world_size": 0}, ConfigurationError, "world_size=0"),
        ({"world_size": 8, "device_mesh": (2, 3)}, ConfigurationError, "does not divide world_size=8"),
        ({"device_mesh": (1, 1, 1)}, ConfigurationError, "device_mesh"),
        ({"device": "tpu"}, ConfigurationError, "tpu"),
        ({"backend": "ddp", "cpu_offload": True}, UnsupportedByBackend, "cpu_offload"),
        ({"optimizer": "Adam"}, ConfigurationError, "optimizer="),
        ({"backend": []}, ConfigurationError, "backend="),
        ({"world_size": []}, ConfigurationError, "world_size="),
        ({"backend": "fsdp2", "cpu_offload": "yes"}, ConfigurationError, "cpu_offload='yes'"),
        ({"backend": "fsdp2", "average": 0.9}, ConfigurationError, "average=0.9: expected True or False"),
    ]
    for arguments, kind, text in wrong:
        with pytest.raises(kind, match=text):
            estimate(net(), **arguments)
    with pytest.raises(ConfigurationError, match="batch: expected one rank"):
        estimate(Net(), backend="ddp")
    with pytest.raises(RecipeError, match="not a recipe"):
        estimate(None, batch=BATCH)
    with pytest.raises(ConfigurationError, match="compiled"):
        estimate(torch.compile(Net()), batch=BATCH)
    with pytest.raises(ConfigurationError, match="a plan has no forward, and a recipe has its own"):
        estimate(fsshard.plan(Net()), batch=BATCH)
    with pytest.raises(RecipeError, match="got LBFGS, which runs forward and backward itself"):
        estimate(net(), backend="ddp", optimizer=torch.optim.LBFGS)
    with pytest.raises(RecipeError, match="no_such"):
        estimate("tests.simulation.recipes:no_such")


@pytest.mark.usefixtures("here")
def test_a_batch_of_another_device_is_brought_to_where_it_is_simulated() -> None:
    here, there = (estimate(Net(), batch=batch, backend="ddp") for batch in (BATCH, BATCH.to("meta")))
    assert here == there


@pytest.mark.usefixtures("here")
def test_collectives_that_stand_in_for_others_have_their_bounds() -> None:
    over_gloo = estimate(net(), backend="fsdp2", world_size=2)
    others = estimate(net(), backend="fsdp2", world_size=2, fast_collectives=False, merge_below=2**20)
    assert set(over_gloo.bounds.payloads) == {"broadcast", "all_to_all"}
    assert set(others.bounds.payloads) == {"all_gather", "reduce_scatter"}
    assert sorted(over_gloo.bounds.payloads.values()) == sorted(others.bounds.payloads.values())


def test_what_cannot_be_sent_or_simulated_is_told() -> None:
    with pytest.raises(ConfigurationError, match="module:function"):
        estimate(net(loss=lambda model, batch: model(batch).sum()), backend="ddp")
    with pytest.raises(ConfigurationError, match="compile=True"):
        run_job(Job(source=net(), changes={}, backend="ddp", mesh=(2,), settings={"compile": True}))
    source = net(build=functools.partial(rebuilt, b"ctests.simulation.recipes\nDefinedInANotebook\n."))
    with pytest.raises(ConfigurationError, match=r"DefinedInANotebook.*notebook.*module of its own"):
        run_job(Job(source=source, changes={}, backend="ddp", mesh=(1,)))


@pytest.mark.parametrize("backend", often(DISTRIBUTED, "fsdp2", "fairscale"))
def test_one_step_after_the_state_is_made_is_as_the_second_of_two(backend: str) -> None:
    job = Job(source=net(), changes={}, backend=backend, mesh=(4,))
    made, two = simulate(job), simulate(dataclasses.replace(job, real=True))
    assert made.usage.collectives == two.usage.collectives and made.state_ratio == two.state_ratio
    assert made.usage.peak == pytest.approx(two.usage.peak, abs=64)  # the ranks' small facts, which fakes keep apart
    assert made.usage.moment == two.usage.moment


@pytest.mark.parametrize(
    ("model", "backend", "settings"),
    [
        pytest.param(Copied, "ddp", {}, marks=pytest.mark.long),
        pytest.param(Converted, "ddp", {}, marks=pytest.mark.long),
        (Recurrent, "ddp", {}),
        pytest.param(Unused, "ddp", {"find_unused_parameters": True}, marks=pytest.mark.long),
        (Unused, "fsdp2", {"find_unused_parameters": True}),
    ],
)
def test_tensors_without_memory_are_as_real_ones(
    model: type[nn.Module], backend: str, settings: dict[str, Any]
) -> None:
    job = Job(source=net(build=model), changes={}, backend=backend, mesh=(2,), settings=settings)
    fake, real = simulate(job).usage, simulate(dataclasses.replace(job, real=True)).usage
    assert fake.peak == pytest.approx(real.peak, rel=0.005)
    assert fake.highest["activations"] == real.highest["activations"]
    assert fake.highest["optimizer state"] == pytest.approx(real.highest["optimizer state"], rel=0.001)


@pytest.mark.long
@pytest.mark.usefixtures("here")
def test_what_takes_no_part_is_in_no_bound() -> None:
    source = net(build=Unused)
    for backend in ("ddp", "fsdp", "fsdp2", "fairscale"):
        found = estimate(source, backend=backend, world_size=2, find_unused_parameters=True)
        assert found.bounds.peak <= found.peak and found.bounds.sent <= found.sent
        assert all(found.highest[kind] >= nbytes for kind, nbytes in found.bounds.by_kind.items())


@pytest.mark.long
def test_the_rank_that_needs_most_is_simulated(ranks: Any) -> None:
    """FairScale's owners."""
    job = Job(source="mlp", changes={}, backend="fairscale", mesh=(2,))
    assert simulate(job).rank == 1
    check(ranks, job)


@pytest.mark.parametrize("backend", often(DISTRIBUTED, "fsdp"))
def test_what_is_frozen_has_no_gradient_and_no_state(ranks: Any, backend: str) -> None:
    """Half of the layers, and all but adapters, in one unit with what is trained."""
    for build in (HalfFrozen, Adapted):
        job = Job(source=net(build=build), changes={}, backend=backend, mesh=(2,))
        check_sent(ranks, job)
        mine, whole = (
            simulate(Job(source=net(build=b), changes={}, backend=backend, mesh=(2,))) for b in (build, Wide)
        )
        trained = sum(info.nbytes for info in mine.plan.parameters.values() if info.requires_grad)
        share = trained / whole.plan.nbytes
        for kind in ("gradients", "optimizer state"):
            assert mine.usage.highest[kind] <= 1.3 * share * whole.usage.highest[kind] + 256, kind


@pytest.mark.long
def test_what_stands_for_many_ranks_is_as_one_call_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(source=net(), changes={}, backend="fsdp2", mesh=(24,))
    at_once = simulate(job)
    monkeypatch.setattr(fsdp2, "MANY_RANKS", 24)
    each = simulate(job)
    assert at_once.usage.collectives == each.usage.collectives
    assert (at_once.usage.peak, at_once.usage.by_kind) == (each.usage.peak, each.usage.by_kind)


@pytest.mark.usefixtures("here")
def test_the_command_prints_a_table_json_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", "tests.simulation.recipes:net", "--backends", "fsdp9"]) == 2
    assert "fsdp9" in capsys.readouterr().err
    assert cli.main(["estimate", "tests.simulation.recipes:net", "--activation-checkpointing"]) == 2
    assert "only unit" in capsys.readouterr().err
    more = ["--accumulation", "2", "--json", "-", "--progress"]
    assert cli.main(["estimate", "tests.simulation.recipes:printing", "--backends", "fsdp2", *more]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)[0]["world_size"] == 2 and "activations" in shown.err
    assert "printed by the recipe" in shown.err and "%" in shown.err


class Block(nn.Sequential):
    """A block that is recomputed."""


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), *(Block(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(6)))


def test_offloaded_activations_are_not_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for the GPU in an estimate, and was refused as a place from which nothing can be offloaded."""
    monkeypatch.setattr(host_copies, "LEAST", 1)
    host = {"offload_to_cpu": True}
    asked = {"kept": None, "away": fsshard.Checkpointing({Block}, recompute=False, **host)}
    asked |= {"again": fsshard.Checkpointing({Block}), "inputs away": fsshard.Checkpointing({Block}, **host)}
    offloaded = []
    for backend in ("ddp", "fsdp2"):
        recipes = {name: net(build=blocks, activation_checkpointing=choice) for name, choice in asked.items()}
        jobs = {n: Job(source=r, changes={}, backend=backend, mesh=(2,), device="cuda") for n, r in recipes.items()}
        found = {name: simulate(job) for name, job in jobs.items()}
        usage = {name: measured.usage for name, measured in found.items()}
        assert usage["again"].saved - usage["inputs away"].saved == 6 * 8 * 16 * 4  # the inputs of six blocks
        assert usage["away"].saved < usage["kept"].saved and usage["away"].work.flops == usage["kept"].work.flops
        assert usage["away"].work.offloaded and len(found["away"].plan.offloaded) == 6
        offloaded.append(usage["away"].work.offloaded)
    assert offloaded[0] == offloaded[1]  # weights stay
    with pytest.raises(ConfigurationError, match="are in host memory already; leave out real=True"):
        simulate(dataclasses.replace(jobs["inputs away"], backend="ddp", real=True))


SCRIPT = """
import fsshard, torch
{guard}print(fsshard.estimate(torch.nn.Linear(4, 4), batch=torch.ones(2, 4)).bounds.peak)
"""


@pytest.mark.long
def test_a_script_estimates_below_its_guard(tmp_path: Path) -> None:
    """The advice of the error, followed."""
    (script := tmp_path / "train.py").write_text(SCRIPT.format(guard=""))
    refused = run_script(script, [], {})
    assert 'so put what calls fsshard.estimate under `if __name__ == "__main__":`' in refused.stderr, refused
    script.write_text(SCRIPT.format(guard='if __name__ == "__main__":\n    '))
    followed = run_script(script, [], {})
    assert followed.returncode == 0 and int(followed.stdout) > 0, followed
