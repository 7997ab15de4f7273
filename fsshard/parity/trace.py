"""A training on record: what it gave in every step, rank by rank, and in which environment; kept as one JSON file.

Tensors, where they are kept, lie in safetensors files: one per step, quantity and rank while the training runs, one
next to the JSON file when it is saved. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import GenericAlias
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsshard.complex_params.pairs import laid, order_in_memory
from fsshard.errors import TraceError
from fsshard.parity.plain import Readers, WrongField, plain, read_as
from fsshard.parity.sketch import PROJECTIONS, Sketch, digest, real_view
from fsshard.pictures import check_file, replace_file
from fsshard.recipes.recipe import Recipe

FORMAT, VERSION = "fsshard parity trace", 1
# How much a trace holds, each with what is before it.
DETAILS = ("losses", "digests", "tensors")
# The step number under which weights before the first step are kept.
INITIAL = -1
NamedTensors = dict[str, Tensor]
Texts = dict[str, str]
Values = dict[str, Any]
TensorItems = Iterable[tuple[str, Tensor]]
_COMPLEX = "complex:"
_RECORD_AGAIN = "record it again: fsshard parity RECIPE --record FILE"


@dataclass(kw_only=True)
class Rounding:
    """Bounds of one step, as far as they were measured while it was trained.

    Attributes:
        loss: for the loss.
        gradients: by name, for all elements of a tensor.
        reductions: by name, how many reductions make up the gradient.
        aligned: the engine adds up over ranks in the order of :mod:`fsshard.comm.tree`.
    """

    loss: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    reductions: dict[str, int] = field(default_factory=dict)
    aligned: bool = False


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
    groups: list[Values] = field(default_factory=list)
    random: str = ""
    outputs: list[tuple[str, str]] = field(default_factory=list)
    sketches: dict[str, dict[str, Sketch]] = field(default_factory=dict)
    plain: Values = field(default_factory=dict)


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
    rounding: list[Rounding] = field(default_factory=list)


@dataclass(kw_only=True)
class Trace:
    """A recorded training: :func:`fsshard.parity.record` makes it, ``compare(recipe, against=trace)`` compares with it.

    Attributes:
        recipe: the recipe's settings, as texts.
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

    recipe: Texts
    environment: Texts
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
        """Write it to a JSON file, whole or not at all, and its tensors to a safetensors file next to it.

        Raises:
            ConfigurationError: no file can be written there.
        """
        path = check_file(path)
        if self.tensors is not None:
            # A part of the digest is in the name, so that a trace and the tensors of another never meet.
            digest_of_tensors = _file_digest(self.tensors)[:12]
            beside = path.with_name(f"{path.stem}-{digest_of_tensors}.safetensors")
            if beside.resolve() != self.tensors.resolve():
                replace_file(beside, functools.partial(shutil.copyfile, self.tensors))
            self.tensors = beside
        text = json.dumps(_as_json(self), separators=(",", ":"), allow_nan=False)
        replace_file(path, lambda partial: partial.write_text(f"{text}\n", encoding="utf-8"))
        self.file = path

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read the trace that :meth:`save` wrote.

        Raises:
            TraceError: the file is missing, cut off, changed, of another version or something else; the error names
                the field.
        """
        path = Path(path)
        data = _load_json(path)
        sketches: dict[str, Sketch] = {}

        def read(value: Any, place: str) -> Sketch:
            if value is None:
                # null stands for a sketch that is rank 0's.
                of_first_rank = re.sub(r"^ranks\[\d+\]", "ranks[0]", place)
                if of_first_rank in sketches:
                    return sketches[of_first_rank]
            sketches[place] = read_sketch(value, place)
            return sketches[place]

        readers: Readers = {Path: functools.partial(_tensors_beside, path), Sketch: read}
        try:
            trace: Trace = read_as(cls, {**data, "file": None}, other=readers)
            _check(trace)
        except WrongField as error:
            raise TraceError(path, error.field, error.problem) from error
        trace.file = path
        return trace


def mean_loss(ranks: Sequence[RankTrace], step: int) -> float:
    """Return the mean over the ranks of one step's loss."""
    return sum(rank.steps[step].loss for rank in ranks) / len(ranks)


# ------------------------------------------------------------------------------------------------------------- JSON


def _load_json(path: Path) -> Values:
    """Return the content of a trace's file, or raise TraceError if it is none."""
    try:
        # A bare NaN is not what save() writes, and would read as a number.
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise TraceError(path, "", f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(path, "", f"this is not JSON, or it is cut off ({error}); {_RECORD_AGAIN}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise TraceError(path, "format", f"this is not a recorded training (expected {FORMAT!r}); {_RECORD_AGAIN}")
    version = data.get("version")
    if version != VERSION:
        raise TraceError(path, "version", f"expected {VERSION}, got {version}; {_RECORD_AGAIN}")
    return data


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _as_json(trace: Trace) -> Values:
    """Return the file's content: numbers are the shortest texts that read back to the same bits."""
    whole = replace(trace, file=None)
    content = plain(whole, lambda text: {"number": text}, {Sketch: sketch_as_list})
    first, *others = content["ranks"]
    for rank in others:
        rank["initial"] = _without_replicas(rank["initial"], first["initial"])
        for step, step_of_first in zip(rank["steps"], first["steps"], strict=True):
            step["sketches"] = _without_replicas(step["sketches"], step_of_first["sketches"])
    if trace.tensors:
        content["tensors"] = {"file": trace.tensors.name, "sha256": _file_digest(trace.tensors)}
    del content["file"]
    return {"format": FORMAT, "version": VERSION, **content}


def _without_replicas(value: Any, first: Any) -> Any:
    """Return ``value`` with None for what is equal to rank 0's: replicas are written once."""
    if not isinstance(value, dict):
        return None if value == first else value
    own = {}
    for name, item in value.items():
        own[name] = _without_replicas(item, first.get(name, {}))
    return own


def sketch_as_list(one: Sketch) -> list[Any]:
    """Return what stands for a sketch in a file."""
    return [
        one.digest,
        one.dtype,
        list(one.shape),
        one.largest,
        one.total,
        one.norm,
        *one.projections,
    ]


_SKETCH = GenericAlias(tuple, (str, str, tuple[int, ...], *(float,) * (3 + PROJECTIONS)))


def read_sketch(value: Any, place: str) -> Sketch:
    """Return the sketch that :func:`sketch_as_list` wrote, or raise WrongField with the place of what is wrong."""
    text, dtype, shape, largest, total, norm, *projections = read_as(_SKETCH, value, place)
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise WrongField(f"{place}[1]", f"expected a dtype of torch's, got {dtype!r}")
    return Sketch(
        digest=text,
        dtype=dtype,
        shape=shape,
        largest=largest,
        total=total,
        norm=norm,
        projections=tuple(projections),
    )


def _tensors_beside(path: Path, value: Any, place: str) -> Path:
    recorded: Texts = read_as(Texts, value, place)
    file = path.parent / recorded.get("file", "")
    if not file.is_file():
        raise WrongField(place, f"{str(file)!r} is missing; keep it next to the JSON file")
    if _file_digest(file) != recorded.get("sha256"):
        raise WrongField(place, f"{str(file)!r} is not the file that was recorded, or is damaged")
    return file


def _check(trace: Trace) -> None:
    """Raise for what no field alone can tell."""
    ranks = len(trace.ranks)
    if ranks not in (1, trace.world_size) or not ranks:
        raise WrongField("ranks", f"expected {trace.world_size} ranks, or one for all, got {ranks}")
    has_tensors = trace.tensors is not None
    if has_tensors != (trace.detail == "tensors"):
        raise WrongField("tensors", f"expected a file as detail {trace.detail!r} writes it, got {trace.tensors}")
    for number, rank in enumerate(trace.ranks):
        steps = len(rank.steps)
        if steps != trace.steps or not steps:
            raise WrongField(f"ranks[{number}].steps", f"expected {trace.steps or 'some'} steps, got {steps}")


# ------------------------------------------------------------------------------------------------------------- tensors


def write_tensors(
    folder: str,
    step: int,
    quantity: str,
    items: TensorItems,
) -> None:
    """Write one rank's tensors of a quantity; replicas of rank 0's are kept once. Collective."""
    rank = dist.get_rank()
    tensors = {name: value.detach().cpu() for name, value in items}
    # What rank 0 has with the same bits is written by it alone.
    replicas = {}
    if dist.get_world_size() > 1:
        digests = {name: digest(value) for name, value in tensors.items()}
        of_first_rank = [digests if rank == 0 else {}]
        dist.broadcast_object_list(of_first_rank, src=0)
        if rank:
            replicas = {name: text for name, text in digests.items() if of_first_rank[0].get(name) == text}
    written = {}
    orders = {}
    for name, value in tensors.items():
        # An optimizer's step that is repeated rounds products by how eigenvectors lie in memory.
        orders[name] = order_in_memory(value)
        if name not in replicas:
            key = _COMPLEX + name if value.is_complex() else name
            written[key] = real_view(value).contiguous().clone()
    texts = {"names": json.dumps(list(tensors)), "orders": json.dumps(orders)}
    part = _part(step, quantity, rank)
    save_file(written, Path(folder) / f"{part}.safetensors", texts)


def _part(step: int, quantity: str, rank: int) -> str:
    return f"step{step}-{quantity.replace(' ', '-')}-rank{rank}"


def read_tensors(
    path: str | Path,
    step: int,
    quantity: str,
    rank: int,
) -> NamedTensors:
    """Return a rank's tensors of one quantity of one step, mapped from the disk; rank 0's stand for equal ones.

    ``path`` is a folder of what :func:`write_tensors` writes, or a file of :func:`merged_tensors`.
    """
    path = Path(path)
    is_merged = path.is_file()
    tensors = {}
    texts: Texts = {}
    # This rank's own part comes last, and wins.
    for holder in sorted({0, rank}):
        part = _part(step, quantity, holder)
        prefix = f"{part}/" if is_merged else ""
        with safe_open(path if is_merged else path / f"{part}.safetensors", framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                if not key.startswith(prefix):
                    continue
                value = file.get_tensor(key)
                name = key.removeprefix(prefix)
                if name.startswith(_COMPLEX):
                    name = name.removeprefix(_COMPLEX)
                    value = torch.view_as_complex(value)
                tensors[name] = value
            texts = file.metadata() or {}
    # A merged file has no texts: its tensors are all that is known.
    if not texts:
        return tensors
    orders = json.loads(texts["orders"])
    return {name: laid(tensors[name], orders[name]) for name in json.loads(texts["names"])}


def merged_tensors(folder: str) -> Path:
    """Make one file of all that the ranks have written into ``folder``; keys are ``"step0-gradient-rank0/<name>"``."""
    parts = sorted(Path(folder).glob("step*.safetensors"))
    tensors = {}
    for part in parts:
        for key, value in load_file(part).items():
            tensors[f"{part.stem}/{key}"] = value
    file = Path(folder) / "tensors.safetensors"
    save_file(tensors, file)
    for part in parts:
        part.unlink()
    return file


# --------------------------------------------------------------------------------------------------------- environment

PACKAGES = ("fsshard", "fairscale", "numpy", "neuraloperator", "transformers")
VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
TOLD = ("seed", "hyper", "precision", "activation_checkpointing", "accumulate", "no_sync", "clip", "settings")


def environment(device: str = "cpu") -> Texts:
    """Return the environment of this process, each fact as a text; to be asked on a rank, which has its own threads."""
    libraries = []
    for line in torch.__config__.show().splitlines():
        if "Math Kernel Library" in line or "MKL-DNN" in line:
            libraries.append(line.strip(" -"))
    facts = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "kernels": str(torch.backends.cpu.get_cpu_capability()),
        "math libraries": "; ".join(libraries) or "none",
        "threads": str(torch.get_num_threads()),
        "float32 matmul": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }
    if device != "cpu":
        facts["device"] = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    for name in VARIABLES:
        if name in os.environ:
            facts[name] = os.environ[name]
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    return facts


def _processor() -> str:
    facts: Texts = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    name = facts.get("model name") or platform.processor() or "unknown"
    if "cpu family" in facts and "model" in facts:
        name += f" (family {facts['cpu family']}, model {facts['model']})"
    return name


def told(recipe: Recipe) -> Texts:
    """Return what a recipe says of itself, as texts."""
    texts = {"name": recipe.name, "optimizer": recipe.optimizer.__qualname__}
    for name in TOLD:
        texts[name] = repr(getattr(recipe, name))
    return texts


def commit_of(recipe: Recipe) -> str:
    """Return the commit of the recipe's code, with ``+`` where files are changed; "" if there is none, or no git."""
    build = getattr(recipe.build, "func", recipe.build)
    try:
        folder = Path(inspect.getfile(build)).resolve().parent
    except (TypeError, OSError):
        # It is a class of C, or a function of an interactive session.
        return ""
    return commit_in(folder)


def commit_in(folder: Path) -> str:
    """Return the commit that is checked out in a folder, as :func:`commit_of` does."""
    head = _git(folder, "rev-parse", "HEAD")
    if head and _git(folder, "status", "--porcelain", "--untracked-files=no"):
        return f"{head}+"
    return head


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        process = subprocess.run(command, capture_output=True, check=True, text=True, timeout=10)
        return process.stdout.strip()
    return ""


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return ``"torch 2.13.0 -> 2.15.0"`` for each fact that is another."""
    texts = []
    for name in dict.fromkeys([*before, *now]):
        old = before.get(name, "none")
        new = now.get(name, "none")
        if old != new:
            texts.append(f"{name} {old or 'unknown'} -> {new or 'unknown'}")
    return texts
