"""What all parts of a backend have in common: facts about the engine, and what it holds of one model."""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC
from collections.abc import Callable
from typing import ClassVar, Literal

from torch import Tensor, nn

from fsshard.backends.facts import Summary, Tunable
from fsshard.backends.partial_state_guards import PartsGuard
from fsshard.backends.settings import Settings
from fsshard.launching.hang_diagnosis import EngineFrames
from fsshard.planning.entries import Entry

__all__ = ["Divides", "EngineState"]

Divides = Literal["nothing", "elements", "owners"]


class EngineState(ABC):
    """What the parts of a backend share.

    Attributes:
        module: the user's model, complex parameters stored as pairs of reals.
        settings: what ``wrap`` was asked for.
        entries: the distinct parameters by name; ``all`` is the list of them.
        pending: the hooks on the outputs of forwards with gradients that await their backward.
        drops: names of the parameters whose gradient was dropped since a backward has begun.
        guard: refuses state dicts of a module that holds parts of parameters; None where it holds all.
        follower: a weak reference to the method that makes the context of ``relocating_storage``, or None.
    """

    name: ClassVar[str]
    divides: ClassVar[Divides] = "nothing"
    """What ranks divide among them.

    * ``"nothing"``: replicas.
    * ``"elements"``: of each parameter, its gradient and optimizer state. 0-dim parameters are stored as vectors
      ("fully_shard doesn't support scalar parameters"), gradients cannot be sparse ("reshape is not implemented for
      sparse tensors"), and a forward's graph has gathered tensors in it, not the parameters (torch 2.13).
    * ``"owners"``: each parameter has one rank that keeps its gradient and optimizer state, with an optimizer of the
      engine's own.
    """
    one_process: ClassVar[bool] = False  # a job of its own on one process; several ranks are trained as one
    is_reference: ClassVar[bool] = False  # adds as torch itself does: parity may hold others against it
    strategies: ClassVar[tuple[str, ...]] = ()
    option_names: ClassVar[tuple[str, ...]] = ()
    stores_contiguous: ClassVar[bool] = False  # the engine holds contiguous parameters only, or permutes others
    needs_whole: ClassVar[frozenset[str]] = frozenset()  # methods of user models that cannot work on parts
    marks_unit_inputs: ClassVar[bool] = False  # the engine itself puts an autograd node at the inputs of each unit
    has_dtensors: ClassVar[bool] = False  # parts are DTensors, which torch.distributed.checkpoint knows
    hooks_outputs: ClassVar[bool] = False  # the engine learns of a backward by the outputs of the forward
    wrapper_classes: ClassVar[frozenset[str]] = frozenset()  # names of classes of modules that are wrapped already
    tunable: ClassVar[Tunable] = Tunable()  # what a search may try
    summary: ClassVar[Summary | None] = None  # its row in the README's table; only ours are there
    frames: ClassVar[EngineFrames] = EngineFrames()  # how the engine is told on the stack of a rank that hangs

    module: nn.Module
    settings: Settings
    entries: dict[str, Entry]
    all: list[Entry]
    pending: weakref.WeakSet[Callable[[Tensor], None]]
    drops: set[str]
    guard: PartsGuard | None
    follower: weakref.WeakMethod[Callable[[], contextlib.AbstractContextManager[None]]] | None

    @classmethod
    def keeps_grad_dtype(cls) -> bool:
        """Whether gradients of real parameters have the dtype that ``Tensor.grad_dtype`` asks for."""
        return False
