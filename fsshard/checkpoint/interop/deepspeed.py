"""Reads folders of DeepSpeed's ZeRO-1, 2 and 3 (0.19): each parameter is cut out of the ranks' flat partitions."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsshard.checkpoint.format.index import Range
from fsshard.errors import CheckpointError, CorruptCheckpoint

Tree = dict[Any, Any]
Awaited = Callable[[torch.dtype, tuple[int, ...], Callable[[Range], Tensor]], Tensor]

STATES = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODELS = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OTHERS = re.compile(r"(layer_|expp_).*\.pt")  # of pipelines and of mixtures of experts
INSTEAD = "have DeepSpeed's zero_to_fp32.py write the weights, and import those"
OWN = {"module", "optimizer", "buffer_names", "param_shapes", "shared_params", "ds_config", "ds_version"}
OWN |= {"frozen_param_shapes", "frozen_param_fragments", "dp_world_size", "mp_world_size", "num_experts"}
"""Keys of a model file that are not the script's, or that are read here."""
FUSED = {"step", "bias_correction"}
"""What DeepSpeed's own Adams keep in their groups; torch's keep the step for each parameter."""


def zero_folder(path: Path) -> Path | None:
    """Return the folder with the ranks' files: this one, or the one that its file ``latest`` names; None without."""
    latest = path / "latest"
    if latest.is_file():
        with latest.open() as stream:
            path = path / os.path.basename(stream.read(1000).strip())
    if path.is_dir() and any(STATES.fullmatch(name) for name in os.listdir(path)):
        return path
    return None


def read_zero(folder: Path, load: Callable[[Path], Tree], awaited: Awaited) -> Tree:
    """Return the tree of a ZeRO folder: the float32 weights that the optimizer steps, its state by name, and the rest.

    ``load`` opens a file of ``torch.save``; ``awaited`` makes the tensor that stands for one that is read by slices.
    """
    names = os.listdir(folder)
    states, models = _by_rank(names, STATES), _by_rank(names, MODELS)
    if any(OTHERS.fullmatch(name) for name in names) or None in (states, models):
        raise CheckpointError(f"{folder} is of a model that was divided by tensors, layers or experts too; {INSTEAD}")
    try:
        shown = [load(folder / name) for name in models or ()]
        parts = [load(folder / name)["optimizer_state_dict"] for name in states or ()]
        count = torch.tensor(parts[0]["partition_count"]).max()
        zero3 = "fp32_flat_groups" in parts[0]
        if len(parts) != count or (zero3 and len(shown) != count):
            raise CorruptCheckpoint(f"{folder}: expected files of {count} ranks, found {len(parts)}")
        return _ZeroFolder(shown, parts, zero3, awaited).tree()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"{folder}: {type(error).__name__}: {error}; {INSTEAD}") from error


def _by_rank(names: Sequence[str], pattern: re.Pattern[str]) -> list[str] | None:
    """Return the ranks' files in order; None if there is more than one model-parallel rank."""
    matches = [match for match in map(pattern.fullmatch, names) if match]
    if any(int(match[2]) for match in matches):
        return None
    return [match[0] for match in sorted(matches, key=lambda match: int(match[1] or 0))]


class _ZeroFolder:
    """The opened files of all ranks."""

    def __init__(self, models: list[Tree], parts: list[Tree], zero3: bool, awaited: Awaited) -> None:
        self._models = models
        self._zero3 = zero3
        self._awaited = awaited
        self._weights = [part["fp32_flat_groups" if zero3 else "single_partition_of_fp32_groups"] for part in parts]
        base = [part["optimizer_state_dict" if zero3 else "base_optimizer_state"] for part in parts]
        self._states = [each["state"] for each in base]
        self._groups: list[Tree] = base[0]["param_groups"]
        self._paddings: Any = parts[0].get("param_alignment_paddings")

    def tree(self) -> Tree:
        """Return weights, optimizer state, and what the script saved with them."""
        first = self._models[0]
        module: Tree = dict(first["module"])
        state: Tree = {}
        groups: list[Tree] = []
        for group in self._groups:
            groups.append({key: value for key, value in group.items() if key not in FUSED} | {"params": []})
            for number in group["params"]:
                for name, shape, offset in self._places(number):
                    groups[-1]["params"].append(name)
                    module[name] = self._cut([flats[number] for flats in self._weights], shape, offset)
                    state[name] = self._state(number, shape, offset, group)
        if self._zero3:  # ZeRO-1 and 2 have what is frozen in the module
            for name, shape in (first.get("frozen_param_shapes") or {}).items():
                fragments = [model["frozen_param_fragments"][name].reshape(-1) for model in self._models]
                module[name] = self._cut(fragments, tuple(shape), 0)
        for name, other in dict(first.get("shared_params") or {}).items():
            module[name] = module[other]
        lost = [name for name, value in module.items() if self._zero3 and not value.numel()]
        if lost:  # saved with exclude_frozen_parameters
            raise ValueError(f"no file has the numbers of {', '.join(lost[:5])}")
        rest = {key: value for key, value in first.items() if key not in OWN and value is not None}
        return {"module": module, "optimizer": {"state": state, "param_groups": groups}, **rest}

    def _places(self, number: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """Yield names and shapes of a flat group, and where each begins: in it, or in a rank's part of it (ZeRO-3)."""
        shapes: Mapping[str, Sequence[int]] = self._models[0]["param_shapes"][number]
        ranks = len(self._weights) if self._zero3 else 1
        offset = 0
        for index, (name, shape) in enumerate(shapes.items()):
            yield name, tuple(shape), offset
            offset += math.ceil(math.prod(shape) / ranks)
            if self._paddings and not self._zero3:
                offset += self._paddings[number][index]

    def _state(self, number: int, shape: tuple[int, ...], offset: int, group: Tree) -> Tree:
        states = [each.get(number, {}) for each in self._states]
        state: Tree = {}
        for key, value in states[0].items():
            flat = isinstance(value, Tensor) and value.dim() > 0
            state[key] = self._cut([each[key] for each in states], shape, offset) if flat else value
        if state and "step" in group:
            state.setdefault("step", torch.tensor(float(group["step"])))
        return state

    def _cut(self, flats: Sequence[Tensor], shape: tuple[int, ...], offset: int) -> Tensor:
        """Return the tensor that begins at an offset of the ranks' flat tensors."""
        numel = math.prod(shape)
        share = math.ceil(numel / len(flats))
        length = max(flat.numel() for flat in flats)  # the last rank's ends without the padding
        pieces: list[Tensor] = []
        for rank, flat in enumerate(flats):
            if self._zero3:  # every parameter is divided over all ranks
                pieces.append(flat[offset : offset + share])
            else:  # the group is, so that a parameter can begin on one and end on another
                start = max(offset - rank * length, 0)
                stop = max(offset + numel - rank * length, 0)
                pieces.append(flat[start:stop])
        if sum(piece.numel() for piece in pieces) < numel:
            raise ValueError(f"expected {numel} numbers at {offset} of {len(flats)} partitions, found fewer")
        return self._awaited(flats[0].dtype, shape, partial(_joined, pieces))


def _joined(pieces: Sequence[Tensor], wanted: Range) -> Tensor:
    """Read elements [start, stop) of what lies in pieces one after the other."""
    found: list[Tensor] = []
    begin = 0
    for piece in pieces:
        low = max(wanted[0] - begin, 0)
        high = min(wanted[1] - begin, piece.numel())
        if low < high:
            found.append(piece[low:high])
        begin += piece.numel()
    return torch.cat(found) if found else pieces[0][:0].clone()
