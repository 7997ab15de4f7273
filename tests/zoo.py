"""Small models for tests: one table of cases, each with its batches and its loss.

Every ``build`` seeds torch, so two builds are equal to the last bit; every batch depends on its rank and step only.
Models of other packages are imported inside the builders, so that the table costs nothing to import.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any] | tuple[Any, ...]

SIZE = 4
"""Samples per batch."""


def mean_square(output: Tensor) -> Tensor:
    """Mean of |output|^2; real for complex outputs too."""
    if output.is_complex():
        return (output.real.square() + output.imag.square()).mean()
    return output.square().mean()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model to train.

    Attributes:
        build: makes the model, the same one each time.
        batch: (rank, step) -> keyword arguments (a dict) or positional ones (a tuple); dim 0 is the sample.
        loss: the model's output -> a real scalar.
        owners: names of the called modules that own complex weights (of the modules by themselves, so ``""`` is the
            root); empty for a real model.
        pure: whether a forward changes nothing and draws no random numbers.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any], Tensor] = mean_square
    owners: tuple[str, ...] = ()
    pure: bool = True

    @property
    def has_complex(self) -> bool:
        """Return whether the model computes with complex weights."""
        return bool(self.owners)


def generator(rank: int, step: int) -> torch.Generator:
    """The random numbers of one batch."""
    return torch.Generator().manual_seed(1000 * rank + step + 1)


def normal(*shape: int) -> Callable[[int, int], Batch]:
    """Batches of one float32 tensor of ``shape``."""
    return lambda rank, step: (torch.randn(*shape, generator=generator(rank, step)),)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """``make`` from a fixed seed, leaving torch's generator as it was."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    return build


def number(*shape: int, dtype: torch.dtype = torch.complex64) -> nn.Parameter:
    """A complex parameter of moderate size."""
    return nn.Parameter(0.5 * torch.randn(shape, dtype=dtype))


# ------------------------------------------------------------------------------------------ complex weights, plain


class ComplexAffine(nn.Module):
    """``x @ w + b`` with complex ``w`` (width, width) and ``b`` (width,)."""

    def __init__(self, width: int = 4, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.w = number(width, width, dtype=dtype)
        self.b = number(width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.w.dtype) @ self.w + self.b


class ToReal(nn.Module):
    """Complex of any precision to float32; it has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.real + x.imag).float()


class ToComplex(nn.Module):
    """float32 to complex64; it has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex64)


def mlp_complex() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), ComplexAffine(8), nn.Linear(8, 5, dtype=torch.complex64), ToReal(), nn.Linear(5, 3)
    )


class Tied(nn.Module):
    """A complex weight shared by two modules, and one under two names of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.real = ComplexAffine(), ComplexAffine(), ToReal()
        self.second.w = self.first.w
        self.gain = number(4)
        self.alias = self.gain

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.real(self.first(x) * self.gain)) + self.alias


class OddFirst(nn.Module):
    """Real parameters of odd size in front of the complex ones: whoever packs them in a row meets odd offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.gain = nn.Parameter(torch.ones(1))
        self.w = number(3, 3)
        self.shift = nn.Parameter(torch.randn(5))
        self.v = number(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.gain + x).to(torch.complex64) @ self.w @ self.v + self.shift


class ZeroDim(nn.Module):
    """0-dim parameters, complex and real."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.tensor(1.0 + 0.5j))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.linear = nn.Linear(3, 4)
        self.w = number(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale * self.turn + x.to(torch.complex64) @ self.w


class TwoPrecisions(nn.Module):
    """complex128 in modules of their own, float32 and complex64 beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.real = nn.Linear(4, 4), ToReal()
        self.low = ComplexAffine()
        self.high = ComplexAffine(dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        return self.real(self.high(self.real(self.low(self.linear(x)))))


class Holders(nn.Module):
    """Complex parameters in a ParameterList and a ParameterDict, read by index, slice, name and copy."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([number(4, 4), number(4, 4), number(4, 4), nn.Parameter(torch.randn(4))])
        self.named = nn.ParameterDict({"u": number(4), "v": nn.Parameter(torch.randn(4))})

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.complex64) @ self.several[0]
        for weight in self.several[1:3]:
            y = y @ weight
        for value in self.named.copy().values():
            y = y * value
        return y + self.several[-1]


class Buffered(nn.Module):
    """A complex buffer that every training forward replaces, a counter, and a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.affine = ComplexAffine()

    def forward(self, x: Tensor) -> Tensor:
        y = self.affine(x) * self.phase
        if self.training:
            self.calls += 1
            self.phase = self.phase * 0.99
        return y


class PartlyFrozen(nn.Module):
    """A frozen complex weight between trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.real = ComplexAffine(), ComplexAffine(), ToReal()
        self.first.w.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.real(self.first(x)))


class Transposed(nn.Module):
    """A complex parameter that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64).t())
        self.v = number(6, 4)
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex64) @ self.w @ self.v + self.shift


class Recurrent(nn.Module):
    """One module used five times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.real = ComplexAffine(), ToReal()
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = torch.tanh(self.real(self.cell(x)))
        return self.out(x)


def orthogonal() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), ToComplex(), nn.Linear(5, 5, bias=False, dtype=torch.complex64), ToReal())
    nn.utils.parametrizations.orthogonal(model[2])
    return model


# ------------------------------------------------------------------------------------------ neuraloperator


def fno(**changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from neuralop.models import FNO

        settings = {
            "n_modes": (4, 4),
            "in_channels": 1,
            "out_channels": 1,
            "hidden_channels": 6,
            "n_layers": 2,
            "projection_channel_ratio": 2,
        }
        return FNO(**(settings | changes))

    return seeded(make)


def tfno(factorization: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from neuralop.models import TFNO

        return TFNO(
            n_modes=(4, 4),
            in_channels=1,
            out_channels=1,
            hidden_channels=6,
            n_layers=2,
            projection_channel_ratio=2,
            factorization=factorization,
            rank=0.4,
        )

    return seeded(make)


def uno() -> nn.Module:
    from neuralop.models import UNO

    with contextlib.redirect_stdout(io.StringIO()):  # it prints its skips
        return UNO(
            in_channels=1,
            out_channels=1,
            hidden_channels=4,
            uno_out_channels=[4, 4, 4],
            uno_n_modes=[[4, 4]] * 3,
            uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2, 2]],
            horizontal_skips_map={2: 0},
            n_layers=3,
            channel_mlp_skip="linear",
            lifting_channels=4,
            projection_channels=4,
        )


# ------------------------------------------------------------------------------------------ real models


def t5() -> nn.Module:
    from fsshard.recipes.models import small_t5

    return small_t5(words=40, width=32, heads=4, layers=2, d_ff=48, dropout_rate=0.0)


def t5_batch(rank: int, step: int) -> Batch:
    tokens = torch.randint(1, 40, (SIZE, 2, 6), generator=generator(rank, step))
    return {"input_ids": tokens[:, 0].contiguous(), "labels": tokens[:, 1].contiguous()}


def conv_batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    )


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


# ------------------------------------------------------------------------------------------ the table

IMAGE = normal(SIZE, 1, 8, 8)
CONVS = ("fno_blocks.convs.0", "fno_blocks.convs.1")

ZOO: dict[str, Case] = {
    "mlp_complex": Case(build=seeded(mlp_complex), batch=normal(SIZE, 6), owners=("1", "2")),
    "plain": Case(build=seeded(ComplexAffine), batch=normal(SIZE, 4), owners=("",)),
    "tied": Case(build=seeded(Tied), batch=normal(SIZE, 4), owners=("", "first", "second")),
    "odd_first": Case(build=seeded(OddFirst), batch=normal(SIZE, 3), owners=("",)),
    "zero_dim": Case(build=seeded(ZeroDim), batch=normal(SIZE, 3), owners=("",)),
    "two_precisions": Case(build=seeded(TwoPrecisions), batch=normal(SIZE, 4), owners=("low", "high")),
    "holders": Case(build=seeded(Holders), batch=normal(SIZE, 4), owners=("",)),
    "buffered": Case(build=seeded(Buffered), batch=normal(SIZE, 4), owners=("affine",), pure=False),
    "frozen": Case(build=seeded(PartlyFrozen), batch=normal(SIZE, 4), owners=("first", "second")),
    "transposed": Case(build=seeded(Transposed), batch=normal(SIZE, 4), owners=("",)),
    "recurrent": Case(build=seeded(Recurrent), batch=normal(SIZE, 4), owners=("cell",)),
    "orthogonal": Case(build=seeded(orthogonal), batch=normal(SIZE, 4), owners=("2",)),
    "fno": Case(build=fno(), batch=IMAGE, owners=CONVS),
    "fno_dense": Case(build=fno(factorization="dense"), batch=IMAGE, owners=CONVS),
    "fno_complex_tucker": Case(
        build=fno(factorization="ComplexTucker", rank=0.4, implementation="factorized"), batch=IMAGE, owners=CONVS
    ),
    "fno_complex_tt": Case(
        build=fno(factorization="ComplexTT", rank=0.4, implementation="factorized"), batch=IMAGE, owners=CONVS
    ),
    "tfno_tucker": Case(build=tfno("tucker"), batch=IMAGE, owners=CONVS),
    "tfno_cp": Case(build=tfno("cp"), batch=IMAGE, owners=CONVS),
    "tfno_tt": Case(build=tfno("tt"), batch=IMAGE, owners=CONVS),
    "uno": Case(build=seeded(uno), batch=IMAGE, owners=tuple(f"fno_blocks.{i}.convs.0" for i in range(3))),
    "t5": Case(build=seeded(t5), batch=t5_batch, loss=lambda output: output.loss),
    "conv_batchnorm": Case(build=seeded(conv_batchnorm), batch=normal(SIZE, 1, 6, 6), pure=False),
    "dropout": Case(build=seeded(with_dropout), batch=normal(SIZE, 6), pure=False),
}

COMPLEX = tuple(name for name, case in ZOO.items() if case.has_complex)
"""Names of the cases with complex weights."""
