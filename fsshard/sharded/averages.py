"""fsshard.EMA: an exponential moving average of a model's weights, of which each rank holds its own part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fsshard.backends.whole import gather_owned, owned, set_state, state_device, state_of
from fsshard.comm.agreement import Channel, exchange
from fsshard.comm.watchdog import taking_part
from fsshard.errors import ConfigurationError, FsshardError, OptimizerError, RankMismatch, StateDictError
from fsshard.planning.entries import Entry
from fsshard.planning.text import is_count
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer
from fsshard.sharded.optimizer_checks import OptimizerRequest

KEY = "average"
"""The state of a parameter under which checkpoints have its average."""
COUNTS = {"calls": 0, "updates": 0}
"""Of the group of all parameters, before the first call."""


class EMA:
    """An exponential moving average of the weights of a wrapped model, the same under every backend.

    Each rank averages the parts that it holds: an update sends nothing, and the average takes as much memory as the
    rank's parameters, under ``fairscale`` those that it owns. The numbers are those of
    ``torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))`` around the bare model, to
    the last bit: the first update takes the weights as they are. Buffers stay the model's own, the latest ones.

    ::

        ema = fsshard.EMA(model, decay=0.999)
        for batch in loader:
            ...
            optimizer.step()
            ema.update()
        with ema.swapped():
            evaluate(model)
        fsshard.save(path, model, optimizer, ema=ema)

    Args:
        model: what :func:`fsshard.wrap` returned.
        decay: the weight of the old average in an update, 0 to 1; or a function that gives it for the number of updates
            that were made before: ``lambda n: min(0.999, (1 + n) / (10 + n))`` warms it up.
        every: update at each call of :meth:`update` whose number is a multiple of this.
        device: where the average is kept; None: on the device of the weights.

    Raises:
        ConfigurationError: an argument without meaning.
    """

    def __init__(
        self,
        model: ShardedModule,
        decay: float | Callable[[int], float] = 0.999,
        *,
        every: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(model, ShardedModule):
            raise ConfigurationError(
                f"fsshard.EMA: expected a wrapped model, got {type(model).__name__}; pass what fsshard.wrap returned "
                "(Hugging Face's Trainer has it as model_wrapped), or use torch.optim.swa_utils.AveragedModel"
            )
        if not callable(decay) and not (isinstance(decay, (int, float)) and 0 <= decay <= 1):
            raise ConfigurationError(f"fsshard.EMA: decay={decay!r}: expected a number from 0 to 1, or a function")
        if not is_count(every):
            raise ConfigurationError(f"fsshard.EMA: every={every!r}: expected a number of calls, 1 or more")
        self.model = model
        self.decay = decay
        self.every = every
        # The model's own weights, while the average is in place.
        self._kept: list[tuple[Entry, Tensor]] | None = None
        entries = model.backend.all
        state_device = None if device is None else torch.device(device)
        # For state dicts and checkpoints an average is the state of an optimizer that never steps.
        inner = Averages([entry.parameter for entry in entries], state_device)
        parameters = {entry.name: (entry.shape, entry.kind.is_complex) for entry in entries}
        groups = [{"params": list(parameters), **COUNTS}]
        request = OptimizerRequest(Averages, groups, {}, parameters)
        self.held = ShardedOptimizer(model, inner, request)

    @property
    def updates(self) -> int:
        """Number of updates so far."""
        return int(self.held.param_groups[0]["updates"])

    @torch.no_grad()
    def update(self) -> None:
        """Let the weights, as they are now, have their part in the average. Local: call it behind the optimizer's step.

        Raises:
            FsshardError: the average is in place of the weights.
        """
        if self._kept is not None:
            raise FsshardError("EMA.update() within swapped(): the model holds the average itself")
        counts = self.held.param_groups[0]
        counts["calls"] += 1
        if counts["calls"] % self.every:
            return
        backend = self.model.backend
        averages = []
        weights = []
        for entry in backend.all:
            if not owned(backend, entry):
                continue
            local = entry.local()
            average = self._average(entry)
            if average is None:
                self._check_owned(entry)
                first = local.to(state_device(self.held.inner, entry), copy=True)
                set_state(backend, self.held.inner, entry, {KEY: first})
            elif local.is_floating_point():
                averages.append(numbers(entry, average))
                weights.append(numbers(entry, local).to(average.device))
            else:
                # As AveragedModel treats integers.
                average.copy_(local)
        updates = counts["updates"]
        if averages:
            decay = self.decay(updates) if callable(self.decay) else self.decay
            update = get_ema_multi_avg_fn(decay)
            update(averages, weights, updates)
        counts["updates"] += 1

    def _average(self, entry: Entry) -> Tensor | None:
        """Return this rank's part of the average, or None before the first update."""
        return state_of(self.held.inner, entry).get(KEY)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[ShardedModule]:
        """Context in which the model has the average as its weights: to evaluate, or to take or save its state dict.

        Collective. Behind it the weights are those of before, to the last bit, whatever was written in it. Before the
        first update they stay as they are.

        Yields:
            The model.

        Raises:
            FsshardError: it is within one already.
            RankMismatch: ranks have made different numbers of updates.
        """
        if self._kept is not None:
            raise FsshardError("EMA.swapped() within itself")
        self.check_alike()
        backend = self.model.backend
        backend.reshard()
        kept = []
        if self.updates:
            kept = [(entry, entry.local().clone()) for entry in backend.all]
        self._kept = kept
        try:
            with torch.no_grad(), taking_part(backend.settings.group, "EMA.swapped()"):
                averages: Iterator[Tensor] = (self._sent(entry) for entry, _ in kept)
                if backend.facts.divides == "owners":
                    # Every rank has whole weights, and the average of those that it owns.
                    averages = gather_owned(backend, ((entry, self._sent(entry)) for entry, _ in kept))
                for (entry, _), average in zip(kept, averages, strict=True):
                    entry.local().copy_(average)
            yield self.model
        finally:
            self._kept = None
            with torch.no_grad():
                backend.reshard()
                for entry, weights in kept:
                    entry.local().copy_(weights)

    def check_alike(self, channel: Channel | None = None) -> None:
        """Raise on every rank unless all have made as many updates. Collective.

        Args:
            channel: over which the ranks talk, as in a save, which notices a rank that dies; None: the model's group.

        Raises:
            RankMismatch: names the numbers.
            OptimizerError: this rank has become the owner of a parameter since the first update.
        """
        group = self.model.backend.settings.group
        with taking_part(group, "EMA's look at the ranks' updates"):
            counts_of_ranks = exchange(channel or group, self._counted)
        texts = [f"{updates} of {calls} calls" for calls, updates in counts_of_ranks]
        if len(set(texts)) > 1:
            listed = ", ".join(f"rank {rank} {text}" for rank, text in enumerate(texts))
            raise RankMismatch(f"EMA: the ranks have made different updates: {listed}; call update() on every rank")

    def _counted(self) -> tuple[int, int]:
        backend = self.model.backend
        for entry in backend.all:
            if owned(backend, entry) and self._average(entry) is None:
                self._check_owned(entry)
        counts = self.held.param_groups[0]
        return counts["calls"], counts["updates"]

    def _check_owned(self, entry: Entry) -> None:
        """Raise where an average has begun and this rank has none of ``entry``: its owner has changed."""
        if self.updates:
            raise OptimizerError(
                f"EMA: {entry.name!r} has a different owner than when the average began, since an optimizer was built "
                "in between: call ema.state_dict() before fsshard.build_optimizer, and load it into an EMA made "
                "after it"
            )

    def _sent(self, entry: Entry) -> Tensor:
        """Return the average where the weights are; room for it where another rank has it."""
        average = self._average(entry)
        local = entry.local()
        return torch.empty_like(local) if average is None else average.to(local.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole average as an optimizer's state dict. Collective.

        ``["state"][name]["average"]`` has the shape and dtype of the model's parameter ``name``.

        Raises:
            RankMismatch: ranks have made different numbers of updates.
        """
        self.check_alike()
        return self.held.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, under this or another backend.

        Raises:
            StateDictError: other parameters or shapes, or the state of something else.
        """
        self.held.check_state_dict(state_dict)
        states = state_dict["state"]
        saved = state_dict["param_groups"][0]
        unexpected = set[str]().union(*states.values()) - {KEY}
        missing = [key for key in COUNTS if key not in saved]
        if saved.get("updates"):
            missing += [f"{KEY} of {name}" for name in saved["params"] if name not in states]
        if missing or unexpected:
            raise StateDictError("EMA: the average", missing, unexpected)
        self.held.load_state_dict(state_dict)


class Averages(Optimizer):
    """Holds averages as an optimizer's state; nothing steps it."""

    def __init__(self, parameters: list[Tensor], device: torch.device | None) -> None:
        super().__init__([{"params": parameters, **COUNTS}], {})
        self._fsshard_state_device = device


def numbers(entry: Entry, local: Tensor) -> Tensor:
    """Return this rank's part of a parameter, or of its average, as the user's numbers: in the same memory."""
    if not entry.kind.is_complex:
        return local
    # As pairs of reals a complex number is averaged with other roundings, by 3e-8 to 1.2e-7.
    return torch.view_as_complex(local.view(-1, 2))
