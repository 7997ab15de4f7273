"""Checks that what fsshard changes in the process is undone with the last object that needs it."""

from __future__ import annotations

import gc
import subprocess
import sys
import types
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsshard.patches import PATCHES, Patch

BACKENDS = ("ddp", "fsdp", "fsdp2", "fairscale", "domain")
LIBRARIES = ("torch", "neuralop", "os", "multiprocessing", "warnings", "gc")


class Needing:
    """Anything that can be referred to weakly."""


def test_a_change_lasts_as_long_as_what_needs_it() -> None:
    changes = []

    def put(patch: Patch) -> Any:
        changes.append("put")
        return lambda: changes.append("undone")

    patch, one, other, ask = Patch(put), Needing(), Needing(), lambda: 1
    for needing in (one, one, other):
        patch.keep_for(needing, ask)
    assert (changes, patch.functions, patch.needing(ask)) == (["put"], [ask], [one, other])
    del one, needing
    assert (changes, patch.in_place) == (["put"], True)
    del other
    assert (changes, patch.in_place, patch.functions) == (["put", "undone"], False, [])
    again = Needing()
    patch.keep_for(again, ask)
    assert changes == ["put", "undone", "put"]


def test_there_are_six_and_the_docstring_names_each() -> None:
    import fsshard.patches

    assert len(PATCHES) == 6
    assert all(f"``{name}``" in str(fsshard.patches.__doc__) for name in PATCHES)


def test_the_process_is_as_before() -> None:
    run = subprocess.run([sys.executable, "-m", "tests.test_patches"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def holders() -> list[tuple[str, Any]]:
    """The modules and classes of these libraries that are there by now."""
    modules = [
        (name, module)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in LIBRARIES and isinstance(module, types.ModuleType)
    ]
    classes = [
        (f"{name}:{kind.__name__}", kind)
        for name, module in modules
        for kind in list(vars(module).values())
        if isinstance(kind, type) and kind.__module__ == name
    ]
    return [*modules, *classes]


def state(places: list[tuple[str, Any]]) -> dict[Any, Any]:
    """Whatever can be called there, by its place, and the registers of hooks."""
    from torch.distributed.tensor import DTensor
    from torch.optim import optimizer

    found = {
        (owner, name): value
        for owner, holder in places
        for name, value in list(vars(holder).items())
        if callable(value) or isinstance(value, staticmethod)
    }
    hooks = {name: held for name, held in vars(nn.modules.module).items() if name.endswith("_hooks")}
    return found | {
        "optimizer hooks": [*optimizer._global_optimizer_pre_hooks, *optimizer._global_optimizer_post_hooks],
        "module hooks": [len(held) for held in hooks.values() if isinstance(held, dict)],
        "DTensor handlers": [*DTensor._op_dispatcher._custom_op_handlers],
        "warnings": [each for each in warnings.filters if "GradScaler is going to stop" not in str(each[1])],
    }


def differences(before: dict[Any, Any], now: dict[Any, Any]) -> list[str]:
    return sorted(str(key) for key in before if now.get(key) is not before[key] and now.get(key) != before[key])


def train(backend: str) -> Any:
    """A wrapped model, or a split domain, that has taken some steps."""
    import fsshard

    if backend == "domain":
        from neuralop.models import FNO

        from fsshard.parallel import shard_domain

        model = FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=4, n_layers=1)
        return model, shard_domain(model, dist.init_device_mesh("cpu", (1,)))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 4))
    layers[1].register_forward_pre_hook(lambda module, inputs: inputs[0].to(torch.complex64))
    layers[1].register_forward_hook(lambda module, inputs, output: output.real)
    wrapped = fsshard.wrap(layers, backend=backend, auto_wrap_policy=1)
    optimizer = fsshard.build_optimizer(wrapped, torch.optim.Adam, lr=0.1)
    for _ in range(2):
        wrapped(torch.ones(2, 4)).sum().backward()
        wrapped.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return wrapped, optimizer


def main() -> None:
    import neuralop.losses  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401

    warnings.simplefilter("ignore")  # torch names deprecated things of its own when they are looked at
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    places = holders()
    before = state(places)
    import fsshard
    import fsshard.parallel  # noqa: F401

    assert differences(before, state(places)) == [], "import fsshard has changed the process"
    for backend in BACKENDS:
        kept = train(backend)
        changed = differences(before, state(places))
        assert changed, f"{backend}: this comparison sees nothing"
        del kept
        gc.collect()
        left = [name for name, patch in PATCHES.items() if patch.in_place and name != "END_OF_PROCESS"]
        assert (left, differences(before, state(places))) == ([], []), f"{backend} leaves something behind"


if __name__ == "__main__":
    main()
