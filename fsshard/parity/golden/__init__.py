"""Are the trainings still those of the release? Golden runs: recorded losses, and the recipes that made them.

Weights and batches come from a rule in exact integer arithmetic (no random generator, no file), so a golden run is a
small recorded training (:class:`fsshard.parity.Trace` with ``detail="losses"``), one per minor version of torch. They
were made by ``ddp`` on two ranks; every backend must reproduce them there.

On another kind of processor, or another torch, kernels add in another order, and the last digits may move. Then the
losses are judged as in every comparison with a recorded training: see :func:`fsshard.parity.compare`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fsshard.backends import backend_class
from fsshard.errors import ConfigurationError
from fsshard.launching.pool import RankPool
from fsshard.parity.runs import Progress, compare
from fsshard.parity.sketch import shifted, signed, splitmix64
from fsshard.parity.trace import Trace
from fsshard.recipes.recipe import Recipe

__all__ = ["RECIPES", "GoldenResult", "check", "file_of"]

FOLDER = Path(__file__).parent
STEPS, WORLD_SIZE = 10, 2
WORDS = {"exact": "equal", "bound": "within rounding"}


# ----------------------------------------------------------------------------------------------------------- recipes


def uniform(name: str, *shape: int) -> Tensor:
    """Return numbers in [-1, 1) from a name: the same bits on every machine, by integer arithmetic alone.

    Counter mode of the SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014), of which 24 bits are kept, as many
    as a float32 holds exactly.
    """
    state = torch.arange(1, math.prod(shape) + 1, dtype=torch.int64) * signed(0x9E3779B97F4A7C15)
    state += signed((zlib.crc32(name.encode()) << 32) | zlib.adler32(name.encode()))
    return (shifted(splitmix64(state), 40).to(torch.float32) * 2.0**-23 - 1.0).reshape(shape)


def fill(model: nn.Module) -> nn.Module:
    """Set weights by the rule, of size 1 / sqrt(fan in) rounded to a power of two; vectors named weight are ones."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                continue
            real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            real.copy_(uniform(name, *real.shape) * 2.0 ** round(math.log2(parameter[0].numel() ** -0.5)))
    return model


def _batches(*shape: int) -> Callable[[int, int, int], tuple[Tensor, Tensor]]:
    return lambda rank, _, number: (uniform(f"x{rank}.{number}", *shape), uniform(f"y{rank}.{number}", *shape))


def _mean_square(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


class _SpectralLayer(nn.Module):
    """Multiplies the lowest Fourier modes by complex weights, next to a pointwise path (Li et al., ICLR 2021)."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.zeros(width, width, modes, modes, dtype=torch.complex64))
        self.pointwise = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x)
        low = torch.einsum("bixy,ioxy->boxy", spectrum[..., : self.modes, : self.modes], self.weight)
        padded = nn.functional.pad(low, (0, spectrum.shape[-1] - self.modes, 0, spectrum.shape[-2] - self.modes))
        return torch.relu(torch.fft.irfft2(padded, s=x.shape[-2:]) + self.pointwise(x))


def spectral() -> Recipe:
    """A small Fourier neural operator with complex64 weights, AdamW and clipping."""
    return Recipe(
        build=lambda: fill(
            nn.Sequential(nn.Conv2d(1, 8, 1), _SpectralLayer(8, 4), _SpectralLayer(8, 4), nn.Conv2d(8, 1, 1))
        ),
        batches=_batches(4, 1, 12, 12),
        loss=_mean_square,
        optimizer=torch.optim.AdamW,
        hyper={"lr": 2.0**-8},
        clip=0.5,
        name="spectral",
    )


class _Transformer(nn.Module):
    """Two encoder layers between an embedding and the same embedding transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layers = (nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def _next_token(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def transformer() -> Recipe:
    """Two transformer layers with a tied embedding, Adam, three batches per step."""
    return Recipe(
        build=lambda: fill(_Transformer()),
        batches=lambda rank, _, number: ((uniform(f"tokens{rank}.{number}", 4, 9) + 1.0) * 10.0).long(),
        loss=_next_token,
        hyper={"lr": 2.0**-8},
        accumulate=3,
        name="transformer",
    )


def convnet() -> Recipe:
    """Convolutions and BatchNorm, SGD with momentum."""
    first, last = functools.partial(nn.Conv2d, 1, 8, 3, padding=1), functools.partial(nn.Conv2d, 8, 1, 3, padding=1)
    return Recipe(
        build=lambda: fill(nn.Sequential(first(), nn.BatchNorm2d(8), nn.ReLU(), last(bias=False))),
        batches=_batches(4, 1, 10, 10),
        loss=_mean_square,
        optimizer=torch.optim.SGD,
        hyper={"lr": 2.0**-5, "momentum": 0.875},
        name="convnet",
    )


RECIPES = {"spectral": spectral, "transformer": transformer, "convnet": convnet}
"""The golden runs that come with the library; each has a file per minor version of torch next to this module."""


# ------------------------------------------------------------------------------------------------- record and compare


@dataclass(frozen=True, kw_only=True)
class GoldenResult:
    """The answer whether the golden run of a recipe came out again.

    Attributes:
        name: of the recipe.
        equal: to the last bit.
        verdict: ``"equal"``, ``"within rounding"`` (another processor, or another version of torch) or ``"different"``.
        text: one line that says so, with the first step that differs.
    """

    name: str
    equal: bool
    verdict: str
    text: str

    @property
    def ok(self) -> bool:
        """Return whether it is the same training."""
        return self.verdict != "different"


def check(
    backend: str = "ddp", *, pool: RankPool | None = None, timeout: float = 120.0, progress: Progress | None = None
) -> list[GoldenResult]:
    """Run the library's golden recipes on two ranks and compare their losses with the files.

    Args:
        backend: which backend trains them.
        pool: ranks to run on; None starts two.
        timeout: seconds per run.
        progress: called with (done, total, what is running).
    """
    if backend_class(backend).facts.one_process:
        raise ConfigurationError(
            f"golden runs of {WORLD_SIZE} ranks under backend {backend!r}: one process on the joined batch adds in "
            "another order; use a backend of several ranks, for example 'ddp'"
        )
    found, show = [], progress or (lambda done, total, text: None)
    with contextlib.nullcontext(pool) if pool is not None else contextlib.closing(RankPool()) as ranks:
        for number, (name, recipe) in enumerate(RECIPES.items()):
            show(float(number), float(len(RECIPES)), f"{name} under {backend}")
            trace = Trace.load(file_of(name))
            report = compare(recipe, against=trace, backends=[backend], pool=ranks, timeout=timeout)
            (cell,), equal = report.cells, report.cells[0].verdict == "exact"
            made_on = "; ".join(report.changes) or "the same kind of processor"
            text = f"{cell.first_divergence or cell.reason}; made on {made_on}"
            if equal:
                text = f"{trace.steps} losses of {cell.backend} on {trace.world_size} ranks equal to the last bit"
            verdict = WORDS.get(cell.verdict, "different")
            found.append(GoldenResult(name=name, equal=equal, verdict=verdict, text=text))
    show(float(len(RECIPES)), float(len(RECIPES)), "done")
    return found


def file_of(name: str, version: str = torch.__version__) -> Path:
    """Return the golden run of a minor version of torch, or of the nearest one before it that has one, or the first."""
    minors = {_minor(path.parent.name): path for path in FOLDER.glob(f"*/{name}.json")}
    before = [minor for minor in minors if minor <= _minor(version)]
    return minors[max(before) if before else min(minors)]


def _minor(version: str) -> tuple[int, int]:
    numbers = re.findall(r"\d+", version)
    return int(numbers[0]), int(numbers[1])
