"""L-BFGS under every engine, judged by torch's own over bare replicas and over the joint batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.errors import OptimizerError, StateDictError, UnsupportedByBackend
from fsshard.sharded.optimizer_lbfgs import _Vector
from tests import optimizers
from tests.models import Spectral, batch
from tests.on_ranks import on_backends, on_ranks
from tests.optimizers import average
from tests.sets import often
from tests.sharded.test_optimizer_whole import shapes
from tests.training_runs import differences

DIVIDING = ("fsdp2", "fsdp", "fairscale", "native")
SEARCHING = {"lr": 0.5, "max_iter": 6, "history_size": 4, "line_search_fn": "strong_wolfe"}
PLAIN = {"lr": 0.05, "max_iter": 4, "history_size": 3}
LONG = pytest.mark.long
SETTINGS = {"searching": SEARCHING, "plain": PLAIN}


class Wide(Tensor):
    """Adds up in float64, and rounds once."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (Tensor.dot, Tensor.sum):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return func(*(each.as_subclass(Tensor).double() for each in args)).to(args[0].dtype)


class Bare(torch.optim.LBFGS):
    """torch's own, which takes gradients of transposed weights, too."""

    wide = False

    def _gather_flat_grad(self) -> Tensor:
        parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._params]
        flat = torch.cat([(torch.view_as_real(x) if x.is_complex() else x).reshape(-1) for x in parts])
        return flat.as_subclass(Wide) if self.wide else flat


def loss_of(model: Any, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def mean(loss: Tensor) -> float:
    told = torch.tensor(loss.item(), dtype=torch.float64)
    dist.all_reduce(told)
    return told.item() / dist.get_world_size()


def steps(model: Any, optimizer: Any, numbers: range, bare: bool = False) -> list[Any]:
    """Return the result of each step, and how often it called the closure."""
    told = []
    for number in numbers:

        def closure(number: int = number) -> Any:
            told[-1] += 1
            optimizer.zero_grad()
            loss = loss_of(model, batch(number))
            loss.backward()
            if bare:
                average(model)
            return mean(loss) if bare else loss

        told.append(0)
        loss = optimizer.step(closure)
        told.append(loss if bare else mean(loss))
    return told


def wrapped(backend: str, built: Callable[[], nn.Module] = shapes) -> Any:
    settings = {"backend": "fairscale", "implementation": "native"} if backend == "native" else {"backend": backend}
    return fsshard.wrap(built(), **settings)


def optimizer_of(model: Any, kind: str) -> Any:
    return fsshard.build_optimizer(model, torch.optim.LBFGS, **SETTINGS[kind])


def by_parameter(bare: nn.Module, optimizer: Any) -> dict[str, Any]:
    """torch's state in fsshard's layout."""
    named = dict(bare.named_parameters())
    (state,) = optimizer.state.values()
    vectors = {key: state[key] for key in ("d", "prev_flat_grad")}
    vectors |= {f"{key}.{i}": each for key in ("old_dirs", "old_stps") for i, each in enumerate(state[key])}
    numbers = {key: state[key] for key in ("func_evals", "n_iter")}
    numbers |= {key: float(state[key]) for key in ("t", "H_diag", "prev_loss")}
    found = {name: {**numbers, "ro": list(map(float, state["ro"]))} for name in named}
    for key, vector in vectors.items():
        stored = [torch.view_as_real(p.detach()) if p.is_complex() else p for p in named.values()]
        pieces = vector.as_subclass(Tensor).split([each.numel() for each in stored])
        for (name, p), pairs, piece in zip(named.items(), stored, pieces, strict=True):
            shaped = piece.view(pairs.shape)
            found[name][key] = torch.view_as_complex(shaped.clone()) if p.is_complex() else shaped
    return found


def _sorted(state: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(state.items()))


@pytest.mark.parametrize("kind", often(SETTINGS, "searching"))
@on_ranks()
def test_two_ranks_step_as_bare_replicas(kind: str) -> None:
    """Losses, evaluations, weights and state to the last bit: torch's own under ddp, and where parameters are divided
    torch's own whose inner products are added up in float64."""
    wrong = {}
    for wide, backends in ((False, ("ddp",)), (True, DIVIDING)):
        bare = shapes()
        native = Bare(bare.parameters(), **SETTINGS[kind])
        native.wide = wide
        told = steps(bare, native, range(2), bare=True)
        for backend in backends:
            model = wrapped(backend)
            optimizer = optimizer_of(model, kind)
            wrong[backend] = list(differences(told, steps(model, optimizer, range(2))))
            wrong[backend] += differences(dict(bare.state_dict()), dict(model.state_dict()), "weights")
            state, expected = optimizer.state_dict()["state"], by_parameter(bare, native)
            wrong[backend] += [
                name for name in expected if list(differences(_sorted(expected[name]), _sorted(state[name])))
            ]
    assert wrong == {backend: [] for backend in ("ddp", *DIVIDING)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("world_size", "numbers"), [(2, 1000), (4, 7)])
@on_ranks()
def test_products_over_ranks_are_within_the_bound_of_torchs_own(
    dtype: torch.dtype, world_size: int, numbers: int
) -> None:
    """Of recursive summation, gamma(n) sum |x y|, of either sum."""
    rank = dist.get_rank()

    class Vector(_Vector):
        ranks, sent_from = dist.group.WORLD, torch.device("cpu")

    generator = torch.Generator().manual_seed(numbers)
    one, other = (torch.randn(numbers, dtype=dtype, generator=generator) for _ in range(2))
    cuts = [numbers * place // world_size for place in range(world_size)] + [numbers]
    cuts[1] = 0  # rank 0 has nothing
    x, y = (whole[cuts[rank] : cuts[rank + 1]].clone().as_subclass(Vector) for whole in (one, other))
    unit = numbers * torch.finfo(dtype).eps / 2
    gamma, wrong = 2 * unit / (1 - unit), []
    for name, mine, whole, size_of in (
        ("dot", x.dot(y), one.dot(other), (one * other).abs().sum()),
        ("sum", x.abs().sum(), one.abs().sum(), one.abs().sum()),
        ("max", x.abs().max(), one.abs().max(), torch.zeros(())),
    ):
        wrong += [name] if type(mine) is not Tensor or mine.dtype != dtype else []
        wrong += [f"{name}: {mine} {whole}"] if (mine - whole).abs() > gamma * size_of else []
    assert not wrong and (x - torch.inf + torch.inf).abs().max().isnan()


class Fine(Spectral):
    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).real + self.bias


def double() -> nn.Module:
    model = shapes()
    model.middle = Fine(7)
    model.middle.weight.data = model.middle.weight.data.to(torch.complex128)
    return model.double()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "backend", ["fsdp2", *(pytest.param(each, marks=LONG) for each in ("fairscale", "ddp", "fsdp"))]
)
@on_ranks(4)
def test_four_ranks_go_where_one_process_goes(backend: str) -> None:
    """In float64 over 12 iterations; some ranks hold no row of a weight, or own no parameter."""
    model, alone = wrapped(backend, double), double()
    optimizer, native = optimizer_of(model, "searching"), Bare(alone.parameters(), **SEARCHING)
    samples = [torch.empty(3, 4) for _ in range(dist.get_world_size())]
    far = []
    for number in range(2):
        dist.all_gather(samples, batch(number))
        x = torch.cat(samples).double()

        def closure(used: Any, at: Any, mine: Any) -> Any:
            used.zero_grad()
            loss = loss_of(at, mine)
            loss.backward()
            return loss

        before = native.step(lambda x=x: closure(native, alone, x)).item()
        mine = batch(number).double()
        after = mean(optimizer.step(lambda mine=mine: closure(optimizer, model, mine)))
        far.append(abs(after - before) / before)
    wholes = model.state_dict()
    far = far + [float((wholes[n] - p).abs().max() / p.abs().max()) for n, p in alone.state_dict().items()]
    assert max(far) < 1e-9


# ------------------------------------------------------------------------------------------------ state


def small() -> nn.Module:
    """Fewer parameters than ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1, bias=False))


BUILT = {"shapes": shapes, "small": small}


def build(backend: str, built: str) -> tuple[Any, Any]:
    model = wrapped(backend, BUILT[built])
    return model, optimizer_of(model, "searching")


def job_save(folder: str, *what: str) -> Any:
    model, optimizer = build(*what)
    steps(model, optimizer, range(1))
    fsshard.save(folder, model, optimizer)
    saved = optimizers.saved_state(model, optimizer)
    return saved, steps(model, optimizer, range(1, 2))


def job_load(folder: str, saved: Any, *what: str) -> Any:
    """Return what differs after loading by each way, and what the next steps tell."""
    train = functools.partial(steps, numbers=range(1, 2))
    return optimizers.load_each_way(functools.partial(build, *what), train, folder, saved)


CASES = [
    ("shapes", "fsdp", 2),
    pytest.param("small", "fairscale", 4, marks=LONG),
    *(pytest.param("shapes", *there, marks=LONG) for there in (("ddp", 2), ("fsdp2", 4), ("native", 2), ("none", 1))),
]


@pytest.mark.parametrize(("built", "backend", "size"), CASES)
def test_the_state_goes_to_other_engines_and_numbers_of_ranks(
    ranks: Any, tmp_path: Any, built: str, backend: str, size: int
) -> None:
    """There training goes on as here, where the ranks are as many and the sums are the same."""
    saved, here = ranks.run(job_save, 2, str(tmp_path / "a"), "fsdp2", built)[0]
    told = ranks.run(job_load, size, str(tmp_path / "a"), saved, backend, built)
    assert [wrong for wrong, _ in told] == [[]] * size
    assert size != 2 or backend == "ddp" or all(after == here for _, after in told)
    saved, _ = ranks.run(job_save, size, str(tmp_path / "b"), backend, built)[0]
    assert [wrong for wrong, _ in ranks.run(job_load, 2, str(tmp_path / "b"), saved, "fsdp", built)] == [[]] * 2


@on_backends(["fsdp2", pytest.param("ddp", marks=LONG)])
def test_reading_the_state_disturbs_nothing(backend: str) -> None:
    """A closure that reads the state changes nothing."""
    told = []
    for reads in (False, True):
        model = wrapped(backend)
        optimizer = optimizer_of(model, "searching")
        steps(model, optimizer, range(1))
        if reads:
            model.register_forward_pre_hook(lambda *_, optimizer=optimizer: optimizer.state and None)
        told.append(steps(model, optimizer, range(1, 2)))
    assert told[0] == told[1]


# ------------------------------------------------------------------------------------------------ refusals


class Subclass(torch.optim.LBFGS):
    pass


def job_refused(what: str) -> None:
    model = wrapped("fsdp2", small)
    if what == "whole":
        fsshard.build_optimizer(model, torch.optim.LBFGS, whole=True)
    if what == "subclass":
        fsshard.build_optimizer(model, Subclass)
    optimizer = optimizer_of(model, "searching")
    steps(model, optimizer, range(1))
    state = optimizer.state_dict()
    if what == "a vector is missing":
        del state["state"]["2.weight"]["old_dirs.0"]
        optimizer.load_state_dict(state)
        steps(model, optimizer, range(1))
    state["state"]["0.weight"]["d"] = torch.zeros(36)  # torch's, of all parameters
    optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("whole", UnsupportedByBackend, "leave whole=True out"),
        ("subclass", UnsupportedByBackend, "use backend='ddp'"),
        (
            "a vector is missing",
            OptimizerError,
            "without 'old_dirs.0'; load what optimizer.state_dict() or fsshard.save",
        ),
        ("torch's state", StateDictError, "0.weight: d"),
    ],
)
def test_what_cannot_be(ranks: Any, what: str, error: type[Exception], text: str) -> None:
    for raised in ranks.run_expecting_errors(job_refused, 2, what):
        assert isinstance(raised, error) and text in str(raised)
