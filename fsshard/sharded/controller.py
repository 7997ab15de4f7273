"""ModelController: what a wrapped model keeps and does behind the names that its user sees.

A ShardedModule forwards every name to the user's model. So its own state may not lie among its attributes: a model with
a ``self.scaled`` or a ``simulate()`` of its own would lose it. All of it is here, in the wrapper's one private slot.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.backends.base import Backend
from fsshard.backends.forward_guards import DerivativesGuard, LooksAtForwards
from fsshard.backends.step_counts import StepCounts
from fsshard.backends.step_state import PendingGraph, Stage
from fsshard.backends.whole import owned
from fsshard.comm.stores import check_not_inherited
from fsshard.comm.watchdog import lost_ranks, speaks_of_a_lost_rank
from fsshard.complex_params.parameter_records import record_of
from fsshard.complex_params.replaced import attributes_of
from fsshard.complex_params.shown import stored_of
from fsshard.errors import ConfigurationError, FsshardError, OptimizerError
from fsshard.model.meta import no_numbers_yet
from fsshard.model.outputs import bases, check_output, forward_begins, hidden_tensors
from fsshard.nested import grad_tensors
from fsshard.parallel.replicas import SameGradients
from fsshard.parallel.shared_gradients import SharedGradients
from fsshard.planning.entries import Entry
from fsshard.sharded.contents import ModelBuffers, check_same_parameters
from fsshard.sharded.forward_methods import explain_forward_error
from fsshard.sharded.grad_norm import norm_of
from fsshard.sharded.gradient_leaves import LeafLoops
from fsshard.sharded.parameters import ParameterViews
from fsshard.sharded.same_inputs import SameInputs
from fsshard.torch_private.autograd import current_graph_task_id


def controller_of(model: Any) -> ModelController:
    """Return what a ShardedModule keeps behind its user's names."""
    controller: ModelController = vars(model)["_fsshard"]
    return controller


class ModelController:
    """The state of one wrapped model, and what its training does with it.

    Attributes:
        backend: the engine's.
        buffers: the model's buffers, rank 0's on every rank.
        whole: the user's whole tensors by name within ``full_parameters()``, else None.
        scaled: whether a GradScaler was made for the model.
        step: the state of the training step, which the engine reads, too.
        step_counts: compares between ranks how many steps each optimizer took.
        optimizers: those that were built over the model and are still used.
        requested_state_dict: the config that torch's ``FSDP.state_dict_type`` was given.
        leaf_loops: loops over the micro-batches of a step, of ``model.leaves``.
    """

    def __init__(self, backend: Backend, *, broadcast_buffers: bool, buffer_dtypes: Mapping[str, torch.dtype]) -> None:
        settings = backend.settings
        self.backend = backend
        self.buffers = ModelBuffers(backend, broadcast_buffers, buffer_dtypes)
        self.whole: dict[str, Tensor] | None = None
        self.scaled = False
        self.step = backend.step
        self.step_counts = StepCounts(settings.group, settings.device)
        self.optimizers = weakref.WeakSet[Any]()
        self.requested_state_dict: Any = None
        self.leaf_loops = LeafLoops(weakref.proxy(self))
        # Names of what has memory and no values yet, of a model from the meta device.
        self._unfilled: set[str] = set() if settings.source is None else settings.source.unfilled
        # The engine's no_sync, while any is open.
        self._engine_silence = contextlib.ExitStack()
        # A no_sync, while require_backward_grad_sync is False.
        self._without_grad_sync = contextlib.ExitStack()
        # What require_backward_grad_sync was set to.
        self._synchronises = True
        self._looks = LooksAtForwards()
        # Hooks on what autograd adds gradients to, by identity.
        self._weighed: dict[int, Any] = {}
        self._same_inputs = SameInputs(backend)
        self._views = ParameterViews(backend)
        shared = SharedGradients(backend.all, partial(owned, backend), settings.device)
        self._shared_gradients = shared if shared.parts else None
        self._same_gradients: SameGradients | None = None
        if settings.model_mesh is not None:
            norm = partial(norm_of, backend, norm_type=2.0)
            self._same_gradients = SameGradients(backend.all, settings.model_mesh, lambda entry: norm([entry]))
        backend.on_move = weakref.WeakMethod(self._views.moving)

    # ------------------------------------------------------------------------------------------ forward

    def forward(self, args: Any, kwargs: Any) -> Any:
        """Run the user's forward under the engine."""
        if self.whole is not None:
            raise FsshardError(
                "model(...): expected a call outside of full_parameters(), got one inside; leave that context first"
            )
        looked_at = self._looks.begin()
        if looked_at or self._unfilled:
            self.check_filled()
        backend = self.backend
        training = backend.module.training
        divided = backend.facts.divides == "elements"
        group = backend.settings.group
        if group is not None and (training or torch.is_grad_enabled() or divided):
            # Without gradients, too: DDP's second forward is collective.
            check_not_inherited(group, "the forward of a wrapped model")
        try:
            # All ranks run as many forwards with gradients, and compare in the same ones. A count that is behind stays
            # behind, so that nothing is missed in between.
            if divided and looked_at and torch.is_grad_enabled():
                self.step_counts.compare()
            if looked_at and training and torch.is_grad_enabled() and backend.rank_weight is None:
                self._same_inputs.look((args, kwargs))
            backend.before_forward(training=training)
            self.buffers.sync(then_differ=training or self.buffers.are_trained())
            if backend.engine.training != training:
                # Some frameworks set the mode of the inner module only.
                backend.engine.training = training
            since = forward_begins()
            # What users compile would be compiled twice for the guard.
            if looked_at and backend.facts.has_dtensors and backend.settings.compilation is None:
                with DerivativesGuard():
                    output = self._run(args, kwargs)
            else:
                output = self._run(args, kwargs)
        except RuntimeError as error:
            if group is None or not speaks_of_a_lost_rank(error):
                raise
            raise lost_ranks(group, error, "the forward of a wrapped model") from error
        if torch.is_grad_enabled():
            if backend.rank_weight is not None:
                self._weigh_leaves()
            self._watch_backward(output, since)
        return output

    def _run(self, args: Any, kwargs: Any) -> Any:
        # A forward without gradients changes nothing of what awaits its backward.
        stage = self.step.stage
        self.step.stage = Stage.FORWARD
        try:
            if not torch.is_inference_mode_enabled():
                output = self.backend.engine(*args, **kwargs)
            else:
                # What engines allocate in the first forward they keep; made in inference mode, it could never be
                # trained.
                with torch.inference_mode(False), torch.no_grad():
                    output = self.backend.engine(*args, **kwargs)
        except BaseException as error:
            self.step.stage = stage
            self.backend.forward_failed()
            clearer = explain_forward_error(error, self.backend)
            if clearer is None:
                raise
            raise clearer from error
        self.step.stage = stage
        return output

    @property
    def runs_user_code(self) -> bool:
        """Return whether the user's code sees whole weights: in a forward, its recomputation, full_parameters()."""
        return self.step.stage is Stage.FORWARD or self.whole is not None or current_graph_task_id() != -1

    def check_filled(self) -> None:
        """Raise while anything of a model from the meta device has memory and no values, or is not what was wrapped.

        Raises:
            ModelError: names it, and says where its values can come from; or what was added, replaced or removed.
        """
        if self.whole is None:
            check_same_parameters(self.backend)
            self.buffers.look_again()
        if self._unfilled:
            raise no_numbers_yet(self._unfilled, {*self.backend.key_order, *self.backend.entries})

    def note_filled(self, names: Iterable[str]) -> None:
        """Remember that these parameters and buffers of a model from the meta device have their values now."""
        self._unfilled -= set(names)

    # ------------------------------------------------------------------------------------------ backward

    def _watch_backward(self, output: Any, since: int) -> None:
        """Learn when the backward of this forward starts, and whether its gradients will be reduced."""
        graph = PendingGraph()
        graph.was_silent = self.step.silence > 0
        # Not a function that knows itself: only the collector would end it, long after a graph that was dropped.
        hook = partial(self._backward_starts, graph)
        outputs = grad_tensors(output)
        if not isinstance(output, Tensor):
            if self.backend.facts.hooks_outputs:
                check_output(output)
            outputs += hidden_tensors(output, since)
        for tensor in outputs + bases(outputs, since):
            tensor.register_hook(hook)
        self.step.await_backward(graph)

    def _backward_starts(self, graph: PendingGraph, _: Tensor) -> None:
        task = current_graph_task_id()
        if task == graph.task:
            # Another output has said so, or what this one is a view of.
            return
        graph.task = task
        if not self.backend.accumulates():
            # A penalty's inner derivative: there is nothing to reduce.
            self.backend.derivative_starts()
            if torch.is_grad_enabled():
                # The backward of a loss of derivatives alone does not come through here.
                self.step.local.clear()
                if self.step.is_silent:
                    self.step.local.update(self.backend.entries)
            return
        self.step.begin_backward(graph, self.backend.entries)
        self.backend.backward_starts(synchronised=not graph.was_silent)
        if self._shared_gradients is not None:
            self._shared_gradients.backward_starts()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward accumulates local gradients."""
        # Engines take their contexts to end in the reverse order; with require_backward_grad_sync they need not.
        if not self.step.is_silent:
            self._engine_silence.enter_context(self.backend.no_sync())
        try:
            with self.step.silenced():
                yield
        finally:
            if not self.step.is_silent:
                self._engine_silence.close()

    @property
    def synchronises(self) -> bool:
        """Return what ``require_backward_grad_sync`` was set to."""
        return self._synchronises

    @synchronises.setter
    def synchronises(self, value: bool) -> None:
        if value == self._synchronises:
            return
        self._synchronises = value
        self._without_grad_sync.close()
        if not value:
            self._without_grad_sync.enter_context(self.no_sync())

    def weigh_gradients(self, weight: float | None) -> None:
        """Multiply what each backward from now on adds to this rank's gradients; None takes that back."""
        self.backend.rank_weight = weight
        if weight is None:
            for handle in self._weighed.values():
                handle.remove()
            self._weighed = {}

    def _weigh_leaves(self) -> None:
        """Hook what autograd adds gradients to, which under FSDP2 is there only once it was gathered."""

        def weighed(gradient: Tensor) -> Tensor | None:
            weight = self.backend.rank_weight
            if weight is None:
                return None
            if weight == 0:
                # Not a product: NaN of a batch that does not count must reach nobody.
                return torch.zeros_like(gradient)
            return gradient * weight

        for leaf in self.backend.leaves():
            if id(leaf) not in self._weighed:
                self._weighed[id(leaf)] = leaf.register_hook(weighed)

    # ------------------------------------------------------------------------------------------ gradients

    def zero_grad(self, entries: Iterable[Entry], *, set_to_none: bool) -> None:
        """Drop the gradients of ``entries``, or zero them."""
        entries = list(entries)
        self.backend.zero_grad(entries, set_to_none=set_to_none)
        self.step.drop_gradients([entry.name for entry in entries] if self.step.local else ())

    def finish_gradients(self, entries: Iterable[Entry]) -> None:
        """Make the gradients of ``entries`` final. Collective.

        Raises:
            OptimizerError: every backward pass since they were dropped ran under :meth:`no_sync`.
        """
        if self.step.loop:
            self.step.check_complete("a step or a norm of gradients")
        self.finish_backward(entries)

    def finish_backward(self, entries: Iterable[Entry]) -> None:
        """Make gradients final, those within a loop over leaves, too. Collective."""
        entries = list(entries)
        if self.step.local:
            self.step.check_reduced([entry.name for entry in entries])
        self.backend.finish_backward(entries)
        if self._shared_gradients is not None:
            self._shared_gradients.finish(entries)
        if self._same_gradients is not None:
            self._same_gradients.check(entries)

    def norm_of(self, entries: Iterable[Entry], norm_type: float) -> Tensor:
        """Return the norm of final gradients of ``entries`` as in ``clip_grad_norm_``. Collective."""
        return norm_of(self.backend, entries, norm_type)

    def check_knows_all_ranks(self, what: str) -> None:
        """Raise for the call ``what`` where other ranks may have parts of the model, of which ``wrap`` was not told."""
        settings = self.backend.settings
        if not settings.knows_all_ranks:
            raise ConfigurationError(
                f"{what}: device_mesh has {settings.world_size} of {dist.get_world_size()} ranks, and wrap was not "
                "told what the others do. If they hold parts of this model, or share parameters with it, say which: "
                "fsshard.wrap(..., replicated={...}, sharded={...}); if they do neither, since they do the same "
                "work or train a model of their own, say that: replicated={}"
            )

    def simulate(self) -> None:
        """Switch to simulation: do not read what ranks would tell each other of gradients."""
        self.backend.simulate()
        self.buffers.simulate()
        if self._shared_gradients is not None:
            self._shared_gradients.simulate()
        self._same_gradients = None

    # ------------------------------------------------------------------------------------------ parameters

    def shown(self, entry: Entry) -> nn.Parameter:
        """Return the parameter as its user sees it now."""
        if self.whole is None:
            return self._views.show(entry)
        whole = nn.Parameter(self.whole[entry.name], requires_grad=entry.parameter.requires_grad)
        whole.__dict__.update(attributes_of(entry.parameter))
        return whole

    def find_entry(self, item: Any) -> Entry:
        """Return the entry for a name, a parameter or view of this model, or a (name, parameter) pair."""
        if isinstance(item, tuple) and len(item) == 2:
            item = item[0]
        entry = self._entry_of.get(item if isinstance(item, str) else id(stored_of(item)))
        if entry is not None:
            return entry
        if isinstance(item, str):
            raise OptimizerError(f"expected the name of a parameter of this model, got {item!r}")
        if not isinstance(item, Tensor):
            raise OptimizerError(f"expected a parameter of this model or its name, got a {type(item).__name__}")
        if record_of(item).is_stale:
            raise OptimizerError(record_of(item).refusal)
        raise OptimizerError(
            f"expected parameters of this model, got one of shape {tuple(item.shape)} that is not the model's; make "
            "the module that owns it (a loss, a second network) a part of the model before fsshard.wrap, or wrap it by "
            "itself and build an optimizer of its own"
        )

    @functools.cached_property
    def _entry_of(self) -> dict[str | int, Entry]:
        """The entries by all names of theirs and by their parameters: a search for each took the square of the time."""
        entries: dict[int | str, Entry] = {}
        for entry in self.backend.all:
            entries[id(entry.parameter)] = entry
            for slot in entry.slots:
                entries[slot.name] = entry
        return entries
