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
SINGLE, LISTED = ("d", "prev_flat_grad"), ("old_dirs", "old_stps")
"""Its long vectors, and its lists of them: as many as ``ro`` has numbers."""


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
        return of_ranks(_from_ranks(of_part(*parts), cls.ranks, cls.sent_from)).to(parts[0].device, parts[0].dtype)


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
    sums = (chunk.double().sum() for chunk in bounded(vector))
    return sum(sums, torch.zeros((), dtype=torch.float64, device=vector.device))


def _dot(one: Tensor, other: Tensor) -> Tensor:
    products = (a.double().dot(b.double()) for a, b in zip(bounded(one), bounded(other), strict=True))
    return sum(products, torch.zeros((), dtype=torch.float64, device=one.device))


def _max(vector: Tensor) -> Tensor:
    return vector.max().double() if vector.numel() else vector.new_full((), -torch.inf, dtype=torch.float64)


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
    _memory: Memory | None = None  # None: it lies in the state, by parameter
    _shown: list[Tensor]  # in the order in which they lie in the vectors

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Return the first loss that the closure gives on this rank."""
        first: list[Any] = []

        def averaged() -> float:
            loss = closure()
            first.extend([] if first else [loss])
            return self._mean_over_ranks(float(loss.detach() if isinstance(loss, Tensor) else loss))

        device = self.engine.settings.device
        # torch keeps all state at the first parameter: a rank that owns none takes part, too.
        self._params = self.param_groups[0]["params"] or [nn.Parameter(torch.empty(0, device=device))]
        self._shown, self._numel_cache = list(self._params), None
        memory = self._memory = self._taken_up()
        self.state.clear()
        self.state[self._params[0]] = memory
        try:
            unhooked_step(LBFGS)(self, averaged)
        finally:
            self.state.clear()
            self._memory = _with_numbers(memory)
        return first[0]

    def _mean_over_ranks(self, loss: float) -> float:
        """Gradients are those of the mean over ranks: so must be the loss that the line search compares. Collective."""
        settings, weight = self.engine.settings, self.engine.rank_weight
        # As its gradients within fsshard.join: not a product with 0, since a loss that does not count may be NaN.
        loss = (loss * weight if weight else 0.0) if weight is not None else loss
        losses = _from_ranks(torch.tensor(loss, dtype=torch.float64), settings.everyone, settings.device)
        return float(losses.sum() / len(losses))

    def _gather_flat_grad(self) -> Tensor:
        gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in self._params)
        return self._vector_of(g.to_dense() if g.is_sparse else g for g in gradients)

    def _vector_of(self, parts: Iterable[Tensor]) -> Tensor:
        # torch's own takes no gradient with the strides of a transposed weight.
        flat = [(torch.view_as_real(part) if part.is_complex() else part).reshape(-1) for part in parts]
        return torch.cat(flat).to(self.dtype).as_subclass(self.vector)

    # ------------------------------------------------------------------------------------------ state

    def put_vectors_to_rest(self) -> None:
        """Let the state have, by parameter, its parts of the vectors, and the numbers with each. Local."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        parts = {key: self._parts_of(vector) for key, vector in _vectors(memory)}
        numbers = _numbers(memory)
        for place, parameter in enumerate(self._shown):
            self.state[parameter] = {**numbers, **{key: part[place] for key, part in parts.items()}}

    def _parts_of(self, vector: Tensor) -> list[Tensor]:
        widths = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in self._shown]
        pieces = zip(self._shown, vector.as_subclass(Tensor).split(widths), strict=True)
        return [
            torch.view_as_complex(viewable(x.view(*p.shape, 2))) if p.is_complex() else x.view(p.shape)
            for p, x in pieces
        ]

    def _taken_up(self) -> Memory:
        """Return the memory, made of what lies by parameter if that was read or replaced. Collective.

        Raises:
            OptimizerError: on every rank; that is not the state of all the parameters.
        """
        told = exchange(self.engine.settings.group, self._take_up)
        if not self._memory:  # this rank owns no parameter, and has loaded nothing
            self._memory = self._of_parameters(next(filter(None, told), {}))
        return self._memory

    def _take_up(self) -> Memory:
        if self._memory is None:
            self._memory = self._of_parameters(_numbers(self.state.get(self._params[0], {})))
        return _numbers(self._memory)

    def _of_parameters(self, numbers: Memory) -> Memory:
        if not numbers.get("n_iter"):
            return numbers
        try:
            one = {key: self._found(key) for key in SINGLE}
            listed = {key: [self._found(f"{key}.{place}") for place in range(len(numbers["ro"]))] for key in LISTED}
        except KeyError as error:
            raise OptimizerError(
                f"LBFGS: expected the state of all of its parameters, got one without {error}; load what "
                "optimizer.state_dict() or fsshard.save gave, of an LBFGS over the same parameters"
            ) from error
        return {**numbers, **one, **listed}

    def _found(self, key: str) -> Tensor:
        return self._vector_of(self.state[p][key].to(p.device) if p.numel() else p.detach() for p in self._params)


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
    memory.update({key: float(memory[key]) for key in ("t", "H_diag", "prev_loss") if memory.get(key) is not None})
    memory["ro"] = [float(value) for value in memory.get("ro") or ()]
    return memory
