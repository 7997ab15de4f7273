"""Reads off a model what a search can choose from: values of wrap()'s arguments, each with the code that writes it."""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.complex_params.slots import public_name
from fsshard.errors import FsshardError
from fsshard.nested import leaves as tree_leaves
from fsshard.planning.plan import Plan, plan
from fsshard.planning.policies import Checkpointing, Precision, is_container
from fsshard.recipes.recipe import check_loss, seed_all
from fsshard.simulation.fakes import fake_ranks
from fsshard.simulation.simulation import Job, batches_of, shared_fakes, under_backend
from fsshard.simulation.worker import errors_in_words
from fsshard.torch_private.dispatch import TorchDispatchMode
from fsshard.torch_private.tensors import LOCAL_TENSOR, storage_key

PLAIN = {"auto_wrap_policy": None, "activation_checkpointing": None}
SEARCHED = tuple(PLAIN)
"""Arguments of which a plan is made."""

COARSEST, STEP = 8, 8
"""Sizes of units that are tried: the parameters' bytes over 8, over 64 and so on, and at last any module that owns
parameters."""

SHARE = 0.25
"""Classes are tried that hold at least this share of the parameters (or, to be recomputed, of the activations)."""

LEAST = 0.01
"""A module that keeps less than this share of the activations is not worth computing again."""

CLASSES = 3
"""At most so many of them."""


# ------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """One module of a model, and how a step uses it."""

    name: str  # the first fully qualified one
    kind: str  # name of its class
    calls: int  # of its forward, in a step
    nbytes: int  # of all parameters in it
    own: int  # bytes of the parameters that it holds itself
    saved: int  # bytes that its forward keeps for the backward, beyond what it was given and parameters
    container: bool  # it is never called, by its nature


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model's modules, and what a forward calls."""

    modules: tuple[ModuleFacts, ...]  # the root first, in the model's order
    operators: int = 1  # how many a forward calls
    layers: frozenset[str] = frozenset()  # classes of a transformer's layers: the model says so, or they are torch's

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return self.modules[0].nbytes

    @property
    def saved(self) -> int:
        """Bytes that a forward keeps for the backward."""
        return self.modules[0].saved

    def once(self, facts: ModuleFacts) -> bool:
        """Return whether a forward of the model calls the module once."""
        return facts.calls == max(1, self.modules[0].calls)

    def units_of(self, planned: Plan) -> list[ModuleFacts]:
        """Return the modules that are units of the plan, without the root."""
        known = {facts.name: facts for facts in self.modules}
        return [known[unit.name] for unit in planned.units[1:]]

    def classes_of_units(self, planned: Plan) -> frozenset[str]:
        """Return the classes of the plan's units, without those of which a module is not called once."""
        often = {facts.kind for facts in self.modules if facts.nbytes and not self.once(facts)}
        return frozenset(facts.kind for facts in self.units_of(planned)) - often

    def gathered_once(self, planned: Plan) -> bool:
        """Return whether each unit is a module that a forward calls once."""
        return all(map(self.once, self.units_of(planned)))


def profile_of(job: Job) -> ModelProfile:
    """Run one forward on fake tensors, without an engine."""
    with errors_in_words(job), _model(job) as module:
        recipe = job.recipe()
        before = {id(m): (public_name(name), type(m).__name__) for name, m in module.named_modules()}
        layers = _layers(module)
        trained = under_backend(recipe, module, {**PLAIN, "backend": "none"}, fake=True)
        profiler = _Profiler(trained.model.module)
        batch = batches_of(job, recipe, 0, None if job.real else shared_fakes())(0)
        with profiler, profiler.watching(), trained.model.autocast():
            check_loss(recipe.loss(trained.model, batch))
        modules = [m for m in trained.model.module.modules() if id(m) in before]
        facts = tuple(profiler.facts(m, *before[id(m)]) for m in modules)
        return ModelProfile(modules=facts, operators=max(1, profiler.operators), layers=layers)


def plan_of(job: Job, settings: dict[str, Any]) -> Plan | str:
    """Return what would be simulated with these settings; where they have no meaning, what is wrong with them."""
    with errors_in_words(job):
        made = _planned_model.__wrapped__ if job.real else _planned_model  # memory of a real one must not stay taken
        precision, module = made(pickle.dumps(job))
        try:
            return plan(module, mixed_precision=precision, **settings)
        except FsshardError as error:
            return str(error)


@functools.lru_cache(maxsize=1)  # a search asks for many plans of one model
def _planned_model(job: bytes) -> tuple[Any, nn.Module]:
    asked: Job = pickle.loads(job)
    with _model(asked) as module:
        return asked.recipe().precision, module


@contextlib.contextmanager
def _model(job: Job) -> Iterator[nn.Module]:
    recipe, fakes = job.recipe(), None if job.real else shared_fakes()
    gc.collect()
    with fake_ranks(0, 1), fakes or contextlib.nullcontext():
        seed_all(recipe.seed)
        module = fakes.built(recipe.build) if fakes else recipe.build()
        with fakes.wrapping(module) if fakes else contextlib.nullcontext():
            yield module


def _layers(model: nn.Module) -> frozenset[str]:
    names = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    known = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    kinds = (type(m).__name__ for m in model.modules() if type(m).__name__ in names or isinstance(m, known))
    return frozenset(kinds)


class _Profiler(TorchDispatchMode):
    """Counts operators, calls of modules, and what each module's forward keeps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self.operators = 0
        self._calls: dict[int, int] = {}
        self._saved: dict[int, dict[int, int]] = {}  # module -> storage -> bytes
        self._stack: list[tuple[int, set[int]]] = []  # module at work, and the storages that it was given
        self._kept: list[Tensor] = []  # so that no storage is freed, and its address given to another
        self._parameters = {_storage(t) for t in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module in self._model.modules():
                stack.callback(module.register_forward_pre_hook(self._starts, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._ends, always_call=True).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, lambda kept: kept))
            yield

    def _starts(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls[id(module)] = self._calls.get(id(module), 0) + 1
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._kept += given
        self._stack.append((id(module), set(map(_storage, given))))

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def _save(self, tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key not in self._parameters:
            self._kept.append(tensor)
            for module, given in self._stack:
                if key not in given:
                    self._saved.setdefault(module, {}).setdefault(key, tensor.untyped_storage().nbytes())
        return tensor

    def facts(self, module: nn.Module, name: str, kind: str) -> ModuleFacts:
        return ModuleFacts(
            name=name,
            kind=kind,
            calls=self._calls.get(id(module), 0),
            nbytes=_nbytes(module, True),
            own=_nbytes(module, False),
            saved=sum(self._saved.get(id(module), {}).values()),
            container=is_container(module),
        )


def _storage(tensor: Tensor) -> int:
    local: Any = getattr(tensor, LOCAL_TENSOR, tensor)
    return int(storage_key(local.untyped_storage()))


def _nbytes(module: nn.Module, recurse: bool) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters(recurse=recurse))


# ------------------------------------------------------------------------------------------------ choices


@dataclass(frozen=True)
class Choice:
    """A value of one argument, as :func:`fsshard.wrap` takes it, and the expression that gives it."""

    value: Any
    code: str
    imports: tuple[str, ...] = ()  # statements that the expression needs


Settings = Mapping[str, Choice]
"""Argument -> value, without the backend."""

DEFAULT = Choice(None, "None")
"""No choice: what wrap() does by itself."""


def written(name: str, value: object) -> Choice:
    """Write ``value`` as a user gave it for the argument ``name``, by that name if it has no expression."""
    code = _expression(value)
    return Choice(value, name if code is None else code, ("import torch",) if "torch." in (code or "") else ())


def _expression(value: object) -> str | None:
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
        return f'"{value}"' if isinstance(value, str) and value.isprintable() and '"' not in value else repr(value)
    if isinstance(value, enum.Enum):
        return f'"{value.name}"' if type(value).__name__ == "ShardingStrategy" else None
    if isinstance(value, (Precision, Checkpointing)) and is_dataclass(value):
        parts = {f.name: _expression(getattr(value, f.name)) for f in fields(value)}
        if all(part is not None for part in parts.values()):
            return f"fsshard.{type(value).__name__}({', '.join(f'{key}={part}' for key, part in parts.items())})"
    if isinstance(value, (set, frozenset, list, tuple)) and all(isinstance(item, (str, type)) for item in value):
        names = {item if isinstance(item, str) else item.__name__ for item in value}
        return classes(names).code if names else None
    return None


def classes(names: Iterable[str]) -> Choice:
    """Return the choice of the modules of these classes."""
    return Choice(set(names), "{" + ", ".join(f'"{name}"' for name in sorted(names)) + "}")


# ------------------------------------------------------------------------------------------------ units


def units(profile: ModelProfile) -> tuple[dict[str, Choice], list[Choice]]:
    """Return what ``auto_wrap_policy`` can be: those that are always tried, by name, and others, from coarse to fine.

    Where a size would pick modules that a step calls more than once, which would be gathered each time, the search
    takes the classes of the other ones instead. ``"transformer layers"`` are the units that torch's
    ``transformer_auto_wrap_policy`` gives for these classes.
    """
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    always = {
        "auto": Choice("auto", '"auto"'),
        "one unit": Choice(None, "None"),
        "torch's size-based": Choice(
            size_based_auto_wrap_policy,
            "size_based_auto_wrap_policy",
            ("from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy",),
        ),
    }
    if profile.layers:
        always["transformer layers"] = classes(profile.layers)
    others = [classes(frozenset({name})) for name in _repeated(profile, lambda facts: facts.nbytes, profile.nbytes)]
    return always, others + [Choice(size, f"{size}") for size in _sizes(profile)]


def _sizes(profile: ModelProfile) -> Iterator[int]:
    size, smallest = profile.nbytes // COARSEST, min(facts.own for facts in profile.modules if facts.own)
    while size > smallest:
        yield size
        size //= STEP
    yield 1


def _repeated(profile: ModelProfile, weight: Any, total: int) -> list[str]:
    """Return classes of several modules that are called once and together weigh much; the largest modules first."""
    by_class: dict[str, list[ModuleFacts]] = {}
    for facts in profile.modules[1:]:
        if facts.nbytes and not facts.container:
            by_class.setdefault(facts.kind, []).append(facts)
    found = {
        name: max(map(weight, group))
        for name, group in by_class.items()
        if len(group) > 1
        and all(profile.once(facts) for facts in group)
        and sum(map(weight, group)) >= max(1, SHARE * total)
    }
    return sorted(found, key=lambda name: (-found[name], name))[:CLASSES]


# ------------------------------------------------------------------------------------------------ recomputation


def recomputations(profile: ModelProfile) -> list[Choice]:
    """Return what ``activation_checkpointing`` can be but nothing: classes of blocks that keep many activations.

    First the classes that together keep most of it in pieces: from the root down, the first modules that keep at most
    :data:`SHARE` of it.
    """
    pieces = frozenset(_pieces(profile))
    repeated = [frozenset({name}) for name in _repeated(profile, lambda facts: facts.saved, profile.saved)]
    return [classes(names) for names in dict.fromkeys([pieces, *repeated]) if names]


def _pieces(profile: ModelProfile) -> Iterator[str]:
    taken: list[str] = []
    for facts in profile.modules[1:]:
        if any(facts.name.startswith(f"{name}.") for name in taken) or facts.container or not facts.saved:
            continue
        if profile.once(facts) and LEAST * profile.saved <= facts.saved <= SHARE * profile.saved:
            taken.append(facts.name)
            yield facts.kind


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to call wrap(): the backend's name, and the other arguments."""

    backend: str
    settings: Settings = field(default_factory=dict)

    def changed(self, **settings: Choice) -> Candidate:
        """Return it with some arguments replaced; :data:`DEFAULT` is left out."""
        kept = {**self.settings, **settings}
        return Candidate(backend=self.backend, settings={k: c for k, c in kept.items() if c is not DEFAULT})

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments of wrap(), without the backend."""
        return {name: choice.value for name, choice in self.settings.items()}

    def code(self, *, lines: bool = False) -> str:
        """Return the arguments as they are written."""
        given = [f'backend="{self.backend}"', *(f"{name}={choice.code}" for name, choice in self.settings.items())]
        return "".join(f"    {text},\n" for text in given) if lines else ", ".join(given)

    def imports(self) -> list[str]:
        """Return what the code needs, ``fsshard`` included."""
        needed = {line for choice in self.settings.values() for line in choice.imports}
        return sorted({*needed, "import fsshard"}, key=lambda line: (line.startswith("from"), line))
