"""Checks what is recorded of a training, whatever engine it runs under: the whole weights by the users' names.

Tests fsshard/parity/whole.py, comparing.py and fsshard/parity/scripts/samples.py too.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import fsshard
from fsshard.errors import ConfigurationError
from fsshard.parity import whole
from fsshard.parity.scripts.comparing import compare_scripts
from fsshard.parity.scripts.recorder import Recorder, Settings
from fsshard.parity.scripts.store import ScriptTrace
from fsshard.parity.sketch import sketch
from fsshard.torch_private.patching import replaced
from tests.models import take_step
from tests.on_ranks import on_ranks
from tests.parity.scripts import strangers
from tests.parity.scripts.strangers import STEPS, Net, job_train

Recorded = Callable[..., Path]


@pytest.fixture(scope="module")
def recorded(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Train a stranger under an engine, with one thing changed or none, once."""
    folder = tmp_path_factory.mktemp("scripts")

    def record(name: str = "ddp", fault: str = "", size: int = 2, **options: Any) -> Path:
        path = folder / "-".join([name, fault or "right", str(size), *map(str, options.values())])
        if not path.exists():
            ranks.run(job_train, size, path, name, fault, **options)
        return path

    return record


@pytest.mark.parametrize("name", ["zero", "fsdp1", "fsdp2", "fairscale", *strangers.OURS[1:]])
def test_engines_are_equal_to_the_last_bit(recorded: Recorded, name: str) -> None:
    """Optimizer states, too: whole and by the users' names, whoever has which part of them."""
    old, new = recorded("ddp", "", state=True), recorded(name, "", state=True)
    found = compare_scripts(old, new)
    assert (found.verdict, found.renamed, found.steps) == ("exact", {}, [*range(STEPS)]), str(found)
    same = f"equal weights and optimizer states to the last bit, {len([*Net().parameters()])} parameters"
    assert same in found.sentence
    trained = {name for name, one in Net().named_parameters() if one.requires_grad}
    for folder in (old, new):
        for rank in ScriptTrace.load(folder).ranks:
            state = rank.steps[2].sketches["state"]
            assert {f"{name}: {key}" for name in trained for key in ("exp_avg", "exp_avg_sq")} <= state.keys()
            assert all(one.dtype for one in state.values())


@on_ranks()
def test_raw_fsdp1_gives_states_that_share_memory() -> None:
    """So one kind of state is asked for at a time (torch 2.13)."""
    model, optimizer = strangers.engine("fsdp1", strangers.build(""), torch.optim.AdamW)
    model(strangers.samples(0, "")).square().mean().backward()
    optimizer.step()
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]["first.weight"]
    assert bool(state["exp_avg"].data_ptr() == state["exp_avg_sq"].data_ptr())


def test_flat_parameters(recorded: Recorded) -> None:
    """FSDP1 flattens what is trained and what is not into one no more."""
    found = compare_scripts(recorded("ddp", "all trained"), recorded("fsdp1-flat", "all trained"))
    assert found.verdict == "exact", str(found)


def job_by_hand() -> list[dict[str, str]]:
    """Digests of weights of replicas whose gradients are averaged by hand."""
    model = strangers.build("")
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        model(strangers.samples(step, "")).square().mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        take_step(optimizer)
        found.append({name: sketch(value).digest for name, value in model.named_parameters()})
    return found


def test_the_record_is_that_of_replicas_averaged_by_hand(ranks: Any, recorded: Recorded) -> None:
    for rank, expected in enumerate(ranks.run(job_by_hand, 2)):
        steps = ScriptTrace.load(recorded("fsdp2")).ranks[rank].steps
        assert [{n: one.digest for n, one in steps[k].weights.items()} for k in steps] == expected


def test_what_a_step_holds(recorded: Recorded) -> None:
    one = ScriptTrace.load(recorded())
    (model,), step = one.ranks[0].models, one.ranks[1].steps[2]
    assert model.engine == "DistributedDataParallel"
    assert one.ranks[1].header.world_size == 2 and one.ranks[0].header.environment["torch"] == torch.__version__
    assert len(step.losses) == len(step.samples) == 1 and step.samples[0].rows == 8
    assert step.samples[0].computed == "float32" and step.groups[0]["lr"] == 1e-2 and not step.skipped
    assert step.sketches["buffer"].keys() == {"blocks.0.scale", "blocks.1.scale"}
    assert "frozen.weight" in step.weights and "frozen.weight" not in step.gradients


def test_fewer_steps_weights_and_tensors(recorded: Recorded) -> None:
    sparse = recorded("ours-fsdp2", "", every=2, steps=range(1, 4), tensors=3)
    steps = ScriptTrace.load(sparse).ranks[0].steps
    assert {number: bool(step.weights) for number, step in steps.items()} == {1: False, 2: True, 3: True}
    assert (sparse / "tensors" / "step3" / "first.weight.safetensors").is_file()
    found = compare_scripts(recorded(), sparse)
    assert (
        found.verdict == "different"
        and "steps (0 to 3), ours-fsdp2-right-2-2-range(1, 4)-3 3 steps (1 to 3); 2 steps agree" in found.sentence
    )


# ---------------------------------------------------------------------------------------------------- planted faults


FAULTS = [
    ("rate", "fsdp2", "step 3, weight of first.weight, rank 0", "step 3: lr of group 0 0.01 -> 0.005"),
    ("sampler", "fsdp2", "step 2", "step 2: rank 0 was given other samples"),
    ("order", "fsdp2", "step 0", "step 0: the ranks were given the same samples in another order"),
    ("no average", "ddp", "step 1", "step 1: ranks 0 and 1 of ddp-no average-2 hold different weights"),
    ("bf16", "fsdp2", "step 0, weight", "step 0: models put out float32 -> bfloat16, autocast to torch.bfloat16"),
    ("dropout", "fsdp2", "step 0", "step 0: layers: Dropout(p=0.0, inplace=False) 2 -> 0, Dropout(p=0.1"),
    ("zero_grad", "fairscale", "step 1", "fairscale-zero_grad-2 runs under FairScale's ShardedDataParallel"),
]
"""Fault, engine, where weights part, and the cause; planted.py has more of them, on one process."""


@pytest.mark.parametrize(("fault", "engine", "place", "cause"), FAULTS)
def test_a_fault_on_two_ranks(recorded: Recorded, fault: str, engine: str, place: str, cause: str) -> None:
    found = compare_scripts(recorded(), recorded(engine, fault))
    assert found.verdict == "different" and f"part at {place}" in found.sentence, str(found)
    first = found.causes[-1 if fault == "zero_grad" else 0]
    assert first.startswith(cause), str(found)


def test_a_layer_of_another_name(recorded: Recorded) -> None:
    found = compare_scripts(recorded(), recorded("fsdp2", "renamed"))
    assert found.verdict == "exact"
    assert found.renamed == {"last.weight": "head.weight", "last.bias": "head.bias"}
    assert "renamed: last.weight is head.weight now" in str(found)


def test_two_ranks_beside_four(ranks: Any, recorded: Recorded, tmp_path: Path) -> None:
    """Other orders of sums: different, and within the bound that repeated runs of the old script measure."""
    four = recorded("fsdp2", "", size=4)
    found = compare_scripts(recorded(), four)
    assert found.verdict == "different" and "ddp-right-2 and fsdp2-right-4 on 2 and 4 ranks" in found.sentence
    assert not found.causes and "fsshard trace --repeat 8" in found.hint, str(found)
    ranks.run(job_repeats, 2, tmp_path)
    repeats = [tmp_path / str(draw) for draw in range(1, 5)]
    found = compare_scripts(recorded(), four, repeats=repeats)
    assert found.verdict == "bound", str(found)
    assert compare_scripts(recorded(), recorded("fsdp2", "rate"), repeats=repeats).verdict == "different"
    with pytest.raises(ConfigurationError, match=r"at least 4 repeats of the old script, got 1.*--repeat 8"):
        compare_scripts(recorded(), four, repeats=repeats[:1])


def job_repeats(folder: Path) -> None:
    for draw in range(1, 5):
        one = Recorder(folder / str(draw), Settings(draw=draw))
        one.start()
        strangers.train()
        one.stop()


# ------------------------------------------------------------------------------------------------- unusual trainings


def train_gan(folder: Path, steps: int = 2) -> None:
    """Two models and optimizers, of which each has steps of its own; a third that steps with the second."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in (generator.parameters(), critic[0].parameters())]
    extra = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    with fsshard.trace(folder):
        for _ in range(steps):
            critic(generator(torch.ones(2, 3))).mean().backward()
            optimizers[0].step()
            for _ in range(2):
                critic(generator(torch.ones(2, 3)).detach()).mean().backward()
            optimizers[1].step()
            extra.step()


@on_ranks(1)
def test_several_models_optimizers_and_accumulation(tmp_path: Path) -> None:
    train_gan(tmp_path / "gan")
    (rank,) = ScriptTrace.load(tmp_path / "gan").ranks
    assert [model.engine for model in rank.models] == ["Linear", "Sequential", "OnlyInOptimizer"]
    assert [len(step.losses) for step in rank.steps.values()] == [1, 2, 1, 2]
    assert [[group["lr"] for group in step.groups] for step in rank.steps.values()] == [[0.1], [0.1, 0.5]] * 2
    assert [*rank.steps[0].weights] == ["weight", "bias", "model1.0.weight", "model1.0.bias"]
    digests = [step.weights["model1.0.bias"].digest for step in rank.steps.values()]
    assert digests[0] != digests[1] == digests[2] != digests[3]


@on_ranks(1)
def test_a_step_that_the_scaler_leaves_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, scaler = nn.Linear(2, 2), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fsshard.trace(tmp_path / "scaled"):
        for step in range(3):
            loss = model(torch.ones(1, 2)).sum() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    (rank,) = ScriptTrace.load(tmp_path / "scaled").ranks
    assert [step.skipped for step in rank.steps.values()] == [False, True, False]
    digests = [step.weights["weight"].digest for step in rank.steps.values()]
    assert digests[0] == digests[1] != digests[2]


@on_ranks(1)
def test_a_compiled_step_is_recorded_and_no_part_of_its_graph(tmp_path: Path) -> None:
    for name in ("plain", "compiled"):
        torch.manual_seed(0)
        model = torch.compile(nn.Sequential(nn.Linear(3, 2)), backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = torch.compile(optimizer.step, backend="eager") if name == "compiled" else optimizer.step
        with fsshard.trace(tmp_path / name):
            for number in range(3):
                model(torch.full((2, 3), float(number))).sum().backward()
                step()
    found = ScriptTrace.load(tmp_path / "compiled")
    assert (found.steps, found.ended, found.ranks[0].models[0].engine) == ([0, 1, 2], [], "Sequential")
    assert [len(step.samples) for step in found.ranks[0].steps.values()] == [1, 1, 1]
    assert compare_scripts(tmp_path / "plain", tmp_path / "compiled").verdict == "exact"


@on_ranks(1)
def test_a_step_that_raises_hides_no_later_one(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        raise FloatingPointError

    with fsshard.trace(tmp_path / "trace"):
        for number in range(3):
            model(torch.ones(4, 3)).sum().backward()
            with contextlib.suppress(FloatingPointError):
                optimizer.step(closure if number == 1 else None)
    steps = ScriptTrace.load(tmp_path / "trace").ranks[0].steps
    assert [(number, len(step.losses)) for number, step in steps.items()] == [(0, 1), (1, 2)]


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(1)
def test_recomputation_and_closures(tmp_path: Path, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.inner, x, use_reentrant=reentrant))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3, requires_grad=True)).sum()
        loss.backward()
        return loss

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fsshard.trace(tmp_path / "recomputed"):
        for _ in range(2):
            optimizer.step(closure)
    (rank,) = ScriptTrace.load(tmp_path / "recomputed").ranks
    assert [model.engine for model in rank.models] == ["Model"] and len(rank.steps) == 2
    assert [(len(step.losses), len(step.samples)) for step in rank.steps.values()] == [(1, 1)] * 2
    assert rank.models[0].weights["last.weight"].digest != rank.steps[0].weights["last.weight"].digest


class Unusual(nn.Linear):
    """Takes what is not dense, or no tensor."""

    def forward(self, x: Any, *others: Any) -> torch.Tensor:
        if x.is_nested:
            return super().forward(x).values()
        return torch.sparse.mm(x, self.weight.T) if x.is_sparse else super().forward(x)


UNUSUAL = ["sparse gradient", "sparse", "nested", "conjugate", "complex loss", "texts", "float8", "traced"]


@pytest.mark.parametrize("kind", UNUSUAL)
@on_ranks(1)
def test_tensors_that_are_unusual(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    dtype = torch.complex64 if kind in ("conjugate", "complex loss") else torch.float32
    model = Unusual(3, 2, dtype=dtype)
    given = [torch.ones(4, 3, dtype=dtype)]
    if kind == "sparse gradient":
        model, given = nn.Embedding(5, 3, sparse=True), [torch.tensor([1, 2, 1])]
    elif kind == "sparse":
        given = [torch.eye(3).to_sparse()]
    elif kind == "nested":
        given = [torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)]
    elif kind == "conjugate":
        given = [given[0].conj()]
    elif kind == "texts":
        given.append(numpy.array(["a"]))
    elif kind == "float8":
        model.quantized = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    with fsshard.trace(tmp_path / "trace"):
        if kind == "traced":
            torch.jit.trace(model, given[0])
        loss = model(*given).sum()
        loss.backward(torch.ones_like(loss))
        optimizer.step()
    found = ScriptTrace.load(tmp_path / "trace")
    (step,) = found.ranks[0].steps.values()
    assert not found.ended and len(step.samples) == len(step.losses) == 1 and step.gradients
    assert step.weights.keys() == found.initial.keys()
    assert compare_scripts(tmp_path / "trace", tmp_path / "trace").ok


@on_ranks(1)
def test_what_cannot_be_recorded_ends_the_record_and_not_the_training(tmp_path: Path) -> None:
    """Train what cannot be recorded behind something else."""
    with fsshard.trace(tmp_path / "trace"):
        for device in ("cpu", "meta"):
            model = nn.Linear(3, 2, device=device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(4, 3, device=device)).sum().backward()
            optimizer.step()
    assert model.weight.grad is not None
    found = ScriptTrace.load(tmp_path / "trace")
    assert found.steps == [0] and found.ended == ["NotImplementedError: Cannot copy out of meta tensor; no data!"]


def job_batch_norm(folder: Path, broadcast: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=broadcast)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fsshard.trace(folder):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
        for _ in range(2):
            model(x)[:, 0].square().sum().backward()
            optimizer.step()


def test_buffers_of_replicas_that_differ(ranks: Any, tmp_path: Path) -> None:
    """Those of rank 0 are the same whether or not they are broadcast before a forward."""
    for broadcast in (True, False):
        ranks.run(job_batch_norm, 2, tmp_path / str(broadcast), broadcast)
    means = [record.buffers["1.running_mean"] for record in ScriptTrace.load(tmp_path / "True").at(0)]
    assert means[0].digest != means[1].digest and means[0].shape == means[1].shape == (4,)
    found = compare_scripts(tmp_path / "True", tmp_path / "False")
    assert "part at step 1, buffer of 1.running_" in found.sentence and "rank 1" in found.sentence
    assert found.causes[0].startswith("step 1: buffers of rank 1 alone differ (broadcast_buffers=False in one")


class Gathered(contextlib.AbstractContextManager[None]):
    """Stands for ``deepspeed.zero.GatheredParameters``, of parameters that are empty outside."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = [one for one in parameters if hasattr(one, "whole")]

    def __enter__(self) -> None:
        for one in self.parameters:
            one.data = one.whole

    def __exit__(self, *error: object) -> None:
        for one in self.parameters:
            one.data = torch.empty(0)


class DeepSpeedEngine(nn.Module):
    """Stands for DeepSpeed's: its optimizer has copies, which the parameters get when it has stepped (ZeRO-3)."""

    def __init__(self, module: nn.Module, accumulate: int) -> None:
        super().__init__()
        self.module, self.accumulate, self.calls = module, accumulate, 0
        self.copies = [nn.Parameter(one.detach().clone()) for one in module.parameters()]
        self.optimizer = torch.optim.SGD(self.copies, lr=0.1)
        for one in module.parameters():
            one.whole, one.data = one.detach().clone(), torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with Gathered([*self.parameters()]):
            return x @ self.module.weight.detach().T + self.module.bias.detach()

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.calls + 1) % self.accumulate == 0

    def step(self) -> str:
        due, self.calls = self.is_gradient_accumulation_boundary(), self.calls + 1
        if due and self.calls != 4:  # an overflow
            for copy in self.copies:
                copy.grad = torch.ones_like(copy)
            self.optimizer.step()
            for one, copy in zip(self.module.parameters(), self.copies, strict=True):
                one.whole = copy.detach().clone()
            self.optimizer.param_groups[0]["lr"] /= 2  # its scheduler
        return "of DeepSpeed"


@on_ranks(1)
def test_deepspeed_is_recorded_when_it_has_gathered(tmp_path: Path) -> None:
    """One record per step of its engine, also of one that is left out, with the rate that it was made with."""
    stand_in = types.SimpleNamespace(DeepSpeedEngine=DeepSpeedEngine, zero=types.SimpleNamespace())
    stand_in.zero.GatheredParameters = Gathered
    sys.modules["deepspeed"] = stand_in  # type: ignore[assignment]
    torch.manual_seed(0)
    engine = DeepSpeedEngine(nn.Linear(3, 2), 2)
    try:
        with fsshard.trace(tmp_path / "trace"):
            for _ in range(6):
                engine(torch.ones(4, 3, requires_grad=True)).sum().backward()
                assert engine.step() == "of DeepSpeed"
    finally:
        del sys.modules["deepspeed"]
    torch.manual_seed(0)
    weight = nn.Linear(3, 2).weight.detach()
    (rank,) = ScriptTrace.load(tmp_path / "trace").ranks
    assert rank.initial["weight"].digest == sketch(weight).digest and len(rank.models) == 1
    told = [(len(one.samples), one.skipped, one.groups[0]["lr"]) for one in rank.steps.values()]
    assert told == [(2, False, 0.1), (2, True, 0.05), (2, False, 0.05)]
    for step, rate in zip(rank.steps.values(), (0.1, 0.0, 0.05), strict=True):
        weight = weight - rate
        assert step.weights["weight"].digest == sketch(weight).digest


@on_ranks()
def test_no_whole_tensor_is_held_while_the_next_one_is_gathered(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    gathered = []
    held, original = 0, whole._full

    def counting(value: torch.Tensor) -> torch.Tensor:
        nonlocal held
        full = original(value)
        held += sum(one() is not None for one in gathered)
        gathered.append(weakref.ref(full))
        return full

    with fsshard.trace(folder, tensors=1, state=True), replaced(whole, "_full", counting):
        strangers.train("fsdp2")
    gathered = len(gathered)
    assert gathered > 100 and held == 0


def hooks() -> list[Any]:
    from torch.nn.modules import module
    from torch.optim import optimizer

    tables = [getattr(module, name) for name in ("_global_forward_hooks", "_global_forward_pre_hooks")]
    tables += [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
    return [[len(table) for table in tables], torch.autograd.backward.__module__, torch.amp.GradScaler.step.__module__]


@on_ranks(1)
def test_nothing_is_left_afterwards(tmp_path: Path) -> None:
    before = hooks()
    train_gan(tmp_path / "gan")
    assert hooks() == before


def test_settings_that_have_no_meaning(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").touch()
    with pytest.raises(ConfigurationError, match="holds a record already; remove it"):
        fsshard.trace(tmp_path).__enter__()
    with pytest.raises(ConfigurationError, match=r"expected every >= 1 and tensors >= 0, got 0 and 0"):
        fsshard.trace(tmp_path / "new", every=0).__enter__()
