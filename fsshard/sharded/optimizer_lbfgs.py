"""torch's L-BFGS where ranks have other samples, and parts of the weights: all of them take the same steps.

torch's own step and line search run on every rank, over its part of each long vector. Their inner products, norms and
losses are those of all ranks, so that every rank decides alike. Start at :func:`lbfgs_over`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS

from fsshard.backends.base import Backend
from fsshard.comm.agreement import exchange
from fsshard.complex_params.pairs import viewable
from fsshard.errors import OptimizerError
from fsshard.oss.partitioned import unhooked_step
from fsshard.sharded.grad_norm import bounded

Memory = dict[str, Any]
"""The state that torch's LBFGS keeps from step to step."""
SINGLE = ("d", "prev_flat_grad")
"""Its long vectors."""
LISTED = ("old_dirs", "old_stps")
"""Its lists of long vectors: as many as ``ro`` has numbers."""


def lbfgs_over(backend: Backend, names: Iterable[str]) -> type[LBFGS]:
    """Return torch's LBFGS for these parameters of an engine, by name."""
    entries = [backend.entries[name] for name in names]
    divided = backend.facts.divides != "nothing" and entries and entries[0].group is not None

    class Vector(_Vector):
        ranks = entries[0].group if divided else None
        sent_from = backend.settings.device

    class OverRanks(_OverRanks):
        engine = backend
        # Of all ranks together: a rank that owns few of the parameters, or none, must round as the others do.
        dtype = reduce(torch.promote_types, (entry.parameter.dtype for entry in entries))
        # Replicas compute as bare torch does.
        vector = Vector if divided else Tensor

    return OverRanks


# ------------------------------------------------------------------------------------------------ vectors


class _Vector(Tensor):
    """A rank's part of a long vector: what is added up over its elements is added up over all ranks'. Collective.

    In float64, and rounded once, so that where parts end does not show in float32.
    """

    ranks: ClassVar[dist.ProcessGroup | None]
    sent_from: ClassVar[torch.device]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in REDUCTIONS:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        of_part, of_ranks = REDUCTIONS[func]
        parts = [vector.as_subclass(Tensor) for vector in args]
        numbers = _from_ranks(of_part(*parts), cls.ranks, cls.sent_from)
        result = of_ranks(numbers)
        return result.to(parts[0].device, parts[0].dtype)


def _from_ranks(number: Tensor, ranks: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """Return every rank's number, in their order. Collective."""
    # Not all_reduce: in the same order everywhere, and gloo's maximum can lose a NaN. If ranks had other numbers, one
    # would leave the line search before the others do.
    sent = number.to(device).reshape(1)
    if ranks is None or ranks.size() == 1:
        return sent
    received = sent.new_empty(ranks.size())
    dist.all_gather_single(received, sent, group=ranks)
    return received


def _sum(vector: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=vector.device)
    for chunk in bounded(vector):
        total = total + chunk.double().sum()
    return total


def _dot(one: Tensor, other: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=one.device)
    for left, right in zip(bounded(one), bounded(other), strict=True):
        total = total + left.double().dot(right.double())
    return total


def _max(vector: Tensor) -> Tensor:
    if not vector.numel():
        return vector.new_full((), -torch.inf, dtype=torch.float64)
    return vector.max().double()


REDUCTIONS: Mapping[Any, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    Tensor.sum: (_sum, torch.sum),
    Tensor.dot: (_dot, torch.sum),
    Tensor.max: (_max, torch.max),
}
"""Functions of all elements that torch's LBFGS calls -> this rank's part of the result, and how parts are combined."""


# ------------------------------------------------------------------------------------------------ the optimizer


class _OverRanks(LBFGS):
    """torch's LBFGS, which keeps its vectors by parameter for who reads, saves or replaces its state."""

    counts_all_ranks = True
    engine: ClassVar[Backend]
    dtype: ClassVar[torch.dtype]
    vector: ClassVar[type[Tensor]]
    # None: it lies in the state, by parameter.
    _memory: Memory | None = None
    # In the order in which they lie in the vectors.
    _shown: list[Tensor]

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Return the first loss that the closure gives on this rank."""
        losses: list[Any] = []

        def averaged() -> float:
            loss = closure()
            if not losses:
                losses.append(loss)
            if isinstance(loss, Tensor):
                loss = loss.detach()
            return self._mean_over_ranks(float(loss))

        device = self.engine.settings.device
        # torch keeps all state at the first parameter: a rank that owns none takes part, too.
        self._params = self.param_groups[0]["params"] or [nn.Parameter(torch.empty(0, device=device))]
        self._shown = list(self._params)
        self._numel_cache = None
        memory = self._taken_up()
        self.state.clear()
        self.state[self._params[0]] = memory
        try:
            unhooked_step(LBFGS)(self, averaged)
        finally:
            self.state.clear()
            self._memory = _with_numbers(memory)
        return losses[0]

    def _mean_over_ranks(self, loss: float) -> float:
        """Gradients are those of the mean over ranks: so must be the loss that the line search compares. Collective."""
        settings = self.engine.settings
        weight = self.engine.rank_weight
        if weight:
            loss = loss * weight
        elif weight is not None:
            # As its gradients within fsshard.join: not a product with 0, since a loss that does not count may be NaN.
            loss = 0.0
        number = torch.tensor(loss, dtype=torch.float64)
        losses = _from_ranks(number, settings.everyone, settings.device)
        return float(losses.sum() / len(losses))

    def _gather_flat_grad(self) -> Tensor:
        gradients = []
        for parameter in self._params:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            elif gradient.is_sparse:
                gradient = gradient.to_dense()
            gradients.append(gradient)
        return self._vector_of(gradients)

    def _vector_of(self, parts: Iterable[Tensor]) -> Tensor:
        pieces = []
        for part in parts:
            if part.is_complex():
                part = torch.view_as_real(part)
            # torch's own takes no gradient with the strides of a transposed weight.
            pieces.append(part.reshape(-1))
        flat = torch.cat(pieces)
        return flat.to(self.dtype).as_subclass(self.vector)

    # ------------------------------------------------------------------------------------------ state

    def put_vectors_to_rest(self) -> None:
        """Let the state have, by parameter, its parts of the vectors, and the numbers with each. Local."""
        memory = self._memory
        self._memory = None
        if memory is None:
            return
        numbers = _numbers(memory)
        for parameter in self._shown:
            self.state[parameter] = dict(numbers)
        for key, vector in _vectors(memory):
            for parameter, part in zip(self._shown, self._parts_of(vector), strict=True):
                self.state[parameter][key] = part

    def _parts_of(self, vector: Tensor) -> Iterator[Tensor]:
        flat = vector.as_subclass(Tensor)
        stop = 0
        for parameter in self._shown:
            start = stop
            if parameter.is_complex():
                stop = start + 2 * parameter.numel()
                pairs = flat[start:stop].view(*parameter.shape, 2)
                yield torch.view_as_complex(viewable(pairs))
            else:
                stop = start + parameter.numel()
                yield flat[start:stop].view(parameter.shape)

    def _taken_up(self) -> Memory:
        """Return the memory, made of what lies by parameter if that was read or replaced. Collective.

        Raises:
            OptimizerError: on every rank; that is not the state of all the parameters.
        """
        numbers_of_ranks = exchange(self.engine.settings.group, self._take_up)
        if not self._memory:
            # This rank owns no parameter, and has loaded nothing.
            numbers: Memory = next(filter(None, numbers_of_ranks), {})
            self._memory = self._of_parameters(numbers)
        return self._memory

    def _take_up(self) -> Memory:
        if self._memory is None:
            state = self.state.get(self._params[0], {})
            self._memory = self._of_parameters(_numbers(state))
        return _numbers(self._memory)

    def _of_parameters(self, numbers: Memory) -> Memory:
        if not numbers.get("n_iter"):
            return numbers
        memory = dict(numbers)
        try:
            for key in SINGLE:
                memory[key] = self._vector_at_rest(key)
            for key in LISTED:
                places = range(len(numbers["ro"]))
                memory[key] = [self._vector_at_rest(f"{key}.{place}") for place in places]
        except KeyError as error:
            raise OptimizerError(
                f"LBFGS: expected the state of all of its parameters, got one without {error}; load what "
                "optimizer.state_dict() or fsshard.save gave, of an LBFGS over the same parameters"
            ) from error
        return memory

    def _vector_at_rest(self, key: str) -> Tensor:
        """Return the vector whose parts lie in the state, by parameter, under ``key``."""
        parts = []
        for parameter in self._params:
            part = parameter.detach()
            if part.numel():
                part = self.state[parameter][key].to(part.device)
            parts.append(part)
        return self._vector_of(parts)


def _vectors(memory: Memory) -> Iterator[tuple[str, Tensor]]:
    """Yield the key that each long vector has by parameter, and the vector."""
    for key in SINGLE:
        if memory.get(key) is not None:
            yield key, memory[key]
    for key in LISTED:
        for place, vector in enumerate(memory.get(key) or ()):
            yield f"{key}.{place}", vector


def _numbers(state: Memory) -> Memory:
    """Return what is no vector, and no scratch, of the memory or of a parameter's state."""
    vectors = (*SINGLE, *LISTED, "al")
    return {key: value for key, value in state.items() if key.partition(".")[0] not in vectors}


def _with_numbers(memory: Memory) -> Memory:
    """Make Python numbers of the 0-dim tensors, which have the same value and no device."""
    for key in ("t", "H_diag", "prev_loss"):
        if memory.get(key) is not None:
            memory[key] = float(memory[key])
    memory["ro"] = list(map(float, memory.get("ro") or ()))
    return memory
