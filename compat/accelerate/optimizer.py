"""What ``prepare`` gives for an optimizer."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from fsshard.errors import ConfigurationError
from fsshard.sharded.optimizer import ShardedOptimizer

from ..native_state import by_name, by_number

__all__ = ["PreparedOptimizer"]


class PreparedOptimizer(AcceleratedOptimizer):
    """Accelerate's, whose steps wait for gradients, over one of :func:`fsshard.wrap`.

    Attributes:
        held: its state while files are written, so that writing needs no other rank; None at other times.
    """

    def __init__(self, optimizer: ShardedOptimizer, scaler: Any) -> None:
        # Placing would send its state once around.
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self.held: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return a torch optimizer's state, with whole tensors and a number for each parameter. Collective."""
        return by_number(self.optimizer) if self.held is None else self.held

    def load_state_dict(self, state_dict: Any) -> None:
        """Take a torch optimizer's, or one by name. Collective.

        Raises:
            StateDictError: groups of other sizes, or state of another shape; nothing has changed.
        """
        self.optimizer.load_state_dict(by_name(state_dict, self.optimizer))

    def train(self) -> None:
        """Do nothing, as for most optimizers.

        Raises:
            ConfigurationError: its class switches weights, of which a rank may have parts.
        """
        self._refuse_modes("train")

    def eval(self) -> None:
        """Do nothing, or raise as :meth:`train`."""
        self._refuse_modes("eval")

    def _refuse_modes(self, name: str) -> None:
        kind = self.optimizer.optimizer_class
        if callable(getattr(kind, name, None)):
            raise ConfigurationError(
                f"{kind.__name__}.{name}() switches whole weights, which an engine keeps; use an optimizer without it"
            )
