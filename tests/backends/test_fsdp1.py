"""FSDP1: what the backend shields from, shown in raw torch where that is safe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsshard
from fsshard.errors import ModelError
from fsshard.torch_private.fsdp1 import let_go
from tests.models import net, take_step, with_sgd
from tests.on_ranks import on_backends, on_ranks
from tests.training_runs import DISTRIBUTED, check_equal


def job_raw(tensorfied: bool) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = fsshard.tensorfy(net()) if tensorfied else net()
    try:
        FullyShardedDataParallel(module, use_orig_params=True, device_id=None if tensorfied else torch.device("cpu"))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def test_raw_fsdp1_refuses_complex_weights_and_the_cpu(ranks: Any) -> None:
    assert "uniform dtype" in ranks.run(job_raw, 2, False)[0]
    assert "needs a non-CPU accelerator" in ranks.run(job_raw, 2, True)[0]


def job_shards(raw: bool) -> list[tuple[int, int]]:
    """(start, stop) of each complex parameter's part on this rank, in reals."""
    module = nn.Sequential(nn.Linear(3, 3), ComplexOdd())
    if raw:
        from torch.distributed.fsdp import FullyShardedDataParallel

        unit = FullyShardedDataParallel(fsshard.tensorfy(module), use_orig_params=True, device_id=torch.device("cpu"))
        infos = unit._handle.flat_param._shard_param_infos
        return [(i.intra_param_start_idx, i.intra_param_end_idx + 1) for i in infos if i.in_shard]
    backend = fsshard.wrap(module, backend="fsdp", auto_wrap_policy=None).backend
    return [entry.here for entry in backend.entries.values() if entry.kind.is_complex]


class ComplexOdd(nn.Module):
    """Reals and complex numbers in such amounts that an even cut of the flat parameter falls inside a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 3, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight[:3]).real + self.bias


def test_no_shard_cuts_a_complex_number(ranks: Any) -> None:
    assert any(start % 2 or stop % 2 for part in ranks.run(job_shards, 2, True) for start, stop in part)
    for world_size in (2, 3, 4):
        for part in ranks.run(job_shards, world_size, False):
            assert all(start % 2 == 0 and stop % 2 == 0 for start, stop in part)


class Frozen(nn.Module):
    """A unit with a frozen and a trainable weight; notes whether the frozen one took part in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.free = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(x)
        self.seen.append(y.requires_grad)
        return self.free(y)


def job_frozen(raw: bool) -> tuple[list[bool], list[bool]]:
    model = Frozen()
    if raw:
        from torch.distributed.fsdp import FullyShardedDataParallel

        cpu = torch.device("cpu")
        FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu)(torch.ones(2, 4)).sum().backward()
        return model.seen, []
    wrapped = fsshard.wrap(model, backend="fsdp")
    optimizer = fsshard.build_optimizer(wrapped, torch.optim.Adam, lr=0.1)
    before = wrapped.state_dict()
    for _ in range(2):
        wrapped(torch.ones(2, 4)).sum().backward()
        take_step(optimizer)
    after = wrapped.state_dict()
    return model.seen, [torch.equal(before[name], after[name]) for name in before]


@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_weights_take_no_gradient(ranks: Any, world_size: int) -> None:
    """Raw FSDP1 runs the backward through them and drops the result; other kernels are then chosen than natively."""
    if world_size == 2:
        assert ranks.run(job_frozen, 2, raw=True)[0][0] == [True]
    for seen, same in ranks.run(job_frozen, world_size, raw=False):
        assert seen == [False, False]
        assert same == [True, True, False, False]


class Wide(nn.Module):
    """A large frozen weight and a small one that is trained, in one unit and in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Frozen(), nn.Linear(4, 4)
        self.block.free = nn.Linear(4, 1)
        self.large = nn.Linear(4, 512).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * self.large(self.head(x)).mean(1, keepdim=True)


@on_ranks()
def test_frozen_weights_have_no_gradient_that_is_held_or_sent() -> None:
    """Raw FSDP1 holds one for the whole of a unit's flat parameter.

    Bytes of gradients after a backward: of trainable parameters, and of the frozen, unfrozen and frozen again.
    """
    model, optimizer = with_sgd(Wide(), backend="fsdp", auto_wrap_policy={Frozen})
    held = []
    for large in (False, True, False):
        model.module.large.requires_grad_(large)
        model(torch.ones(2, 4)).sum().backward()
        held.append(sum(t.untyped_storage().nbytes() for t in model.backend.held_by_engine()["gradients"]))
        take_step(optimizer)
    assert held[0] == held[2]
    frozen = held[0]
    unfrozen = held[1]
    assert frozen <= 2 * 4 * (5 + 20 + 8) and unfrozen > frozen + 4 * 512


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_what_is_frozen_is_unfrozen_by_its_module(world_size: int) -> None:
    """Raw FSDP1 on one rank leaves views in modules after a backward: ``requires_grad_()`` does not find the weights.

    Between micro-batches of no_sync() it raises for sizes on two ranks, and on one loses a gradient.

    Show that frozen weights stay parameters of their module, and are unfrozen with it, between steps alone.
    """
    model, x = fsshard.wrap(Wide(), backend="fsdp", auto_wrap_policy={Frozen}), torch.ones(2, 4, requires_grad=True)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    names, found = {name for name, _ in model.module.named_parameters()}, list[Any]()
    for unfrozen in (False, True):
        if unfrozen:
            model.module.requires_grad_()
        model(x).sum().backward()
        optimizer.step()
        found += [names - {name for name, _ in model.module.named_parameters()}, model.module.large.weight.grad is None]
        optimizer.zero_grad()
    with model.no_sync():
        model(x).sum().backward()
    model.module.large.bias.requires_grad_(False)
    with pytest.raises(ModelError, match="between two steps, or use backend='fsdp2'"):
        model(x)
    assert found == [set(), True, set(), False]


class OfDict(Frozen):
    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch["x"])


@on_ranks()
def test_a_frozen_model_has_the_gradient_of_an_input_within_a_dict() -> None:
    """Raw FSDP1: "A leaf node was passed to _will_engine_execute_node"."""
    model, x = fsshard.wrap(OfDict().requires_grad_(False), backend="fsdp"), torch.ones(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(model({"x": x}).sum(), x)
    assert float(gradient.isfinite().all()) == 1.0


def test_finalizers_run_in_any_order() -> None:
    let_go(nn.Parameter(torch.zeros(1)))  # as another finalizer leaves a flat parameter: without attributes


@on_ranks()
def test_a_cpu_has_no_number() -> None:
    """torch 2.13: FSDP raises a bare ValueError for "cpu:0"."""
    model = fsshard.wrap(torch.nn.Linear(4, 4), backend="fsdp", device="cpu:0")  # as accelerate names it
    model(torch.ones(1, 4)).sum().backward()
    assert str(model.backend.settings.device) == "cpu"


class Blocks(nn.Module):
    """Two units with parameters and buffers of their own, and a part within each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale  # type: ignore[no-any-return]


def _by_children(module: nn.Module, prefix: str = "") -> list[str]:
    """Names of parameters, as transformers collects those that are to decay."""
    own = [prefix + name for name in (*module._parameters, *module._buffers)]
    return own + [name for key, child in module.named_children() for name in _by_children(child, f"{prefix}{key}.")]


def _names(model: nn.Module) -> list[list[str]]:
    return [
        [name for name, _ in model.named_modules()],
        [name for name, _ in model.named_parameters()],
        [name for name, _ in model.named_buffers()],
        [name for name, _ in model.get_submodule("blocks.1").named_modules(prefix="one")],
        _by_children(model),
    ]


@on_ranks()
def test_who_goes_through_the_model_by_name_finds_the_users_modules() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    raw = Blocks()
    raw.blocks[0] = FullyShardedDataParallel(raw.blocks[0], use_orig_params=True, device_id=torch.device("cpu"))
    found = {"bare": _names(Blocks()), "raw": _names(raw)}
    for engine in DISTRIBUTED:
        model, optimizer = fsshard.wrap((module := Blocks()), torch.optim.SGD(module.parameters(), 0.1), backend=engine)
        found[engine] = [_names(model.module), _names(model)]
        with model.no_sync():  # FSDP1 looks for its units among modules()
            model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        model.eval()
        found[f"{engine} modes"] = [part.training for part in (*model.modules(), *module.modules())]
        with model.full_parameters():
            found[f"{engine} whole"] = _names(model.module)
    assert any("_fsdp_wrapped_module" in name for names in found["raw"] for name in names)
    for engine in DISTRIBUTED:
        assert found[engine] == [found["bare"]] * 2 and found[f"{engine} whole"] == found["bare"], engine
        assert not any(found[f"{engine} modes"]), engine


class Turned(nn.Module):
    """Weights that do not lie in memory in the order of their indices."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.matrix = nn.Linear(6, 4, bias=False)
        self.matrix.weight = nn.Parameter(torch.randn(6, 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.matrix(x).sum() + self.kernel(x.reshape(2, 3, 4, 6)).square().mean()


@on_ranks(1)
def test_one_rank_reads_gradients_as_weights_lie() -> None:
    """Raw FSDP1 gives the matrix a gradient in the order of memory, as if it were that of indices."""
    trained = []
    for backend in ("none", "fsdp"):
        torch.manual_seed(0)
        model, optimizer = with_sgd(Turned(), backend=backend)
        for _ in range(2):
            batch = torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(1))
            with model.no_sync():  # what comes then is added to it, around a second forward
                model(batch).backward()
            model(2 * batch).backward()
            gradient = next(p for n, p in model.module.named_parameters() if n.endswith("matrix.weight")).grad
            assert gradient.stride() == (1, 4)
            take_step(optimizer)
        trained.append(model.state_dict())
    assert [torch.equal(trained[0][name], trained[1][name]) for name in ("matrix.weight", "kernel.bias")] == [
        True,
        True,
    ]


class HeldTwice(nn.Module):
    """A frozen module under two names, beside what is trained (prompt tuning)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8).requires_grad_(False)
        self.same = self.embedding
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: Any) -> Any:
        return self.out(self.embedding(tokens) + self.same(tokens.flip(0)))


@on_backends(DISTRIBUTED)
def test_a_frozen_module_may_be_held_twice(backend: str) -> None:
    tokens = torch.arange(6)
    bare, model = HeldTwice(), fsshard.wrap(HeldTwice(), backend=backend)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, trained, lr=0.1)
    judge = torch.optim.SGD(bare.out.parameters(), lr=0.1)
    for _ in range(2):
        for each, own in ((model, optimizer), (bare, judge)):
            each(tokens).square().mean().backward()
            take_step(own)
    saved = model.state_dict()
    assert list(saved) == list(bare.state_dict())
    check_equal(dict(bare.state_dict()), dict(saved))
