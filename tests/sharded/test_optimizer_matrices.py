"""Weights of more than two dims seen as matrices, judged by bare replicas whose weights are cut by hand."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsshard
from fsshard.errors import OptimizerError
from fsshard.sharded.optimizer_checks import OptimizerRequest
from tests import optimizers
from tests.models import batch
from tests.on_ranks import on_backends, on_ranks
from tests.optimizers import SOAP, MyLion, Shampoo, Written, average
from tests.sets import often
from tests.training_runs import DISTRIBUTED, differences


class Stacks(Written):
    """A Muon that takes stacks of matrices, over a mean of moduli, and counts; number by number without."""

    def __init__(self, params: Any, lr: float = 0.05, matrices: bool = True, turn: str = "mH") -> None:
        super().__init__(params, lr, matrices=matrices, turn=turn)

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        if not state:
            state.update(momentum=torch.zeros_like(parameter), size=torch.zeros_like(gradient.abs()))
            state.update(count=0, step=torch.zeros(()), last=[None, torch.zeros_like(gradient)])
        state["momentum"].mul_(0.9).add_(gradient)
        state["size"].lerp_(gradient.abs(), 0.1)
        state["count"] += 1
        state["step"] += 1
        state["last"][1].copy_(gradient)
        if not group["matrices"]:
            return state["momentum"] / (state["size"] + 1e-3)
        x = state["momentum"] / state["momentum"].norm(dim=(-2, -1), keepdim=True)
        for _ in range(4):
            turned = x.mH if group["turn"] == "mH" else x.mT
            x = 1.5 * x - 0.5 * x @ turned @ x
        return x


class Single(Stacks):
    """The same for one matrix, and a factor as of Shampoo."""

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        if not group["matrices"]:
            return super().direction(group, parameter)
        assert parameter.dim() == 2
        product, state = parameter.grad @ parameter.grad.mH, self.state[parameter]
        left = state.get("left", torch.zeros_like(product)) + product
        direction = super().direction(group, parameter)
        state["left"] = left
        return left @ direction / left.norm()


class Fields(nn.Module):
    """A spectral weight, one in another order in memory, a kernel, a complex matrix, a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral = nn.Parameter(torch.randn(3, 5, 2, 3, dtype=torch.complex64) / 3)
        self.lines = nn.Parameter(torch.randn(4, 5, 3, dtype=torch.complex64).permute(1, 2, 0) / 3)
        self.factor = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.conv, self.bias = nn.Conv2d(1, 3, 2), nn.Parameter(torch.zeros(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.view(-1, 1, 3, 4))  # (batch, 3, 2, 3)
        x = torch.einsum("bixy,ioxy->boxy", x.to(torch.complex64), self.spectral) + self.bias[:, None, None]
        x = torch.einsum("boxy,ocx->bcxy", x, self.lines[..., :2])
        return (torch.einsum("bcxy,dc->bdxy", x, self.factor) + self.lines.sum()).abs()


SEE = {"spectral": "modes", "lines": "modes", "factor": "matrix", "conv.weight": "matrix"}


def fields() -> nn.Module:
    torch.manual_seed(0)
    return Fields()


def by_hand(name: str, whole: Tensor, stacked: bool) -> list[Tensor]:
    if SEE.get(name) != "modes":
        return [whole.reshape(len(whole), -1).clone() if name in SEE else whole.clone()]
    places = itertools.product(*map(range, whole.shape[2:]))
    modes = [whole[(..., *place)].clone(memory_format=torch.contiguous_format) for place in places]
    return [torch.stack(modes)] if stacked else modes


def in_place(name: str, whole: Tensor, pieces: list[Tensor]) -> None:
    if SEE.get(name) == "modes":
        modes = pieces[0] if len(pieces) == 1 else pieces
        for place, mode in zip(itertools.product(*map(range, whole.shape[2:])), modes, strict=True):
            whole[(..., *place)] = mode
    else:
        whole.copy_(pieces[0].view(whole.shape))


def loss_of(model: Any, number: int) -> Tensor:
    return model(batch(number, 12)).square().mean()


class ByHand:
    """The class over the replicas' matrices."""

    def __init__(self, bare: nn.Module, optimizer_class: Any) -> None:
        self.bare, stacked = bare, optimizer_class is Stacks
        self.cut_by_hand = functools.partial(by_hand, stacked=stacked)
        self.cut = {n: [nn.Parameter(v) for v in self.cut_by_hand(n, p.detach())] for n, p in bare.named_parameters()}
        groups = [{"params": [p for n in SEE for p in self.cut[n]]}]
        groups += [{"params": [p for n in self.cut.keys() - SEE.keys() for p in self.cut[n]], "matrices": False}]
        self.optimizer = optimizer_class(groups)

    @torch.no_grad()
    def step(self) -> None:
        for name, parameter in self.bare.named_parameters():
            for piece, grad in zip(self.cut[name], self.cut_by_hand(name, parameter.grad), strict=True):
                piece.grad = grad
        self.optimizer.step()
        for name, parameter in self.bare.named_parameters():
            in_place(name, parameter, [piece.detach() for piece in self.cut[name]])

    def momentum(self, name: str) -> Tensor:
        whole = torch.zeros_like(self.bare.get_parameter(name).detach())
        in_place(name, whole, [self.optimizer.state[piece]["momentum"] for piece in self.cut[name]])
        return whole


def built(model: Any, optimizer_class: Any) -> Any:
    matrices = [{"params": [name for name in SEE if SEE[name] == how], "see": how} for how in ("modes", "matrix")]
    others = [name for name, _ in model.named_parameters() if name not in SEE]
    groups = [*matrices, {"params": others, "matrices": False}]
    return fsshard.build_optimizer(model, optimizer_class, groups, whole=True)


steps = functools.partial(optimizers.steps, loss_of)


CLASSES = {each.__name__: each for each in (Stacks, Single)}


def job_exact(kind: str, *backends: str) -> dict[str, list[str]]:
    bare = fields()
    native = ByHand(bare, CLASSES[kind])
    losses = steps(bare, native, range(3), bare=True)
    wrong = {}
    for backend in backends:
        model = fsshard.wrap(fields(), backend=backend)
        optimizer = built(model, CLASSES[kind])
        found = steps(model, optimizer, range(3))
        wrong[backend] = list(differences(losses, found))
        wrong[backend] += differences(dict(bare.state_dict()), dict(model.state_dict()))
        state = optimizer.state_dict()["state"]
        for name, _ in bare.named_parameters():
            wrong[backend] += differences(native.momentum(name), state[name]["momentum"], f"momentum of {name}")
        if kind == "Single":
            mine = torch.stack([native.optimizer.state[piece]["left"] for piece in native.cut["spectral"]])
            wrong[backend] += differences(mine, state["spectral"]["left"], "left")
    return wrong


@pytest.mark.parametrize("kind", CLASSES)
def test_two_ranks_train_as_matrices_cut_by_hand(ranks: Any, kind: str) -> None:
    """Losses, weights and state to the last bit; classes that take a matrix, and such that take a stack."""
    assert ranks.run(job_exact, 2, kind, *DISTRIBUTED) == [{backend: [] for backend in DISTRIBUTED}] * 2
    assert ranks.run(job_exact, 1, kind, "none", "fsdp2") == [{"none": [], "fsdp2": []}]


# ------------------------------------------------------------------------------------------------ state


def build(backend: str, kind: str) -> tuple[Any, Any]:
    model = fsshard.wrap(fields(), backend=backend)
    return model, built(model, CLASSES[kind])


def job_save(folder: str, *what: str) -> Any:
    model, optimizer = build(*what)
    steps(model, optimizer, range(2))
    fsshard.save(folder, model, optimizer)
    saved = optimizers.saved_state(model, optimizer)
    assert not any("see" in group for group in saved[1]["param_groups"])
    return saved


def job_load(folder: str, saved: Any, *what: str) -> list[str]:
    train = functools.partial(steps, numbers=range(2, 4))
    return optimizers.load_each_way(functools.partial(build, *what), train, folder, saved)[0]


PLACES = (("fsdp2", 2), ("fsdp", 4), ("none", 1), ("fairscale", 2), ("ddp", 2), ("fsdp2", 4))
WAYS = [(kind, PLACES) for kind in CLASSES] + [("Single", PLACES[:2]), ("Stacks", PLACES[2:4])]


@pytest.mark.parametrize(("kind", "places"), often(WAYS, *WAYS[2:]))
def test_the_state_goes_to_other_engines_and_numbers_of_ranks(
    ranks: Any, tmp_path: Any, kind: str, places: Any
) -> None:
    for (here, size), (there, other) in itertools.pairwise(places):
        folder = str(tmp_path / here / str(size))
        saved = ranks.run(job_save, size, folder, here, kind)[0]
        assert saved[1]["state"]["spectral"]["momentum"].shape == (3, 5, 2, 3), "as any other optimizer's"
        assert ranks.run(job_load, other, folder, saved, there, kind) == [[]] * other


# ------------------------------------------------------------------------------------------------ torch's Muon


@on_backends(DISTRIBUTED)
def test_torchs_muon_takes_kernels(backend: str) -> None:
    """Kernels as matrices, and a matrix for each place of the other dims of a real weight."""
    wrong = list[str]()
    for see, cut in (("matrix", SEE), ("modes", {**SEE, "conv.weight": "modes"})):
        bare, model = fields(), fsshard.wrap(fields(), backend=backend)
        others = [name for name, _ in model.named_parameters() if name != "conv.weight"]
        fsshard.build_optimizer(model, torch.optim.SGD, others, lr=0.0)  # FairScale reduces what an optimizer owns
        muon = fsshard.build_optimizer(model, torch.optim.Muon, ["conv.weight"], whole=True, see=see, lr=0.05)  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.sharded.test_optimizer_matrices.SEE", cut)
            weight = bare.get_parameter("conv.weight")
            cuts = [nn.Parameter(piece) for piece in by_hand("conv.weight", weight.detach(), False)]
            native = torch.optim.Muon(cuts, lr=0.05)
            for number in range(2):
                for each in (bare, model):
                    each.zero_grad()
                    loss_of(each, number).backward()
                average(bare)
                assert weight.grad is not None
                for piece, grad in zip(cuts, by_hand("conv.weight", weight.grad, False), strict=True):
                    piece.grad = grad
                native.step()
                muon.step()
                in_place("conv.weight", weight.detach(), [piece.detach() for piece in cuts])
        wrong += differences(weight.detach(), model.state_dict()["conv.weight"], see)
    assert not wrong


def job_muon_refused() -> None:
    fsshard.build_optimizer(fsshard.wrap(fields(), backend="fsdp2"), torch.optim.Muon, ["conv.weight"], whole=True)


def test_torchs_muon_says_how_it_takes_them(ranks: Any) -> None:
    """The advice is what the test above does."""
    for error in ranks.run_expecting_errors(job_muon_refused, 2):
        assert "'conv.weight' is real, of shape (3, 1, 2, 2)" in str(error)
        assert "pass whole=True, see='matrix'" in str(error)


# ------------------------------------------------------------------------------------------------ complex algorithms


def asked(optimizer_class: Any, see: Any = "modes", modes: int = 9, complex_: bool = True, **settings: Any) -> Any:
    parameters = {"w": (torch.Size((4, 3, modes)), complex_)}
    return OptimizerRequest(
        optimizer_class, [{"params": ["w"]}], settings, parameters, whole=True, see={"w": see} if see else {}
    )


class NoComplex(Stacks):
    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        if parameter.is_complex():
            raise TypeError("complex parameters are not supported")
        return super().direction(group, parameter)


class TurnedSOAP(SOAP):
    def turned(self, state: dict[str, Any], matrix: Tensor) -> Tensor:
        return state["left_basis"].mT @ matrix @ state["right_basis"] if "left" in state else matrix


class Renewing(Written):
    """A basis of each tenth gradient, with .mT where .mH is meant."""

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        state["step"] = state.get("step", 0) + 1
        if state["step"] % 10 == 0:
            state["basis"] = torch.linalg.inv(torch.eye(len(gradient), dtype=gradient.dtype) + gradient @ gradient.mT)
        return state["basis"] @ gradient if "basis" in state else gradient


class TallOnly(Stacks):
    """Wrong only for what is taller than wide."""

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        turn = "T" if parameter.shape[-2] > parameter.shape[-1] else "mH"
        return super().direction({**group, "turn": turn}, parameter)


def test_algorithms_of_complex_matrices_are_told_from_others() -> None:
    for optimizer_class, see in itertools.product((Stacks, Single, SOAP, Shampoo), ("modes", "matrix")):
        asked(optimizer_class, see).check_settings()
    wrong = (asked(MyLion), asked(torch.optim.AdamW), asked(Renewing), asked(TurnedSOAP), asked(TurnedSOAP, "matrix"))
    for told in (asked(Stacks, turn="T"), asked(Stacks, "matrix", turn="T"), asked(TallOnly), *wrong):
        with pytest.raises(OptimizerError, match=r"is not U times the step for G .* but differs by \d\.\de") as caught:
            told.check_settings()
        number = float(str(caught.value).split("differs by ")[1].split()[0])
        assert number > 0.01
        assert "Write .mH where it has .T" in str(caught.value)
    asked(Stacks, turn="T", complex_=False).check_settings()
    asked(Stacks, see=None, turn="T").check_settings()
    with pytest.raises(OptimizerError, match=r"takes no complex matrices.*TypeError: complex parameters are not"):
        asked(NoComplex).check_settings()


class OverAll(Stacks):
    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        return parameter.grad / parameter.grad.norm()


class Few(Stacks):
    """Leaves out what looks like an embedding, as the first Muon does."""

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        return super().direction(group, parameter) if len(parameter) < 1000 else parameter.grad


@pytest.mark.parametrize("complex_", [False, True])
def test_a_stack_is_shown_to_who_takes_it_as_so_many_matrices(complex_: bool) -> None:
    for optimizer_class, stacked in ((Stacks, True), (Single, False), (OverAll, False), (Shampoo, False), (Few, True)):
        matrices = asked(optimizer_class, complex_=complex_).matrices["w"]
        assert (matrices.stacked, matrices.dims) == (stacked, 3 if stacked else 2), optimizer_class
    assert not asked(Few, modes=1000, complex_=complex_).matrices["w"].stacked
    assert asked(Shampoo, "matrix", complex_=complex_).matrices["w"].dims == 2


def test_a_class_that_flattens_a_stack_is_not_tried_on_all_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its factors would have 2e5 by 2e5 numbers."""
    called = []
    monkeypatch.setattr(Shampoo, "direction", counted(Shampoo.direction, called))
    assert not asked(Shampoo, modes=200_000).matrices["w"].stacked
    assert called and max(called) < 100


def counted(direction: Any, called: list[int]) -> Any:
    def of_lengths(optimizer: Any, group: Any, parameter: Any) -> Any:
        called.append(len(parameter))
        return direction(optimizer, group, parameter)

    return of_lengths


@pytest.mark.parametrize("see", ["modes", "matrix"])
def test_a_bias_with_more_dims_is_no_matrix(see: Any) -> None:
    groups = [{"params": ["bias", "w"]}]
    parameters = {"bias": (torch.Size((32, 1, 1)), False), "w": (torch.Size((4, 3, 2)), False)}
    request = OptimizerRequest(Stacks, groups, {}, parameters, whole=True, see=dict.fromkeys(parameters, see))
    assert list(request.matrices) == ["w"]
    request = OptimizerRequest(torch.optim.Muon, groups, {}, parameters, whole=True, see=dict.fromkeys(parameters, see))
    with pytest.raises(OptimizerError, match="'bias' is real, of shape") as caught:
        request.check_settings()
    assert "see=" not in str(caught.value)


# ------------------------------------------------------------------------------------------------ refusals


class Keeps(Shampoo):
    """Keeps what is told, under ``odd``."""

    def __init__(self, params: Any, what: str) -> None:
        super().__init__(params)
        self.what = what

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        mean = float(parameter.grad.abs().mean())
        odd = {"number": mean, "turned": parameter.grad.mT.clone(), "some": mean if mean > 0.9 else None}[self.what]
        direction = super().direction(group, parameter)
        if odd is not None:
            self.state[parameter]["odd"] = odd
        return direction


def job_kept(backend: str, what: str) -> None:
    torch.manual_seed(0)
    model = fsshard.wrap(nn.ParameterDict({"w": torch.randn(2, 3, 2)}), backend=backend)
    optimizer = fsshard.build_optimizer(model, Keeps, whole=True, see="modes", what=what)
    for parameter in model.parameters():
        parameter.grad = torch.arange(12.0).view(2, 3, 2).to(parameter) / 6
    optimizer.step()


@pytest.mark.parametrize(
    ("what", "told"),
    [("number", "keep tensors"), ("turned", "keep it in a list"), ("some", "different state for different")],
)
def test_state_that_a_checkpoint_could_not_hold(ranks: Any, what: str, told: str) -> None:
    """A number that differs from mode to mode; what has the shape of the weight by chance; state of some modes."""
    (error,) = ranks.run_expecting_errors(job_kept, 1, "none", what)
    assert isinstance(error, OptimizerError) and told in str(error)


@pytest.mark.parametrize(
    ("how", "group", "told"),
    [
        ({}, {"see": "matrix"}, "pass whole=True"),
        ({"whole": True, "see": "matrix", "see_complex": False}, {}, "leave out see_complex=False"),
        ({"whole": True, "see": "rows"}, {}, "expected 'matrix', 'modes' or None, got 'rows'"),
        ({"whole": True, "see": "matrix"}, {}, "build another optimizer"),
    ],
)
@on_ranks()
def test_settings_that_do_not_go_together(how: Any, group: Any, told: str) -> None:
    model = fsshard.wrap(fields(), backend="ddp")
    with pytest.raises(OptimizerError, match=re.escape(told)):
        fsshard.build_optimizer(model, Shampoo, [{"params": ["factor"], **group}], **how).add_param_group(
            {"params": ["spectral"], "see": "modes"}
        )
