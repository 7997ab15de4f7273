"""Training loops as people write them, with more between backward and step than nothing: every backend as ddp does."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.errors import ModelError, RankMismatch
from tests.models import Spectral, batch, net, take_step, two_heads
from tests.on_ranks import on_backends, on_ranks
from tests.training_runs import DISTRIBUTED, check_equal, differences


def start(backend: str, module: nn.Module | None = None, **settings: Any) -> tuple[Any, Any]:
    model = fsshard.wrap(net() if module is None else module, backend=backend, **settings)
    return model, fsshard.build_optimizer(model, torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def backward(model: Any, number: int, *args: Any) -> None:
    model(batch(number), *args).square().mean().backward()


def train(model: Any, optimizer: Any, *numbers: int) -> None:
    for number in numbers:
        backward(model, number)
        take_step(optimizer)


def evaluate(model: Any) -> float:
    model.eval()
    with torch.no_grad():
        value = float(model(torch.ones(2, 4)).square().mean())
    model.train()
    return value


def loop_load_best(model: Any, optimizer: Any) -> list[Any]:
    """Validate, keep the best, train on, load the best, test."""
    best = model.state_dict()
    values = [evaluate(model)]
    for number in range(3):
        train(model, optimizer, number)
        values.append(evaluate(model))
    model.load_state_dict(best)
    values.append(evaluate(model))
    assert values[-1] == values[0]
    return values


def loop_validate_before_step(model: Any, optimizer: Any) -> list[Any]:
    values = []
    for number in range(3):
        backward(model, number)
        values.append(evaluate(model))
        take_step(optimizer)
        values.append(evaluate(model))
    return values


def loop_writeback(model: Any, optimizer: Any) -> list[Any]:
    values = [evaluate(model)]
    with model.full_parameters(writeback=True) as whole, torch.no_grad():
        for value in whole.values():
            value.mul_(0.5)
    return [*values, evaluate(model)]


def loop_skipped_step(model: Any, optimizer: Any) -> list[Any]:
    """A step left out, as after a NaN."""
    for number in range(4):
        backward(model, number)
        if number != 1:
            optimizer.step()
        optimizer.zero_grad()
    return []


def loop_load_optimizer_state(model: Any, optimizer: Any) -> list[Any]:
    train(model, optimizer, 0)
    saved = optimizer.state_dict()
    train(model, optimizer, 1)
    optimizer.load_state_dict(saved)
    train(model, optimizer, 2)
    return []


def loop_nested_no_sync(model: Any, optimizer: Any) -> list[Any]:
    for number in range(0, 6, 3):
        with model.no_sync():
            with model.no_sync():
                backward(model, number)
            backward(model, number + 1)
        backward(model, number + 2)
        take_step(optimizer)
    return []


def loop_eval_mode(model: Any, optimizer: Any) -> list[Any]:
    """Fine-tuning in evaluation mode, as with frozen BatchNorm statistics."""
    model.eval()
    train(model, optimizer, 0, 1, 2)
    model.train()
    train(model, optimizer, 3)
    return []


LOOPS = {
    "eval mode": loop_eval_mode,
    "load best": loop_load_best,
    "validate before step": loop_validate_before_step,
    "writeback": loop_writeback,
    "skipped step": loop_skipped_step,
    "optimizer state": loop_load_optimizer_state,
    "nested no_sync": loop_nested_no_sync,
}


@pytest.mark.covering
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        ("fsdp", {}),
        ("fsdp", {"sharding_strategy": "SHARD_GRAD_OP"}),
        ("fsdp2", {}),
        ("fsdp2", {"sharding_strategy": "SHARD_GRAD_OP"}),
        ("fairscale", {}),
    ],
    ids=["fsdp", "fsdp grad-op", "fsdp2", "fsdp2 grad-op", "fairscale"],
)
@on_ranks()
def test_loops(backend: str, settings: dict[str, Any], name: str) -> None:
    """An engine that still holds whole parameters from an evaluation must not go on with them after a write."""

    def run(chosen: str, given: dict[str, Any]) -> list[Any]:
        model, optimizer = start(chosen, **given)
        return [LOOPS[name](model, optimizer), model.state_dict(), optimizer.state_dict()]

    check_equal(run("ddp", {}), run(backend, settings))


# ------------------------------------------------------------------------------------------------ heads and optimizers


def job_heads(backend: str, how: str) -> dict[str, Any]:
    several = how == "two optimizers"
    model, optimizer = start(
        backend, net() if several else two_heads(), auto_wrap_policy=None, find_unused_parameters=True
    )
    if several:
        names = [name for name, _ in model.named_parameters()]
        parts = (names[:3], names[3:])
        optimizers = [fsshard.build_optimizer(model, torch.optim.AdamW, part, lr=0.01) for part in parts]
    for number in range(3):
        backward(model, number, *([] if several else ["a"]))
        if not several:
            optimizer.zero_grad()  # skipped
            backward(model, number, "b")
        for each in optimizers if several else [optimizer]:
            each.step()
        model.zero_grad()
    return model.state_dict()


@pytest.mark.covering
@pytest.mark.parametrize("how", ["two optimizers", "skipped"])
@pytest.mark.parametrize("backend", DISTRIBUTED[1:])
def test_what_was_used_is_known_per_step_and_optimizer(ranks: Any, backend: str, how: str) -> None:
    reference, mine = ranks.run(job_heads, 2, "ddp", how), ranks.run(job_heads, 2, backend, how)
    assert [list(differences(a, b)) for a, b in zip(reference, mine, strict=True)] == [[], []]
    assert how == "skipped" or not torch.equal(reference[0]["last.weight"], net().last.weight)


def job_fairscale_one_rank_unused() -> dict[str, Any]:
    model, optimizer = start("fairscale", two_heads(), auto_wrap_policy=None)
    for number in range(2):
        backward(model, number, "ab"[dist.get_rank()])
        take_step(optimizer)
    return model.state_dict()


def test_fairscale_needs_no_flag_for_parameters_used_on_some_ranks(ranks: Any) -> None:
    one, other = ranks.run(job_fairscale_one_rank_unused, 2)
    check_equal(one, other)


# ------------------------------------------------------------------------------------------------ frozen, accumulated


@on_backends(DISTRIBUTED)
def test_a_backward_alone_inside_no_sync(backend: str) -> None:
    """DDP decides at the forward and FSDP2 at the backward: raw, one drifts and the other does not move."""
    model, _ = start(backend)
    loss = model(batch(0)).square().mean()
    with model.no_sync(), pytest.raises(ModelError, match=r"both be inside no_sync\(\)"):
        loss.backward()


def loop_zeros(model: Any, optimizer: Any) -> None:
    for number, head in enumerate("abb"):
        backward(model, number, head)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def loop_two_steps(model: Any, optimizer: Any) -> None:
    for number in range(2):
        backward(model, number, "a")
        optimizer.step()
        take_step(optimizer)


def loop_two_heads_accumulated(model: Any, optimizer: Any) -> None:
    for number in range(2):
        for head in "ab":
            backward(model, number, head)
        take_step(optimizer)


def job_kept_gradients(backend: str, how: str) -> dict[str, Any]:
    model, optimizer = start(backend, two_heads(), auto_wrap_policy=None, find_unused_parameters=True)
    {"zeros": loop_zeros, "two steps": loop_two_steps, "accumulated": loop_two_heads_accumulated}[how](model, optimizer)
    return model.state_dict()


@pytest.mark.covering
@pytest.mark.parametrize("how", ["zeros", "two steps", "accumulated"])
@pytest.mark.parametrize("backend", DISTRIBUTED[1:])
def test_gradients_that_were_not_dropped_stay(ranks: Any, backend: str, how: str) -> None:
    """2^-22 for "accumulated", where ddp adds before it averages and the others after; else equal."""
    reference, mine = ranks.run(job_kept_gradients, 2, "ddp", how)[0], ranks.run(job_kept_gradients, 2, backend, how)[0]
    bound = 2.0**-22 if how == "accumulated" else 0.0
    assert max(float((reference[k] - mine[k]).abs().max()) for k in reference) <= bound


# -------------------------------------------------------------------------------- models of other shapes


class Collecting(nn.Module):
    """Appends to a list that it is given, as mixture-of-experts blocks do with their auxiliary losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        y = torch.tanh(self.layer(x))
        losses.append(y.abs().mean())
        return y


class WithAuxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Collecting(), Collecting()

    def forward(self, x: Tensor) -> Tensor:
        losses = []
        y = self.two(self.one(x), []) if not self.training else self.one(x, losses)
        return y + sum(losses)


def auxiliary(backend: str, given: bool) -> list[Any]:
    torch.manual_seed(0)
    module = WithAuxiliary()
    module.two.requires_grad_(False)
    model, optimizer = start(backend, module, auto_wrap_policy={Collecting} if given else None)
    losses = []
    for number in range(3):
        loss = model(batch(number)).square().mean()
        loss.backward()
        take_step(optimizer)
        losses.append(float(loss.detach()))
    return losses


def logged_forward(backend: str, given: bool) -> list[Any]:
    model, optimizer = start(backend)
    for number in range(2):
        backward(model, number)
        if given:
            model.eval()
            with model.no_sync():
                model(batch(9))  # never sent backward
            model.train()
        take_step(optimizer)
    return [model.state_dict()]


def inference_first(backend: str, given: bool) -> list[Any]:
    """Lightning's sanity check does that; what an engine allocates in inference mode could never be trained."""
    model, optimizer = start(backend)
    if given:
        with torch.inference_mode():
            model(torch.ones(2, 4))
    train(model, optimizer, 0)
    weights = model.state_dict()
    weights.pop("steps")
    return [weights]


def checkpointed_by_torch(backend: str, given: bool) -> list[Any]:
    """Torch's activation checkpointing before wrap: the same, under the same names."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    module = net()
    if given:
        apply_activation_checkpointing(module, check_fn=lambda m: isinstance(m, Spectral))
    model, optimizer = start(backend, module)
    train(model, optimizer, 0, 1, 2)
    return [[name for name, _ in model.named_parameters()], model.state_dict(), optimizer.state_dict()]


CHANGES_NOTHING = {
    "a list argument is appended to": auxiliary,
    "a forward without backward": logged_forward,
    "inference mode before training": inference_first,
    "torch's activation checkpointing": checkpointed_by_torch,
}


@pytest.mark.fairscale_row(41)
@pytest.mark.covering
@pytest.mark.parametrize("what", CHANGES_NOTHING)
@on_backends(DISTRIBUTED)
def test_it_changes_no_training(backend: str, what: str) -> None:
    check_equal(CHANGES_NOTHING[what]("ddp", False), CHANGES_NOTHING[what](backend, True))


# ------------------------------------------------------------------------------------------------ settings and ranks


@pytest.mark.parametrize("backend", DISTRIBUTED)
@on_ranks()
def test_broadcast_buffers_can_be_left_out(backend: str) -> None:
    module = net()
    model, optimizer = start(backend, module, broadcast_buffers=False)
    if dist.get_rank() == 1:
        module.steps += 100
    train(model, optimizer, 0, 1)
    assert int(module.steps) == 2 + 100 * dist.get_rank()


ASKED: dict[str, list[dict[str, Any]]] = {
    "backend": [{"backend": "fsdp2"}, {"backend": "ddp"}],
    "policy": [{"backend": "fsdp2", "auto_wrap_policy": None}, {"backend": "fsdp2"}],
    "flag": [{"backend": "ddp", "find_unused_parameters": True}, {"backend": "ddp"}],
    "option": [{"backend": "fsdp2", "reshard_after_forward": True}, {"backend": "fsdp2"}],
}


@pytest.mark.parametrize("what", ASKED)
@on_ranks()
def test_ranks_that_ask_for_different_things(what: str) -> None:
    with pytest.raises(RankMismatch) as raised:
        fsshard.wrap(net(), **ASKED[what][dist.get_rank()])
    assert "were asked for different things" in str(raised.value)


@on_ranks()
def test_a_frozen_backbone_is_not_sent_at_each_step() -> None:
    layers = [nn.Linear(4, 4) for _ in range(6)]
    for layer in layers[:5]:
        layer.requires_grad_(False)
    model, optimizer = start("fairscale", nn.Sequential(*layers))
    train(model, optimizer, 0)
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as sent:
        train(model, optimizer, 1)
    last_layer = 2 * 16  # numbers of two parameters, each at a multiple of 64 bytes
    assert sum((*call.args, *call.kwargs.values())[0].numel() for call in sent.call_args_list) <= last_layer
