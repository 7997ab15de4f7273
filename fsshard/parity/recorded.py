"""A training on record: what it gave in every step, rank by rank, and in which environment; kept as one JSON file.

Numbers are the shortest text that reads back to the same bits. Sketches that are rank 0's are null on the other ranks:
replicas are written once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import GenericAlias
from typing import Any

import torch

from fsshard.errors import TraceError
from fsshard.parity.plain import WrongField, plain, read_as
from fsshard.parity.render import check_file
from fsshard.parity.sketch import PROJECTIONS, Sketch

__all__ = ["DETAILS", "RankTrace", "StepTrace", "Trace"]

FORMAT, VERSION = "fsshard parity trace", 1
DETAILS = ("losses", "digests", "tensors")
"""How much a trace holds, each with what is before it."""


@dataclass(kw_only=True)
class StepTrace:
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
    """

    initial: dict[str, Sketch] = field(default_factory=dict)
    steps: list[StepTrace] = field(default_factory=list)
    owned: dict[str, tuple[int, int]] = field(default_factory=dict)


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
        """The mean over the ranks of each step's loss."""
        columns = zip(*(rank.steps for rank in self.ranks), strict=True)
        return [sum(step.loss for step in column) / len(self.ranks) for column in columns]

    def save(self, path: str | Path) -> None:
        """Write it to a JSON file, whole or not at all, and its tensors to a safetensors file beside it.

        The tensors' file has a part of their digest in its name, so that a trace and the tensors of another never meet.

        Raises:
            ConfigurationError: no file can be written there.
        """
        path = check_file(path)
        self.tensors = None if self.tensors is None else _moved_beside(path, self.tensors)
        _replace(path, json.dumps(_as_json(self), separators=(",", ":"), allow_nan=False) + "\n")
        self.file = path

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """The trace that :meth:`save` wrote.

        Raises:
            TraceError: the file is missing, cut off, changed, of another version or something else; says which field.
        """
        path = Path(path)
        data = _parsed(path)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise TraceError(path, "format", f"this is not a recorded training (expected {FORMAT!r}); {_HOW}")
        if data.get("version") != VERSION:
            raise TraceError(path, "version", f"expected {VERSION}, got {data.get('version')}; {_HOW}")
        kept = {Path: lambda value, field: _tensors(path, value, field), Sketch: _sketch}
        try:
            trace: Trace = read_as(cls, {**data, "file": None}, other=kept)
            _check(trace)
        except WrongField as error:
            raise TraceError(path, error.field, error.problem) from error
        trace.file = path
        return trace


# ------------------------------------------------------------------------------------------------------------- writing


def _moved_beside(path: Path, tensors: Path) -> Path:
    kept = path.with_name(f"{path.stem}-{_file_digest(tensors)[:12]}.safetensors")
    if kept.resolve() != tensors.resolve():
        partial = kept.with_name(f".{kept.name}.partial")
        shutil.copyfile(tensors, partial)
        os.replace(partial, kept)
    return kept


def _replace(path: Path, text: str) -> None:
    number, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _file_digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            found.update(part)
    return found.hexdigest()


def _as_json(trace: Trace) -> dict[str, Any]:
    first, *others = trace.ranks
    held = replace(trace, ranks=[first, *(_without_copies(rank, first) for rank in others)])
    found = plain(held, lambda text: {"number": text}, {Sketch: _sketch_as_list})
    found["tensors"] = trace.tensors and {"file": trace.tensors.name, "sha256": _file_digest(trace.tensors)}
    del found["file"]
    return {"format": FORMAT, "version": VERSION, **found}


def _without_copies(rank: RankTrace, first: RankTrace) -> RankTrace:
    def others(named: Mapping[str, Sketch], same: Mapping[str, Sketch]) -> dict[str, Any]:
        return {name: None if same.get(name) == one else one for name, one in named.items()}

    steps = [
        replace(step, sketches={q: others(named, one.sketches.get(q, {})) for q, named in step.sketches.items()})
        for step, one in zip(rank.steps, first.steps, strict=True)
    ]
    return replace(rank, initial=others(rank.initial, first.initial), steps=steps)


def _sketch_as_list(one: Sketch) -> list[Any]:
    return [one.digest, one.dtype, list(one.shape), one.largest, one.total, one.norm, *one.projections]


# ------------------------------------------------------------------------------------------------------------- reading

_HOW = "record it again: fsshard parity RECIPE --record FILE"


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise TraceError(path, "", f"cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise TraceError(path, "", f"this is no JSON, or it is cut off ({error}); {_HOW}") from error


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


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


def _tensors(path: Path, value: Any, place: str) -> Path:
    said = read_as(dict[str, str], value, place)
    name = said.get("file", "")
    file = path.with_name(Path(name).name or "?")
    if Path(name).name != name or not file.is_file():
        raise WrongField(place, f"{str(file)!r} is not there; keep it beside the JSON file")
    if _file_digest(file) != said.get("sha256"):
        raise WrongField(place, f"{str(file)!r} is another file than was recorded, or is damaged")
    return file


_LISTED = GenericAlias(tuple, (str, str, tuple[int, ...], *(float,) * (3 + PROJECTIONS)))


def _sketch(value: Any, place: str) -> Sketch | None:
    if value is None:
        return None
    digest, dtype, shape, largest, total, norm, *projections = read_as(_LISTED, value, place)
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise WrongField(f"{place}[1]", f"expected a dtype of torch's, got {dtype!r}")
    return Sketch(
        digest=digest,
        dtype=dtype,
        shape=shape,
        largest=largest,
        total=total,
        norm=norm,
        projections=tuple(projections),
    )
