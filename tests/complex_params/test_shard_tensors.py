"""What users do with weights and gradients between steps: as with the bare model, to the last bit, or an error.

All ranks train on one batch, so that one bare model, which knows nothing of ranks, is the judge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.errors import FsshardError, ModelError
from tests.advice.following import refused
from tests.models import take_step
from tests.on_ranks import on_backends, on_ranks
from tests.sets import often
from tests.sharded.training import ALL
from tests.training_runs import check_equal

Idiom = Callable[[Tensor], Any]
STEPS = 2


class Layers(nn.Module):
    """Real and complex weights, one of them transposed, that two ranks share evenly.

    Args:
        rows: of a complex weight; two ranks share an odd number by its elements.
    """

    def __init__(self, rows: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, rows)
        self.weight = nn.Parameter(torch.randn(rows, 4, dtype=torch.complex64) * 0.4)
        self.turned = nn.Parameter(torch.randn(4, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).to(torch.complex64) @ self.weight).abs() @ self.turned


def trained(model: Any, optimizer: Any, idiom: Idiom) -> dict[str, Tensor]:
    """Train on one batch, with the idiom done to each parameter between backward and step."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(STEPS):
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                idiom(parameter)
        take_step(optimizer)
    return model.state_dict()


def bare(idiom: Idiom, rows: int = 4) -> dict[str, Tensor]:
    model = Layers(rows)
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), idiom)


def wrapped(idiom: Idiom, backend: str, rows: int = 4) -> dict[str, Tensor]:
    model = fsshard.wrap(Layers(rows), backend=backend)
    return trained(model, fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1), idiom)


def mask_of(parameter: Tensor) -> Tensor:
    return (torch.arange(parameter.numel()).view(parameter.shape) % 2).to(parameter.dtype)


def gradient(parameter: Tensor) -> Any:
    """Return the gradient, which every parameter has here."""
    assert parameter.grad is not None
    return parameter.grad


# ------------------------------------------------------------------------------------------- gradients


def replace_data(p: Tensor) -> None:
    gradient(p).data = gradient(p).data * 2


def replace_gradient(p: Tensor) -> None:
    p.grad = gradient(p) * 2


def multiply_in_place(p: Tensor) -> None:
    p.grad *= 2  # type: ignore[operator]


def mask_replaces(p: Tensor) -> None:
    p.grad = mask_of(p) * gradient(p)


def zero_by_mask(p: Tensor) -> None:
    gradient(p)[gradient(p).abs() > 0.1] = 0


def mark(p: Tensor) -> None:
    gradient(p).mine = 3
    assert gradient(p).mine == 3 and p.grad is p.grad


def where_it_is(idiom: Idiom) -> Idiom:
    """Return an idiom of gradients that does nothing where a rank has none: under fairscale their owners have them."""

    def on_owners(p: Tensor) -> None:
        if p.grad is not None:
            idiom(p)

    return on_owners


GRADIENTS: dict[str, Idiom] = {
    "data": replace_data,
    "set_": lambda p: gradient(p).set_(gradient(p) * 2),
    "assignment": replace_gradient,
    "in place": multiply_in_place,
    "data in place": lambda p: gradient(p).data.mul_(2),
    "detached in place": lambda p: gradient(p).detach().mul_(2),
    "of a list": lambda p: torch._foreach_mul_([gradient(p)], 2),
    "all elements": lambda p: gradient(p).__setitem__(..., gradient(p) * 2),
    "a mask": lambda p: gradient(p).mul_(mask_of(p)),
    "a mask before": mask_replaces,
    "those above a bound": zero_by_mask,
    "a plain sum": lambda p: gradient(p).add_(torch.ones(p.shape)),
    "a number in a tensor": lambda p: gradient(p).div_(torch.tensor(2.0)),
    "turned": lambda p: gradient(p).t().mul_(2) if p.dim() == 2 else None,
    "an attribute": mark,
}


def is_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.covering
@pytest.mark.parametrize("rows", [4, 5])
@on_backends([name for name in ALL if name != "fsdp"])
def test_what_is_done_to_a_gradient_is_what_the_optimizer_steps_with(backend: str, rows: int) -> None:
    different = []
    for name, idiom in GRADIENTS.items():
        if rows % 2 and name == "turned":  # held as a list of numbers
            continue
        if not is_equal(bare(idiom, rows), wrapped(where_it_is(idiom), backend, rows)):
            different.append(name)
    assert not different


# ------------------------------------------------------------------------------------------- weights and randomness


def data_by_mask(p: Tensor) -> None:
    p.data = p.data * mask_of(p)


def chosen(p: Tensor) -> None:
    p.data.copy_(torch.where(mask_of(p).real > 0, p.data, torch.zeros_like(p.data)))


def seeded(idiom: Idiom) -> Idiom:
    def with_seed(p: Tensor) -> None:
        torch.manual_seed(3)
        idiom(p)

    return with_seed


WEIGHTS: dict[str, Idiom] = {
    "data by a mask": data_by_mask,
    "copied data": lambda p: p.data.copy_(mask_of(p)),
    "chosen": chosen,
    "noise": seeded(lambda p: p.add_(torch.randn_like(p), alpha=0.01)),
    "noise on data": seeded(lambda p: p.data.add_(torch.rand_like(p.data))),
    "init.normal_": seeded(nn.init.normal_),
    "data.normal_": seeded(lambda p: p.data.normal_(0.0, 0.02)),
    "data.uniform_": seeded(lambda p: p.data.uniform_(-1, 1)),
    "init.xavier_uniform_": seeded(lambda p: nn.init.xavier_uniform_(p) if p.dim() > 1 else None),
    "init.kaiming_normal_": seeded(lambda p: nn.init.kaiming_normal_(p) if p.dim() > 1 else None),
    "init.orthogonal_": seeded(lambda p: nn.init.orthogonal_(p) if p.dim() > 1 and not p.is_complex() else None),
    "dropout": seeded(lambda p: None if p.is_complex() else p.copy_(nn.functional.dropout(p, 0.5))),
}


@on_backends(often(ALL, "fairscale", "fsdp", "fsdp2"))
def test_weights_are_written_as_those_of_the_bare_model(backend: str) -> None:
    told = {}
    for name, idiom in WEIGHTS.items():
        want = bare(idiom)
        try:
            got = wrapped(idiom, backend)
        except FsshardError as error:
            told[name] = str(error)
            continue
        told[name] = "equal" if is_equal(want, got) else "different"
    if backend == "fsdp":
        assert all("no values here" in text for text in told.values()), told
    else:
        assert {name: text for name, text in told.items() if text != "equal"} == {}


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)


@on_backends(["ddp", "fairscale", "fsdp2"])
def test_initialising_after_wrap_gives_the_whole_draw(backend: str) -> None:
    model = fsshard.wrap(Layers(), backend=backend)
    torch.manual_seed(1)
    model.apply(initialise)
    one = Layers()
    torch.manual_seed(1)
    one.apply(initialise)
    assert torch.equal(model.state_dict()["layer.weight"], one.state_dict()["layer.weight"])


def fill_data(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(0.0, 0.02)


@pytest.mark.parametrize("fill", [initialise, fill_data])
@on_ranks()
def test_flat_parts_take_no_random_numbers(fill: Callable[[nn.Module], None]) -> None:
    model = fsshard.wrap(Layers(), backend="fsdp")
    with refused("Initialise the model before fsshard.wrap, or within", ModelError):
        model.apply(fill)
    one = Layers()
    torch.manual_seed(1)
    one.apply(fill)
    torch.manual_seed(1)
    with torch.no_grad(), model.full_parameters(writeback=True):
        model.module.apply(fill)
    assert torch.equal(model.state_dict()["layer.weight"], one.state_dict()["layer.weight"])


# ------------------------------------------------------------------------------------------- refused

COPIES: dict[str, Idiom] = {
    "a row": lambda p: gradient(p)[0].mul_(0),
    "rows": lambda p: gradient(p)[:3].zero_(),
    "narrowed": lambda p: gradient(p).narrow(0, 0, 1).zero_(),
    "split": lambda p: gradient(p).split(1)[0].zero_(),
    "a part of a row": lambda p: gradient(p)[0][:1].zero_(),
    "a row of weights": lambda p: p.data[0].zero_(),
}


@pytest.mark.parametrize("idiom", COPIES)
@on_ranks()
def test_writing_to_a_copy_of_rows_raises(idiom: str) -> None:
    with refused("multiply with a mask of the whole shape (p.grad.mul_(mask))", ModelError):
        wrapped(COPIES[idiom], "fsdp2")
    mask = torch.ones(4)
    mask[0] = 0

    def first_row(p: Tensor) -> None:
        gradient(p).mul_(mask if p.dim() == 1 else mask[:, None].expand(p.shape))

    assert is_equal(bare(first_row), wrapped(first_row, "fsdp2"))


@on_ranks()
def test_setting_a_row_raises() -> None:
    def set_row(p: Tensor) -> None:
        gradient(p)[0] = 0

    with refused("it would be written to a copy; multiply with a mask of the whole shape"):
        wrapped(set_row, "fsdp2")


NOT_BY_NUMBER: dict[str, Idiom] = {
    "numpy": lambda p: gradient(p).numpy(),
    "tolist": lambda p: gradient(p).tolist(),
    "a sum of ranks": lambda p: dist.all_reduce(gradient(p)),
    "a list beside it": lambda p: torch._foreach_mul_([gradient(p)], [torch.ones(p.shape)]),
    "a product with a row": lambda p: gradient(p) * torch.ones(4) if p.dim() > 1 else None,
    "histogram": lambda p: torch.histogram(gradient(p).abs(), 5),
    "random numbers by probability": lambda p: torch.bernoulli(torch.full_like(p.data.abs(), 0.5)),
}


@pytest.mark.parametrize("idiom", NOT_BY_NUMBER)
@on_ranks()
def test_what_has_no_one_meaning_on_a_part_is_explained(idiom: str) -> None:
    with refused("is computed within the forward of the wrapped model", ModelError):
        wrapped(NOT_BY_NUMBER[idiom], "fsdp2")


@on_ranks()
def test_the_whole_is_there_on_every_rank() -> None:
    model = fsshard.wrap(Layers(), backend="fsdp2")
    one = Layers()
    x = torch.ones(2, 4)
    with refused("take value.full_tensor() and compute with that", ModelError):
        model.module.layer(x)  # a part of the model, called alone
    for each in (model, one):
        each(x).sum().backward()
    for shard, want in zip(model.parameters(), one.parameters(), strict=True):
        assert torch.equal(shard.grad.full_tensor(), gradient(want))
        assert torch.equal(shard.full_tensor(), want)
    fsshard.register_forward_method(model, "forward")
    with model.full_parameters():
        assert torch.equal(model.module.layer(x), one.layer(x))


@on_ranks()
def test_a_gradient_is_the_engines_to_make() -> None:
    model = fsshard.wrap(Layers(), backend="fsdp2")
    weight = dict(model.named_parameters())["weight"]
    with refused("call backward() first, then change it"):
        weight.grad = torch.zeros(4, 4, dtype=torch.complex64)
    model(torch.ones(2, 4)).sum().backward()
    weight.grad = torch.zeros(4, 4, dtype=torch.complex64)
    assert not weight.grad.full_tensor().any()
    with pytest.raises(FsshardError, match=r"expected torch\.complex64"):
        weight.grad = torch.zeros(4, 5, dtype=torch.complex64)


@on_ranks()
def test_state_that_a_user_makes_of_shards_is_stepped() -> None:
    """``torch.zeros_like(p.data)`` is a DTensor where the parameter is."""

    results = []
    for backend in ("none", "fsdp2"):
        model = Layers() if backend == "none" else fsshard.wrap(Layers(), backend=backend)
        optimizer = (
            torch.optim.AdamW(model.parameters(), lr=0.1)
            if backend == "none"
            else fsshard.build_optimizer(model, torch.optim.AdamW, lr=0.1)  # type: ignore[arg-type]
        )
        for step in range(3):
            model(torch.ones(2, 4)).sum().backward()
            take_step(optimizer)
            if step == 0:
                for parameter in model.parameters():
                    optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter.data)
        results.append(model.state_dict())
    check_equal(dict(results[0]), dict(results[1]))
