"""Checks that saving, copying and reading a part of a model as if it were the whole is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

import fsshard
from fsshard.errors import FsshardError
from tests.models import net
from tests.on_ranks import on_backends, on_ranks
from tests.training_runs import DISTRIBUTED, check_equal, differences

BACKENDS = (*DISTRIBUTED, "none")
LINE = "state = model.state_dict(rank0_only=True, offload_to_cpu=True)"


def through_a_file(value: Any) -> Any:
    """Return it as ``torch.save`` and ``torch.load`` give it back."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


IDIOMS: dict[str, Callable[[Any], Any]] = {
    "state dict": lambda model: through_a_file(model.module.state_dict()),
    "state dict in host memory": lambda model: {k: v.cpu() for k, v in model.module.state_dict().items()},
    "of a part": lambda model: {f"first.{key}": value for key, value in model.first.state_dict().items()},
    "of a unit": lambda model: {f"middle.0.{key}": value for key, value in model.middle[0].state_dict().items()},
    "module": lambda model: through_a_file(model.module).state_dict(),
    "part of the module": lambda model: {f"last.{k}": v for k, v in through_a_file(model.last).state_dict().items()},
    "parameters": lambda model: through_a_file(dict(model.named_parameters())),
    "one parameter": lambda model: {"first.weight": through_a_file(model.first.weight)},
}


@on_backends(BACKENDS)
def test_an_idiom_gives_the_whole_or_says_the_line(backend: str) -> None:
    """Idiom -> how what it gives differs from the model, or what it is refused with."""
    model = fsshard.wrap(net(), backend=backend)
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)  # OSS moves parameters into buffers of its own
    expected, found = net().state_dict(), dict[str, list[str] | str]()
    for name, idiom in IDIOMS.items():
        try:
            given = idiom(model)
        except (FsshardError, pickle.PicklingError, AttributeError) as error:
            found[name] = str(error)
        else:
            given = {key: value.detach() if isinstance(value, Tensor) else value for key, value in given.items()}
            found[name] = list(differences({key: expected[key] for key in given}, given))
            assert given
    check_equal(dict(expected), model.state_dict())
    divided = backend in ("fsdp", "fsdp2")
    for name, given in found.items():
        # pickle itself cannot take FSDP2's classes, nor the hooks of a unit.
        refused = LINE in given or "Can't pickle" in given
        assert refused if divided else given == [], (name, given)


@on_backends(BACKENDS)
def test_modules_are_whole_within_full_parameters(backend: str) -> None:
    """Modules are whole inside of full_parameters(): state dicts, copies, and loading."""
    model = fsshard.wrap(net(), backend=backend)
    expected = dict(net().state_dict())
    found = []
    with model.full_parameters(writeback=True):
        found += differences(expected, dict(model.module.state_dict()))
        found += differences(expected, through_a_file(dict(model.module.state_dict())))
        copied = None if backend == "fsdp2" else copy.deepcopy(model.module)  # FSDP2's classes are its own
        model.module.load_state_dict({key: value + 1 for key, value in expected.items()})
    found += differences({key: value + 1 for key, value in expected.items()}, model.state_dict())
    if copied is not None:
        found += differences(expected, dict(copied.state_dict()))
        found += differences(expected, dict(through_a_file(copied.first).state_dict()) and dict(copied.state_dict()))
    assert not found


@on_ranks()
def test_other_ways_into_a_part_are_refused_in_words() -> None:
    told = []
    for backend in ("fsdp", "fsdp2"):
        model = fsshard.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), backend=backend)
        state = model.state_dict()
        for refused in (
            lambda: model.module.load_state_dict(state),  # noqa: B023
            lambda: model.module[0].load_state_dict({"weight": state["0.weight"], "bias": state["0.bias"]}),  # noqa: B023
            lambda: AveragedModel(model.module),  # noqa: B023
        ):
            with pytest.raises((FsshardError, AssertionError)) as error:
                refused()
            told.append(str(error.value))
        check_equal(dict(state), model.state_dict())
    assert all(isinstance(value, DTensor) for value in get_model_state_dict(model.module).values())
    model.module.load_state_dict(get_model_state_dict(model.module))
    for load, part, averaged in (told[:3], told[3:]):
        assert load.startswith("load_state_dict of ") and "of what fsshard.wrap returned" in load
        assert part.startswith("load_state_dict of Linear")
        assert "full_parameters" in averaged or "FSDP does not support deepcopy" in averaged  # torch 2.13


NUMBERS: dict[str, Any] = {
    "float": lambda p: float(p.norm()),
    "item": lambda p: p.abs().sum().item(),
    "truth": lambda p: bool(p.abs().sum()),
}


def plain() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def whole(value: Any) -> float:
    """A number that every rank has."""
    summed = value.full_tensor() if hasattr(value, "full_tensor") else value
    return summed.item()


@pytest.mark.parametrize("merge_below", [0, 2**20])
@on_ranks()
def test_a_number_is_never_a_parts(merge_below: int) -> None:
    """Weights and gradients; what is gathered first is right."""
    model = fsshard.wrap(plain(), backend="fsdp2", auto_wrap_policy={nn.Linear}, merge_below=merge_below)
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    bare = plain()
    for trained in (model, bare):
        trained(torch.ones(4, 6)).square().mean().backward()
    given = []
    with torch.no_grad():
        for parameter in model.parameters():
            for tensor in (parameter, parameter.grad):
                for name, number in NUMBERS.items():
                    told = ""
                    try:
                        number(tensor)
                    except FsshardError as error:
                        told = str(error)
                    if "value.full_tensor().item()" not in told:
                        given.append(name)
    got = [whole(t.norm()) for p in model.parameters() for t in (p.detach(), p.grad) if t is not None]
    expected = [whole(t.norm()) for p in bare.parameters() for t in (p.detach(), p.grad) if t is not None]
    assert given == [] and got == pytest.approx(expected, rel=1e-6)
