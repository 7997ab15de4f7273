"""Optimizers over whole matrices under every engine, judged by bare replicas whose gradients are averaged by hand."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.backends import whole as gathering
from fsshard.errors import OptimizerError, UnsupportedByBackend
from fsshard.sharded import optimizer_whole
from fsshard.sharded.optimizer_whole import _sum_of_bits, deal
from tests import optimizers
from tests.models import Spectral, batch, take_step
from tests.on_ranks import on_backends, on_ranks
from tests.optimizers import SOAP, Shampoo
from tests.sets import often
from tests.training_runs import DISTRIBUTED, check_equal, differences

DIVIDING = ("fsdp2", "fsdp")


class Shapes(nn.Module):
    """Rows that ranks cannot share evenly, a kernel, a transposed weight, a complex one, a 0-dim one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 7), Spectral(7), nn.Linear(7, 5)
        self.conv = nn.Conv2d(1, 3, 2)
        self.turned = nn.Parameter(torch.randn(5, 9).t().contiguous().t() / 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.last(torch.tanh(self.middle(self.first(x))))) @ self.turned
        return self.conv(x.view(-1, 1, 3, 3)) * self.scale


def shapes() -> nn.Module:
    torch.manual_seed(0)
    return Shapes()


def loss_of(model: Any, step: int) -> Tensor:
    return model(batch(step)).square().mean()


def grouped(named: Any, kind: str) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """The class, its groups of what ``named`` has, and its settings."""
    matrices = [p for name, p in named if name in ("first.weight", "last.weight", "turned")]
    known = set(map(id, matrices))
    others = [p for _, p in named if id(p) not in known]
    if kind == "Muon":
        return torch.optim.Muon, [{"params": matrices}], {"lr": 0.02}
    if kind == "AdamW":  # beside it
        return torch.optim.AdamW, [{"params": others}], {"lr": 0.01}
    if kind == "mixed":
        return Shampoo, [{"params": matrices}, {"params": others, "matrices": False, "lr": 0.01}], {}
    return {"Shampoo": Shampoo, "SOAP": SOAP}[kind], [{"params": [p for _, p in named]}], {}


def built(model: Any, kind: str) -> Any:
    optimizer_class, groups, settings = grouped(list(model.named_parameters()), kind)
    whole = {} if kind == "AdamW" else {"whole": True}
    optimizer = fsshard.build_optimizer(model, optimizer_class, groups, **whole, **settings)
    optimizer.beside = built(model, "AdamW") if kind == "Muon" else None
    return optimizer


steps = functools.partial(optimizers.steps, loss_of)


def replicas(kind: str, count: int) -> tuple[nn.Module, Any, list[float]]:
    bare = shapes()
    optimizer_class, groups, settings = grouped(list(bare.named_parameters()), kind)
    optimizer = optimizer_class(groups, **settings)
    if kind == "Muon":
        optimizer_class, groups, settings = grouped(list(bare.named_parameters()), "AdamW")
        optimizer.beside = optimizer_class(groups, **settings)
    return bare, optimizer, steps(bare, optimizer, range(count), bare=True)


def state_of(bare: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {name: dict(optimizer.state[p]) for name, p in bare.named_parameters() if optimizer.state.get(p)}


def job_exact(kind: str, *backends: str) -> dict[str, list[str]]:
    bare, native, losses = replicas(kind, 3)
    wrong = {}
    for backend in backends:
        model = fsshard.wrap(shapes(), backend=backend)
        optimizer = built(model, kind)
        found = steps(model, optimizer, range(3))
        wrong[backend] = list(differences(losses, found))
        wrong[backend] += differences(dict(bare.state_dict()), dict(model.state_dict()))
        state = optimizer.state_dict()["state"]
        mine = state_of(bare, native)
        for name in mine:
            wrong[backend] += differences(mine[name], state.get(name), name)
    return wrong


@pytest.mark.parametrize("kind", often(["Muon", "Shampoo", "SOAP", "mixed"], "Shampoo", "SOAP", "mixed"))
def test_two_ranks_train_as_bare_replicas(ranks: Any, kind: str) -> None:
    """Losses, weights and whole state to the last bit; one rank too."""
    assert ranks.run(job_exact, 2, kind, *DISTRIBUTED) == [{backend: [] for backend in DISTRIBUTED}] * 2
    assert ranks.run(job_exact, 1, kind, "none", *DIVIDING) == [{"none": [], "fsdp2": [], "fsdp": []}]


@pytest.mark.parametrize("backend", often(DIVIDING, "fsdp2"))
@on_ranks(4)
def test_four_ranks_take_each_step_from_equal_states(backend: str) -> None:
    """Some own nothing of a weight's rows. Sums of gradients of four ranks have another order than by hand.

    Each step from the replicas' state, which is loaded.
    """
    wrong, bare = list[str](), shapes()
    native = Shampoo(bare.parameters())
    model = fsshard.wrap(shapes(), backend=backend)
    optimizer = built(model, "Shampoo")
    names = {parameter: name for name, parameter in bare.named_parameters()}
    for number in range(2):
        model.load_state_dict(bare.state_dict())
        state = {names[p]: copy.deepcopy(value) for p, value in native.state.items()}
        groups = [{**native.param_groups[0], "params": list(names.values())}]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        losses = steps(bare, native, range(number, number + 1), bare=True)
        wrong += differences(losses, steps(model, optimizer, range(number, number + 1)))
        for name, whole in model.state_dict().items():
            far = (whole - bare.state_dict()[name]).abs().max() / whole.abs().max()
            wrong += [f"{number} {name}: {far:.1e}"] if far > 1e-4 else []
    assert not wrong


# ------------------------------------------------------------------------------------------------ state


def build(backend: str, kind: str) -> tuple[Any, Any]:
    model = fsshard.wrap(shapes(), backend=backend)
    return model, built(model, kind)


def job_save(folder: str, *what: str) -> Any:
    model, optimizer = build(*what)
    steps(model, optimizer, range(2))
    fsshard.save(folder, model, optimizer)
    return optimizers.saved_state(model, optimizer)


def job_load(folder: str, saved: Any, *what: str) -> list[str]:
    train = functools.partial(steps, numbers=range(2, 3))
    return optimizers.load_each_way(functools.partial(build, *what), train, folder, saved)[0]


@pytest.mark.covering
@pytest.mark.parametrize(
    ("here", "there"),
    often(
        itertools.product(("fsdp2", "fsdp"), (("fsdp", 2), ("fsdp2", 4), ("ddp", 2), ("fairscale", 2), ("none", 1))),
        *(("fsdp", ("fsdp2", 4)), ("fsdp2", ("fairscale", 2)), ("fsdp", ("none", 1))),
    ),
    ids=str,
)
def test_the_state_goes_to_other_engines_and_numbers_of_ranks(ranks: Any, tmp_path: Any, here: str, there: Any) -> None:
    backend, size = there
    saved = ranks.run(job_save, 2, str(tmp_path / "a"), here, "mixed")[0]
    assert saved[1]["state"]["middle.weight"]["momentum"].is_complex()
    assert ranks.run(job_load, size, str(tmp_path / "a"), saved, backend, "mixed") == [[]] * size
    saved = ranks.run(job_save, size, str(tmp_path / "b"), backend, "mixed")[0]
    assert ranks.run(job_load, 2, str(tmp_path / "b"), saved, here, "mixed") == [[]] * 2


@pytest.mark.parametrize(
    ("here", "there"),
    often(
        [("ddp", "fsdp2"), ("fsdp2", "fsdp"), ("fsdp", "fairscale"), ("fairscale", "ddp")],
        *(("fsdp2", "fsdp"), ("fairscale", "ddp")),
    ),
)
@on_ranks()
def test_bases_that_lie_column_by_column_go_on_as_they_were(tmp_path: Any, here: str, there: str) -> None:
    """Eigenvectors do, and products with them are rounded so. gloo sends them as they lie, to who expects rows.

    Stop after two steps, and go on with what was saved, or with dicts of which each tensor was sent by itself.
    """
    folder = str(tmp_path / "a")
    model = fsshard.wrap(shapes(), backend=here)
    optimizer = built(model, "SOAP")
    steps(model, optimizer, range(2))
    fsshard.save(folder, model, optimizer)
    with mock.patch.object(gathering, "BATCH_BYTES", 1):
        kept = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    want, wrong = [steps(model, optimizer, range(2, 5)), dict(model.state_dict())], list[str]()
    for way in ("file", "dict"):
        model = fsshard.wrap(shapes(), backend=there)
        optimizer = built(model, "SOAP")
        if way == "file":
            fsshard.load(folder, model, optimizer)
        else:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        wrong += differences(want, [steps(model, optimizer, range(2, 5)), dict(model.state_dict())], way)
    assert not wrong


# ------------------------------------------------------------------------------------------------ what is sent


@on_backends(DIVIDING)
def test_two_collectives_and_twice_the_bytes(backend: str) -> None:
    """Both ranks together send 2 (W - 1) / W of each; weights travel only when somebody wrote them.

    Collectives of steps, and what this rank sends to others in one, against the bytes of the weights.
    """
    calls = []
    real = dist.all_to_all_single

    def counted(into: Tensor, out: Tensor, received: list[int], sent: list[int], **settings: Any) -> Any:
        mine = settings["group"].rank()
        calls.append((sum(sent) - sent[mine]) * out.element_size())
        return real(into, out, received, sent, **settings)

    torch.manual_seed(0)
    model = fsshard.wrap(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))), backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.Muon, whole=True, lr=0.01)
    patched = pytest.MonkeyPatch()
    counts, total = [], torch.zeros(())
    with patched.context() as patch:
        for number in range(4):
            if number == 3:  # behind the back of version counters, as averages of weights are put in place
                for parameter in model.module.parameters():
                    getattr(parameter, "_local_tensor", parameter).data.mul_(0.5)
            model(batch(number, 64)).square().mean().backward()
            with patch.context() as within:
                within.setattr(dist, "all_to_all_single", counted)
                calls.clear()
                optimizer.step()
            counts.append(len(calls))
            total = torch.tensor(float(sum(calls))) if number == 1 else total
            optimizer.zero_grad()
    dist.all_reduce(total)
    weights = 8 * 64 * 64 * 4
    held = model.memory_report().ranks[0].by_kind["optimizer state"] / weights
    told = {"collectives": counts, "bytes": total.item() / weights, "held": held}
    assert told["collectives"] == [2, 2, 2, 3]
    assert 1 <= told["bytes"] <= 1.05
    assert told["held"] == 1  # a copy and a momentum of half of them


@on_backends(DIVIDING)
def test_a_bucket_is_packed_while_another_is_on_its_way(backend: str) -> None:
    """Never more than two at a time, whose memory is what a step may take.

    A training with a parameter or two in each bucket, and when exchanges of its last step begin (b) and end (e).
    """
    heard = []
    real = dist.all_to_all_single

    class Heard:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            heard.append("e")
            self.work.wait()

    def begun(*args: Any, **settings: Any) -> Any:
        if not settings.get("async_op"):  # the engine's, in the backward
            return real(*args, **settings)
        heard.append("b")
        return Heard(real(*args, **settings))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_whole, "BUCKET_BYTES", 128)
        bare, _, losses = replicas("Shampoo", 3)
        model = fsshard.wrap(shapes(), backend=backend)
        optimizer = built(model, "Shampoo")
        found = steps(model, optimizer, range(2))
        patch.setattr(dist, "all_to_all_single", begun)
        found += steps(model, optimizer, range(2, 3))
        wrong = [*differences(losses, found), *differences(dict(bare.state_dict()), dict(model.state_dict()))]
    heard = "".join(heard)
    assert not wrong
    one_way = "b" + "be" * 6 + "e"
    assert heard == 2 * one_way


@on_backends(DIVIDING)
def test_other_signs_are_another_weight(backend: str) -> None:
    """Weights get other signs between two steps, which version counters do not tell."""
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)).double()
    model = fsshard.wrap(copy.deepcopy(bare), backend=backend)
    optimizers = [torch.optim.Muon(bare.parameters(), lr=0.01)]
    optimizers += [fsshard.build_optimizer(model, torch.optim.Muon, whole=True, lr=0.01)]  # type: ignore[list-item]
    for each, optimizer in zip((bare, model), optimizers, strict=True):
        for _ in range(2):
            each.zero_grad()
            each(torch.ones(4, 16, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            for parameter in getattr(each, "module", each).parameters():
                getattr(parameter, "_local_tensor", parameter).data.neg_()
    check_equal(dict(bare.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_other_signs_and_another_order_are_another_sum(dtype: torch.dtype) -> None:
    for shard in (torch.tensor([1.0, 1.0, -1.0]), torch.randn(100), torch.arange(70000.0) + 1):
        shard = shard.to(dtype)
        others = (-shard, shard.flip(0), torch.cat([shard[:1], -shard[1:]]), torch.cat([-shard[:2], shard[2:]]))
        assert len({int(_sum_of_bits(each)) for each in (shard, *others)}) == 5


def test_work_is_shared_evenly() -> None:
    owner = deal(
        {name: torch.Size(shape) for name, shape in {"a": (4, 4), "b": (8, 8), "c": (4, 4), "d": (9,)}.items()}, 2
    )
    assert owner == {"b": 0, "a": 1, "c": 1, "d": 1}


# ------------------------------------------------------------------------------------------------ refusals


class Breaking(Shampoo):
    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        if dist.get_rank() == 1:
            raise ValueError("no root")
        return super().direction(group, parameter)


def job_breaks(backend: str) -> None:
    model = fsshard.wrap(shapes(), backend=backend)
    steps(model, fsshard.build_optimizer(model, Breaking, whole=True), range(1))


@pytest.mark.parametrize("backend", DIVIDING)
def test_a_step_that_raises_on_one_rank_raises_on_all(ranks: Any, backend: str) -> None:
    first, second = ranks.run_expecting_errors(job_breaks, 2, backend)
    assert isinstance(first, OptimizerError) and "raised on rank 1" in str(first)
    assert isinstance(second, ValueError)


@on_ranks()
def test_what_owners_cannot_do() -> None:
    """An algorithm over all parameters, a closure that may be called twice, and other parameters."""
    model = fsshard.wrap(shapes(), backend="fsdp2")
    with pytest.raises(UnsupportedByBackend):
        fsshard.build_optimizer(model, torch.optim.LBFGS, whole=True)
    with pytest.raises(UnsupportedByBackend, match=r"call forward and backward before step\(\), or use backend="):
        built(model, "mixed").step(lambda: loss_of(model, 0))
    with pytest.raises(UnsupportedByBackend):
        built(model, "Muon").add_param_group({"params": ["scale"]})


@on_backends(DISTRIBUTED)
def test_torchs_own_take_a_closure(backend: str) -> None:
    bare, _, _ = replicas("Muon", 2)
    model = fsshard.wrap(shapes(), backend=backend)
    optimizer = built(model, "Muon")
    for number in range(2):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            return loss

        optimizer.step(closure)
        take_step(optimizer.beside)
    check_equal(dict(bare.state_dict()), dict(model.state_dict()))
