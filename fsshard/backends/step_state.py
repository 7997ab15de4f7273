"""The state of one model's training step: what has run, what awaits its backward, whose gradients are not reduced yet.

The controller moves it, engines read it, and what is not allowed in a state raises here. Start at :class:`Stage` and
:data:`TRANSITIONS`.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Iterable, Iterator, Mapping

from fsshard.errors import ModelError, OptimizerError
from fsshard.torch_private.autograd import current_graph_task_id


class Stage(enum.Enum):
    """The latest thing that a model has gone through."""

    IDLE = "no forward with gradients has run yet"
    FORWARD = "a forward runs"
    PENDING = "a forward with gradients has ended, and its backward has not begun"
    DERIVED = "torch.autograd.grad has passed through a forward; nothing is reduced until the loss's backward begins"
    ACCUMULATED = "a backward under no_sync() has begun"
    SPENT = "a backward that reduces has begun, or another pass that keeps no graph"

    # Enum's own is a Python function, which each look into a table would call.
    __hash__ = object.__hash__


Transitions = Mapping[Stage, frozenset[Stage]]

_PASSES = frozenset((Stage.DERIVED, Stage.ACCUMULATED, Stage.SPENT))

# Stage -> the passes through the graph that may begin in it. A forward may begin in any.
TRANSITIONS: Transitions = dict.fromkeys(Stage, _PASSES)

# The same of an engine that frees gathered weights in a pass, so that the next one needs a forward of its own.
WEIGHTS_ARE_FREED: Transitions = {**TRANSITIONS, Stage.SPENT: frozenset((Stage.ACCUMULATED,))}


class PendingGraph:
    """What the hooks on a forward's outputs hold: it lives as long as the graph behind them."""

    was_silent = False
    """The forward was within ``no_sync()``."""
    task: int | None = None
    """The graph task in which its backward has begun."""


class StepState:
    """Where one model is between two optimizer steps.

    Args:
        name: the engine's.
        transitions: the passes that it allows: :data:`TRANSITIONS` or :data:`WEIGHTS_ARE_FREED`.

    Attributes:
        stage: see :class:`Stage`.
        silence: how many ``no_sync`` contexts are open.
        pending: the graphs of forwards with gradients that await their backward.
        local: names of the parameters whose gradients are this rank's own: every backward since they were dropped was
            under ``no_sync()``.
        left: names of parameters that were frozen between micro-batches of ``no_sync()``: their gradients are this
            rank's, and the engine reduces them no more.
        dropped: names of the parameters whose gradient was dropped since a backward has begun.
        finished: how often gradients were made final.
        loop: the call of ``leaves()`` whose gradients are not complete.
    """

    def __init__(self, name: str, transitions: Transitions) -> None:
        self._name = name
        self._transitions = transitions
        self._task: int | None = None  # the graph task of the pass that the stage comes from
        self.loop = ""
        self._in_loop = False  # not so behind a loop that was left early
        self.stage = Stage.IDLE
        self.silence = 0
        # Weak references, since a WeakSet's methods are Python functions.
        self.pending: set[weakref.ref[PendingGraph]] = set()
        self.local: set[str] = set()
        self.left: set[str] = set()
        self.dropped: set[str] = set()
        self.finished = 0

    # ------------------------------------------------------------------------------------------ forward and backward

    def await_backward(self, graph: PendingGraph) -> None:
        """Note a forward with gradients."""
        self.pending.add(weakref.ref(graph, self.pending.discard))
        if self.stage is not Stage.DERIVED:
            self.stage = Stage.PENDING

    def move(self, stage: Stage) -> None:
        """Begin a pass through the graph.

        Raises:
            ModelError: the engine does not allow it in this stage.
        """
        task = current_graph_task_id()
        if stage not in self._transitions[self.stage] and task != self._task:
            raise ModelError(
                "a second backward() since the last forward (torch.autograd.grad without retain_graph=True counts): "
                f"backend {self._name!r} has freed the weights by then. Add the losses and call backward() once, or "
                "use backend='fsdp2' or 'fairscale'"
            )
        self.stage = stage
        self._task = task

    def begin_backward(self, graph: PendingGraph, names: Iterable[str]) -> None:
        """Note that the backward of a forward begins, and whose gradients it leaves local; or it reduces all of them.

        Raises:
            ModelError: one of both is within ``no_sync()``, and the other is not.
        """
        if (self.silence > 0) != graph.was_silent:
            raise ModelError(
                "a forward and its backward must both be inside no_sync(), or both outside of it: some engines "
                "decide at the one, some at the other"
            )
        self.pending.discard(weakref.ref(graph))
        self.dropped.clear()
        if graph.was_silent:
            self.local.update(names)
        else:
            self.local.clear()

    @property
    def is_silent(self) -> bool:
        """Tell whether this is within ``no_sync()``."""
        return self.silence > 0

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Context that counts as a ``no_sync()``."""
        self.silence += 1
        try:
            yield
        finally:
            self.silence -= 1

    # ------------------------------------------------------------------------------------------ gradients

    def has_local(self, names: Iterable[str]) -> bool:
        """Return whether a gradient of these parameters is this rank's own."""
        return bool(self.local) and not self.local.isdisjoint(names)

    def check_reduced(self, names: Iterable[str]) -> None:
        """Raise OptimizerError if a gradient is this rank's own."""
        if self.has_local(names):
            raise OptimizerError(
                "the gradients are local: every backward since the last step ran under no_sync(); run the last "
                "micro-batch outside of it (also in an incomplete last round of accumulation)"
            )

    # ------------------------------------------------------------------------------------------ loops over leaves

    @contextlib.contextmanager
    def leaves(self, call: str) -> Iterator[None]:
        """Context of a loop over leaves; gradients are complete when it ends without an error."""
        self.loop = call
        self._in_loop = True
        try:
            yield
        finally:
            self._in_loop = False
        self.loop = ""

    def check_complete(self, what: str) -> None:
        """Raise OptimizerError while a loop over leaves has not come to its end."""
        if self.loop:
            raise OptimizerError(
                f"{what} within `for leaf in {self.loop}`, or behind a loop that was left early: its gradients are "
                "not complete; let the loop end first, or drop them with optimizer.zero_grad()"
            )

    def refuse_means(self, what: str) -> None:
        """Raise ModelError within a loop for what is a mean over ranks, each of which has another leaf at that time."""
        if self._in_loop:
            raise ModelError(
                f"{what} within `for leaf in {self.loop}` would be a mean over one leaf of each rank, and so depend "
                "on the number of ranks; compute it before the loop, on a batch that is the same for all ranks"
            )

    def drop_gradients(self, names: Iterable[str]) -> None:
        """Forget what is known of gradients that are dropped; raise OptimizerError within a loop over leaves."""
        if self._in_loop:
            raise OptimizerError(
                f"zero_grad() within `for leaf in {self.loop}` would drop gradients of this step; call it before or "
                "after the loop"
            )
        self.loop = ""
        self.local.difference_update(names)
