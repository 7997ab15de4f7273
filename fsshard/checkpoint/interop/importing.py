"""Shows other programs' checkpoints as ours, by an index over their files, so that fsshard.load reads them too.

A model's names decide what in the tree is its state dict, and which number means which parameter. ``fsshard import``
has no model, and takes what can be told without one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, cast

import torch
from torch import Tensor

from fsshard.checkpoint.format.directory import CheckpointTarget, newest_ordinal
from fsshard.checkpoint.format.division import (
    Piece,
    Range,
    rank_file,
)
from fsshard.checkpoint.format.index import (
    Index,
    ModelInfo,
    OptimizerInfo,
    Origin,
    TensorInfo,
    Tree,
    Values,
    write_index,
)
from fsshard.checkpoint.format.tensors_file import STORED, StrPath, dtype_name, write
from fsshard.checkpoint.format.tree import encode
from fsshard.checkpoint.interop.foreign import READER, foreign, open_tree, unknown
from fsshard.checkpoint.interop.foreign_names import (
    best_names,
    clean_path,
    known_names,
    plain_names,
    unprefixed,
    whole_state,
)
from fsshard.checkpoint.reader import TensorReader
from fsshard.errors import CheckpointError, CorruptCheckpoint
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, groups_by_name
from fsshard.sharded.state_dict import NEURALOP_ARGUMENTS
from fsshard.state_objects import class_name

log = logging.getLogger("fsshard")
UNKNOWN_CLASS = "unknown"  # of an optimizer whose state does not say
FILE = rank_file(0, 1)
DEPTH = 4  # of a state dict in the tree, at the most
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net")
# Map other programs' names of objects to those of fsshard.load.
OBJECTS = {
    **dict.fromkeys(("lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict"), "scheduler"),
    **dict.fromkeys(("grad_scaler", "scaler_state_dict", "grad_scaler_state_dict"), "scaler"),
}

TELL_NOTHING = {"amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize"}
TELL_NOTHING |= {"initial_lr", "max_lr", "min_lr"}
"""Hyper-parameters that came with some release of torch, or that schedulers add: they do not tell a class."""

Place = tuple[Any, ...]  # the keys that lead to a node of the tree
PlacedDict = tuple[Place, dict[Any, Any]]


def import_checkpoint(
    source: StrPath,
    destination: StrPath,
    *,
    trust_pickle: bool = False,
    optimizer: bool = True,
    key: str | None = None,
) -> Path:
    """Convert another program's checkpoint, of any kind that :func:`foreign` knows, to one of fsshard. In one process.

    Optimizer states come along unless ``optimizer`` is False, and must name their parameters: those that number them
    need the model, and are loaded by ``fsshard.load``. ``trust_pickle``: unpickle what cannot be read otherwise.
    ``key``: the place of the state dict, where there are several, as ``"student"`` or ``"nets.student"``; or what the
    names of the wanted weights begin with in one.
    """
    source = Path(os.path.expanduser(source))
    if not source.exists():
        raise CheckpointError(f"{source}: expected a checkpoint, found no such file or folder")
    kind = foreign(source)
    if kind is None:
        raise CheckpointError(unknown(source))
    with ForeignReader(source, kind, trust_pickle=trust_pickle) as reader:
        reader.add_model(key=key)
        if optimizer:
            reader.add_named_optimizers()
        reader.add_objects()

        def write_into(identity: str, folder: Path, ordinal: int) -> None:
            reader.encode_values()
            index = reader.make_index()
            items = [reader.item(name, name) for name in reader.tensors]
            file = write(folder / FILE, items, {"format": "pt", "checkpoint": identity})
            index = dataclasses.replace(index, id=identity, ordinal=ordinal, files={FILE: file})
            write_index(folder, index)

        return CheckpointTarget(destination).write_alone(write_into)


class ForeignReader(TensorReader):
    """Reads another program's checkpoint as :class:`~fsshard.checkpoint.reader.Reader` reads ours.

    Its contents are added under our names, :meth:`make_index` last. What is no tensor is a value there, not a tree.
    """

    def __init__(self, path: Path, kind: str, *, trust_pickle: bool) -> None:
        self.path = path
        self.directory = path
        self._kind = kind
        with ExitStack() as files:
            self._tree, self._tied = open_tree(path, kind, files, trust_pickle=trust_pickle)
            self._files = files.pop_all()
        # What has been read whole: there can be any number of references to it.
        self._values: dict[Any, Tensor] = {}
        # Our name -> tensor of the tree.
        self.tensors: dict[str, Tensor] = {}
        # State-dict key -> name, or None.
        self.keys: dict[str, str | None] = {}
        self.extra: Tree = {}  # state-dict key -> what is no tensor
        # Each has what of its state is no tensor.
        self.optimizers: dict[str, OptimizerInfo] = {}
        self.objects: Tree = {}  # whatever else
        self._model_place: Place = ()
        # Every name of the state dict begins with it; it is taken off.
        self._prefix = ""
        self._optimizer_nodes: dict[Place, dict[Any, Any]] = {}
        for place, node in _mappings(self._tree):
            if _is_optimizer(node):
                self._optimizer_nodes[place] = node

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def check_headers(self, rank: int = 0, ranks: int = 1) -> None:
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
        start, stop = wanted
        return tensor.detach().resolve_conj().resolve_neg().reshape(-1)[start:stop].clone()

    def tree(self, node: Any) -> Any:
        """Read all tensors in a part of the tree; the same memory once, as it was when it was saved."""
        if isinstance(node, Tensor):
            key = _memory_of(node)
            if key not in self._values:
                self._values[key] = self._read(node, (0, node.numel())).reshape(node.shape)
            return self._values[key]
        if type(node) in (list, tuple):
            return type(node)(map(self.tree, node))
        if isinstance(node, PurePath):
            return str(node)
        if isinstance(node, dict):
            return {key: self.tree(item) for key, item in node.items()}
        return node

    def add_for(
        self,
        model: ShardedModule,
        optimizers: Mapping[str, ShardedOptimizer],
        key: str | None,
        *,
        strict: bool,
    ) -> None:
        """Add all, by a model's names; ``strict`` raises where trainable parameters lack state that others have."""
        self.add_model(model, key)
        self.add_optimizers_for(optimizers, strict)
        self.add_objects()
        self.make_index()

    def add_model(self, model: ShardedModule | None = None, key: str | None = None) -> None:
        """Add the state dict at ``key``, or the only one that fits, under the model's keys or without one its own."""
        expected = set()
        if model is not None:
            expected = set(model.backend.key_order)
        if key is not None:
            self._model_place, state = self._at(key)
        else:
            self._model_place, state = self._only_one(expected)
        self._check_numbers(key, state)
        if model is None:
            plain = self._plain_without_model(state)
        else:
            self._prefix, _ = best_names(expected, state)
            plain = plain_names(model, state)
            if self._prefix.replace("module.", ""):
                log.warning("%s: %r, which begins every name, is taken off", self.directory, self._prefix)
        # What was saved over the same memory shares a tensor.
        by_memory: dict[Any, str] = {}
        for name, value in plain.items():
            if isinstance(value, Tensor):
                tensor = by_memory.setdefault(_memory_of(value), f"model/{name}")
                self.keys[name] = tensor
                self.tensors.setdefault(tensor, value)
            elif name != NEURALOP_ARGUMENTS:
                # neuralop's state dicts have a constructor's arguments, too, which are no weight.
                self.keys[name] = None
                self.extra[name] = value
        if model is not None:
            return
        for name, first in self._tied.items():
            if self.keys.get(first) is not None:
                self.keys.setdefault(name, self.keys[first])

    def _plain_without_model(self, state: Tree) -> Tree:
        """Return the state dict without DDP's prefix; say which one all its names still begin with."""
        *_, (self._prefix, plain) = unprefixed(state)
        *_, (common, _) = unprefixed(plain, "")
        if common:
            place = _dotted((*self._model_place, common[:-1]))
            option = f"--key {place}"
            log.warning("%s: %r begins every name; %s takes it off", self.directory, common, option)
        return plain

    def _state_dicts(self) -> dict[Place, Tree]:
        """Return by place what can be a state dict: dicts of tensors by text, and of nested ones the largest."""
        places = {}
        for place, node in _mappings(self._tree):
            if any(_is_below(place, outer) for outer in self._optimizer_nodes):
                continue
            if _count_tensors(node) and all(isinstance(key, str) for key in node):
                places[place] = node
        sizes = {place: _count_tensors(node) for place, node in places.items()}
        # Of a dict within another one the one with more tensors is the state dict.
        for outer in sizes:
            for inner in list(places):
                if inner == outer or not _is_below(inner, outer):
                    continue
                smaller = inner if sizes[inner] <= sizes[outer] else outer
                places.pop(smaller, None)
        return places

    def _only_one(self, expected: set[str]) -> PlacedDict:
        """Return the state dict that has most of the expected keys, or without any the only one; raise if several."""
        places = self._state_dicts()
        if not places and not expected:
            raise CheckpointError(f"{self.directory} has no state dict of a model")
        if not places:
            return (), self._tree
        shared = {}
        for place, node in places.items():
            _, plain = best_names(expected, node)
            shared[place] = len(expected & plain.keys())
        most = max(shared.values())
        best = [place for place in places if shared[place] == most]
        chosen = best
        named = []
        texts = []
        for place in best:
            if place and place[-1] in MODEL_KEYS:
                named.append(place)
            texts.append(f"{_dotted(place)!r} ({_count_tensors(places[place])} tensors)")
        if len(named) == 1:
            chosen = named
        if len(best) > 1:
            what = ", ".join(texts)
            last = _dotted(best[-1])
            option = f"--key {last} of `fsshard import`, key={last!r} in code"
            if len(chosen) > 1:
                raise CheckpointError(f"{self.directory} has several state dicts: {what}; choose one: {option}")
            name = chosen[0][-1]
            log.warning("%s: of %s %r is read as the model; another: %s", self.directory, what, name, option)
        return chosen[0], places[chosen[0]]

    def _at(self, key: str) -> PlacedDict:
        """Return the state dict at a place, or that part of one whose names begin with the rest of the place."""
        for place, node in _mappings(self._tree):
            outer = _dotted(place)
            if key == outer:
                return place, node
            if outer and not key.startswith(f"{outer}."):
                continue
            beginning = key.removeprefix(f"{outer}.") + "."
            inside = {}
            for name, value in node.items():
                if str(name).startswith(beginning):
                    inside[name.removeprefix(beginning)] = value
            if inside:
                log.warning("%s: of %d values of %r, %d are read", self.directory, len(node), outer, len(inside))
                return place, inside
        names = [repr(_dotted(place)) for place in self._state_dicts()]
        places = ", ".join(names) or "none"
        raise CheckpointError(
            f"{self.directory}: expected key= (--key) of one of its state dicts: {places}; got {key!r}"
        )

    def _check_numbers(
        self,
        key: str | None,
        state: Values,
    ) -> None:
        """Raise for one file of several that DeepSpeed wrote, and where all tensors are empty."""
        is_deepspeeds = self._kind == "torch" and "ds_version" in self._tree
        if is_deepspeeds and self._tree.get("param_shapes", True) and key is None:
            raise CheckpointError(
                f"{self.directory} is one file of a DeepSpeed checkpoint, whose numbers are in *_optim_states.pt; pass "
                f"their folder, {self.directory.absolute().parent}"
            )
        # Under ZeRO-3 a model's own state dict has tensors without elements.
        sizes = [value.numel() for value in state.values() if isinstance(value, Tensor)]
        if sizes and not any(sizes):
            raise CheckpointError(f"{self.directory}: all {len(sizes)} tensors are empty, their numbers are elsewhere")

    def add_optimizers_for(self, optimizers: Mapping[str, ShardedOptimizer], strict: bool) -> None:
        """Add the state of each optimizer, by the names of the model's parameters."""
        nodes = self._optimizer_nodes
        by_name = {}
        for place, node in nodes.items():
            if place:
                by_name[str(place[-1])] = node
        # They are taken in their order then, where there are as many.
        if not all(name in by_name for name in optimizers):
            if len(optimizers) != len(nodes):
                names = [_dotted(place) or "itself" for place in nodes]
                places = ", ".join(names) or "none"
                raise CheckpointError(
                    f"{self.directory}: {len(optimizers)} optimizer(s) to load ({', '.join(optimizers)}), optimizer "
                    f"states in it: {places}"
                )
            by_name = dict(zip(optimizers, nodes.values(), strict=True))
        for name, optimizer in optimizers.items():
            node = by_name[name]
            if not _is_nested(node):
                node = _unflattened(optimizer, node, self._prefix)
            _check_class(self.directory, optimizer, node["param_groups"])
            names_of_groups = None
            if self._names_parameters(node):
                names_of_groups = []
                for group in node["param_groups"]:
                    names_of_groups.append(known_names(optimizer, self._own_names(group)))
            state = whole_state(optimizer, node, names_of_groups, strict=strict)
            kind = class_name(optimizer.optimizer_class)
            self._put_optimizer(name, kind, state["param_groups"], state["state"])

    def _own_names(self, group: Values) -> list[Any]:
        """Return the names of a group's parameters as the model's are read, or their numbers."""
        own_names = []
        for name in group.get("param_names", group["params"]):
            if isinstance(name, str):
                name = clean_path(name).removeprefix(self._prefix)
            own_names.append(name)
        return own_names

    def _names_parameters(self, node: Values) -> bool:
        """Return whether an optimizer's state has names for its parameters, and not numbers."""
        names = chain.from_iterable(map(self._own_names, node["param_groups"]))
        return all(isinstance(name, str) for name in names)

    def _put_optimizer(
        self,
        name: str,
        kind: str,
        groups: list[Any],
        state: Mapping[str, Values],
    ) -> None:
        small: dict[str, Tree] = {}
        for parameter, item in state.items():
            small[parameter] = {}
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
            if not _is_nested(node) or not self._names_parameters(node):
                raise CheckpointError(
                    f"{self.directory}: the optimizer state {name!r} numbers its parameters, and only the model knows "
                    "which is which: load it with fsshard.load(path, model, optimizer) and save that, or leave "
                    "optimizer states out (optimizer=False, --no-optimizer)"
                )
            groups = []
            state = {}
            for group in node["param_groups"]:
                names = self._own_names(group)
                hyper = {**group, "params": names}
                hyper.pop("param_names", None)
                groups.append(hyper)
                for number, parameter in zip(group["params"], names, strict=True):
                    state[parameter] = node["state"].get(number, {})
            self._put_optimizer(name, UNKNOWN_CLASS, groups, state)

    def add_objects(self) -> None:
        """Add what comes besides the model's state dict and the optimizers' states."""
        if not self._model_place:
            return
        rest = _without(self._tree, [self._model_place, *self._optimizer_nodes])
        for key, value in rest.items():
            name = str(key)
            self.objects[OBJECTS.get(name, name)] = value

    def encode_values(self) -> None:
        """Put trees in place of values; their tensors join the others, the same memory once."""
        names: dict[Any, str] = {}

        def tree(value: Any, place: str) -> Any:
            def put(path: str, tensor: Tensor) -> str:
                name = names.setdefault(_memory_of(tensor), f"{place}/{path}")
                self.tensors.setdefault(name, tensor)
                return name

            return encode(self.tree(value), put, place)

        for key, value in self.extra.items():
            self.extra[key] = tree(value, f"model/{key}")
        for name, (_, groups, state) in self.optimizers.items():
            groups[:] = [tree(group, f"groups/{name}") for group in groups]
            for parameter, item in state.items():
                place = f"state/{name}/{parameter}"
                for key, value in item.items():
                    item[key] = tree(value, f"{place}/{key}")
        for name, value in list(self.objects.items()):
            try:
                self.objects[name] = tree(value, f"objects/{name}")
            except CheckpointError as error:
                # Objects of somebody's classes; the model and its optimizers have none.
                log.warning("%s: %r is left out: %s", self.directory, name, error)
                del self.objects[name]

    def make_index(self) -> Index:
        """Make the index over all that was added."""
        path = self.directory
        infos = {name: self._info(name, tensor) for name, tensor in self.tensors.items()}
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.is_file())
        sizes = [(file.name, file.stat().st_size) for file in files]
        seen = repr([sizes, infos])
        self.index = Index(
            # It is the same on all ranks that see the same.
            id=hashlib.sha256(seen.encode()).hexdigest(),
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
            dtypes = ", ".join(map(dtype_name, STORED))
            raise CheckpointError(f"{self.directory}: {name} is of {tensor.dtype}; supported are {dtypes}")
        pieces: tuple[Piece, ...] = ()
        if tensor.numel():
            pieces = (Piece(FILE, name, 0, tensor.numel()),)
        return TensorInfo(dtype_name(tensor.dtype), tuple(tensor.shape), pieces)


def _mappings(node: Any, place: Place = ()) -> Iterator[PlacedDict]:
    """Yield every dict of the tree to a certain depth, outer ones first; nothing within an optimizer's state."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, dict):
        yield place, node
        if not _is_optimizer(node):
            items = node.items()
    elif type(node) is list:
        items = enumerate(node)
    if len(place) == DEPTH:
        return
    for key, value in items:
        if isinstance(value, (dict, list)):
            yield from _mappings(value, (*place, key))


def _is_below(place: Place, outer: Place) -> bool:
    """Return whether a place is another one, or within it."""
    return place[: len(outer)] == outer


def _without(node: Any, places: Sequence[Place]) -> Any:
    """Return a node without what is at some places below it, and without containers that this leaves empty."""
    if not places:
        return node
    items = node.items() if isinstance(node, dict) else enumerate(node)
    rest = {}
    for key, value in items:
        below = []
        for first, *rest_of_place in places:
            if first == key:
                below.append(tuple(rest_of_place))
        if () in below:
            continue
        remains = _without(value, below)
        if remains or not below:
            rest[key] = remains
    if isinstance(node, dict):
        return rest
    return list(rest.values())


def _dotted(place: Place) -> str:
    return ".".join(map(str, place))


def _memory_of(tensor: Tensor) -> Any:
    """Return a key that differs between tensors of a tree which show other memory, or the same in another way."""
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _count_tensors(node: Values) -> int:
    return sum(isinstance(value, Tensor) for value in node.values())


def _is_optimizer(node: Mapping[Any, Any]) -> bool:
    if _is_nested(node):
        return True
    # What DCP's flatten_optimizer_state_dict writes: "state.<parameter>.<key>".
    beginnings = set()
    for key in node:
        if not isinstance(key, str) or "." not in key:
            return False
        beginnings.add(key.partition(".")[0])
    return beginnings == {"state", "param_groups"}


def _is_nested(node: Mapping[Any, Any]) -> bool:
    groups = node.get("param_groups")
    return isinstance(groups, list) and isinstance(node.get("state"), dict)


def _unflattened(
    optimizer: ShardedOptimizer,
    node: Values,
    prefix: str,
) -> Tree:
    state: dict[str, Tree] = {}
    groups: dict[str, Tree] = {}
    for path, value in node.items():
        kind, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        table = state if kind == "state" else groups
        table.setdefault(name, {})[key] = value
    trained = set()
    for group in groups_by_name(optimizer):
        trained.update(group["params"])
    plain = [clean_path(name).removeprefix(prefix) for name in groups]
    param_groups = []
    for name, own_name in zip(groups, known_names(optimizer, plain), strict=True):
        if own_name in trained:
            param_groups.append({**groups[name], "params": [name]})
    return {"state": state, "param_groups": param_groups}


def _check_class(path: Path, optimizer: ShardedOptimizer, groups: Sequence[Any]) -> None:
    """Raise if state and optimizer both have hyper-parameters of their own: a state does not say its class."""
    expected = set(optimizer.defaults)
    saved: set[str] = set()
    for group in groups:
        if isinstance(group, dict):
            saved.update(map(str, group))
    others = sorted(saved - expected - TELL_NOTHING)
    absent = sorted(expected - saved - TELL_NOTHING)
    if others and absent:
        raise CheckpointError(
            f"{path}: the optimizer state has {', '.join(others)}, a {optimizer.optimizer_class.__name__} has "
            f"{', '.join(absent)}: it is of another class. Build that one, or leave optimizer= out to begin with a "
            "fresh one"
        )
