"""Traces on disk: one JSON file, numbers as the shortest text that reads back to the same bits, no pickle."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from fsshard.errors import TraceError
from fsshard.parity.observations import DETAILS, Observations, RankTrace, StepTrace
from fsshard.parity.render import check_file
from fsshard.parity.sketch import PROJECTIONS, Sketch

__all__ = ["FORMAT", "VERSION", "read", "write"]

FORMAT, VERSION = "fsshard parity trace", 1
QUANTITIES = ("batch", "gradient", "weight", "state", "buffer")
T = TypeVar("T")
R = TypeVar("R", bound=Observations)

# ------------------------------------------------------------------------------------------------------------- writing


def write(trace: Observations, path: Path) -> None:
    """Write ``trace`` to ``path``: the tensors first, under a name of their own, then the JSON by one rename."""
    check_file(path)
    trace.tensors = None if trace.tensors is None else _moved_beside(path, trace.tensors)
    _replace(path, json.dumps(_as_json(trace), separators=(",", ":"), allow_nan=False) + "\n")
    trace.file = path


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


def _as_json(trace: Observations) -> dict[str, Any]:
    tensors = trace.tensors
    return {
        "format": FORMAT,
        "version": VERSION,
        "recipe": trace.recipe,
        "environment": trace.environment,
        "commit": trace.commit,
        "backend": trace.backend,
        "world_size": trace.world_size,
        "device": trace.device,
        "detail": trace.detail,
        "tensors": None if tensors is None else {"file": tensors.name, "sha256": _file_digest(tensors)},
        "parameters": trace.parameters,
        "ranks": [_rank_as_json(rank, trace.ranks[0]) for rank in trace.ranks],
    }


def _rank_as_json(rank: RankTrace, first: RankTrace) -> dict[str, Any]:
    """Sketches that are rank 0's are null: replicas are written once."""
    return {
        "initial": _sketches_as_json(rank.initial, {} if rank is first else first.initial),
        "owned": rank.owned,
        "steps": [
            _step_as_json(step, None if rank is first else one)
            for step, one in zip(rank.steps, first.steps, strict=True)
        ],
    }


def _step_as_json(step: StepTrace, first: StepTrace | None) -> dict[str, Any]:
    same = {} if first is None else first.sketches
    found = {
        "batches": step.batches,
        "loss": step.loss,
        "norm": step.norm,
        "clipped_norm": step.clipped_norm,
        "groups": step.groups,
        "random": step.random,
        "outputs": step.outputs,
        "sketches": {q: _sketches_as_json(named, same.get(q, {})) for q, named in step.sketches.items()},
        "plain": step.plain,
    }
    return {key: _without_special_numbers(value) for key, value in found.items()}


def _sketches_as_json(named: Mapping[str, Sketch], same: Mapping[str, Sketch]) -> dict[str, Any]:
    return {name: None if same.get(name) == one else _sketch_as_json(one) for name, one in named.items()}


def _sketch_as_json(one: Sketch) -> list[Any]:
    numbers = [one.largest, one.total, one.norm, *one.projections]
    return [one.digest, one.dtype, list(one.shape), *map(_without_special_numbers, numbers)]


def _without_special_numbers(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: they are ``{"number": "nan"}``."""
    if isinstance(value, dict):
        return {key: _without_special_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_special_numbers(item) for item in value]
    return {"number": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------------------------------- reading


def read(path: Path, kind: type[R]) -> R:
    """The trace in a file, as a ``kind`` of observations.

    Raises:
        TraceError: there is none, or it is damaged.
    """
    root = _Field(path, "", _parsed(path))
    if not isinstance(root.value, dict) or root.value.get("format") != FORMAT:
        raise TraceError(path, "format", f"this is not a recorded training (expected {FORMAT!r}); {_HOW}")
    version = root["version"].whole()
    if version != VERSION:
        raise TraceError(path, "version", f"expected {VERSION}, got {version}; {_HOW}")
    ranks: list[RankTrace] = []
    for item in root["ranks"].items():
        ranks.append(_rank(item, ranks[0] if ranks else None))
    trace = kind(
        recipe=root["recipe"].texts(),
        environment=root["environment"].texts(),
        commit=root["commit"].text(),
        backend=root["backend"].text(),
        world_size=root["world_size"].whole(),
        device=root["device"].text(),
        detail=root["detail"].text(),
        parameters=[item.text() for item in root["parameters"].items()],
        ranks=ranks,
        tensors=_tensors(root["tensors"]),
        file=path,
    )
    _check(trace, root)
    return trace


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


def _check(trace: Observations, root: _Field) -> None:
    """What no field alone can tell."""
    counts = {len(rank.steps) for rank in trace.ranks}
    if len(trace.ranks) not in (1, trace.world_size) or not trace.ranks:
        raise root["ranks"].wrong(f"{trace.world_size} ranks, or one for all", f"{len(trace.ranks)}")
    if len(counts) != 1 or 0 in counts:
        raise root["ranks"].wrong("as many steps on every rank, and one at least", f"{sorted(counts)}")
    if trace.detail not in DETAILS:
        raise root["detail"].wrong(" or ".join(DETAILS), repr(trace.detail))
    if (trace.detail == "tensors") != (trace.tensors is not None):
        raise root["tensors"].wrong(f"what detail {trace.detail!r} says", repr(trace.tensors and trace.tensors.name))


def _tensors(field: _Field) -> Path | None:
    if field.value is None:
        return None
    name, expected = field["file"].text(), field["sha256"].text()
    file = field.file.with_name(Path(name).name)
    if Path(name).name != name or not file.is_file():
        raise TraceError(field.file, field.path, f"{str(file)!r} is not there; keep it beside the JSON file")
    if _file_digest(file) != expected:
        raise TraceError(field.file, field.path, f"{str(file)!r} is another file than was recorded, or is damaged")
    return file


def _rank(field: _Field, first: RankTrace | None) -> RankTrace:
    steps = field["steps"].items()
    before = [None] * len(steps) if first is None else first.steps
    if len(before) != len(steps):
        raise field["steps"].wrong(f"{len(before)} steps, as on rank 0", f"{len(steps)}")
    return RankTrace(
        initial=_sketches(field["initial"], {} if first is None else first.initial),
        owned={name: _range(item) for name, item in field["owned"].named()},
        steps=[_step(item, one) for item, one in zip(steps, before, strict=True)],
    )


def _range(field: _Field) -> tuple[int, int]:
    start, stop = field.items(2)
    return start.whole(), stop.whole()


def _step(field: _Field, first: StepTrace | None) -> StepTrace:
    clipped = field["clipped_norm"]
    same = {} if first is None else first.sketches
    return StepTrace(
        batches=[[one.text() for one in parts.items()] for parts in field["batches"].items()],
        loss=field["loss"].number(),
        norm=field["norm"].number(),
        clipped_norm=None if clipped.value is None else clipped.number(),
        groups=[{key: _with_special_numbers(one.value) for key, one in g.named()} for g in field["groups"].items()],
        random=field["random"].text(),
        outputs=[_pair(item) for item in field["outputs"].items()],
        sketches={q: _sketches(item, same.get(q, {})) for q, item in field["sketches"].named(allowed=QUANTITIES)},
        plain={key: _with_special_numbers(one.value) for key, one in field["plain"].named()},
    )


def _pair(field: _Field) -> tuple[str, str]:
    one, other = field.items(2)
    return one.text(), other.text()


def _sketches(field: _Field, same: Mapping[str, Sketch]) -> dict[str, Sketch]:
    return {name: _sketch(item, same.get(name)) for name, item in field.named()}


def _sketch(field: _Field, same: Sketch | None) -> Sketch:
    if field.value is None and same is not None:
        return same
    digest, dtype, shape, *numbers = field.items(6 + PROJECTIONS)
    if not isinstance(getattr(torch, dtype.text(), None), torch.dtype):
        raise dtype.wrong("a dtype of torch's", repr(dtype.value))
    largest, total, norm, *projections = [item.number() for item in numbers]
    return Sketch(
        digest=digest.text(),
        dtype=dtype.text(),
        shape=tuple(item.whole() for item in shape.items()),
        largest=largest,
        total=total,
        norm=norm,
        projections=tuple(projections),
    )


def _with_special_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return float(value["number"]) if set(value) == {"number"} else value
    return [_with_special_numbers(item) for item in value] if isinstance(value, list) else value


class _Field:
    """A value in the file, with the way to it for what is said of it."""

    def __init__(self, file: Path, path: str, value: Any) -> None:
        self.file, self.path, self.value = file, path, value

    def wrong(self, expected: str, got: str = "") -> TraceError:
        """An error that quotes the field."""
        return TraceError(self.file, self.path, f"expected {expected}, got {got or repr(self.value)[:60]}")

    def _is(self, kind: type[T] | tuple[type[T], ...], expected: str) -> T:
        if not isinstance(self.value, kind) or isinstance(self.value, bool):
            raise self.wrong(expected)
        return self.value

    def __getitem__(self, key: str) -> _Field:
        whole = self._is(dict, "an object")
        path = f"{self.path}.{key}" if self.path else key
        if key not in whole:
            raise TraceError(self.file, path, "is missing")
        return _Field(self.file, path, whole[key])

    def items(self, count: int | None = None) -> list[_Field]:
        """The elements of a list."""
        whole = self._is(list, "a list")
        if count is not None and len(whole) != count:
            raise self.wrong(f"{count} elements", str(len(whole)))
        return [_Field(self.file, f"{self.path}[{number}]", item) for number, item in enumerate(whole)]

    def named(self, allowed: tuple[str, ...] = ()) -> Iterator[tuple[str, _Field]]:
        """The entries of an object."""
        for key in self._is(dict, "an object"):
            if allowed and key not in allowed:
                raise self.wrong(f"no key but {', '.join(allowed)}", repr(key))
            yield key, self[key]

    def text(self) -> str:
        """A text."""
        return self._is(str, "a text")

    def texts(self) -> dict[str, str]:
        """An object of texts."""
        return {key: item.text() for key, item in self.named()}

    def whole(self) -> int:
        """A whole number that is not negative."""
        found = self._is(int, "a whole number")
        if found < 0:
            raise self.wrong("a whole number that is not negative")
        return found

    def number(self) -> float:
        """A number."""
        special = self.value.get("number") if isinstance(self.value, dict) else None
        if special in ("nan", "inf", "-inf"):
            return float(special)
        return float(self._is((int, float), "a number"))
