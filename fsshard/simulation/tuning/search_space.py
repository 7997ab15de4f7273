"""Reads off a model what a search can choose from: values of wrap()'s arguments, and the code that writes them."""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

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
"""Arguments of which a plan is made."""

COARSEST, STEP = 8, 8
"""Sizes of units that are tried: the parameters' bytes over 8, over 64 and so on, and at last any module that owns
parameters."""

# Up to CLASSES classes are tried that hold at least this SHARE of the parameters (or, to be recomputed, of the
# activations); a module that keeps less than LEAST of the activations is not worth computing again.
SHARE, LEAST, CLASSES = 0.25, 0.01, 3


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """One module of a model, and how a step uses it."""

    name: str  # the first fully qualified one
    kind: str  # name of its class
    once: bool  # a forward of the model calls it once
    nbytes: int  # of all parameters in it
    own: int  # bytes of the parameters that it holds itself
    saved: int  # bytes that its forward keeps for the backward, beyond what it was given and parameters
    container: bool  # it is never called, by its nature


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model's modules, and what a forward calls."""

    modules: tuple[ModuleFacts, ...]  # the root first, in the model's order
    operators: int = 1  # how many a forward calls
    layers: set[str] = field(default_factory=set)  # classes of a transformer's layers: the model's own, or torch's

    def classes_of_units(self, planned: Plan) -> set[str]:
        """Return the classes of the plan's units, without those of which a module is not called once."""
        often = {facts.kind for facts in self.modules if facts.nbytes and not facts.once}
        names = set(planned.unit_names)
        return {facts.kind for facts in self.modules if facts.name in names} - often

    def gathered_once(self, planned: Plan) -> bool:
        """Return whether each unit below the root is a module that a forward calls once."""
        names = set(planned.unit_names)
        return all(facts.once for facts in self.modules if facts.name in names)


def profile_of(job: Job) -> ModelProfile:
    """Run one forward on fake tensors, without an engine."""
    with errors_in_words(job), _model(job) as module:
        recipe = job.recipe()
        before = {id(m): (public_name(name), type(m).__name__) for name, m in module.named_modules()}
        names = {name for m in module.modules() for name in getattr(m, "_no_split_modules", None) or ()}
        known = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        layers = {type(m).__name__ for m in module.modules() if type(m).__name__ in names or isinstance(m, known)}
        trained = under_backend(recipe, module, {**PLAIN, "backend": "none"}, fake=True)
        model = trained.model.module
        profiler = _Profiler(model)
        batch = batches_of(job, recipe, 0, None if job.real else shared_fakes())(0)
        with profiler, profiler.watching(), trained.model.autocast():
            check_loss(recipe.loss(trained.model, batch))
        once = max(1, profiler.calls[id(model)])
        facts = (
            ModuleFacts(
                name=before[id(m)][0],
                kind=before[id(m)][1],
                once=profiler.calls[id(m)] == once,
                nbytes=sum(p.numel() * p.element_size() for p in m.parameters()),
                own=sum(p.numel() * p.element_size() for p in m.parameters(recurse=False)),
                saved=sum(profiler.saved[id(m)].values()),
                container=is_container(m),
            )
            for m in model.modules()
            if id(m) in before
        )
        return ModelProfile(modules=tuple(facts), operators=max(1, profiler.operators), layers=layers)


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


class _Profiler(TorchDispatchMode):
    """Counts operators, calls of modules, and what each module's forward keeps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self.operators = 0
        self.calls: Counter[int] = Counter()  # by the module's id
        self.saved: defaultdict[int, dict[int, int]] = defaultdict(dict)  # module -> storage -> bytes
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
        self.calls[id(module)] += 1
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
                    self.saved[module].setdefault(key, tensor.untyped_storage().nbytes())
        return tensor


def _storage(tensor: Tensor) -> int:
    local: Any = getattr(tensor, LOCAL_TENSOR, tensor)
    return int(storage_key(local.untyped_storage()))


# ------------------------------------------------------------------------------------------------ as code


def code_of(name: str, value: object) -> str:
    """Return the expression of what is given for the argument ``name`` of wrap(), or that name where there is none."""
    return _expression(value) or name


def _expression(value: object) -> str | None:
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
        return f'"{value}"' if isinstance(value, str) and value.isprintable() and '"' not in value else repr(value)
    if isinstance(value, enum.Enum):
        return f'"{value.name}"' if type(value).__name__ == "ShardingStrategy" else None
    if isinstance(value, Precision):
        return f"fsshard.{value!r}"
    if isinstance(value, Checkpointing) and (policy := _expression(value.policy)):
        more = f"offload_to_cpu={value.offload_to_cpu}, preserve_rng_state={value.preserve_rng_state}"
        more += "" if value.recompute else ", recompute=False"
        return f"fsshard.Checkpointing(policy={policy}, {more})"
    if isinstance(value, (set, frozenset, list, tuple)) and all(isinstance(item, (str, type)) for item in value):
        names = sorted({item if isinstance(item, str) else item.__name__ for item in value})
        return "{" + ", ".join(f'"{name}"' for name in names) + "}" if names else None
    return "size_based_auto_wrap_policy" if value is size_based_auto_wrap_policy else None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to call wrap(): the backend's name, and the other arguments."""

    backend: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def changed(self, **settings: Any) -> Candidate:
        """Return it with some arguments replaced; ``...`` leaves one out."""
        kept = {name: value for name, value in {**self.settings, **settings}.items() if value is not ...}
        return Candidate(backend=self.backend, settings=kept)

    def code(self, *, lines: bool = False) -> str:
        """Return the arguments as they are written."""
        given = [f"{name}={code_of(name, value)}" for name, value in {"backend": self.backend, **self.settings}.items()]
        return "".join(f"    {text},\n" for text in given) if lines else ", ".join(given)

    def imports(self) -> list[str]:
        """Return the statements that the code needs, ``import fsshard`` included."""
        torchs = ["import torch"] if "torch." in self.code() else []
        if size_based_auto_wrap_policy in self.settings.values():
            torchs.append("from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy")
        return ["import fsshard", *torchs]


def units(profile: ModelProfile) -> tuple[dict[str, Any], list[Any]]:
    """Return values of ``auto_wrap_policy``: those that are always tried, by name, and others, from coarse to fine.

    Where a size would pick modules that a step calls more than once, which would be gathered each time, the search
    takes the classes of the other ones instead. ``"transformer layers"`` are the units that torch's
    ``transformer_auto_wrap_policy`` gives for these classes.
    """
    always: dict[str, Any] = {"auto": "auto", "one unit": None, "torch's size-based": size_based_auto_wrap_policy}
    if profile.layers:
        always["transformer layers"] = profile.layers
    repeated = _repeated(profile, lambda facts: facts.nbytes)
    return always, [*({name} for name in repeated), *_sizes(profile)]


def _sizes(profile: ModelProfile) -> Iterator[int]:
    size, smallest = profile.modules[0].nbytes // COARSEST, min(facts.own for facts in profile.modules if facts.own)
    while size > smallest:
        yield size
        size //= STEP
    yield 1


def _repeated(profile: ModelProfile, weight: Any) -> list[str]:
    """Return classes of several modules that are called once and together weigh much; the largest modules first."""
    by_class: dict[str, list[ModuleFacts]] = {}
    for facts in profile.modules[1:]:
        if facts.nbytes and not facts.container:
            by_class.setdefault(facts.kind, []).append(facts)
    found = {
        name: max(map(weight, group))
        for name, group in by_class.items()
        if len(group) > 1
        and all(facts.once for facts in group)
        and sum(map(weight, group)) >= max(1, SHARE * weight(profile.modules[0]))
    }
    return sorted(found, key=lambda name: (-found[name], name))[:CLASSES]


def recomputations(profile: ModelProfile) -> list[set[str]]:
    """Return what ``activation_checkpointing`` can be but nothing: classes of blocks that keep many activations.

    First the classes that together keep most of it in pieces: from the root down, the first modules that keep at most
    :data:`SHARE` of it.
    """
    repeated = [{name} for name in _repeated(profile, lambda facts: facts.saved)]
    pieces = set(_pieces(profile))
    return [names for names in (pieces, *(one for one in repeated if one != pieces)) if names]


def offloadings(choices: list[set[str]]) -> list[Checkpointing]:
    """Return how the first of these choices can use host memory: for the blocks' inputs, or for all activations."""
    flags = (True, False)
    return [Checkpointing(each, offload_to_cpu=True, recompute=again) for each in choices[:1] for again in flags]


def _pieces(profile: ModelProfile) -> Iterator[str]:
    taken: list[str] = []
    whole = profile.modules[0].saved
    for facts in profile.modules[1:]:
        if any(facts.name.startswith(f"{name}.") for name in taken) or facts.container or not facts.saved:
            continue
        if facts.once and LEAST * whole <= facts.saved <= SHARE * whole:
            taken.append(facts.name)
            yield facts.kind
