"""Split operators against neuraloperator's own in one process: outputs, gradients, trainings under every engine.

So these are tested: fsshard/parallel/domain/exchange.py, fsshard/parallel/domain/layers.py,
fsshard/parallel/domain/modes.py, fsshard/parallel/domain/slabs.py and fsshard/parallel/domain/spectral_convolution.py.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

import fsshard
from fsshard.errors import ConfigurationError, ModelError
from fsshard.parallel import shard_domain
from tests.models import take_step
from tests.on_ranks import on_ranks
from tests.parallel.domain.operators import (
    THREE,
    TWO,
    averaged,
    far,
    field,
    gradients,
    in_double,
    mesh_of,
    operator,
    worst,
)
from tests.sets import often
from tests.training_runs import DISTRIBUTED

pytest.importorskip("neuralop")

DOUBLE = 1e-13
"""Bound for numbers of order 1 in float64 (rounding unit 1.1e-16): sums of up to a thousand terms in another order."""
SINGLE = 2.0**-20
"""Bound for numbers of order 1 in float32: sixteen rounding units, for some transforms of up to 2^9 points."""

CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], dict[str, Any]]] = {
    # settings, points, what else: n_modes of a trained operator, or the shape of its output
    "odd sizes, unequal slabs": (TWO, (17, 15), {}),
    "a rank without modes": ({**TWO, "n_modes": (6, 4), "tfno": True, "rank": 0.4}, (8, 8), {}),
    "three dimensions": (THREE, (9, 8, 10), {}),
    "Tucker, rebuilt": ({**THREE, "tfno": True, "rank": 0.4, "implementation": "reconstructed"}, (8, 9, 7), {}),
    "CP": ({**TWO, "factorization": "cp", "rank": 0.5}, (8, 9), {}),
    "tensor train": ({**TWO, "factorization": "tt", "rank": 0.5}, (8, 9), {}),
    "separable, stabilized": ({**TWO, "separable": True, "stabilizer": "tanh"}, (8, 9), {}),
    "group norm, first activation": ({**TWO, "norm": "group_norm", "preactivation": True}, (9, 8), {}),
    "instance norm": ({**TWO, "norm": "instance_norm"}, (9, 8), {}),
    "padding": ({**THREE, "domain_padding": [0.25, 0.125, 0.1]}, (8, 9, 10), {}),
    "scaling": ({**TWO, "resolution_scaling_factor": [2, 0.5], "fno_skip": "soft-gating"}, (9, 8), {}),
    "output shape": (TWO, (8, 8), {"output_shape": (11, 5)}),
    "lowered modes": ({**TWO, "max_n_modes": (8, 8)}, (9, 10), {"lower": (5, 4)}),
}


def one_step(model: Any, x: Tensor, loss_of: Any, more: dict[str, Any]) -> Tensor:
    """The output; gradients are left in the model."""
    out = model(x, **{key: value for key, value in more.items() if key != "lower"})
    loss_of(out).backward()
    return out.detach()


def made(settings: dict[str, Any], more: dict[str, Any]) -> Any:
    model = operator(settings)
    if "lower" in more:
        model.n_modes = more["lower"]
    return model


def one_shape(model: Any, x: Tensor, more: dict[str, Any]) -> Tensor:
    return model(x, **{key: value for key, value in more.items() if key != "lower"})


@on_ranks(4)
def test_the_same_as_on_one_process() -> None:
    """By case and number of ranks: how far outputs and gradients are from neuraloperator's, both in float64."""
    line, plane, pair = mesh_of(1, 4)["domain"], mesh_of(1, 2, 2)["dx", "dy"], mesh_of(2, 2)["domain"]
    found = {}
    with in_double():
        for name, (settings, shape, more) in CASES.items():
            x, plain = field(*shape), made(settings, more)
            with torch.no_grad():
                target = torch.randn_like(one_shape(plain, x, more))
            wanted = one_step(plain, x, lambda out, y=target: (out - y).square().mean(), more)
            for ranks, mesh in {"4": line, "2": pair, "2 x 2": plane}.items():
                if (ranks == "2" and "modes" not in name) or (ranks == "2 x 2" and len(shape) < 3):
                    continue
                model = made(settings, more)
                domain = shard_domain(model, mesh)
                y = domain.scatter(target)
                out = one_step(model, domain.scatter(x), lambda out, y=y, of=domain: of.mse_loss(out, y), more)
                averaged(model)
                apart = far(domain.gather(out), wanted), worst(gradients(model), gradients(plain))
                found[f"{name}, {ranks}"] = apart
    assert len(found) == len(CASES) + 2 + 3
    assert {name: apart for name, apart in found.items() if not max(apart) <= DOUBLE} == {}


def apart_once(model: Any, x: Tensor, mesh: Any) -> float:
    wanted = model(x).detach()
    domain = shard_domain(model, mesh)
    return far(domain.gather(model(domain.scatter(x))).detach(), wanted)


@on_ranks(4)
def test_bits() -> None:
    """Dense weights and equal slabs are bit-equal; gradients that are sums over space add in another order.

    In float32: bits at several numbers of ranks, and layers whose code names cfloat.
    """
    from neuralop.layers.fno_block import FNOBlocks

    found = {}
    x, y = field(16, 16), field(16, 16, seed=1)
    for ranks in (1, 2, 4):
        model = operator(TWO)
        domain = shard_domain(model, mesh_of(4 // ranks, ranks)["domain"])
        out = one_step(model, domain.scatter(x), lambda out, of=domain: (of.gather(out) - y).square().mean(), {})
        averaged(model)
        found[f"{ranks}"] = domain.gather(out), gradients(model)
    line, plane = mesh_of(1, 4)["domain"], mesh_of(1, 2, 2)["dx", "dy"]
    blocks = FNOBlocks(3, 3, (4, 4), norm="ada_in", ada_in_features=2, n_layers=2)
    blocks.set_ada_in_embeddings(torch.tensor([0.5, -1.0]))
    complex_operator = operator({**TWO, "complex_data": True, "positional_embedding": None})
    scaled = {**THREE, "resolution_scaling_factor": [1.5, 1]}
    found["in float32"] = [
        apart_once(complex_operator, field(9, 10, dtype=torch.complex64), line),
        apart_once(blocks, field(9, 10).expand(2, 3, 9, 10), line),
        apart_once(operator(scaled), field(8, 9, 10), line),  # neuraloperator interpolates in float32 there
        apart_once(operator(scaled), field(8, 9, 10), plane),
    ]
    out, grads = found["1"]
    for count in (2, 4):
        split_out, split_grads = found[str(count)]
        assert torch.equal(split_out, out)
        assert all(
            torch.equal(split_grads[name], grads[name]) for name in grads if "convs" in name and "weight" in name
        )
    assert max(found["in float32"]) <= SINGLE


# ------------------------------------------------------------------------------------------ under every engine

STEPS = 5
ADAM = {"lr": 1e-3, "eps": 1e-4}
TFNO = {**TWO, "tfno": True, "rank": 0.5}


def job_engine(backend: str, settings: dict[str, Any], recompute: bool, weights: str = "whole") -> dict[str, Any]:
    """Two data ranks, of one sample and of three, times two of the domain: losses and whole weights."""
    from neuralop.layers.spectral_convolution import SpectralConv

    from fsshard.compat.neuralop import Trainer

    mesh = mesh_of(2, 2)
    model = operator(settings)
    domain = shard_domain(model, mesh["domain"], weights=weights)
    more = {"activation_checkpointing": {SpectralConv}} if recompute else {}
    if weights == "modes":
        more |= {"device_mesh": mesh["data"], "replicated": domain.replicated}
    wrapped = fsshard.wrap(model, backend=backend, **more)
    optimizer = fsshard.build_optimizer(wrapped, torch.optim.Adam, **ADAM)
    data, loss_of = fsshard.data_rank(mesh).rank, domain.LpLoss(d=2, p=2, reduction="sum")
    losses = []
    for step in range(STEPS):
        x, y = (field(9, 8, batch=4, seed=2 * step + at).split((1, 3))[data] for at in (0, 1))
        loss = loss_of(wrapped(domain.scatter(x)), domain.scatter(y)) * wrapped.mean_factor(len(x))
        loss.backward()
        take_step(optimizer)
        losses.append(float(loss.detach()))
    if recompute:
        with pytest.raises(ModelError, match="split by shard_domain"):
            Trainer(model=wrapped, n_epochs=1)
    return {"losses": losses, "weights": wrapped.state_dict()}


def by_hand(settings: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """One process, the whole batch and field, neuraloperator's own model and loss."""
    from neuralop.losses import LpLoss

    model = operator(settings)
    optimizer = torch.optim.Adam(model.parameters(), **ADAM)
    losses = []
    for step in range(STEPS):
        x, y = (field(9, 8, batch=4, seed=2 * step + at) for at in (0, 1))
        loss = LpLoss(d=2, p=2, reduction="mean")(model(x), y)
        loss.backward()
        take_step(optimizer)
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


MODES = {**TWO, "n_modes": (6, 8)}  # of the last dimension's five modes one rank has three
ENGINES = {"fsdp2": (TFNO, True, "whole"), "ddp": (TFNO, False, "whole")}
WAYS = [(b, *ENGINES.get(b, (TWO, False, "whole"))) for b in DISTRIBUTED] + [("fsdp2", MODES, False, "modes")]


@pytest.mark.parametrize(
    ("backend", "settings", "recompute", "weights"), often(WAYS, *(way for way in WAYS if way[0] in ("fsdp2", "fsdp")))
)
def test_trains_as_one_process(
    ranks: Any, backend: str, settings: dict[str, Any], recompute: bool, weights: str
) -> None:
    losses, wanted = by_hand(settings)
    found = ranks.run(job_engine, 4, backend, settings, recompute, weights)
    mean = [sum(told) / 4 for told in zip(*(one["losses"] for one in found), strict=True)]
    assert mean == pytest.approx(losses, rel=SINGLE)
    state = found[0]["weights"]
    operator(settings).load_state_dict(dict(state))
    del state["_metadata"], wanted["_metadata"]
    assert {name: value.dtype for name, value in state.items()} == {name: v.dtype for name, v in wanted.items()}
    assert worst(state, wanted) <= SINGLE


# ------------------------------------------------------------------------------------------ computed again


@on_ranks(4)
def test_recomputation_has_the_same_bits() -> None:
    """Two resolutions before one backward, which the local size does not tell apart; what differs from plain."""
    from torch.utils.checkpoint import checkpoint

    mesh = mesh_of(1, 4)["domain"]
    settings = {**TWO, "domain_padding": 0.125}
    different = []
    for kind in (None, False, True):
        model = operator(settings)
        domain = shard_domain(model, mesh)
        if kind is not None:
            forward = model.fno_blocks.forward
            model.fno_blocks.forward = lambda x, index=0, output_shape=None, of=forward, kind=kind: checkpoint(
                of, x, index, output_shape, use_reentrant=kind
            )
        outs = [model(domain.scatter(field(*shape))) for shape in ((17, 8), (18, 8), (20, 8))]
        with torch.no_grad():
            model(domain.scatter(field(24, 10)))  # an evaluation between forward and backward
        sum(domain.mse_loss(out, torch.zeros_like(out)) for out in outs).backward()
        if kind is None:
            wanted = gradients(model)
        different += [
            f"{kind}: {name}" for name, value in gradients(model).items() if not torch.equal(value, wanted[name])
        ]
    assert not different


# ------------------------------------------------------------------------------------------ copies, files, refusals


@on_ranks()
def test_copies_and_files() -> None:
    """A copy works; a file loads, says what it lacks, and works once it has it."""
    mesh = mesh_of(1, 2)["domain"]
    model = operator(TWO)
    plain, keys = model(field(8, 8)).detach(), list(model.state_dict())
    domain = shard_domain(model, mesh)
    assert list(model.state_dict()) == keys
    x = domain.scatter(field(8, 8))
    expected = model(x)
    assert far(domain.gather(expected).detach(), plain) <= SINGLE
    assert torch.equal(copy.deepcopy(model)(x), expected)
    before = domain.bytes_sent
    model(x)
    # Of 8 x 8 points, a batch of 2, 4 channels, 2 layers: 4 of 8 rows and 2 of 4 modes go out, and come back.
    assert domain.bytes_sent - before == 2 * 2 * (2 * 4 * 4 * 2) * 8
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with pytest.raises(ConfigurationError, match="came out of a file"):
        loaded(x)
    again = shard_domain(loaded, mesh)
    assert torch.equal(loaded(again.scatter(field(8, 8))), expected)
    with pytest.raises(ModelError, match="split already"):
        shard_domain(loaded, mesh)


@on_ranks()
def test_what_cannot_be_split() -> None:
    mesh = mesh_of(1, 2)
    line = mesh["domain"]
    found = {}
    for name, (mesh_given, model) in {
        "1-D": (line, operator({**TWO, "n_modes": (4,)})),
        "no mesh": (2, operator(TWO)),
        "factors": (line, operator(TFNO)),
    }.items():
        classes = [type(module) for module in model.modules()]
        with pytest.raises(ConfigurationError if name == "no mesh" else ModelError) as caught:
            shard_domain(model, mesh_given, weights="modes" if name == "factors" else "whole")
        assert [type(module) for module in model.modules()] == classes, "nothing was changed"
        found[name] = str(caught.value)
    assert "1 spatial dimension(s), of which 1 cannot be split" in found["1-D"]
    assert "fno_blocks.convs.0.weight, TuckerTensor, cannot be cut by modes" in found["factors"]
    assert "shard_domain(mesh=2): expected a slice of a DeviceMesh" in found["no mesh"]
