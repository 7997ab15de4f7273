"""The text of ``model.explain()``: the plan under an engine, and the cost of each unit beside its lower bound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsshard.backends.base import Backend
from fsshard.backends.cost import Payload, UnitCost, divided_among, unit_cost
from fsshard.errors import ConfigurationError
from fsshard.model.compiling import explain_compilation
from fsshard.planning.bounds import Circumstances, bounds_of, sent
from fsshard.planning.plan import Plan, explain_plan
from fsshard.planning.text import ratio, size, wrapped

__all__ = ["explain"]


def explain(backend: Backend, estimate: Any = None) -> str:
    """Return the text; see :meth:`fsshard.ShardedModule.explain`."""
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


def _check_same(backend: Backend, estimate: Any) -> None:
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
    """Return heads, then for each unit what a rank holds, gathers and sends of it, and the bound."""
    gathers = any(cost.gathers for cost in costs.values())
    rows = [["on a rank", *(["gathered"] if gathers else []), "sent", "bound", "ratio"]]
    for unit in plan.units:
        cost = costs[unit.name]
        whole = f"{cost.gathers} x {size(cost.gathered)}" if cost.gathers else "-"
        spent = _sent(cost.payloads)
        least = sum(sent(payload.kind, payload.least, payload.ranks) for payload in cost.payloads)
        shown = [size(spent), size(least), ratio(spent, least)] if cost.payloads else ["-", "-", "-"]
        rows.append([size(cost.held), *([whole] if gathers else []), *shown])
    return rows


def _sent(payloads: Iterable[Payload]) -> float:
    return sum(sent(payload.kind, payload.nbytes, payload.ranks) for payload in payloads)


def _totals(backend: Backend, costs: Iterable[UnitCost]) -> list[str]:
    """Return the sums beside what no implementation of the engine can go below."""
    shards, costs = divided_among(backend), list(costs)
    circumstances = Circumstances(
        shards=shards,
        replicas=backend.settings.world_size // shards,
        stays_gathered=all(cost.gathers < 2 for cost in costs) and len(costs) > 1,
        comm_groups=backend.groups,
    )
    bounds = bounds_of(backend.settings.plan, backend.facts.divides, circumstances)
    held, spent = sum(cost.held for cost in costs), _sent(payload for cost in costs for payload in cost.payloads)
    least = bounds.by_kind["parameters"]
    most = max((cost.gathered for cost in costs), default=0)
    largest = f", the largest unit has {size(most)} while it is gathered" if most else ""
    return [
        f"a rank holds {size(held)} of parameters (bound {size(least)}, ratio {ratio(held, least)}){largest}",
        f"a rank sends {size(spent)} per step (bound {size(bounds.sent)}, ratio {ratio(spent, bounds.sent)})",
    ]
