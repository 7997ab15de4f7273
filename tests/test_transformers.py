"""The plan of a transformer: every way of naming its blocks means the same units, under every engine."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

import fsshard
from fsshard.errors import UnsupportedByBackend
from tests.models import take_step
from tests.on_ranks import on_backends, on_ranks
from tests.sets import often
from tests.training_runs import DISTRIBUTED, Run, check_equal, ranks_of, train
from tests.zoo import ZOO

BLOCKS = ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]
TIED = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")


def spellings() -> dict[str, Any]:
    """Name -> auto_wrap_policy."""
    from transformers.models.t5.modeling_t5 import T5Block

    return {
        "auto": "auto",
        "class": {T5Block},
        "name": {"T5Block"},
        "callable": lambda module: isinstance(module, T5Block),
        "torch's transformer policy": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
        "torch's module policy": ModuleWrapPolicy({T5Block}),
    }


SPELLINGS = list(spellings())


@pytest.mark.covering
@pytest.mark.parametrize("backend", [*DISTRIBUTED, "none"])
@pytest.mark.parametrize("spelling", SPELLINGS)
@on_ranks(ranks_of)
def test_every_spelling_means_the_same_units(backend: str, spelling: str) -> None:
    model = fsshard.wrap(ZOO["t5"].build(), backend=backend, auto_wrap_policy=spellings()[spelling])
    plan = model.plan
    root = {name for name, info in plan.parameters.items() if info.unit == ""}
    units = [unit.name for unit in plan.units]
    ties = plan.ties
    embedding = plan.parameters["shared.weight"].unit
    assert units == ["", *BLOCKS]
    assert [set(names) for names in ties] == [set(TIED)]
    assert embedding == ""
    assert root == {"shared.weight", "encoder.final_layer_norm.weight", "decoder.final_layer_norm.weight"}


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset, lambda names: next(iter(names))])
@pytest.mark.parametrize("on_class", [True, False])
def test_no_split_modules_in_any_form(kind: Any, on_class: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net = ZOO["t5"].build()
    for module in net.modules():
        module.__dict__.pop("_no_split_modules", None)
    classes = [cls for module in net.modules() for cls in type(module).__mro__ if "_no_split_modules" in vars(cls)]
    for cls in dict.fromkeys(classes):
        monkeypatch.setattr(cls, "_no_split_modules", None)
    assert [unit.name for unit in fsshard.plan(net).units] == [""]
    monkeypatch.setattr(type(net) if on_class else net, "_no_split_modules", kind(["T5Block"]), raising=False)
    assert [unit.name for unit in fsshard.plan(net).units] == ["", *BLOCKS]
    outer = nn.Sequential(nn.Linear(2, 2), net)  # a model may hold one of transformers
    assert [unit.name for unit in fsshard.plan(outer).units] == ["", *(f"1.{name}" for name in BLOCKS)]


@on_backends(often(DISTRIBUTED, "fairscale", "fsdp2"))
def test_torchs_policy_trains_the_same_weights(backend: str) -> None:
    spelling = "torch's transformer policy"
    settings = {"auto_wrap_policy": spellings()[spelling]}
    plain = train(Run(case="t5", steps=2))
    other = train(Run(case="t5", backend=backend, steps=2, settings={**settings, "activation_checkpointing": True}))
    check_equal(vars(plain), vars(other))


def speech(layerdrop: float) -> Any:
    """A model whose layers are left out at random; FSDP switches that off by itself (``is_fsdp_managed_module``)."""
    from transformers import Wav2Vec2BertConfig, Wav2Vec2BertModel

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "feature_projection_input_dim": 8}
    no_masks = {"apply_spec_augment": False, "position_embeddings_type": None, "conv_depthwise_kernel_size": 3}
    torch.manual_seed(0)
    return Wav2Vec2BertModel(Wav2Vec2BertConfig(**sizes, **no_masks, num_hidden_layers=3, layerdrop=layerdrop))


def text(layerdrop: float) -> Any:
    """A model that keeps the setting in its modules, and leaves layers out under FSDP, too."""
    from transformers import BartConfig, BartModel

    sizes = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 20, "max_position_embeddings": 16}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return BartModel(BartConfig(**sizes, **layers, encoder_layerdrop=layerdrop))


def trained(model: Any, optimizer: Any, replicas: bool) -> dict[str, Any]:
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(2, 5, 8)).last_hidden_state.square().mean().backward()
        for parameter in model.parameters() if replicas else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad.div_(2))
        take_step(optimizer)
    return dict(model.state_dict())


@on_ranks()
def test_layer_drop_is_right_or_refused() -> None:
    """The states with LayerDrop, the first one of bare replicas; and without it, as the error says."""
    dropped, whole = [], []
    for layerdrop, states in ((0.5, dropped), (0.0, whole)):
        bare = speech(layerdrop)
        states.append(trained(bare, torch.optim.SGD(bare.parameters(), lr=0.1), True))
    for backend in ("ddp", "fairscale"):
        model = fsshard.wrap(speech(0.5), backend=backend, find_unused_parameters=True)
        dropped.append(trained(model, fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1), False))
    for backend in ("fsdp", "fsdp2"):
        for build in (text, speech):
            inner = build(0.5)
            with pytest.raises(UnsupportedByBackend, match="LayerDrop") as raised:
                fsshard.wrap(inner, backend=backend)
            exec(str(raised.value).split("`")[1], {"model": inner})
            model = fsshard.wrap(inner, backend=backend, find_unused_parameters=True)  # the embedding of masks
        whole.append(trained(model, fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1), False))
    found = dropped, whole
    for replicas, *wrapped in found:
        for state in wrapped:
            check_equal(replicas, state)
