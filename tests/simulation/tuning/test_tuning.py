"""tune(): the winner, the frontier, the code, and what it says of questions without an answer."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

import fsshard
from fsshard.cli import app as cli
from fsshard.errors import ConfigurationError, DoesNotFit, FsshardError, RecipeError, UnknownBackend
from fsshard.simulation.machine import MACHINES, Machine
from fsshard.simulation.simulation import Job, Measured, simulate
from fsshard.simulation.tuning.arrangements import arrangements
from fsshard.simulation.tuning.result import Tried, TuneResult, best, figure
from fsshard.simulation.tuning.search_space import Candidate
from fsshard.simulation.tuning.tuning import Search, _bytes
from fsshard.simulation.worker import Simulator, SimulatorDied, run_job
from tests.on_ranks import on_ranks
from tests.simulation.tuning.recipes import Block, Tower, samples, tower

RECIPE = "tests.simulation.tuning.recipes:tower"


pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture(scope="module")
def found(forked: None) -> TuneResult:
    return fsshard.tune(RECIPE, world_size=4, backend=["fsdp2", "ddp"], limit=6)


def simulated(settings: dict[str, Any]) -> Measured:
    backend = settings.pop("backend")
    return simulate(Job(source=RECIPE, changes={}, backend=backend, mesh=(4,), settings=settings))


def test_the_winner_is_never_worse_than_what_is_always_tried(found: TuneResult) -> None:
    assert {"fsdp2, auto", "fsdp2, one unit", "fsdp2, torch's size-based", "ddp, default"} <= set(found.aliases)
    assert found.winner.peak <= 1.001 * min(one.peak for one in found.tried)
    assert all(found.winner.peak <= one.peak for one in found.aliases.values())
    assert found.winner.peak < found.aliases["fsdp2, auto"].peak  # there is something to be found here


@pytest.mark.long
def test_what_wrap_does_by_itself_over_gloo_is_always_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulator, "ask", lambda _, function, *arguments: function(*arguments))
    given = {"auto_wrap_policy": {Block}, "activation_checkpointing": False}
    tuned = fsshard.tune(RECIPE, world_size=4, backend="fsdp2", memory="1GiB", limit=1, **given)
    by_itself = simulated({"backend": "fsdp2", "auto_wrap_policy": {Block}})
    assert tuned.aliases["as given, small ones joined"].estimate.collectives == by_itself.usage.collectives
    assert tuned.winner.collectives < tuned.aliases["as given"].collectives


def test_with_a_bound_the_least_time_that_fits_wins(found: TuneResult) -> None:
    peaks = sorted(one.peak for one in found.tried)
    for bound in (peaks[0], peaks[len(peaks) // 2], peaks[-1]):
        winner = best(found.tried, bound)
        assert winner is not None and winner.peak <= bound
        assert all(winner.estimate.seconds <= one.estimate.seconds for one in found.tried if one.peak <= bound)
    assert best(found.tried, peaks[0]) is not best(found.tried, peaks[-1])  # memory has its price
    assert best(found.tried, peaks[0] - 1) is None


def test_the_frontier_is_what_nothing_beats(found: TuneResult) -> None:
    def everything(one: Tried) -> tuple[float, ...]:
        return one.peak, *one.cost

    assert found.winner in found.frontier and len(found.frontier) > 1
    for one in found.frontier:
        for other in found.tried:
            worse = [a > b for a, b in zip(everything(other), everything(one), strict=True)]
            assert any(worse) or everything(other) == everything(one)


def test_no_plan_is_simulated_twice_and_no_unit_is_called_more_than_once(found: TuneResult) -> None:
    plans = [fsshard.plan(Tower(), auto_wrap_policy=_units(one)) for one in found.tried]
    assert not any(unit.name.startswith("shared") for plan in plans for unit in plan.units)
    assert "shared.mix" in {u.name for u in fsshard.plan(Tower(), auto_wrap_policy=20_000).units}  # by size it is one
    codes = [one.candidate.code() for one in found.tried]
    assert len(codes) == len(set(codes))


def _units(one: Tried) -> Any:
    return one.candidate.settings.get("auto_wrap_policy", "auto")


def test_the_code_gives_the_winner(found: TuneResult, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (found.winner, found.frontier[-1]):
        given = {}
        monkeypatch.setattr(fsshard, "wrap", lambda model, given=given, **settings: given.update(settings))
        exec(dataclasses.replace(found, winner=one).code(), {"model": None})
        again = simulated(given)
        assert again.usage.peak == one.estimate.peak and again.usage.by_kind == one.estimate.by_kind
        assert again.usage.collectives == one.estimate.collectives and len(again.plan.recomputed) == one.recomputed


def test_merging_is_chosen_where_it_means_something(found: TuneResult) -> None:
    """wrap() joins small units by itself over gloo, so a plan of small ones must say that it keeps them apart."""
    assert "merge_below=0" in found.winner.candidate.code()
    assert "merge_below" not in found.aliases["fsdp2, one unit"].candidate.code()
    assert not any("merge_below" in one.candidate.code() for one in found.tried if one.candidate.backend == "ddp")


def test_the_command_says_the_same_again(found: TuneResult, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    picture = tmp_path / "plans.png"
    arguments = ["tune", RECIPE, "--world-size", "4", "--backends", "fsdp2,ddp", "--limit", "1", "--json", "-"]
    assert cli.main([*arguments, "--plot", str(picture)]) == 0
    shown = capsys.readouterr()
    again, before = json.loads(shown.out), json.loads(found.to_json())
    assert again["always tried"] == before["always tried"] and again["tried"]
    assert all(one in before["tried"] for one in again["tried"])
    assert again["code"].strip() in shown.err and "always tried" in shown.err
    assert picture.stat().st_size > 1000


def test_the_picture_has_every_plan(found: TuneResult) -> None:
    time, sent, collectives = figure(dataclasses.replace(found, memory=found.winner.peak)).axes
    for axes in (time, sent, collectives):
        lines = [line for line in axes.lines if line.get_marker() == "o"]
        frontier = [line for line in lines if line.get_label() == "frontier"]
        assert sum(len(line.get_xdata()) for line in lines) == len(found.tried) + len(found.frontier)
        assert len(frontier) == 1 and any("fsdp2, auto" in str(line.get_label()) for line in axes.lines)
        assert not axes.texts  # names beside points would lie on each other
    (drawn,) = (line for line in time.lines if line.get_label() == "frontier")
    assert list(drawn.get_xdata()) == [1e3 * one.estimate.seconds for one in found.frontier]


@pytest.mark.long
def test_for_gpus_activations_may_go_to_the_host() -> None:
    given = {"world_size": 4, "backend": "fsdp2", "device": "cuda", "limit": 8}
    tuned = fsshard.tune(RECIPE, **given)
    choices = [one.candidate.settings.get("activation_checkpointing") for one in tuned.tried]
    away = [choice for choice in choices if getattr(choice, "offload_to_cpu", False)]
    assert {choice.recompute for choice in away} == {True, False}
    left = next(one for one in tuned.tried if "recompute=False" in one.candidate.code() and one.estimate.work.offloaded)
    assert f"{left.offloaded} offloaded" in left.row("", left) and left.as_dict()["offloaded"] and not left.recomputed
    assert len({one.candidate.code() for one in tuned.tried}) == len(tuned.tried)


@pytest.mark.long  # that the least time wins, a bound given, is shown by others at every commit
def test_the_machine_decides_which_plan_is_fast() -> None:
    def machine(**constants: float) -> Machine:
        return dataclasses.replace(MACHINES["cpu"], name="mine", **constants)

    given = {"world_size": 4, "backend": "fsdp2", "memory": "1GiB", "limit": 4}
    slow_calls = fsshard.tune(RECIPE, machine=machine(collective=1.0, sent=1e15), **given)
    slow_wires = fsshard.tune(RECIPE, machine=machine(collective=1e-12, sent=1.0), **given)
    assert slow_calls.winner.collectives == min(one.collectives for one in slow_calls.tried)
    assert slow_wires.winner.estimate.sent == min(one.estimate.sent for one in slow_wires.tried)
    assert "the least time within 1.00 GiB" in slow_calls.table() and "times by 'mine'" in slow_calls.table()
    row = next(line for line in slow_calls.table().splitlines() if line.startswith("*"))
    assert f"{slow_calls.winner.estimate.seconds:.3g} s" in row  # so many collectives of a second each


def test_a_bound_that_nothing_meets_is_told_with_ways_out_and_what_is_given_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways_down = Search.ways_down
    monkeypatch.setattr(Search, "ways_down", lambda *given: [("no way", 2**40), *ways_down(*given)])
    given = {"mixed_precision": "bf16", "reshard_after_forward": True, "activation_checkpointing": {Block}}
    batch = samples(0, 2, 0)
    with pytest.raises(DoesNotFit, match=r"smallest peak is .* per rank, at .*world_size=\d+: .*smaller") as caught:
        fsshard.tune(Tower(), batch=batch, world_size=2, memory="20KiB", limit=1, backend="fsdp2", **given)
    assert caught.value.least > 20 * 1024
    for text in ('mixed_precision="bf16"', "reshard_after_forward=True", 'activation_checkpointing={"Block"}'):
        assert text in str(caught.value)
    assert "mixed_precision='bf16'" not in str(caught.value)  # no way out: it is there already
    assert "no way" not in str(caught.value)  # what needs more


def test_a_search_does_not_go_on_without_the_process_that_simulates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the best so far would pass for the winner."""

    def answer(simulator: Simulator, function: Any, *arguments: Any) -> Any:
        if function is run_job:
            raise SimulatorDied("gone")
        return function(*arguments)

    monkeypatch.setattr(Simulator, "ask", answer)
    with pytest.raises(SimulatorDied, match="gone"):
        fsshard.tune(RECIPE, world_size=4, backend="fsdp2")


def test_bad_input_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulator, "ask", lambda *_: pytest.fail("it ran"))
    wrong = [
        ({"backend": "fsdp9"}, UnknownBackend, "fsdp9"),
        ({"backend": []}, ConfigurationError, "backend="),
        ({"world_size": 0}, ConfigurationError, "world_size=0"),
        ({"memory": "forty"}, ConfigurationError, "memory='forty'"),
        ({"memory": "40 Gi B"}, ConfigurationError, "memory="),
        ({"memory": -1}, ConfigurationError, "memory=-1"),
        ({"memory": True}, ConfigurationError, "memory=True"),
        ({"limit": 0}, ConfigurationError, "limit=0"),
        ({"device": "tpu"}, ConfigurationError, "tpu"),
        ({"machine": "h100"}, ConfigurationError, "not for device='cpu'"),
        ({"optimizer": "Adam"}, ConfigurationError, "optimizer="),
        ({"device_mesh": (3,)}, ConfigurationError, "does not divide"),
    ]
    for arguments, kind, text in wrong:
        with pytest.raises(kind, match=text):
            fsshard.tune(tower(), **{"world_size": 4, **arguments})
    with pytest.raises(ConfigurationError, match="batch: expected one rank"):
        fsshard.tune(Tower(), world_size=2)
    with pytest.raises(ConfigurationError, match="a plan is what"):
        fsshard.tune(fsshard.plan(Tower()), world_size=2)
    with pytest.raises(RecipeError, match="no_such"):
        fsshard.tune("tests.simulation.tuning.recipes:no_such", world_size=2)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("40GiB", 40 * 2**30), ("1.5 MiB", 3 * 2**19), ("2GB", 2 * 10**9), ("512", 512), ("8k", 8000), (40e9, 40 * 10**9)],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert _bytes(text) == nbytes


SLOW = dataclasses.replace(
    MACHINES["h100"], per_node=2, sent=1e9, between=1e6, collective=1e-9, hop=0, hop_between=0, operator=1e-9
)
"""Nodes of two ranks, with links between them so slow that what is sent over them decides."""


def test_arrangements_of_ranks() -> None:
    assert arrangements(("shard", "replicate"), 4) == [
        {"replicate": 1, "shard": 4},
        {"replicate": 2, "shard": 2},
        {"replicate": 4, "shard": 1},
    ]
    orders = arrangements(("data", "tp"), 6)
    assert {"data": 2, "tp": 3} in orders and {"tp": 3, "data": 2} in orders
    assert len(orders) == 6, "1 x 6, 2 x 3, 3 x 2, 6 x 1; the two with neighbours of both kinds in both orders"
    assert arrangements([{"replicate": 2, "shard": 2}], 4) == [{"replicate": 2, "shard": 2}]


def test_meshes_are_searched_where_nodes_make_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulator, "ask", lambda _, function, *arguments: function(*arguments))
    asked = {"backend": "fsdp2", "device": "cuda", "limit": 1, "activation_checkpointing": False}
    asked["auto_wrap_policy"] = "auto"
    tuned = fsshard.tune(RECIPE, world_size=4, machine=SLOW, memory="1GiB", meshes=("replicate", "shard"), **asked)
    # Shards within a node: between nodes each rank sends only its own shard of the gradients.
    assert tuned.mesh == {"replicate": 2, "shard": 2}
    shapes = {one.estimate.mesh for one in tuned.tried}
    assert shapes == {(4,), (2, 2), (4, 1)}
    told = tuned.code()
    assert 'mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))' in told
    assert "    device_mesh=mesh,\n" in told and "import init_device_mesh" in told
    assert "mesh of replicate=2,shard=2" in tuned.table()
    # Without nodes nothing is gained by replicas that need more memory for the same links.
    alone = fsshard.tune(RECIPE, world_size=4, machine=SLOW, meshes=[{"replicate": 2, "shard": 2}], **asked)
    assert alone.mesh is None, "the least peak: all ranks divide"


def sent_to(one: Tried, *, neighbour: bool) -> float:
    """Return the bytes that rank 0 sends to the rank beside it, or to that of the other node."""
    members = (0, 1) if neighbour else (0, 2)
    shares = [traffic.by_group[members].sent for traffic in one.estimate.collectives if members in traffic.by_group]
    return sum(shares)


def test_orders_of_a_mesh_that_divides_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dimension that sends most is that of neighbours in the faster order."""
    monkeypatch.setattr(Simulator, "ask", lambda _, function, *arguments: function(*arguments))
    asked = {"backend": "ddp", "device": "cuda", "limit": 1, "activation_checkpointing": False}
    meshes = [{"data": 2, "tp": 2}, {"tp": 2, "data": 2}]
    recipe = "examples.mesh_recipes:weather"
    tuned = fsshard.tune(recipe, world_size=4, machine=SLOW, memory="1GiB", meshes=meshes, **asked)
    slower, faster = sorted(tuned.tried[-2:], key=lambda one: -one.estimate.seconds)
    assert sent_to(faster, neighbour=True) > sent_to(faster, neighbour=False)
    assert sent_to(slower, neighbour=True) == sent_to(faster, neighbour=False)
    assert faster.estimate.seconds < slower.estimate.seconds
    assert 'mesh = mesh["data"]' in dataclasses.replace(tuned, winner=tuned.tried[-1]).code()


@pytest.mark.parametrize(
    ("meshes", "said"),
    [
        (("data", "data"), "expected each dimension once; name them differently"),
        ("replicate", r"meshes='replicate': expected names of dimensions such as \(\"replicate\", \"shard\"\)"),
        ([{"replicate": 3, "shard": 2}], r"meshes=: .* has not world_size=4 ranks"),
        (("rows", "columns"), "'rows' does not say whether its ranks see the same samples"),
        ([{"data": 2, "tp": 2}], r"the recipe does not say how its model is divided over tp"),
    ],
)
def test_bad_meshes(meshes: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulator, "ask", lambda _, function, *arguments: function(*arguments))
    with pytest.raises(FsshardError, match=said):
        fsshard.tune(RECIPE, world_size=4, backend="ddp", limit=1, meshes=meshes)
    with pytest.raises(ConfigurationError, match="meshes= and device_mesh="):
        fsshard.tune(RECIPE, world_size=4, backend="ddp", meshes=("replicate", "shard"), device_mesh=(2, 2))


@on_ranks(4)
def test_the_mesh_that_wins_is_made_where_it_is_used() -> None:
    """Wrap by the settings of a result whose winner has a mesh."""
    candidate = Candidate(backend="fsdp2", mesh={"replicate": 2, "shard": 2})
    estimate = SimpleNamespace(device="cpu")
    winner = SimpleNamespace(candidate=candidate, estimate=estimate)
    result = TuneResult(name="", world_size=4, memory=None, winner=winner, tried=(), aliases={}, failed={})
    settings = result.settings
    model = fsshard.wrap(Tower(), **settings)
    assert tuple(settings["device_mesh"].shape) == (2, 2)
    assert model.backend.name == "fsdp2"
