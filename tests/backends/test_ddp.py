"""DDP: what the backend adds.

Tests fsshard/backends/reducer_arrivals.py too.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsshard
from fsshard.errors import ConfigurationError, OptimizerError, UnsupportedByBackend
from tests.dropped import Known, run_pass
from tests.models import batch, net, take_step, with_sgd
from tests.on_ranks import on_ranks
from tests.training_runs import differences


def job_thaw(raw: bool) -> bool:
    """Return whether the ranks still agree after a layer was unfrozen."""
    module = net()
    module.first.requires_grad_(False)
    if raw:
        model = nn.parallel.DistributedDataParallel(fsshard.tensorfy(module))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    else:
        model, optimizer = with_sgd(module, backend="ddp")
    for number in range(4):
        if number == 2:
            module.first.requires_grad_(True)
        model(batch(number)).square().mean().backward()
        take_step(optimizer)
    mine = module.first.weight.detach().clone()
    theirs = mine.clone()
    torch.distributed.broadcast(theirs, 0)
    return torch.equal(mine, theirs)


def test_unfreezing_keeps_the_ranks_together(ranks: Any) -> None:
    assert ranks.run(job_thaw, 2, True) == [True, False]
    assert ranks.run(job_thaw, 2, False) == [True, True]


# ------------------------------------------------------------------------------------------ communication hooks


def count_and_halve(seen: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Half of the mean, so that who does not call it trains otherwise."""
    seen.append(bucket.buffer().numel())
    work = dist.all_reduce(bucket.buffer().div_(2 * dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


count_and_halve.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]})


def job_hooked(raw: bool) -> tuple[bool, dict[str, torch.Tensor]]:
    """Return whether the hook was called at every step, and the weights; a layer is frozen on the way."""
    seen = []
    module = net()
    if raw:
        model = nn.parallel.DistributedDataParallel(fsshard.tensorfy(module), find_unused_parameters=True)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    else:
        model, optimizer = with_sgd(module, backend="ddp")
    model.register_comm_hook(seen, count_and_halve)
    called = []
    for number in range(3):
        if number == 2:  # for which wrap builds another DDP
            module.first.requires_grad_(False)
        before = len(seen)
        model(batch(number)).square().mean().backward()
        called.append(len(seen) > before)
        take_step(optimizer)
    return all(called), {name: value.clone() for name, value in module.state_dict().items()}


def test_a_communication_hook_is_the_engines(ranks: Any) -> None:
    """Complex gradients come as pairs of reals, as in a model that was stored as such by hand."""
    for (called, mine), (_, theirs) in zip(
        ranks.run(job_hooked, 2, False), ranks.run(job_hooked, 2, True), strict=True
    ):
        assert called
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            # SGD is shown complex numbers here, and pairs of reals there: another kernel, which may round otherwise.
            assert torch.equal(value, theirs[name]) or (value.is_complex() and torch.allclose(value, theirs[name]))


def wrong(state: object, bucket: int) -> None:
    """No hook: torch looks at the annotations."""


wrong.__annotations__["bucket"] = int


def job_hooks_refused(backend: str, how: str) -> None:
    model = fsshard.wrap(net(), backend=backend, mixed_precision=None if how != "narrow" else NARROW)
    if how == "not callable":
        model.register_comm_hook(None, "allreduce")
    if how == "signature":
        model.register_comm_hook(None, wrong)
    model.register_comm_hook([], count_and_halve)
    if how == "twice":
        model.register_comm_hook([], count_and_halve)


NARROW = fsshard.Precision(param=torch.bfloat16, reduce=torch.bfloat16)


@pytest.mark.parametrize("backend", ["none", "fairscale", "fsdp", "fsdp2"])
def test_other_engines_have_no_communication_hook(ranks: Any, backend: str) -> None:
    for error in ranks.run_expecting_errors(job_hooks_refused, 1 if backend == "none" else 2, backend, ""):
        assert type(error) is UnsupportedByBackend
        assert "register_comm_hook(count_and_halve)" in str(error) and "backend='ddp'" in str(error)
        assert "replicated=" in str(error) and "Precision(reduce=" in str(error)


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("narrow", UnsupportedByBackend, "reduce=torch.float32"),
        ("twice", ConfigurationError, "count_and_halve is registered already"),
        ("not callable", ConfigurationError, "'allreduce'"),
        ("signature", ValueError, "bucket annotation should be dist.GradBucket"),
    ],
)
def test_hooks_that_ddp_cannot_have(ranks: Any, how: str, kind: type[Exception], text: str) -> None:
    for error in ranks.run_expecting_errors(job_hooks_refused, 2, "ddp", how):
        assert isinstance(error, kind) and text in str(error)


@on_ranks()
def test_nothing_watches_a_module_whose_wrapper_is_gone() -> None:
    """After a broken backward each gradient of it would be noted in a list that nobody reads."""
    module = net()
    model = fsshard.wrap(module, backend="ddp")
    run_pass(model, "broken")
    dist.barrier()
    known = Known(model=model, backend=model.backend)
    del model
    assert known.left() == []
    module.middle[0]._forward_hooks.clear()  # which broke the pass
    module.zero_grad()
    module(batch(0) + dist.get_rank()).sum().backward()
    gradient = module.first.weight.grad.clone()
    dist.all_reduce(gradient)
    hooks = [getattr(parameter, "_post_accumulate_grad_hooks") for parameter in module.parameters()]  # noqa: B009
    assert sum(map(len, filter(None, hooks))) == 0
    assert not torch.equal(gradient / 2, module.first.weight.grad)


# ------------------------------------------------------------------------------------------ steps of each rank alone


def real() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def job_steps_in_backward(backend: str, ours: bool, after: bool) -> dict[str, torch.Tensor]:
    """Each parameter is stepped in a hook as soon as its gradient is there; or all of them after the backward."""
    module = real()
    model = fsshard.wrap(module, backend=backend)
    if ours:
        optimizers = [fsshard.build_optimizer(model, torch.optim.SGD, [n], lr=0.1) for n in model.state_dict()]
    else:
        optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]

    def hook_of(optimizer: Any) -> Any:
        def hook(_: nn.Parameter) -> None:
            take_step(optimizer)

        return hook

    hooks = [hook_of(optimizer) for optimizer in optimizers]
    if not after:
        for parameter, hook in zip(model.parameters(), hooks, strict=True):
            parameter.register_post_accumulate_grad_hook(hook)
    for number in range(2):
        model(batch(number)).square().mean().backward()
        if after:
            for hook, parameter in zip(hooks, model.parameters(), strict=True):
                hook(parameter)
    return dict(model.state_dict())


@pytest.mark.parametrize("ours", [True, False])
def test_steps_while_a_backward_runs_are_refused(ranks: Any, ours: bool) -> None:
    """Raw DDP calls the hooks before it sends anything, and each rank steps its own gradient (pytorch issue #98419)."""
    for error in ranks.run_expecting_errors(job_steps_in_backward, 2, "ddp", ours, False):
        assert type(error) is OptimizerError and "while a backward runs" in str(error)


def test_the_other_ways_to_step_are_right(ranks: Any) -> None:
    one, other = ranks.run(job_steps_in_backward, 2, "ddp", False, True)
    two, _ = ranks.run(job_steps_in_backward, 2, "fsdp2", False, False)
    assert all(torch.equal(one[name], other[name]) and torch.equal(one[name], two[name]) for name in one)


def job_return_value(kept: bool, called: bool) -> tuple[list[str], bool]:
    """Return what a step warns of, and whether the replicas agree after two of them."""
    module = real()
    model = fsshard.wrap(module, backend="ddp")
    if called:
        model(batch(5))
    if not kept:
        model = module
        gc.collect()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            model(batch(number)).square().mean().backward()
            take_step(optimizer)
    theirs = module[0].weight.detach().clone()
    dist.broadcast(theirs, 0)
    texts = [str(warning.message) for warning in caught if "fsshard" in str(warning.message)]
    return texts, all(_everywhere(torch.equal(theirs, module[0].weight)))


def _everywhere(mine: bool) -> list[bool]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def test_a_return_value_that_is_not_kept_is_named(ranks: Any) -> None:
    for texts, same in ranks.run(job_return_value, 2, False, False):
        assert len(texts) == 1 and "model = fsshard.wrap(model, backend='ddp')" in texts[0] and not same
    assert ranks.run(job_return_value, 2, True, False) == [([], True)] * 2
    assert ranks.run(job_return_value, 2, False, True) == [([], False)] * 2  # trained on without a wrapper, on purpose


class Sparse(nn.Module):
    """Two embeddings whose gradients have one memory for their values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = (nn.Embedding(9, 8, sparse=True) for _ in range(2))
        self.last = nn.Linear(8, 3)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.last(self.one(numbers) + self.other(numbers))


def job_sparse(raw: bool) -> list[str]:
    """Gradients that are not the ranks' average."""
    local = []
    for rank in (0, 1):
        net = Sparse()
        net(torch.arange(3) + rank).square().sum().backward()
        local.append({name: p.grad.to_dense() * 0.5 for name, p in net.named_parameters() if p.grad is not None})
    model = nn.parallel.DistributedDataParallel(Sparse()) if raw else fsshard.wrap(Sparse(), backend="ddp")
    found = []
    for _ in range(2):  # DDP orders its buckets anew after the first
        model.zero_grad()
        model(torch.arange(3) + dist.get_rank()).square().sum().backward()
        net = model.module if raw else model
        gradients = {name: p.grad.to_dense() for name, p in net.named_parameters() if p.grad is not None}
        found += list(differences({name: local[0][name] + local[1][name] for name in local[0]}, gradients))
    return found


def test_sparse_gradients_that_share_their_values(ranks: Any) -> None:
    """Raw DDP divides them in place, where the rest of the backward reads them (torch 2.13)."""
    for found in ranks.run(job_sparse, 2, True):
        assert any("one.weight" in text or "other.weight" in text for text in found)
    assert ranks.run(job_sparse, 2, False) == [[], []]


# ------------------------------------------------------------------------------------------ where gradients lie


def odd_sizes() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 33), nn.Tanh(), nn.Linear(33, 37), nn.Tanh(), nn.Linear(37, 3))


def job_addresses(even: bool) -> tuple[bool, bool]:
    """Return whether gradients are views of buckets, and begin at multiples of 64 bytes."""
    module = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16)) if even else odd_sizes()
    model = fsshard.wrap(module, backend="ddp")
    for number in range(2):
        model(batch(number)).sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    return model.backend.engine.gradient_as_bucket_view, all(g.data_ptr() % 64 == 0 for g in gradients)


def test_gradients_lie_in_buckets_where_they_are_aligned(ranks: Any) -> None:
    assert ranks.run(job_addresses, 2, True) == [(True, True)] * 2
    assert ranks.run(job_addresses, 2, False) == [(False, True)] * 2


@on_ranks(1)
def test_one_rank_leaves_gradients_that_are_kept_as_they_are() -> None:
    """As torch without DDP does: g1 = [p.grad ...]; zero_grad(); loss2.backward()."""
    model = fsshard.wrap(nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16)), backend="ddp")
    kept = []
    for number in range(2):
        model.zero_grad()
        model(batch(number)).square().sum().backward()
        kept += [(parameter.grad, parameter.grad.clone()) for parameter in model.module.parameters()]
    assert all(torch.equal(gradient, copy) for gradient, copy in kept)
