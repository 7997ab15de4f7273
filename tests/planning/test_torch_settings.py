"""Arguments of torch's own wrappers, and what becomes of each under every backend: docs/torch-arguments.md."""

from __future__ import annotations

import functools
import re
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

import fsshard
from fsshard.errors import ConfigurationError, FsshardError
from fsshard.planning.torch_settings import in_our_words
from tests.models import batch, net, with_sgd
from tests.on_ranks import on_ranks
from tests.sets import often
from tests.training_runs import DISTRIBUTED, ranks_of

ALL = ("none", *DISTRIBUTED)


def job_wrap(backend: str, settings: list[dict[str, Any]]) -> list[str]:
    """Return what each of ``settings`` leads to: "" where the model trains a step, else the error."""
    found = []
    for some in settings:
        try:
            model, optimizer = with_sgd(net(), backend=backend, **some)
            model(batch(0)).sum().backward()
            optimizer.step()
        except FsshardError as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("")
    return found


def outcomes(ranks: Any, backend: str, settings: list[dict[str, Any]]) -> list[str]:
    """The same on every rank."""
    answers = ranks.run(job_wrap, ranks_of(backend), backend, settings)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


STRATEGIES = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD")
TAKES = {
    "none": STRATEGIES,
    "ddp": ("NO_SHARD",),
    "fairscale": ("SHARD_GRAD_OP",),
    "fsdp": ("SHARD_GRAD_OP", "FULL_SHARD"),
    "fsdp2": ("SHARD_GRAD_OP", "FULL_SHARD"),
}
NEAREST = {
    "NO_SHARD": "use backend='ddp'",
    "SHARD_GRAD_OP": "use backend='fairscale' or 'fsdp2' or 'fsdp'",
    "FULL_SHARD": "use backend='fsdp2' or 'fsdp'",
    "HYBRID_SHARD": "use backend='fsdp2' or 'fsdp'",
    "_HYBRID_SHARD_ZERO2": "use backend='fairscale' or 'fsdp2' or 'fsdp'",
}


@pytest.mark.parametrize("backend", ALL)
def test_strategies(ranks: Any, backend: str) -> None:
    forms = [form for name in STRATEGIES for form in (ShardingStrategy[name], name.lower())]
    found = outcomes(ranks, backend, [{"sharding_strategy": form} for form in forms])
    for form, text in zip(forms, found, strict=True):
        name = getattr(form, "name", form).upper()
        if name in TAKES[backend]:
            assert text == ""
            continue
        assert text.startswith(f"UnsupportedByBackend: backend {backend!r} cannot honour sharding_strategy={name!r}")
        assert NEAREST[name] in text and "or leave it out" in text
        for other, strategies in TAKES.items():  # each engine, and what it offers
            line = next(part for part in re.split("[:;] ", text) if part.startswith(f"{other} "))
            assert {item for item in STRATEGIES if item in line} == set(strategies)


@pytest.mark.parametrize("backend", ALL)
def test_hybrid_strategies_name_who_has_them(ranks: Any, backend: str) -> None:
    """And who has them wants a mesh."""
    names = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
    for name, text in zip(names, outcomes(ranks, backend, [{"sharding_strategy": n} for n in names]), strict=True):
        has = backend in ("fsdp", "fsdp2") or (backend, name) == ("fairscale", "_HYBRID_SHARD_ZERO2")
        assert text.startswith("UnsupportedByBackend")
        assert ("pass device_mesh=init_device_mesh" if has else NEAREST[name]) in text


def test_what_is_no_strategy(ranks: Any) -> None:
    for text in outcomes(ranks, "fsdp2", [{"sharding_strategy": what} for what in ("zero3", 3)]):
        assert text.startswith("ConfigurationError") and "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD" in text


# ------------------------------------------------------------------------------------------ the other arguments

TAKEN: list[dict[str, Any]] = [
    {"use_orig_params": True},
    {"sync_module_states": True},
    {"cpu_offload": CPUOffload(offload_params=False)},
    {"cpu_offload": None},
    {"offload_policy": OffloadPolicy()},
    {"device_id": torch.device("cpu")},
    {"device_ids": None, "output_device": None, "dim": 0},
    {"process_group": None},
    {"mesh": None},
    {"forward_prefetch": True},
    {"forward_prefetch": False},
    {"limit_all_gathers": True},
    {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE},
    {"ignored_modules": None, "ignored_states": [], "ignored_params": set()},
    {"shard_placement_fn": None},
    {"init_sync": True},
    {"bucket_cap_mb": 10, "gradient_as_bucket_view": False},
    {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=20)},
]
"""Scripts of tutorials have these; they mean the same, or what is done anyway, under every backend."""

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_orig_params": False}, "keep their names"),
    ({"ignored_modules": [nn.Linear(2, 2)]}, "not the model's"),
    ({"ignored_params": [nn.Parameter(torch.zeros(2))]}, "not the model's"),
    ({"shard_placement_fn": print}, "leave it out"),
    ({"device_ids": [0, 1]}, "a process per GPU"),
    ({"dim": 1}, "leave it out"),
    ({"process_group": (None, None)}, "init_device_mesh"),
    ({"offload_policy": "cpu"}, "CPUOffloadPolicy"),
    ({"device": "cpu", "device_id": torch.device("meta")}, "drop one"),
]


@pytest.mark.parametrize("backend", often(ALL, "fsdp", "fsdp2", "none"))
def test_arguments_of_torchs_wrappers(ranks: Any, backend: str) -> None:
    some = [settings for settings in TAKEN if "mixed_precision" not in settings and "mp_policy" not in settings]
    assert dict(zip(map(str, some), outcomes(ranks, backend, some), strict=True)) == dict.fromkeys(map(str, some), "")
    for (_, text), found in zip(REFUSED, outcomes(ranks, backend, [s for s, _ in REFUSED]), strict=True):
        assert found.startswith("ConfigurationError: ") and text in found


def test_torchs_policies_of_precision_are_the_same_setting() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert in_our_words({"mp_policy": policy, "backend": "ddp"}) == {"mixed_precision": policy, "backend": "ddp"}
    assert in_our_words({"offload_policy": CPUOffloadPolicy()}) == {"cpu_offload": True}
    assert in_our_words({"device_id": 1}) == in_our_words({"device_ids": [1]}) == {"device": torch.device("cuda", 1)}
    with pytest.raises(ConfigurationError, match="pin_memory"):
        in_our_words({"offload_policy": CPUOffloadPolicy(pin_memory=False)})


@on_ranks(3)
def test_a_process_group_of_some_ranks() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    mine = pairs[dist.get_rank() // 2]
    model = fsshard.wrap(net(), backend="fsdp2", process_group=mine)
    model(batch(0)).sum().backward()
    settings = model.backend.settings
    assert (settings.world_size, settings.rank) == [(2, 0), (2, 1), (1, 0)][dist.get_rank()]


def test_what_only_some_engines_can_order(ranks: Any) -> None:
    late = [{"backward_prefetch": BackwardPrefetch.BACKWARD_POST}]
    for backend in ("none", "ddp", "fairscale", "fsdp"):
        assert outcomes(ranks, backend, late) == [""]
    (text,) = outcomes(ranks, "fsdp2", late)
    assert text.startswith("UnsupportedByBackend") and "leave it out" in text and "backend='fsdp'" in text


def test_an_engines_own_option_names_the_engine(ranks: Any) -> None:
    for backend in ("none", "ddp", "fairscale", "fsdp"):
        own, unknown = outcomes(ranks, backend, [{"reshard_after_forward": False}, {"resharding": 1}])
        assert "got one of backend='fsdp2'; leave it out" in own
        assert "resharding=: expected an argument of fsshard.wrap" in unknown


@on_ranks(1)
def test_no_use_is_said_once() -> None:
    with unittest.TestCase().assertLogs("fsshard", "INFO") as logs:
        fsshard.wrap(net(), backend="none", forward_prefetch=True, limit_all_gathers=True)
    assert [record.getMessage() for record in logs.records if "ignores" in record.getMessage()] == [
        "backend 'none' ignores forward_prefetch, limit_all_gathers"
    ]


def test_the_documented_table_has_every_word() -> None:
    table = (Path(__file__).parents[2] / "docs" / "torch-arguments.md").read_text(encoding="utf-8")
    for word in {word for settings in (*TAKEN, *(s for s, _ in REFUSED)) for word in settings}:
        assert f"`{word}" in table, word
