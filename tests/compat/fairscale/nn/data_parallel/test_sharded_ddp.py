"""ShardedDataParallel: equal to DDP with the plain optimizer to the last bit on two ranks, where FairScale's is not.

The reference is DDP, and for what DDP's reducer does not do (several backwards of one forward) a reduction by hand
behind each backward, with DDP's arithmetic. The numbers in names are the rows of docs/data/fairscale-faults.md.

Tests fsshard/oss/gradient_buckets.py, fsshard/oss/reduction.py, fsshard/oss/sharded_ddp.py too.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
import itertools
import pickle
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.compat.errors import GradientError, MisuseError
from fsshard.compat.fairscale.nn.data_parallel import ShardedDataParallel
from fsshard.compat.fairscale.optim.oss import OSS
from fsshard.errors import FsshardError
from fsshard.oss import gradient_buckets
from tests.compat.fairscale.nn.data_parallel import sharded_ddp_trainings as trainings
from tests.compat.fairscale.nn.data_parallel.sharded_ddp_trainings import (
    Mixed,
    Words,
    batch,
    build,
    compare,
    furthest,
    loss_of,
    mlp,
    values,
)
from tests.models import take_step
from tests.on_ranks import on_ranks
from tests.oss.trainings import clip, refusal

BUFFERS = [2**23, 0]


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(values(one), values(other), strict=True))


def beside_ddp(module: nn.Module, expected: nn.Module) -> list[tuple[Any, Any]]:
    """Ours and DDP, each with its optimizer."""
    return [build("ours", module), build("ddp", expected)]


# ------------------------------------------------------------------------------------------------ what trains alike


def cases(train: Any, values: Iterable[Any], *marks: Any, reference: str = "ddp") -> list[Any]:
    """A training with each of these arguments; its name and the arguments name the test."""
    return [
        pytest.param(train, reference, args, marks=marks, id=f"{train.__name__[6:]}-{args}")
        for args in (value if isinstance(value, tuple) else (value,) for value in values)
    ]


BACKWARDS = [
    "two forwards, one backward",
    "two forwards, two backwards",
    "retain_graph",
    "twice not through the wrapper",
    "gradient of the input first",
    "gradient of parameters in between",
    "in evaluation mode",
]
USED = itertools.product(("never", "not on rank 1", "in turns", "ranks in turns"), ("optimizer", "by hand zeros"))
BOTH = (False, True)
EQUAL = [
    *cases(trainings.train_zeroing, trainings.WAYS, pytest.mark.fairscale_row(1)),
    *cases(trainings.train_backwards, BACKWARDS, reference="hand"),
    *cases(trainings.train_after_leftovers, ["zeroed", "kept", "wrapped again"], pytest.mark.fairscale_row(5)),
    *cases(trainings.train_added_group, ["", "wrapped again"], pytest.mark.fairscale_row(6)),
    *cases(trainings.train_freezing, ["freeze", "thaw"]),
    *cases(trainings.train_partly_owned, [()]),
    *cases(trainings.train_modules_apart, itertools.product(BOTH, BOTH)),
    *cases(trainings.train_branching, USED, pytest.mark.fairscale_row(19)),
    *cases(trainings.train_mixed, [1, 2], pytest.mark.fairscale_row(21)),
    *cases(trainings.train_mixed, [2], pytest.mark.fairscale_row(21), reference="hand"),
    # In a second backward DDP adds a row's gradients one by one to the first's mean, which its owner alone has here.
    *cases(trainings.train_sparse, [(1, False), (2, True)], pytest.mark.fairscale_row(27)),
    *cases(trainings.train_large, itertools.product(("s!z", "ns!z"), (0, 1, 100, 2**23))),  # any size of buckets
    *cases(trainings.train_normalized, BOTH),
]


@pytest.mark.parametrize(("train", "reference", "args"), EQUAL)
@on_ranks()
def test_equal_to_the_last_bit(train: Any, reference: str, args: tuple[Any, ...]) -> None:
    assert compare(train, reference, *args) == []


class Embedded(nn.Module):
    """An embedding, a trunk, and a head that may run twice."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.embedding, self.twice = nn.Embedding(32, 2), twice
        self.trunk, self.head = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)), nn.Linear(3, 3)

    def forward(self, indices: Tensor) -> Tensor:
        h = self.head(self.trunk(self.embedding(indices)))
        return self.head(h) if self.twice else h


def train_all(kind: str, accumulate: bool, thaw: bool, clips: bool, by_hand: bool, twice: bool, **kw: Any) -> Any:
    """DDP is made anew where the trainable parameters change; ``reduce()`` by hand is of ours."""
    torch.manual_seed(dist.get_rank())
    module = Embedded(twice)
    module.embedding.requires_grad_(False)
    wrapped, optimizer = build(kind, module, settings={"optim": torch.optim.SGD, "lr": 1e-2, "momentum": 0.99}, **kw)
    generator = torch.Generator().manual_seed(dist.get_rank())
    norms = []
    for step in range(4):
        wrapped.zero_grad(set_to_none=True)
        for quiet in [True] * 2 * accumulate + [by_hand and kind == "ours"]:
            with wrapped.no_sync() if quiet else contextlib.nullcontext():
                wrapped(torch.randint(0, 32, (8, 2), generator=generator)).abs().sum().backward()
        if by_hand and kind == "ours":
            wrapped.reduce()
        norms += [clip(optimizer, module, 0.3)] if clips else []
        optimizer.step()
        if thaw and step == 0:
            module.embedding.requires_grad_(True)
            wrapped = build("ddp", module)[0] if kind == "ddp" else wrapped
    return [*values(module), *norms]


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", BUFFERS)
@pytest.mark.parametrize("twice", BOTH)
@pytest.mark.parametrize("by_hand", BOTH)
@pytest.mark.parametrize("clips", BOTH)
@pytest.mark.parametrize("thaw", BOTH)
@pytest.mark.parametrize("accumulate", BOTH)
@on_ranks()
def test_all_together(accumulate: bool, thaw: bool, clips: bool, by_hand: bool, twice: bool, size: int) -> None:
    assert compare(train_all, "ddp", accumulate, thaw, clips, by_hand, twice, reduce_buffer_size=size) == []


# ------------------------------------------------------------------------------------------------ zeroing (row 1)


@pytest.mark.fairscale_row(1)
@on_ranks()
def test_row_1_raw_reduces_a_stale_bucket() -> None:
    for how in ("optimizer", "module", "by hand"):
        assert furthest(trainings.train_zeroing, "ddp", how, kind="real") > 1e-4


# ------------------------------------------------------------------------------------------------ accumulation (row 4)


@pytest.mark.covering
@pytest.mark.parametrize(
    "pattern", ["zss!", "znns!", "zsns!", "zsnsns!", "zns!ss!", "zsns!zs!", "zs!s!", "zns!ns!", "zssnns!"]
)
@pytest.mark.parametrize("how", ["optimizer", "wrapper zeros", "by hand"])
@pytest.mark.fairscale_row(4)
@on_ranks()
def test_row_4_accumulation(pattern: str, how: str) -> None:
    """``s`` reduces, ``n`` is under no_sync, ``z`` zeroes, ``!`` steps."""
    assert compare(trainings.train_accumulating, "hand", pattern, how) == []


@pytest.mark.fairscale_row(4)
@on_ranks()
def test_the_reference_by_hand_is_ddp() -> None:
    for pattern in ("zss!", "znns!", "zsns!"):
        assert compare(trainings.train_accumulating, "ddp", pattern, kind="hand") == []


@pytest.mark.fairscale_row(4)
@on_ranks()
def test_row_4_raw_averages_twice() -> None:
    for size in BUFFERS:
        train = trainings.train_accumulating
        assert furthest(train, "ddp", "zss!", "wrapper zeros", kind="real", reduce_buffer_size=size) > 1e-4


@on_ranks()
def test_accumulation_under_no_sync_alone_is_reduced_at_the_step() -> None:
    """DDP's ranks would drift apart, FairScale's owner would step with its own gradient; here a warning says so."""
    module, expected = mlp(), mlp()
    both = beside_ddp(module, expected)
    with trainings.warnings_of("fsshard") as warned:
        for step in range(2):
            for each, optimizer in both:
                with each.no_sync() if each.module is module else contextlib.nullcontext():
                    loss_of(each, step).backward()
                take_step(optimizer)
    assert equal(module, expected) and sum("no_sync" in text for text in warned) == 1


@pytest.mark.covering
@pytest.mark.parametrize("size", BUFFERS)
@pytest.mark.parametrize("pattern", ["zshsh!", "zscs!", "zshns!", "mshs!", "mshsms!", "zsh!s!", "zsnhs!"])
@on_ranks()
def test_gradients_replaced_between_backwards(pattern: str, size: int) -> None:
    assert compare(trainings.train_accumulating, "hand", pattern, reduce_buffer_size=size) == []


# ------------------------------------------------------------------------------------------------ reentrancy (row 2)


@pytest.mark.covering(2)
@pytest.mark.fairscale_row(2)
@pytest.mark.parametrize(
    "mode", ["blocks", "reentrant", "reentrant, tied", "reentrant, used again", "wrapper", "wrapper, reentrant"]
)
@pytest.mark.parametrize("size", [1, 2**23])
@on_ranks()
def test_row_2_checkpoints(mode: str, size: int) -> None:
    """A bucket for each parameter, which leaves as soon as it can, and one for all."""
    assert compare(trainings.train_checkpointed, "hand", mode, reduce_buffer_size=size) == []


# ------------------------------------------------------------------------------------------------ set-up (rows 5 to 8)


@pytest.mark.fairscale_row(5, 6)
@on_ranks()
def test_row_5_6_raw_does_not_zero_them_and_steps_with_local_gradients() -> None:
    assert furthest(trainings.train_after_leftovers, "ddp", "zeroed", kind="real") > 1e-4
    assert furthest(trainings.train_added_group, "ddp", "", kind="real") > 1e-4


@pytest.mark.fairscale_row(8)
@pytest.mark.parametrize("size", BUFFERS)
@on_ranks(3)
def test_row_8_subgroup(size: int) -> None:
    assert compare(trainings.train_subgroup, "ddp", reduce_buffer_size=size) == []
    if size == 0:
        trained = furthest(trainings.train_subgroup, "ddp", kind="real", reduce_buffer_size=0)
        assert trained > 1e-3 or dist.get_rank() == 0  # rank 0 is not in the group


@on_ranks()
def test_thawing_a_layer_that_still_has_a_mean() -> None:
    """A layer is frozen with its mean left in ``grad`` at the owner alone, and thawed before a step."""
    module, expected = mlp(), mlp()
    (wrapped, optimizer), (reference, plain) = build("ours", module), build("hand", expected)
    for each in (wrapped, reference):
        loss_of(each, 0).backward()
        trainings.after(each)
        each.module[0].requires_grad_(False)
        each(batch(1))
        each.module[0].requires_grad_(True)
    for each in (optimizer, plain):
        each.step()
    assert equal(module, expected)


# ------------------------------------------------------------------------------------------------ use (row 19)


# ------------------------------------------------------------------------------------------------ dtypes (rows 21, 27)


@pytest.mark.fairscale_row(21, 27)
@on_ranks()
def test_row_21_27_raw_refuses_several_dtypes_and_sparse_gradients() -> None:
    module = Mixed()
    assert "Different types for the bucket" in str(refusal(lambda: build("real", module)[0](batch(0))))
    wrapped, _ = build("real", Words(once=False), reduce_buffer_size=0)
    assert "NotImplementedError" in str(refusal(lambda: wrapped(torch.tensor([1, 2])).sum().backward()))


@pytest.mark.parametrize("size", BUFFERS)
@on_ranks()
def test_float16_gradients_in_transit(size: int) -> None:
    """To the last bit what FairScale computes without buckets; with them it ignores the setting."""
    ours, real = (
        trainings.train_zeroing(kind, "wrapper", reduce_buffer_size=where, reduce_fp16=True)
        for kind, where in (("ours", size), ("real", 0))
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, real, strict=True))
    full = trainings.train_zeroing("ours", "wrapper")
    assert any(not torch.equal(a, b) for a, b in zip(ours, full, strict=True))


# ------------------------------------------------------------------------------------------------ copies, compiling


def train_compiled(kind: str, where: str) -> list[Tensor]:
    module = mlp()
    inside = torch.compile(module, backend="eager") if where == "inner" else module
    wrapped, optimizer = build(kind, inside, list(module.parameters()))
    called = torch.compile(wrapped, backend="eager") if where == "outer" else wrapped
    for step in range(3):
        optimizer.zero_grad()
        called(batch(step)).square().mean().backward()
        optimizer.step()
    return values(module)


@pytest.mark.fairscale_row(10)
@pytest.mark.long
@on_ranks()
def test_row_10_compiled() -> None:
    assert compare(train_compiled, "ddp", "outer") == compare(train_compiled, "ddp", "inner") == []
    assert furthest(train_compiled, "ddp", "outer", kind="real") > (1e-4 if dist.get_rank() == 0 else -1)


@pytest.mark.fairscale_row(26)
@on_ranks()
def test_row_26_copies() -> None:
    module = mlp()
    raw, _ = build("real", mlp())
    wrapped, optimizer = build("ours", module)
    loss_of(wrapped, 0).backward()
    optimizer.step()
    stored = io.BytesIO()
    torch.save(wrapped, stored)
    stored.seek(0)
    for twin in (copy.deepcopy(wrapped), torch.load(stored, weights_only=False), pickle.loads(pickle.dumps(wrapped))):
        assert torch.equal(twin(batch(1)), wrapped(batch(1))) and type(twin) is ShardedDataParallel
        assert next(twin.parameters()) is not next(module.parameters())
        assert twin.state_dict().keys() == wrapped.state_dict().keys()
        with pytest.raises(FsshardError, match="is a copy"):
            loss_of(twin, 1).backward()
    for way in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            way(raw)


@pytest.mark.fairscale_row(33)
@on_ranks()
def test_row_33_gradients_on_other_ranks() -> None:
    """FairScale leaves garbage with the ranks that do not own a parameter; here they have None."""
    expected = mlp()
    reference, _ = build("ddp", expected)
    loss_of(reference, 0).backward()

    def look(kind: str, **options: Any) -> dict[str, set[str]]:
        module = mlp()
        wrapped, optimizer = build(kind, module, **options)
        loss_of(wrapped, 0).backward()
        found = {"owner": set(), "other": set()}
        for parameter, right in zip(module.parameters(), expected.parameters(), strict=True):
            same = parameter.grad is not None and torch.equal(parameter.grad, right.grad)
            what = "none" if parameter.grad is None else "mean" if same else "garbage"
            found["owner" if optimizer._param_to_rank[parameter] == dist.get_rank() else "other"].add(what)
        return found

    assert look("ours") == look("ours", reduce_buffer_size=0) == {"owner": {"mean"}, "other": {"none"}}
    raw = look("real")
    assert raw["owner"] == {"mean"} and "garbage" in raw["other"]


def train_clipped(kind: str, norm_type: float, pattern: str, **options: Any) -> list[Tensor]:
    """Norms by torch's own function, and the parameters after three steps."""
    module = mlp()
    wrapped, optimizer = build(kind, module, **options)
    norms = []
    for step in range(3):
        named = wrapped.named_parameters()
        parameters = [p for n, p in named if pattern == "all" or not n.endswith("bias")]
        loss_of(wrapped, step).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.01, norm_type))
        take_step(optimizer)
    return [*norms, *values(module)]


@pytest.mark.covering
@pytest.mark.fairscale_row(33)
@pytest.mark.parametrize("size", BUFFERS)
@pytest.mark.parametrize("pattern", ["all", "bias left out"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@on_ranks()
def test_row_33_torchs_own_clipping(norm_type: float, pattern: str, size: int) -> None:
    assert compare(train_clipped, "ddp", norm_type, pattern, reduce_buffer_size=size) == []


# ------------------------------------------------------------------------------------------------ three ranks


@pytest.mark.parametrize("pattern", ["zs!", "znns!", "zss!"])
@on_ranks(3)
def test_three_ranks(pattern: str) -> None:
    """Sums of three in another order: gradients below 1 differ by at most 2 roundings of 2**-24 each, at every of

    the 2 steps of momentum 0.9 and learning rate 0.1, doubled for what the parameters' own difference does next.
    """
    bound = 2 * (1 + 1.9) * 0.1 * 4 * 2.0**-24 + 4 * 2.0**-24
    assert furthest(trainings.train_accumulating, "hand", pattern) <= bound


# ------------------------------------------------------------------------------------------------ buckets


def job_launches() -> list[list[str]]:
    """Where each bucket left: inside of a hook in backward, or at its end."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    wrapped, optimizer = build("ours", module, reduce_buffer_size=150)
    rounds = []
    launch = gradient_buckets.GradientBucket.launch

    def launched(self: Any, arrived: set[int]) -> None:
        rounds[-1].append("backward" if len(arrived) < 24 else "end")
        launch(self, arrived)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_buckets.GradientBucket, "launch", launched)
        for step in range(2):
            rounds.append([])
            loss_of(wrapped, step).backward()
            optimizer.zero_grad()
    return rounds


def test_buckets_leave_during_backward_in_one_order(ranks: Any) -> None:
    first, second = ranks.run(job_launches, 2)
    assert first == second
    learned, later = first
    assert learned == ["end"] * len(learned)  # the first backward shows which gradients come in parts
    assert later[-1] == "end" and "backward" in later


# ------------------------------------------------------------------------------------------------ buffers, start


@on_ranks()
def test_buffers_as_the_settings_say() -> None:
    for by, expected in {"default": 0, "off": dist.get_rank(), "no_sync": dist.get_rank(), "by hand": 0}.items():
        module = nn.Linear(8, 8)
        wrapped, _ = build("ours", module, broadcast_buffers=by in ("default", "no_sync"))
        module.register_buffer("rank", torch.tensor(float(dist.get_rank())))
        with wrapped.no_sync() if by == "no_sync" else contextlib.nullcontext():
            wrapped(batch(0))
        if by == "by hand":
            wrapped.sync_buffers(blocking=True)
        assert float(module.rank) == expected, by


class WithMore(nn.Linear):
    """A state dict that has more than tensors in it."""

    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


@on_ranks()
def test_start() -> None:
    """All parameters and buffers, whatever else is in the state dict; nothing where it is turned off."""
    for sync in (True, False):
        torch.manual_seed(dist.get_rank())
        module = WithMore(8, 8)
        module.register_buffer("kept", torch.randn(2))
        module.register_buffer("passing", torch.randn(2), persistent=False)
        build("ours", module, sync_models_at_startup=sync)
        torch.manual_seed(0)
        expected = [WithMore(8, 8).weight, torch.randn(2), torch.randn(2)]
        same = [torch.equal(a, b) for a, b in zip(expected, [module.weight, module.kept, module.passing], strict=True)]
        assert same == [sync or dist.get_rank() == 0] * 3


# ------------------------------------------------------------------------------------------------ errors, ends


class Fails(torch.autograd.Function):
    """A backward that raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("planted")


class Breakable(nn.Module):
    """Its backward raises half-way where asked to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, fail: bool) -> Tensor:
        h = self.first(x)
        return self.last(Fails.apply(h) if fail else h)


@on_ranks()
def test_an_error_under_no_sync_is_of_one_rank_alone() -> None:
    """Nothing was sent: one rank drops its gradients and goes on."""
    module, expected = Breakable(), Breakable()
    both = beside_ddp(module, expected)
    for step in range(3):
        if dist.get_rank() == 1:
            wrapped = both[0][0]
            with contextlib.suppress(ValueError), wrapped.no_sync():
                loss_of(wrapped, step, True).backward()
        both[0][1].zero_grad()
        for each, optimizer in both:
            loss_of(each, step, False).backward()
            take_step(optimizer)
    assert equal(module, expected)


@on_ranks()
def test_an_error_in_backward_is_not_forgotten() -> None:
    """Every rank fails half-way through the model; the next forward, and the next step, say so."""
    wrapped, optimizer = build("ours", Breakable())
    loss_of(wrapped, 0, False).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="planted"):
        loss_of(wrapped, 1, True).backward()
    optimizer.zero_grad()
    for call in (lambda: loss_of(wrapped, 2, False), optimizer.step):
        with pytest.raises(GradientError, match="earlier backward"):
            call()


@on_ranks()
def test_nothing_stays_alive() -> None:
    module = mlp()
    wrapped, optimizer = build("ours", module)
    for step in range(2):
        loss_of(wrapped, step).backward()
        optimizer.step()
    kept = [p.expand_as(p).grad_fn for p in module.parameters()]  # C++ holds the parameters
    gone = weakref.ref(wrapped), weakref.ref(optimizer)
    del wrapped, optimizer
    gc.collect()
    assert kept and gone[0]() is gone[1]() is None


@on_ranks()
def test_the_newer_wrapper_takes_over() -> None:
    module = mlp()
    older, optimizer = build("ours", module)
    newer = ShardedDataParallel(module, optimizer)
    loss_of(newer, 0).backward()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(older(batch(0)), newer(batch(0)))
    older.eval()
    loss = loss_of(older, 1)
    older.train()
    for call in (loss.backward, lambda: loss_of(older, 1)):
        with pytest.raises(GradientError, match="newer"):
            call()


# ------------------------------------------------------------------------------------------------ the surface


@on_ranks(1)
def test_surface() -> None:
    """Its arguments and attributes are those that FairScale's users see."""
    module = mlp()
    module.banana = "sweet"  # type: ignore[assignment]
    (wrapped, optimizer), (raw, _) = build("ours", module), build("real", mlp())
    assert inspect.signature(wrapped.zero_grad).parameters["set_to_none"].default is False
    assert wrapped.module is module and wrapped.banana == "sweet" and not hasattr(wrapped, "orange")
    assert wrapped.is_multi_device_module is raw.is_multi_device_module is False
    assert wrapped.device_type == raw.device_type == "cpu"
    assert wrapped.state_dict().keys() == raw.state_dict().keys()
    assert wrapped.to("cpu") is wrapped.to(torch.device("cpu"), torch.float32) is wrapped.train() is wrapped
    assert {n for n in dir(raw) if not n.startswith("_")} <= set(dir(wrapped)) | {"T_destination"}
    loss_of(wrapped, 0).backward()
    optimizer.step()
    wrapped.to(dtype=torch.float64)
    assert all(p.dtype == torch.float64 for p in module.parameters())
    wrapped(batch(0).double()).sum().backward()
    optimizer.step()
    wrapped.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


@on_ranks(1)
def test_one_rank() -> None:
    """Nothing is reduced, and everything can be called."""
    module, expected = mlp(), mlp()
    wrapped, optimizer = build("ours", module)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        with wrapped.no_sync():
            loss_of(wrapped, step).backward()
        wrapped.reduce()
        loss_of(expected, step).backward()
        for each in (optimizer, plain):
            take_step(each)
        for each in (module, expected):
            each[0].requires_grad_(step % 2 == 0)
    assert equal(module, expected)


@on_ranks()
def test_refused() -> None:
    rank, alone = dist.get_rank(), dist.new_group([0])

    def wrap(module: nn.Module, **options: Any) -> ShardedDataParallel:
        return ShardedDataParallel(module, OSS(module.parameters(), lr=0.1), **options)

    module = mlp()
    wrapped = wrap(module)
    calls = {
        "SGD": lambda: ShardedDataParallel(module, torch.optim.SGD(module.parameters())),
        "empty": lambda: ShardedDataParallel(module, []),
        "no parameters": lambda: ShardedDataParallel(nn.Flatten(), OSS(module.parameters(), lr=0.1)),
        "before OSS is built": lambda: wrapped.to("meta"),
        "no gradients wait": wrapped.reduce,
    }
    for text, call in calls.items():
        with pytest.raises(AssertionError, match=text):
            call()
    with contextlib.suppress(KeyError), wrapped.no_sync():
        raise KeyError
    assert not wrapped._should_accumulate_grads
    with pytest.raises(MisuseError, match="use reduce_fp16=False"):
        wrap(nn.Linear(4, 4, dtype=torch.complex64), reduce_buffer_size=0, reduce_fp16=True)
    with pytest.raises(FsshardError, match=r"unlike rank 0 are \[1\]"):
        wrap(nn.Linear(8, 8 + rank))
    if rank == 0:
        with pytest.raises(MisuseError, match=r"has ranks \[0\], the optimizer's group \[0, 1\]"):
            wrap(mlp(), process_group=alone)
    module = mlp()
    module(batch(0)).sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="requires grad"):
        wrap(module)(batch(0))


@on_ranks()
def test_refreshing() -> None:
    """Once a change, whether it is warned of or not (FairScale without warnings: at every forward)."""
    for options, warns in (
        ({}, 1),
        ({"warn_on_trainable_params_changed": False}, 0),
        ({"auto_refresh_trainable": False}, 0),
    ):
        module = mlp()
        wrapped, _ = build("ours", module, **options)
        refreshed = []
        refresh = wrapped.refresh_trainable
        wrapped.refresh_trainable = lambda refresh=refresh, told=refreshed: told.append(refresh())
        with trainings.warnings_of("fsshard") as warned:
            for step in range(6):
                if step == 3:
                    module[0].requires_grad_(False)
                    if "auto_refresh_trainable" in options:
                        wrapped.refresh_trainable()
                wrapped.zero_grad()
                loss_of(wrapped, step).backward()
        assert (len(refreshed), sum("have changed" in text for text in warned)) == (1, warns)


@on_ranks()
def test_one_rank_alone_freezes_and_evaluates() -> None:
    """Rank 0 freezes, casts and evaluates the model between steps; nothing to be done under DDP, which would hang."""
    module, expected = mlp(), mlp()
    both = beside_ddp(module, expected)
    wrapped = both[0][0]
    for step in range(4):
        if dist.get_rank() == 0 and step:
            wrapped.requires_grad_(False)
            wrapped.eval()
            with torch.no_grad():
                wrapped(batch(9))
                if step == 2:
                    module.double()
                    wrapped(batch(9).double())
                    module.float()
            wrapped.requires_grad_(True)
            wrapped.train()
        for each, optimizer in both:
            loss_of(each, step).backward()
            take_step(optimizer)
    assert equal(module, expected)
