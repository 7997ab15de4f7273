"""Reads folders of DeepSpeed's ZeRO-1, 2 and 3 (0.19): each parameter is cut out of the ranks' flat partitions."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsshard.checkpoint.format.division import Range
from fsshard.errors import CheckpointError, CorruptCheckpoint

Tree = dict[Any, Any]
Shape = tuple[int, ...]
Awaited = Callable[[torch.dtype, Shape, Callable[[Range], Tensor]], Tensor]

STATES = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODELS = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
# Files of pipelines and of mixtures of experts.
OTHERS = re.compile(r"(layer_|expp_).*\.pt")
INSTEAD = "have DeepSpeed's zero_to_fp32.py write the weights, and import those"
OWN = {"module", "optimizer", "buffer_names", "param_shapes", "shared_params", "ds_config", "ds_version"}
OWN |= {"frozen_param_shapes", "frozen_param_fragments", "dp_world_size", "mp_world_size", "num_experts"}
"""Keys of a model file that are not the script's, or that are read here."""
# What DeepSpeed's own Adams keep in their groups; torch's keep the step for each parameter.
FUSED = {"step", "bias_correction"}


def zero_folder(path: Path) -> Path | None:
    """Return the folder with the ranks' files: this one, or the one that its file ``latest`` names; None without."""
    latest = path / "latest"
    if latest.is_file():
        with latest.open() as stream:
            name = stream.read(1000).strip()
        path = path / os.path.basename(name)
    names = os.listdir(path) if path.is_dir() else []
    return path if any(map(STATES.fullmatch, names)) else None


def read_zero(
    folder: Path,
    load: Callable[[Path], Tree],
    awaited: Awaited,
) -> Tree:
    """Return the tree of a ZeRO folder: the float32 weights that the optimizer steps, its state by name, and the rest.

    ``load`` opens a file of ``torch.save``; ``awaited`` makes the tensor that stands for one that is read by slices.
    """
    names = os.listdir(folder)
    states = _by_rank(names, STATES)
    models = _by_rank(names, MODELS)
    if states is None or models is None or any(map(OTHERS.fullmatch, names)):
        raise CheckpointError(f"{folder} is of a model that was divided by tensors, layers or experts too; {INSTEAD}")
    try:
        of_models = [load(folder / name) for name in models]
        parts = [load(folder / name)["optimizer_state_dict"] for name in states]
        first = parts[0]
        count = torch.tensor(first["partition_count"]).max()
        zero3 = "fp32_flat_groups" in first
        is_whole = len(parts) == count
        if zero3:
            is_whole = is_whole and len(of_models) == count
        if not is_whole:
            raise CorruptCheckpoint(f"{folder}: expected files of {count} ranks, found {len(parts)}")
        return _ZeroFolder(of_models, parts, zero3, awaited).tree()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CorruptCheckpoint(f"{folder}: {what}; {INSTEAD}") from error


def _by_rank(names: Sequence[str], pattern: re.Pattern[str]) -> list[str] | None:
    """Return the ranks' files in order; None if there is more than one model-parallel rank."""
    numbers = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        if int(match[2]):
            return None
        numbers[name] = int(match[1] or 0)
    return sorted(numbers, key=numbers.__getitem__)


class _ZeroFolder:
    """The opened files of all ranks."""

    def __init__(
        self,
        models: list[Tree],
        parts: list[Tree],
        zero3: bool,
        awaited: Awaited,
    ) -> None:
        weights = "single_partition_of_fp32_groups"
        optimizer = "base_optimizer_state"
        if zero3:
            weights = "fp32_flat_groups"
            optimizer = "optimizer_state_dict"
        self._models = models
        self._zero3 = zero3
        self._awaited = awaited
        self._weights: list[Any] = []
        self._states: list[Tree] = []
        for part in parts:
            self._weights.append(part[weights])
            self._states.append(part[optimizer]["state"])
        first = parts[0]
        self._groups: list[Tree] = first[optimizer]["param_groups"]
        self._paddings: Any = first.get("param_alignment_paddings")

    def tree(self) -> Tree:
        """Return weights, optimizer state, and what the script saved with them."""
        first = self._models[0]
        module = dict(first["module"])
        state = {}
        groups = []
        for group in self._groups:
            names = []
            for number in group["params"]:
                flats = [of_rank[number] for of_rank in self._weights]
                for name, shape, offset in self._places(number):
                    names.append(name)
                    module[name] = self._cut(flats, shape, offset)
                    state[name] = self._state(number, shape, offset, group)
            settings = dict(group)
            for key in FUSED:
                settings.pop(key, None)
            settings["params"] = names
            groups.append(settings)
        if self._zero3:
            self._add_frozen(module)
        for name, other in dict(first.get("shared_params") or {}).items():
            module[name] = module[other]
        if self._zero3:
            # They were saved with exclude_frozen_parameters.
            lost = [name for name, value in module.items() if not value.numel()]
            if lost:
                raise ValueError(f"no file has the numbers of {', '.join(lost[:5])}")
        tree = {"module": module, "optimizer": {"state": state, "param_groups": groups}}
        for key, value in first.items():
            if key not in OWN and value is not None:
                tree[key] = value
        return tree

    def _add_frozen(self, module: Tree) -> None:
        """Add what is frozen, which ZeRO-1 and 2 have in the module."""
        shapes = self._models[0].get("frozen_param_shapes") or {}
        for name, shape in shapes.items():
            fragments = [model["frozen_param_fragments"][name].reshape(-1) for model in self._models]
            module[name] = self._cut(fragments, tuple(shape), 0)

    def _places(self, number: int) -> Iterator[tuple[str, Shape, int]]:
        """Yield names and shapes of a flat group, and where each begins: in it, or in a rank's part of it (ZeRO-3)."""
        shapes = self._models[0]["param_shapes"][number]
        ranks = 1
        paddings = [0] * len(shapes)
        if self._zero3:
            ranks = len(self._weights)
        elif self._paddings:
            paddings = self._paddings[number]
        offset = 0
        for index, (name, shape) in enumerate(shapes.items()):
            yield name, tuple(shape), offset
            offset += math.ceil(math.prod(shape) / ranks) + paddings[index]

    def _state(
        self,
        number: int,
        shape: Shape,
        offset: int,
        group: Tree,
    ) -> Tree:
        states = [each.get(number, {}) for each in self._states]
        state = {}
        for key, value in states[0].items():
            if isinstance(value, Tensor) and value.dim() > 0:
                flats = [each[key] for each in states]
                value = self._cut(flats, shape, offset)
            state[key] = value
        if state and "step" in group:
            state.setdefault("step", torch.tensor(float(group["step"])))
        return state

    def _cut(
        self,
        flats: Sequence[Tensor],
        shape: Shape,
        offset: int,
    ) -> Tensor:
        """Return the tensor that begins at an offset of the ranks' flat tensors."""
        numel = math.prod(shape)
        share = math.ceil(numel / len(flats))
        # The last rank's ends without the padding.
        length = max(flat.numel() for flat in flats)
        pieces = []
        count = 0
        for rank, flat in enumerate(flats):
            if self._zero3:
                # Every parameter is divided over all ranks.
                piece = flat[offset : offset + share]
            else:
                # The group is, so that a parameter can begin on one and end on another.
                start = offset - rank * length
                stop = start + numel
                piece = flat[max(start, 0) : max(stop, 0)]
            pieces.append(piece)
            count += piece.numel()
        if count < numel:
            raise ValueError(f"expected {numel} numbers at {offset} of {len(flats)} partitions, found fewer")
        return self._awaited(flats[0].dtype, shape, partial(_joined, pieces))


def _joined(pieces: Sequence[Tensor], wanted: Range) -> Tensor:
    """Read elements [start, stop) of what lies in pieces one after the other."""
    start, stop = wanted
    parts = []
    for piece in pieces:
        low = max(start, 0)
        high = min(stop, piece.numel())
        if low < high:
            parts.append(piece[low:high])
        start -= piece.numel()
        stop -= piece.numel()
    if parts:
        return torch.cat(parts)
    return pieces[0][:0].clone()
