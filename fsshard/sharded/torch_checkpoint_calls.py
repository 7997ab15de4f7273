"""What ``torch.distributed.checkpoint.state_dict`` asks of an optimizer, answered in names and whole tensors.

``get_state_dict(model, optimizer)`` and its kin find parameters by identity, and their names by their numbers. A
:class:`~fsshard.sharded.optimizer.ShardedOptimizer` has names from the start.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fsshard.backends.whole import HAS_BEGUN, states_at_rest


class ByName(dict[str, Any]):
    """A dict of a state dict, by names or with names in it, into which a parameter's number may be written as well.

    ``get_optimizer_state_dict`` (torch 2.13) replaces each number in a state dict by the parameter's name. Of a state
    dict that has names it replaces these by numbers, by the same table. Written here, a number becomes the name again.
    """

    names: Sequence[str] = ()
    """The parameters' names in the order of all groups: torch numbers them so."""

    def __setitem__(self, key: str | int, value: Any) -> None:
        if isinstance(key, int):
            key = self.names[key]
        # A group's, and not the state of a parameter of that name.
        if key == "params" and isinstance(value, list):
            value = [self.names[each] if isinstance(each, int) else each for each in value]
        super().__setitem__(key, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be copied and pickled as a dict that ``torch.load(weights_only=True)`` reads."""
        return OrderedDict, (), None, None, iter(self.items())


def by_name(content: Mapping[str, Any], names: Sequence[str]) -> ByName:
    """Return a :class:`ByName` with this content."""
    made = ByName(content)
    made.names = names
    return made


class StateOfParameters(UserDict[Tensor, Any]):
    """The states of an optimizer by the engine's parameters, whenever it is looked at: in steps they lie elsewhere."""

    def __init__(self, optimizer: Any) -> None:
        # A ShardedOptimizer.
        self._optimizer = optimizer

    @property
    def data(self) -> Any:  # type: ignore[override]
        """Return what there is now."""
        return states_at_rest(self._optimizer.inner)

    def __bool__(self) -> bool:
        """Return whether the ranks have state; one that keeps none of any parameter goes by what was done."""
        # Where there is none, torch makes a step with gradients of zero, which is collective: all ranks, or no rank.
        optimizer = self._optimizer
        if len(self.data) > 0:
            return True
        return HAS_BEGUN in vars(optimizer.inner) and not any(map(optimizer.keeps_state_of, optimizer.entries))

    def __missing__(self, parameter: Tensor) -> Any:
        # An empty one, as in torch.
        return self.data[parameter]

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """Return a state, or ``default``; makes none."""
        return self.data.get(parameter, default)

    def copy(self) -> Any:
        """Return a dict of the states as they are now; so do functions of ``copy`` and ``pickle``."""
        return dict(self.data)

    __copy__ = copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)
