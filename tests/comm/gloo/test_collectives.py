"""Collectives of ours under FSDP2: the same numbers as with the engine's, fewer bytes, nothing left under way."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.backends.fsdp2 import FSDP2Backend
from fsshard.backends.whole import gather_grads
from fsshard.comm import unit_reduction
from fsshard.comm.gloo.collectives import Gather, _Broadcasts
from fsshard.comm.unit_reduction import Reduce
from fsshard.errors import RankFailed
from tests.models import take_step, with_sgd
from tests.on_ranks import on_ranks
from tests.training_runs import Run, check_equal, compare, differences

CPU = torch.device("cpu")
ENGINES = {"fast_collectives": False}


class Chain(nn.Module):
    """Units in a row, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return self.last(x)


def chain(**settings: Any) -> Any:
    return fsshard.wrap(Chain(), backend="fsdp2", auto_wrap_policy={nn.Linear}, merge_below=0, **settings)


def batch(rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def local_gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None}


def whole_gradients(model: Any) -> dict[str, Any]:
    return {entry.name: gradient for entry, gradient in gather_grads(model.backend)}


# ------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    "run",
    [
        Run("tfno_tucker", "fsdp2", steps=3, clip=(0.1, 2.0)),
        Run("plain", "fsdp2", steps=2, micro_batches=3),
        pytest.param(Run("t5", "fsdp2", steps=2, micro_batches=2, no_sync=False), marks=pytest.mark.long),
        Run("plain", "fsdp2", steps=2, settings={"mixed_precision": "bf16"}),
    ],
    ids=["complex", "no_sync", "accumulated", "bf16"],
)
def test_the_numbers_are_those_of_the_engines_collectives(ranks: Any, run: Run) -> None:
    theirs = Run(**{**run.__dict__, "settings": {**run.settings, **ENGINES}})
    assert ranks.run(compare, 2, [theirs, run]) == [[], []]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
@on_ranks()
def test_the_order_of_sums(world_size: int) -> None:
    """The whole gradients against the ranks' own, scaled as DDP scales them and added in the order of ranks."""
    local = []
    for rank in range(world_size):
        net = Chain()
        net(batch(rank)).square().mean().backward()
        local.append({name: parameter.grad for name, parameter in net.named_parameters()})
    model = chain()
    model(batch(dist.get_rank())).square().mean().backward()
    expected = {}
    for name in local[0]:
        total = local[0][name] * (1 / world_size)
        for other in local[1:]:
            total = total + other[name] * (1 / world_size)
        expected[name] = total
    check_equal(expected, whole_gradients(model))


class Experts(nn.Module):
    """Each rank's batch goes to another expert."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])

    def forward(self, x: Tensor) -> Any:
        return self.experts[dist.get_rank()](self.first(x))


def job_experts(backend: str, **settings: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, optimizer = with_sgd(Experts(), backend=backend, **settings)
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        take_step(optimizer)
    return model.state_dict()


def test_experts_are_no_units_of_their_own(ranks: Any) -> None:
    """The advice of the error, followed."""
    errors = ranks.run_expecting_errors(job_experts, 2, "fsdp2", auto_wrap_policy={nn.Linear}, merge_below=0)
    advice = "give wrap an auto_wrap_policy without them, and find_unused_parameters=True"
    assert any(advice in str(error) for error in errors), errors
    (mine, _), (theirs, _) = (
        ranks.run(job_experts, 2, backend, auto_wrap_policy=None, find_unused_parameters=True)
        for backend in ("fsdp2", "ddp")
    )
    check_equal(mine, theirs)


# ------------------------------------------------------------------------------------------------ what is sent


def job_sent(fast: bool) -> tuple[dict[str, int], int]:
    """Bytes handed to each collective in one step, and those of a whole copy as FSDP2 pads it."""
    model = chain(fast_collectives=fast)
    sent = {}

    def counted(name: str, inner: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = next(a for a in (*reversed(args), *kwargs.values()) if isinstance(a, Tensor))
            sent[name] = sent.get(name, 0) + tensor.nbytes
            return inner(*args, **kwargs)

        return call

    names = ["broadcast", "all_to_all_single", "all_gather_single", "reduce_scatter_single", "all_reduce"]
    with mock.patch.multiple(dist, **{name: counted(name, getattr(dist, name)) for name in names}):
        model(batch(dist.get_rank())).square().mean().backward()
    size = dist.get_world_size()
    padded = sum(-(-p.shape[0] // size) * size * p.shape[1:].numel() * 4 for _, p in model.named_parameters())
    return sent, padded


def test_gloos_own_reduce_scatter_and_all_gather_are_not_used(ranks: Any) -> None:
    for sent, padded in ranks.run(job_sent, 2, True):
        assert sent.pop("all_reduce", 0) <= 16  # of the steps that ranks have taken
        assert set(sent) == {"broadcast", "all_to_all_single"}
        assert sent["all_to_all_single"] >= padded  # the unit that is called twice is reduced twice or once
    for sent, _ in ranks.run(job_sent, 2, False):  # by the setting
        assert sent.pop("all_reduce", 0) <= 16
        assert set(sent) == {"all_gather_single", "reduce_scatter_single"}


@on_ranks()
def test_a_hook_reads_the_final_gradient() -> None:
    """A hook on a parameter, which FSDP2 calls as soon as it has reduced, reads the final gradient."""
    model = chain()
    seen = {}

    def hook(name: str) -> Any:
        return lambda parameter: seen.__setitem__(name, parameter.grad.to_local().clone())

    for name, parameter in model.named_parameters():
        if "last" in name:
            parameter.register_post_accumulate_grad_hook(hook(name))
    model(batch(dist.get_rank())).square().mean().backward()
    final = local_gradients(model)
    wrong = list(differences({name: final[name] for name in seen}, seen)) if len(seen) == 2 else ["no hook ran"]
    assert not wrong


def replica(rank: int, grad_dtypes: dict[str, torch.dtype | None]) -> dict[str, Tensor]:
    """The gradients of ``rank`` by torch alone."""
    net = Chain()
    for name, dtype in grad_dtypes.items():
        net.get_parameter(name).grad_dtype = dtype
    net(batch(rank)).square().mean().backward()
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}


def averaged(grad_dtypes: dict[str, torch.dtype | None], steps: int) -> dict[str, Tensor]:
    """Replicas averaged by hand: each unit in the widest dtype of its gradients, which then have their own again."""
    one, two = replica(0, grad_dtypes), replica(1, grad_dtypes)
    found = {}
    for name, mine in one.items():
        unit = [gradient for other, gradient in one.items() if other.split(".")[0] == name.split(".")[0]]
        wide = torch.promote_types(unit[0].dtype, unit[1].dtype)
        mean = (mine.to(wide) * 0.5 + two[name].to(wide) * 0.5).to(mine.dtype)
        found[name] = mean * steps  # exact for one step and for two
    return found


def job_grad_dtypes(cases: list[dict[str, torch.dtype | None]]) -> list[str]:
    wrong = []
    for case in cases:
        net = Chain()
        for name, dtype in case.items():
            net.get_parameter(name).grad_dtype = dtype
        model = fsshard.wrap(net, backend="fsdp2", auto_wrap_policy={nn.Linear}, merge_below=0)
        for steps in (1, 2):  # the second one is added to the first
            model(batch(dist.get_rank())).square().mean().backward()
            expected = averaged(case, steps)
            found = whole_gradients(model)
            wrong += [f"{case} {steps} {n}" for n in expected if found[n].dtype != expected[n].dtype]
            wrong += [f"{case} {steps} {n}" for n in differences(expected, found)]
    return wrong


BF16, F64 = torch.bfloat16, torch.float64
GRAD_DTYPES: list[dict[str, torch.dtype | None]] = [
    {"first.weight": BF16},
    {"first.bias": BF16, "last.weight": BF16},
    {"last.weight": BF16, "last.bias": BF16},
    {"last.bias": F64, "first.weight": F64},
    {"first.weight": BF16, "first.bias": F64},
    {"last.weight": None, "last.bias": None},
]


def test_gradients_of_other_dtypes_than_their_parameters_are_reduced_before_they_are_cast(ranks: Any) -> None:
    if FSDP2Backend.facts.keeps_grad_dtype:
        assert ranks.run(job_grad_dtypes, 2, GRAD_DTYPES) == [[], []]
    else:  # by torch 2.13's fully_shard, that is: none is lost without a word
        assert ranks.run(job_grad_dtypes, 2, GRAD_DTYPES[-1:]) == [[], []]
        with pytest.raises(RankFailed, match=r"grad_dtype=torch\.bfloat16 of the torch\.float32 parameter"):
            ranks.run(job_grad_dtypes, 2, GRAD_DTYPES[:1])


def test_a_wait_that_has_failed_fails_again() -> None:
    # FSDP2 waits for the same gather in the next forward: it must not take what never arrived for the numbers.
    work = _Broadcasts([mock.Mock(**{"wait.side_effect": RuntimeError("Timed out waiting")})], [])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Timed out waiting"):
            work.wait()


def test_what_gloo_still_holds_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []  # as a thread of gloo does that was not scheduled since

    def collective(*tensors: Tensor, **_: Any) -> mock.Mock:
        held.extend(tensors)
        return mock.Mock()

    monkeypatch.setattr(dist, "broadcast", collective)
    monkeypatch.setattr(dist, "all_to_all_single", collective)
    monkeypatch.setattr(unit_reduction, "taking_part", lambda *_: contextlib.nullcontext())
    group = mock.Mock(**{"size.return_value": 2, "rank.return_value": 0})
    gather = Gather()
    whole, given, total = gather.allocate([8], dtype=torch.float32, device=CPU), torch.ones(8), torch.empty(4)
    gather(whole, whole[:4], group).wait()
    Reduce()(total, given, group, dist.ReduceOp.AVG)
    buffers = [weakref.ref(tensor.untyped_storage()) for tensor in (whole, given)]
    assert len(held) == 4 and not any(tensor.untyped_storage().nbytes() for tensor in held)
    assert whole.numel() == given.numel() == 8  # theirs stays as it is
    del whole, given
    assert [buffer() for buffer in buffers] == [None, None]
