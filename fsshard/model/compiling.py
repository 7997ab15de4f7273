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

from fsshard.complex_params.slots import public_name
from fsshard.errors import ConfigurationError, ModelError
from fsshard.planning.plan import Plan
from fsshard.torch_private.compiling import keywords_of
from fsshard.torch_private.modules import compiled_within, has_call_hooks

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
    unknown = sorted(str(key) for key in value if key not in KEYWORDS)
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
    units = [public_name(name) for name in compiled_modules(plan, compilation)]
    for unit in units:
        inside = f"{unit}." if unit else ""
        where = f"the compiled unit {unit!r}" if unit else "the root, which is compiled as the only unit"
        for block, how in plan.recomputed_before.items():
            if block == unit or block.startswith(inside):
                raise ConfigurationError(
                    f"compile= with block {block!r}, which is checkpointed already (by {how}) and lies in {where}: "
                    "the checkpoint would be compiled too; remove it and use activation_checkpointing="
                )
        for block in plan.recomputed:
            if block != unit and block.startswith(inside):
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
    held = {name: f"{name}." if name else "" for name in names}
    return tuple(n for n in names if not any(other != n and other.startswith(held[n]) for other in names))


def compiled_modules(plan: Plan, compilation: Compilation) -> tuple[str, ...]:
    """Return names of the modules whose forward is compiled: units that hold no other one, and parts of such units."""
    leaves = compiled_units(plan)
    names = [unit.name for unit in plan.units]
    found: dict[str, None] = {}
    for name in compilation.within:
        inside = f"{name}." if name else ""
        if any(unit == name or unit.startswith(inside) for unit in names):
            found.update((leaf, None) for leaf in leaves if leaf == name or leaf.startswith(inside))
        else:
            found[name] = None
    return tuple(found)


def compile_units(
    modules: Mapping[str, nn.Module],
    plan: Plan,
    compilation: Compilation | None,
) -> None:
    """Compile the forwards of units, given the modules of a tensorfied model, before anything else is around them."""
    # Units of one class share what was compiled for one of them. Other models, and the same model wrapped before, do
    # not: their entries would count against the limit after which torch.compile goes back to eager mode. And the limit
    # grows with the number of units, which may all differ (torch 2.13: 8 per function).
    if compilation is None:
        return
    names = compiled_modules(plan, compilation)
    own = dict(compilation.keywords)
    limit = own.pop("recompile_limit", None) or RECOMPILE_LIMIT * len(names)
    compiler: Any = torch.compile  # torch 2.13 names neither of the two keywords in its overloads
    compiled: dict[Any, Any] = {}
    for module in map(modules.__getitem__, names):
        mine = "forward" in module.__dict__  # somebody's replacement, on this module alone
        forward: Any = module.forward if mine else type(module).forward
        if forward not in compiled:
            compiled[forward] = compiler(forward, recompile_limit=limit, isolate_recompiles=True, **own)
        replaced = compiled[forward] if mine else types.MethodType(compiled[forward], module)
        module.forward = replaced


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
        if not isinstance(model, nn.Module) or not any(compiled_within(module) for module in model.modules()):
            return wrap(model, *args, **settings)
        compiled = list(_compiled(model))
        settings["compile"] = _asked_by(compiled, settings.get("compile", False))
        kinds = {type(module) for _, module in compiled}
        for name in ("auto_wrap_policy", "activation_checkpointing"):
            if isinstance(settings.get(name), (set, frozenset, list, tuple)) and kinds & set(settings[name]):
                settings[name] = (set(settings[name]) - kinds) | {type(_bare(module)) for _, module in compiled}
        bare = _bare(model)
        places = [
            (parent._modules, name, child)
            for parent in bare.modules()
            if compiled_within(parent) is None
            for name, child in parent._modules.items()
            if child is not None and compiled_within(child) is not None
        ]
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
    while (inner := compiled_within(module)) is not None:
        module = inner
    return module


def _compiled(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield compiled modules by the name that what is within has without them."""
    while (inner := compiled_within(model)) is not None:
        yield prefix, model
        model = inner
    for name, child in model.named_children():
        yield from _compiled(child, f"{prefix}.{name}" if prefix else name)


def _asked_by(compiled: list[tuple[str, nn.Module]], asked_too: object) -> Compilation:
    """Return what the compiled modules ask for together; raise if they, or ``compile=``, ask for several things."""
    names = tuple(dict.fromkeys(name for name, _ in compiled))
    told = ", ".join(repr(name) if name else "the model" for name in names[:3])
    if asked_too is not None and asked_too is not False:
        raise ConfigurationError(f"compile={asked_too!r}: {told} was compiled by torch.compile before; leave one out")
    asked = []
    for name, module in compiled:
        where = f"module {name!r}" if name else "the model"
        if has_call_hooks(module):
            raise ModelError(
                f"{where}: hooks were registered on what torch.compile returned, which wrap replaces by the module "
                "within; register them on the module before torch.compile, or on what wrap returns"
            )
        keywords = keywords_of(module)
        if keywords is None:
            raise ModelError(f"{where} is kept out of torch.compile by torch.compiler.disable; wrap the bare module")
        asked.append(keywords)
    other = next((keywords for keywords in asked if keywords != asked[0]), None)
    if other is not None:
        raise ConfigurationError(
            f"{told} were compiled before with different arguments ({asked[0]!r} and {other!r}); compile them alike, "
            "or wrap the bare model with compile="
        )
    compilation = resolve_compilation(asked[0])
    assert compilation is not None
    within = tuple(n for n in names if not any(n != o and (not o or n.startswith(f"{o}.")) for o in names))
    return replace(compilation, within=within)  # the outermost
