"""Shows other programs' checkpoints as ours, by an index over their files, so that fsshard.load reads them too.

A model's names decide what in the tree is its state dict, and which number means which parameter. ``fsshard import``
has no model, and takes what can be told without one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fsshard.checkpoint.format.directory import CheckpointTarget, newest_ordinal
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
from fsshard.checkpoint.interop.foreign import KINDS, READER, foreign, open_tree
from fsshard.checkpoint.interop.foreign_names import clean_path, known_names, plain_names, unprefixed, whole_state
from fsshard.checkpoint.parts import class_name
from fsshard.checkpoint.reader import TensorReader
from fsshard.errors import CheckpointError, CorruptCheckpoint
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, groups_by_name
from fsshard.sharded.state_dict import NEURALOP_ARGUMENTS

UNKNOWN_CLASS = "unknown"  # of an optimizer whose state does not say
FILE = rank_file(0, 1)
DEPTH = 4  # of a state dict in the tree, at the most
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net")
OBJECTS = {
    **dict.fromkeys(("lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict"), "scheduler"),
    **dict.fromkeys(("grad_scaler", "scaler_state_dict", "grad_scaler_state_dict"), "scaler"),
}
"""Map other programs' names of objects to those of fsshard.load."""

TELL_NOTHING = {"amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize"}
TELL_NOTHING |= {"initial_lr", "max_lr", "min_lr"}
"""Hyper-parameters that came with some release of torch, or that schedulers add: they do not tell a class."""

Place = tuple[Any, ...]  # the keys that lead to a node of the tree


def import_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    trust_pickle: bool = False,
    optimizer: bool = True,
) -> Path:
    """Convert another program's checkpoint, of any kind that :func:`foreign` knows, to one of fsshard. In one process.

    Optimizer states come along unless ``optimizer`` is False, and must name their parameters: those that number them
    need the model, and are loaded by ``fsshard.load``. ``trust_pickle``: unpickle what cannot be read otherwise.
    """
    source = Path(os.path.expanduser(source))
    if not source.exists():
        raise CheckpointError(f"{source}: expected a checkpoint, found no such file or folder")
    kind = foreign(source)
    if kind is None:
        raise CheckpointError(f"{source} is not a checkpoint of a known kind; known are: {', '.join(KINDS)}")
    with ForeignReader(source, kind, trust_pickle=trust_pickle) as reader:
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


class ForeignReader(TensorReader):
    """Reads another program's checkpoint as :class:`~fsshard.checkpoint.reader.Reader` reads ours.

    Its contents are added under our names, :meth:`make_index` last. What is no tensor is a value there, not a tree.
    """

    def __init__(self, path: Path, kind: str, *, trust_pickle: bool) -> None:
        self.directory, self._kind = path, kind
        with ExitStack() as files:
            self._tree, self._tied = open_tree(path, kind, files, trust_pickle=trust_pickle)
            self._files = files.pop_all()
        self._values: dict[Any, Tensor] = {}  # what has been read whole: there can be any number of references to it
        self.tensors: dict[str, Tensor] = {}  # our name -> tensor of the tree
        self.keys: dict[str, str | None] = {}  # state-dict key -> name, or None
        self.extra: dict[str, Any] = {}  # state-dict key -> what is no tensor
        self.optimizers: dict[str, OptimizerInfo] = {}  # with what of the state is no tensor
        self.objects: dict[str, Any] = {}  # whatever else
        self._model_place: Place = ()
        self._optimizer_nodes = {place: node for place, node in _mappings(self._tree) if _is_optimizer(node)}

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def check_headers(self) -> None:
        """Do nothing: the headers made the index."""

    def verify(self, *_: object) -> None:
        raise CheckpointError(f"{self.directory}: verify=True, and {self._kind} keeps no checksums")

    def read(self, name: str, wanted: Range) -> Tensor:
        return self._read(self.tensors[name], wanted)

    def _read(self, tensor: Tensor, wanted: Range) -> Tensor:
        reader = getattr(tensor, READER, None)
        if reader is not None:
            return cast(Tensor, reader(wanted))
        if tensor.is_meta:
            raise CorruptCheckpoint(f"{self.directory}: a tensor on the meta device, which has no numbers")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            what = "a quantized tensor" if tensor.is_quantized else f"a tensor of {tensor.layout}"
            advice = "only plain ones are read: save it as such (tensor.to_dense())"
            raise CheckpointError(f"{self.directory}: {what}; {advice}")
        return tensor.detach().resolve_conj().resolve_neg().reshape(-1)[slice(*wanted)].clone()

    def tree(self, node: Any) -> Any:
        """Read all tensors in a part of the tree; the same memory once, as it was when it was saved."""
        if isinstance(node, Tensor):
            key = _memory_of(node)
            if key not in self._values:
                self._values[key] = self._read(node, (0, node.numel())).reshape(node.shape)
            return self._values[key]
        if type(node) in (list, tuple):
            return type(node)(self.tree(item) for item in node)
        return {key: self.tree(item) for key, item in node.items()} if isinstance(node, dict) else node

    def add_for(self, model: ShardedModule, optimizers: Mapping[str, ShardedOptimizer], *, strict: bool) -> None:
        """Add all, by a model's names; ``strict`` raises where trainable parameters lack state that others have."""
        self.add_model(model)
        self.add_optimizers_for(optimizers, strict)
        self.add_objects()
        self.make_index()

    def add_model(self, model: ShardedModule | None = None) -> None:
        """Add the state dict in the tree that fits the model best, under the model's keys.

        Without a model: the one that scripts call so, or the largest.
        """
        expected = set(model.backend.key_order) if model is not None else set()
        candidates = [
            (place, node)
            for place, node in _mappings(self._tree)
            if not any(place[: len(outer)] == outer for outer in self._optimizer_nodes)
            and all(isinstance(key, str) for key in node)
        ]

        def fitness(candidate: tuple[Place, dict[str, Any]]) -> tuple[int, bool, int]:
            place, node = candidate
            shared = max(len(expected & set(each)) for each in unprefixed(node))
            return shared, bool(place) and place[-1] in MODEL_KEYS, 0 if expected else _count_tensors(node)

        best = max(candidates, key=fitness, default=None)
        if best is None or (model is None and not _count_tensors(best[1])):
            raise CheckpointError(f"{self.directory} has no state dict of a model")
        self._model_place, state = best
        *_, plain = unprefixed(state) if model is None else [plain_names(model, state)]
        by_memory: dict[Any, str] = {}  # what was saved over the same memory shares a tensor
        for key, value in plain.items():
            if isinstance(value, Tensor):
                name = self.keys[key] = by_memory.setdefault(_memory_of(value), f"model/{key}")
                self.tensors.setdefault(name, value)
            elif key != NEURALOP_ARGUMENTS:  # a constructor's arguments in neuralop's state dicts; no weight
                self.keys[key], self.extra[key] = None, value
        for key, first in self._tied.items() if model is None else ():
            if self.keys.get(first) is not None:
                self.keys.setdefault(key, self.keys[first])

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
            state = whole_state(optimizer, node, None, strict=strict)
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
        """Add optimizer states that name their parameters, where there is no model to say what numbers mean."""
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

    def add_objects(self) -> None:
        """Add what comes besides the model's state dict and the optimizers' states."""
        taken = {place[0] for place in (self._model_place, *self._optimizer_nodes) if place}
        for key, value in self._tree.items() if self._model_place else ():
            if key not in taken:
                self.objects[OBJECTS.get(str(key), str(key))] = value

    def encode_values(self) -> None:
        """Put trees in place of values; their tensors join the others, the same memory once."""
        names: dict[Any, str] = {}

        def tree(value: Any, place: str) -> Any:
            def put(path: str, tensor: Tensor) -> str:
                name = names.setdefault(_memory_of(tensor), f"{place}/{path}")
                self.tensors.setdefault(name, tensor)
                return name

            return encode(self.tree(value), put, place)

        self.extra = {key: tree(value, f"model/{key}") for key, value in self.extra.items()}
        for name, (_, groups, state) in self.optimizers.items():
            groups[:] = [tree(group, f"groups/{name}") for group in groups]
            for parameter, item in state.items():
                state[parameter] = {k: tree(value, f"state/{name}/{parameter}/{k}") for k, value in item.items()}
        self.objects = {name: tree(value, f"objects/{name}") for name, value in self.objects.items()}

    def make_index(self) -> Index:
        """Make the index over all that was added."""
        path, infos = self.directory, {name: self._info(name, tensor) for name, tensor in self.tensors.items()}
        files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
        seen = repr([[(file.name, file.stat().st_size) for file in files], infos])
        self.index = Index(
            id=hashlib.sha256(seen.encode()).hexdigest(),  # the same on all ranks that see the same
            # Saves of this run come after whatever is there: loading tells them this number.
            ordinal=newest_ordinal(path.absolute().parent),
            saved_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            origin=Origin("unknown", "unknown", self._kind, 1),
            files={},
            tensors=infos,
            model=ModelInfo(self.keys, self.extra, {}),
            optimizers=self.optimizers,
            objects={name: {"all": value} for name, value in self.objects.items()},
        )
        return self.index

    def _info(self, name: str, tensor: Tensor) -> TensorInfo:
        if tensor.dtype not in STORED:
            known = ", ".join(map(dtype_name, STORED))
            raise CheckpointError(f"{self.directory}: {name} is of {tensor.dtype}; supported are {known}")
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


def _memory_of(tensor: Tensor) -> Any:
    """Return a key that differs between tensors of a tree which show other memory, or the same in another way."""
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


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
    ours = zip(groups.items(), known_names(optimizer, groups), strict=True)
    return {
        "state": state,
        "param_groups": [{**hyper, "params": [name]} for (name, hyper), known in ours if known in held],
    }


def _members(group: Mapping[str, Any]) -> list[Any]:
    return list(group.get("param_names", group["params"]))


def _check_class(path: Path, optimizer: ShardedOptimizer, groups: Sequence[Any]) -> None:
    """Raise if state and optimizer both have hyper-parameters of their own: a state does not say its class."""
    mine = set(optimizer.defaults)
    theirs = {str(key) for group in groups if isinstance(group, dict) for key in group}
    unknown, absent = sorted(theirs - mine - TELL_NOTHING), sorted(mine - theirs - TELL_NOTHING)
    if unknown and absent:
        raise CheckpointError(
            f"{path}: the optimizer state has {', '.join(unknown)}, a {optimizer.optimizer_class.__name__} has "
            f"{', '.join(absent)}: it is of another class. Build that one, or leave optimizer= out to begin with a "
            "fresh one"
        )
