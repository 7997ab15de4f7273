"""Records a training that knows nothing of it, through torch's global hooks.

The outermost modules that are trained, and the outermost optimizers' steps: see :class:`Recorder`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsshard.errors import ConfigurationError
from fsshard.parity.one_process import cuda_states, perturbed
from fsshard.parity.scripts import facts, store
from fsshard.parity.scripts.copies import copies_of
from fsshard.parity.scripts.samples import asked, computed_by, samples_of
from fsshard.parity.scripts.store import Model, Record, Samples, in_model
from fsshard.parity.sketch import Sketch, digest, sketch, sketch_digest
from fsshard.parity.trace import INITIAL, Texts, Values, commit_in, environment
from fsshard.parity.whole import Whole, prefix_of, steps_itself, whole_state, whole_tensors
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer
from fsshard.torch_private.compiling import disable_dynamo
from fsshard.torch_private.modules import COMPILED
from fsshard.torch_private.patching import replaced

Reference = weakref.ref[nn.Module]
Function = Callable[..., Any]
# Something of each module by its id.
Noted = dict[int, str]


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
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            # A hook must not become a part of a graph.
            return
        if recorder.process != os.getpid():
            # The recorder is stopped, or is that of a fork's parent.
            return
        try:
            hook(recorder, *arguments, **keywords)
        except Exception as error:
            recorder.end(f"{type(error).__name__}: {error}")

    return shielded


@dataclass
class Notes:
    """What hooks have noted since the last record.

    Losses and samples are noted with the module that was called last: if that is gone, it was only tried.
    """

    losses: list[tuple[Tensor, Reference]] = field(default_factory=list)
    samples: list[tuple[Samples, Reference]] = field(default_factory=list)
    modes: Noted = field(default_factory=dict)  # of modules that were called
    outputs: Noted = field(default_factory=dict)  # dtypes, of the same
    states: Texts = field(default_factory=dict)  # by parameter: whether there was one before the step


class Recorder:
    """Hooks of one process, between :meth:`start` and :meth:`stop`, which write a file per rank into ``folder``."""

    def __init__(self, folder: str | Path, settings: Settings) -> None:
        self._folder = Path(folder).absolute()
        self._settings = settings
        self.process = 0  # that records; 0 before start() and after stop()
        self._models: list[nn.Module] = []  # that are trained, in the order of their first forwards
        self._called: list[Reference] = []  # that may be: a script may only count their FLOPs
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that are, or are in, one of both
        self._entrances: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that the script itself has called first
        self._entered: Reference = weakref.ref(nn.Module())  # the one called last; so far one that is gone
        self._forwards = 0  # that are running, one within the other
        self._backwards = 0  # the same
        self._simulated = False  # the forward that is running computes no numbers
        # Optimizers, with the frames of their steps: one may step another, as FairScale's OSS does, or itself.
        self._stepping: list[tuple[Any, Any]] = []
        self._steps = 0  # of optimizers so far
        self._notes = Notes()
        self._new: list[Model] = []  # since the last record
        self._last_record: Record | None = None
        self._written: Record | None = None  # the last one
        self._facts_before: facts.Facts = {}  # of the one that was written before it
        self._copies: dict[str, Sketch] | None = None  # of the weights, in the last record; None: not looked for
        self._file: Path | None = None  # a script may call a model before it joins a process group
        self._stack = contextlib.ExitStack()
        self._rounding = contextlib.ExitStack()
        self._draws: torch.Generator | None = None
        if settings.draw:
            self._draws = torch.Generator().manual_seed(settings.draw)

    def start(self) -> None:
        """Install the hooks."""
        self.process = os.getpid()
        # torch.compile: the hooks of what it compiles are called beside those of its own module, which counts here.
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
        handles = [
            register_module_forward_pre_hook(self.forward_begins),
            register_module_forward_hook(self._forward_ended, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ended),
        ]
        for handle in handles:
            self._stack.callback(handle.remove)
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(torch.amp.GradScaler, "step", self._outer)

    def _replace(self, owner: Any, name: str, wrap: Callable[[Function], Function]) -> None:
        """Wrap a function of torch's until :meth:`stop`."""
        wrapped = wrap(getattr(owner, name))
        self._stack.enter_context(replaced(owner, name, wrapped))

    def stop(self) -> None:
        """Remove the hooks."""
        self.process = 0
        self._round(False)
        self._stack.close()

    def end(self, reason: str) -> None:
        """Record no more, and say so: a comparison must not take what is missing for equal."""
        self._round(False)
        # The hooks stay until stop(), since torch may be running through them.
        self.process = 0
        store.note_end(self._folder, reason)
        print(f"fsshard: the record ends here, the training goes on: {reason}", file=sys.stderr)

    # -------------------------------------------------------------------------------------------------------- forward

    @_shielded
    def forward_begins(self, module: nn.Module, arguments: Any) -> None:
        """Note a model that is new."""
        self._forwards += 1
        if self._forwards > 1 or not torch.is_grad_enabled():
            return
        # A module below a known one is called alone where an activation is recomputed.
        known = module in self._known
        self._simulated = facts.simulated(arguments)
        if not known and not self._simulated:
            self._simulated = facts.is_simulated(module)
        if self._simulated:
            return
        if not known and any(parameter.requires_grad for parameter in module.parameters()):
            self._add(module)
            known = module in self._known
        self._round(known)
        if known:
            self._entered = weakref.ref(module)

    def _add(self, module: nn.Module) -> None:
        self._entrances.add(module)
        module = facts.outermost(module)
        if any(module is one for one in self._models):
            return
        # ShardedModule.modules() yields the user's modules alone, and not itself.
        modules = [module, *module.modules()]
        inner = {*map(id, modules)}
        self._called = [one for one in self._called if id(one()) not in inner]
        self._called.append(weakref.ref(module))
        self._known.update(modules)
        # This is a closure's forward, and the step changes weights after it.
        if facts.running_step() is not None:
            self._take_on(None, at_once=True)
        if steps_itself(module):
            self._replace(type(module), "step", self._outer)

    @_shielded
    def _forward_ended(self, module: nn.Module, arguments: Any, *others: Any) -> None:
        if self._forwards == 0:
            # It was called before recording began, which is with the first forward that is differentiated.
            return
        self._forwards -= 1
        # Keywords and output; of a forward that has raised torch 2.13 hands no keywords over, and None.
        if len(others) < 2 or self._simulated or self._backwards or not torch.is_grad_enabled():
            return
        keywords, output = others
        self._notes.modes[id(module)] = facts.mode_of(module)
        self._notes.outputs[id(module)] = facts.dtype_of(output)
        if self._forwards == 0 and module in self._entrances:
            samples = samples_of(arguments, keywords, computed_by(module, output))
            self._notes.samples.append((samples, weakref.ref(module)))

    def _take_on(self, optimizer: Any, *, at_once: bool = False) -> None:
        """Record what is trained from here on, with the weights before the first step. Collective.

        ``at_once`` takes on all models that were called, whether or not they have gradients yet.
        """
        stepped = set(map(id, facts.parameters_of(optimizer)))
        waiting = self._called
        self._called = []
        for reference in waiting:
            model = reference()
            if model is None:
                continue
            if at_once or _is_trained(model, stepped):
                self._take_on_model(model)
            else:
                # It was only called, as to materialise lazy layers, and may be trained later.
                self._called.append(reference)
        if not self._models or at_once:
            return
        # Engines have the parameters of their optimizers in another place than the model.
        if isinstance(optimizer, ShardedOptimizer) or any(map(steps_itself, self._models)):
            return
        known: set[int] = set()
        for model in self._models:
            known.update(map(id, model.parameters()))
        if not stepped <= known:
            self._take_on_model(facts.OnlyInOptimizer(optimizer, known))

    def _take_on_model(self, module: nn.Module) -> None:
        inner = {id(module), *map(id, module.modules())}
        self._models = [one for one in self._models if id(one) not in inner]
        self._models.append(module)
        # What torch.compile has compiled is a child of its module.
        engine = dict(module.named_children()).get(COMPILED, module)
        weights = {}
        place = len(self._models) - 1
        for quantity, name, sketched in self._sketches(place, INITIAL):
            if quantity == "weight":
                weights[name] = sketched
        model = Model(engine=type(engine).__name__, weights=weights)
        self._new.append(model)

    # ------------------------------------------------------------------------------------------------------- backward

    def _backward(self, original: Function) -> Function:
        """Return ``torch.autograd.backward``, which ``Tensor.backward`` calls, that notes losses."""

        def backward(tensors: Any, *arguments: Any, **keywords: Any) -> Any:
            # A backward within another one is that of a recomputed block.
            if not self._backwards and self.process:
                self._note_losses([tensors] if isinstance(tensors, Tensor) else tensors)
            self._backwards += 1
            try:
                return original(tensors, *arguments, **keywords)
            finally:
                self._backwards -= 1
                if not self._backwards:
                    self._round(False)

        return backward

    def _note_losses(self, tensors: Iterable[Tensor]) -> None:
        for loss in tensors:
            if loss.numel() == 1 and not facts.simulated(loss):
                self._notes.losses.append((loss.detach().clone(), self._entered))

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
        # A step may call itself, as that of a subclass does; else the last one has raised.
        for place, (one, its_frame) in enumerate(self._stepping):
            if one is optimizer:
                if not facts.is_below(its_frame, frame):
                    del self._stepping[place:]
                break
        if not self._stepping:
            self._take_on(optimizer)
        self._note_states(optimizer)
        self._stepping.append((optimizer, frame))

    def _note_states(self, optimizer: Any) -> None:
        states = getattr(optimizer, "state", {})
        names = facts.names_by_id(self._models)
        noted = self._notes.states
        for parameter in facts.parameters_of(optimizer):
            name = names.get(id(parameter))
            if name is None or noted.get(name):
                continue
            noted[name] = "there" if states.get(parameter) else ""

    @disable_dynamo
    @_shielded
    def _step_ended(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        # The innermost. Not there: the first forward, with which recording began, was in this step: a closure.
        for place in reversed(range(len(self._stepping))):
            if self._stepping[place][0] is optimizer:
                del self._stepping[place:]
                break
        self._steps += 1
        if not self._stepping:
            self._record(optimizer, facts.groups_of(optimizer))

    def _outer(self, original: Function) -> Function:
        """Wrap ``step`` of GradScaler or of DeepSpeed's engine, so that one record is written after it."""

        def step(outer: Any, *arguments: Any, **keywords: Any) -> Any:
            optimizer = _optimizer_of(outer, *arguments, **keywords)
            if optimizer is None:
                return original(outer, *arguments, **keywords)
            # They are read before a scheduler steps, too.
            groups = facts.groups_of(optimizer)
            steps = self._steps
            depth = len(self._stepping)
            if depth == 0:
                self._before_outer(optimizer)
            self._stepping.append((outer, None))
            try:
                result = original(outer, *arguments, **keywords)
            finally:
                del self._stepping[depth:]
            if depth == 0:
                self._record(optimizer, groups, skipped=self._steps == steps, scaler=outer)
            return result

        return step

    @_shielded
    def _before_outer(self, optimizer: Any) -> None:
        self._take_on(optimizer)

    # --------------------------------------------------------------------------------------------------------- record

    @_shielded
    def _record(
        self,
        optimizer: Any,
        groups: list[Values],
        *,
        skipped: bool = False,
        scaler: Any = None,
    ) -> None:
        """Write a step, or what a further optimizer has added to it."""
        self._round(False)
        # A closure may have made more models known.
        self._take_on(optimizer)
        if not self._models:
            return
        notes = self._notes
        self._notes = Notes()
        record = self._last_record
        if record is None or notes.samples or notes.losses:
            record = self._new_record(notes, scaler)
        self._note_facts(record, optimizer, notes)
        record.groups = record.groups + groups
        record.skipped = record.skipped or skipped
        settings = self._settings
        if record.step < settings.first:
            return
        if settings.last is not None and record.step >= settings.last:
            return
        # torch's alone: what others draw is in the samples, and a script that never seeds them has others in each run
        record.random = digest([torch.get_rng_state(), *cuda_states()])
        if _is_due(record.step, settings.every) or _is_due(record.step, settings.tensors):
            self._note_numbers(record, optimizer)
        self._write(record)

    def _new_record(self, notes: Notes, scaler: Any) -> Record:
        """Return the record of a new step, with its losses and samples."""
        number = 0
        if self._last_record is not None:
            number = self._last_record.step + 1
        scale = 1.0
        if isinstance(scaler, torch.amp.GradScaler):
            # What backward was called on is scaled, if a scaler makes the step; its scale is a power of two.
            scale = scaler.get_scale()
        losses = []
        for loss, module in notes.losses:
            if module() is not None:
                value = asked(loss, "full_tensor")
                losses.append(float(value.real) / scale)
        samples = [one for one, module in notes.samples if module() is not None]
        record = Record(step=number, losses=losses, samples=samples, groups=[], skipped=False)
        self._last_record = record
        self._copies = None
        return record

    def _note_facts(self, record: Record, optimizer: Any, notes: Notes) -> None:
        """Note of each parameter and module what it is in this step, whatever its numbers are."""
        kinds = record.facts
        members = kinds.setdefault("member", {})
        names = facts.names_by_id(self._models)
        number = len(record.groups)
        for group in facts.members_of(optimizer, names):
            members |= dict.fromkeys(group, str(number))
            number += 1
        kinds["trained"] = dict(facts.trained_of(self._models))
        kinds["state"] = notes.states | record.fact("state")
        steps = int(record.fact("count").get("optimizer steps", 0))
        kinds["count"] = {"optimizer steps": str(steps + 1)}
        modes = kinds.setdefault("mode", {})
        outputs = kinds.setdefault("output", {})
        modules = dict(facts.modules_of(self._models))
        for path, module in modules.items():
            if id(module) in notes.modes:
                modes[path] = notes.modes[id(module)]
                outputs[path] = notes.outputs[id(module)]
            else:
                # It was not called, or is within what torch.compile has compiled.
                modes.setdefault(path, facts.mode_of(module))
        if _is_due(record.step, self._settings.every):
            kinds["layer"] = facts.layers_of(modules)

    def _note_numbers(self, record: Record, optimizer: Any) -> None:
        """Note gradients, weights, buffers and states. Collective."""
        record.gradients = dict(self._gradients())
        record.sketches = {"weight": {}, "buffer": {}, "state": record.sketches.get("state", {})}
        for place in range(len(self._models)):
            for quantity, name, sketched in self._sketches(place, record.step, optimizer):
                record.sketches[quantity][in_model(place, name)] = sketched
        # Another optimizer of the same step may have looked for them already.
        if self._copies is None:
            self._copies = {}
            if self._looks_for_copies(record.step):
                self._copies = {name: sketch(value) for name, value in copies_of(self._models)}
        record.buffers.update(self._copies)

    def _looks_for_copies(self, step: int) -> bool:
        """Return whether to look through all objects, which takes up to half a second: at a few steps alone."""
        number, rest = divmod(step, self._settings.every)
        # At the steps 1, 2, 4, 8 and so on of those that are recorded.
        return rest == 0 and number > 0 and number & (number - 1) == 0

    def _gradients(self) -> Iterator[tuple[str, tuple[float, int]]]:
        """Yield squared norms of what this rank has of gradients: in float32, which is cheap and enough for a hint."""
        for name, parameter in facts.names_of(self._models):
            if parameter.grad is None:
                continue
            local = asked(parameter.grad.detach(), "to_local")
            numbers = local.coalesce().values() if local.is_sparse else local
            norm = float(torch.linalg.vector_norm(numbers))
            yield name, (norm * norm, local.numel())

    def _sketches(
        self,
        place: int,
        step: int,
        optimizer: Any = None,
    ) -> Iterator[tuple[str, str, Sketch]]:
        """Yield quantity, name and sketch; keep the tensors where that is asked for. Collective."""
        # Of copies that all ranks have gathered one rank makes the sketch, of replicas each rank its digest at least.
        rank, size = rank_and_size()
        model = self._models[place]
        for number, whole in enumerate(self._whole(model, optimizer)):
            holders = whole.ranks or range(size)
            is_own = holders[number % len(holders)] == rank
            if is_own or whole.quantity != "weight":
                # Replicas' buffers may differ, and FairScale's state is its owner's.
                yield whole.quantity, whole.name, sketch(whole.value)
            elif whole.ranks is None:
                only_digest = store.digest_alone(sketch_digest(whole.value))
                yield whole.quantity, whole.name, only_digest
            if is_own and whole.quantity != "state" and _is_due(step, self._settings.tensors):
                file = store.tensor_file(self._folder, step, in_model(place, whole.name))
                store.write_tensor(file, whole.value)
            # Its memory is given back before the next one is gathered.
            del whole.value

    def _whole(self, model: nn.Module, optimizer: Any) -> Iterator[Whole]:
        """Yield a model's tensors, and with an optimizer those of its state if that is asked for. Collective."""
        prefix = prefix_of(model)
        yield from whole_tensors(model, prefix)
        if not self._settings.state or optimizer is None:
            return
        for name, state in whole_state(model, optimizer, prefix):
            for key in [*state]:
                value = state.pop(key)
                whole = Whole(f"{name}: {key}", value, None, "state")
                # No second reference to it may stay here.
                del value
                if isinstance(whole.value, Tensor):
                    yield whole

    def _write(self, record: Record) -> None:
        if self._file is None and not self._begin_file():
            return
        record.models = record.models + self._new
        self._new = []
        if self._written is not record:
            if self._written is not None:
                self._facts_before = self._written.facts
            self._written = record
        # What does not change is written once.
        changed = {}
        for kind, named in record.facts.items():
            if named != self._facts_before.get(kind):
                changed[kind] = named
        assert self._file is not None
        store.append(self._file, replace(record, facts=changed))

    def _begin_file(self) -> bool:
        """Write the header; end the record, and return False, if another process has."""
        rank, size = rank_and_size()
        parameter = next(self._models[0].parameters(), None)
        device = "cpu" if parameter is None else parameter.device.type
        folder = Path(sys.argv[0]).resolve().parent
        header = store.Header(
            rank=rank,
            world_size=size,
            command=sys.argv,
            commit=commit_in(folder) if rank == 0 else "",
            device=device,
            environment=environment(device),
        )
        self._file = self._folder / f"rank{rank}.jsonl"
        try:
            store.append(self._file, header)
        except FileExistsError:
            self.end(f"another process has trained as rank {rank}, and one record is of one training")
            return False
        return True


def _is_due(step: int, every: int) -> bool:
    """Return whether a step is one of every so many; never if that is 0."""
    return every > 0 and step % every == 0


def _is_trained(model: nn.Module, stepped: set[int]) -> bool:
    """Return whether a model has gradients, or an optimizer steps its parameters; an engine hides both."""
    if isinstance(model, ShardedModule) or steps_itself(model):
        return True
    for parameter in model.parameters():
        if parameter.grad is not None:
            return True
        if id(parameter) in stepped:
            return True
    return False


def _optimizer_of(outer: Any, *arguments: Any, **keywords: Any) -> Any:
    """Return the optimizer that a scaler or DeepSpeed's engine is about to step; None if it only accumulates."""
    ends_step = getattr(outer, "is_gradient_accumulation_boundary", None)
    # It is a GradScaler, which may leave out the step of what it is given.
    if ends_step is None:
        return [*arguments, *keywords.values()][0]
    # It is DeepSpeed's engine, whose optimizer steps before the weights are gathered.
    if ends_step():
        return outer.optimizer
    return None


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and how many there are, as the group or the launcher says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank = os.environ.get("RANK", 0)
    size = os.environ.get("WORLD_SIZE", 1)
    return int(rank), int(size)


# --------------------------------------------------------------------------------------------------- for one's own code


@contextlib.contextmanager
def trace(
    folder: str | Path,
    *,
    every: int = 1,
    steps: slice | range | None = None,
    tensors: int = 0,
    state: bool = False,
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
    settings = Settings(every=every, tensors=tensors, state=state)
    if steps is not None:
        settings = replace(settings, first=steps.start or 0, last=steps.stop)
    recorder = Recorder(folder, settings)
    check_new(Path(folder), rank_and_size()[0])
    recorder.start()
    try:
        yield Path(folder)
    finally:
        recorder.stop()


def check_new(folder: Path, rank: int | None = None) -> None:
    """Raise if a rank, or any rank, has left a record in the folder."""
    files = [*folder.glob("rank*.jsonl"), *folder.glob(store.ENDED)]
    if rank is not None:
        files = [*folder.glob(f"rank{rank}.jsonl")]
    if files:
        raise ConfigurationError(f"{str(folder)!r} holds a record already; remove it, or name another folder")
