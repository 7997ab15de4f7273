"""The plan of a transformer: every way of naming its blocks means the same units, under every engine."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

import fsshard
from tests.training_runs import DISTRIBUTED, Run, differences, ranks_of, train
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


def job_units(backend: str, spelling: str) -> tuple[list[str], tuple[Any, ...], str, set[str]]:
    model = fsshard.wrap(ZOO["t5"].build(), backend=backend, auto_wrap_policy=spellings()[spelling])
    plan = model.plan
    root = {name for name, info in plan.parameters.items() if info.unit == ""}
    return [unit.name for unit in plan.units], plan.ties, plan.parameters["shared.weight"].unit, root


@pytest.mark.covering
@pytest.mark.parametrize("backend", [*DISTRIBUTED, "none"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_means_the_same_units(ranks: Any, backend: str, spelling: str) -> None:
    for units, ties, embedding, root in ranks.run(job_units, ranks_of(backend), backend, spelling):
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


def job_trained(backend: str, spelling: str) -> list[str]:
    settings = {"auto_wrap_policy": spellings()[spelling]}
    plain = train(Run(case="t5", steps=2))
    other = train(Run(case="t5", backend=backend, steps=2, settings={**settings, "activation_checkpointing": True}))
    return list(differences(vars(plain), vars(other)))


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_torchs_policy_trains_the_same_weights(ranks: Any, backend: str) -> None:
    assert ranks.run(job_trained, 2, backend, "torch's transformer policy") == [[], []]
