"""torch.compile for one unit at a time, inside of everything that engines and fsshard put around a unit.

What is compiled is the ``forward`` of each unit that holds no other unit, in place. ``module.compile()`` would compile
the call, hooks included, and the gather, the nodes at its inputs and the casts are hooks; here they stay outside, in
eager mode. A unit that holds others is not compiled, for the same reason: the gathers of those below it would lie
inside of its graph. So the root is compiled where it is the only unit, as torchtitan has it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fsshard.complex_params.slots import all_places, public_name
from fsshard.errors import ConfigurationError, ModelError
from fsshard.planning.plan import Plan
from fsshard.torch_private.compiling import keywords_of
from fsshard.torch_private.modules import compiled_within, has_call_hooks, holds_compiled

KEYWORDS = ("backend", "dynamic", "fullgraph", "mode", "options", "recompile_limit")
RECOMPILE_LIMIT = 8
"""How often torch.compile compiles one function before it goes back to eager mode (torch 2.13)."""


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """The way in which units are compiled.

    Attributes:
        keywords: arguments of ``torch.compile``.
        within: names of the modules in which units are compiled; the root's stands for all.
    """

    keywords: Mapping[str, Any] = field(default_factory=dict)
    within: tuple[str, ...] = ("",)

    @property
    def backend(self) -> str:
        """Name of torch.compile's backend."""
        backend = self.keywords.get("backend", "inductor")
        if isinstance(backend, str):
            return backend
        return getattr(backend, "__name__", type(backend).__name__)

    @property
    def uses_cuda_graphs(self) -> bool:
        """Return whether kernels would be replayed at the addresses at which they were recorded."""
        if self.backend != "inductor":
            return "cudagraph" in self.backend
        graphs = bool((self.keywords.get("options") or {}).get("triton.cudagraphs"))
        return graphs or self.keywords.get("mode") in ("reduce-overhead", "max-autotune")


def resolve_compilation(value: object) -> Compilation | None:
    """Return what ``compile=`` asks for; None for nothing."""
    if value is None or value is False:
        return None
    if value is True:
        value = {}
    if isinstance(value, Compilation):
        return value
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"compile={value!r}: expected a bool, or a dict of torch.compile's keyword arguments")
    unknown = sorted(map(str, set(value) - set(KEYWORDS)))
    if unknown:
        raise ConfigurationError(
            f"compile={dict(value)!r}: unknown keyword {unknown[0]!r}; known are {', '.join(KEYWORDS)}"
        )
    try:
        torch.compile(lambda: None, **value)  # looks at names and modes; compiles at the first call only
    except Exception as error:  # torch's own kinds: RuntimeError, InvalidBackend, AssertionError
        raise ConfigurationError(f"compile={dict(value)!r}: {error}") from error
    return Compilation(keywords=dict(value))


def check_compilation(compilation: Compilation | None, device: torch.device, plan: Plan) -> None:
    """Raise for what cannot be compiled here. Local."""
    if compilation is None:
        return
    if plan.offloaded:
        raise ConfigurationError(
            "compile= together with Checkpointing(recompute=False): what compiled code saves cannot be distinguished "
            "from weights; leave out one of them, or recompute the blocks"
        )
    # A checkpoint has to be around compiled units, and to be put there after they were compiled.
    units = list(map(public_name, compiled_modules(plan, compilation)))
    for unit in units:
        where = "the root, which is compiled as the only unit"
        if unit:
            where = f"the compiled unit {unit!r}"
        for block, how in plan.recomputed_before.items():
            if _is_within(block, unit):
                raise ConfigurationError(
                    f"compile= with block {block!r}, which is checkpointed already (by {how}) and lies in {where}: "
                    "the checkpoint would be compiled too; remove it and use activation_checkpointing="
                )
        for block in plan.recomputed:
            if block != unit and _is_within(block, unit):
                # One graph for forward and recomputation: T5's blocks in one compiled unit give other last bits (torch
                # 2.13, aot_eager), and buffers are updated twice.
                raise ConfigurationError(
                    f"compile= with activation_checkpointing of {block!r}, which lies in {where}: that would change "
                    "the unit's graph and with it the last bits; name the blocks in auto_wrap_policy, too, so that "
                    "each is compiled by itself"
                )
    if plan.recomputed and device.type == "cuda" and compilation.uses_cuda_graphs:
        raise ConfigurationError(
            f"compile={dict(compilation.keywords)!r}, which records CUDA graphs, together with "
            "activation_checkpointing: a CUDA graph's results are valid until it runs again, and recomputation runs "
            "it again during the backward pass; use mode='max-autotune-no-cudagraphs'"
        )


def compiled_units(plan: Plan) -> tuple[str, ...]:
    """Return names of the units whose forward is compiled: those that hold no other unit."""
    names = [unit.name for unit in plan.units]
    leaves = []
    for name in names:
        if not any(other != name and _is_within(other, name) for other in names):
            leaves.append(name)
    return tuple(leaves)


def _is_within(name: str, outer: str) -> bool:
    """Return whether a module is another one, or in it, by their names."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def compiled_modules(plan: Plan, compilation: Compilation) -> tuple[str, ...]:
    """Return names of the modules whose forward is compiled: units that hold no other one, and parts of such units."""
    leaves = compiled_units(plan)
    names: dict[str, None] = {}
    for outer in compilation.within:
        if not any(_is_within(unit.name, outer) for unit in plan.units):
            names[outer] = None
            continue
        for leaf in leaves:
            if _is_within(leaf, outer):
                names[leaf] = None
    return tuple(names)


def compile_units(modules: Mapping[str, nn.Module], plan: Plan, compilation: Compilation | None) -> None:
    """Compile the forwards of units, given the modules of a tensorfied model, before anything else is around them."""
    # Units of one class share what was compiled for one of them. Other models, and the same model wrapped before, do
    # not: their entries would count against the limit after which torch.compile goes back to eager mode. And the limit
    # grows with the number of units, which may all differ (torch 2.13: 8 per function).
    if compilation is None:
        return
    names = compiled_modules(plan, compilation)
    keywords = dict(compilation.keywords)
    limit = keywords.pop("recompile_limit", None) or RECOMPILE_LIMIT * len(names)
    compiler: Any = torch.compile  # torch 2.13 names neither of the two keywords in its overloads
    compiled = {}
    for name in names:
        module = modules[name]
        # Somebody's replacement, on this module alone.
        is_own = "forward" in module.__dict__
        forward: Any = module.forward if is_own else type(module).forward
        if forward not in compiled:
            compiled[forward] = compiler(forward, recompile_limit=limit, isolate_recompiles=True, **keywords)
        replacement = compiled[forward]
        if not is_own:
            replacement = types.MethodType(replacement, module)
        module.forward = replacement


def explain_compilation(plan: Plan, compilation: Compilation) -> str:
    """Return a line for people."""
    names = compiled_modules(plan, compilation)
    rest = len(plan.units) - len(names)
    if compilation.within != ("",):
        return f"compiled by {compilation.backend}, modules: {', '.join(names)}"
    eager = f"; eager, since they hold others: {rest}" if rest else ""
    return f"compiled by {compilation.backend}, units: {len(names)}{eager}"


# ------------------------------------------------------------------------------------------------ compiled before


def takes_compiled_models(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``wrap`` take models, and parts of models, that ``torch.compile`` was put around.

    ``torch.compile(module)`` is a module around the module. It is part of every name below it (``_orig_mod.``), in
    state dicts and files too, and what it compiles is the module's call with the hooks of all that it holds, the
    engine's included. So it is taken off, and what it asked for is asked of wrap, for the units within.
    """

    @functools.wraps(wrap)
    def wrapped(model: Any, *args: Any, **settings: Any) -> Any:
        modules = dict(all_places(model)) if isinstance(model, nn.Module) else {}
        if not holds_compiled(modules.values()):
            return wrap(model, *args, **settings)
        compiled = list(_compiled(model))
        settings["compile"] = _asked_by(compiled, settings.get("compile", False))
        kinds = {type(module) for _, module in compiled}
        bare_kinds = {type(_bare(module)) for _, module in compiled}
        for name in ("auto_wrap_policy", "activation_checkpointing"):
            setting = settings.get(name)
            if isinstance(setting, (set, frozenset, list, tuple)) and not kinds.isdisjoint(setting):
                settings[name] = (set(setting) - kinds) | bare_kinds
        bare = _bare(model)
        places = []
        for parent in bare.modules():
            if compiled_within(parent) is not None:
                continue
            for name, child in parent._modules.items():
                if child is not None and compiled_within(child) is not None:
                    places.append((parent._modules, name, child))
        for children, name, child in places:
            children[name] = _bare(child)
        try:
            return wrap(bare, *args, **settings)
        except BaseException:
            for children, name, child in places:
                children[name] = child
            raise

    return wrapped


def _bare(module: nn.Module) -> nn.Module:
    """Return the module within what torch.compile has put around it, once or several times."""
    inner = compiled_within(module)
    while inner is not None:
        module = inner
        inner = compiled_within(module)
    return module


def _compiled(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield compiled modules by the name that what is within has without them."""
    inner = compiled_within(model)
    while inner is not None:
        yield prefix, model
        model = inner
        inner = compiled_within(model)
    for name, child in model.named_children():
        yield from _compiled(child, f"{prefix}.{name}" if prefix else name)


def _asked_by(compiled: list[tuple[str, nn.Module]], asked_too: object) -> Compilation:
    """Return what the compiled modules ask for together; raise if they, or ``compile=``, ask for several things."""
    names = list(dict.fromkeys(name for name, _ in compiled))
    texts = [repr(name) if name else "the model" for name in names[:3]]
    where = ", ".join(texts)
    if asked_too is not None and asked_too is not False:
        raise ConfigurationError(f"compile={asked_too!r}: {where} was compiled by torch.compile before; leave one out")
    asked = []
    for name, module in compiled:
        place = f"module {name!r}" if name else "the model"
        if has_call_hooks(module):
            raise ModelError(
                f"{place}: hooks were registered on what torch.compile returned, which wrap replaces by the module "
                "within; register them on the module before torch.compile, or on what wrap returns"
            )
        keywords = keywords_of(module)
        if keywords is None:
            raise ModelError(f"{place} is kept out of torch.compile by torch.compiler.disable; wrap the bare module")
        asked.append(keywords)
    first = asked[0]
    for other in asked:
        if other != first:
            raise ConfigurationError(
                f"{where} were compiled before with different arguments ({first!r} and {other!r}); compile them alike, "
                "or wrap the bare model with compile="
            )
    compilation = resolve_compilation(first)
    assert compilation is not None
    outermost = []
    for name in names:
        if not any(other != name and _is_within(name, other) for other in names):
            outermost.append(name)
    return replace(compilation, within=tuple(outermost))
