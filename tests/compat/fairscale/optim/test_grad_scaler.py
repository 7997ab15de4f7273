"""GradScaler and ShardedGradScaler: one answer of all ranks, on the CPU too.

The numbers in names of tests are the rows of docs/fairscale.md.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import fairscale.optim.grad_scaler as real
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard.compat.fairscale.optim.grad_scaler as ours
from fsshard.compat.errors import MisuseError
from fsshard.oss.partitioned import PartitionedOptimizer

Scaler = ours.ShardedGradScaler


class Owned(PartitionedOptimizer, torch.optim.SGD):
    """As OSS after ShardedDataParallel's reduction: gradients of this rank's own parameters only, which it steps.

    Parameter i belongs to rank ``owners[i]``; its new value is broadcast from there. ``pending`` gradients come with
    ``finish_gradients``.
    """

    def __init__(self, parameters: list[nn.Parameter], owners: list[int], group: Any = None, **defaults: Any) -> None:
        super().__init__(parameters, **defaults)
        everyone: Any = dist.group.WORLD
        self.group = everyone if group is None else group
        self._param_to_rank = dict(zip(parameters, owners, strict=True))
        self.pending: dict[nn.Parameter, Tensor] = {}
        self.steps = 0

    def give(self, gradients: list[Tensor]) -> None:
        rank = dist.get_rank(self.group)
        self.pending = {
            p: g for (p, owner), g in zip(self._param_to_rank.items(), gradients, strict=True) if owner == rank
        }

    def finish_gradients(self) -> None:
        for parameter, gradient in self.pending.items():
            parameter.grad = gradient
        self.pending = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.steps += 1
        for parameter, owner in self._param_to_rank.items():
            dist.broadcast(parameter.data, group=self.group, group_src=owner)


def owned(owners: list[int], dtype: torch.dtype = torch.float32, group: Any = None) -> Owned:
    return Owned([nn.Parameter(torch.ones(3, dtype=dtype)) for _ in owners], owners, group, lr=0.5)


def scaled(scaler: Any, value: float, like: Tensor) -> Tensor:
    """The gradient that a loss times the scale leaves."""
    return torch.full_like(like, value) * scaler.get_scale()


def start(scaler: Any) -> Any:
    scaler.scale(torch.ones(()))
    return scaler


def values(optimizer: Any) -> list[Any]:
    return [p.tolist() for group in optimizer.param_groups for p in group["params"]]


# -- one step, an overflow at one rank -------------------------------------------------------------------------------


def job_overflow(overflow_at: int | None, device_copy: bool = False) -> Any:
    scaler, optimizer = start(Scaler(init_scale=1024.0)), owned([0, 1])
    seen = []
    for step in range(3):
        gradients = [scaled(scaler, 1.0 + i, p) for i, p in enumerate(optimizer._param_to_rank)]
        if step == 1 and overflow_at is not None:
            gradients[overflow_at][0] = float("inf")
        optimizer.give(gradients)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), optimizer.steps, values(optimizer)))
        optimizer.zero_grad()
    return seen


@pytest.mark.fairscale_row(18)
@pytest.mark.parametrize("overflow_at", [0, 1])
def test_row_18_an_overflow_at_one_rank_skips_the_step_at_all(ranks: Any, overflow_at: int) -> None:
    first, second = ranks.run(job_overflow, 2, overflow_at)
    assert first == second
    assert [(scale, steps) for scale, steps, _ in first] == [(1024.0, 1), (512.0, 1), (512.0, 2)]
    assert first[0][2] == first[1][2] == [[0.5] * 3, [0.0] * 3] and first[2][2] == [[0.0] * 3, [-1.0] * 3]


def test_without_overflow_all_ranks_step(ranks: Any) -> None:
    for seen in ranks.run(job_overflow, 2, None):
        assert [(scale, steps) for scale, steps, _ in seen] == [(1024.0, 1), (1024.0, 2), (1024.0, 3)]


@contextmanager
def real_on_cpu(cuda: Any) -> Iterator[None]:
    """FairScale's CPU path, which a machine without CUDA never enters; ``cuda`` stands in for ``Tensor.cuda``."""
    with (
        mock.patch.object(real, "amp_definitely_not_available", return_value=False),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        mock.patch.object(torch.Tensor, "cuda", cuda),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def job_raw_copy() -> Any:
    with real_on_cpu(lambda self: self.clone()):  # as with a GPU, where it is another tensor
        scaler = start(real.ShardedGradScaler(init_scale=1024.0))
        optimizer = owned([0, 1])
        gradients = [scaled(scaler, 1.0, p) for p in optimizer._param_to_rank]
        gradients[1][0] = float("inf")
        optimizer.give(gradients)
        optimizer.finish_gradients()
        scaler.unscale_(optimizer)
        return sum(
            float(found) for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        )


@pytest.mark.fairscale_row(18)
def test_row_18_raw_throws_the_sum_of_the_ranks_away(ranks: Any) -> None:
    # Rank 0 will step and wait in a broadcast, rank 1 will not. A simulation: the hang needs CUDA and CPU gradients.
    assert ranks.run(job_raw_copy, 2) == [0.0, 1.0]


# -- two optimizers --------------------------------------------------------------------------------------------------


def job_two(raw: bool, infinite: tuple[bool, bool]) -> Any:
    with real_on_cpu(lambda self: self):
        scaler = start((real if raw else ours).ShardedGradScaler(init_scale=1024.0))
        optimizers = [owned([0, 1]), owned([1, 0])]
        for optimizer, bad in zip(optimizers, infinite, strict=True):
            gradients = [scaled(scaler, 1.0, p) for p in optimizer._param_to_rank]
            if bad:
                gradients[0][1] = float("nan")
            optimizer.give(gradients)
            optimizer.finish_gradients()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), [optimizer.steps for optimizer in optimizers]


@pytest.mark.fairscale_row(16)
def test_row_16_two_optimizers_that_overflow_lower_the_scale_once(ranks: Any) -> None:
    assert ranks.run(job_two, 2, False, (True, True)) == [(512.0, [0, 0])] * 2
    assert ranks.run(job_two, 2, False, (False, True)) == [(512.0, [1, 0])] * 2
    assert ranks.run(job_two, 2, False, (False, False)) == [(1024.0, [1, 1])] * 2


@pytest.mark.fairscale_row(16)
def test_row_16_raw_takes_two_overflows_for_none(ranks: Any) -> None:
    assert ranks.run(job_two, 2, True, (True, True)) == [(1024.0, [0, 0])] * 2


# -- against DDP with torch's scaler ---------------------------------------------------------------------------------


def job_against_ddp(clip: bool) -> Any:
    """Four steps of both, the second of which overflows: parameters and scales to the last bit."""
    results = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        reduced = nn.parallel.DistributedDataParallel(model)
        parameters = list(model.parameters())
        plain = torch.optim.SGD(parameters, lr=0.1)
        # Rank 1 owns nothing: "No inf checks were recorded" would be raised there.
        optimizer: Any = Owned(parameters, [0] * len(parameters), lr=0.1) if sharded else plain
        scaler: Any = Scaler(init_scale=64.0, growth_interval=2) if sharded else torch.amp.GradScaler("cpu", 64.0)
        scaler.set_growth_interval(2)
        generator = torch.Generator().manual_seed(dist.get_rank())
        scales = []
        for step in range(5):
            reduced.zero_grad()
            loss = reduced(torch.randn(3, 4, generator=generator)).square().mean()
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            if sharded:
                optimizer.give([p.grad for p in parameters])
                for parameter in parameters:
                    parameter.grad = None
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, 0.05)  # all at rank 0, so its norm is the whole one
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        results.append((scales, scaler.state_dict(), [p.detach().clone() for p in parameters]))
        del reduced
    (scales, state, plain_values), (our_scales, our_state, our_values) = results
    same = all(torch.equal(a, b) for a, b in zip(plain_values, our_values, strict=True))
    return same, scales == our_scales, state == our_state, scales


@pytest.mark.parametrize("clip", [False, True], ids=["", "unscaled and clipped"])
def test_equal_to_ddp_and_torchs_scaler(ranks: Any, clip: bool) -> None:
    for same, scales, state, seen in ranks.run(job_against_ddp, 2, clip):
        assert same and scales and state
        assert seen == [64.0, 128.0, 64.0, 64.0, 128.0]


def job_fused() -> Any:
    """A fused optimizer checks its own gradients; here only rank 1 has an infinite one."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter], lr=0.5, fused=True)
    scaler = start(Scaler(init_scale=8.0))
    parameter.grad = torch.full((3,), float("inf") if dist.get_rank() == 1 else 8.0)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), parameter.tolist()


def test_a_fused_optimizer_hears_of_the_other_ranks(ranks: Any) -> None:
    assert ranks.run(job_fused, 2) == [(4.0, [1.0] * 3)] * 2


# -- groups ----------------------------------------------------------------------------------------------------------


def job_groups(scaler_group: str, overflow_at: int) -> Any:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    group = pairs[rank // 2]
    optimizer = owned([0], group=group)
    kinds: dict[str, Any] = {"pair": lambda: Scaler(8.0, process_group=group), "plain": lambda: ours.GradScaler(8.0)}
    kinds["world"] = lambda: Scaler(8.0)
    scaler = start(kinds[scaler_group]())
    optimizer.give([torch.full((3,), float("inf") if rank == overflow_at else 8.0)])
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize(("group", "expected"), [("pair", [4.0, 4.0, 8.0]), ("world", [4.0] * 3)])
def test_the_ranks_of_the_process_group_decide(ranks: Any, group: str, expected: list[float]) -> None:
    assert ranks.run(job_groups, 3, group, 0) == expected


def test_the_plain_scaler_asks_the_ranks_that_share_an_oss(ranks: Any) -> None:
    assert ranks.run(job_groups, 3, "plain", 0) == [4.0, 4.0, 8.0]


# -- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.fairscale_row(32)
def test_row_32_raw_disables_itself_without_cuda() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = real.ShardedGradScaler()
    assert not scaler.is_enabled() and scaler.state_dict() == {}
    assert float(scaler.scale(torch.ones(()))) == 1.0


@pytest.mark.fairscale_row(32)
@pytest.mark.parametrize("kind", [ours.ShardedGradScaler, ours.GradScaler])
def test_row_32_works_without_cuda_and_without_a_warning(kind: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler = kind()
    assert scaler.is_enabled() and float(scaler.scale(torch.ones(()))) == 2.0**16
    assert isinstance(scaler, torch.cuda.amp.GradScaler)


def signature(kind: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in list(inspect.signature(kind.__init__).parameters.values())[1:]]


def test_signatures_are_fairscales() -> None:
    assert signature(ours.ShardedGradScaler) == signature(real.ShardedGradScaler)
    assert signature(ours.GradScaler) == signature(real.GradScaler)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str
)
@pytest.mark.parametrize("infinite", [False, True], ids=["finite", "infinite"])
def test_gradients_of_any_dtype(dtype: torch.dtype, infinite: bool) -> None:
    parameter = nn.Parameter(torch.ones(2, 3, dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = start(ours.GradScaler(init_scale=16.0))
    parameter.grad = torch.full((3, 2), 8.0, dtype=dtype).t()  # not contiguous
    if infinite:
        parameter.grad[1, 1] = float("inf")
    scaler.step(optimizer)
    assert torch.equal(parameter, torch.full_like(parameter, 1.0 if infinite else 0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_sparse_gradients(dtype: torch.dtype) -> None:
    table = nn.Embedding(4, 2, sparse=True, dtype=dtype)
    nn.init.ones_(table.weight)  # two halves are taken from it, or one whole: exact only where nothing is rounded
    before = table.weight.detach().clone()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    scaler = start(ours.GradScaler(init_scale=2.0**15))
    indices = torch.tensor([[1, 1, 3]])
    ones = torch.ones(3, 2, dtype=dtype)
    table.weight.grad = torch.sparse_coo_tensor(indices, ones * 2.0**14, (4, 2))
    scaler.step(optimizer)
    expected = before - torch.tensor([[0.0], [1.0], [0.0], [0.5]], dtype=dtype)
    assert torch.equal(table.weight.detach(), expected)
    scaler.update()
    table.weight.grad = torch.sparse_coo_tensor(indices, ones * 2.0**15, (4, 2))  # 2**16 is infinite in float16
    scaler.step(optimizer)
    assert torch.equal(table.weight.detach(), expected) is (dtype is torch.float16)


def test_disabled() -> None:
    scaler = Scaler(enabled=False)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    parameter.grad = torch.ones(1)
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.5 and scaler.state_dict() == {} and scaler.get_scale() == 1.0


@pytest.mark.parametrize("scale", [4.0, 4, torch.tensor(4.0), torch.tensor([4.0])], ids=repr)
def test_a_new_scale(scale: Any) -> None:
    scaler = start(Scaler())
    scaler.update(new_scale=scale)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("scale", [torch.ones(2), torch.ones(1, requires_grad=True), torch.tensor(4)], ids=repr)
def test_no_new_scale(scale: Tensor) -> None:
    scaler = start(Scaler())
    with pytest.raises(MisuseError, match=r"update\(new_scale=\): expected a number"):
        scaler.update(new_scale=scale)
    assert scaler.get_scale() == 2.0**16


# -- with OSS and ShardedDataParallel --------------------------------------------------------------------------------


def job_sharded(sharded: bool, complex_weights: bool) -> Any:
    """Five steps with clipping, the third of which overflows on rank 1 alone; two optimizers."""
    from fsshard.compat.fairscale.nn.data_parallel import ShardedDataParallel
    from fsshard.compat.fairscale.optim import OSS

    torch.manual_seed(0)
    dtype = torch.complex64 if complex_weights else torch.float32
    model = nn.Sequential(nn.Linear(4, 5, dtype=dtype), nn.Linear(5, 2, dtype=dtype))
    halves = [list(model[0].parameters()), list(model[1].parameters())]
    if sharded:
        optimizers: list[Any] = [OSS(half, torch.optim.Adam, lr=0.01) for half in halves]
        wrapped: Any = ShardedDataParallel(model, optimizers)
        scaler: Any = Scaler(init_scale=64.0, growth_interval=2)
    else:
        optimizers = [torch.optim.Adam(half, lr=0.01) for half in halves]
        wrapped = nn.parallel.DistributedDataParallel(model)
        scaler = ours.GradScaler(init_scale=64.0, growth_interval=2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    scales = []
    for step in range(5):
        loss = wrapped(torch.randn(3, 4, generator=generator).to(dtype)).abs().square().mean()
        scaler.scale(loss * (float("inf") if step == 2 and dist.get_rank() == 1 else 1.0)).backward()
        for optimizer, half in zip(optimizers, halves, strict=True):
            scaler.unscale_(optimizer)
            if sharded:
                optimizer.clip_grad_norm(0.05)
            else:
                torch.nn.utils.clip_grad_norm_(half, 0.05)
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        for optimizer in optimizers:
            optimizer.zero_grad()
    return scales, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("complex_weights", [False, True], ids=["real", "complex"])
def test_sharded_training_is_ddps(ranks: Any, complex_weights: bool) -> None:
    sharded, ddp = (ranks.run(job_sharded, 2, which, complex_weights) for which in (True, False))
    for (scales, values), (ddp_scales, ddp_values) in zip(sharded, ddp, strict=True):
        assert scales == ddp_scales == [64.0, 128.0, 64.0, 64.0, 128.0]
        assert [torch.equal(a, b) for a, b in zip(values, ddp_values, strict=True)] == [True] * 4
