"""The record of a script: a folder with a file of JSON lines per rank, which is whole after each line."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from safetensors.torch import load_file, save_file
from torch import Tensor

from fsshard.errors import TraceError
from fsshard.parity.plain import WrongField, plain, read_as
from fsshard.parity.sketch import PROJECTIONS, Sketch, real_view
from fsshard.parity.trace import Texts, Values, read_sketch, sketch_as_list

FORMAT = "fsshard script trace"
VERSION = 1
ENDED = "ended-*.txt"
_RECORD_AGAIN = "record it again: fsshard trace FOLDER -- COMMAND"
Sketches = dict[str, Sketch]


@dataclass(kw_only=True)
class Header:
    """The first line of a rank."""

    rank: int  # in the default process group; 0 of 1 without one
    world_size: int
    command: list[str]
    commit: str  # of the script's folder, with ``+`` where files were changed
    device: str
    environment: Texts


@dataclass(kw_only=True)
class Model:
    """A module that is called by the script itself and has parameters to train, as its first forward found it."""

    engine: str  # its class
    weights: Sketches  # by the user's name


@dataclass(kw_only=True)
class Samples:
    """Digests of the arguments of one forward of a model, and how it was computed."""

    digest: str  # of all tensors
    rows: int  # samples, along dim 0 of all tensors; 0 if there is no such thing
    total: str  # sum of the samples' digests, whatever their order
    arguments: Texts = field(default_factory=dict)  # digest of each by its name or number
    computed: str  # dtype of the output, with the autocast that was on, and whether the model was in training mode


@dataclass(kw_only=True)
class Record:
    """One step: of optimizers that step with no forward between them."""

    step: int
    losses: list[float]  # what ``backward`` was called on, unless it has several elements
    samples: list[Samples]  # per forward
    groups: list[Values]  # of the optimizers: such as the learning rate; what is not plain as a text
    skipped: bool  # a scaler left the step out
    models: list[Model] = field(default_factory=list)  # that are new since the record before
    # What parameters and modules are, by kind and name, as facts.py reads it; a file has the kinds that have changed.
    facts: dict[str, Texts] = field(default_factory=dict)
    random: str = ""  # digest of the random generators' state after the step
    gradients: dict[str, tuple[float, int]] = field(default_factory=dict)  # squared norm, elements of this rank's part
    # "weight", "buffer" and "state", whole; as gradients at every so many steps
    sketches: dict[str, Sketches] = field(default_factory=dict)

    @property
    def weights(self) -> Sketches:
        """Sketches of whole weights by name; empty where they are not recorded."""
        return self.sketches.get("weight", {})

    @property
    def buffers(self) -> Sketches:
        """Sketches of buffers by name, and of copies of the weights."""
        return self.sketches.get("buffer", {})

    def fact(self, kind: str) -> Texts:
        """Return the facts of a kind by name."""
        return self.facts.get(kind, {})


def in_model(place: int, name: str) -> str:
    """Return the name among the parameters of all models: of all but the first with the model's number before it."""
    return f"model{place}.{name}" if place else name


def digest_alone(text: str) -> Sketch:
    """Return the sketch of a tensor of which nothing but the digest is known."""
    return Sketch(
        digest=text,
        dtype="",
        shape=(),
        largest=math.nan,
        total=math.nan,
        norm=math.nan,
        projections=(math.nan,) * PROJECTIONS,
    )


# ------------------------------------------------------------------------------------------------------------- writing


def append(file: Path, what: Header | Record) -> None:
    """Append a line to a rank's file, which a header begins; FileExistsError if another process has begun it."""
    content: Values = {"record": what}
    # What is there stays if the script dies.
    mode = "a"
    if isinstance(what, Header):
        content = {"format": FORMAT, "version": VERSION, "header": what}
        mode = "x"
    # A tensor is a learning rate that a compiled step may read.
    by_type: dict[type, Any] = {Sketch: _plain_sketch, Tensor: Tensor.tolist}
    kept = plain(content, lambda text: {"number": text}, by_type)
    line = json.dumps(kept, separators=(",", ":"), allow_nan=False, default=repr)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open(mode, encoding="utf-8") as lines:
        lines.write(line + "\n")


def _plain_sketch(one: Sketch) -> Any:
    return sketch_as_list(one) if one.dtype else one.digest


def note_end(folder: Path, reason: str) -> None:
    """Note that a process, which goes on, is recorded no more."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / ENDED.replace("*", str(os.getpid()))
    file.write_text(reason, encoding="utf-8")


def tensor_file(folder: Path, step: int, name: str) -> Path:
    """Return where a weight is kept whole."""
    return folder / "tensors" / f"step{step}" / f"{quote(name, safe='')}.safetensors"


def write_tensor(file: Path, value: Tensor) -> None:
    """Write one tensor."""
    kind = "complex" if value.is_complex() else "real"
    numbers = real_view(value.detach().cpu())
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({kind: numbers.contiguous()}, file)


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
    initial: Sketches = field(default_factory=dict)  # weights before the first step, of all models


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
            problem = "no step of an optimizer is recorded here" if folder.is_dir() else "there is no such folder"
            raise TraceError(folder, "", f"{problem}; {_RECORD_AGAIN}")
        ranks = list(map(_read_rank, files))
        ranks.sort(key=lambda rank: rank.header.rank)
        size = ranks[0].header.world_size
        if [rank.header.rank for rank in ranks] != [*range(size)]:
            raise TraceError(folder, "", f"expected {size} files of ranks, got {len(ranks)}; {_RECORD_AGAIN}")
        reasons = {file.read_text(encoding="utf-8") for file in folder.glob(ENDED)}
        repeats = list(map(cls.load, sorted(folder.glob("repeat*"))))
        trace = cls(folder=folder, ranks=ranks, ended=sorted(reasons), repeats=repeats)
        trace._share_sketches()
        for rank in ranks:
            for place, model in enumerate(rank.models):
                for name, sketch in model.weights.items():
                    rank.initial[in_model(place, name)] = sketch
        return trace

    def _share_sketches(self) -> None:
        """Complete what ranks have shared among each other: who sketches a tensor of which several have a copy."""
        for models in zip(*(rank.models for rank in self.ranks), strict=False):
            _share([model.weights for model in models])
        for number in self.steps:
            records = self.at(number)
            for quantity in records[0].sketches:
                if all(quantity in record.sketches for record in records):
                    _share([record.sketches[quantity] for record in records])

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps that all ranks have recorded."""
        steps = {*self.ranks[0].steps}
        for rank in self.ranks:
            steps &= rank.steps.keys()
        return sorted(steps)

    @property
    def initial(self) -> Sketches:
        """Sketches of rank 0's weights before the first step, of all models."""
        return self.ranks[0].initial

    def at(self, step: int) -> list[Record]:
        """Return the records of a step, rank by rank."""
        return [rank.steps[step] for rank in self.ranks]

    def recorded(self, steps: list[int]) -> set[tuple[int, int, str]]:
        """Return of which rank, step and quantity there are sketches."""
        places = set()
        for rank in self.ranks:
            for number in rank.steps.keys() & steps:
                for quantity, sketches in rank.steps[number].sketches.items():
                    if sketches:
                        places.add((rank.header.rank, number, quantity))
        return places


def _share(ranks: list[Sketches]) -> None:
    """Give ranks that have a digest alone, or nothing, the sketch of the same tensor that another one has."""
    full = defaultdict(list)
    for sketches in ranks:
        for name, sketch in sketches.items():
            if sketch.dtype:
                full[name].append(sketch)
    for sketches in ranks:
        for name, sketches_of_name in full.items():
            for sketch in sketches_of_name:
                if name not in sketches or sketches[name].digest == sketch.digest:
                    sketches[name] = sketch
                    break


def _read_rank(file: Path) -> RankRecord:
    header = None
    steps = {}
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not text.endswith("\n"):
            # The process died while it wrote this line.
            continue
        try:
            line = read_as(dict[str, Any], json.loads(text), "content")
            if number == 1:
                header = _read_header(line)
            else:
                record: Record = read_as(Record, line.get("record"), other={Sketch: _read})
                # Of several lines of a step the last one has all.
                steps[record.step] = record
        except WrongField as error:
            raise TraceError(file, f"line {number}, {error.field}", error.problem) from error
        except ValueError as error:
            raise TraceError(file, f"line {number}", f"this is no JSON ({error}); {_RECORD_AGAIN}") from error
    if header is None:
        raise TraceError(file, "", f"the file is empty; {_RECORD_AGAIN}")
    facts: dict[str, Texts] = {}
    models = []
    for record in steps.values():
        facts = facts | record.facts
        record.facts = facts
        models += record.models
    return RankRecord(header=header, models=models, steps=steps)


def _read_header(line: Values) -> Header:
    if line.get("format") != FORMAT or line.get("version") != VERSION:
        raise WrongField("format", f"expected {FORMAT!r}, version {VERSION}; {_RECORD_AGAIN}")
    header: Header = read_as(Header, line.get("header"))
    return header


def _read(value: Any, place: str) -> Sketch:
    return digest_alone(value) if isinstance(value, str) else read_sketch(value, place)
