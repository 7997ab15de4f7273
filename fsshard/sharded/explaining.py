"""The text of ``model.explain()``: the plan under an engine, and the cost of each unit beside its lower bound.

All of it is arithmetic over the plan and over how the engine has laid it out. No rank needs another one for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from fsshard.backends.base import Backend
from fsshard.backends.cost import Payload, UnitCost, divided_among, unit_cost
from fsshard.errors import ConfigurationError
from fsshard.model.compiling import explain_compilation
from fsshard.planning.bounds import Bounds, Circumstances, bounds_of, sent
from fsshard.planning.plan import Plan, explain_plan
from fsshard.planning.text import ratio, size, wrapped

__all__ = ["Prediction", "explain"]


class Prediction(Protocol):
    """The fields of an estimate that are shown beside a plan; :func:`fsshard.estimate` gives one."""

    @property
    def name(self) -> str:
        """The name of what is trained."""

    @property
    def backend(self) -> str:
        """The backend's name."""

    @property
    def mesh(self) -> tuple[int, ...]:
        """Shape of the mesh of ranks."""

    @property
    def parameters(self) -> int:
        """Bytes of one whole copy of the parameters."""

    @property
    def units(self) -> int:
        """Number of sharding units."""


def explain(backend: Backend, estimate: Prediction | None = None) -> str:
    """Return the engine, the plan and the costs of its units as text. Local.

    Args:
        backend: that executes the plan.
        estimate: of the same training, to be shown below.

    Raises:
        ConfigurationError: ``estimate`` is of another model, backend or mesh.
    """
    settings, plan = backend.settings, backend.settings.plan
    if estimate is not None:
        _check_same(backend, estimate)
    ranks = f"{settings.world_size} rank{'s' if settings.world_size > 1 else ''}"
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
    return "\n".join(lines if estimate is None else [*lines, "", str(estimate)])


def _check_same(backend: Backend, estimate: Prediction) -> None:
    settings, plan = backend.settings, backend.settings.plan
    mesh = (settings.world_size,) if settings.mesh is None else tuple(settings.mesh.shape)
    pairs: list[tuple[str, object, object]] = [
        ("backend", estimate.backend, backend.name),
        ("mesh", estimate.mesh, mesh),
        ("bytes of parameters", estimate.parameters, plan.nbytes),
        ("number of units", estimate.units, len(plan.units)),
    ]
    wrong = [f"{what} {theirs!r}, not {ours!r}" for what, theirs, ours in pairs if theirs != ours]
    if wrong:
        raise ConfigurationError(
            f"the estimate of {estimate.name} is for another training: {'; '.join(wrong)}. Give fsshard.estimate the "
            "settings of fsshard.wrap"
        )


def _columns(plan: Plan, costs: dict[str, UnitCost]) -> list[list[str]]:
    """Heads, then for each unit what a rank holds of it, what is gathered how often, what is sent, and the bound."""
    gathers = any(cost.gathers for cost in costs.values())
    rows = [["on a rank", *(["gathered"] if gathers else []), "sent", "bound", "ratio"]]
    for unit in plan.units:
        cost = costs[unit.name]
        whole = f"{cost.gathers} x {size(cost.gathered)}" if cost.gathers else "-"
        spent, least = _sent(cost.payloads), _least(cost.payloads)
        shown = [size(spent), size(least), ratio(spent, least)] if cost.payloads else ["-", "-", "-"]
        rows.append([size(cost.held), *([whole] if gathers else []), *shown])
    return rows


def _sent(payloads: Iterable[Payload]) -> float:
    return sum(sent(payload.kind, payload.nbytes, payload.ranks) for payload in payloads)


def _least(payloads: Iterable[Payload]) -> float:
    return sum(sent(payload.kind, payload.least, payload.ranks) for payload in payloads)


def _totals(backend: Backend, costs: Iterable[UnitCost]) -> list[str]:
    """Return the sums beside what no implementation of the engine can go below."""
    costs = list(costs)
    bounds = _bounds(backend, costs)
    held, spent = sum(cost.held for cost in costs), _sent(payload for cost in costs for payload in cost.payloads)
    least = bounds.by_kind["parameters"]
    most = max((cost.gathered for cost in costs), default=0)
    largest = f", the largest unit has {size(most)} while it is gathered" if most else ""
    return [
        f"a rank holds {size(held)} of parameters (bound {size(least)}, ratio {ratio(held, least)}){largest}",
        f"a rank sends {size(spent)} per step (bound {size(bounds.sent)}, ratio {ratio(spent, bounds.sent)})",
    ]


def _bounds(backend: Backend, costs: Sequence[UnitCost]) -> Bounds:
    shards = divided_among(backend)
    circumstances = Circumstances(
        shards=shards,
        replicas=backend.settings.world_size // shards,
        stays_gathered=all(cost.gathers < 2 for cost in costs) and len(costs) > 1,
        comm_groups=backend.groups,
    )
    return bounds_of(backend.settings.plan, backend.facts.divides, circumstances)
