"""An algorithm that needs more than a rank's part is refused by what it does; ranks ask for the same optimizer."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsshard
from fsshard.errors import OptimizerError, RankMismatch, UnsupportedByBackend
from fsshard.sharded.optimizer_checks import OptimizerRequest
from tests import optimizers as written
from tests.models import net
from tests.on_ranks import on_ranks
from tests.training_runs import DISTRIBUTED

WHOLE = "pass whole=True to fsshard.build_optimizer, or use backend='fairscale' or 'ddp'"
HERE = "pass whole=True, if it needs no more than each parameter whole, or use backend='ddp'"


def job_build(backend: str, name: str, settings: dict[str, Any], handed_over: bool = False) -> Any:
    optimizer_class = getattr(written, name, None) or getattr(torch.optim, name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if handed_over:
                module = net()
                optimizer = optimizer_class(module.parameters(), **settings)
                fsshard.wrap(module, optimizer, backend=backend)
            else:
                fsshard.build_optimizer(fsshard.wrap(real_or_net(name), backend=backend), optimizer_class, **settings)
        except UnsupportedByBackend as error:
            untouched = handed_over and module.middle[0]._parameters["weight"].is_complex()
            return [error.alternative, error.setting, untouched]
    return [str(warning.message) for warning in caught if "could not be tried" in str(warning.message)]


def real_or_net(name: str) -> nn.Module:
    return nn.Linear(4, 4) if name == "Adafactor" else net()  # it takes no complex numbers


ALONE = {"fsdp": HERE, "fsdp2": HERE, "fairscale": "use backend='ddp'"}
REFUSED = {
    "MyMuon": {"fsdp": HERE, "fsdp2": HERE},
    "MyLars": {"fsdp": HERE, "fsdp2": HERE},
    "ClipsInside": ALONE,
    "Sam": ALONE,
    "Noisy": ALONE,
    "MyLion": {},
    "Adafactor": {"fsdp": WHOLE, "fsdp2": WHOLE},
    "LBFGS": {},
}


@pytest.mark.parametrize("name", REFUSED)
def test_algorithms_that_need_more_than_a_part(ranks: Any, name: str) -> None:
    """Whole matrices, norms of a parameter or of all of them, random numbers. torch's LBFGS asks all ranks."""
    for backend in DISTRIBUTED:
        for found in ranks.run(job_build, 2, backend, name, {}):
            assert found[:1] == [REFUSED[name][backend]] if backend in REFUSED[name] else found == [], backend
            assert backend not in REFUSED[name] or hasattr(torch.optim, name) or "separable=True" in found[1]


def test_who_vouches_is_believed(ranks: Any) -> None:
    assert ranks.run(job_build, 2, "fsdp2", "MyMuon", {"separable": True}) == [[], []]
    alternative, setting, _ = ranks.run(job_build, 2, "fairscale", "MyLion", {"separable": False})[0]
    assert alternative == "use backend='ddp'" and "separable=False" in setting


def test_what_cannot_be_tried_warns(ranks: Any) -> None:
    (message,), second = ranks.run(job_build, 2, "fsdp2", "NeedsGpu", {})
    assert "no kernel for CPU tensors" in message
    assert "fsshard.build_optimizer(model, NeedsGpu, ..., separable=True)" in message
    assert second == [], "on rank 0 alone"


# ------------------------------------------------------------------------------------------------ the trial


def requested(optimizer_class: Any, *options: dict[str, Any], dims: tuple[int, ...] = (2,), **settings: Any) -> Any:
    """A request for groups with these options, of a real and a complex parameter of each number of dims."""
    kinds = [(number, is_complex) for number in dims for is_complex in (False, True)]
    parameters = {str(kind): (torch.Size([2] * kind[0]), kind[1]) for kind in kinds}
    groups = [{**group, "params": list(parameters)} for group in options or ({},)]
    return OptimizerRequest(optimizer_class, groups, settings, parameters)


def agrees(optimizer_class: Any, *options: dict[str, Any], **settings: Any) -> tuple[bool, bool]:
    """Return whether it works on some of the parameters, and on parts of them."""
    request = requested(optimizer_class, *options, **settings)
    return request._agrees_on_parts("owners"), request._agrees_on_parts("elements")


NUMBERS, PARAMETERS, EVERYTHING = (True, True), (True, False), (False, False)


@pytest.mark.parametrize(
    ("needs", "optimizer_class"),
    [
        *[(PARAMETERS, each) for each in (written.Rowwise, written.LargeOnly)],
        *[(EVERYTHING, each) for each in (written.Sam, torch.optim.LBFGS)],
        *[(NUMBERS, each) for each in (written.InSingle, written.SignAscent, written.AscentFirst)],
        (NUMBERS, importlib.import_module("neuralop.training").AdamW),
        *[(NUMBERS, each) for each in (torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Rprop)],
    ],
)
def test_what_an_algorithm_needs(optimizer_class: Any, needs: Any) -> None:
    assert agrees(optimizer_class) == needs


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256, 2048, 4096])
def test_blocks_of_numbers_need_whole_parameters(block: int) -> None:
    request = requested(written.InBlocks, block=block)
    assert request._agrees_on_parts("owners") and not request._agrees_on_parts("elements")


@on_ranks()
def test_packages_of_8_bit_optimizers_are_known_by_name() -> None:
    """Build optimizers as packages of 8-bit ones name their modules, which are not installed here."""
    model = fsshard.wrap(net(), backend="fsdp2")
    whole = fsshard.wrap(net(), backend="fairscale")
    found = []
    for module in ("bitsandbytes.optim.adamw", "torchao.optim.adam"):
        untried = type("AdamW8bit", (written.NeedsGpu,), {"__module__": module})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UnsupportedByBackend, match="its blocks of numbers with a scale in common") as told:
                fsshard.build_optimizer(model, untried)
            fsshard.build_optimizer(model, untried, whole=True)
            fsshard.build_optimizer(whole, untried)
            fsshard.build_optimizer(model, untried, separable=True)
            tried = type("AdamWFp32", (written.MyLion,), {"__module__": module})
            fsshard.build_optimizer(model, tried)
        found.append([told.value.alternative, str(told.value)])
    assert all(alternative == HERE for alternative, _ in found)
    assert all("if it has none: fsshard.build_optimizer(model, AdamW8bit, ..., separable" in t for _, t in found)


class OfFilters(written.Written):
    """Takes the mean from the gradients of filters, as Ranger does."""

    def direction(self, group: dict[str, Any], parameter: Any) -> Any:
        over = tuple(range(1, parameter.dim()))
        return parameter.grad - parameter.grad.mean(over, keepdim=True) if len(over) > 1 else parameter.grad


def test_an_algorithm_is_tried_on_as_many_dims_as_the_group_has() -> None:
    assert [agrees(OfFilters, dims=dims)[1] for dims in ((1, 2), (1, 3), (4,))] == [True, False, False]
    assert [agrees(written.MyMuon, dims=dims)[1] for dims in ((0, 1), (1, 2))] == [True, False]


def test_a_rate_of_zero_hides_nothing() -> None:
    """A warm-up begins with it."""
    assert agrees(written.MyLars, lr=0.0) == agrees(written.MyLars, lr=torch.zeros(())) == PARAMETERS


def test_settings_of_each_group_count() -> None:
    class Mixed(written.Written):
        def direction(self, group: dict[str, Any], parameter: Any) -> torch.Tensor:
            grad = parameter.grad
            return grad / grad.norm() if group["whole"] else grad

    assert [agrees(Mixed, {"whole": False}, {"whole": whole}) for whole in (False, True)] == [NUMBERS, PARAMETERS]


def test_nothing_is_disturbed() -> None:
    """Random numbers, a generator among the settings, the settings, and what surrounds the call."""

    class Own(written.Written):
        def direction(self, group: dict[str, Any], parameter: Any) -> torch.Tensor:
            group["seen"].append(1)
            torch.randn(3, generator=group["generator"])
            grad = parameter.grad
            return grad * (torch.rand(()) * 0 + 1)

    generator, seen = torch.Generator().manual_seed(5), [0]
    states = torch.get_rng_state(), generator.get_state()
    with torch.inference_mode():
        assert agrees(Own, generator=generator, seen=seen) == NUMBERS
    assert seen == [0]
    assert torch.equal(states[0], torch.get_rng_state()) and torch.equal(states[1], generator.get_state())


@pytest.mark.parametrize(
    ("optimizer_class", "first"),
    [
        (torch.optim.SGD, True),
        (torch.optim.LBFGS, True),
        (written.MyLion, True),
        (written.SignAscent, True),
        (written.AscentFirst, False),
        (written.ClipsInside, False),
    ],
)
def test_who_begins_with_the_closure(optimizer_class: Any, first: bool) -> None:
    assert requested(optimizer_class).begins_with_closure is first


# ------------------------------------------------------------------------------------------------ asked alike


def job_disagree(backend: str, how: str) -> None:
    rank = dist.get_rank()
    model = fsshard.wrap(net(), backend=backend)
    names = [name for name, _ in model.named_parameters()]
    if how == "class":
        fsshard.build_optimizer(model, [torch.optim.Adam, torch.optim.SGD][rank], lr=0.1)
    elif how == "lr":
        fsshard.build_optimizer(model, torch.optim.Adam, lr=[0.1, 0.2][rank])
    elif how == "groups":
        fsshard.build_optimizer(model, torch.optim.Adam, [{"params": names[:2]}, {"params": names[2:]}][: 2 - rank])
    elif how == "group's lr":
        fsshard.build_optimizer(model, torch.optim.Adam, [{"params": names, "lr": torch.tensor([0.1, 0.2][rank])}])
    elif how == "one raises":
        fsshard.build_optimizer(model, torch.optim.Adam, [names, ["nonsense"]][rank])
    elif how == "handed over":
        module = net()
        fsshard.wrap(module, torch.optim.SGD(module.parameters(), lr=[0.1, 0.2][rank]), backend=backend)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("class", "optimizer is torch.optim.adam.Adam and torch.optim.sgd.SGD"),
        ("lr", "lr is 0.1 and 0.2"),
        ("groups", "param_groups[1]['params'] is"),
        ("group's lr", "param_groups[0]['lr'] is tensor(0.1"),
        ("handed over", "lr"),
    ],
)
def test_ranks_ask_for_the_same(ranks: Any, how: str, text: str) -> None:
    for backend in DISTRIBUTED if how == "lr" else ("fsdp2",):
        for error in ranks.run_expecting_errors(job_disagree, 2, backend, how):
            assert isinstance(error, RankMismatch)
            assert text in str(error) and "ranks 0 and 1" in str(error)


def test_one_rank_that_raises_raises_on_all(ranks: Any) -> None:
    errors = ranks.run_expecting_errors(job_disagree, 2, "fsdp2", "one raises")
    assert all(isinstance(error, OptimizerError) and "'nonsense'" in str(error) for error in errors)
    assert str(errors[0]).startswith("rank 1: ")
