"""fsshard.load: every rank reads its own slices, and nothing changes before all of them have been read."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.backends.whole import (
    owns_state,
    raw_state_dict,
    set_state,
    state_device,
    state_divides,
    state_entry,
    state_of,
)
from fsshard.checkpoint import arguments, parts
from fsshard.checkpoint import rng as generators
from fsshard.checkpoint.format.directory import identity, resolve
from fsshard.checkpoint.format.division import RANK_FILE
from fsshard.checkpoint.format.index import INDEX_FILE, Names, Tree, Values
from fsshard.checkpoint.format.object_store import identity_of_url, is_url
from fsshard.checkpoint.format.tensors_file import Shape, StrPath, dtype_name
from fsshard.checkpoint.interop.importing import UNKNOWN_CLASS, ForeignReader, foreign, unknown
from fsshard.checkpoint.models import choose_models, name_models, prefix
from fsshard.checkpoint.position import DataPosition
from fsshard.checkpoint.reader import Reader
from fsshard.checkpoint.saving import wait_for_saves
from fsshard.comm.agreement import Channel, exchange
from fsshard.errors import CheckpointError, ConfigurationError, StateDictError
from fsshard.planning.entries import Entry
from fsshard.planning.text import printable
from fsshard.sharded.averages import Averages
from fsshard.sharded.controller import controller_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, groups_by_name
from fsshard.sharded.state_dict import NEURALOP_ARGUMENTS
from fsshard.state_objects import (
    Classes,
    SavedObject,
    by_class_name,
    check_objects,
    class_name,
    described,
    fill_tensor,
    holds_objects,
    is_plain_tensor,
)
from fsshard.torch_private.modules import EXTRA_STATE

log = logging.getLogger("fsshard")
# Name -> what was expected, and what was got.
Mismatches = dict[str, tuple[object, object]]
# State of one parameter by key: is it this rank's part of what is per element, shaped as its part of the parameter?
_State = dict[str, tuple[bool, Any]]


Groups = list[Tree]
Undo = list[tuple[str, Callable[[], Any]]]


@dataclass(frozen=True)
class Loaded:
    """The result of :func:`load`.

    Attributes:
        path: the directory, or the URL, that was read.
        state: what was saved as ``**state`` and for which no object was passed to :func:`load`; this rank's values.
        per_rank: values that differed between ranks, by rank, if the number of ranks has changed.
        missing: keys of the model, and names of objects, that the checkpoint lacks (``strict=False``); keys of frozen
            weights too, where it was saved with ``only="trainable"``.
        unexpected: keys of the checkpoint that the model lacks (``strict=False``).
        origin: the fsshard, torch, backend and world size that wrote it.
    """

    path: Path | str
    state: Values
    per_rank: Mapping[str, list[Any]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    origin: Values

    def __getitem__(self, name: str) -> Any:
        """Return ``state[name]``."""
        if name not in self.state:
            names = ", ".join(map(repr, self.state)) or "nothing"
            raise KeyError(f"{name!r} is not among what was saved beside the model and optimizer: {names}")
        return self.state[name]


def load(
    path: StrPath,
    model: ShardedModule | Mapping[str, ShardedModule],
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    *,
    strict: bool = True,
    verify: bool = False,
    rng: bool = True,
    trust_pickle: bool = False,
    key: str | None = None,
    objects: Sequence[type] = (),
    loader: Any = None,
    timeout: float = arguments.TIMEOUT,
    **state: Any,
) -> Loaded:
    """Load what :func:`fsshard.save` wrote, under any engine and at any world size. All or nothing, and collective.

    Other programs' checkpoints are recognised and read the same way, by slices: a safetensors file, a directory of the
    Hugging Face Hub or of ``torch.distributed.checkpoint``, a file of ``torch.save`` (of DDP, FairScale, or plain
    torch), a folder of DeepSpeed's ZeRO or of neuraloperator's trainer.

    A checkpoint of ``save(..., only="trainable")`` leaves weights as they are that were frozen when it was saved, and
    are frozen now: give the model its weights first.

    Each rank reads only the slices that it holds. Nothing of the model, the optimizers or the objects changes before
    every rank has read and checked all that it needs.

    Args:
        path: the checkpoint's directory or URL, or another program's checkpoint.
        model: what :func:`fsshard.wrap` returned; a mapping of models by name, where several were saved, or of some of
            these: the others are not read.
        optimizer: as handed to ``save``: one, a list, or a mapping of them; None leaves the saved ones alone.
        scheduler: gets its state by ``load_state_dict``; a list or a mapping as handed to ``save``.
        scaler: gets its state by ``load_state_dict``.
        strict: False allows keys of the model that the checkpoint lacks (they stay as they are) and keys that the
            model lacks, casts to the model's dtypes, and takes an optimizer's state from a class of the same name in
            another module. Another shape, and another optimizer, raise in any case.
        verify: compare the checksum of every file; the ranks share the files.
        rng: restore every rank's random number generators. At another world size rank r gets the state of the saved
            rank r, and additional ranks are seeded from the last saved one's.
        trust_pickle: unpickle another program's checkpoint if it cannot be read otherwise; this runs any code in it.
            fsshard's own checkpoints are never unpickled.
        key: the place of the model's state dict in another program's checkpoint where several fit: ``"student"``.
        objects: classes of objects within an optimizer's state, ``[TensorGaLoreProjector]``, where the optimizer has
            none yet: the fields that were saved are given to new ones. A file's own word makes no object.
        loader: goes on with the next sample, on another number of ranks too (docs/data.md).
        timeout: seconds to wait for ranks that do not call this.
        **state: an :class:`fsshard.EMA`, and what has ``load_state_dict``, that was saved under that name.

    Raises:
        StateDictError: names every missing, unexpected, misshaped key and other dtype.
        CheckpointError: there is no checkpoint, or a rank did not call this or could not read.
        CorruptCheckpoint: a file is missing, cut short, altered, or no safetensors file. All on every rank.
    """
    path, call = arguments.check_call(
        "fsshard.load",
        path,
        timeout,
        strict=strict,
        verify=verify,
        rng=rng,
        trust_pickle=trust_pickle,
    )
    _check_options(call, key, objects)
    models = name_models(model, "fsshard.load")
    settings = next(iter(models.values())).backend.settings
    channel = Channel.of(settings.everyone)
    wait_for_saves()
    classes = by_class_name(objects)
    targets = arguments.named_objects(scheduler, scaler, arguments.with_loader(state, loader, settings))
    called = arguments.described_call(call, models, optimizer, targets, strict=strict, verify=verify, rng=rng, key=key)
    channel.arrive(called, timeout, call)
    averages = arguments.take_averages(targets)
    jobs = [_Load(name, sharded, {}, strict, call, classes) for name, sharded in models.items()]
    # What belongs to no model is the first one's to load.
    first = jobs[0]
    first.targets = targets
    with ExitStack() as until_done:
        # What is made in inference mode could never be trained: "Inplace update to inference tensor".
        until_done.enter_context(torch.inference_mode(False))

        def opened(kind: str | None, place: str) -> str:
            arguments.check_places(scheduler, scaler, call)
            optimizers = arguments.name_optimizers(models, optimizer, "fsshard.load", averages)
            for job in jobs:
                job.take_own(optimizers)
            _check_kind(kind, key, models, call)
            if kind is None:
                own_reader = Reader.of(place, channel.rank, channel.size)
                reader: Reader | ForeignReader = until_done.enter_context(own_reader)
            else:
                reader = until_done.enter_context(ForeignReader(Path(place), kind, trust_pickle=trust_pickle))
                reader.add_for(first.model, first.optimizers, key, strict=strict)
            # From here on all files are open, if there are not too many, and no save takes them away.
            reader.check_headers(channel.rank, channel.size)
            chosen = choose_models(reader.index, models, call)
            for job in jobs:
                # Over the same open files.
                job.reader = copy.copy(reader)
                job.reader.index = chosen[job.name]
            return reader.index.id

        _open_together(channel, path, opened, call)
        exchange(channel, lambda: _each(jobs, _Load.check))
        if verify:
            exchange(channel, lambda: first.reader.verify(channel.rank, channel.size), timeout)
        exchange(channel, lambda: _each(jobs, _Load.read), timeout)
        _commit(jobs, channel, rng)
    return _result(jobs)


def _check_options(call: str, key: object, objects: object) -> None:
    if key is not None and not isinstance(key, str):
        raise ConfigurationError(f"{call}: key= is an option and takes text, got {type(key).__name__}")
    if not isinstance(objects, (list, tuple)) or not all(isinstance(kind, type) for kind in objects):
        raise ConfigurationError(f"{call}: objects= is an option and takes a list of classes, got {objects!r}")


def _check_kind(kind: str | None, key: str | None, models: Collection[str], call: str) -> None:
    """Raise for what does not go with a checkpoint of ours (None), or with one of another program's kind."""
    if kind is None and key is not None:
        raise ConfigurationError(f"{call}: key= goes with another program's checkpoint; this is fsshard's")
    if kind is not None and any(models):
        raise ConfigurationError(f"{call}: another program's checkpoint ({kind}) has one model; pass it alone")


def _open_together(
    channel: Channel,
    path: str,
    opened: Callable[[str | None, str], str],
    call: str,
) -> None:
    """Open the same checkpoint on all ranks; once more where a save has replaced it before all had. Collective."""

    def choose() -> list[Any]:
        """Return the kind of another program's checkpoint, or None; the path; what tells it from the next there."""
        if is_url(path):
            return [None, path, identity_of_url(path)]
        kind = foreign(path)
        seen = identity(path)
        if kind is not None:
            return [kind, path, seen]
        if os.path.isdir(path) and not _has_our_files(path):
            advice = unknown(Path(path))
            if "; pass one of" in advice:
                raise CheckpointError(advice)
        return [kind, str(resolve(path)), seen]

    def is_replaced() -> bool:
        now = identity_of_url(path) if is_url(path) else identity(path)
        return bool(now != seen)

    # One rank chooses, so that a save in another job cannot give ranks different ones.
    choices = exchange(channel, lambda: choose() if channel.rank == 0 else [])
    kind, place, seen = choices[0]
    failure = CheckpointError(f"{call}: the ranks see different checkpoints there; do they share the file system?")
    try:
        identities = exchange(channel, lambda: opened(kind, place))
        if len(set(identities)) == 1:
            return
    except CheckpointError as error:
        # This error says whom, and no call over the channel can say so again.
        if channel.lost:
            raise
        failure = error
    replaced = exchange(channel, lambda: channel.rank == 0 and is_replaced())
    if not replaced[0]:
        raise failure
    _open_together(channel, path, opened, call)


def _has_our_files(path: str) -> bool:
    """Return whether a directory is empty, or has files that are named as ours."""
    names = os.listdir(path)
    return not names or INDEX_FILE in names or any(map(RANK_FILE.fullmatch, names))


@dataclass
class _Load:
    """One load of a model on one rank: checked, read, and only then put in place."""

    name: str  # of one of several models
    model: ShardedModule
    targets: Values  # objects to load into, by the name that they were saved under
    strict: bool
    call: str
    classes: Classes  # of objects within an optimizer's state
    reader: Reader | ForeignReader = field(default=None)  # type: ignore[assignment]
    optimizers: dict[str, ShardedOptimizer] = field(default_factory=dict)
    sources: Names = field(default_factory=dict)  # entry's name -> tensor's name
    others: Names = field(default_factory=dict)  # key of a buffer -> tensor's name
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    # what was read
    values: dict[str, Tensor] = field(default_factory=dict)
    rest: Tree = field(default_factory=dict)
    quantised: list[tuple[Tensor, SavedObject]] = field(default_factory=list)
    groups: dict[str, Groups] = field(default_factory=dict)
    states: dict[str, dict[str, _State]] = field(default_factory=dict)
    objects: Tree = field(default_factory=dict)
    per_rank: dict[str, list[Any]] = field(default_factory=dict)
    random: Any = None

    def take_own(self, optimizers: Mapping[str, ShardedOptimizer]) -> None:
        """Take the optimizers of the model."""
        for name, optimizer in optimizers.items():
            if optimizer.model is self.model:
                self.optimizers[name] = optimizer

    def check(self) -> None:
        """Raise for everything that does not fit. Local; reads headers only."""
        wrong = self._match_model()
        needed = [key for key in self.missing if not self._stays(key)]
        if wrong or (self.strict and (needed or self.unexpected)):
            which = f" {self.name!r}" if self.name else ""
            raise StateDictError(f"{self.call}: the checkpoint of the model{which}", needed, self.unexpected, wrong)
        for name, optimizer in self.optimizers.items():
            self._check_optimizer(name, optimizer)
        saved = self.reader.index.objects
        absent = [name for name in self.targets if name not in saved]
        if absent and self.strict:
            names = ", ".join(map(printable, saved)) or "none"
            raise CheckpointError(f"{self.call}: nothing was saved as {', '.join(absent)}; the checkpoint has: {names}")
        self.missing += absent
        loadless = [name for name, value in self.targets.items() if not hasattr(value, "load_state_dict")]
        if loadless:
            raise ConfigurationError(
                f"{self.call}: {', '.join(loadless)} cannot be loaded into (no load_state_dict); leave it out and find "
                "its value in the result's .state"
            )

    def _match_model(self) -> Mismatches:
        """Find the tensor of each parameter and buffer; return what is expected and got of those that do not fit."""
        backend = self.model.backend
        saved = self.reader.index.model.keys
        raw = dict(raw_state_dict(backend))
        raw.pop(NEURALOP_ARGUMENTS, None)
        expected = dict.fromkeys([*raw, *backend.keys])
        self.missing = [key for key in expected if key not in saved]
        self.unexpected = [key for key in saved if key not in expected]
        wrong: Mismatches = {}
        for key in expected:
            if key not in saved:
                continue
            tensor = saved[key]
            name = backend.keys.get(key)
            value = raw.get(key)
            is_tensor = name is not None or is_plain_tensor(value)
            if is_tensor and tensor is None:
                wrong[key] = ("a tensor", "a value that is none")
            elif not is_tensor and tensor is not None:
                wrong[key] = ("a value that is none", "a tensor")
            elif tensor is None:
                continue
            elif name is not None:
                wrong |= self._match_parameter(key, name, tensor)
            elif isinstance(value, Tensor):
                self.others[key] = tensor
                if not key.endswith(EXTRA_STATE) and not _loads_itself(backend.module, key):
                    buffers = controller_of(self.model).buffers
                    # The dtype that the user gave it, whatever precision the engine keeps it in.
                    dtype = buffers.dtypes.get(key, value.dtype)
                    wrong |= self._differs(key, tensor, dtype, tuple(value.shape))
        return wrong

    def _match_parameter(self, key: str, name: str, tensor: str) -> Mismatches:
        """Take a tensor as the source of a parameter; of one with several keys, the tensor of the first."""
        entry = self.model.backend.entries[name]
        wrong = self._differs(key, tensor, entry.dtype, tuple(entry.full_shape))
        first = self.sources.setdefault(name, tensor)
        if wrong or first == tensor or not self.strict:
            return wrong
        # Some programs save a tied weight under each of its names.
        if not self._same_numbers(first, tensor):
            wrong[key] = (f"one parameter, tied to {name}", "another tensor")
        return wrong

    def _stays(self, key: str) -> bool:
        """Return whether a weight was frozen when the checkpoint was saved without it, and is now."""
        backend = self.model.backend
        dropped = self.reader.index.model.dropped
        if dropped.get(key) != parts.FROZEN:
            return False
        if key not in backend.keys:
            ignored = backend.settings.ignored.parameters.get(key)
            return ignored is not None and not ignored.requires_grad
        entry = backend.entries[backend.keys[key]]
        return not entry.parameter.requires_grad

    def _same_numbers(self, one: str, other: str) -> bool:
        """Compare two tensors to the last bit: shared weights that somebody saved under each name."""
        reader = self.reader
        first = reader.index.tensors[one]
        second = reader.index.tensors[other]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        for chunk, other_chunk in zip(reader.chunks(one), reader.chunks(other), strict=True):
            # As bytes, since NaN is equal to nothing.
            bits = chunk.view(torch.uint8)
            other_bits = other_chunk.view(torch.uint8)
            if not torch.equal(bits, other_bits):
                return False
        return True

    def _differs(
        self,
        key: str,
        tensor: str,
        dtype: torch.dtype,
        shape: Shape,
    ) -> Mismatches:
        info = self.reader.index.tensors[tensor]
        fits = dtype == info.kind
        if not self.strict and info.kind.is_complex == dtype.is_complex:
            fits = True
        if fits and info.shape == shape:
            return {}
        expected = f"{dtype_name(dtype)} {shape}"
        got = f"{info.dtype} {tuple(info.shape)}"
        return {key: (expected, got)}

    def _check_optimizer(self, name: str, optimizer: ShardedOptimizer) -> None:
        saved = self.reader.index.optimizers.get(name)
        if saved is None:
            names = ", ".join(map(repr, self.reader.index.optimizers)) or "none"
            what = "average" if optimizer.optimizer_class is Averages else "optimizer"
            raise CheckpointError(f"{self.call}: no {what} was saved as {name!r}; the checkpoint has: {names}")
        kind = class_name(optimizer.optimizer_class)
        _, _, name_of_class = kind.rpartition(".")
        same_name = saved.kind.rpartition(".")[2] == name_of_class
        if saved.kind not in (kind, UNKNOWN_CLASS) and (self.strict or not same_name):
            offer = ", or pass strict=False if they are the same" if same_name else ""
            raise CheckpointError(
                f"{self.call}: optimizer {name!r} is a {kind}, and the state of a {saved.kind} was saved; build that "
                f"one, or leave optimizer= out to begin with a fresh one{offer}"
            )
        groups = list(map(self.reader.tree, saved.groups))
        self.groups[name] = groups
        expected = groups_by_name(optimizer)
        want = _members(expected)
        got = _members(groups)
        mismatched: Mismatches = {}
        if len(expected) != len(groups):
            mismatched["number of param_groups"] = (len(expected), len(groups))
        for group, own in zip(groups, expected, strict=False):
            for key, value in group.items():
                # Settings that are objects (DistributedShampoo's) stay the optimizer's own.
                if not holds_objects(value):
                    continue
                setting = own.get(key)
                if described(setting, key) != value:
                    mismatched[f"{key!r} of a group"] = (setting, value)
        if mismatched or want != got:
            raise StateDictError(f"{self.call}: optimizer {name!r}", want - got, got - want, mismatched)

    def read(self) -> None:
        """Read this rank's slices next to what it has. Local."""
        index = self.reader.index
        backend = self.model.backend
        for name, tensor in self.sources.items():
            entry = backend.entries[name]
            stored = self._stored(entry, tensor)
            self.values[name] = stored.to(entry.parameter.dtype)
        for key, tensor in self.others.items():
            self.rest[key] = self.reader.tensor(tensor)
        raw = raw_state_dict(backend)
        for key, tree in index.model.extra.items():
            value = self.reader.tree(tree)
            if isinstance(value, SavedObject):
                check_objects(value, raw.get(key), {}, f"{self.call}: {key}")
                self.quantised.append((raw[key], value))
            else:
                self.rest[key] = value
        for name, optimizer in self.optimizers.items():
            self._read_optimizer(name, optimizer)
        for name in index.objects:
            self._read_object(name)
        if index.rng is not None:
            trees = index.rng["per_rank"]
            # Ranks beyond the saved ones are seeded from the last one's state.
            rank = min(backend.settings.overall_rank, len(trees) - 1)
            self.random = self.reader.tree(trees[rank])

    def _read_optimizer(self, name: str, optimizer: ShardedOptimizer) -> None:
        index = self.reader.index
        trees = index.optimizers[name].state
        tensors = index.optimizer_tensors(name)
        shapes_of_states = []
        for entry in optimizer.entries:
            shapes = {}
            for key, tensor in tensors.get(entry.name, {}).items():
                shapes[key] = index.tensors[tensor].shape
            shapes_of_states.append((entry, shapes))
        single = parts.counters(shapes_of_states)
        self.states[name] = {}
        for entry in optimizer.entries:
            state = self._state(
                optimizer.inner,
                entry,
                trees.get(entry.name, {}),
                tensors.get(entry.name, {}),
                single,
            )
            self.states[name][entry.name] = state

    def _stored(self, entry: Entry, tensor: str) -> Tensor:
        """Read this rank's part of a tensor as the engine keeps it, in which complex numbers are pairs."""
        info = self.reader.index.tensors[tensor]
        saved_as_pairs = entry.kind.is_complex and not info.kind.is_complex
        order = entry.kind.order
        if entry.in_order and not order and not entry.divided_over:
            # A pair is two elements of the file, and one of the user's tensor.
            wanted = entry.here if saved_as_pairs else entry.user_range
            stored = self.reader.read(tensor, wanted)
            if stored.is_complex():
                stored = torch.view_as_real(stored)
        else:
            # This rank has elements from all over, so it reads the whole tensor.
            whole = entry.take_part(self.reader.tensor(tensor))
            if not saved_as_pairs:
                whole = entry.kind.to_stored(whole)
            elif order:
                whole = whole.permute(*order, -1)
            stored = entry.take(whole)
        return stored.reshape(entry.local().shape)

    def _state(
        self,
        optimizer: Optimizer,
        entry: Entry,
        trees: Values,
        tensors: Mapping[str, str],
        single: Collection[str],
    ) -> _State:
        """Return the whole state of one parameter on this rank, with this rank's part of what is per element."""
        backend = self.model.backend
        infos = self.reader.index.tensors
        divides = state_divides(backend, optimizer)
        if divides != "elements" and not owns_state(backend, optimizer, entry):
            return {}
        entry = state_entry(optimizer, entry)
        source = None
        if entry.name in self.sources:
            source = infos[self.sources[entry.name]]
        is_complex = entry.kind.is_complex
        state = {}
        before = state_of(optimizer, entry)
        for key, tree in trees.items():
            if key != parts.ORDERS:
                value = self.reader.tree(tree)
                check_objects(value, before.get(key), self.classes, f"{self.call}: state {key!r} of {entry.name!r}")
                state[key] = (False, value)
        for key, tensor in tensors.items():
            info = infos[tensor]
            as_parameter = info.shape == tuple(entry.full_shape) and info.kind.is_complex == is_complex
            as_pairs = is_complex and info.shape == entry.pairs_shape
            if as_pairs or (as_parameter and key not in single):
                values = self._stored(entry, tensor)
                if as_parameter and source is not None and info.dtype == source.dtype:
                    # It is cast as the parameter itself is.
                    values = values.to(entry.parameter.dtype)
                state[key] = (True, values)
            elif info.shape and (divides == "elements" or entry.divided_over):
                raise CheckpointError(
                    f"{self.call}: state {key!r} of {entry.name} has shape {tuple(info.shape)}, the parameter "
                    f"{tuple(entry.shape)}: backend {backend.name!r} cannot divide it; use 'ddp' or 'fairscale'"
                )
            else:
                state[key] = (False, self.reader.tensor(tensor))
        if divides != "elements" and parts.ORDERS in trees:
            for key, order in self.reader.tree(trees[parts.ORDERS]).items():
                part, value = state[key]
                state[key] = part, parts.lying(entry, value, order)
        return state

    def _read_object(self, name: str) -> None:
        saved = self.reader.index.objects[name]
        settings = self.model.backend.settings
        read = self.reader.tree
        if "all" in saved:
            self.objects[name] = read(saved["all"])
            return
        trees = saved["per_rank"]
        if len(trees) == settings.all_ranks:
            own = trees[settings.overall_rank]
            self.objects[name] = read(own)
        elif isinstance(self.targets.get(name), DataPosition):
            # Samples are divided anew, by what all ranks had seen.
            self.objects[name] = list(map(read, trees))
        elif name in self.targets:
            raise CheckpointError(
                f"{self.call}: {name!r} differed between the {len(trees)} ranks that saved it, and there are "
                f"{settings.all_ranks} now; leave it out, and set it from the result's .per_rank[{name!r}]"
            )
        else:
            self.per_rank[name] = list(map(read, trees))

    @torch.no_grad()
    def commit_memory(self) -> None:
        """Put in place what nothing can refuse. Local."""
        for name, values in self.values.items():
            self.model.backend.entries[name].local().copy_(values)
        for tensor, saved in self.quantised:
            fill_tensor(tensor, saved)
        controller_of(self.model).note_filled({*self.values, *self.others})
        for name, optimizer in self.optimizers.items():
            self._commit_optimizer(name, optimizer)

    def commit_refusable(
        self,
        undo: Undo,
        rng: bool,
    ) -> None:
        """Run the code of others, which may raise; how to undo it is noted before each. Local."""

        def load(
            what: str,
            load_state_dict: Callable[[Any], Any],
            state: Any,
        ) -> None:
            try:
                load_state_dict(state)
            except Exception as error:
                raise CheckpointError(f"{self.call}: {what}: {type(error).__name__}: {error}") from error

        def load_rest(rest: Values) -> None:  # buffers and extra state, through the model's own method
            with self.model.backend.bare() as module:
                module.load_state_dict(rest, strict=False)

        for name, value in self.targets.items():
            if name not in self.objects:
                continue
            if hasattr(value, "state_dict"):
                before = copy.deepcopy(value.state_dict())
                restore = functools.partial(value.load_state_dict, before)
                undo.append((name, restore))
            what = f"{name} ({type(value).__name__}) refuses its state"
            load(what, value.load_state_dict, self.objects[name])
        if self.rest:
            raw = raw_state_dict(self.model.backend)
            before = {}
            for key in self.rest:
                if key in raw:
                    before[key] = copy.deepcopy(raw[key])
            undo.append(("the model", functools.partial(load_rest, before)))
            load("the model refuses its buffers or extra state", load_rest, self.rest)
        if rng and self.random is not None:
            device = self.model.backend.settings.device
            before = generators.capture(device)
            undo.append(("a generator", functools.partial(generators.restore, before, device)))
            self._commit_random(device)

    def _commit_random(self, device: torch.device) -> None:
        saved = self.reader.index.rng
        rank = self.model.backend.settings.overall_rank
        if saved is None or rank >= len(saved["per_rank"]):
            generators.derive(self.random, rank, device)
            return
        for generator in generators.restore(self.random, device):
            log.warning("%s: not restored on rank %d: %s", self.call, rank, generator)

    def _commit_optimizer(self, name: str, optimizer: ShardedOptimizer) -> None:
        for group, saved in zip(optimizer.param_groups, self.groups[name], strict=True):
            for key, value in saved.items():
                if key != "params" and not holds_objects(value):
                    group[key] = value
        for entry in optimizer.entries:
            before = state_of(optimizer.inner, entry)
            device = state_device(optimizer.inner, entry)
            state = {}
            new_state = self.states[name][entry.name]
            for key, (is_part, value) in new_state.items():
                if is_part:
                    state[key] = value.to(device)
                else:
                    state[key] = optimizer.placed(entry, value, before.get(key))
            set_state(self.model.backend, optimizer.inner, entry, state, self.classes)


def _loads_itself(module: nn.Module, key: str) -> bool:
    """Return whether a module around this buffer has a loading of its own, which may give buffers another shape.

    Observers of quantization-aware training do: theirs have a shape after the first forward only.
    """
    names = key.split(".")[:-1]
    for length in range(1, len(names) + 1):
        path = ".".join(names[:length])
        cls = type(module.get_submodule(path))
        # torch's own layers (BatchNorm) override it for older versions of their format.
        if cls.__module__.startswith("torch.nn."):
            continue
        if cls._load_from_state_dict is not nn.Module._load_from_state_dict:
            return True
    return False


def _members(groups: Sequence[Values]) -> set[str]:
    """Return which parameter is in which group, as text."""
    members = set()
    for index, group in enumerate(groups):
        for name in group["params"]:
            members.add(f"{name} in group {index}")
    return members


def _each(jobs: Sequence[_Load], work: Callable[[_Load], None]) -> None:
    for job in jobs:
        work(job)


def _commit(jobs: Sequence[_Load], channel: Channel, rng: bool) -> None:
    """Put in place first what can refuse: objects, the models' own code, generators; then memory. Collective."""
    undo: Undo = []
    for job in jobs:
        # What a forward has left whole would hide the new values from the next one.
        job.model.backend.reshard()
    first = jobs[0]
    try:
        exchange(channel, lambda: _each(jobs, lambda job: job.commit_refusable(undo, rng)))
    except BaseException:
        for what, restore in reversed(undo):
            try:
                restore()
            except Exception as error:
                # The others must get theirs back all the same.
                log.warning("%s: %s does not accept the state that it had before: %s", first.call, what, error)
        raise
    _each(jobs, _Load.commit_memory)


def _result(jobs: Sequence[_Load]) -> Loaded:
    """Return what the caller gets."""
    first = jobs[0]
    state = {}
    for name, value in first.objects.items():
        if name not in first.targets:
            state[name] = value
    missing = []
    unexpected = []
    for job in jobs:
        for key in job.missing:
            # Names of objects, which are the first model's to load, get its prefix nowhere else.
            if key not in first.targets:
                key = prefix(job.name) + key
            missing.append(key)
        for key in job.unexpected:
            unexpected.append(prefix(job.name) + key)
    return Loaded(
        path=first.reader.path,
        state=state,
        per_rank=first.per_rank,
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        origin=first.reader.index.origin.described(),
    )
