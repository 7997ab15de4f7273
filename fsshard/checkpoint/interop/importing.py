"""Shows other programs' checkpoints as ours, by an index over their files, so that fsshard.load reads them too.

With a model at hand its names decide what in the tree is the model's state dict and which number means which parameter.
``fsshard import`` has no model and takes what can be told without one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import Tensor

from fsshard.checkpoint.format.directory import CheckpointTarget, from_home, newest_ordinal
from fsshard.checkpoint.format.dtypes import STORED, dtype_name
from fsshard.checkpoint.format.index import (
    Index,
    ModelInfo,
    OptimizerInfo,
    Origin,
    Piece,
    TensorInfo,
    write_index,
)
from fsshard.checkpoint.format.pieces import Range, rank_file
from fsshard.checkpoint.format.tensors_file import write
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

UNKNOWN_CLASS = "unknown"
"""The class of an optimizer whose state does not say."""

FILE = rank_file(0, 1)
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net")
OBJECTS = {
    "lr_scheduler": "scheduler",
    "scheduler_state_dict": "scheduler",
    "lr_scheduler_state_dict": "scheduler",
    "grad_scaler": "scaler",
    "scaler_state_dict": "scaler",
    "grad_scaler_state_dict": "scaler",
}
"""What scripts call what fsshard.load calls otherwise."""

SWITCHES = frozenset(
    [
        "amsgrad",
        "capturable",
        "decoupled_weight_decay",
        "differentiable",
        "foreach",
        "fused",
        "initial_lr",
        "maximize",
        "max_lr",
        "min_lr",
    ]
)
"""Hyper-parameters that came with some release of torch, or that schedulers add: they tell nothing about a class."""

DEPTH = 4
"""How deep in the tree a state dict can be."""

Path_ = tuple[Any, ...]


class ForeignReader(TensorReader):
    """Reads another program's checkpoint as :class:`~fsshard.checkpoint.reader.Reader` reads ours.

    Trees in its index are values already.

    Attributes:
        directory: the file or directory.
    """

    def __init__(self, opened: Opened, index: Index, tensors: Mapping[str, Tensor]) -> None:
        self.directory, self.index = opened.path, index
        self._opened, self._tensors = opened, tensors

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def check_headers(self) -> None:
        """Do nothing: the headers made the index."""

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Refuse: there are no checksums.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(f"{self.directory}: verify=True, and {self.index.origin.backend} keeps no checksums")

    def read(self, name: str, wanted: Range) -> Tensor:
        """Return elements [start, stop) of a flattened tensor in its own dtype, on the host."""
        return self._opened.read(self._tensors[name], wanted)

    def tree(self, node: Any) -> Any:
        """Return a value of the index, with its tensors."""
        return self._opened.value(node)


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

    Args:
        path: of the file or directory.
        kind: what :func:`foreign` said.
        model: whose names count.
        optimizers: by name; those that are to be loaded.
        strict: raise where trainable parameters have no optimizer state while others do.
        trust_pickle: unpickle what cannot be read otherwise.

    Raises:
        CheckpointError: it must be unpickled and is not trusted, or has not as many optimizers.
        CorruptCheckpoint: it is damaged.
        StateDictError: it does not fit.
    """
    opened = open_tree(path, kind, trust_pickle=trust_pickle)
    try:
        found = _Found(opened)
        found.add_model(model)
        found.add_optimizers_for(optimizers, strict)
        found.add_objects()
        return ForeignReader(opened, found.index(kind), found.tensors)
    except BaseException:
        opened.close()
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
    with open_tree(source, kind, trust_pickle=trust_pickle) as opened:
        found = _Found(opened)
        found.add_model()
        if optimizer:
            found.add_named_optimizers()
        found.add_objects()

        def write_into(identity: str, folder: Path, ordinal: int) -> None:
            index = found.index(kind, found.encoded)
            reader = ForeignReader(opened, index, found.tensors)
            items = [reader.item(name, name) for name in found.tensors]
            file = write(folder / FILE, items, {"format": "pt", "checkpoint": identity})
            write_index(folder, dataclasses.replace(index, id=identity, ordinal=ordinal, files={FILE: file}))

        return CheckpointTarget(destination).write_alone(write_into)


# ------------------------------------------------------------------------------------------------ what is where


class _Found:
    """The contents of somebody's checkpoint, under our names.

    Attributes:
        tensors: name -> tensor of the tree.
        keys: state-dict key -> name, or None.
        extra: state-dict key -> what is no tensor.
        optimizers: name -> its groups and what of its state is no tensor; values, not trees.
        objects: whatever else.
    """

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.tensors: dict[str, Tensor] = {}
        self.keys: dict[str, str | None] = {}
        self.extra: dict[str, Any] = {}
        self.optimizers: dict[str, OptimizerInfo] = {}
        self.objects: dict[str, Any] = {}
        self._model_path: Path_ = ()
        self._encoded: dict[Any, str] = {}  # memory of tensors beside the state dict -> name
        self._optimizer_nodes = {path: node for path, node in _mappings(opened.tree) if _is_optimizer(node)}

    # -- the model

    def add_model(self, model: ShardedModule | None = None) -> None:
        """Add the state dict in the tree that fits the model best, under the model's keys.

        Without a model: the one that scripts call so, or the largest.

        Raises:
            CheckpointError: there is none.
            StateDictError: it is none of a whole model.
        """
        expected = set(model.backend.key_order) if model is not None else set()

        def fitness(candidate: tuple[Path_, dict[str, Any]]) -> tuple[int, bool, int]:
            path, node = candidate
            shared = max(len(expected & set(each)) for each in _variants(node))
            return shared, bool(path) and path[-1] in MODEL_KEYS, 0 if expected else len(_tensors_of(node))

        best = max(self._candidates(), key=fitness, default=None)
        if best is None or (model is None and not _tensors_of(best[1])):
            raise CheckpointError(f"{self.opened.path} has no state dict of a model")
        self._model_path, state = best
        if model is not None:
            self._add_state_dict(plain_names(model, state))
            return
        *_, plain = _variants(state)
        self._add_state_dict(plain)
        for key, first in self.opened.tied.items():
            if self.keys.get(first) is not None:
                self.keys.setdefault(key, self.keys[first])

    def _candidates(self) -> list[tuple[Path_, dict[str, Any]]]:
        return [
            (path, node)
            for path, node in _mappings(self.opened.tree)
            if not any(path[: len(outer)] == outer for outer in self._optimizer_nodes)
            and all(isinstance(key, str) for key in node)
        ]

    def _add_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add every key; those that were saved over the same memory share a tensor."""
        by_memory: dict[Any, str] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                name = self.keys[key] = by_memory.setdefault(memory_of(value), f"model/{key}")
                self.tensors.setdefault(name, value)
            elif key != NEURALOP_ARGUMENTS:  # a constructor's arguments in neuralop's state dicts; no weight
                self.keys[key] = None
                self.extra[key] = value

    # -- optimizers

    def add_optimizers_for(self, optimizers: Mapping[str, ShardedOptimizer], strict: bool) -> None:
        """Add the state of each optimizer, by the names of the model's parameters."""
        for name, path in self._matched(list(optimizers)).items():
            self._add_optimizer(name, optimizers[name], self._optimizer_nodes[path], strict)

    def _matched(self, wanted: list[str]) -> dict[str, Path_]:
        """Match optimizers to states by name, else in order where there are as many."""
        by_name = {str(path[-1]): path for path in self._optimizer_nodes if path}
        if all(name in by_name for name in wanted):
            return {name: by_name[name] for name in wanted}
        if len(wanted) != len(self._optimizer_nodes):
            known = ", ".join(".".join(map(str, path)) or "itself" for path in self._optimizer_nodes) or "none"
            raise CheckpointError(
                f"{self.opened.path}: {len(wanted)} optimizer(s) to load ({', '.join(wanted)}), optimizer states in "
                f"it: {known}"
            )
        return dict(zip(wanted, self._optimizer_nodes, strict=True))

    def _add_optimizer(self, name: str, optimizer: ShardedOptimizer, node: Any, strict: bool) -> None:
        node = _unflattened(optimizer, node) if not _is_nested(node) else node
        _check_class(self.opened.path, optimizer, node["param_groups"])
        read = NumberedState.of(optimizer, [node], None)
        if strict:
            check_complete(optimizer, read.state)
        state = {"state": read.state, "param_groups": regroup(optimizer, read.groups)}
        found = as_this_torch(optimizer, state)
        optimizer.check_state_dict(found)
        self._put_optimizer(name, class_name(optimizer.optimizer_class), found["param_groups"], found["state"])

    def _put_optimizer(self, name: str, kind: str, groups: list[Any], state: Mapping[str, Mapping[str, Any]]) -> None:
        small: dict[str, dict[str, Any]] = {}
        for parameter, item in state.items():
            small[parameter] = {}
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
        for path, node in self._optimizer_nodes.items():
            name = str(path[-1]).replace("/", ".") if path else "optimizer"
            if not _is_nested(node) or not all(isinstance(m, str) for g in node["param_groups"] for m in _members(g)):
                raise CheckpointError(
                    f"{self.opened.path}: the optimizer state {name!r} numbers its parameters, and only the model "
                    "knows which is which: load it with fsshard.load(path, model, optimizer) and save that, or leave "
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
        taken = {path[0] for path in (self._model_path, *self._optimizer_nodes) if path}
        for key, value in self.opened.tree.items() if self._model_path else ():
            if key not in taken:
                self.objects[OBJECTS.get(str(key), str(key))] = value

    def encoded(self, value: Any, place: str) -> Any:
        """Return the tree of a value, whose tensors join the others."""

        def put(path: str, tensor: Tensor) -> str:
            name = self._encoded.setdefault(memory_of(tensor), f"{place}/{path}")  # the same memory is written once
            self.tensors.setdefault(name, tensor)
            return name

        return encode(self.opened.value(value), put, place)

    def index(self, kind: str, tree: Callable[[Any, str], Any] = lambda value, place: value) -> Index:
        """Return an index over all that was found, with values in place of trees, or with what ``tree`` makes of them.

        Args:
            kind: of the checkpoint.
            tree: gets a value and a name for its place, and may add tensors to those that were found.
        """
        model = ModelInfo(self.keys, {key: tree(value, f"model/{key}") for key, value in self.extra.items()}, {})
        optimizers = {
            name: OptimizerInfo(
                optimizer,
                [tree(group, f"groups/{name}") for group in groups],
                {
                    parameter: {key: tree(value, f"state/{name}/{parameter}/{key}") for key, value in item.items()}
                    for parameter, item in state.items()
                },
            )
            for name, (optimizer, groups, state) in self.optimizers.items()
        }
        objects = {name: {"all": tree(value, f"objects/{name}")} for name, value in self.objects.items()}
        return Index(
            id=self._digest(),
            # Saves of this run come after whatever is there: loading tells them this number.
            ordinal=newest_ordinal(self.opened.path.absolute().parent),
            saved_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            origin=Origin("unknown", "unknown", kind, 1),
            files={},
            tensors={name: _info(self.opened.path, name, tensor) for name, tensor in self.tensors.items()},
            model=model,
            optimizers=optimizers,
            objects=objects,
        )

    def _digest(self) -> str:
        """Return an id that is the same on all ranks that see the same."""
        path = self.opened.path
        files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
        names = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in self.tensors.items()]
        return hashlib.sha256(repr([[(f.name, f.stat().st_size) for f in files], names]).encode()).hexdigest()


def _mappings(node: Any, path: Path_ = ()) -> Iterator[tuple[Path_, dict[Any, Any]]]:
    """Yield every dict of the tree to a certain depth, outer ones first; nothing within an optimizer's state."""
    if isinstance(node, dict):
        yield path, node
    if len(path) < DEPTH and not (isinstance(node, dict) and _is_optimizer(node)):
        items = node.items() if isinstance(node, dict) else enumerate(node) if type(node) is list else ()
        for key, value in items:
            if isinstance(value, (dict, list)):
                yield from _mappings(value, (*path, key))


def _variants(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a state dict with ever less of the prefixes that wrappers put before its names."""
    yield from unprefixed({clean_path(key): value for key, value in state.items()})


def _tensors_of(node: Mapping[str, Any]) -> list[str]:
    return [key for key, value in node.items() if isinstance(value, Tensor)]


def _is_optimizer(node: Mapping[Any, Any]) -> bool:
    return _is_nested(node) or _is_flattened(node)


def _is_nested(node: Mapping[Any, Any]) -> bool:
    return isinstance(node.get("state"), dict) and isinstance(node.get("param_groups"), list)


def _is_flattened(node: Mapping[Any, Any]) -> bool:
    """Recognise what DCP's ``flatten_optimizer_state_dict`` writes: ``state.<parameter>.<key>``."""
    prefixes = {key.partition(".")[0] if isinstance(key, str) else None for key in node}
    return prefixes == {"state", "param_groups"} and all("." in key for key in node)


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
    found: list[Any] = group.get("param_names", group["params"])
    return found


def _check_class(path: Path, optimizer: ShardedOptimizer, groups: Sequence[Any]) -> None:
    """Compare hyper-parameters, since a state does not say of which class it is.

    Raises:
        CheckpointError: the state and the optimizer have some that the other does not know.
    """
    mine = set(optimizer.defaults)
    theirs = {str(key) for group in groups if isinstance(group, dict) for key in group}
    unknown, absent = sorted(theirs - mine - SWITCHES), sorted(mine - theirs - SWITCHES)
    if unknown and absent:
        raise CheckpointError(
            f"{path}: the optimizer state has {', '.join(unknown)}, a {optimizer.optimizer_class.__name__} has "
            f"{', '.join(absent)}: it is of another class. Build that one, or leave optimizer= out to begin with a "
            "fresh one"
        )


def _info(path: Path, name: str, tensor: Tensor) -> TensorInfo:
    check_plain(path, tensor)
    if tensor.dtype not in STORED:
        raise CheckpointError(f"{path}: {name} is of {tensor.dtype}; known are {', '.join(map(dtype_name, STORED))}")
    shape, numel = tuple(tensor.shape), tensor.numel()
    pieces = (Piece(FILE, name, 0, numel),) if numel else ()
    return TensorInfo(dtype_name(tensor.dtype), shape, pieces)
