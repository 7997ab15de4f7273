"""FairScale's names: where each can be had, with its signature.

Tests compat/fairscale/nn/misc/checkpoint_activations.py, compat/fairscale/version.py too.
"""

from __future__ import annotations

import configparser
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import fsshard.compat.fairscale as mirror

PLACES = {
    "nn.checkpoint.checkpoint_activations": (
        (
            *("checkpoint_wrapper", "disable_checkpointing", "enable_checkpointing", "enable_recomputing"),
            *("is_checkpointing", "is_recomputing"),
        ),
        ("nn", "nn.checkpoint", "nn.misc", "nn.misc.checkpoint_activations"),
    ),
    "nn.checkpoint.checkpoint_utils": (("patch_batchnorm",), ("nn.checkpoint",)),
    "nn.data_parallel.fully_sharded_data_parallel": (
        ("FullyShardedDataParallel", "auto_wrap_bn", "get_fsdp_instances"),
        ("nn", "nn.data_parallel"),
    ),
    "nn.data_parallel.sharded_ddp": (("ShardedDataParallel",), ("nn", "nn.data_parallel")),
    "nn.wrap.auto_wrap": (
        ("wrap", "auto_wrap", "enable_wrap", "default_auto_wrap_policy", "config_auto_wrap_policy", "ConfigAutoWrap"),
        ("nn", "nn.wrap"),
    ),
    "optim.grad_scaler": (("GradScaler", "ShardedGradScaler"), ()),
    "optim.oss": (("OSS",), ("optim",)),
}
"""Module -> its names that can be called, and other modules that have some of them."""
METHODS = {
    "FullyShardedDataParallel": (
        *("__init__", "set_gradient_divide_factors", "apply", "state_dict", "local_state_dict"),
        *("load_state_dict", "load_local_state_dict", "no_sync", "reset_parameters", "summon_full_params", "forward"),
        *("local_metadata_dict", "consolidate_shard_weights", "assert_state", "gather_full_optim_state_dict"),
        *("get_shard_from_optim_state_dict", "named_parameters"),
    ),
    "ConfigAutoWrap": ("__init__", "enable_autowrap_context", "disable_autowrap_context", "recursive_wrap"),
}


def signature(found: Any) -> list[tuple[Any, ...]]:
    parameters = inspect.signature(found).parameters.values()
    return [(p.name, p.kind, getattr(p.default, "value", p.default)) for p in parameters]  # enumerations of each side


@pytest.mark.parametrize("place", PLACES)
def test_signatures_and_addresses(place: str) -> None:
    theirs, ours = (importlib.import_module(f"{root}.{place}") for root in ("fairscale", mirror.__name__))
    names, elsewhere = PLACES[place]
    for name in names:
        one, other = getattr(theirs, name), getattr(ours, name)
        for method in METHODS.get(name, ("__init__",)) if inspect.isclass(one) else ("",):
            both = [signature(getattr(each, method) if method else each) for each in (one, other)]
            assert both[0] == both[1], f"{name}.{method}"
        if inspect.isclass(one) and name != "FullyShardedDataParallel":
            assert {each for each in vars(one) if not each.startswith("_")} <= set(dir(other)), name
    for room in elsewhere:
        package = importlib.import_module(f"{mirror.__name__}.{room}")
        had = [name for name in names if hasattr(package, name)]
        assert had and all(getattr(package, name) is getattr(ours, name) for name in had), room


def test_the_release_is_the_one_that_the_extra_names() -> None:
    from fsshard.compat.fairscale.version import __version_tuple__

    assert mirror.__version__ == ".".join(map(str, __version_tuple__))
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).resolve().parents[3] / "setup.cfg")
    assert setup["options.extras_require"]["fairscale"].split() == [f"fairscale=={mirror.__version__}"]
