"""Checks what an optimizer sees in its step: parts cut as kernels round, and gradients that a closure makes.

Tests fsshard/sharded/optimizer_views.py and fsshard/backends/none.py too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsshard
from fsshard.errors import OptimizerError
from fsshard.sharded.optimizer_views import GRAIN, GRID, blocks_of
from tests import optimizers as written
from tests.models import batch, net, take_step
from tests.on_ranks import on_backends, on_ranks
from tests.optimizers import Blocked, average
from tests.training_runs import DISTRIBUTED, check_equal, differences, lost_by_saving, ranks_of

OPERATIONS: dict[str, Any] = {
    "product": lambda a, b: a * b,
    "quotient": lambda a, b: a / b,
    "second moment": lambda a, b: a.clone().addcmul_(b, b.conj(), value=0.1),
}


def in_blocks(operation: Any, a: torch.Tensor, b: torch.Tensor, start: int, stop: int, threads: int) -> torch.Tensor:
    part_a, part_b = a[start:stop].clone(), b[start:stop].clone()
    result = torch.zeros_like(part_a)
    for block in blocks_of(start, stop, len(a), threads):
        piece = slice(block.start, block.stop)
        if not block.size:
            result[piece] = operation(part_a[piece], part_b[piece])
            continue
        wide_a, wide_b = a.new_ones(block.size), b.new_ones(block.size)
        inside = slice(block.offset, block.offset + block.stop - block.start)
        wide_a[inside], wide_b[inside] = part_a[piece], part_b[piece]
        result[piece] = operation(wide_a, wide_b)[inside]
    return result


SMALL = {total: range(1, total, 7) for total in (33, 103, 500)}
LARGE = {
    total: (total // 2, total // 2 + 1, GRAIN + GRID, total - GRID - 1, 1001)
    for total in (GRAIN + 7, 2 * GRAIN + 5, 4 * GRAIN + 2 * GRID + 9)
}
"""Elements of a whole -> where it is cut in two; large ones are shared by threads, each with a tail of its own."""


@pytest.mark.parametrize(
    ("name", "threads", "cuts"),
    [
        *[(name, 1, SMALL) for name in ("product", "quotient", "second moment")],
        *[("second moment", threads, LARGE) for threads in (2, 3)],
    ],
)
def test_complex_kernels_round_as_on_the_whole(name: str, threads: int, cuts: dict[int, Any]) -> None:
    """torch's complex kernels give other last bits on a part (shown), and the same ones on blocks."""
    generator, operation = torch.Generator().manual_seed(0), OPERATIONS[name]
    before, plainly_different = torch.get_num_threads(), 0
    torch.set_num_threads(threads)
    try:
        for total, places in cuts.items():
            a, b = (torch.randn(total, dtype=torch.complex64, generator=generator) for _ in range(2))
            whole = operation(a, b)
            for start, stop in (part for cut in places for part in ((0, cut), (cut, total))):
                assert torch.equal(in_blocks(operation, a, b, start, stop, threads), whole[start:stop])
                plain = operation(a[start:stop].clone(), b[start:stop].clone())
                plainly_different += not torch.equal(plain, whole[start:stop])
    finally:
        torch.set_num_threads(before)
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert plainly_different, "torch rounds alike now: the blocks are no longer needed"


# ------------------------------------------------------------------------------------------------ closures


def loss_of(model: Any, number: int) -> torch.Tensor:
    return model(batch(number)).square().mean()


CLOSURES: list[tuple[str, dict[str, Any]]] = [
    ("SignAscent", {}),
    ("SignAscent", {"how": "data"}),
    ("AscentFirst", {}),
    ("MyLion", {}),
    ("AdamW", {"lr": 0.01}),
]


@pytest.mark.fairscale_row(39, 40)
@pytest.mark.covering
@pytest.mark.parametrize(
    ("name", "settings", "backend"),
    [
        *((*each, backend) for each in CLOSURES for backend in (*DISTRIBUTED, "none")),
        *(("Sam", {}, backend) for backend in ("ddp", "none")),
    ],
    ids=lambda value: str(value),
)
@on_ranks(ranks_of)
def test_a_closure_sees_the_weights_as_they_are(backend: str, name: str, settings: dict[str, Any]) -> None:
    """Called twice, after the weights were moved: OSS by itself would send them afterwards only."""
    optimizer_class = getattr(written, name, None) or getattr(torch.optim, name)
    bare = net()
    expected = written.by_hand(bare, optimizer_class(bare.parameters(), **settings), loss_of, steps=3)
    model = fsshard.wrap(net(), backend=backend)
    optimizer = fsshard.build_optimizer(model, optimizer_class, **settings)
    for number in range(3):

        def closure(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
    found = model.state_dict()
    expected["steps"] = found["steps"]  # a buffer that counts forwards, and the evaluations differ
    check_equal(expected, found)


@pytest.mark.covering
@pytest.mark.covering
@pytest.mark.parametrize("backend", [*DISTRIBUTED, "none"])
@pytest.mark.parametrize("name", ["AdamW", "MyLion"])
@on_ranks(ranks_of)
def test_the_last_micro_batch_may_be_in_the_closure(backend: str, name: str) -> None:
    """Two micro-batches under no_sync, the last one in the closure, as Lightning has it."""

    def micro(model: Any, step: int, part: int) -> torch.Tensor:
        return loss_of(model, 10 * step + part) / 3

    optimizer_class = getattr(written, name, None) or getattr(torch.optim, name)
    bare = net()
    reference = optimizer_class(bare.parameters(), lr=0.01)
    model = fsshard.wrap(net(), backend=backend)
    optimizer = fsshard.build_optimizer(model, optimizer_class, lr=0.01)
    for step in range(3):
        for part in range(3):
            micro(bare, step, part).backward()
        written.average(bare)
        take_step(reference)
        with model.no_sync():
            for part in range(2):
                micro(model, step, part).backward()

        def closure(step: int = step) -> torch.Tensor:
            loss = micro(model, step, 2)
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()
    check_equal(dict(bare.state_dict()), model.state_dict())


def job_local(backend: str, what: str) -> None:
    model = fsshard.wrap(net(), backend=backend)
    name = "AscentFirst" if what == "looks first" else "SignAscent"
    optimizer = fsshard.build_optimizer(model, getattr(written, name))
    with model.no_sync():
        loss_of(model, 0).backward()

    def closure() -> torch.Tensor:
        with model.no_sync():
            loss = loss_of(model, 1)
            loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.covering
@pytest.mark.parametrize("backend", DISTRIBUTED)
@pytest.mark.parametrize("what", ["looks first", "never reduced"])
def test_local_gradients_are_stepped_by_nobody(ranks: Any, backend: str, what: str) -> None:
    """An optimizer may look at gradients before it calls the closure, and a closure may reduce nothing."""
    for error in ranks.run_expecting_errors(job_local, 2, backend, what):
        assert isinstance(error, OptimizerError)
        assert "no_sync" in str(error)


def trained_with_a_closure(backend: str, name: str, reads: bool) -> Any:
    """Return what is trained where the closure reads the state or not, and what it read that was not the state."""
    model, wrong = fsshard.wrap(net(), backend=backend), list[str]()
    optimizer = fsshard.build_optimizer(model, getattr(written, name, None) or getattr(torch.optim, name))
    for number in range(4):
        before = optimizer.state_dict()

        def closure(number: int = number, before: Any = before) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            if reads:
                wrong.extend(differences(before, optimizer.state_dict()))
            return loss

        optimizer.step(closure)
    return [wrong, model.state_dict(), optimizer.state_dict()]


@pytest.mark.covering
@pytest.mark.parametrize("name", ["AdamW", "AscentFirst"])
@on_backends(["fsdp2", "fairscale"])
def test_a_closure_may_read_the_state(backend: str, name: str) -> None:
    """The optimizer went on without what was read, and with it again a step later, silently."""
    check_equal(*(trained_with_a_closure(backend, name, reads) for reads in (True, False)))


# ------------------------------------------------------------------------------------------------ views from before


def real_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def blocked_steps(model: Any, optimizer: Any, steps: range, *, bare: bool = False) -> None:
    for number in steps:
        model(batch(number)).square().mean().backward()
        if bare:
            average(model)
        take_step(optimizer)


def job_blocked(build: Any, *backends: str) -> dict[str, list[str]]:
    """Backend -> the weights and momenta that are not those of bare replicas, and the momenta after a state dict."""
    wrong = {}
    bare = build()
    native = Blocked(bare.parameters())
    blocked_steps(bare, native, range(3), bare=True)
    momenta = {name: native.state[parameter]["momentum"] for name, parameter in bare.named_parameters()}
    for backend in backends:
        settings = {"backend": "fairscale", "implementation": "native"} if backend == "native" else {"backend": backend}
        model = fsshard.wrap(build(), **settings)
        optimizer = fsshard.build_optimizer(model, Blocked)
        blocked_steps(model, optimizer, range(3))
        state = {name: value["momentum"] for name, value in optimizer.state_dict()["state"].items()}
        wrong[backend] = [*differences(bare.state_dict(), model.state_dict()), *differences(momenta, state)]
        again = fsshard.wrap(build(), **settings)
        resumed = fsshard.build_optimizer(again, Blocked)
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
        kept = {name: value["momentum"] for name, value in resumed.state_dict()["state"].items()}
        wrong[backend] += list(differences(momenta, kept))
    return wrong


WHOLE = ("ddp", "fairscale", "native")


@pytest.mark.fairscale_row(42)
def test_an_optimizer_that_keeps_views_from_its_constructor(ranks: Any) -> None:
    """It wrote to memory that OSS had left, so that nothing moved, silently."""
    for wrong in ranks.run(job_blocked, 2, real_net, *WHOLE, "fsdp", "fsdp2"):
        assert not any(wrong.values()), wrong
    for wrong in ranks.run(job_blocked, 2, net, *WHOLE):  # with complex weights
        assert not any(wrong.values()), wrong


@pytest.mark.parametrize("implementation", ["real", "native"])
@on_ranks()
def test_views_are_those_of_now_in_an_optimizer_that_is_built_again(implementation: str) -> None:
    """OSS moves parameters when some are frozen."""
    bare = real_net()
    model = fsshard.wrap(real_net(), backend="fairscale", implementation=implementation)
    for frozen in (True, False):
        for module in (bare, model.module):
            module[0].weight.requires_grad_(not frozen)
        natives, optimizer = Blocked(bare.parameters()), fsshard.build_optimizer(model, Blocked)
        blocked_steps(bare, natives, range(1), bare=True)
        blocked_steps(model, optimizer, range(1))
    check_equal(bare.state_dict(), model.state_dict())


class Nested(written.Written):
    """Number by number, with its momentum in a dict of its own."""

    def direction(self, group: dict[str, Any], parameter: Any) -> Any:
        kept = self.state[parameter].setdefault("kept", {"momentum": torch.zeros_like(parameter)})
        return kept["momentum"].mul_(0.9).add_(parameter.grad)


def job_nested(backend: str) -> list[str]:
    model, bare = fsshard.wrap(net(), backend=backend), net()
    optimizer, native = fsshard.build_optimizer(model, Nested), Nested(bare.parameters())
    blocked_steps(model, optimizer, range(3))
    blocked_steps(bare, native, range(3), bare=True)
    state = {name: value["kept"]["momentum"] for name, value in optimizer.state_dict()["state"].items()}
    momenta = {name: native.state[parameter]["kept"]["momentum"] for name, parameter in bare.named_parameters()}
    return [*differences(bare.state_dict(), model.state_dict()), *differences(momenta, state)]


def test_nested_state_is_not_that_of_the_first_rank(ranks: Any) -> None:
    for error in ranks.run_expecting_errors(job_nested, 2, "fsdp2"):
        assert "'kept'" in str(error) and "'fairscale' or" in str(error)
    assert ranks.run(job_nested, 2, "fairscale") == [[], []]


# ------------------------------------------------------------------------------------------------ pairs of reals


class CountedViews(TorchDispatchMode):
    """Counts the views of complex numbers as pairs of reals."""

    def __init__(self) -> None:
        super().__init__()
        self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.views += func is torch.ops.aten.view_as_real.default
        return func(*args, **(kwargs or {}))


@on_backends(["none", *DISTRIBUTED])
def test_adam_steps_pairs_of_reals_where_weights_do_not_decay(backend: str) -> None:
    """The same numbers, with a fifth less CPU time of the step; a decay makes products with complex numbers."""
    bare, model = net(), fsshard.wrap(net(), backend=backend)
    hyper = {"lr": 0.01, "weight_decay": 0.0, "amsgrad": True}
    native = torch.optim.Adam(bare.parameters(), **hyper)
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, **hyper)
    names, wrong, viewed = dict(bare.named_parameters()), [], []
    for decay in (0.0, 0.1, 0.0):
        for group in (*native.param_groups, *optimizer.param_groups):
            group["weight_decay"] = decay
        blocked_steps(bare, native, range(2), bare=True)
        counted = CountedViews()
        for number in range(2):
            model(batch(number)).square().mean().backward()
            with counted:
                optimizer.step()
            optimizer.zero_grad()
        viewed.append(counted.views > 0)
        wrong += differences(bare.state_dict(), model.state_dict())
        for name, state in optimizer.state_dict()["state"].items():
            wrong += differences(native.state[names[name]], state)
    wrong += lost_by_saving(model, optimizer, net, torch.optim.Adam, **hyper)
    assert wrong == [] and viewed == [False, True, False]


# ------------------------------------------------------------------------------------------------ fused kernels


def odd_net() -> nn.Module:
    """Parts that begin and end anywhere, and one of more numbers than a thread takes alone."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 37), nn.Tanh(), nn.Linear(37, 2011), nn.Tanh(), nn.Linear(2011, 1))


@on_backends(["fsdp", "fsdp2"])
def test_fused_kernels_round_parts_as_the_whole(backend: str) -> None:
    """Their vectors began elsewhere in a shard than in the whole parameter: 8e-8 off with AdamW."""
    torch.set_num_threads(2)
    try:
        wrong = []
        for kind, hyper in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})):
            bare, model = odd_net(), fsshard.wrap(odd_net(), backend=backend)
            native = kind(bare.parameters(), lr=0.01, fused=True, **hyper)
            optimizer = fsshard.build_optimizer(model, kind, lr=0.01, fused=True, **hyper)
            blocked_steps(bare, native, range(4), bare=True)
            blocked_steps(model, optimizer, range(4))
            wrong += differences(bare.state_dict(), model.state_dict())
            names = dict(bare.named_parameters())
            for name, state in optimizer.state_dict()["state"].items():
                wrong += differences(native.state[names[name]], state)
            wrong += lost_by_saving(model, optimizer, odd_net, kind, lr=0.01, fused=True, **hyper)
        assert not wrong
    finally:
        torch.set_num_threads(1)
