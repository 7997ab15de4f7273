"""Forwards that read or write weights where ranks hold parts: as two bare replicas do, or refused in words."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import fsshard
from tests import by_hand
from tests.advice.following import refused
from tests.models import take_step, with_sgd
from tests.on_ranks import on_backends
from tests.sets import often
from tests.training_runs import check_equal, differences

DIVIDED = ("fsdp", "fsdp2")
WHOLE = ("ddp", "fairscale")


class Child(nn.Module):
    """A sharding unit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6) / 3), nn.Parameter(torch.randn(6) / 3)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(functional.linear(x, self.weight, self.bias))


class Base(nn.Module):
    """Two units and a layer that belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = Child(), Child(), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.b(self.a(x))).square().mean()


class Spectral(Child):
    """With a complex weight and a scalar, which engines store otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.w = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.randn(3, 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        numbers = torch.view_as_complex(x.reshape(-1, 3, 2)) * self.w[:, 0] * self.scale
        return super().forward(torch.view_as_real(numbers).reshape(x.shape))


class Asks(Base):
    """A model that asks its parameters in the forward what models ask of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Spectral()

    def forward(self, x: Tensor) -> Any:
        assert {p.device for p in self.parameters()} == {x.device} and all(p.requires_grad for p in self.parameters())
        assert next(self.b.parameters()).dtype is x.dtype and self.a.scale.dtype is x.dtype
        return super().forward(x)


class ReadsSibling(Child):
    sibling: Any

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(functional.linear(x, self.weight + self.sibling[0].weight, self.bias))


class Sibling(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b = ReadsSibling()
        self.b.sibling = [self.a]


class Captured(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.a.weight, self.out.weight]

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + 0.1 * sum(p.pow(2).sum() for p in self.kept)


class Functional(Base):
    def forward(self, x: Tensor) -> Any:
        given = {"weight": self.out.weight.repeat(3, 1), "bias": self.out.bias.repeat(3)}
        found = torch.func.functional_call(self.a, given, x)
        return self.out(self.b(found) + self.a(x)).square().mean()


class Adjoint(torch.autograd.Function):
    """Runs a module without a graph, and again in the backward, as adjoint methods do; the weights are handed over."""

    @staticmethod
    def forward(ctx: Any, module: Any, x: Tensor, *weights: Tensor) -> Any:
        ctx.module = module
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            output = ctx.module(again)
            of_x, *found = torch.autograd.grad(output, (again, *weights), gradient, allow_unused=True)
        own = [torch.zeros_like(w) if each is None else each for w, each in zip(weights, found, strict=True)]
        return None, of_x, *own


class HandsOver(Base):
    def forward(self, x: Tensor) -> Any:
        handed = Adjoint.apply(self.a, x, *self.a.parameters())
        return self.out(self.b(handed)).square().mean()


class InnerGradient(Base):
    """Its output depends on a gradient by the weights of a part."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        found = torch.autograd.grad(y.square().sum(), list(self.a.parameters()), create_graph=True, allow_unused=True)
        size = sum(each.square().mean() for each in found if each is not None)
        return self.out(self.b(y * (1 + size))).square().mean()


class HookAfter(Base):
    """A hook of the user's runs between a unit's own code and what the engine does to the unit behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda module, args, output: output + self.kept[0].abs().sum())

    def forward(self, x: Tensor) -> Any:
        self.__dict__["kept"] = [self.a.weight]
        return super().forward(x)


class Shapes(Base):
    """Asks for nothing but what is the same of a shard and of the whole."""

    def forward(self, x: Tensor) -> Any:
        weight = self.a.weight
        assert weight.shape == (6, 6) and len(weight) == 6 and weight.dim() == weight.ndim == 2
        assert weight.numel() == 36 and weight.size(1) == 6 and weight.t().shape == (6, 6)
        assert weight.dtype == torch.float32 and weight.requires_grad and weight.device == x.device
        return super().forward(x)


class Held:
    """An output of no class that an engine knows."""

    def __init__(self, value: Any, model: Any = None) -> None:
        self.value, self.model = value, model

    @property
    def lazy(self) -> Tensor:
        return self.model.out(self.value)  # type: ignore[no-any-return]


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


class HeldChild(Child):
    def forward(self, x: Tensor) -> Any:
        return Holder(super().forward(x) @ self.weight)


class UnitReturnsHeld(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a = HeldChild()

    def forward(self, x: Tensor) -> Any:
        return self.out(self.b(self.a(x).value)).square().mean()


class Yields(Base):
    def forward(self, x: Tensor) -> Any:
        for layer in (self.a, self.b, self.out):
            x = layer(x)
            yield x


class Writes(Child):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Embeds(Child):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + nn.functional.embedding(torch.arange(len(x)), self.table, max_norm=0.5))


def written(unit: type[Child]) -> Base:
    model = Base()
    model.a = unit()
    return model


def written_root() -> Base:
    model = Base()
    model.out.register_forward_pre_hook(clamp)
    return model


def clamp(module: Any, _: Any) -> None:
    with torch.no_grad():
        module.weight.clamp_(-0.1, 0.1)


def clamped(model: Any, x: Tensor) -> Any:
    with torch.no_grad():
        model.a.weight.clamp_(-0.1, 0.1)
    return Base.forward(model, x)


READS: dict[str, Callable[[Any, Tensor], Any]] = {
    "Penalty": lambda m, x: Base.forward(m, x) + 0.1 * sum(p.pow(2).sum() for p in m.parameters()),
    "Tied": lambda m, x: functional.linear(m.b(m.a(x)), m.a.weight).square().mean() + m.out(x).square().mean(),
    "StateInside": lambda m, x: Base.forward(m, x) * sum(p.abs().sum() for p in m.state_dict().values()),
    "WritesSibling": clamped,
}
"""Forwards of Base that read, or write, another unit's weights."""
RETURNS: dict[str, Callable[[Any, Tensor], Any]] = {
    "ReturnsHeld": lambda m, x: {"held": Held([Base.forward(m, x)])},
    "Maps": lambda m, x: {"loss": map(m.out, (m.a(x), m.b(x)))},
    "Encloses": lambda m, x: functools.partial(m.out, m.b(m.a(x))),
    "Lazy": lambda m, x: Held(m.b(m.a(x)), m),
}
COMPLEX: dict[str, Callable[[Any, Tensor], Any]] = {
    "ReadsComplex": lambda m, x: Asks.forward(m, x) + m.a.w.abs().sum(),
    "ReadsScalar": lambda m, x: Asks.forward(m, x) * m.a.scale,
}
KINDS = (Base, Sibling, Captured, Functional, HookAfter, Shapes, UnitReturnsHeld, Yields, Asks)
HANDED = (HandsOver, InnerGradient)
"""Models that hand a part's weights to where no operator of torch sees them."""


def solved(part: nn.Module, x: Tensor) -> Any:
    """Run a part by its adjoint, as solvers of differential equations do: they look for the weights themselves."""
    return Adjoint.apply(part, x, *part.parameters())


class HandsOverComplex(Asks):
    def forward(self, x: Tensor) -> Any:
        return self.out(self.b(solved(self.a, x))).square().mean()


class InnerGradientComplex(Asks):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        inner = torch.autograd.grad(y.sum(), self.a.w, create_graph=True)[0]
        return self.out(self.b(y)).square().mean() + 0.1 * inner.abs().square().mean()


HANDED_COMPLEX = (HandsOverComplex, InnerGradientComplex)
"""The same where the part is a unit by default, since it has a complex weight."""
READING = [*READS, "Sibling", "Captured", "Functional", "HookAfter"]
BUILDS: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: kind for kind in (*KINDS, *HANDED, *HANDED_COMPLEX)},
    **{name: type(name, (Base,), {"forward": forward}) for name, forward in {**READS, **RETURNS}.items()},
    **{name: type(name, (Asks,), {"forward": forward}) for name, forward in COMPLEX.items()},
    **{kind.__name__: (lambda unit=kind: written(unit)) for kind in (Writes, Embeds)},
    "WritesRoot": written_root,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return BUILDS[name]()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(17 * step + rank))


def loss_of(name: str, model: Any, x: Tensor) -> Tensor:
    found = model(x)
    if name == "ReturnsHeld":
        return found["held"].value[0]  # type: ignore[no-any-return]
    if name in ("Yields", "Maps"):
        return sum(part.square().mean() for part in (found["loss"] if name == "Maps" else found))  # type: ignore
    if name in ("Encloses", "Lazy"):
        return (found() if name == "Encloses" else found.lazy).square().mean()  # type: ignore[no-any-return]
    return found  # type: ignore[no-any-return]


def replicas(name: str, steps: int = 3) -> list[dict[str, Any]]:
    """Losses of both ranks and the weights: two bare models whose gradients are averaged by hand."""
    models = [build(name) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    losses = [[], []]
    for step in range(steps):
        for rank, model in enumerate(models):
            loss = loss_of(name, model, batch(step, rank))
            loss.backward()
            losses[rank].append(loss.item())
        for pair in zip(*(model.parameters() for model in models), strict=True):
            mean = pair[0].grad / 2 + pair[1].grad / 2  # type: ignore[operator]
            for parameter in pair:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            take_step(optimizer)
    return [{"losses": losses[rank], "weights": dict(models[rank].state_dict())} for rank in range(2)]


def wrapped(name: str, backend: str, units: bool | None, precision: str | None = None) -> fsshard.ShardedModule:
    """Under the backend, with each child as a unit of its own, with the model as the only one, or (None) by default."""
    settings = {"merge_below": 0} if backend == "fsdp2" else {}
    settings["mixed_precision"] = precision
    model = build(name)
    kinds = {type(module) for module in model.modules() if isinstance(module, Child)}
    if units is not None:
        settings["auto_wrap_policy"] = kinds if units else None
    return fsshard.wrap(model, backend=backend, **settings)


def job_train(names: list[str], backend: str, units: bool | None, precision: str | None = None) -> dict[str, Any]:
    """Per model what came out, or the error."""
    outcome = {}
    for name in names:
        try:
            model = wrapped(name, backend, units, precision)
            optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
            losses = []
            for step in range(3):
                loss = loss_of(name, model, batch(step, dist.get_rank()))
                loss.backward()
                losses.append(loss.item())
                take_step(optimizer)
            outcome[name] = {"losses": losses, "weights": dict(model.state_dict())}
        except (fsshard.FsshardError, RuntimeError) as error:
            outcome[name] = (type(error).__name__, str(error))
    return outcome


def assert_right(ranks: Any, names: list[str], backend: str, units: bool | None) -> None:
    found = ranks.run(job_train, 2, names, backend, units)
    for name in names:
        for reference, outcome in zip(replicas(name), found, strict=True):
            assert not isinstance(outcome[name], tuple), (name, outcome[name])
            assert not list(differences(reference, outcome[name])), name


WRITTEN = {"Writes": "a.weight", "WritesRoot": "out.weight", "Embeds": "a.table"}
"""Models whose forward writes to a weight, and to which."""


@pytest.mark.parametrize("backend", often(WHOLE, "ddp"))
def test_where_weights_are_whole_all_of_it_is_right(ranks: Any, backend: str) -> None:
    assert_right(ranks, [*READING, "Shapes", "ReturnsHeld", "UnitReturnsHeld", *WRITTEN], backend, True)


@pytest.mark.parametrize("backend", DIVIDED)
def test_reading_another_units_weights_is_refused(ranks: Any, backend: str) -> None:
    names = [*READING, "ReadsComplex", "ReadsScalar"]
    for outcome in ranks.run(job_train, 2, names, backend, True):
        for name in names:
            assert isinstance(outcome[name], tuple), name
            kind, text = outcome[name]
            assert kind in ("ModelError", "StaleParameter", "FsshardError"), (name, kind, text)
            if name == "StateInside":
                assert "state_dict() of StateInside" in text, text
            elif name == "Captured" and backend == "fsdp2":
                assert kind == "StaleParameter" and "weight' is read through a reference" in text, text
            elif name == "Functional" or (name == "WritesSibling" and backend == "fsdp2"):
                assert "'a.weight'" in text, (name, text)
            else:
                assert ("a DTensor" if backend == "fsdp2" else "of sharding unit 'a'") in text, (name, text)
                assert "auto_wrap_policy" in text, (name, text)


HANDED_NAMES = [kind.__name__ for kind in HANDED]


@pytest.mark.parametrize("backend", DIVIDED)
def test_handing_over_another_units_weights_is_refused(ranks: Any, backend: str) -> None:
    for outcome in ranks.run(job_train, 2, HANDED_NAMES, backend, True):
        for name in HANDED_NAMES:
            kind, text = outcome[name]
            assert kind == "ModelError" and "this rank holds" in text and "'fairscale' or 'ddp'" in text, (name, text)


@pytest.mark.parametrize("backend", ["ddp", "fairscale"])
def test_handed_weights_are_right_where_they_are_whole(ranks: Any, backend: str) -> None:
    assert_right(ranks, HANDED_NAMES, backend, True)


@pytest.mark.parametrize("backend", ["fsdp2"])
def test_handed_weights_are_right_in_one_unit(ranks: Any, backend: str) -> None:
    assert_right(ranks, HANDED_NAMES, backend, False)


@pytest.mark.parametrize("backend", ["ddp", *DIVIDED])
def test_default_units_do_not_change_what_handing_over_means(ranks: Any, backend: str) -> None:
    """A complex part is a unit by default, unless a forward above hands its weights over: nobody chose that unit."""
    assert_right(ranks, [kind.__name__ for kind in HANDED_COMPLEX], backend, None)


@pytest.mark.parametrize("backend", DIVIDED)
def test_in_one_unit_it_is_right(ranks: Any, backend: str) -> None:
    assert_right(ranks, ["Penalty", "Tied", "Sibling"], backend, False)


@pytest.mark.parametrize("backend", DIVIDED)
def test_objects_may_be_returned_and_shapes_are_never_those_of_a_shard(ranks: Any, backend: str) -> None:
    assert_right(ranks, ["Base", "Asks", "ReturnsHeld", "UnitReturnsHeld"], backend, True)
    assert_right(ranks, ["ReturnsHeld", "UnitReturnsHeld"], backend, False)
    if backend == "fsdp2":
        assert_right(ranks, ["Shapes"], backend, True)
    else:
        assert all("'a.weight'" in found["Shapes"][1] for found in ranks.run(job_train, 2, ["Shapes"], backend, True))


@pytest.mark.parametrize("backend", ["ddp", *DIVIDED])
def test_generators_are_refused(ranks: Any, backend: str) -> None:
    for outcome in ranks.run(job_train, 2, ["Yields", "Maps"], backend, False):
        for name, kind in (("Yields", "generator"), ("Maps", "map")):
            assert outcome[name][0] == "ModelError" and f"returns a {kind}" in outcome[name][1], outcome[name]
    if backend == "ddp":  # whose hooks on outputs FairScale's needs not
        assert_right(ranks, ["Yields", "Maps", "Encloses"], "fairscale", True)


@pytest.mark.covering
@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("backend", DIVIDED)
def test_what_computes_later_is_right_or_refused(ranks: Any, backend: str, units: bool) -> None:
    names = ["Encloses", "Lazy"]
    for rank, outcome in enumerate(ranks.run(job_train, 2, names, backend, units)):
        for name in names:
            if isinstance(outcome[name], tuple):
                assert outcome[name][0] in ("ModelError", "OptimizerError", "RuntimeError"), outcome[name]
            else:
                assert not list(differences(replicas(name)[rank], outcome[name])), name


def assert_named(ranks: Any, backend: str, units: bool, precision: str | None = None) -> None:
    for outcome in ranks.run(job_train, 2, [*WRITTEN, "Base"], backend, units, precision):
        for name, weight in WRITTEN.items():
            assert outcome[name][0] == "ModelError", (name, outcome[name])
            assert f"'{weight}'" in outcome[name][1] and "in place" in outcome[name][1], outcome[name]
        assert not isinstance(outcome["Base"], tuple), outcome["Base"]


@pytest.mark.covering
@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("backend", DIVIDED)
def test_weights_that_a_forward_writes_are_named(ranks: Any, backend: str, units: bool) -> None:
    assert_named(ranks, backend, units)


@pytest.mark.parametrize("backend", [*WHOLE, *DIVIDED])
def test_what_a_forward_writes_to_cast_copies_is_named(ranks: Any, backend: str) -> None:
    """The copies of mixed precision are thrown away."""
    assert_named(ranks, backend, True, "bf16")


class ActNorm(Base):
    """Its first forward sets a weight by the batch, under ``no_grad``, or past autograd."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.by_data, self.is_set = by_data, False
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Any:
        if not self.is_set:
            self.is_set = True
            with torch.no_grad():
                deviation = x.std(0) + 0.1
                if self.by_data:
                    self.scale.data = 1 / deviation
                else:
                    self.scale.copy_(1 / deviation)
        return super().forward(x * self.scale)


class Masked(Base):
    """A hook before a unit's forward prunes it, through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_pre_hook(prune)


def prune(child: Any, _: Any) -> None:
    child.weight.data[:, 0] = 0


def outcome_of(build: Callable[[], Any], backend: str, units: bool) -> str:
    torch.manual_seed(0)
    policy = {Child} if units else None
    settings = {"merge_below": 0} if backend == "fsdp2" else {}
    model = fsshard.wrap(build(), backend=backend, auto_wrap_policy=policy, **settings)
    try:
        model(batch(0, dist.get_rank()))
    except fsshard.FsshardError as error:
        return str(error)
    return "nothing was said"


FIRST_FORWARDS: dict[str, tuple[Callable[[], Any], str]] = {
    "no_grad": (lambda: ActNorm(by_data=False), "scale"),
    "data": (lambda: ActNorm(by_data=True), "scale"),
    "a hook": (Masked, "a.weight"),
}


@pytest.mark.covering
@pytest.mark.parametrize("what", FIRST_FORWARDS)
@pytest.mark.parametrize("units", [False, True])
@on_backends(DIVIDED)
def test_weights_that_the_first_forward_writes_are_named(backend: str, units: bool, what: str) -> None:
    build, weight = FIRST_FORWARDS[what]
    told = outcome_of(build, backend, units)
    assert f"'{weight}'" in told and "in place, which would be lost" in told


@on_backends([*WHOLE, *DIVIDED])
def test_weights_are_initialised_by_a_batch_as_the_error_says(backend: str) -> None:
    model, optimizer = with_sgd(ActNorm(by_data=False), backend=backend)
    if backend in DIVIDED:
        with refused("`with torch.no_grad(), model.full_parameters(writeback=True): model.module(batch)`"):
            model(batch(0, 0))
        model.module.is_set = False
    with torch.no_grad(), model.full_parameters(writeback=True):
        model.module(batch(0, 0))
    torch.manual_seed(0)
    bare = ActNorm(by_data=False)
    bare.load_state_dict({**model.state_dict(), "scale": torch.ones(6)})
    with torch.no_grad():
        bare(batch(0, 0))
    assert torch.equal(model.state_dict()["scale"], bare.scale)
    judge = torch.optim.SGD(bare.parameters(), lr=0.1)
    by_hand.train(bare, judge, lambda m, rank, step: m(batch(step, rank)), steps=2, ranks=2)
    for step in range(2):
        model(batch(step, dist.get_rank())).backward()
        take_step(optimizer)
    saved = model.state_dict()
    check_equal(dict(bare.state_dict()), dict(saved))


PENALTIES: dict[str, Callable[[Any], Any]] = {
    "parameters": lambda model: sum(p.pow(2).sum() for p in model.parameters()),
    "attribute": lambda model: model.a.weight.pow(2).sum(),
    "module": lambda model: sum(p.abs().sum() for p in model.module.parameters()),
}


@on_backends(DIVIDED)
def test_penalties_beside_the_forward_are_refused(backend: str) -> None:
    outcome = {}
    for name, act in PENALTIES.items():
        for steps in (0, 2):
            model = wrapped("Base", backend, True)
            for step in range(steps):
                model(batch(step, dist.get_rank())).backward()
            try:
                penalty = act(model)
                (model(batch(steps, dist.get_rank())) + penalty).backward()
                outcome[f"{name} {steps}"] = "no error"
            except (fsshard.FsshardError, RuntimeError) as error:
                outcome[f"{name} {steps}"] = str(error)
    for name, text in outcome.items():
        assert "outside of" in text or (backend == "fsdp2" and "mixed torch.Tensor and DTensor" in text), (
            name,
            text,
        )


def job_module(backend: str) -> str:
    model = wrapped("Base", backend, True)
    model(batch(0, 0))
    try:
        model.module(batch(0, 0))
    except fsshard.FsshardError as error:
        return str(error)
    return "no error"


def test_calling_the_module_inside_is_refused_where_it_does_not_gather(ranks: Any) -> None:
    assert all("model(x), not model.module(x)" in text for text in ranks.run(job_module, 2, "fsdp"))
    assert ranks.run(job_module, 2, "fsdp2") == ["no error"] * 2


@on_backends(DIVIDED)
def test_training_goes_on_after_a_refusal(backend: str) -> None:
    """A forward that was refused leaves nothing behind, and the guard is off outside of forwards."""
    model = wrapped("Base", backend, True)
    inner = model.module
    right = inner.forward
    inner.forward = lambda x: right(x) + inner.a.weight.sum()
    with pytest.raises(fsshard.ModelError, match=r"reads 'a\.weight'|a DTensor"):
        model(batch(0, dist.get_rank()))
    inner.forward = right
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(3):
        model(batch(step, dist.get_rank())).backward()
        take_step(optimizer)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1.0)
    found = dict(model.state_dict())
    check_equal(replicas("Base")[0]["weights"], found)


def job_raw(engine: str, name: str) -> float:
    """The loss that the bare engine gives in silence."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    warnings.simplefilter("ignore")
    model = build(name)
    if engine == "fsdp2":
        fully_shard(model.a)
        fully_shard(model)
    else:
        model.a = FullyShardedDataParallel(model.a, device_id=torch.device("cpu"), use_orig_params=True)
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    loss = model(batch(0, dist.get_rank()))
    return float(loss.detach().to_local() if hasattr(loss, "to_local") else loss)


def test_the_raw_engines_say_nothing(ranks: Any) -> None:
    """torch 2.13 computes a penalty of parts and raises nothing."""
    right = [outcome["losses"][0] for outcome in replicas("Penalty", 1)]
    for engine in DIVIDED:
        assert all(abs(a - b) > 1e-3 for a, b in zip(right, ranks.run(job_raw, 2, engine, "Penalty"), strict=True))


@torch.compile(fullgraph=True, backend="eager")
def compiled(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


class CallsCompiled(Child):
    def forward(self, x: Tensor) -> Any:
        return compiled(x, self.weight) + self.bias


def job_compiled() -> dict[str, Any]:
    """Forwards that are looked at, and one that is not."""
    BUILDS["CallsCompiled"] = lambda: written(CallsCompiled)
    return job_train(["CallsCompiled"], "fsdp", True)


def test_a_users_own_compiled_function_goes_on_without_the_guard(ranks: Any) -> None:
    BUILDS["CallsCompiled"] = lambda: written(CallsCompiled)
    for reference, outcome in zip(replicas("CallsCompiled"), ranks.run(job_compiled, 2), strict=True):
        assert not isinstance(outcome["CallsCompiled"], tuple), outcome
        check_equal(reference, outcome["CallsCompiled"])
