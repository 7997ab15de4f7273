"""Follow which gradients DDP's reducer waits for, and which have arrived.

From a synchronised forward on, DDP reduces what is added to the parameters' gradients, in whichever graph task, until
every parameter has had its own; then it is done until the next forward (torch 2.13). Two things follow, silently:

* what is added afterwards stays this rank's: a second backward over the same forward, or one of a forward that did not
  go through the wrapper. It raises here;
* a backward that does not reach every parameter leaves gradients that were not sent: of a gradient penalty none reaches
  the last layer's bias. The rest is sent here, as zeros, before anybody looks.

``torch.autograd.grad`` adds to no gradient, and is neither.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from fsshard.backends.base import taking_gradients
from fsshard.errors import ModelError, OptimizerError
from fsshard.torch_private.autograd import current_graph_task_id, queue_callback

# By parameter: as an attribute of it torch.save would pickle them.
_replicated: Any = WeakTensorKeyDictionary()


class ReplicatedModel:
    """The copies that the ranks hold of one model, which DDP averages the gradients of.

    Attributes:
        backend: the backend, or None once the model is gone.
        called: a forward has gone through what ``wrap`` returned.
    """

    def __init__(self, backend: Any) -> None:
        self.backend, self.called = weakref.ref(backend), False
        _replicated.update((entry.parameter, self) for entry in backend.entries.values())

    @staticmethod
    def forget(parameters: Iterable[nn.Parameter]) -> None:
        """Forget parameters that are the user's alone again."""
        for parameter in parameters:
            _replicated.pop(parameter, None)


def check_step(optimizer: Optimizer) -> None:
    """Look whether an optimizer that is about to step would step each rank's own gradients.

    Raises:
        OptimizerError: a backward runs, and DDP sends its gradients when all have arrived.
    """
    in_backward = current_graph_task_id() >= 0
    firsts = (group["params"][0] for group in optimizer.param_groups if group["params"])
    for replicated in filter(None, map(_replicated.get, firsts)):
        if in_backward and replicated.backend() is not None:
            raise OptimizerError(
                "an optimizer steps while a backward runs, as in a hook of register_post_accumulate_grad_hook: backend "
                "'ddp' has not averaged the gradients by then, and each rank would step its own. Call "
                "optimizer.step() after loss.backward(), or use backend='fsdp2' and register the hooks on "
                "model.parameters() after fsshard.wrap: there the gradients are averaged before hooks are called"
            )
        if not replicated.called:
            replicated.called = True
            warnings.warn(
                "an optimizer steps the parameters of a model that was given to fsshard.wrap(..., backend='ddp'), but "
                "no forward has gone through what wrap returned: gradients are not averaged, and each rank trains "
                "alone. Keep what it returns, and call that: model = fsshard.wrap(model, backend='ddp')",
                stacklevel=4,
            )


class Arrivals:
    """Follows the reducer of one DDP wrapper.

    Args:
        engine: the DDP wrapper.
        names: its trainable parameters and their names.

    Attributes:
        expecting: the reducer will send what arrives now.
        arrived: the ids of the parameters whose gradients it was given in backwards that have ended since the forward.
        unreached: names of the parameters that the latest backward has not reached.
    """

    def __init__(self, engine: Any, names: Mapping[nn.Parameter, str]) -> None:
        self._engine = engine
        self._names = names
        self.expecting = False
        self.unreached: set[str] = set()
        # By id, since a tensor's hash takes a microsecond.
        self.arrived: set[int] = set()
        self._has_strayed = False
        # The graph task of the backward whose beginning was seen, while it runs.
        self._task: int | None = None
        # What has come in the backward that runs, to be counted when it ends; if nobody has seen it begin, since it is
        # of no output of the wrapper, when somebody looks.
        self._came: list[nn.Parameter] = []
        # Not a function of ours, a call for each gradient of a step. And the list holds parameters in a backward only:
        # the collector cannot see through a parameter's hooks while C++ (DDP's reducer) holds the parameter, and the
        # model, its engine and its process group with its threads would live forever (torch 2.13).
        note = self._came.append
        hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in names]
        # The user's module may be trained on without a wrapper.
        self._unhook = weakref.finalize(self, _remove, hooks)
        self._unhook.atexit = False

    def detach(self) -> None:
        """Another wrapper takes over."""
        self._unhook()

    @property
    def strayed(self) -> bool:
        """Gradients have arrived that the reducer has not sent, and sends with the next ones only."""
        self._count_unseen()
        return self._has_strayed

    def forward_begins(self, *, awaits_backward: bool) -> None:
        """Called when a forward with gradients begins. Collective where something is left to send.

        Args:
            awaits_backward: the graph of an earlier forward is there still.
        """
        # Where it was dropped, the reducer waits for its gradients, and would send what comes under no_sync().
        drops = not awaits_backward and not self._engine.require_backward_grad_sync
        self._send_the_rest(even_all=drops)
        # A forward of a recomputed block is within a backward.
        if current_graph_task_id() < 0:
            self._task = None  # of one that has raised
            self._came.clear()
        if self._engine.require_backward_grad_sync:
            self.expecting = True
            self.arrived.clear()
            self.unreached.clear()
            self._came.clear()  # the reducer begins anew

    def backward_starts(self) -> None:
        """Called when a backward through such a forward's output begins (in its graph task)."""
        task = current_graph_task_id()
        if self._task != task:
            if self._came:
                self._count_unseen()
            self._task = task
            queue_callback(self._end)

    def finish(self) -> None:
        """Send what is left. Collective where there is something.

        Raises:
            OptimizerError: gradients have arrived that nobody sends.
        """
        self._send_the_rest()
        if self._has_strayed and self._engine.process_group.size() > 1:
            raise OptimizerError(
                "gradients came from a forward that did not go through the wrapped model (model.module(x), or a method "
                "of it), and were not reduced; call model(x). Or every backward since the last step ran under "
                "no_sync(): run the last one outside of it"
            )

    def drop(self) -> None:
        """Called when gradients are dropped: none is left that nobody sends."""
        if self._came:
            self._count_unseen()
        self._has_strayed = False

    def _count_unseen(self) -> None:
        """Count what has come in backwards that nobody has seen begin."""
        if self._came and self._task is None:
            self._count(of_output=False)

    def _end(self) -> None:
        """Count what has come in a backward that has ended, and has not raised."""
        self._task = None
        self._count(of_output=True)

    def _count(self, *, of_output: bool) -> None:
        """Count what has come.

        Args:
            of_output: the backward began at what a forward through the wrapper has returned.

        Raises:
            ModelError: the reducer was done by then, so that this stays the rank's own.
        """
        came = set(map(id, self._came))
        count = len(self._came) + len(self.arrived)
        self._came.clear()
        if self.expecting:
            self.arrived |= came
            again = len(self.arrived) < count and not self._engine.static_graph
        else:
            again = bool(came) and of_output and self._engine.require_backward_grad_sync
            # It stays local until the next reduction, which sends it, too.
            self._has_strayed |= bool(came)
        if again:
            raise ModelError(
                "a second backward() since the last forward, which backend 'ddp' does not reduce: add the losses and "
                "call backward() once, or use backend='fsdp2' or 'fairscale'"
            )
        if self.expecting and len(self.arrived) == len(self._names):
            self.expecting = self._has_strayed = False

    def _send_the_rest(self, *, even_all: bool = False) -> None:
        if self._came:
            self._count_unseen()
        if not (self.expecting and (self.arrived or even_all)) or self._task is not None:
            # Nothing was sent; or the backward has raised, and DDP's next forward says so.
            return
        missing = [parameter for parameter in self._names if id(parameter) not in self.arrived]
        self.unreached = {self._names[parameter] for parameter in missing}
        if self._engine.find_unused_parameters or self._engine.static_graph:
            # DDP waits for those alone that the forward has used, and says so in its next forward.
            self.expecting = self._has_strayed = False
            return
        # What was None stays None; and where nothing has come, local gradients of no_sync() stay what they are.
        kept: dict[nn.Parameter, Tensor | None] = {}
        for parameter in self._names:
            if parameter.grad is None:
                kept[parameter] = None
            elif not self.arrived:
                kept[parameter] = parameter.grad.clone()
        # Zeros for what is missing let the reducer send everything.
        with taking_gradients(missing):  # frozen since the forward
            torch.autograd.backward(missing, list(map(torch.zeros_like, missing)))
        self._count_unseen()
        for parameter, gradient in kept.items():
            parameter.grad = gradient


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
