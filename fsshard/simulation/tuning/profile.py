"""Finds out how often a step calls each module of a model, and what it keeps for the backward."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.complex_params.slots import public_name
from fsshard.errors import FsshardError
from fsshard.nested import leaves as tree_leaves
from fsshard.parity.recipe import check_loss
from fsshard.parity.seeding import seed_all
from fsshard.planning.plan import Plan, plan
from fsshard.planning.policies import is_container
from fsshard.simulation.fake_ranks import fake_ranks
from fsshard.simulation.simulation import Job, batches_of, shared_fakes
from fsshard.simulation.steps import under_backend
from fsshard.simulation.worker import errors_in_words
from fsshard.torch_private.dispatch import TorchDispatchMode
from fsshard.torch_private.tensors import LOCAL_TENSOR, storage_key

__all__ = ["ModelProfile", "ModuleFacts", "plans_of", "profile_of"]


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """One module.

    Attributes:
        name: its first fully qualified name.
        kind: name of its class.
        calls: how often a step calls its forward.
        nbytes: of all parameters in it.
        own: of the parameters that it holds itself.
        saved: bytes that its forward keeps for the backward, beyond what it was given and parameters.
        container: it is never called, by its nature.
    """

    name: str
    kind: str
    calls: int
    nbytes: int
    own: int
    saved: int
    container: bool


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model.

    Attributes:
        modules: the root first, in the model's order.
        operators: how many a forward calls.
        layers: names of the classes that are a transformer's layers: the model says so, or they are torch's own.
    """

    modules: tuple[ModuleFacts, ...]
    operators: int = 1
    layers: frozenset[str] = frozenset()

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

    def classes_of_units(self, planned: Plan) -> frozenset[str]:
        """Classes of the plan's units, without those of which a module is not called once."""
        known = {facts.name: facts for facts in self.modules}
        often = {facts.kind for facts in self.modules if facts.nbytes and not self.once(facts)}
        return frozenset(known[unit.name].kind for unit in planned.units[1:]) - often

    def gathered_once(self, planned: Plan) -> bool:
        """Return whether each unit is a module that a forward calls once."""
        known = {facts.name: facts for facts in self.modules}
        return all(self.once(known[unit.name]) for unit in planned.units[1:])


def profile_of(job: Job) -> ModelProfile:
    """Run one forward on fake tensors, without an engine."""
    with errors_in_words(job), _model(job) as module:
        recipe = job.recipe()
        before = {id(m): (public_name(name), type(m).__name__) for name, m in module.named_modules()}
        layers = _layers(module)
        trained = under_backend(recipe, module, {**PLAIN, "backend": "none"}, fake=True)
        watch = _ModuleProfiler(trained.model.module)
        batch = batches_of(job, recipe, 0, None if job.real else shared_fakes())(0)
        with watch.watching(), _counting() as counter, trained.model.autocast():
            check_loss(recipe.loss(trained.model, batch))
        found = [m for m in trained.model.module.modules() if id(m) in before]
        facts = tuple(watch.facts(m, *before[id(m)]) for m in found)
        return ModelProfile(modules=facts, operators=max(1, counter.count), layers=layers)


PLAIN = {"auto_wrap_policy": None, "activation_checkpointing": None}


def plans_of(job: Job, changes: list[dict[str, Any]]) -> list[Plan | str]:
    """Return what would be simulated with each of several settings; where one has no meaning, what is wrong with it."""
    recipe, found = job.recipe(), list[Plan | str]()
    with errors_in_words(job), _model(job) as module:
        for change in changes:
            settings = {**recipe.settings, **change}
            chosen = {name: settings[name] for name in PLAIN if name in settings}
            try:
                found.append(plan(module, mixed_precision=recipe.precision, **chosen))
            except FsshardError as error:
                found.append(str(error))
    return found


@contextlib.contextmanager
def _model(job: Job) -> Iterator[nn.Module]:
    recipe = job.recipe()
    gc.collect()
    with fake_ranks(0, 1), contextlib.nullcontext() if job.real else shared_fakes():
        seed_all(recipe.seed)
        module = recipe.build() if job.real else shared_fakes().built(recipe.build)
        with contextlib.nullcontext() if job.real else shared_fakes().wrapping(module):
            yield module


def _layers(model: nn.Module) -> frozenset[str]:
    names = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    known = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    kinds = (type(m).__name__ for m in model.modules() if type(m).__name__ in names or isinstance(m, known))
    return frozenset(kinds)


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _counting() -> _Counter:
    return _Counter()  # type: ignore[no-untyped-call]


class _ModuleProfiler:
    """Counts calls, and what each module's forward keeps."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._calls: dict[int, int] = {}
        self._saved: dict[int, int] = {}
        self._stack: list[tuple[int, set[int]]] = []  # module at work, and the storages that it was given
        self._seen: dict[int, set[int]] = {}
        self._kept: list[Tensor] = []  # so that no storage is freed, and its address given to another
        self._parameters = {_storage(t) for t in (*model.parameters(), *model.buffers())}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        hooks = []
        for module in self._model.modules():
            hooks.append(module.register_forward_pre_hook(self._starts, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._ends, always_call=True))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda kept: kept):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _starts(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls[id(module)] = self._calls.get(id(module), 0) + 1
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._kept += given
        self._stack.append((id(module), {_storage(tensor) for tensor in given}))

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def _save(self, tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key not in self._parameters:
            self._kept.append(tensor)
            for module, given in self._stack:
                if key not in given and key not in self._seen.setdefault(module, set()):
                    self._seen[module].add(key)
                    self._saved[module] = self._saved.get(module, 0) + tensor.untyped_storage().nbytes()
        return tensor

    def facts(self, module: nn.Module, name: str, kind: str) -> ModuleFacts:
        return ModuleFacts(
            name=name,
            kind=kind,
            calls=self._calls.get(id(module), 0),
            nbytes=_nbytes(module, True),
            own=_nbytes(module, False),
            saved=self._saved.get(id(module), 0),
            container=is_container(module),
        )


def _storage(tensor: Tensor) -> int:
    local: Any = getattr(tensor, LOCAL_TENSOR, tensor)
    return int(storage_key(local.untyped_storage()))


def _nbytes(module: nn.Module, recurse: bool) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters(recurse=recurse))
