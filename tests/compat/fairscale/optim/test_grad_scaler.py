"""GradScaler and ShardedGradScaler: one answer of all ranks, on the CPU too.

The numbers in names of tests are the rows of docs/data/fairscale-faults.md.
"""

from __future__ import annotations

import warnings
from typing import Any

import fairscale.optim.grad_scaler as real
import pytest
import torch
import torch.distributed as dist
from fairscale.optim.oss import OSS as RealOSS
from torch import Tensor, nn

import fsshard.compat.fairscale.optim.grad_scaler as ours
from fsshard.compat.fairscale.nn.data_parallel import ShardedDataParallel
from fsshard.compat.fairscale.optim import OSS
from tests.on_ranks import on_ranks
from tests.oss.trainings import clip, refusal, same, weights

Scaler = ours.ShardedGradScaler


def start(scaler: Any) -> Any:
    scaler.scale(torch.ones(()))
    return scaler


def stepping(gradient: float, make: Any = torch.optim.SGD, **options: Any) -> tuple[nn.Parameter, Any]:
    """A parameter with a gradient, and an optimizer over it."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), gradient)
    return parameter, make([parameter], lr=0.5, **options)


# -- one step, an overflow at one rank -------------------------------------------------------------------------------


@pytest.mark.fairscale_row(18)
@pytest.mark.parametrize("overflow_at", [0, 1, None])
@on_ranks()
def test_row_18_an_overflow_at_one_rank_skips_the_step_at_all(overflow_at: int | None) -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]  # one for each rank
    scaler, optimizer = start(Scaler(init_scale=1024.0)), OSS(parameters, lr=0.5)
    seen = []
    for step in range(3):
        for number, parameter in enumerate(parameters):
            if number == dist.get_rank():
                parameter.grad = torch.full((3,), (1.0 + number) * scaler.get_scale())
                parameter.grad[0] *= float("inf") if step == 1 and number == overflow_at else 1
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), [p.tolist() for p in parameters]))
        optimizer.zero_grad()
    taken = [[[0.5] * 3, [0.0] * 3], [[0.0] * 3, [-1.0] * 3], [[-0.5] * 3, [-2.0] * 3]]
    if overflow_at is None:
        assert seen == [(1024.0, each) for each in taken]
    else:
        assert seen == [(1024.0, taken[0]), (512.0, taken[0]), (512.0, taken[1])]


@pytest.mark.fairscale_row(16)
@pytest.mark.parametrize("infinite", [(True, True), (False, True), (False, False)])
@on_ranks()
def test_row_16_two_optimizers_that_overflow_lower_the_scale_once(infinite: tuple[bool, bool]) -> None:
    scaler = start(Scaler(init_scale=1024.0))
    both = [stepping(float("nan") if bad and dist.get_rank() == i else 1024.0) for i, bad in enumerate(infinite)]
    for _, optimizer in both:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (512.0 if any(infinite) else 1024.0)
    assert [p[0].item() == 1 for p, _ in both] == list(infinite)


@on_ranks()
def test_a_fused_optimizer_hears_of_the_other_ranks() -> None:
    """It checks its own gradients; here only rank 1 has an infinite one."""
    parameter, optimizer = stepping(float("inf") if dist.get_rank() == 1 else 8.0, torch.optim.Adam, fused=True)
    scaler = start(Scaler(init_scale=8.0))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0 and parameter.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("kind", "expected"), [("pair", [4.0, 4.0, 8.0]), ("world", [4.0] * 3), ("plain", [4.0, 4.0, 8.0])]
)
@on_ranks(3)
def test_the_ranks_of_the_process_group_decide(kind: str, expected: list[float]) -> None:
    """And the plain scaler asks those that share an OSS."""
    rank = dist.get_rank()
    group = [dist.new_group([0, 1]), dist.new_group([2])][rank // 2]
    _, optimizer = stepping(float("inf") if rank == 0 else 8.0, OSS, group=group)
    kinds = {"pair": lambda: Scaler(8.0, process_group=group), "plain": lambda: ours.GradScaler(8.0)}
    scaler = start(kinds.get(kind, lambda: Scaler(8.0))())
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == expected[rank]


@on_ranks()
def test_an_oss_of_fairscale_itself_is_refused() -> None:
    _, optimizer = stepping(8.0, RealOSS)
    kind, text = refusal(lambda: start(Scaler(8.0)).unscale_(optimizer))
    assert kind == "MisuseError" and "got FairScale's own" in text and "backend='fairscale'" in text


@on_ranks()
def test_an_error_on_one_rank_is_told_to_the_others() -> None:
    for scaler in (start(Scaler(8.0)), start(torch.amp.GradScaler("cpu", 8.0))):
        _, optimizer = stepping(8.0, OSS)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(type(scaler), "_unscale_grads_", lambda *_: 1 / 0)
            told = refusal(lambda scaler=scaler, optimizer=optimizer: scaler.step(optimizer))
        assert told is not None and told[0] == ("ZeroDivisionError" if dist.get_rank() else "GradientError")


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
    indices, ones = torch.tensor([[1, 1, 3]]), torch.ones(3, 2, dtype=dtype)
    table.weight.grad = torch.sparse_coo_tensor(indices, ones * 2.0**14, (4, 2))
    scaler.step(optimizer)
    expected = before - torch.tensor([[0.0], [1.0], [0.0], [0.5]], dtype=dtype)
    assert torch.equal(table.weight.detach(), expected)
    scaler.update()
    table.weight.grad = torch.sparse_coo_tensor(indices, ones * 2.0**15, (4, 2))  # 2**16 is infinite in float16
    scaler.step(optimizer)
    assert torch.equal(table.weight.detach(), expected) is (dtype is torch.float16)


def test_disabled() -> None:
    scaler, loss = Scaler(enabled=False), torch.ones(())
    parameter, optimizer = stepping(1.0)
    assert scaler.scale(loss) is loss
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert parameter[0].item() == 0.5 and scaler.state_dict() == {} and scaler.get_scale() == 1.0


def test_a_new_scale() -> None:
    for scale in (4.0, 4, torch.tensor(4.0), torch.tensor([4.0])):
        scaler = start(Scaler())
        scaler.update(new_scale=scale)
        assert scaler.get_scale() == 4.0


# -- with OSS and ShardedDataParallel --------------------------------------------------------------------------------


def trained(sharded: bool, kind: str, dtype: torch.dtype) -> tuple[list[float], list[Tensor]]:
    """Five steps, the third of which overflows on rank 1 alone; two optimizers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5, dtype=dtype), nn.Linear(5, 2, dtype=dtype))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    if kind == "ours":
        scaler = (Scaler if sharded else ours.GradScaler)(init_scale=64.0, growth_interval=2)
    if sharded:
        optimizers = [OSS(half.parameters(), torch.optim.Adam, lr=0.01) for half in model]
        wrapped = ShardedDataParallel(model, optimizers)
    else:
        optimizers = [torch.optim.Adam(half.parameters(), lr=0.01) for half in model]
        wrapped = nn.parallel.DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    scales = []
    for step in range(5):
        loss = wrapped(torch.randn(3, 4, generator=generator).to(dtype)).abs().square().mean()
        scaler.scale(loss * (float("inf") if step == 2 and dist.get_rank() == 1 else 1.0)).backward()
        for optimizer, half in zip(optimizers, model, strict=True):
            if kind != "torch's, which unscales in step":
                scaler.unscale_(optimizer)
                clip(optimizer, half, 0.05)
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        for optimizer in optimizers:
            optimizer.zero_grad()
    return scales, weights(model)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("ours", torch.float32),
        ("ours", torch.complex64),
        ("torch's", torch.float32),
        ("torch's, which unscales in step", torch.float32),
    ],
    ids=str,
)
@on_ranks()
def test_all_ranks_step_or_none_as_under_ddp(kind: str, dtype: torch.dtype) -> None:
    (scales, values), (ddp_scales, ddp_values) = (trained(sharded, kind, dtype) for sharded in (True, False))
    assert scales == ddp_scales == [64.0, 128.0, 64.0, 64.0, 128.0] and same(values, ddp_values)
