"""Norms and cosines of loss terms' gradients, against bare replicas whose gradients are averaged by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.backends.whole import gather_grads
from fsshard.errors import ConfigurationError, RankMismatch, UnsupportedByBackend
from tests.models import take_step
from tests.on_ranks import on_ranks
from tests.parity.bare import average
from tests.sets import often
from tests.training_runs import check_equal, differences, ranks_of

ENGINES: dict[str, dict[str, Any]] = {
    "none": {"backend": "none"},
    "ddp": {"backend": "ddp"},
    "ddp, unused": {"backend": "ddp", "find_unused_parameters": True},
    "fairscale": {"backend": "fairscale"},
    "native": {"backend": "fairscale", "implementation": "native"},
    "fsdp2": {"backend": "fsdp2", "merge_below": 0},
    "fsdp2, one unit": {"backend": "fsdp2", "auto_wrap_policy": None},
    "fsdp2, unused": {"backend": "fsdp2", "merge_below": 0, "find_unused_parameters": True},
    "fsdp": {"backend": "fsdp"},
    "fsdp, one unit": {"backend": "fsdp", "auto_wrap_policy": None, "find_unused_parameters": True},
    "fsdp, kept": {"backend": "fsdp", "sharding_strategy": "SHARD_GRAD_OP"},
}
Terms = Callable[[Any, int], list[Tensor]]
Numbers = tuple[Tensor, Tensor]


class Wave(nn.Module):
    """A real and a complex matrix, of rows that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(5, 5)
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        # Used once: the order in which gradients of a unit's input are added is the engine's.
        x = torch.tanh(self.mix(x))
        return (x.to(self.weight.dtype) @ self.weight).abs()


class Field(nn.Module):
    """u(x, t)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 5)
        self.waves = nn.ModuleList([Wave(), Wave()])
        self.last = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for wave in self.waves:
            x = x + torch.tanh(wave(x))
        return self.last(x)


def build(dtype: torch.dtype) -> Field:
    torch.manual_seed(0)
    model = Field()
    if dtype == torch.float64:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.complex128 if parameter.is_complex() else dtype)
    return model


def points(model: Any, step: int, which: int) -> Tensor:
    seed = torch.Generator().manual_seed(100 * which + 10 * step + dist.get_rank())
    return torch.randn(4, 2, generator=seed, dtype=torch.float64).to(model.first.bias.dtype)


def supervised(model: Any, step: int) -> list[Tensor]:
    """One forward, plain terms; the second one weights the ranks otherwise than the first."""
    u = model(points(model, step, 0))
    return [u.square().mean(), (u - dist.get_rank()).abs().mean(), u.sum() * 3]


def burgers(model: Any, step: int) -> list[Tensor]:
    """A boundary term of one forward, a residual of another, which holds u_xx; and one of derivatives alone."""
    border = model(points(model, step, 1)).square().mean()
    x = points(model, step, 0).requires_grad_()
    u = model(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (ddu,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
    residual = du[:, 1] + u[:, 0] * du[:, 0] - 0.01 * ddu[:, 0]
    return [border, residual.square().mean(), ddu.square().mean()]


def by_hand(model: Any, terms: list[Tensor]) -> Numbers:
    """Differentiate by each parameter, average over the ranks, and compare."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows = []
    for term in terms:
        found = torch.autograd.grad(term, parameters, retain_graph=True, materialize_grads=True)
        row = torch.cat([(torch.view_as_real(g) if g.is_complex() else g).reshape(-1) for g in found])
        dist.all_reduce(row)
        rows.append(row.double() / dist.get_world_size())
    vectors = torch.stack(rows)
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    return vectors.norm(dim=1), unit @ unit.T


def close(got: Numbers, want: Numbers, dtype: torch.dtype) -> None:
    # Averages are those of the judge, bit by bit; what is float32 is rounded at the end.
    bound = 1e-12 if dtype == torch.float64 else 2e-7
    for mine, judge in zip(got, want, strict=True):
        assert mine.dtype == dtype and mine.shape == judge.shape
        torch.testing.assert_close(mine.double(), judge, rtol=bound, atol=bound)


def weighted(weights: Tensor, terms: list[Tensor]) -> Tensor:
    return torch.stack([weight * term for weight, term in zip(weights, terms, strict=True)]).sum()


def gradients(model: Any) -> dict[str, Tensor | None]:
    return {entry.name: None if found is None else found.clone() for entry, found in gather_grads(model.backend)}


def wrapped(engine: str, dtype: torch.dtype, **more: Any) -> tuple[Any, Any]:
    model = fsshard.wrap(build(dtype), **{"auto_wrap_policy": {Wave}, **ENGINES[engine], **more})
    return model, fsshard.build_optimizer(model, torch.optim.Adam, lr=1e-2)


@pytest.mark.covering(2)
@pytest.mark.covering
@pytest.mark.parametrize(("dtype", "silent"), [(torch.float64, False), (torch.float32, True)])
@pytest.mark.parametrize("terms_of", [supervised, burgers])
@pytest.mark.parametrize(("engine", "world_size"), [(name, ranks_of(ENGINES[name]["backend"])) for name in ENGINES])
@on_ranks()
def test_numbers_are_those_of_averaged_replicas(
    engine: str, world_size: int, terms_of: Terms, dtype: torch.dtype, silent: bool
) -> None:
    """And nothing else changes: gradients of earlier micro-batches, and the weights that the loss trains.

    Train by weighted terms in steps of two micro-batches, as the same model that compares no gradients does.
    """
    bare = build(dtype)
    judge = torch.optim.Adam(bare.parameters(), lr=1e-2)
    (model, optimizer), (other, others) = wrapped(engine, dtype), wrapped(engine, dtype)
    for number in range(4):
        terms = terms_of(bare, number)
        want = by_hand(bare, terms)
        weights = (want[0].max() / want[0]).to(dtype)
        weighted(weights, terms).backward()
        for each in (model, other):
            with each.no_sync() if silent and number % 2 == 0 else contextlib.nullcontext():
                terms = terms_of(each, number)
                if each is model:
                    before = {} if silent else gradients(model)  # what waits for a reduction has an engine's own form
                    close(model.term_gradients(terms), want, dtype)
                    assert silent or not list(differences(gradients(model), before))
                weighted(weights, terms).backward()
        if number % 2 == 1:
            average(bare)
            for each in (judge, optimizer, others):
                take_step(each)
    weights = model.state_dict()
    check_equal(weights, other.state_dict())
    # Micro-batches that are averaged one by one have other last bits than those that are added first.
    torch.testing.assert_close(weights, dict(bare.state_dict()), rtol=1e-4, atol=1e-5)
    assert not any(
        tensor.untyped_storage().size() for tensor in model.backend.held_by_engine().get("gathered units", ())
    )


@pytest.mark.parametrize("engine", often(["ddp", "fairscale", "native", "fsdp2", "fsdp"], "native", "fsdp2"))
@on_ranks(4)
def test_four_ranks_with_other_settings(engine: str) -> None:
    """Recomputed blocks, frozen weights, a term of other weights, replicas of shards."""
    bare, other = build(torch.float64), torch.ones((), dtype=torch.float64, requires_grad=True)
    for model in (bare, again := build(torch.float64)):
        model.first.bias.requires_grad_(False)
    want = by_hand(bare, [*burgers(bare, 0), other.square()])
    more = {"activation_checkpointing": True}
    if engine != "ddp":
        more["device_mesh"] = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fsshard.wrap(again, **{"auto_wrap_policy": {Wave}, **ENGINES[engine], **more})
    fsshard.build_optimizer(model, torch.optim.Adam, lr=1e-2)
    norms, cosines = model.term_gradients([*burgers(model, 0), other.square()])
    close((norms[:3], cosines[:3, :3]), (want[0][:3], want[1][:3, :3]), torch.float64)
    assert norms[3] == 0 and not cosines[3].any() and not cosines[:, 3].any()


def job_narrow(engine: str) -> Numbers:
    precision = fsshard.Precision(param=torch.bfloat16, reduce=torch.float32)
    model, _ = wrapped(engine, torch.float32, mixed_precision=precision)
    return tuple(model.term_gradients(supervised(model, 0)[:2]))


def test_mixed_precision_is_as_close_as_it_rounds(ranks: Any) -> None:
    want = ranks.run(job_narrow, 2, "ddp")[0]
    for engine in ("fairscale", "fsdp2"):
        torch.testing.assert_close(ranks.run(job_narrow, 2, engine)[0], want, rtol=2e-2, atol=2e-2)


@on_ranks()
def test_fsdp_in_mixed_precision_says_who_can() -> None:
    with pytest.raises(UnsupportedByBackend, match=r"term_gradients in mixed precision.*use backend='fsdp2'$"):
        job_narrow("fsdp")


def job_mistakes() -> list[str]:
    model, _ = wrapped("fsdp2", torch.float32)
    u = model(points(model, 0, 0))
    mean, rank = u.square().mean(), dist.get_rank()
    found = []
    mistakes = [mean, [], [mean, u], [mean.detach()], [mean, mean.item()], [mean] * (1 + rank)]
    for terms in (*mistakes, [mean] if rank else [mean.detach()]):  # the last one is rank 0's alone
        with pytest.raises((ConfigurationError, RankMismatch)) as error:
            model.term_gradients(terms)
        found.append(str(error.value))
    assert model.term_gradients([mean]).norms > 0  # the graph is still there
    return found


def test_what_is_no_term_is_refused_on_every_rank(ranks: Any) -> None:
    (*_, one), (single, none, vector, detached, number, counts, other) = ranks.run(job_mistakes, 2)
    assert "expected a list of the loss's terms, got a tensor of shape ()" in single and "got []" in none
    assert "terms[1] to be one real number with a graph, got torch.float32 of shape (4, 1)" in vector
    assert "requires_grad=False" in detached and "got float" in number
    assert "got rank 0 1, rank 1 2" in counts
    assert "terms[0]" in one and "terms[0]" in other


@on_ranks()
def test_other_mesh_dimensions_are_refused() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "cp"))
    names = {name: mesh["cp"] for name, _ in build(torch.float32).named_parameters()}
    model, _ = wrapped("ddp", torch.float32, device_mesh=mesh["data"], replicated=names)
    with pytest.raises(ConfigurationError, match="other mesh dimensions than data"):
        model.term_gradients(supervised(model, 0))
