"""Records a training that knows nothing of it, through torch's global hooks.

The outermost modules that are trained, and the outermost optimizers' steps: see :class:`Recorder`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsshard.errors import ConfigurationError
from fsshard.nested import is_array, leaves
from fsshard.parity.one_process import perturbed
from fsshard.parity.scripts.store import (
    ENDED,
    Header,
    Model,
    Record,
    Samples,
    Writer,
    digest_alone,
    note_end,
    tensor_file,
    write_tensor,
)
from fsshard.parity.scripts.weights import user_names, whole_tensors
from fsshard.parity.sketch import Sketch, digest, real_view, sketch, sketch_digest
from fsshard.parity.trace import INITIAL, commit_in, environment
from fsshard.torch_private.modules import COMPILED
from fsshard.torch_private.patching import replaced


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a record: which steps, and how much of each."""

    every: int = 1  # weights are, at every so many steps
    first: int = 0  # the first step
    last: int | None = None  # the one after the last; None for all
    tensors: int = 0  # weights are kept whole at every so many steps; 0 for never
    draw: int = 0  # a number seeds a run whose results are rounded otherwise, at random

    def __post_init__(self) -> None:
        if self.every < 1 or self.tensors < 0:
            raise ConfigurationError(f"expected every >= 1 and tensors >= 0, got {self.every} and {self.tensors}")


def _shielded(hook: Callable[..., None]) -> Callable[..., None]:
    """Decorate a method of :class:`Recorder`: what fails in it ends the record, never the training."""

    @functools.wraps(hook)
    def shielded(recorder: Recorder, *arguments: Any, **keywords: Any) -> None:
        if recorder.process != os.getpid():  # stopped, or a fork: its parent's file is none of its own
            return
        try:
            hook(recorder, *arguments, **keywords)
        except Exception as error:
            recorder.end(f"{type(error).__name__}: {error}")

    return shielded


class Recorder:
    """Hooks of one process, between :meth:`start` and :meth:`stop`, which write a file per rank into ``folder``."""

    def __init__(self, folder: str | Path, settings: Settings) -> None:
        self._folder, self._settings = Path(folder), settings
        self._models: list[nn.Module] = []  # in the order of their first forwards
        self._known: set[int] = set()  # ids of modules that are, or are in, one of them
        self.process = 0  # that records; 0 before start() and after stop()
        self._depth = self._backwards = 0
        self._optimizers: list[Optimizer] = []  # whose step goes on: one may step another, as FairScale's OSS does
        self._losses: list[Tensor] = []
        self._samples: list[Samples] = []
        self._last_record: Record | None = None
        self._number = self._steps = 0  # the next step's, and steps of optimizers so far
        self._writer: Writer | None = None
        self._unwritten: list[Model] = []  # a script may call a model before it joins a process group
        self._stack = contextlib.ExitStack()
        self._rounding: contextlib.ExitStack | None = None
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
        self._stack.enter_context(replaced(torch.amp.GradScaler, "step", self._scaler(torch.amp.GradScaler.step)))

    def stop(self) -> None:
        """Remove the hooks."""
        self.process = 0
        self._round(False)
        self._stack.close()
        if self._writer is not None:
            self._writer.close()

    def end(self, reason: str) -> None:
        """Record no more, and say so: a comparison must not take what is missing for equal."""
        self.stop()
        note_end(self._folder, reason)
        print(f"fsshard: the record ends here, the training goes on: {reason}", file=sys.stderr)

    # -------------------------------------------------------------------------------------------------------- forward

    def forward_begins(self, module: nn.Module, arguments: Any) -> None:
        """Note a model that is new, with its weights before the first step."""
        # A hook must not become a part of a graph.
        if not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            self._begin(module)

    @_shielded
    def _begin(self, module: nn.Module) -> None:
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled():
            # A module below a known one is called alone where an activation is recomputed.
            if id(module) not in self._known and any(p.requires_grad for p in module.parameters()):
                self._add(module)
            self._round(id(module) in self._known)

    def _add(self, module: nn.Module) -> None:
        inner = {id(module), *map(id, module.modules())}  # ShardedModule.modules() are the user's alone
        self._models = [one for one in self._models if id(one) not in inner]
        self._models.append(module)
        self._known |= inner
        engine = dict(module.named_children()).get(COMPILED, module)  # what torch.compile has compiled
        layers = Counter(repr(one) for one in module.modules() if next(one.children(), None) is None)
        sketches = self._sketches(len(self._models) - 1, INITIAL)
        weights = {name: one for name, one, buffer in sketches if not buffer}
        self._write(Model(engine=type(engine).__name__, layers=dict(layers), weights=weights))

    def _forward_ended(self, module: nn.Module, arguments: Any, *others: Any) -> None:
        if not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            self._end(module, arguments, *others)

    @_shielded
    def _end(self, module: nn.Module, arguments: Any, *others: Any) -> None:
        if self._depth == 0:  # it was called before recording began: with the first forward that is differentiated
            return
        self._depth -= 1
        # Keywords and output; of a forward that has raised torch 2.13 hands no keywords over, and None.
        *keywords, output = others
        if self._depth == 0 and torch.is_grad_enabled() and keywords and any(module is one for one in self._models):
            self._samples.append(samples_of([arguments, keywords], _computed(module, output)))

    # ------------------------------------------------------------------------------------------------------- backward

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``torch.autograd.backward``, which ``Tensor.backward`` calls, that notes losses."""

        def backward(tensors: Any, *arguments: Any, **keywords: Any) -> Any:
            if not self._backwards:  # one within another one is that of a recomputed block
                given = [tensors] if isinstance(tensors, Tensor) else [*tensors]
                self._losses += [one.detach().clone() for one in given if one.numel() == 1]
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
        if self._rounding is not None and not on:
            self._rounding.close()
            self._rounding = None
        elif self._rounding is None and on and self._draws is not None:
            self._rounding = contextlib.ExitStack()
            self._rounding.enter_context(perturbed(self._draws))

    # ----------------------------------------------------------------------------------------------------------- step

    def _step_begins(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        self._optimizers.append(optimizer)

    def _step_ended(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        if self._optimizers:  # else the first forward, with which recording began, was within this step: a closure
            self._optimizers.pop()
        if not self._optimizers and self._models:
            self._round(False)
            self._record(optimizer)

    def _scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``GradScaler.step`` that notes steps which it leaves out."""

        def step(scaler: Any, optimizer: Optimizer, *arguments: Any, **keywords: Any) -> Any:
            before = self._steps
            result = original(scaler, optimizer, *arguments, **keywords)
            if self._models and not self._optimizers and self._steps == before:
                self._record(optimizer, skipped=True)
            return result

        return step

    @_shielded
    def _record(self, optimizer: Optimizer, *, skipped: bool = False) -> None:
        """Write a step, or what a second optimizer has added to it."""
        self._steps += 1
        groups, before = [_plain(group) for group in optimizer.param_groups], self._last_record
        if before is not None and not self._samples and not self._losses:
            record = before
            record.groups, record.skipped = record.groups + groups, record.skipped or skipped
        else:
            losses = [float(_asked(loss, "full_tensor").real) for loss in self._losses]
            given: dict[str, Any] = {"step": self._number, "losses": losses, "samples": self._samples, "groups": groups}
            record = Record(**given, random="", skipped=skipped, gradients={}, sketches={})
            self._losses, self._samples, self._number = [], [], self._number + 1
        self._last_record = record
        last = self._settings.last
        if record.step < self._settings.first or (last is not None and record.step >= last):
            return
        # torch's alone: what others draw is in the samples, and a script that never seeds them has others in each run
        cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
        record.random = digest([torch.get_rng_state(), *cuda])
        if record.step % self._settings.every == 0 or self._keeps(record.step):
            record.gradients = dict(self._gradients())
            record.sketches = {"weight": {}, "buffer": {}}
            for place in range(len(self._models)):
                for name, one, buffer in self._sketches(place, record.step):
                    record.sketches["buffer" if buffer else "weight"][name] = one
        self._write(record)

    def _keeps(self, step: int) -> bool:
        return self._settings.tensors > 0 and step % self._settings.tensors == 0

    def _gradients(self) -> Iterator[tuple[str, tuple[float, int]]]:
        """Yield squared norms of what this rank has of gradients: in float32, which is cheap and enough for a hint."""
        for place, model in enumerate(self._models):
            for name, parameter in user_names(model):
                gradient = parameter.grad
                if gradient is not None:
                    local = _asked(gradient.detach(), "to_local")
                    numbers = local.coalesce().values() if local.is_sparse else local
                    norm = float(torch.linalg.vector_norm(numbers))
                    yield _named(place, name), (norm * norm, local.numel())

    def _sketches(self, place: int, step: int) -> Iterator[tuple[str, Sketch, bool]]:
        """Yield name, sketch, and whether it is a buffer; keep the tensors where that is asked for. Collective."""
        # Of copies that all ranks have gathered one rank makes the sketch, of replicas each rank its digest at least.
        rank, size = _rank()
        for number, whole in enumerate(whole_tensors(self._models[place])):
            holders = whole.ranks or range(size)
            mine, name = holders[number % len(holders)] == rank, _named(place, whole.name)
            if mine or whole.buffer:  # buffers of replicas may differ, as those of batch normalization do
                yield name, sketch(whole.value), whole.buffer
            elif whole.ranks is None:
                yield name, digest_alone(sketch_digest(whole.value)), whole.buffer
            if mine and self._keeps(step):
                write_tensor(tensor_file(self._folder, step, name), whole.value)

    def _write(self, what: Model | Record) -> None:
        if isinstance(what, Model) and self._writer is None:
            self._unwritten.append(what)
            return
        if self._writer is None:
            rank, size = _rank()
            device = next((p.device.type for p in self._models[0].parameters()), "cpu")
            header = Header(
                rank=rank,
                world_size=size,
                command=sys.argv,
                commit=commit_in(Path(sys.argv[0]).resolve().parent) if rank == 0 else "",
                device=device,
                environment=environment(device),
                every=self._settings.every,
            )
            try:
                self._writer = Writer(self._folder, header)
            except FileExistsError:
                return self.end(f"another process has trained as rank {rank}, and one record is of one training")
            for model in self._unwritten:
                self._writer.write(model)
        self._writer.write(what)


def _rank() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _named(place: int, name: str) -> str:
    """Return the name among all models: of all but the first with the model's number before it."""
    return f"model{place}.{name}" if place else name


def _computed(module: nn.Module, output: Any) -> str:
    tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "nothing"
    device = tensors[0].device.type if tensors else "cpu"
    autocast = f", autocast to {torch.get_autocast_dtype(device)}" if torch.is_autocast_enabled(device) else ""
    return f"{dtype}{autocast}{'' if module.training else ', in evaluation mode'}"


def _asked(value: Any, method: str) -> Any:
    """Return what a DTensor's method gives, or any other value itself."""
    return getattr(value, method)() if hasattr(value, method) else value


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """Return what an optimizer's group says, as numbers and texts."""
    plain = (bool, int, float, str, type(None))
    values = ((k, v.tolist() if isinstance(v, Tensor) else v) for k, v in group.items() if k != "params")
    return {k: list(v) if isinstance(v, tuple) else v if isinstance(v, plain) else repr(v) for k, v in values}


def samples_of(given: Any, computed: str = "") -> Samples:
    """Return digests of a forward's arguments: of all, and of the samples that lie along dim 0 of all tensors."""
    arrays = [array for leaf in leaves(given) if is_array(leaf) for array in _arrays(leaf)]
    sizes = {array.shape[0] for array in arrays}
    total, rows = 0, sizes.pop() if len(sizes) == 1 and all(array.numel() for array in arrays) else 0
    numbers = [array.contiguous().reshape(array.shape[0], -1).view(torch.uint8).numpy() for array in arrays if rows]
    for row in range(rows):
        found = hashlib.blake2b(digest_size=16)
        for array in numbers:
            found.update(array[row].tobytes())
        total += int.from_bytes(found.digest(), "little")
    return Samples(digest=digest(arrays), rows=rows, total=f"{total % 2**128:032x}", computed=computed)


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
    folder: str | Path, *, every: int = 1, steps: slice | range | None = None, tensors: int = 0
) -> Iterator[Path]:
    """Record every optimizer step that is made within, as ``fsshard trace`` records a script.

    Enter it on all ranks, before the first forward. The models that are called and trained within are recorded by
    torch's hooks, whatever engine they are under.

    Args:
        folder: a new folder, the same for all ranks; ``fsshard compare`` reads it.
        every: weights are recorded at every so many steps; losses, samples and learning rates at each.
        steps: those that are recorded, such as ``range(0, 50)``; None for all.
        tensors: whole weights are kept at every so many steps; 0 for never.

    Raises:
        ConfigurationError: ``folder`` holds a record already, or ``every`` is not positive.
    """
    first, last = (0, None) if steps is None else (steps.start or 0, steps.stop)
    settings = Settings(every=every, first=first, last=last, tensors=tensors)
    check_new(Path(folder), _rank()[0])
    recorder = Recorder(folder, settings)
    recorder.start()
    try:
        yield Path(folder)
    finally:
        recorder.stop()


def check_new(folder: Path, rank: int | None = None) -> None:
    """Raise if a rank, or any rank, has left a record in the folder."""
    names = [f"rank{rank}.jsonl"] if rank is not None else ["rank*.jsonl", ENDED]
    if any(next(folder.glob(name), None) for name in names):
        raise ConfigurationError(f"{str(folder)!r} holds a record already; remove it, or name another folder")
