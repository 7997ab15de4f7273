"""Reads off a model what a search can choose from: values of wrap()'s arguments, and the code that writes them."""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from fsshard.complex_params.slots import public_name
from fsshard.errors import FsshardError
from fsshard.nested import tensors
from fsshard.planning.plan import Plan, plan
from fsshard.planning.policies import Checkpointing, Precision, is_container
from fsshard.recipes.recipe import Arguments, Sizes, check_loss, mesh_text, seed_all
from fsshard.simulation.fakes import fake_ranks
from fsshard.simulation.simulation import Job, Settings, batches_of, shared_fakes, under_backend
from fsshard.simulation.worker import errors_in_words
from fsshard.torch_private.dispatch import TorchDispatchMode
from fsshard.torch_private.tensors import LOCAL_TENSOR, storage_key

Names = set[str]

# Arguments of which a plan is made.
PLAIN = {"auto_wrap_policy": None, "activation_checkpointing": None}

# Sizes of units that are tried: the parameters' bytes over 8, over 64 and so on, and at last any module that owns
# parameters.
STEP = 8
# Classes are tried that hold at least this share of the parameters (or, to be recomputed, of the activations).
SHARE = 0.25
# The most classes that are tried.
CLASSES = 3
# A module that keeps a smaller share of the activations is not worth computing again.
LEAST = 0.01


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
    layers: Names = field(default_factory=set)  # classes of a transformer's layers: the model's own, or torch's

    def classes_of_units(self, planned: Plan) -> Names:
        """Return the classes of the plan's units, without those of which a module is not called once."""
        names = set(planned.unit_names)
        of_units = {facts.kind for facts in self.modules if facts.name in names}
        repeated = {facts.kind for facts in self.modules if facts.nbytes and not facts.once}
        return of_units - repeated

    def gathered_once(self, planned: Plan) -> bool:
        """Return whether each unit below the root is a module that a forward calls once."""
        names = set(planned.unit_names)
        return all(facts.once for facts in self.modules if facts.name in names)


def profile_of(job: Job) -> ModelProfile:
    """Run one forward on fake tensors, without an engine."""
    with errors_in_words(job), _model(job) as module:
        recipe = job.recipe()
        # Names and classes of before: an engine may change both.
        names = {id(each): public_name(name) for name, each in module.named_modules()}
        classes = {id(each): type(each).__name__ for each in module.modules()}
        layers = _layer_classes(module)
        trained = under_backend(recipe, module, {**PLAIN, "backend": "none"}, fake=True)
        model = trained.model.module
        profiler = _Profiler(model)
        batch = batches_of(job, recipe, 0, None if job.real else shared_fakes())(0)
        with profiler, profiler.watching(), trained.model.autocast():
            check_loss(recipe.loss(trained.model, batch))
        # A loss may call the model several times.
        once = max(1, profiler.calls[id(model)])
        modules = []
        for each in model.modules():
            key = id(each)
            if key not in names:
                continue
            facts = ModuleFacts(
                name=names[key],
                kind=classes[key],
                once=profiler.calls[key] == once,
                nbytes=sum(map(_nbytes, each.parameters())),
                own=sum(map(_nbytes, each.parameters(recurse=False))),
                saved=sum(profiler.saved[key].values()),
                container=is_container(each),
            )
            modules.append(facts)
        return ModelProfile(
            modules=tuple(modules),
            operators=max(1, profiler.operators),
            layers=layers,
        )


def _layer_classes(model: nn.Module) -> Names:
    """Return the classes of a transformer's layers."""
    names: Names = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    classes = set()
    for module in model.modules():
        name = type(module).__name__
        if name in names or isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            classes.add(name)
    return classes


def _nbytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def plan_of(job: Job, settings: Settings) -> Plan | str:
    """Return what would be simulated with these settings; where they have no meaning, what is wrong with them."""
    with errors_in_words(job):
        # The memory of a real model must not stay taken.
        make = _planned_model.__wrapped__ if job.real else _planned_model
        precision, module = make(pickle.dumps(job))
        try:
            return plan(module, mixed_precision=precision, **settings)
        except FsshardError as error:
            return str(error)


# A search asks for many plans of one model.
@functools.lru_cache(maxsize=1)
def _planned_model(pickled: bytes) -> tuple[Any, nn.Module]:
    job: Job = pickle.loads(pickled)
    with _model(job) as module:
        return job.recipe().precision, module


@contextlib.contextmanager
def _model(job: Job) -> Iterator[nn.Module]:
    recipe = job.recipe()
    gc.collect()
    with fake_ranks(0, 1):
        seed_all(recipe.seed)
        if job.real:
            yield recipe.build()
            return
        fakes = shared_fakes()
        with fakes:
            module = fakes.built(recipe.build)
            with fakes.wrapping(module):
                yield module


class _Profiler(TorchDispatchMode):
    """Counts operators, calls of modules, and what each module's forward keeps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self.operators = 0
        self.calls: Counter[int] = Counter()  # by the module's id
        self.saved: defaultdict[int, dict[int, int]] = defaultdict(dict)  # module -> storage -> bytes
        # The modules at work, and the storages that each was given.
        self._stack: list[tuple[int, set[int]]] = []
        # They are kept, so that no storage is freed, and its address given to another.
        self._kept: list[Tensor] = []
        self._parameters = set(map(_storage, (*model.parameters(), *model.buffers())))

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
        inputs = list(tensors((args, kwargs)))
        self._kept += inputs
        self._stack.append((id(module), set(map(_storage, inputs))))

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def _save(self, tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key not in self._parameters:
            self._kept.append(tensor)
            for module, inputs in self._stack:
                if key not in inputs:
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
    if isinstance(value, str) and value.isprintable() and '"' not in value:
        return f'"{value}"'
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f'"{value.name}"' if type(value).__name__ == "ShardingStrategy" else None
    if isinstance(value, Precision):
        return f"fsshard.{value!r}"
    if isinstance(value, Checkpointing):
        return _checkpointing(value)
    if isinstance(value, (set, frozenset, list, tuple)):
        return _set_of_names(value)
    if value is size_based_auto_wrap_policy:
        return "size_based_auto_wrap_policy"
    return None


def _checkpointing(value: Checkpointing) -> str | None:
    policy = _expression(value.policy)
    if not policy:
        return None
    arguments = f"policy={policy}, offload_to_cpu={value.offload_to_cpu}"
    arguments += f", preserve_rng_state={value.preserve_rng_state}"
    if not value.recompute:
        arguments += ", recompute=False"
    return f"fsshard.Checkpointing({arguments})"


def _set_of_names(items: Iterable[object]) -> str | None:
    names = set()
    for item in items:
        if not isinstance(item, (str, type)):
            return None
        names.add(item if isinstance(item, str) else item.__name__)
    if not names:
        return None
    quoted = [f'"{name}"' for name in sorted(names)]
    return f"{{{', '.join(quoted)}}}"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to call wrap(): the backend's name, and the other arguments.

    ``mesh`` has the sizes by name of the mesh over which ranks are arranged; None: one row of data-parallel ranks.
    """

    backend: str
    settings: Arguments = field(default_factory=dict)
    mesh: Sizes | None = None

    def changed(self, **settings: Any) -> Candidate:
        """Return it with some arguments replaced; ``...`` leaves one out."""
        changed = {**self.settings, **settings}
        return Candidate(
            backend=self.backend,
            settings={name: value for name, value in changed.items() if value is not ...},
            mesh=self.mesh,
        )

    def code(self, *, lines: bool = False) -> str:
        """Return the arguments as they are written."""
        arguments = [
            f"{name}={code_of(name, value)}" for name, value in {"backend": self.backend, **self.settings}.items()
        ]
        if self.mesh is not None:
            argument = "device_mesh=mesh"
            if not lines:
                argument = f"mesh of {mesh_text(self.mesh)}"
            arguments.append(argument)
        if lines:
            return "".join(f"    {text},\n" for text in arguments)
        return ", ".join(arguments)

    def imports(self) -> list[str]:
        """Return the statements that the code needs, ``import fsshard`` included."""
        statements = ["import fsshard"]
        if "torch." in self.code():
            statements.append("import torch")
        if size_based_auto_wrap_policy in self.settings.values():
            statements.append("from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy")
        if self.mesh is not None:
            statements.append("from torch.distributed.device_mesh import init_device_mesh")
        return statements


def units(profile: ModelProfile) -> tuple[Settings, list[Any]]:
    """Return values of ``auto_wrap_policy``: those that are always tried, by name, and others, from coarse to fine.

    Where a size would pick modules that a step calls more than once, which would be gathered each time, the search
    takes the classes of the other ones instead. ``"transformer layers"`` are the units that torch's
    ``transformer_auto_wrap_policy`` gives for these classes.
    """
    always: Settings = {
        "auto": "auto",
        "one unit": None,
        "torch's size-based": size_based_auto_wrap_policy,
    }
    if profile.layers:
        always["transformer layers"] = profile.layers
    others: list[Any] = _repeated(profile, lambda facts: facts.nbytes)
    smallest = min(facts.own for facts in profile.modules if facts.own)
    size = profile.modules[0].nbytes // STEP
    while size > smallest:
        others.append(size)
        size //= STEP
    # At last each module that owns parameters is a unit.
    others.append(1)
    return always, others


def _repeated(profile: ModelProfile, weight: Callable[[ModuleFacts], int]) -> list[Names]:
    """Return classes of several modules that are called once and together weigh much; the largest modules first."""
    by_class = defaultdict(list)
    for facts in profile.modules[1:]:
        if facts.nbytes and not facts.container:
            by_class[facts.kind].append(facts)
    least = max(1, SHARE * weight(profile.modules[0]))
    ranking = []
    for name, group in by_class.items():
        weights = list(map(weight, group))
        if len(group) > 1 and all(facts.once for facts in group) and sum(weights) >= least:
            ranking.append((-max(weights), name))
    return [{name} for _, name in sorted(ranking)[:CLASSES]]


def recomputations(profile: ModelProfile) -> list[Names]:
    """Return what ``activation_checkpointing`` can be but nothing: classes of blocks that keep many activations.

    First the classes that together keep most of it in pieces: from the root down, the first modules that keep at most
    :data:`SHARE` of it.
    """
    pieces = set(_pieces(profile))
    choices = [pieces] if pieces else []
    for classes in _repeated(profile, lambda facts: facts.saved):
        if classes != pieces:
            choices.append(classes)
    return choices


def offloadings(choices: list[Names]) -> list[Checkpointing]:
    """Return how the first of these choices can use host memory: for the blocks' inputs, or for all activations."""
    if not choices:
        return []
    return [Checkpointing(choices[0], offload_to_cpu=True, recompute=recompute) for recompute in (True, False)]


def _pieces(profile: ModelProfile) -> Iterator[str]:
    prefixes: tuple[str, ...] = ()  # of the modules within a piece
    whole = profile.modules[0].saved
    for facts in profile.modules[1:]:
        if facts.name.startswith(prefixes) or facts.container or not facts.saved:
            continue
        if facts.once and LEAST * whole <= facts.saved <= SHARE * whole:
            prefixes += (f"{facts.name}.",)
            yield facts.kind
