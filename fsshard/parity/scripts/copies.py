"""Finds what is as large as a model and is none, such as averages of its weights: modules, lists, dicts of tensors."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from fsshard.parity.scripts.facts import COPY, names_of

Shapes = list[Any]
Tensors = dict[str, Tensor]


def copies_of(models: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights and buffers of copies of the models."""
    search = _Search(models)
    if not any(search.copies()):
        return
    # What a script has dropped is no copy that it keeps.
    gc.collect()
    numbers: Counter[str] = Counter()
    for copy, tensors in [*search.copies()]:
        if id(copy) in search.modules:
            continue
        if isinstance(copy, nn.Module):
            # An average's own module is no further copy.
            search.add_modules(copy)
            tensors |= dict(copy.named_buffers())
        kind = type(copy).__name__
        numbers[kind] += 1
        prefix = f"{COPY} {numbers[kind]} of the weights in a {kind}"
        for name, value in tensors.items():
            yield f"{prefix}, {name}", value.detach()


class _Search:
    """A search of all objects of this process for those with tensors of the shapes of a model."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        # Ids of those that are no copies: the models', and what copies consist of.
        self.modules: set[int] = set()
        # Ids of tensors that are the models' own.
        self._own: set[int] = set()
        self._shapes: list[Shapes] = []
        for model in models:
            self.add_modules(model)
            parameters = [*model.parameters()]
            self._own.update(map(id, parameters))
            self._shapes.append(_shapes_of(parameters))
        for _, parameter in names_of(models):
            self._own.add(id(parameter.grad))

    def add_modules(self, model: nn.Module) -> None:
        """Leave out a model and the modules in it."""
        self.modules.update(map(id, model.modules()))

    def copies(self) -> Iterator[tuple[Any, Tensors]]:
        """Yield objects with their tensors by name."""
        kinds = {dict, list, *_subclasses(nn.Module)}
        # Most of a process's objects are dicts and lists, and few of those hold tensors.
        candidates = [one for one in gc.get_objects() if type(one) in kinds]
        for candidate in candidates:
            tensors = self._tensors_in(candidate)
            if tensors and self._is_copy(tensors):
                yield candidate, tensors

    def _tensors_in(self, candidate: Any) -> Tensors:
        """Return what a candidate holds by name; nothing if that begins with something else than a tensor."""
        if isinstance(candidate, nn.Module):
            if id(candidate) in self.modules:
                return {}
            return dict(candidate.named_parameters())
        if len(candidate) < 2:
            # That is too little to tell a copy from something else.
            return {}
        named = candidate
        if type(candidate) is list:
            if type(candidate[0]) is not Tensor:
                # Most lists are so, and some are long.
                return {}
            named = dict(enumerate(candidate))
        first = next(iter(named.values()))
        if type(first) is not Tensor:
            return {}
        return {str(name): value for name, value in named.items()}

    def _is_copy(self, tensors: Tensors) -> bool:
        for value in tensors.values():
            if type(value) not in (Tensor, nn.Parameter):
                return False
            if id(value) in self._own or value.is_meta:
                return False
        return _shapes_of(tensors.values()) in self._shapes


def _shapes_of(tensors: Iterable[Tensor]) -> Shapes:
    return [(one.shape, one.dtype) for one in tensors]


def _subclasses(kind: type) -> set[type]:
    """Return a class and all that inherit from it."""
    subclasses = set()
    classes = [kind]
    while classes:
        cls = classes.pop()
        if cls not in subclasses:
            subclasses.add(cls)
            classes += type.__subclasses__(cls)
    return subclasses
