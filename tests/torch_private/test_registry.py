"""Every private name that is used is there, or what stands for it does what it says.

Tests fsshard/torch_private/autograd.py, fsshard/torch_private/c10d.py, fsshard/torch_private/compiling.py,
fsshard/torch_private/ddp.py, fsshard/torch_private/dispatch.py, fsshard/torch_private/fake_tensors.py,
fsshard/torch_private/fsdp1.py, fsshard/torch_private/fsdp2.py,
fsshard/torch_private/fsdp2_collectives.py, fsshard/torch_private/modules.py,
fsshard/torch_private/optimizers.py,
fsshard/torch_private/tensors.py too.
"""

from __future__ import annotations

import types

import pytest
import torch

from fsshard.errors import PrivateTorchMissing
from fsshard.torch_private import registry
from fsshard.torch_private.registry import Area, Private


@pytest.mark.parametrize("entry", registry.everything(), ids=lambda entry: f"{entry.area}-{entry.name}")
def test_every_name_is_there_or_has_a_fallback(entry: Private) -> None:
    assert entry.present or entry.fallback, f"{entry.name} ({entry.source}) is gone: {entry.otherwise}"
    assert entry.source.startswith(("torch/", "aten/")) and entry.use and entry.otherwise


@pytest.fixture
def area(monkeypatch: pytest.MonkeyPatch) -> Area:
    monkeypatch.setattr(registry, "_known", {})
    return Area("made up")


WHERE = {"source": "torch/nowhere.py", "use": "nothing", "otherwise": "flying is lost"}


@pytest.mark.parametrize("name", ["torch:_no_such", "torch._no_such_module:name", "torch:_C._no_such.deeper"])
def test_what_is_missing_says_so_where_it_is_used(area: Area, name: str) -> None:
    stand_in = area.take(name, **WHERE)
    message = r"torch.*, which torch 2.13 has in torch/nowhere.py; flying is lost; 'fsshard doctor' lists"
    with pytest.raises(PrivateTorchMissing, match=message):
        stand_in(1)
    with pytest.raises(PrivateTorchMissing, match=message):
        stand_in.member  # noqa: B018
    with pytest.raises(PrivateTorchMissing, match=message):
        types.new_class("Child", (stand_in,))
    assert not isinstance(1, stand_in)


def test_a_fallback_is_taken_where_the_name_is_missing_only(area: Area) -> None:
    assert area.take("torch:_no_such", fallback=len, **WHERE) is len
    assert area.take("torch:_foreach_add_", fallback=len, **WHERE) is torch._foreach_add_
    missing, there = registry._known.values()
    assert (missing.present, missing.fallback, there.present) == (False, True, True)


def test_attributes_of_objects_are_found_in_the_code_that_sets_them(area: Area) -> None:
    group = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup."
    assert area.attribute(f"{group}_training_state", **WHERE) == "_training_state"
    assert area.attribute(f"{group}_no_such", **WHERE) == "_no_such"
    functions = "torch.distributed.fsdp._runtime_utils:_ran_pre_backward_hook"
    assert area.attribute(functions, **WHERE) == "_ran_pre_backward_hook"
    there, missing, by_function = registry._known.values()
    assert there.present and not missing.present and by_function.present


def test_a_reader_reads_as_code_does_or_raises(area: Area) -> None:
    view = torch.ones(2)[:1]
    assert area.reader("torch:Tensor._base", **WHERE)(view) is view._base
    with pytest.raises(PrivateTorchMissing, match=r"torch\.Tensor\._no_such"):
        area.reader("torch:Tensor._no_such", **WHERE)(view)


def test_what_is_looked_up_later_raises_then(area: Area) -> None:
    entry = area.later("torch:_no_such", **WHERE)
    assert not entry.present
    with pytest.raises(PrivateTorchMissing):
        entry.value  # noqa: B018
    assert area.later("torch:_foreach_add_", **WHERE).value is torch._foreach_add_
