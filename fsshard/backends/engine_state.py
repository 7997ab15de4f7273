"""What all parts of a backend have in common: facts about the engine, and what it holds of one model."""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from fsshard.backends.facts import Summary, Tunable
from fsshard.backends.partial_state_guards import PartsGuard
from fsshard.backends.settings import Settings
from fsshard.launching.hang_diagnosis import EngineFrames
from fsshard.planning.entries import Entry

__all__ = ["EngineState"]


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
    one_process: ClassVar[bool] = False  # a job of its own on one process; several ranks are trained as one
    is_reference: ClassVar[bool] = False  # adds as torch itself does: parity may hold others against it
    strategies: ClassVar[tuple[str, ...]] = ()
    option_names: ClassVar[tuple[str, ...]] = ()
    stores_scalars_as_vectors: ClassVar[bool] = False  # the engine refuses 0-dim parameters
    stores_contiguous: ClassVar[bool] = False  # the engine holds contiguous parameters only, or permutes others
    shards_within_parameters: ClassVar[bool] = False  # a rank can hold a part of a parameter
    partitions_optimizer: ClassVar[bool] = False  # a rank's optimizer sees other numbers than another rank's
    needs_whole: ClassVar[frozenset[str]] = frozenset()  # methods of user models that cannot work on parts
    marks_unit_inputs: ClassVar[bool] = False  # the engine itself puts an autograd node at the inputs of each unit
    takes_sparse_gradients: ClassVar[bool] = True  # of embeddings, in float32
    has_dtensors: ClassVar[bool] = False  # parts are DTensors, which torch.distributed.checkpoint knows
    differentiates_parameters: ClassVar[bool] = True  # its parameters themselves are in the graph of a forward
    hooks_outputs: ClassVar[bool] = False  # the engine learns of a backward by the outputs of the forward
    owns_optimizer: ClassVar[bool] = False  # a plain torch optimizer over the engine's parameters would be wrong
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
