"""tune(): finds the plan that fits, by simulation, before the launch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fsshard.errors import ConfigurationError, DoesNotFit, FsshardError

if TYPE_CHECKING:
    from fsshard.simulation.tuning.result import TuneResult
    from fsshard.simulation.tuning.search import Judge, Search

__all__ = ["tune"]


def tune(
    subject: Any,
    *,
    backend: Any = "auto",
    world_size: int,
    batch: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Any = None,
    memory: int | str | None = None,
    auto_wrap_policy: object = ...,
    mixed_precision: object = ...,
    activation_checkpointing: object = ...,
    accumulation: int | None = None,
    cpu_offload: bool = False,
    device_mesh: Any = None,
    device: str = "cpu",
    real: bool = False,
    limit: int | None = None,
    progress: Callable[[int, str], None] | None = None,
    **settings: Any,
) -> TuneResult:
    """Search for the plan that sends least among those that fit into ``memory``, or for the one that needs least.

    Every plan that is considered is simulated as :func:`fsshard.estimate` does it, in a process of its own. Units,
    whether they stay gathered after the forward, recomputed blocks and the merging of small units are searched, unless
    they are given here. Always among the plans: ``"auto"``, one unit, and what torch's size-based policy and its policy
    for transformers give. The search uses no random numbers: the same question has the same answer.

    Args:
        subject: a bare module (give ``batch`` too), or a recipe as for ``fsshard.parity.compare``, or its name. The
            units and recomputed blocks that a recipe names are ignored here.
        backend: a backend's name, or several, of which the best one is taken.
        world_size: ranks of the job.
        batch: of a module: one rank's arguments of its forward.
        loss: ``(model, batch) -> scalar``; by default as for :func:`fsshard.estimate`.
        optimizer: a class, a ``functools.partial`` of one, or an optimizer.
        memory: bytes that a rank may need, such as ``40 * 2**30`` or ``"40GiB"``: the least traffic is looked for, then
            the fewest collectives, then no recomputation, then the least peak. None: the least peak is looked for.
        auto_wrap_policy: as for :func:`fsshard.wrap`, then units are not searched.
        mixed_precision: see :func:`fsshard.wrap`; not searched.
        activation_checkpointing: as for :func:`fsshard.wrap`, then it is not searched; False: recompute nothing.
        accumulation: backward passes per step.
        cpu_offload: see :func:`fsshard.estimate`.
        device_mesh: see there.
        device: ``"cpu"`` or ``"cuda"``: which device it is for.
        real: see :func:`fsshard.estimate`.
        limit: the number of simulations after which no further plan is tried; the plans named above come first. None:
            between 12 and 40, by the number of operators in a forward.
        progress: called with how many plans have been simulated and what the next one is.
        **settings: of :func:`fsshard.wrap`: a backend's options. What is given is not searched.

    Returns:
        A :class:`~fsshard.simulation.tuning.result.TuneResult`: ``fsshard.wrap(model, **result.settings)`` uses the
        winner.

    Raises:
        ConfigurationError: an argument has no meaning.
        DoesNotFit: no plan that was found fits ``memory``.
        UnknownBackend: ``backend`` names none.
        ModelError: the step depends on the values of tensors, or fails.
        RecipeError: ``subject`` is no recipe.
    """
    from fsshard.planning.plan import Plan
    from fsshard.recipes.recipe import resolve
    from fsshard.simulation.estimating import optimizer_settings, recipe_source
    from fsshard.simulation.tuning.result import TuneResult, best
    from fsshard.simulation.tuning.search import Judge, Search
    from fsshard.simulation.tuning.search_space import DEFAULT, SEARCHED, written
    from fsshard.simulation.worker import Simulator

    if isinstance(subject, Plan):
        raise ConfigurationError("a plan is what tune() looks for; pass the model, or a recipe")
    backends = list(backend) if isinstance(backend, (list, tuple)) else [backend]
    if not backends:
        raise ConfigurationError("backend=[]: expected a backend's name, or several")
    bound = _bytes(memory)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigurationError(f"limit={limit!r}: expected a positive number of simulations")
    given = {"auto_wrap_policy": auto_wrap_policy, "mixed_precision": mixed_precision, **settings}
    fixed = {name: written(name, value) for name, value in given.items() if value is not ...}
    if activation_checkpointing is not ...:
        choice = written("activation_checkpointing", activation_checkpointing)
        fixed["activation_checkpointing"] = DEFAULT if choice.value in (None, False) else choice
    source = recipe_source(subject, batch, loss, real)
    recipe = resolve(source)
    changes: dict[str, Any] = {"activation_checkpointing": None, **optimizer_settings(optimizer)}
    if accumulation is not None:
        changes["accumulate"] = accumulation
    own = {name: value for name, value in recipe.settings.items() if name not in SEARCHED}
    if recipe.precision is not None:
        own["mixed_precision"] = recipe.precision
    if cpu_offload:
        own["cpu_offload"] = True
    asked = {
        "source": source,
        "changes": changes,
        "world_size": world_size,
        "device_mesh": device_mesh,
        "device": device,
        "cpu_offload": cpu_offload,
        "real": real,
    }
    with Simulator("fsshard.tune", quiet=True) as simulator:
        judge = Judge(asked, simulator, progress)
        names = [judge.job(name, {}).backend for name in backends]
        search = Search(judge, {**{n: written(n, v) for n, v in own.items()}, **fixed}, limit)
        search.run(list(dict.fromkeys(names)))
        winner = best(search.tried, bound)
        if winner is None:
            raise _nothing(search, bound, judge)
    return TuneResult(
        name=recipe.name,
        world_size=world_size,
        memory=bound,
        winner=winner,
        tried=tuple(search.tried),
        aliases=search.aliases,
        failed=search.failed,
    )


def _nothing(search: Search, bound: int | None, judge: Judge) -> FsshardError:
    """Return the error for when no plan fits, or when none can be simulated."""
    from fsshard.planning.text import size
    from fsshard.simulation.tuning.result import best

    leanest = best(search.tried, None)
    if leanest is None or bound is None:
        return search.error or ConfigurationError(f"no plan can be: {'; '.join(search.failed.values())}")
    ways = [f"{text}: {size(peak)}" for text, peak in judge.ways_down(leanest, bound) if peak < leanest.peak]
    activations = leanest.estimate.by_kind["activations"] + leanest.estimate.by_kind["inputs"]
    if activations:
        ways.append(f"a smaller batch, with which {size(activations)} of it shrink in proportion")
    return DoesNotFit(
        f"memory={size(bound)}: of {len(search.tried)} plans that were simulated none fits; the least peak is "
        f"{size(leanest.peak)} per rank, at {leanest.estimate.moment}, with {leanest.candidate.code()}. "
        f"What would bring it down: {'; '.join(ways) or 'a smaller model'}",
        leanest.peak,
    )


UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def _bytes(memory: object) -> int | None:
    """Return ``"40GiB"`` in bytes; without the ``i`` the units are powers of 1000."""
    if memory is None:
        return None
    whole = isinstance(memory, int) or (isinstance(memory, float) and memory.is_integer())  # 40e9 is a float
    if isinstance(memory, (int, float)) and whole and not isinstance(memory, bool) and memory > 0:
        return int(memory)
    pattern = r"\s*(\d+(?:\.\d*)?)\s*([kmgt]?)(i?)b?\s*"
    found = re.fullmatch(pattern, memory, re.IGNORECASE) if isinstance(memory, str) else None
    if found is None or not float(found[1]) or (found[3] and not found[2]):
        raise ConfigurationError(
            f"memory={memory!r}: expected a positive whole number of bytes, or a text such as '40GiB'"
        )
    return int(float(found[1]) * (1024 if found[3] else 1000) ** UNITS[found[2].lower()])
