"""Says what a wrapped model needs, in words and numbers: ``model.explain()``, and each rank's memory by kind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsshard.backends.base import Backend
from fsshard.backends.cost import Payload, UnitCost, divided_among, unit_cost
from fsshard.backends.whole import whole_owners
from fsshard.comm.agreement import per_rank
from fsshard.errors import ConfigurationError
from fsshard.model.compiling import explain_compilation
from fsshard.planning.bounds import Circumstances, bounds_of, sent
from fsshard.planning.plan import Plan, explain_plan
from fsshard.planning.text import aligned, counted, ratio, size, wrapped
from fsshard.state_objects import tensors_in
from fsshard.torch_private.tensors import LOCAL_TENSOR, storage_key

HELD = ("parameters", "buffers", "optimizer state", "gradients", "gathered units")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank's memory. All sizes in bytes.

    Attributes:
        rank: which, within the group that shares the model.
        by_kind: what there is, or was at the peak, by kind.
        on_host: how much of that lies in host memory under a model on a GPU; 0 for a model on the CPU.
        highest: per kind the most that there was, whenever that was; empty where nothing was tracked.
        phases: the peaks of forward, backward and step; empty where nothing was tracked.
        moment: when the peak was, or "".
        allocated: ``torch.cuda.memory_allocated``; None on the CPU.
        max_allocated: ``torch.cuda.max_memory_allocated``; None on the CPU.
    """

    rank: int
    by_kind: Mapping[str, int]
    on_host: int = 0
    highest: Mapping[str, int]
    phases: Mapping[str, int]
    moment: str = ""
    allocated: int | None = None
    max_allocated: int | None = None

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.by_kind.values())


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Memory by kind, of this rank or of all.

    Attributes:
        what: what it describes: ``"held now"``, or the peak of a step.
        backend: the backend's name; "" for a model that fsshard did not wrap.
        device: the model's.
        world_size: ranks that share the model.
        ranks: this rank's memory, or in order every rank's.
    """

    what: str
    backend: str
    device: str
    world_size: int
    ranks: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        """The rank with most, among those reported."""
        return max(self.ranks, key=lambda rank: rank.total)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return a line for each rank and a column for each kind that there is; below, phases that were tracked."""
        first = self.ranks[0]
        numbers = [str(rank.rank) for rank in self.ranks]
        columns = {"rank": numbers}
        for kind in first.by_kind:
            sizes = [rank.by_kind.get(kind, 0) for rank in self.ranks]
            if any(sizes):
                columns[kind] = list(map(size, sizes))
        columns["total"] = [size(rank.total) for rank in self.ranks]
        under = f" under backend {self.backend!r}" if self.backend else ""
        lines = [f"memory{under}, {counted(self.world_size, 'rank')}, device {self.device}: {self.what}"]
        if len(first.phases) > 1:
            lines += _table_of(columns)
            columns = {"rank": numbers}
            for phase in first.phases:
                columns[f"in {phase}"] = [size(rank.phases[phase]) for rank in self.ranks]
        if any(rank.on_host for rank in self.ranks):
            columns["on the host"] = [size(rank.on_host) for rank in self.ranks]
        if first.allocated is not None:
            columns["allocated"] = [size(rank.allocated or 0) for rank in self.ranks]
            columns["max allocated"] = [size(rank.max_allocated or 0) for rank in self.ranks]
        moments = [rank.moment for rank in self.ranks]
        if any(moments):
            columns["peak at"] = moments
        lines += _table_of(columns)
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return everything as JSON, sizes in bytes."""
        ranks = [{**asdict(rank), "total": rank.total} for rank in self.ranks]
        return json.dumps({**asdict(self), "ranks": ranks}, indent=1)

    def write(self, writer: Any, step: int, tag: str = "memory") -> None:
        """Write scalars to TensorBoard: total, kinds, phases and the allocator's figures of each rank reported.

        Args:
            writer: a ``SummaryWriter``, or whatever has its ``add_scalar(tag, value, step)``.
            step: the step that they are of.
            tag: what all tags begin with; ``memory/rank0/optimizer_state`` is one.
        """
        for rank in self.ranks:
            values: dict[str, int | None] = {"total": rank.total, **rank.by_kind}
            for phase, nbytes in rank.phases.items():
                values[f"in {phase}"] = nbytes
            values["allocated"] = rank.allocated
            values["max allocated"] = rank.max_allocated
            for name, value in values.items():
                if value is not None:
                    # TensorBoard takes no blanks in tags.
                    word = name.replace(" ", "_")
                    writer.add_scalar(f"{tag}/rank{rank.rank}/{word}", value, step)


def _table_of(columns: Mapping[str, list[str]]) -> list[str]:
    cells = []
    sides = ""
    for head, texts in columns.items():
        cells.append([head, *texts])
        sides += "<" if head in ("rank", "peak at") else ">"
    return aligned(list(zip(*cells, strict=True)), sides)


def memory_report(
    backend: Backend,
    optimizers: Iterable[Optimizer],
    whole: Iterable[Tensor],
    *,
    all_ranks: bool = False,
) -> MemoryReport:
    """Return the report of :meth:`fsshard.ShardedModule.memory_report`; ``whole`` is gathered for the user now."""
    settings = backend.settings
    by_kind = dict.fromkeys(HELD, 0)
    on_host = 0
    seen = set()
    for kind, tensor in held_tensors(backend, optimizers, whole):
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        # Tied parameters and views of one buffer are counted once.
        if key in seen or tensor.device.type == "meta":
            continue
        seen.add(key)
        by_kind[kind] += storage.nbytes()
        if tensor.device.type != settings.device.type:
            on_host += storage.nbytes()
    allocated, max_allocated = cuda_bytes(settings.device)
    this_rank = RankMemory(
        rank=settings.rank,
        by_kind=by_kind,
        on_host=on_host,
        highest={},
        phases={},
        allocated=allocated,
        max_allocated=max_allocated,
    )
    ranks = [this_rank]
    if all_ranks and settings.group is not None:
        ranks = per_rank(settings.group, this_rank)
    return MemoryReport(
        what="held now",
        backend=backend.name,
        device=str(settings.device),
        world_size=settings.world_size,
        ranks=tuple(ranks),
    )


def held_tensors(
    backend: Backend,
    optimizers: Iterable[Optimizer],
    whole: Iterable[Tensor] = (),
) -> Iterator[tuple[str, Tensor]]:
    """Yield (kind, tensor) of all that a model and its optimizers hold here. The first kind of a storage counts.

    The engine comes first: under FSDP1 an entry's parameter can be a view of a gathered unit.
    """
    optimizers = list(optimizers)
    states = []
    for optimizer in optimizers:
        for state in optimizer.state.values():
            states.append(list(state.values()))
    # Owners' copies of whole parameters, behind all state.
    for optimizer in optimizers:
        owners = whole_owners(optimizer)
        if owners is not None:
            states += [entry.whole for entry in owners.mine.values()]
    kinds: list[tuple[str, Any]] = [
        *backend.held_by_engine().items(),
        ("gathered units", list(whole)),
        ("parameters", [entry.local() for entry in backend.all]),
        ("parameters", list(backend.settings.ignored.parameters.values())),
        ("buffers", list(backend.module.buffers())),
        ("optimizer state", states),
        ("gradients", [entry.grad() for entry in backend.all]),
    ]
    for kind, tensors in kinds:
        for tensor in tensors_in(tensors):
            # Of a DTensor this rank's part.
            yield kind, getattr(tensor, LOCAL_TENSOR, tensor)


def cuda_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Return (allocated, most allocated) as torch counts them on ``device``; None for each on other kinds."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)


# ------------------------------------------------------------------------------------------------ the plan and its cost


def explain(backend: Backend, estimate: Any = None) -> str:
    """Return the text; see :meth:`fsshard.ShardedModule.explain`."""
    settings = backend.settings
    plan = settings.plan
    if estimate is not None:
        _check_same(backend, estimate)
    ranks = counted(settings.world_size, "rank")
    whose = f" ({settings.about})" if settings.about else ""
    lines = [f"backend {backend.name!r}{whose} on {ranks}, device {settings.device}"]
    if settings.compilation is not None:
        lines += wrapped([explain_compilation(plan, settings.compilation)])
    costs = {unit.name: unit_cost(backend, unit) for unit in plan.units}
    if settings.world_size == 1:
        lines.append(plan.explain())
    else:
        lines.append(explain_plan(plan, _columns(plan, costs)))
        lines += wrapped(_totals(backend, costs.values()))
    if estimate is not None:
        lines += ["", str(estimate)]
    return "\n".join(lines)


def _check_same(backend: Backend, estimate: Any) -> None:
    settings = backend.settings
    mesh = (settings.world_size,)
    if settings.mesh is not None:
        mesh = tuple(settings.mesh.shape)
    theirs = {
        "backend": estimate.backend,
        "mesh": estimate.mesh,
        "bytes of parameters": estimate.parameters,
        "number of units": estimate.units,
    }
    ours = {
        "backend": backend.name,
        "mesh": mesh,
        "bytes of parameters": settings.plan.nbytes,
        "number of units": len(settings.plan.units),
    }
    if theirs != ours:
        raise ConfigurationError(
            f"explain: expected an estimate of {ours}, got {estimate.name} with {theirs}; give fsshard.estimate the "
            "settings of fsshard.wrap"
        )


def _columns(plan: Plan, costs: dict[str, UnitCost]) -> list[list[str]]:
    """Return heads, then for each unit what a rank holds, gathers and sends of it, and the bound."""
    gathers = any(cost.gathers for cost in costs.values())
    heads = ["on a rank", "sent", "bound", "ratio"]
    if gathers:
        heads.insert(1, "gathered")
    rows = [heads]
    for unit in plan.units:
        cost = costs[unit.name]
        row = [size(cost.held)]
        if cost.gathers:
            row.append(f"{cost.gathers} x {size(cost.gathered)}")
        elif gathers:
            row.append("-")
        if cost.payloads:
            spent = _sent(cost.payloads)
            least = sum(sent(payload.kind, payload.least, payload.ranks) for payload in cost.payloads)
            row += [size(spent), size(least), ratio(spent, least)]
        else:
            row += ["-", "-", "-"]
        rows.append(row)
    return rows


def _sent(payloads: Iterable[Payload]) -> float:
    return sum(sent(payload.kind, payload.nbytes, payload.ranks) for payload in payloads)


def _totals(backend: Backend, costs: Iterable[UnitCost]) -> list[str]:
    """Return the sums next to what no implementation of the engine can go below."""
    shards = divided_among(backend)
    costs = list(costs)
    circumstances = Circumstances(
        shards=shards,
        replicas=backend.settings.world_size // shards,
        stays_gathered=all(cost.gathers < 2 for cost in costs) and len(costs) > 1,
        comm_groups=backend.groups,
    )
    bounds = bounds_of(backend.settings.plan, backend.facts.divides, circumstances)
    payloads: list[Payload] = []
    held = 0
    most = 0
    for cost in costs:
        payloads += cost.payloads
        held += cost.held
        most = max(most, cost.gathered)
    spent = _sent(payloads)
    least = bounds.by_kind["parameters"]
    largest = f", the largest unit has {size(most)} while it is gathered" if most else ""
    return [
        f"a rank holds {size(held)} of parameters (bound {size(least)}, ratio {ratio(held, least)}){largest}",
        f"a rank sends {size(spent)} per step (bound {size(bounds.sent)}, ratio {ratio(spent, bounds.sent)})",
    ]
