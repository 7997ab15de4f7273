"""Live bytes by kind, the moment of their peak, and the collectives, on real or on fake tensors.

A :class:`Tracker` sees every operator below autograd and notes when each storage is made, resized and freed. Kinds are
decided over the log of all storages when a report is asked for, since what a storage was is often known later than when
it was made: a gradient is one from the moment that it reaches its parameter. Not seen is what no operator hands out:
workspaces inside of kernels, an allocator's fragments, buffers of gloo and NCCL.
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fsshard.complex_params.flattened import stored_in
from fsshard.nested import tensors
from fsshard.sharded.reports import HELD
from fsshard.simulation.collectives import Collective, Traffic, collective_of, traffic_of
from fsshard.simulation.fakes import storage_of
from fsshard.simulation.work import Amounts, Work, WorkCounter
from fsshard.state_objects import tensors_in
from fsshard.torch_private.autograd import current_graph_task_id, current_node, next_sequence_number, sequence_number
from fsshard.torch_private.dispatch import TorchDispatchMode, schema_of
from fsshard.torch_private.fsdp1 import WRAPPED
from fsshard.torch_private.modules import CHECKPOINTED
from fsshard.torch_private.patching import replaced
from fsshard.torch_private.tensors import LOCAL_TENSOR, storage_key

# A storage is of the first kind that fits.
#
# Parameters: as they lie between steps. Gradients: in buckets and in what collectives reduce too. Gathered units:
# whole parameters of an engine that keeps shards, and what they are gathered with. Activations: made in a forward and
# alive when the backward needs them, or made again for it. Temporaries: all else.
KINDS = (*HELD, "inputs", "activations", "temporaries")

# CUDA's caching allocator hands out multiples of so many bytes.
GRANULARITY = {"cuda": 512}
DEVICE = torch.ops.prim.device.default
PHASES = ("forward", "backward", "step")


@dataclass(frozen=True)
class Moment:
    """When something happened."""

    phase: str  # "forward", "backward" or "step" (of the optimizer)
    module: str  # name of the innermost module at work, "" for the root or none
    operation: str  # the operator, such as "aten::mm"

    def __str__(self) -> str:
        where = f" of {self.module}" if self.module else ""
        return f"{self.phase}{where}, {self.operation}"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The bytes that a tracker has seen on this rank since its last reset."""

    peak: int  # the most alive at once
    by_kind: Amounts  # how these divide among KINDS
    highest: Amounts  # per kind the most alive at once, whenever that was
    phases: Amounts  # per phase the most alive at once
    saved: int  # the most bytes of activations that a forward left to its backward
    moment: Moment  # when the peak was
    collectives: tuple[Traffic, ...]  # by kind
    work: Work


@dataclass(eq=False)
class _Life:
    """Some bytes of one storage, from when they were taken until they were given back."""

    nbytes: int
    born: int  # number of the event at which they were taken
    moment: Moment
    forward: int | None  # the stretch of forward that took them, see Tracker._ends
    kind: str = ""  # as it was marked
    died: int | None = None  # number of the event at which they were given back
    cast_of: _Life | None = None

    def alive_after(self, event: int) -> bool:
        return self.born <= event and (self.died is None or self.died > event)


class Tracker(TorchDispatchMode):
    """Context that counts live bytes and collectives of this thread's training.

    The optimizer's state and the gradients mark themselves at its steps; parameters are what :meth:`watch` finds.
    :meth:`reset` begins a step, :meth:`usage` tells what it took.

    Args:
        granularity: sizes are rounded up to multiples of this many bytes; 512 is CUDA's caching allocator's.
        device: count storages on this device type only; None counts all.
    """

    def __init__(self, *, granularity: int = 1, device: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.granularity = granularity
        self.device = device
        self._alive: dict[int, _Life] = {}  # by the storage's key
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._log: list[_Life] = []
        self._event = 0
        self._start = 0
        self.now = 0
        self.peak = 0
        self._phase = "forward"
        self._stepping = 0
        self._operation = ""
        self.collectives: list[Collective] = []  # since the last reset, in order
        self.work = WorkCounter()  # since the last reset
        # What a stretch of forward made and did not free by its end is an activation. Their ends; None: at work still.
        self._ends: list[int | None] = []
        self._forward: int | None = None  # the one at work
        self._backwards: list[int] = []  # events at which one began
        self._steps: list[int] = []
        self._modules = _ModuleNames()
        self._hooks: Any = WeakTensorKeyDictionary()  # parameter -> the hook through which its gradient is seen
        self._around = ExitStack()

    def watch(self, model: nn.Module, prefix: str = "") -> None:
        """Learn the names of the modules of ``model``, after ``prefix``, and which are its parameters and buffers."""
        self._modules.learn(model, prefix)
        self.mark(list(model.parameters()), "parameters")
        self.mark(list(model.buffers()), "buffers")

    def mark(self, value: object, kind: str) -> None:
        """Let the storages of all tensors in ``value``, however nested, be of ``kind`` from now on."""
        for tensor in _tensors(value):
            life = self._take(tensor)
            if life is None:
                continue
            if life.kind and KINDS.index(life.kind) <= KINDS.index(kind):
                continue
            life.kind = kind
            if kind == "gradients" and life.cast_of is not None and not life.cast_of.kind:
                life.cast_of.kind = kind

    def reset(self) -> None:
        """Start anew: the peak is what is alive now, and no collective has been seen."""
        # What was freed before this step is of no step to come.
        self._log = list(self._alive.values())
        self.collectives.clear()
        self.work.reset()
        self._backwards.clear()
        self._steps.clear()
        self._start = self._event
        self._modules.forget_graph()
        self.peak = self.now

    def live(self) -> dict[str, int]:
        """Bytes alive now by kind; what a forward has made counts as activations as long as it lives."""
        by_kind = dict.fromkeys(KINDS, 0)
        for life in self._alive.values():
            unmarked = "temporaries" if life.forward is None else "activations"
            by_kind[life.kind or unmarked] += life.nbytes
        return by_kind

    def usage(self, *, offloaded: bool = False) -> Usage:
        """Return what was seen since the last :meth:`reset`.

        Args:
            offloaded: leave out what lies in host memory under CPU offload.
        """
        lives = []
        for life in self._log:
            kind = self._kind(life)
            if not offloaded or not self._in_host_memory(life, kind):
                lives.append((life, kind))
        phases = dict.fromkeys(PHASES, 0)
        alive = dict.fromkeys(KINDS, 0)
        highest = dict.fromkeys(KINDS, 0)
        # Per phase the birth at which most bytes were alive.
        births = {}
        total = 0
        for event, change, kind, born in _changes(lives):
            total += change
            alive[kind] += change
            highest[kind] = max(highest[kind], alive[kind])
            if born is not None and event > self._start and total > phases[born.moment.phase]:
                phases[born.moment.phase] = total
                births[born.moment.phase] = born
        # What is alive at the start is the forward's, and what is when an optimizer begins is the step's.
        beginnings = [("forward", self._start)]
        beginnings += [("step", event) for event in self._steps]
        for phase, event in beginnings:
            total = sum(_alive_at(lives, event).values())
            phases[phase] = max(phases[phase], total)
        peak = max(phases.values())
        moment = Moment("forward", "", "")
        at_peak = self._start
        if births:
            birth = max(births.values(), key=lambda life: phases[life.moment.phase])
            moment = birth.moment
            if phases[moment.phase] == peak:
                at_peak = birth.born
        saved = [_alive_at(lives, event)["activations"] for event in self._backwards]
        return Usage(
            peak=peak,
            by_kind=_alive_at(lives, at_peak),
            highest=highest,
            phases=phases,
            saved=max(saved, default=0),
            moment=moment,
            collectives=traffic_of(self.collectives),
            work=self.work.work(),
        )

    def _in_host_memory(self, life: _Life, kind: str) -> bool:
        # In host memory are those that wait for the optimizer.
        if kind == "gradients":
            return any(map(life.alive_after, self._steps))
        if kind == "temporaries":
            return life.moment.phase == "step"
        return kind in ("parameters", "optimizer state")

    def _kind(self, life: _Life) -> str:
        if life.kind:
            return life.kind
        if life.forward is None:
            return "temporaries"
        end = self._ends[life.forward]
        # Without an end it is at work still, or an exception has ended it; as in live().
        kept = life.died is None if end is None else life.alive_after(end)
        return "activations" if kept else "temporaries"

    def __enter__(self) -> Tracker:
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
            return result

        around = self._around
        # FSDP1 and FSDP2 free a gathered unit by shrinking its storage, which no operator tells of (torch 2.13).
        around.enter_context(replaced(torch.UntypedStorage, "resize_", resized))
        around.callback(register_optimizer_step_pre_hook(self._step_starts).remove)
        around.callback(register_optimizer_step_post_hook(self._step_ends).remove)
        around.callback(register_module_forward_pre_hook(self._module_starts).remove)
        around.callback(register_module_forward_hook(self._module_ends, always_call=True).remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        # Hooks and replaced functions of torch outlive the context otherwise.
        self._around.close()
        for hook in list(self._hooks.values()):
            hook.remove()
        self._hooks.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # These are two of three calls for fake tensors, and nothing that is counted.
        if func is DEVICE:
            fake = getattr(args[0], "fake_device", None)
            return func(*args) if fake is None else fake
        if any(getattr(kind, "__name__", "") == "DTensor" for kind in types):
            # Its own operators on local tensors come here afterwards.
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._operation = schema_of(func).name
        self._enter_phase()
        collective = collective_of(func, args, result)
        if collective is not None:
            self._count(collective)
        else:
            self.work.add(func, args, kwargs, result, self._phase)
        for tensor in _tensors(result):
            self._take(tensor)
        if func.name() == "aten::_to_copy" and self._phase == "backward":
            self._follow_cast(args[0], result)
        return result

    def _count(self, collective: Collective) -> None:
        """Count a collective, and mark what it sends."""
        self.collectives.append(collective)
        sent = [tensor for tensor in collective.tensors if tensor.is_floating_point()]
        if self._phase == "backward" and ("reduce" in collective.kind or collective.kind == "all_to_all"):
            self.mark(sent, "gradients")
        elif self._phase != "step" and collective.kind == "all_gather":
            self.mark(sent, "gathered units")
        collective.tensors.clear()

    # ------------------------------------------------------------------------------------------ storages

    def _take(self, tensor: Tensor) -> _Life | None:
        """Return what is known of the storage of ``tensor``; made known if it is new."""
        # This is what .device is, without a dispatch.
        device = getattr(tensor, "fake_device", None)
        if device is None:
            device = tensor.device
        if device.type == "meta" or self.device not in (None, device.type):
            return None
        storage = storage_of(tensor)
        if storage is None:
            return None
        key = storage_key(storage)
        nbytes = storage.nbytes()
        if key not in self._alive:
            self._storages[key] = weakref.ref(storage, lambda _: self._freed(key))
            self._begin(key, nbytes)
        elif self._alive[key].nbytes != self._rounded(nbytes):
            self._change(key, nbytes)
        return self._alive[key]

    def _begin(
        self,
        key: int,
        nbytes: int,
        kind: str = "",
        cast_of: _Life | None = None,
    ) -> None:
        self._event += 1
        module = "" if self._phase == "step" else self._modules.current()
        life = _Life(
            nbytes=self._rounded(nbytes),
            born=self._event,
            moment=Moment(self._phase, module, self._operation),
            forward=self._forward,
            kind=kind,
            cast_of=cast_of,
        )
        self._log.append(life)
        self._alive[key] = life
        self.now += life.nbytes
        self.peak = max(self.peak, self.now)

    def _freed(self, key: int) -> None:
        life = self._alive.pop(key, None)
        if life is None:
            return
        self._event += 1
        # Freeing is an event, too: bytes alive are counted between events.
        life.died = self._event
        self.now -= life.nbytes
        del self._storages[key]

    def _change(self, key: int, nbytes: int) -> None:
        life = self._alive[key]
        storage = self._storages[key]
        self._freed(key)
        self._storages[key] = storage
        self._begin(key, nbytes, life.kind, life.cast_of)

    def _resized(self, storage: Any) -> None:
        key = storage_key(storage)
        life = self._alive.get(key)
        if life is None:
            return
        # Nothing but gathered units is shrunk and grown.
        life.kind = life.kind or "gathered units"
        self._operation = "resize"
        self._change(key, storage.nbytes())

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.granularity) * self.granularity

    def _enter_phase(self) -> None:
        if self._stepping:
            return
        if _in_backward():
            if self._phase != "backward":
                self._phase = "backward"
                self._backwards.append(self._event)
                self._end_forward()
        elif self._modules.stack and self._phase != "forward":
            self._begin_forward()
            self._phase = "forward"

    def _begin_forward(self) -> None:
        self._forward = len(self._ends)
        self._ends.append(None)

    def _end_forward(self) -> None:
        if self._forward is not None:
            self._ends[self._forward] = self._event
            self._forward = None

    def _step_starts(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._stepping:
            self._end_forward()
            self._steps.append(self._event)
            for group in optimizer.param_groups:
                self.mark([parameter.grad for parameter in group["params"]], "gradients")
        self._stepping += 1
        self._phase = "step"

    def _step_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._stepping -= 1
        self.mark(list(tensors_in(list(optimizer.state.values()))), "optimizer state")

    def _module_starts(self, module: nn.Module, args: Any) -> None:
        self._enter_phase()
        outermost = not self._modules.stack
        self._modules.push(module)
        if _in_backward():
            # A block is recomputed.
            if self._phase == "backward" and outermost:
                self._begin_forward()
        elif self._forward is None:
            self._begin_forward()
            self._phase = "forward"

    def _module_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self._watch_parameters(module)
        self._modules.pop(module)
        if self._phase == "backward" and not self._modules.stack:
            self._end_forward()

    def _watch_parameters(self, module: nn.Module) -> None:
        """Mark what the module has computed with: whole parameters that are none at rest are gathered ones.

        Of a model that is not watched they are parameters as they lie.
        """
        unknown = "gathered units" if module in self._modules.names else "parameters"
        for stored, parameter in stored_in(module).items():
            # FSDP1 shows views of its flat parameter in the module's dict.
            shown = module.__dict__.get(stored, parameter)
            if not isinstance(shown, Tensor) or hasattr(shown, LOCAL_TENSOR):
                continue
            life = self._take(shown)
            if life is not None and not life.kind:
                life.kind = unknown
            if shown.requires_grad and torch.is_grad_enabled() and shown not in self._hooks:
                hook = functools.partial(_arrived, weakref.ref(self))
                # FSDP1's shards refuse their own register_hook().
                self._hooks[shown] = cast(Any, Tensor).register_hook(shown, hook)

    def _follow_cast(self, source: Tensor, result: Tensor) -> None:
        """Mark a gradient that is cast, either way: engines add them up in a wider dtype, or send a narrower one."""
        life = self._alive.get(storage_key(source.untyped_storage()))
        life_of_result = self._take(result)
        if life is not None and life.kind == "gradients":
            self.mark(result, "gradients")
        elif life_of_result is not None:
            life_of_result.cast_of = life


def _in_backward() -> bool:
    return current_graph_task_id() != -1


def _arrived(reference: weakref.ref[Tracker], gradient: Tensor) -> None:
    # The reference is weak, since what a parameter's hook holds could live forever (torch 2.13).
    tracker = reference()
    if tracker is not None:
        tracker.mark(gradient, "gradients")


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield the plain tensors in a nested value: of a DTensor its local part, of what is still to arrive its memory."""
    for tensor in tensors(value):
        local = getattr(tensor, LOCAL_TENSOR, tensor)
        # An AsyncCollectiveTensor has its memory in "elem".
        yield getattr(local, "elem", local)


class _ModuleNames:
    """Tells which module is at work: by the calls of a forward, by the numbers of autograd's nodes in a backward."""

    def __init__(self) -> None:
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.stack: list[tuple[weakref.ref[nn.Module], str]] = []  # modules at work, the innermost last
        self._starts: list[int] = []  # number of the first node after a change of module, and which module that is
        self._at: list[str] = []
        self._last = ""

    def learn(self, model: nn.Module, prefix: str) -> None:
        # A tied module has its first name, which is set last.
        for name, module in reversed([*_tree(model)]):
            self.names[module] = prefix + name

    def push(self, module: nn.Module) -> None:
        name = self.names.get(module, self._innermost())
        self.stack.append((weakref.ref(module), name))
        self._mark(name)

    def pop(self, module: nn.Module) -> None:
        # An exception may have left some on the stack.
        while self.stack:
            left, _ = self.stack.pop()
            if left() is module:
                break
        self._mark(self._innermost())

    def _innermost(self) -> str:
        return self.stack[-1][1] if self.stack else ""

    def _mark(self, name: str) -> None:
        if not _in_backward():
            self._starts.append(next_sequence_number())
            self._at.append(name)

    def current(self) -> str:
        """Return the name of the innermost module at work."""
        if self.stack:
            return self._innermost()
        node = current_node()
        # It is not in a backward, or at its very end, where engines reduce what is left.
        if node is None:
            return ""
        place = bisect_right(self._starts, sequence_number(node)) - 1
        # Past the last one are nodes that accumulate into a parameter.
        if 0 <= place < len(self._at) - 1:
            self._last = self._at[place]
        return self._last

    def forget_graph(self) -> None:
        """Forget what was run so far: it will have no backward."""
        self._starts.clear()
        self._at.clear()
        self._last = ""


def _tree(module: nn.Module, path: tuple[str, ...] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with their names, and what an engine has put around one, which named_modules() leaves out."""
    yield ".".join(path), module
    for name, child in module._modules.items():
        if child is not None:
            yield from _tree(child, path if name in WRAPPERS else (*path, name))


WRAPPERS = frozenset({WRAPPED, CHECKPOINTED, "module"})


def _changes(lives: Iterable[tuple[_Life, str]]) -> list[tuple[int, int, str, _Life | None]]:
    """Return of each event the change of bytes and their kind; and what was born, if something was."""
    changes: list[tuple[int, int, str, _Life | None]] = []
    for life, kind in lives:
        changes.append((life.born, life.nbytes, kind, life))
        if life.died is not None:
            changes.append((life.died, -life.nbytes, kind, None))
    changes.sort(key=lambda change: change[0])
    return changes


def _alive_at(lives: Iterable[tuple[_Life, str]], event: int) -> dict[str, int]:
    by_kind = dict.fromkeys(KINDS, 0)
    for life, kind in lives:
        if life.alive_after(event):
            by_kind[kind] += life.nbytes
    return by_kind
