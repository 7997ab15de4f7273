"""A training on record: what it gave in every step, rank by rank, and in which environment; kept as one JSON file.

Tensors, where they are kept, lie in safetensors files: one per step, quantity and rank while the training runs, one
beside the JSON file when it is saved. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import GenericAlias
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsshard.errors import TraceError
from fsshard.parity.plain import WrongField, plain, read_as
from fsshard.parity.sketch import PROJECTIONS, Sketch, digest, real_view
from fsshard.pictures import check_file

__all__ = ["DETAILS", "INITIAL", "RankTrace", "Rounding", "Shelf", "Step", "Trace", "write_tensors"]

FORMAT, VERSION = "fsshard parity trace", 1
DETAILS = ("losses", "digests", "tensors")
"""How much a trace holds, each with what is before it."""
INITIAL = -1
"""The step number under which weights before the first step are kept."""
_COMPLEX = "complex:"
_RECORD_AGAIN = "record it again: fsshard parity RECIPE --record FILE"


@dataclass(kw_only=True)
class Rounding:
    """Bounds of one step, as far as they were measured while it was trained.

    Attributes:
        loss: for the loss.
        gradients: by name, for all elements of a tensor.
        reductions: by name, how many reductions make up the gradient.
    """

    loss: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    reductions: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Step:
    """One step as one rank saw it.

    Attributes:
        batches: digests, per accumulated batch of every rank that this process trained on.
        loss: of this rank, summed over accumulated batches.
        norm: of the gradients before clipping, in float64.
        clipped_norm: what the engine's clipping returned; None where the recipe does not clip.
        groups: the optimizer's groups: names, learning rates and so on.
        random: digest of the random generators' state after the step.
        outputs: (module, digest of its output) in the order of execution.
        sketches: quantity -> name -> sketch.
        plain: state of the optimizer that is no tensor, by "parameter: key".
    """

    batches: list[list[str]]
    loss: float
    norm: float
    clipped_norm: float | None = None
    groups: list[dict[str, Any]] = field(default_factory=list)
    random: str = ""
    outputs: list[tuple[str, str]] = field(default_factory=list)
    sketches: dict[str, dict[str, Sketch]] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class RankTrace:
    """All steps of one rank.

    Attributes:
        initial: sketches of the weights before the first step.
        steps: in order.
        owned: parameter -> [start, stop) of the real numbers that this rank updates; with tensors only.
        rounding: bounds of each step; of a reference only.
    """

    initial: dict[str, Sketch] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    owned: dict[str, tuple[int, int]] = field(default_factory=dict)
    rounding: list[Rounding] = field(default_factory=list, metadata={"optional": True})  # the first files have none


@dataclass(kw_only=True)
class Trace:
    """A recorded training: :func:`fsshard.parity.record` makes it, ``compare(recipe, against=trace)`` compares with it.

    Attributes:
        recipe: what the recipe says of itself, as texts.
        environment: versions, processor, threads and so on, as texts.
        commit: of the recipe's code, where that is known; with ``+`` where files were changed.
        backend: what trained it.
        world_size: ranks whose batches were trained on.
        device: ``"cpu"`` or ``"cuda"``.
        detail: one of :data:`DETAILS`.
        parameters: names, in the model's order.
        ranks: what each process saw; the backend ``none`` has one for all ranks.
        tensors: the safetensors file of the steps' tensors, where they were asked for.
        file: where it was read from, or saved.
    """

    recipe: dict[str, str]
    environment: dict[str, str]
    commit: str
    backend: str
    world_size: int
    device: str
    detail: str
    parameters: list[str]
    ranks: list[RankTrace]
    tensors: Path | None = None
    file: Path | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return len(self.ranks[0].steps)

    @property
    def losses(self) -> list[float]:
        """Return the mean over the ranks of each step's loss."""
        return [mean_loss(self.ranks, number) for number in range(self.steps)]

    def save(self, path: str | Path) -> None:
        """Write it to a JSON file, whole or not at all, and its tensors to a safetensors file beside it.

        Raises:
            ConfigurationError: no file can be written there.
        """
        path = check_file(path)
        if self.tensors is not None:
            # a part of the digest is in the name, so that a trace and the tensors of another never meet
            beside = path.with_name(f"{path.stem}-{_file_digest(self.tensors)[:12]}.safetensors")
            if beside.resolve() != self.tensors.resolve():
                partial = beside.with_name(f".{beside.name}.partial")
                shutil.copyfile(self.tensors, partial)
                os.replace(partial, beside)
            self.tensors = beside
        _replace(path, json.dumps(_as_json(self), separators=(",", ":"), allow_nan=False) + "\n")
        self.file = path

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read the trace that :meth:`save` wrote.

        Raises:
            TraceError: the file is missing, cut off, changed, of another version or something else; says which field.
        """
        path = Path(path)
        try:
            # A bare NaN is not what save() writes, and would read as a number.
            data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        except OSError as error:
            raise TraceError(path, "", f"cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise TraceError(path, "", f"this is no JSON, or it is cut off ({error}); {_RECORD_AGAIN}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise TraceError(path, "format", f"this is not a recorded training (expected {FORMAT!r}); {_RECORD_AGAIN}")
        if data.get("version") != VERSION:
            raise TraceError(path, "version", f"expected {VERSION}, got {data.get('version')}; {_RECORD_AGAIN}")
        readers = {Path: lambda value, place: _tensors_beside(path, value, place), Sketch: _read_sketch}
        try:
            trace: Trace = read_as(cls, {**data, "file": None}, other=readers)
            _check(trace)
        except WrongField as error:
            raise TraceError(path, error.field, error.problem) from error
        trace.file = path
        return trace


def mean_loss(ranks: list[RankTrace], step: int) -> float:
    """Return the mean over the ranks of one step's loss."""
    return sum(rank.steps[step].loss for rank in ranks) / len(ranks)


# ------------------------------------------------------------------------------------------------------------- JSON


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _file_digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            found.update(part)
    return found.hexdigest()


def _as_json(trace: Trace) -> dict[str, Any]:
    """Return the file's content: numbers are the shortest texts that read back to the same bits."""
    first, *others = trace.ranks
    held = replace(trace, ranks=[first, *(_without_copies(rank, first) for rank in others)])
    found = plain(held, lambda text: {"number": text}, {Sketch: _sketch_as_list})
    found["tensors"] = trace.tensors and {"file": trace.tensors.name, "sha256": _file_digest(trace.tensors)}
    del found["file"]
    return {"format": FORMAT, "version": VERSION, **found}


def _without_copies(rank: RankTrace, first: RankTrace) -> RankTrace:
    """Put None for sketches that are rank 0's."""
    # replicas are written once

    def own(named: Mapping[str, Sketch], same: Mapping[str, Sketch]) -> dict[str, Any]:
        return {name: None if same.get(name) == one else one for name, one in named.items()}

    steps = [
        replace(step, sketches={q: own(named, one.sketches.get(q, {})) for q, named in step.sketches.items()})
        for step, one in zip(rank.steps, first.steps, strict=True)
    ]
    return replace(rank, initial=own(rank.initial, first.initial), steps=steps)


def _sketch_as_list(one: Sketch) -> list[Any]:
    return [one.digest, one.dtype, list(one.shape), one.largest, one.total, one.norm, *one.projections]


_SKETCH = GenericAlias(tuple, (str, str, tuple[int, ...], *(float,) * (3 + PROJECTIONS)))


def _read_sketch(value: Any, place: str) -> Sketch | None:
    if value is None:
        return None
    text, dtype, shape, largest, total, norm, *rest = read_as(_SKETCH, value, place)
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise WrongField(f"{place}[1]", f"expected a dtype of torch's, got {dtype!r}")
    numbers = {"largest": largest, "total": total, "norm": norm, "projections": tuple(rest)}
    return Sketch(digest=text, dtype=dtype, shape=shape, **numbers)


def _tensors_beside(path: Path, value: Any, place: str) -> Path:
    said = read_as(dict[str, str], value, place)
    name = said.get("file", "")
    file = path.with_name(Path(name).name or "?")
    if Path(name).name != name or not file.is_file():
        raise WrongField(place, f"{str(file)!r} is not there; keep it beside the JSON file")
    if _file_digest(file) != said.get("sha256"):
        raise WrongField(place, f"{str(file)!r} is another file than was recorded, or is damaged")
    return file


def _check(trace: Trace) -> None:
    """Raise for what no field alone can tell, and fill in the sketches that are rank 0's."""
    if len(trace.ranks) not in (1, trace.world_size) or not trace.ranks:
        raise WrongField("ranks", f"expected {trace.world_size} ranks, or one for all, got {len(trace.ranks)}")
    if trace.detail not in DETAILS:
        raise WrongField("detail", f"expected {' or '.join(DETAILS)}, got {trace.detail!r}")
    if (trace.detail == "tensors") != (trace.tensors is not None):
        raise WrongField("tensors", f"expected what detail {trace.detail!r} says, got {trace.tensors}")
    first = trace.ranks[0]
    for number, rank in enumerate(trace.ranks):
        place = f"ranks[{number}]"
        if len(rank.steps) != len(first.steps) or not rank.steps:
            raise WrongField(f"{place}.steps", f"expected {len(first.steps) or 'some'} steps, got {len(rank.steps)}")
        _fill(rank.initial, first.initial, f"{place}.initial")
        for n, (step, one) in enumerate(zip(rank.steps, first.steps, strict=True)):
            for quantity, named in step.sketches.items():
                _fill(named, one.sketches.get(quantity, {}), f"{place}.steps[{n}].sketches.{quantity}")


def _fill(named: dict[str, Any], first: Mapping[str, Any], place: str) -> None:
    for name, one in named.items():
        if one is None:
            if first.get(name) is None:
                raise WrongField(f"{place}.{name}", "expected a list, got None")
            named[name] = first[name]


# ------------------------------------------------------------------------------------------------------------- tensors


def write_tensors(folder: str, step: int, quantity: str, items: Iterable[tuple[str, Tensor]]) -> None:
    """Write one rank's tensors of a quantity; replicas of rank 0's are kept once. Collective."""
    rank = dist.get_rank()
    held = {name: value.detach().cpu() for name, value in items}
    kept = held
    if dist.get_world_size() > 1:
        digests = [{name: digest(value) for name, value in held.items()} if rank == 0 else {}]
        dist.broadcast_object_list(digests, src=0)
        if rank:
            kept = {name: value for name, value in held.items() if digests[0].get(name) != digest(value)}
    written = {
        (_COMPLEX if value.is_complex() else "") + name: real_view(value).contiguous().clone()
        for name, value in kept.items()
    }
    save_file(written, Path(folder) / f"{_part(step, quantity, rank)}.safetensors", {"names": json.dumps(list(held))})


def _part(step: int, quantity: str, rank: int) -> str:
    return f"step{step}-{quantity.replace(' ', '-')}-rank{rank}"


class Shelf(Mapping[str, Tensor]):
    """A rank's tensors of one quantity of one step, each read when asked for.

    Args:
        path: a folder of what :func:`write_tensors` writes, or a file of :func:`merged_tensors`.
        step: its number, or :data:`INITIAL`.
        quantity: such as ``"gradient"``.
        rank: whose; rank 0's tensors stand for those that are the same.
    """

    def __init__(self, path: str | Path, step: int, quantity: str, rank: int) -> None:
        self._where: dict[str, tuple[Any, str]] = {}
        names = "[]"
        for holder in sorted({0, rank}):  # this rank's own part comes last, and wins
            part, within = _part(step, quantity, holder), Path(path).is_file()
            # Opening costs more than reading a small tensor; files stay open, mapped, as long as the shelf lives.
            file: Any = safe_open(path if within else Path(path) / f"{part}.safetensors", framework="pt")
            start = f"{part}/" if within else ""
            keys = [key for key in file.keys() if key.startswith(start)]  # noqa: SIM118
            self._where |= {key.removeprefix(start).removeprefix(_COMPLEX): (file, key) for key in keys}
            names = json.dumps([*self._where]) if within else file.metadata()["names"]
        self._names = dict.fromkeys(json.loads(names))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        file, key = self._where[name]
        value: Tensor = file.get_tensor(key)
        return torch.view_as_complex(value) if key.removesuffix(name).endswith(_COMPLEX) else value

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def merged_tensors(folder: str) -> Path:
    """Make one file of all that the ranks have written into ``folder``; keys are ``"step0-gradient-rank0/<name>"``."""
    parts = sorted(Path(folder).glob("step*.safetensors"))
    held = {f"{part.stem}/{key}": value for part in parts for key, value in load_file(part).items()}
    for part in parts:
        part.unlink()
    save_file(held, Path(folder) / "tensors.safetensors")
    return Path(folder) / "tensors.safetensors"
