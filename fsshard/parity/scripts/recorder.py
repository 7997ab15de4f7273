"""Records a training that knows nothing of it, through torch's global hooks.

The outermost modules that are trained, and the outermost optimizers' steps: see :class:`Recorder`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsshard.errors import ConfigurationError
from fsshard.nested import is_array, leaves
from fsshard.parity.one_process import cuda_states, perturbed
from fsshard.parity.scripts import facts, store
from fsshard.parity.scripts.store import Model, Record, Samples, in_model
from fsshard.parity.sketch import Sketch, digest, real_view, sketch, sketch_digest
from fsshard.parity.trace import INITIAL, commit_in, environment
from fsshard.parity.whole import Whole, prefix_of, steps_itself, whole_state, whole_tensors
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer
from fsshard.torch_private.compiling import disable_dynamo
from fsshard.torch_private.modules import COMPILED
from fsshard.torch_private.patching import replaced


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a record: which steps, and how much of each."""

    every: int = 1  # weights are, at every so many steps
    first: int = 0  # the first step
    last: int | None = None  # the one after the last; None for all
    tensors: int = 0  # weights are kept whole at every so many steps; 0 for never
    state: bool = False  # optimizer state is, with the weights
    draw: int = 0  # a number seeds a run whose results are rounded otherwise, at random

    def __post_init__(self) -> None:
        if self.every < 1 or self.tensors < 0:
            raise ConfigurationError(f"expected every >= 1 and tensors >= 0, got {self.every} and {self.tensors}")


def _shielded(hook: Callable[..., None]) -> Callable[..., None]:
    """Decorate a hook of :class:`Recorder`: what fails in it ends the record, never the training."""

    @functools.wraps(hook)
    def shielded(recorder: Recorder, *arguments: Any, **keywords: Any) -> None:
        # A hook must not become a part of a graph; a recorder without process is stopped, or that of a fork's parent.
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or recorder.process != os.getpid():
            return
        try:
            hook(recorder, *arguments, **keywords)
        except Exception as error:
            recorder.end(f"{type(error).__name__}: {error}")

    return shielded


class Recorder:
    """Hooks of one process, between :meth:`start` and :meth:`stop`, which write a file per rank into ``folder``."""

    def __init__(self, folder: str | Path, settings: Settings) -> None:
        self._folder, self._settings = Path(folder).absolute(), settings
        self._models: list[nn.Module] = []  # that are trained, in the order of their first forwards
        self._called: list[weakref.ref[nn.Module]] = []  # that may be: a script may only count their FLOPs
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that are, or are in, one of both
        self._entrances: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that the script itself has called first
        self.process = 0  # that records; 0 before start() and after stop()
        self._depth = self._backwards = 0
        self._simulated = False  # the forward that is running computes no numbers
        # Optimizers, with the frames of their steps: one may step another, as FairScale's OSS does, or itself.
        self._stepping: list[tuple[Any, Any]] = []
        self._steps = 0  # of optimizers so far
        self._new: list[Model] = []  # since the last record
        # Losses and samples, each with the module that was called last: if that is gone, it was only tried.
        self._losses: list[tuple[Tensor, weakref.ref[nn.Module]]] = []
        self._modes: dict[int, str] = {}  # by the id of a module that was called, since the last record
        self._outputs: dict[int, str] = {}  # dtypes, of the same
        self._states: dict[str, str] = {}  # by parameter: whether the optimizer had a state before its step
        self._samples: list[tuple[Samples, weakref.ref[nn.Module]]] = []
        self._entered: weakref.ref[nn.Module] = weakref.ref(nn.Module())  # which is gone
        self._last_record: Record | None = None
        self._written: Record | None = None  # the last one
        self._facts_before: facts.Facts = {}  # of the one that was written before it
        self._file: Path | None = None  # a script may call a model before it joins a process group
        self._stack, self._rounding = contextlib.ExitStack(), contextlib.ExitStack()
        self._draws = torch.Generator().manual_seed(settings.draw) if settings.draw else None

    def start(self) -> None:
        """Install the hooks."""
        self.process = os.getpid()
        # torch.compile: the hooks of what it compiles are called beside those of its own module, which counts here.
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
        for handle in (
            register_module_forward_pre_hook(self.forward_begins),
            register_module_forward_hook(self._forward_ended, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ended),
        ):
            self._stack.callback(handle.remove)
        self._stack.enter_context(replaced(torch.autograd, "backward", self._backward(torch.autograd.backward)))
        self._stack.enter_context(replaced(torch.amp.GradScaler, "step", self._outer(torch.amp.GradScaler.step)))

    def stop(self) -> None:
        """Remove the hooks."""
        self.process = 0
        self._round(False)
        self._stack.close()

    def end(self, reason: str) -> None:
        """Record no more, and say so: a comparison must not take what is missing for equal."""
        self._round(False)
        self.process = 0  # the hooks stay until stop(): torch may be running through them
        store.note_end(self._folder, reason)
        print(f"fsshard: the record ends here, the training goes on: {reason}", file=sys.stderr)

    # -------------------------------------------------------------------------------------------------------- forward

    @_shielded
    def forward_begins(self, module: nn.Module, arguments: Any) -> None:
        """Note a model that is new."""
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled():
            # A module below a known one is called alone where an activation is recomputed.
            known = module in self._known
            self._simulated = facts.simulated(arguments) or (not known and facts.is_simulated(module))
            if self._simulated:
                return
            if not known and any(parameter.requires_grad for parameter in module.parameters()):
                self._add(module)
            self._round(module in self._known)
            if module in self._known:
                self._entered = weakref.ref(module)

    def _add(self, module: nn.Module) -> None:
        self._entrances.add(module)
        module = facts.outermost(module)
        if any(module is one for one in self._models):
            return
        inner = {id(module), *map(id, module.modules())}  # ShardedModule.modules() are the user's alone
        self._called = [one for one in self._called if id(one()) not in inner]
        self._called.append(weakref.ref(module))
        self._known.update([module, *module.modules()])
        if facts.running_step() is not None:  # a closure's forward, and the step changes weights after it
            self._take_on(None, at_once=True)
        if steps_itself(module):
            kind: Any = type(module)
            self._stack.enter_context(replaced(kind, "step", self._outer(kind.step)))

    @_shielded
    def _forward_ended(self, module: nn.Module, arguments: Any, *others: Any) -> None:
        if self._depth == 0:  # it was called before recording began: with the first forward that is differentiated
            return
        self._depth -= 1
        # Keywords and output; of a forward that has raised torch 2.13 hands no keywords over, and None.
        *keywords, output = others
        if self._simulated or self._backwards or not torch.is_grad_enabled() or not keywords:
            return
        self._modes[id(module)] = facts.mode_of(module)
        self._outputs[id(module)] = facts.dtype_of(output)
        if self._depth == 0 and module in self._entrances:
            samples = samples_of([arguments, keywords], _computed(module, output))
            self._samples.append((samples, weakref.ref(module)))

    def _take_on(self, optimizer: Any, *, at_once: bool = False) -> None:
        """Record what is trained from here on, with the weights before the first step. Collective.

        ``at_once`` takes on all models that were called, whether or not they have gradients yet.
        """
        groups = getattr(optimizer, "param_groups", ())
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        waiting, self._called = self._called, []
        for reference in waiting:
            model = reference()
            if model is None:
                continue
            # A model that was only called, as to materialise lazy layers, may be trained later.
            by_engine = isinstance(model, ShardedModule) or steps_itself(model)
            if at_once or by_engine or any(one.grad is not None or id(one) in stepped for one in model.parameters()):
                self._take_on_model(model)
            else:
                self._called.append(reference)
        known = {id(parameter) for model in self._models for parameter in model.parameters()}
        by_engine = isinstance(optimizer, ShardedOptimizer) or any(map(steps_itself, self._models))
        if self._models and not at_once and not by_engine and not stepped <= known:
            self._take_on_model(facts.OnlyInOptimizer(optimizer, known))

    def _take_on_model(self, module: nn.Module) -> None:
        inner = {id(module), *map(id, module.modules())}
        self._models = [one for one in self._models if id(one) not in inner]
        self._models.append(module)
        engine = dict(module.named_children()).get(COMPILED, module)  # what torch.compile has compiled
        layers = Counter(repr(one) for one in module.modules() if next(one.children(), None) is None)
        sketches = self._sketches(len(self._models) - 1, INITIAL)
        weights = {name: one for quantity, name, one in sketches if quantity == "weight"}
        self._new.append(Model(engine=type(engine).__name__, layers=dict(layers), weights=weights))

    # ------------------------------------------------------------------------------------------------------- backward

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``torch.autograd.backward``, which ``Tensor.backward`` calls, that notes losses."""

        def backward(tensors: Any, *arguments: Any, **keywords: Any) -> Any:
            if not self._backwards and self.process:  # one within another one is that of a recomputed block
                given = [tensors] if isinstance(tensors, Tensor) else [*tensors]
                losses = [one for one in given if one.numel() == 1 and not facts.simulated(one)]
                self._losses += [(one.detach().clone(), self._entered) for one in losses]
            self._backwards += 1
            try:
                return original(tensors, *arguments, **keywords)
            finally:
                self._backwards -= 1
                if not self._backwards:
                    self._round(False)

        return backward

    def _round(self, on: bool) -> None:
        """Round otherwise from here on, or no more, if this run is a draw: within forward, loss and backward."""
        self._rounding.close()
        if on and self._draws is not None:
            self._rounding.enter_context(perturbed(self._draws))

    # ----------------------------------------------------------------------------------------------------------- step

    # Out of torch.compile(optimizer.step), which has a break of its graph in torch itself too.
    @disable_dynamo
    @_shielded
    def _step_begins(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        frame = facts.running_step()
        place = next((k for k, (one, _) in enumerate(self._stepping) if one is optimizer), None)
        # A step may call itself, as that of a subclass does; else the last one has raised.
        if place is not None and not facts.is_below(self._stepping[place][1], frame):
            del self._stepping[place:]
        if not self._stepping:
            self._take_on(optimizer)
        state = getattr(optimizer, "state", {})
        names = {id(parameter): name for name, parameter in facts.names_of(self._models)}
        for parameter in [one for group in optimizer.param_groups for one in group["params"]]:
            if name := names.get(id(parameter)):
                self._states[name] = self._states.get(name) or ("there" if state.get(parameter) else "")
        self._stepping.append((optimizer, frame))

    @disable_dynamo
    @_shielded
    def _step_ended(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        if any(one is optimizer for one, _ in self._stepping):
            # The innermost. Not there: the first forward, with which recording began, was in this step: a closure.
            del self._stepping[max(k for k, (one, _) in enumerate(self._stepping) if one is optimizer) :]
        self._steps += 1
        if not self._stepping:
            self._record(optimizer, facts.groups_of(optimizer))

    def _outer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``step`` of GradScaler or of DeepSpeed's engine, so that one record is written after it."""

        def step(outer: Any, *arguments: Any, **keywords: Any) -> Any:
            ends_step = getattr(outer, "is_gradient_accumulation_boundary", None)
            if ends_step is None:  # GradScaler, which may leave out the step of what it is given
                (optimizer, *_) = [*arguments, *keywords.values()]
            elif ends_step():  # DeepSpeed's engine, whose optimizer steps before the weights are gathered
                optimizer = outer.optimizer
            else:
                return original(outer, *arguments, **keywords)
            groups, steps, depth = facts.groups_of(optimizer), self._steps, len(self._stepping)  # a scheduler steps too
            if not depth:
                self._before_outer(optimizer)
            self._stepping.append((outer, None))
            try:
                found = original(outer, *arguments, **keywords)
            finally:
                del self._stepping[depth:]
            if not depth:
                self._record(optimizer, groups, skipped=self._steps == steps, scaler=outer)
            return found

        return step

    @_shielded
    def _before_outer(self, optimizer: Any) -> None:
        self._take_on(optimizer)

    @_shielded
    def _record(
        self, optimizer: Any, groups: list[dict[str, Any]], *, skipped: bool = False, scaler: Any = None
    ) -> None:
        """Write a step, or what a further optimizer has added to it."""
        self._round(False)
        self._take_on(optimizer)  # what only a closure has made known
        record, settings = self._last_record, self._settings
        if not self._models:
            return
        if not (record is not None and not self._samples and not self._losses):
            # What backward was called on is scaled, if a scaler makes the step; its scale is a power of two.
            scale = scaler.get_scale() if isinstance(scaler, torch.amp.GradScaler) else 1.0
            kept = [loss for loss, module in self._losses if module() is not None]
            losses = [float(_asked(loss, "full_tensor").real) / scale for loss in kept]
            samples = [one for one, module in self._samples if module() is not None]
            number = 0 if record is None else record.step + 1
            record = Record(step=number, losses=losses, samples=samples, groups=[], skipped=False)
            self._losses, self._samples, self._last_record = [], [], record
        self._note_facts(record, optimizer)
        record.groups, record.skipped = record.groups + groups, record.skipped or skipped
        if record.step < settings.first or (settings.last is not None and record.step >= settings.last):
            return
        # torch's alone: what others draw is in the samples, and a script that never seeds them has others in each run
        record.random = digest([torch.get_rng_state(), *cuda_states()])
        if record.step % settings.every == 0 or (settings.tensors and record.step % settings.tensors == 0):
            record.gradients = dict(self._gradients())
            record.sketches = {"weight": {}, "buffer": {}, "state": record.sketches.get("state", {})}
            for place in range(len(self._models)):
                for quantity, name, one in self._sketches(place, record.step, optimizer):
                    record.sketches[quantity][in_model(place, name)] = one
            if (
                record.step and record.step & (record.step - 1) == 0
            ):  # looking through all objects costs some ten milliseconds
                copies = [*facts.copies_of(self._models)]
                record.sketches["buffer"] |= {name: sketch(value) for name, value in copies}
        self._write(record)

    def _note_facts(self, record: Record, optimizer: Any) -> None:
        """Note of each parameter and module what it is in this step, whatever its numbers are."""
        parameters = dict(facts.names_of(self._models))
        names = {id(parameter): name for name, parameter in parameters.items()}
        found = record.facts
        members = found.setdefault("member", {})
        for number, group in enumerate(facts.members_of(optimizer, names), len(record.groups)):
            members |= dict.fromkeys(group, str(number))
        found["trained"] = dict(facts.trained_of(self._models))
        found["state"] = self._states | found.get("state", {})
        made = found.setdefault("count", {"optimizer steps": "0"})
        made["optimizer steps"] = str(int(made["optimizer steps"]) + 1)
        modes, outputs = found.setdefault("mode", {}), found.setdefault("output", {})
        modules = dict(facts.modules_of(self._models))
        for path, module in modules.items():
            if id(module) in self._modes:
                modes[path], outputs[path] = self._modes[id(module)], self._outputs[id(module)]
            else:  # it was not called, or within what torch.compile has compiled
                modes.setdefault(path, facts.mode_of(module))
        if record.step % self._settings.every == 0:
            found["layer"] = facts.layers_of(modules)
        self._modes, self._outputs, self._states = {}, {}, {}

    def _gradients(self) -> Iterator[tuple[str, tuple[float, int]]]:
        """Yield squared norms of what this rank has of gradients: in float32, which is cheap and enough for a hint."""
        for name, parameter in facts.names_of(self._models):
            if (gradient := parameter.grad) is not None:
                local = _asked(gradient.detach(), "to_local")
                numbers = local.coalesce().values() if local.is_sparse else local
                norm = float(torch.linalg.vector_norm(numbers))
                yield name, (norm * norm, local.numel())

    def _sketches(self, place: int, step: int, optimizer: Any = None) -> Iterator[tuple[str, str, Sketch]]:
        """Yield quantity, name and sketch; keep the tensors where that is asked for. Collective."""
        # Of copies that all ranks have gathered one rank makes the sketch, of replicas each rank its digest at least.
        (rank, size), model = _rank(), self._models[place]
        prefix, every = prefix_of(model), self._settings.tensors
        states = whole_state(model, optimizer, prefix) if self._settings.state and optimizer is not None else ()
        of_state = (  # which keeps no tensor itself
            Whole(f"{name}: {key}", state.pop(key), None, "state")
            for name, state in states
            for key in [key for key, value in state.items() if isinstance(value, Tensor)]
        )
        for number, whole in enumerate(itertools.chain(whole_tensors(model, prefix), of_state)):
            holders = whole.ranks or range(size)
            mine = holders[number % len(holders)] == rank
            if mine or whole.quantity != "weight":  # replicas' buffers may differ, and FairScale's state is its owner's
                yield whole.quantity, whole.name, sketch(whole.value)
            elif whole.ranks is None:
                yield whole.quantity, whole.name, store.digest_alone(sketch_digest(whole.value))
            if mine and whole.quantity != "state" and every and step % every == 0:
                store.write_tensor(store.tensor_file(self._folder, step, in_model(place, whole.name)), whole.value)
            del whole.value  # before the next one is gathered

    def _write(self, record: Record) -> None:
        if self._file is None:
            (rank, size), script = _rank(), Path(sys.argv[0]).resolve()
            device = next((p.device.type for p in self._models[0].parameters()), "cpu")
            told: dict[str, Any] = {
                "command": sys.argv,
                "device": device,
                "commit": commit_in(script.parent) if rank == 0 else "",
            }
            header = store.Header(rank=rank, world_size=size, environment=environment(device), **told)
            self._file = self._folder / f"rank{rank}.jsonl"
            try:
                store.append(self._file, header)
            except FileExistsError:
                return self.end(f"another process has trained as rank {rank}, and one record is of one training")
        record.models, self._new = record.models + self._new, []
        if self._written is not record:
            # Of what does not change a line is written once.
            self._facts_before, self._written = self._written.facts if self._written else {}, record
        changed = {kind: one for kind, one in record.facts.items() if one != self._facts_before.get(kind)}
        store.append(self._file, replace(record, facts=changed))


def _rank() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _computed(module: nn.Module, output: Any) -> str:
    tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "nothing"
    device = tensors[0].device.type if tensors else "cpu"
    autocast = f", autocast to {torch.get_autocast_dtype(device)}" if torch.is_autocast_enabled(device) else ""
    return f"{dtype}{autocast}{'' if module.training else ', in evaluation mode'}"


def _asked(value: Any, method: str) -> Any:
    """Return what a DTensor's method gives, or any other value itself."""
    return getattr(value, method)() if hasattr(value, method) else value


def samples_of(given: Any, computed: str = "") -> Samples:
    """Return digests of a forward's arguments: of all, and of the samples that lie along dim 0 of all tensors."""
    arrays = [array for leaf in leaves(given) if is_array(leaf) for array in _arrays(leaf)]
    sizes = {array.shape[0] for array in arrays}
    rows = sizes.pop() if len(sizes) == 1 and all(array.numel() for array in arrays) else 0
    parts = [array.contiguous().reshape(rows, -1).view(torch.uint8).numpy() for array in arrays] if rows else []
    found = [hashlib.blake2b(row, digest_size=16).digest() for row in (np.concatenate(parts, 1) if rows else ())]
    total = sum(int.from_bytes(row, "little") for row in found) % 2**128
    kinds = [(str(array.dtype), tuple(array.shape)) for array in arrays]
    everything = digest([kinds, b"".join(found)] if rows else arrays)
    arguments: dict[str, str] = {}
    positional, keywords = given
    for number, argument in enumerate([*positional, *keywords]):
        # What a batch holds by name counts as if it were handed over so.
        for name, value in argument.items() if isinstance(argument, Mapping) else [(str(number), argument)]:
            if tensors := [array for leaf in leaves(value) if is_array(leaf) for array in _arrays(leaf)]:
                arguments[str(name)] = digest(tensors)[:16]
    return Samples(digest=everything, rows=rows, total=f"{total:032x}", arguments=arguments, computed=computed)


def _arrays(leaf: Any) -> list[Tensor]:
    """Return an argument as real, dense tensors on the CPU; none for an array of texts or objects."""
    if isinstance(leaf, Tensor):
        value = _asked(leaf, "to_local").detach()
        if value.is_nested:
            return [array for part in value.unbind() for array in _arrays(part)]
        if value.layout is not torch.strided:
            value = value.to_sparse().coalesce()
            return [value.indices().cpu(), *_arrays(value.values())]
        return [real_view(value).resolve_neg().cpu()]
    return [real_view(torch.as_tensor(leaf))] if leaf.dtype.kind in "biufc" else []


# --------------------------------------------------------------------------------------------------- for one's own code


@contextlib.contextmanager
def trace(
    folder: str | Path, *, every: int = 1, steps: slice | range | None = None, tensors: int = 0, state: bool = False
) -> Iterator[Path]:
    """Record every optimizer step that is made within, as ``fsshard trace`` records a script.

    Enter it on all ranks, before the first forward. The models that are called and trained within are recorded by
    torch's hooks, whatever engine they are under.

    Args:
        folder: a new folder, the same for all ranks; ``fsshard compare`` reads it.
        every: weights are recorded at every so many steps; losses, samples and learning rates at each.
        steps: those that are recorded, such as ``range(0, 50)``; None for all.
        tensors: whole weights are kept at every so many steps; 0 for never.
        state: the optimizers' state is recorded with the weights, and compared.

    Raises:
        ConfigurationError: ``folder`` holds a record already, or ``every`` is not positive.
    """
    first, last = (0, None) if steps is None else (steps.start or 0, steps.stop)
    recorder = Recorder(folder, Settings(every=every, first=first, last=last, tensors=tensors, state=state))
    check_new(Path(folder), _rank()[0])
    recorder.start()
    try:
        yield Path(folder)
    finally:
        recorder.stop()


def check_new(folder: Path, rank: int | None = None) -> None:
    """Raise if a rank, or any rank, has left a record in the folder."""
    names = [f"rank{rank}.jsonl"] if rank is not None else ["rank*.jsonl", store.ENDED]
    if any(next(folder.glob(name), None) for name in names):
        raise ConfigurationError(f"{str(folder)!r} holds a record already; remove it, or name another folder")
