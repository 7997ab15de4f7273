"""The record of a script: a folder with a file of JSON lines per rank, which is whole after each line."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from safetensors.torch import load_file, save_file
from torch import Tensor

from fsshard.errors import TraceError
from fsshard.parity.plain import WrongField, plain, read_as
from fsshard.parity.sketch import PROJECTIONS, Sketch, real_view
from fsshard.parity.trace import read_sketch, sketch_as_list

FORMAT, VERSION = "fsshard script trace", 1
ENDED = "ended-*.txt"
_RECORD_AGAIN = "record it again: fsshard trace FOLDER -- COMMAND"


@dataclass(kw_only=True)
class Header:
    """The first line of a rank."""

    rank: int  # in the default process group; 0 of 1 without one
    world_size: int
    command: list[str]
    commit: str  # of the script's folder, with ``+`` where files were changed
    device: str
    environment: dict[str, str]


@dataclass(kw_only=True)
class Model:
    """A module that is called by the script itself and has parameters to train, as its first forward found it."""

    engine: str  # its class
    layers: dict[str, int]  # modules without children, as they print, and how many there are
    weights: dict[str, Sketch]  # by the user's name


@dataclass(kw_only=True)
class Samples:
    """Digests of the arguments of one forward of a model, and how it was computed."""

    digest: str  # of all tensors
    rows: int  # samples, along dim 0 of all tensors; 0 if there is no such thing
    total: str  # sum of the samples' digests, whatever their order
    # Digest of each argument by its name or number; older records have none.
    arguments: dict[str, str] = field(default_factory=dict, metadata={"optional": True})
    computed: str  # dtype of the output, with the autocast that was on, and whether the model was in training mode


@dataclass(kw_only=True)
class Record:
    """One step: of optimizers that step with no forward between them."""

    step: int
    losses: list[float]  # what ``backward`` was called on, unless it has several elements
    samples: list[Samples]  # per forward
    groups: list[dict[str, Any]]  # of the optimizers: such as the learning rate; what is not plain as a text
    skipped: bool  # a scaler left the step out
    models: list[Model] = field(default_factory=list)  # that are new since the record before
    # What parameters and modules are, by kind and name, as facts.py reads it; a file has the kinds that have changed.
    facts: dict[str, dict[str, str]] = field(default_factory=dict, metadata={"optional": True})
    random: str = ""  # digest of the random generators' state after the step
    gradients: dict[str, tuple[float, int]] = field(default_factory=dict)  # squared norm, elements of this rank's part
    # "weight", "buffer" and "state", whole; as gradients at every so many steps
    sketches: dict[str, dict[str, Sketch]] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, Sketch]:
        """Sketches of whole weights by name; empty where they are not recorded."""
        return self.sketches.get("weight", {})

    @property
    def buffers(self) -> dict[str, Sketch]:
        """Sketches of buffers by name, and of copies of the weights."""
        return self.sketches.get("buffer", {})

    def fact(self, kind: str) -> dict[str, str]:
        """Return the facts of a kind by name; none of an older record, which has not got the kind."""
        return self.facts.get(kind, {})


def in_model(place: int, name: str) -> str:
    """Return the name among the parameters of all models: of all but the first with the model's number before it."""
    return f"model{place}.{name}" if place else name


def digest_alone(text: str) -> Sketch:
    """Return the sketch of a tensor of which nothing but the digest is known."""
    nothing = (math.nan,) * PROJECTIONS
    return Sketch(digest=text, dtype="", shape=(), largest=math.nan, total=math.nan, norm=math.nan, projections=nothing)


# ------------------------------------------------------------------------------------------------------------- writing


def append(file: Path, what: Header | Record) -> None:
    """Append a line to a rank's file, which a header begins; FileExistsError if another process has begun it."""
    begins = isinstance(what, Header)
    content = {"format": FORMAT, "version": VERSION, "header": what} if begins else {"record": what}
    other: dict[type, Any] = {Sketch: lambda one: sketch_as_list(one) if one.dtype else one.digest}
    other[Tensor] = Tensor.tolist  # a learning rate that a compiled step may read
    kept = plain(content, lambda text: {"number": text}, other)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("x" if begins else "a", encoding="utf-8") as lines:  # what is there stays if the script dies
        lines.write(json.dumps(kept, separators=(",", ":"), allow_nan=False, default=repr) + "\n")


def note_end(folder: Path, reason: str) -> None:
    """Note that a process, which goes on, is recorded no more."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ENDED.replace("*", str(os.getpid()))).write_text(reason, encoding="utf-8")


def tensor_file(folder: Path, step: int, name: str) -> Path:
    """Return where a weight is kept whole."""
    return folder / "tensors" / f"step{step}" / f"{quote(name, safe='')}.safetensors"


def write_tensor(file: Path, value: Tensor) -> None:
    """Write one tensor."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"complex" if value.is_complex() else "real": real_view(value.detach().cpu()).contiguous()}, file)


def read_tensor(file: Path) -> Tensor:
    """Return what :func:`write_tensor` wrote; of a complex tensor the pairs."""
    (value,) = load_file(file).values()
    return value


# ------------------------------------------------------------------------------------------------------------- reading


@dataclass(kw_only=True)
class RankRecord:
    """The record of one rank."""

    header: Header
    models: list[Model]
    steps: dict[int, Record]
    initial: dict[str, Sketch] = field(default_factory=dict)  # weights before the first step, of all models


@dataclass(kw_only=True)
class ScriptTrace:
    """A recorded script, rank by rank."""

    folder: Path
    ranks: list[RankRecord]
    ended: list[str]  # reasons why processes were recorded no more while they went on
    repeats: list[ScriptTrace]  # further runs with other rounding

    @classmethod
    def load(cls, folder: str | Path) -> ScriptTrace:
        """Read a folder of ``fsshard trace``, or raise TraceError with the line and field that are wrong."""
        folder = Path(folder)
        files = sorted(folder.glob("rank*.jsonl"))
        if not files:
            said = "no step of an optimizer is recorded here" if folder.is_dir() else "there is no such folder"
            raise TraceError(folder, "", f"{said}; {_RECORD_AGAIN}")
        ranks = sorted(map(_read_rank, files), key=lambda one: one.header.rank)
        size = ranks[0].header.world_size
        if [one.header.rank for one in ranks] != list(range(size)):
            raise TraceError(folder, "", f"expected {size} files of ranks, got {len(ranks)}; {_RECORD_AGAIN}")
        for models in zip(*(one.models for one in ranks), strict=False):
            _share([model.weights for model in models])
        for rank in ranks:
            for k, model in enumerate(rank.models):
                rank.initial |= {in_model(k, name): one for name, one in model.weights.items()}
        ended = sorted({file.read_text(encoding="utf-8") for file in folder.glob(ENDED)})
        repeats = [cls.load(one) for one in sorted(folder.glob("repeat*"))]
        found = cls(folder=folder, ranks=ranks, ended=ended, repeats=repeats)
        for number in found.steps:
            of_ranks = [one.steps[number].sketches for one in ranks]
            for quantity in set.intersection(*map(set, of_ranks)):
                _share([sketches[quantity] for sketches in of_ranks])
        return found

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps that all ranks have recorded."""
        return sorted(set.intersection(*(set(one.steps) for one in self.ranks)))

    @property
    def initial(self) -> dict[str, Sketch]:
        """Sketches of rank 0's weights before the first step, of all models."""
        return self.ranks[0].initial

    def at(self, step: int) -> list[Record]:
        """Return the records of a step, rank by rank."""
        return [rank.steps[step] for rank in self.ranks]

    def recorded(self, steps: list[int]) -> set[tuple[int, int, str]]:
        """Return of which rank, step and quantity there are sketches."""
        numbered = ((rank.header.rank, n, rank.steps[n]) for rank in self.ranks for n in steps if n in rank.steps)
        return {(rank, n, quantity) for rank, n, one in numbered for quantity, of in one.sketches.items() if of}


def _share(ranks: list[dict[str, Sketch]]) -> None:
    """Complete what ranks have shared among each other: who sketches a tensor of which several have a copy."""
    full: dict[str, list[Sketch]] = {}
    for named in ranks:
        for name, one in named.items():
            full.setdefault(name, []).extend([one] if one.dtype else [])
    for named in ranks:
        for name, known in full.items():
            own = named.get(name)
            same = [one for one in known if own is None or one.digest == own.digest]
            if same:
                named[name] = same[0]


def _read_rank(file: Path) -> RankRecord:
    headers, steps = list[Header](), dict[int, Record]()
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not text.endswith("\n"):
            continue  # the process died while it wrote this line
        try:
            line = read_as(dict[str, Any], json.loads(text), "content")
            if number == 1:
                if line.get("format") != FORMAT or line.get("version") != VERSION:
                    raise WrongField("format", f"expected {FORMAT!r}, version {VERSION}; {_RECORD_AGAIN}")
                headers.append(read_as(Header, line.get("header")))
            else:
                record: Record = read_as(Record, line.get("record"), other={Sketch: _read})
                steps[record.step] = record  # of several lines of a step the last one has all
        except WrongField as error:
            raise TraceError(file, f"line {number}, {error.field}", error.problem) from error
        except ValueError as error:
            raise TraceError(file, f"line {number}", f"this is no JSON ({error}); {_RECORD_AGAIN}") from error
    if not headers:
        raise TraceError(file, "", f"the file is empty; {_RECORD_AGAIN}")
    facts: dict[str, dict[str, str]] = {}
    for record in steps.values():
        facts = record.facts = facts | record.facts
    models = [model for record in steps.values() for model in record.models]
    return RankRecord(header=headers[0], models=models, steps=steps)


def _read(value: Any, place: str) -> Sketch:
    return digest_alone(value) if isinstance(value, str) else read_sketch(value, place)
