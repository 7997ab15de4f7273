"""Lightning's precision plugins over gradients that an engine divides."""

from __future__ import annotations

import contextlib
from typing import Any, Literal, NoReturn

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType

from fsshard.errors import ConfigurationError

from ..trainers import check_scaler

__all__ = ["Autocast", "plugin_for", "refuse_precision"]


class _Clips(Precision):
    """``"32-true"``: clips by the norm, or value by value, what the strategy's model has."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the final gradients, of all parameters. Collective."""
        if clip_val > 0:
            by_value = gradient_clip_algorithm == GradClipAlgorithmType.VALUE
            self.strategy.clip_gradients(float(clip_val), by_value=by_value)


class Autocast(_Clips, MixedPrecision):
    """``"bf16-mixed"`` and ``"16-mixed"``, the latter with one loss scale for all ranks."""

    def __init__(
        self, strategy: Any, precision: Literal["16-mixed", "bf16-mixed"], device: str, scaler: Any = None
    ) -> None:
        MixedPrecision.__init__(self, precision, device, scaler)
        self.strategy = strategy

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Step as Lightning does, which asks the optimizer whether it unscales: the scaler is that of all ranks."""
        with optimizer.under_scaler() if self.scaler is not None else contextlib.nullcontext():
            return super().optimizer_step(optimizer, model, closure, **kwargs)


def plugin_for(strategy: Any, asked: Any) -> Any:
    """Return ours for the plugin that the Trainer has made of ``precision=``.

    Raises:
        ConfigurationError: there is none, or none for its scaler.
    """
    if asked is None or type(asked) is Precision:
        return _Clips(strategy)
    if isinstance(asked, _Clips):
        return asked
    if type(asked) is MixedPrecision:
        check_scaler(asked.scaler)
        kind: Any = asked.precision
        return Autocast(strategy, kind, torch.device(asked.device).type, asked.scaler)
    refuse_precision(asked)


def refuse_precision(asked: Any) -> NoReturn:
    """Raise the error for a precision plugin, of the Trainer or of Fabric, that is not served."""
    raise ConfigurationError(
        f"precision plugin {type(asked).__name__}: fsshard's strategy takes precision='32-true', 'bf16-mixed' and "
        "'16-mixed'; for parameters in another dtype pass mixed_precision= to the strategy, which fsshard.wrap gets"
    )
