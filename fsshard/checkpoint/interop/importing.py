"""Shows other programs' checkpoints as ours, by an index over their files, so that fsshard.load reads them too.

With a model at hand its names decide what in the tree is the model's state dict and which number means which parameter.
``fsshard import`` has no model and takes what can be told without one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import Tensor

from fsshard.checkpoint.format.directory import CheckpointTarget, from_home, newest_ordinal
from fsshard.checkpoint.format.index import (
    Index,
    ModelInfo,
    OptimizerInfo,
    Origin,
    Piece,
    Range,
    TensorInfo,
    rank_file,
    write_index,
)
from fsshard.checkpoint.format.tensors_file import STORED, dtype_name, write
from fsshard.checkpoint.format.tree import encode
from fsshard.checkpoint.interop.foreign import KINDS, Opened, check_plain, foreign, memory_of, open_tree
from fsshard.checkpoint.interop.foreign_names import (
    NumberedState,
    as_this_torch,
    check_complete,
    clean_path,
    known_name,
    plain_names,
    regroup,
    unprefixed,
)
from fsshard.checkpoint.parts import class_name
from fsshard.checkpoint.reader import TensorReader
from fsshard.errors import CheckpointError
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, groups_by_name
from fsshard.sharded.state_dict import NEURALOP_ARGUMENTS

__all__ = ["UNKNOWN_CLASS", "ForeignReader", "foreign", "import_checkpoint", "open_foreign"]

UNKNOWN_CLASS = "unknown"  # of an optimizer whose state does not say
FILE = rank_file(0, 1)
DEPTH = 4  # how deep in the tree a state dict can be
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net")
OBJECTS = {
    "lr_scheduler": "scheduler",
    "scheduler_state_dict": "scheduler",
    "lr_scheduler_state_dict": "scheduler",
    "grad_scaler": "scaler",
    "scaler_state_dict": "scaler",
    "grad_scaler_state_dict": "scaler",
}
"""Map other programs' names of objects to those of fsshard.load."""

NEWER = {"amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize"}
OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr"}
"""Hyper-parameters that came with some release of torch, or that schedulers add: they tell nothing about a class."""

Place = tuple[Any, ...]
"""The keys that lead to a node of the tree."""


def open_foreign(
    path: str | os.PathLike[str],
    kind: str,
    model: ShardedModule,
    optimizers: Mapping[str, ShardedOptimizer],
    *,
    strict: bool = True,
    trust_pickle: bool = False,
) -> ForeignReader:
    """Open what :func:`foreign` recognised, for a model and its optimizers. Local; nothing of them changes.

    ``strict`` raises where trainable parameters have no optimizer state while others do.
    """
    reader = ForeignReader(open_tree(path, kind, trust_pickle=trust_pickle))
    try:
        reader.add_model(model)
        reader.add_optimizers_for(optimizers, strict)
        reader.add_objects()
        reader.make_index()
        return reader
    except BaseException:
        reader.__exit__()
        raise


def import_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    trust_pickle: bool = False,
    optimizer: bool = True,
) -> Path:
    """Convert another program's checkpoint to fsshard's, without its model. In one process.

    Args:
        source: a safetensors file, a directory of the Hugging Face Hub or of ``torch.distributed.checkpoint``, a file
            of ``torch.save``, or a folder of neuraloperator's trainer.
        destination: the directory to write.
        trust_pickle: unpickle what cannot be read otherwise.
        optimizer: take optimizer states along, which must name their parameters.

    Raises:
        CheckpointError: it is none of these, must be unpickled and is not trusted, or has optimizer states that number
            their parameters (load them with the model, by ``fsshard.load``).
        CorruptCheckpoint: it is damaged.
    """
    source = from_home(source)
    kind = foreign(source)
    if kind is None:
        raise CheckpointError(f"{os.fspath(source)} is not a checkpoint of a known kind; known are: {', '.join(KINDS)}")
    with ForeignReader(open_tree(source, kind, trust_pickle=trust_pickle)) as reader:
        reader.add_model()
        if optimizer:
            reader.add_named_optimizers()
        reader.add_objects()

        def write_into(identity: str, folder: Path, ordinal: int) -> None:
            reader.encode_values()
            index = reader.make_index()
            items = [reader.item(name, name) for name in reader.tensors]
            file = write(folder / FILE, items, {"format": "pt", "checkpoint": identity})
            write_index(folder, dataclasses.replace(index, id=identity, ordinal=ordinal, files={FILE: file}))

        return CheckpointTarget(destination).write_alone(write_into)


# ------------------------------------------------------------------------------------------------ what is where


class ForeignReader(TensorReader):
    """Reads another program's checkpoint as :class:`~fsshard.checkpoint.reader.Reader` reads ours.

    Its contents are added one after the other, under our names; :meth:`make_index` comes last. What is no tensor is a
    value there, until :meth:`encode_values`.
    """

    def __init__(self, opened: Opened) -> None:
        self.directory, self._opened = opened.path, opened
        self.tensors: dict[str, Tensor] = {}  # our name -> tensor of the tree
        self.keys: dict[str, str | None] = {}  # state-dict key -> name, or None
        self.extra: dict[str, Any] = {}  # state-dict key -> what is no tensor
        self.optimizers: dict[str, OptimizerInfo] = {}  # with what of the state is no tensor
        self.objects: dict[str, Any] = {}  # whatever else
        self._model_place: Place = ()
        self._optimizer_nodes = {place: node for place, node in _mappings(opened.tree) if _is_optimizer(node)}

    def __enter__(self) -> ForeignReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def check_headers(self) -> None:
        """Do nothing: the headers made the index."""

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Refuse: there are no checksums."""
        raise CheckpointError(f"{self.directory}: verify=True, and {self._opened.kind} keeps no checksums")

    def read(self, name: str, wanted: Range) -> Tensor:
        """Return elements [start, stop) of a flattened tensor in its own dtype, on the host."""
        return self._opened.read(self.tensors[name], wanted)

    def tree(self, node: Any) -> Any:
        """Return a value of the index, with its tensors."""
        return self._opened.value(node)

    # -- the model

    def add_model(self, model: ShardedModule | None = None) -> None:
        """Add the state dict in the tree that fits the model best, under the model's keys.

        Without a model: the one that scripts call so, or the largest.

        Raises:
            CheckpointError: there is none.
            StateDictError: it is none of a whole model.
        """
        expected = set(model.backend.key_order) if model is not None else set()
        candidates = [
            (place, node)
            for place, node in _mappings(self._opened.tree)
            if not any(place[: len(outer)] == outer for outer in self._optimizer_nodes)
            and all(isinstance(key, str) for key in node)
        ]

        def fitness(candidate: tuple[Place, dict[str, Any]]) -> tuple[int, bool, int]:
            place, node = candidate
            shared = max(len(expected & set(each)) for each in _variants(node))
            return shared, bool(place) and place[-1] in MODEL_KEYS, 0 if expected else _count_tensors(node)

        best = max(candidates, key=fitness, default=None)
        if best is None or (model is None and not _count_tensors(best[1])):
            raise CheckpointError(f"{self.directory} has no state dict of a model")
        self._model_place, state = best
        *_, plain = _variants(state) if model is None else [plain_names(model, state)]
        by_memory: dict[Any, str] = {}  # what was saved over the same memory shares a tensor
        for key, value in plain.items():
            if isinstance(value, Tensor):
                name = self.keys[key] = by_memory.setdefault(memory_of(value), f"model/{key}")
                self.tensors.setdefault(name, value)
            elif key != NEURALOP_ARGUMENTS:  # a constructor's arguments in neuralop's state dicts; no weight
                self.keys[key], self.extra[key] = None, value
        for key, first in self._opened.tied.items() if model is None else ():
            if self.keys.get(first) is not None:
                self.keys.setdefault(key, self.keys[first])

    # -- optimizers

    def add_optimizers_for(self, optimizers: Mapping[str, ShardedOptimizer], strict: bool) -> None:
        """Add the state of each optimizer, by the names of the model's parameters."""
        nodes = self._optimizer_nodes
        by_name = {str(place[-1]): node for place, node in nodes.items() if place}
        if not all(name in by_name for name in optimizers):  # then in their order, where there are as many
            if len(optimizers) != len(nodes):
                known = ", ".join(".".join(map(str, place)) or "itself" for place in nodes) or "none"
                raise CheckpointError(
                    f"{self.directory}: {len(optimizers)} optimizer(s) to load ({', '.join(optimizers)}), optimizer "
                    f"states in it: {known}"
                )
            by_name = dict(zip(optimizers, nodes.values(), strict=True))
        for name, optimizer in optimizers.items():
            node = by_name[name] if _is_nested(by_name[name]) else _unflattened(optimizer, by_name[name])
            _check_class(self.directory, optimizer, node["param_groups"])
            numbered = NumberedState.of(optimizer, [node], None)
            if strict:
                check_complete(optimizer, numbered.state)
            groups = regroup(optimizer, numbered.groups)
            state = as_this_torch(optimizer, {"state": numbered.state, "param_groups": groups})
            optimizer.check_state_dict(state)
            self._put_optimizer(name, class_name(optimizer.optimizer_class), state["param_groups"], state["state"])

    def _put_optimizer(self, name: str, kind: str, groups: list[Any], state: Mapping[str, Mapping[str, Any]]) -> None:
        small: dict[str, dict[str, Any]] = {parameter: {} for parameter in state}
        for parameter, item in state.items():
            for key, value in item.items():
                if isinstance(value, Tensor):
                    self.tensors[f"optimizer/{name}/{parameter}/{key}"] = value
                else:
                    small[parameter][key] = value
        self.optimizers[name] = OptimizerInfo(kind, groups, small)

    def add_named_optimizers(self) -> None:
        """Add optimizer states that name their parameters, where there is no model to say what numbers mean.

        Raises:
            CheckpointError: one numbers them.
        """
        for place, node in self._optimizer_nodes.items():
            name = str(place[-1]).replace("/", ".") if place else "optimizer"
            if not _is_nested(node) or not all(isinstance(m, str) for g in node["param_groups"] for m in _members(g)):
                raise CheckpointError(
                    f"{self.directory}: the optimizer state {name!r} numbers its parameters, and only the model knows "
                    "which is which: load it with fsshard.load(path, model, optimizer) and save that, or leave "
                    "optimizer states out (optimizer=False, --no-optimizer)"
                )
            groups: list[Any] = []
            state: dict[str, Any] = {}
            for group in node["param_groups"]:
                members = [clean_path(member) for member in _members(group)]
                groups.append({**{k: v for k, v in group.items() if k != "param_names"}, "params": members})
                state |= {m: node["state"].get(n, {}) for n, m in zip(group["params"], members, strict=True)}
            self._put_optimizer(name, UNKNOWN_CLASS, groups, state)

    # -- the rest

    def add_objects(self) -> None:
        """Add what is beside the model's state dict and the optimizers' states."""
        taken = {place[0] for place in (self._model_place, *self._optimizer_nodes) if place}
        for key, value in self._opened.tree.items() if self._model_place else ():
            if key not in taken:
                self.objects[OBJECTS.get(str(key), str(key))] = value

    def encode_values(self) -> None:
        """Put trees in place of values; their tensors join the others."""
        names: dict[Any, str] = {}

        def tree(value: Any, place: str) -> Any:
            def put(path: str, tensor: Tensor) -> str:
                name = names.setdefault(memory_of(tensor), f"{place}/{path}")  # the same memory is written once
                self.tensors.setdefault(name, tensor)
                return name

            return encode(self._opened.value(value), put, place)

        self.extra = {key: tree(value, f"model/{key}") for key, value in self.extra.items()}
        for name, (kind, groups, state) in self.optimizers.items():
            groups = [tree(group, f"groups/{name}") for group in groups]
            for parameter, item in state.items():
                state[parameter] = {k: tree(value, f"state/{name}/{parameter}/{k}") for k, value in item.items()}
            self.optimizers[name] = OptimizerInfo(kind, groups, state)
        self.objects = {name: tree(value, f"objects/{name}") for name, value in self.objects.items()}

    def make_index(self) -> Index:
        """Make the index over all that was added."""
        path = self.directory
        files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
        names = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in self.tensors.items()]
        seen = repr([[(file.name, file.stat().st_size) for file in files], names])
        self.index = Index(
            id=hashlib.sha256(seen.encode()).hexdigest(),  # the same on all ranks that see the same
            # Saves of this run come after whatever is there: loading tells them this number.
            ordinal=newest_ordinal(path.absolute().parent),
            saved_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            origin=Origin("unknown", "unknown", self._opened.kind, 1),
            files={},
            tensors={name: self._info(name, tensor) for name, tensor in self.tensors.items()},
            model=ModelInfo(self.keys, self.extra, {}),
            optimizers=self.optimizers,
            objects={name: {"all": value} for name, value in self.objects.items()},
        )
        return self.index

    def _info(self, name: str, tensor: Tensor) -> TensorInfo:
        check_plain(self.directory, tensor)
        if tensor.dtype not in STORED:
            known = ", ".join(map(dtype_name, STORED))
            raise CheckpointError(f"{self.directory}: {name} is of {tensor.dtype}; known are {known}")
        pieces = (Piece(FILE, name, 0, tensor.numel()),) if tensor.numel() else ()
        return TensorInfo(dtype_name(tensor.dtype), tuple(tensor.shape), pieces)


def _mappings(node: Any, place: Place = ()) -> Iterator[tuple[Place, dict[Any, Any]]]:
    """Yield every dict of the tree to a certain depth, outer ones first; nothing within an optimizer's state."""
    if isinstance(node, dict):
        yield place, node
    if len(place) < DEPTH and not (isinstance(node, dict) and _is_optimizer(node)):
        items = node.items() if isinstance(node, dict) else enumerate(node) if type(node) is list else ()
        for key, value in items:
            if isinstance(value, (dict, list)):
                yield from _mappings(value, (*place, key))


def _variants(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a state dict with ever less of the prefixes that wrappers put before its names."""
    yield from unprefixed({clean_path(key): value for key, value in state.items()})


def _count_tensors(node: Mapping[str, Any]) -> int:
    return sum(isinstance(value, Tensor) for value in node.values())


def _is_optimizer(node: Mapping[Any, Any]) -> bool:
    if _is_nested(node):
        return True
    # What DCP's flatten_optimizer_state_dict writes: "state.<parameter>.<key>".
    prefixes = {key.partition(".")[0] if isinstance(key, str) else None for key in node}
    return prefixes == {"state", "param_groups"} and all("." in key for key in node)


def _is_nested(node: Mapping[Any, Any]) -> bool:
    return isinstance(node.get("state"), dict) and isinstance(node.get("param_groups"), list)


def _unflattened(optimizer: ShardedOptimizer, node: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for path, value in node.items():
        kind, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        (state if kind == "state" else groups).setdefault(name, {})[key] = value
    held = {name for group in groups_by_name(optimizer) for name in group["params"]}
    named = {name: known_name(optimizer, name) for name in groups}
    return {
        "state": state,
        "param_groups": [{**hyper, "params": [name]} for name, hyper in groups.items() if named[name] in held],
    }


def _members(group: Mapping[str, Any]) -> list[Any]:
    return list(group.get("param_names", group["params"]))


def _check_class(path: Path, optimizer: ShardedOptimizer, groups: Sequence[Any]) -> None:
    """Compare hyper-parameters, since a state does not say of which class it is.

    Raises:
        CheckpointError: the state and the optimizer have some that the other does not know.
    """
    mine = set(optimizer.defaults)
    told_nothing = NEWER | OF_SCHEDULERS
    theirs = {str(key) for group in groups if isinstance(group, dict) for key in group}
    unknown, absent = sorted(theirs - mine - told_nothing), sorted(mine - theirs - told_nothing)
    if unknown and absent:
        raise CheckpointError(
            f"{path}: the optimizer state has {', '.join(unknown)}, a {optimizer.optimizer_class.__name__} has "
            f"{', '.join(absent)}: it is of another class. Build that one, or leave optimizer= out to begin with a "
            "fresh one"
        )
