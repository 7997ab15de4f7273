"""Activation checkpointing: the matched block itself, recomputed once, with the same numbers, under every engine."""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import fairscale.nn.checkpoint
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy
from torch.utils.checkpoint import CheckpointError

import fsshard
import fsshard.compat.fairscale.nn.checkpoint as front
from fsshard import Checkpointing
from fsshard.errors import ConfigurationError
from fsshard.model.activation_checkpointing import checkpoint_blocks
from fsshard.model.recomputation import RecomputationError
from tests.model.recomputed import BLOCKS, LAYOUTS, Counter, stack, train
from tests.model.recomputed import Block as HardBlock
from tests.models import with_adam
from tests.on_ranks import on_backends, on_ranks
from tests.sets import often
from tests.training_runs import DISTRIBUTED, check_equal, differences, ranks_of
from tests.zoo import ZOO

BACKENDS = (*DISTRIBUTED, "none")


class Block(nn.Module):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.counter = nn.Linear(4, 4), nn.Dropout(0.5), Counter()

    def forward(self, x: Tensor) -> Tensor:
        self.counter.count += 1
        return torch.tanh(self.drop(self.linear(x)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(4, 4), Block(), nn.Linear(4, 1))


def gradients(net: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    net(torch.ones(3, 4)).sum().backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


# ------------------------------------------------------------------------------------------ which blocks

CHOICES: list[tuple[Any, list[str]]] = [
    ({Block}, ["0", "2"]),
    ([Block, nn.Dropout], ["0", "2"]),
    (lambda module: isinstance(module, Block) and module.linear.in_features == 4, ["0", "2"]),
    (ModuleWrapPolicy({Block}), ["0", "2"]),
    (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), ["0", "2"]),
    (Checkpointing({Block}), ["0", "2"]),
    (Checkpointing(None), []),
]


@pytest.mark.parametrize(("choice", "blocks"), CHOICES)
def test_blocks_are_recomputed_with_the_same_numbers(choice: Any, blocks: list[str]) -> None:
    plain, other = model(), model()
    assert list(fsshard.plan(other, activation_checkpointing=choice).recomputed) == blocks
    assert checkpoint_blocks(other, choice) == blocks
    for one, two in zip(gradients(plain), gradients(other), strict=True):
        assert torch.equal(one, two)
    assert [net[i].counter.count for net in (plain, other) for i in (0, 2)] == [1, 1, *([2, 2] if blocks else [1, 1])]
    assert list(other.state_dict()) == list(plain.state_dict())
    assert type(other[0]) is Block


def test_explain_says_how_many_and_which() -> None:
    text = fsshard.plan(stack(), activation_checkpointing={HardBlock}).explain()
    assert f"recomputed in backward: 4 blocks (is a Block): {', '.join(BLOCKS)}" in text
    assert "recomputed" not in fsshard.plan(stack()).explain()


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({nn.LSTM}, r"activation_checkpointing: the model has no LSTM; it has Block, Dropout, Linear, Sequential"),
        (True, r"the root as its only unit; name the classes .*The model has Block, Dropout, Linear, Sequential"),
        (lambda module: False, "matches no block"),
        (3, "expected None, True"),
    ],
)
def test_bad_choices(choice: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        checkpoint_blocks(model(), choice)


def test_a_module_that_is_never_called_is_refused() -> None:
    attention = nn.Sequential(nn.MultiheadAttention(4, 2))
    with pytest.raises(ConfigurationError, match="matches no block"):  # its Linear is read, not called
        fsshard.plan(attention, activation_checkpointing=lambda module: isinstance(module, nn.Linear))
    script = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(ConfigurationError, match="a forward that cannot be replaced"):
        fsshard.plan(script, activation_checkpointing=lambda module: isinstance(module, torch.jit.ScriptModule))


# ------------------------------------------------------------------------------------------ under the engines


@pytest.mark.covering
@pytest.mark.parametrize(("layout", "backend"), [*itertools.product(LAYOUTS, BACKENDS)])
@on_ranks(ranks_of)
def test_nothing_but_the_forwards_changes(backend: str, layout: str) -> None:
    """Losses, gradients, weights, statistics and the generators equal to the last bit; each block runs twice a step."""
    units, choice = LAYOUTS[layout]
    plain = train(backend, auto_wrap_policy=units)
    other = train(backend, auto_wrap_policy=units, activation_checkpointing=choice)
    once, twice = plain.pop("calls"), other.pop("calls")
    assert once == [[step] * 4 for step in (1, 2, 3)]
    found = list(differences(plain, other))
    calls = twice
    assert found == []
    assert calls == [[2 * step] * 4 for step in (1, 2, 3)]


def job_saved_bytes(backend: str, choice: Any) -> int:
    """Bytes of activations that one forward keeps for the backward pass, told by their number of rows."""
    net = fsshard.wrap(stack(), backend=backend, auto_wrap_policy={HardBlock}, activation_checkpointing=choice)
    fsshard.build_optimizer(net, torch.optim.SGD, lr=0.1)
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        if 64 in tensor.shape:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = net(torch.randn(64, 4)).sum()
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_fewer_bytes_are_saved(ranks: Any, backend: str) -> None:
    plain, recomputed = (ranks.run(job_saved_bytes, ranks_of(backend), backend, each) for each in (None, {HardBlock}))
    assert all(0 < some < every / 2 for some, every in zip(recomputed, plain, strict=True))


# ------------------------------------------------------------------------------------------ random numbers


def test_without_random_state_dropout_is_another(caplog: pytest.LogCaptureFixture) -> None:
    plain, other = model(), model()
    checkpoint_blocks(other, Checkpointing({Block}, preserve_rng_state=False))
    assert not all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(other), strict=True))
    assert "preserve_rng_state=False): Dropout in recomputed blocks" in caplog.text


# ------------------------------------------------------------------------------------------ wrapped before

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "FairScale's": fairscale.nn.checkpoint.checkpoint_wrapper,
    "FairScale's with offloading": functools.partial(fairscale.nn.checkpoint.checkpoint_wrapper, offload_to_cpu=True),
    "ours": front.checkpoint_wrapper,
}


def wrapped_before(wrapper: str) -> nn.Module:
    """The second block of each pair is wrapped by hand."""
    module = stack()
    for pair in module.pairs:
        pair.two = WRAPPERS[wrapper](pair.two)
    return module


WRAPPED = [
    ("FairScale's", "in the root, which is the only unit"),
    ("FairScale's with offloading", "the units"),
    ("ours", "around units"),
]


@pytest.mark.covering
@pytest.mark.parametrize(("wrapper", "layout", "backend"), [(*how, backend) for how in WRAPPED for backend in BACKENDS])
@on_ranks(ranks_of)
def test_a_wrapper_of_before_is_honoured_everywhere(wrapper: str, backend: str, layout: str) -> None:
    """FairScale's, reentrant as it is, fails under FSDP1 inside of a unit, and sums in another order."""
    import tests.model.recomputed as jobs

    units, choice = LAYOUTS[layout]
    plain = train(backend, auto_wrap_policy=units)
    jobs.stack = functools.partial(wrapped_before, wrapper)  # type: ignore[assignment]
    try:
        for asked in (None, choice):
            other = train(backend, auto_wrap_policy=units, activation_checkpointing=asked)
            calls = other.pop("calls")[0]
            assert calls == ([1, 2, 1, 2] if asked is None else [2, 2, 2, 2]), calls
            check_equal({k: v for k, v in plain.items() if k != "calls"}, other)
    finally:
        jobs.stack = stack


# ------------------------------------------------------------------------------------------ caches and other state


@on_backends(often(BACKENDS, "fsdp2", "none"))
def test_caches_are_turned_off_with_one_line(backend: str) -> None:
    """Left on, T5 raises CheckpointError, and GPT-2's cache holds everything twice."""
    from transformers import T5ForConditionalGeneration

    def build() -> T5ForConditionalGeneration:
        net = ZOO["t5"].build()
        net.config.use_cache = net.decoder.config.use_cache = True
        return net

    said = []
    traces = []
    with mock.patch.object(logging.getLogger("fsshard"), "warning", lambda text, *_: said.append(text)):
        for choice in (None, True):
            net, optimizer = with_adam(build(), backend=backend, activation_checkpointing=choice)
            loss = net(**ZOO["t5"].batch(dist.get_rank(), 0)).loss
            loss.backward()
            optimizer.step()
            traces.append({"loss": loss.item(), **net.state_dict()})
    configs = [net.config.use_cache, net.encoder.config.use_cache, net.decoder.config.use_cache]
    assert configs == [False] * 3
    assert len([text for text in said if "use_cache" in text]) == (dist.get_rank() == 0)
    check_equal(*traces)


class Cached(nn.Module):
    """Adds to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, state: Any) -> Tensor:
        taken = state()
        return torch.tanh(self.linear(x) * taken) if taken else self.linear(x)


class WithState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Cached()])

    def forward(self, x: Tensor, state: Any) -> Tensor:
        return self.blocks[0](x, state)


@pytest.mark.parametrize("state", [iter([1]), (x for x in [1]), [iter([1])]])
def test_iterators_are_refused(state: Any) -> None:
    net = WithState()
    checkpoint_blocks(net, {Cached})
    with pytest.raises(RecomputationError, match=r"block 'blocks.0' .* is an iterator \(a (list_iterator|generator)\)"):
        net(torch.ones(2, 4), state)


class Drawing(nn.Module):
    """Computes with Python's and numpy's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * (random.random() + float(np.random.rand())))


def drawing(choice: Any) -> list[Any]:
    """Two steps of a block that is called twice in each."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    net, found = nn.Sequential(nn.Linear(4, 4), block := Drawing(), block), list[Any]()
    checkpoint_blocks(net, choice)
    for _ in range(2):
        net(torch.ones(2, 4)).sum().backward()
        found += [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    return [*found, random.random(), np.random.rand()]


def test_other_random_numbers_are_drawn_again() -> None:
    plain = drawing(None)
    check_equal(plain, drawing({Drawing}))
    assert list(differences(plain, drawing(Checkpointing({Drawing}, preserve_rng_state=False)))) != []


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=40, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize(("build", "block"), [(ZOO["t5"].build, "decoder.block.0"), (gpt2, "transformer.h.0")])
def test_a_cache_that_is_asked_for_all_the_same_is_refused(build: Callable[[], nn.Module], block: str) -> None:
    net = build()
    checkpoint_blocks(net, True)
    tokens = torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(RecomputationError, match=rf"block '{block}' .* its forward fills a \w*Cache.*use_cache=False"):
        net(input_ids=tokens, labels=tokens, use_cache=True)
    with torch.no_grad():  # where nothing is recomputed, a cache is welcome
        net.generate(tokens, max_new_tokens=2, use_cache=True)


def test_torchs_error_names_the_block() -> None:
    """Its text tells numbers of tensors and shapes only."""
    net, answers = WithState(), iter([True, False])
    checkpoint_blocks(net, {Cached})
    loss = net(torch.ones(2, 4), lambda: next(answers)).sum()
    with pytest.raises(
        CheckpointError, match=r"(?s)block 'blocks.0' \(Cached\) cannot .*A different number of tensors"
    ) as e:
        loss.backward()
    assert isinstance(e.value, RecomputationError)
