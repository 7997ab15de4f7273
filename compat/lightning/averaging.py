"""Lightning's weight averaging over an engine: each rank averages what it holds of the weights, and sends nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import callbacks
from torch import Tensor, nn

from fsshard.errors import ConfigurationError
from fsshard.planning.entries import Entry
from fsshard.sharded.averages import numbers
from fsshard.sharded.module import ShardedModule

from ..trainers import State

# The base of EMAWeightAveraging, since Lightning 2.5.6.
AVERAGING: Any = getattr(callbacks, "WeightAveraging", ())


class Parts(nn.Module):
    """This rank's shards of a module's parameters, and its buffers: Lightning's callback averages any module.

    Attributes:
        of: the user's module.
    """

    of: Any

    def __init__(
        self,
        of: Any,
        parts: Iterable[Tensor],
        buffers: Iterable[Tensor],
    ) -> None:
        super().__init__()
        # The module is no part of this one.
        self.__dict__["of"] = of
        self.parts = nn.ParameterList([nn.Parameter(part, requires_grad=False) for part in parts])
        for number, buffer in enumerate(buffers):
            self.register_buffer(f"buffer{number}", buffer)


def average_parts(
    callback: Any,
    sharded: Callable[[], ShardedModule | None],
    *,
    restored: bool,
) -> None:
    """Cut a callback's whole average into shards, and let it read, and write, this rank's.

    Args:
        callback: a ``WeightAveraging`` whose ``setup`` has run, over a module that an engine has taken since.
        sharded: gives the wrapped module; None when the module has its weights again.
        restored: the average may be that of a checkpoint; else it starts from the model's weights, which are rank 0's.
    """
    average = callback._average_model
    model = sharded()
    if average is None or model is None:
        return
    if isinstance(average.module, Parts) or average.module is model.module:
        return
    # It may have been made in a fit() before.
    kind = getattr(type(callback), "users_kind", type(callback))
    bases = (OverParts,) if kind is AVERAGING else (kind, OverParts)
    callback.__class__ = type(kind.__name__, bases, {"sharded": staticmethod(sharded), "users_kind": kind})
    callback.copied = False
    parts, buffers = _memory(model)
    if restored:
        whole = dict(average.module.named_parameters(remove_duplicate=False))
        own = dict(average.module.named_buffers(remove_duplicate=False))
        parts = [_cut(entry, whole[entry.name].detach()) for entry in model.backend.all]
        buffers = [own[name] for name, _ in model.named_buffers()]
    device = average.n_averaged.device
    average.module = Parts(
        model.module,
        [part.detach().to(device, copy=True) for part in parts],
        [buffer.detach().to(device, copy=True) for buffer in buffers],
    )
    update = type(average).update_parameters.__get__(average)

    def update_parameters(module: Any) -> None:
        update(module if callback.engine(module) is None else _live(model))

    average.update_parameters = update_parameters


def _live(model: ShardedModule) -> Parts:
    """Return the model's own memory. Local."""
    return Parts(model.module, *_memory(model))


def _memory(model: ShardedModule) -> tuple[list[Tensor], list[Tensor]]:
    parts = [numbers(entry, entry.local()) for entry in model.backend.all]
    return parts, [buffer for _, buffer in model.named_buffers()]


def _cut(entry: Entry, whole: Tensor) -> Tensor:
    local = entry.local()
    stored = entry.kind.to_stored(entry.take_part(whole)).to(local.dtype)
    # As stored: a view may be permuted.
    part = entry.take(stored).reshape(local.shape).contiguous()
    return numbers(entry, part)


class OverParts(AVERAGING or object):  # type: ignore[misc]
    """A class between Lightning's base and the user's, whose average is this rank's shards during ``fit``."""

    sharded: Callable[[], ShardedModule | None]
    users_kind: type
    copied: bool
    """True once the average has become the model's weights, as the training ended."""
    _average_model: Any

    def engine(self, module: Any) -> ShardedModule | None:
        """Return the wrapped module; None where the average is whole: before ``wrap``, and after ``fit``.

        Raises:
            ConfigurationError: an engine still has the module that was trained, and this is another one.
        """
        average = self._average_model
        if average is None or not isinstance(average.module, Parts):
            return None
        if average.module.of is not module:
            name = type(self).__name__
            raise ConfigurationError(
                f"{name}: expected the module that fit() has trained, of which each rank averages its shards, got "
                f"another {type(module).__name__}; pass that one, or use a Trainer without {name}"
            )
        model = self.sharded()
        if model is None:  # another Trainer has given the module back
            average.module = module
        return model

    def _swap_models(self, module: Any) -> None:
        model = self.engine(module)
        if self._average_model.module is module:
            return
        super()._swap_models(module if model is None else _resharded(model))

    def _copy_average_to_current(self, module: Any) -> None:
        model = self.engine(module)
        super()._copy_average_to_current(module if model is None else _resharded(model))
        self.copied = True

    def whole(self, model: ShardedModule, **how: bool) -> State:
        """Return the average as the model's whole state dict. Collective.

        Args:
            model: the wrapped module, which has the average in place of its weights meanwhile.
            how: arguments of ``model.state_dict``.
        """
        AVERAGING._swap_models(self, _resharded(model))
        try:
            return model.state_dict(**how)
        finally:
            AVERAGING._swap_models(self, _resharded(model))

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        """Put the whole average into a checkpoint, under the keys of Lightning's own. Collective."""
        model = self.engine(module)
        average = self._average_model
        if average is None or (model is None and average.module is not module):
            super().on_save_checkpoint(trainer, module, checkpoint)
            return
        checkpoint["current_model_state"] = checkpoint["state_dict"]
        if model is not None:
            checkpoint["state_dict"] = self.whole(model, rank0_only=True, offload_to_cpu=True)
        checkpoint["averaging_state"] = {"n_averaged": average.n_averaged}

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        """Load the current weights into the wrapped module, which has the checkpoint's average already."""
        model = self.engine(module)
        average = self._average_model
        if model is None:
            # They are two objects again.
            if average is not None and average.module is module:
                average.module = copy.deepcopy(module)
            super().on_load_checkpoint(trainer, module, checkpoint)
            return
        AVERAGING._swap_models(self, _resharded(model))
        model.load_state_dict(checkpoint.get("current_model_state", checkpoint["state_dict"]))
        if "averaging_state" in checkpoint:
            average.n_averaged.copy_(checkpoint["averaging_state"]["n_averaged"])

    def ended(
        self,
        module: Any,
        average: State | None,
    ) -> None:
        """Make the average whole again, as the module is that has been handed back.

        Args:
            module: the user's, bare.
            average: from :meth:`whole`; None where the module's weights are the average: no rank keeps it twice.
        """
        if average is None:
            self._average_model.module = module
            return
        self._average_model.module = copy.deepcopy(module)
        self._average_model.module.load_state_dict(average)


def _resharded(model: ShardedModule) -> Parts:
    """Return the model's own memory, to be written: no gathered copy of it stays. Local."""
    model.backend.reshard()
    return _live(model)
