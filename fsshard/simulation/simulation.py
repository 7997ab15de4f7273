"""The simulation: the real engine on fake tensors, as one rank of a fake job, in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fsshard.backends import backend_class
from fsshard.errors import ConfigurationError
from fsshard.model.nested import map_leaves
from fsshard.oss.partitioned import PartitionedOptimizer
from fsshard.parity.recipe import Recipe, resolve
from fsshard.parity.shadow import seed_all
from fsshard.simulation.fake_ranks import GlooBuffers, UsedParameters, fake_ranks
from fsshard.simulation.fakes import Fakes
from fsshard.simulation.steps import STEPS, Measured, Trained, make_state, run_steps, under_backend
from fsshard.simulation.tracking import Tracker
from fsshard.torch_private.c10d import flattened

__all__ = ["CUDA_GRANULARITY", "Job", "batches_of", "measure", "shared_fakes", "simulate"]

CUDA_GRANULARITY = 512
"""CUDA's caching allocator hands out multiples of this many bytes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One simulation, as it is sent to the process that runs it.

    Attributes:
        source: what :func:`~fsshard.parity.recipe.resolve` makes a recipe of.
        changes: fields of the recipe to replace.
        backend: a backend's name.
        mesh: shape of the device mesh: (ranks,), or (replicas, shards).
        settings: further keyword arguments of :func:`fsshard.wrap`.
        device: the device type that it is for: what the optimizer and the allocator would do there.
        cpu_offload: count what is left on the device under ``cpu_offload=True``.
        real: with real tensors.
    """

    source: Any
    changes: Mapping[str, Any]
    backend: str
    mesh: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    cpu_offload: bool = False
    real: bool = False

    @property
    def world_size(self) -> int:
        """How many ranks share the work."""
        size = 1
        for length in self.mesh:
            size *= length
        return size

    def recipe(self) -> Recipe:
        """The recipe with its changes, and with the optimizer as it would be on the device."""
        recipe = resolve(self.source)
        changed = Recipe(**{**vars(recipe), **self.changes, "settings": {**recipe.settings, **self.settings}})
        if compiled := changed.settings.get("compile"):
            raise ConfigurationError(
                f"compile={compiled!r}: what compiled code allocates cannot be estimated; leave it out to estimate "
                "the same training without compilation"
            )
        known = inspect.signature(changed.optimizer.__init__).parameters
        if self.device != "cuda" or "foreach" not in known or {"foreach", "fused", "capturable"} & set(changed.hyper):
            return changed
        # torch's default on a GPU, which on the CPU device that stands for it would be False (torch 2.13).
        return Recipe(**{**vars(changed), "hyper": {**changed.hyper, "foreach": True}})


def simulate(job: Job) -> Measured:
    """The training step of the rank that needs the most memory."""
    recipe = job.recipe()
    heaviest, measured = _simulate_rank(job, recipe, 0)
    if heaviest:
        _, measured = _simulate_rank(job, recipe, heaviest)
    assert measured is not None
    return measured


def _simulate_rank(job: Job, recipe: Recipe, rank: int) -> tuple[int, Measured | None]:
    """Which rank owns the most, and rank ``rank``'s step if it is that one."""
    gc.collect()
    with fake_ranks(rank, job.world_size, "fake" if job.device == "cuda" else "gloo"):
        mesh = _mesh(job)
        seed_all(recipe.seed)
        fakes = None if job.real else shared_fakes()
        tracker = Tracker(granularity=CUDA_GRANULARITY if job.device == "cuda" else 1)
        with fakes or contextlib.nullcontext():
            module = fakes.built(recipe.build) if fakes else recipe.build()
            with tracker:
                simulating = backend_class(job.backend, job.world_size).simulating()
                with fakes.wrapping(module) if fakes else contextlib.nullcontext(), simulating:
                    trained = under_backend(recipe, module, {"backend": job.backend, "device_mesh": mesh}, fake=True)
                heaviest = _heaviest_rank(trained, rank)
                if heaviest != rank:
                    return heaviest, None
                batch = batches_of(job, recipe, rank, fakes)
                partly = bool(recipe.settings.get("find_unused_parameters"))
                with contextlib.nullcontext() if job.device == "cuda" else _gloo(), _used(fakes is not None and partly):
                    ahead = fakes is not None and not partly  # else only a step shows which parameters have states
                    if ahead:
                        make_state(trained, tracker)
                    steps = 1 if ahead else STEPS
                    return rank, run_steps(trained, tracker, batch, rank, steps=steps, offloaded=job.cpu_offload)


def _gloo() -> GlooBuffers:
    return GlooBuffers()  # type: ignore[no-untyped-call]


def _used(needed: bool) -> contextlib.AbstractContextManager[Any]:
    return UsedParameters() if needed else contextlib.nullcontext()


@functools.cache
def shared_fakes() -> Fakes:
    """One for all jobs of this process: what a recipe caches is of one kind then."""
    return Fakes()


def batches_of(job: Job, recipe: Recipe, rank: int, fakes: Fakes | None) -> Callable[[int], Any]:
    """A function of the step's number: the batch that ``rank`` gets there."""

    def batch(number: int) -> Any:
        if fakes is None:
            return recipe.batches(rank, job.world_size, number)
        with fakes.left():
            made = recipe.batches(rank, job.world_size, number)
        return fakes.of(made)

    return batch


def _mesh(job: Job) -> Any:
    """Made outside of the fake mode: torch reads a mesh's ranks from memory (torch 2.13: a data-dependent error)."""
    from torch.distributed.device_mesh import init_device_mesh

    names = ("replicate", "shard")[-len(job.mesh) :]
    mesh = init_device_mesh("cpu", job.mesh, mesh_dim_names=names)
    if len(job.mesh) == 2:
        flattened(mesh)  # wrap() asks for it, and would find it made
    return mesh


def _heaviest_rank(trained: Trained, rank: int) -> int:
    """The rank that trains most of the parameters; where nothing is frozen, engines that cut them give rank 0 most."""
    owned: dict[int, int] = {}
    optimizer = trained.optimizer.inner
    if isinstance(optimizer, PartitionedOptimizer):  # whole parameters
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            owner = optimizer.owner_of(parameter)
            if owner is not None:
                owned[owner] = owned.get(owner, 0) + parameter.numel() * parameter.element_size()
    elif any(not entry.parameter.requires_grad for entry in trained.model.backend.entries.values()):
        owned = _trained_by_rank(trained.model.backend)
    return max(sorted(owned), key=lambda owner: owned[owner]) if owned else rank


def _trained_by_rank(backend: Any) -> dict[int, int]:
    """Rank -> bytes that its optimizer keeps states of. A frozen layer can fill the whole shard of a rank of FSDP1."""
    found: dict[int, int] = {}
    if not backend.shards_within_parameters:
        return found
    ranks = range(backend.divided_among)
    for entry in backend.entries.values():
        if not entry.parameter.requires_grad:
            continue
        first = bisect_left(ranks, True, key=lambda rank: backend.part_of(entry, rank)[1] > 0)
        for rank in ranks[first:]:
            start, stop = backend.part_of(entry, rank)
            if start == stop:
                break
            found[rank] = found.get(rank, 0) + (stop - start) * entry.parameter.dtype.itemsize
    return found


def measure(job: Job, steps: int = STEPS + 1) -> Measured:
    """The same step on real tensors, on this rank of a running job of ``job.world_size`` ranks. Collective."""
    recipe, rank = job.recipe(), dist.get_rank()
    seed_all(recipe.seed)
    on_gpu = job.device == "cuda"
    tracker = Tracker(granularity=CUDA_GRANULARITY if on_gpu else 1, device=job.device)
    made = batches_of(job, recipe, rank, None)

    def batch(number: int) -> Any:
        return map_leaves(lambda leaf: leaf.to(job.device) if isinstance(leaf, Tensor) else leaf, made(number))

    gc.collect()
    with tracker:
        trained = under_backend(recipe, recipe.build(), {"backend": job.backend}, fake=False)
        return run_steps(trained, tracker, batch, rank, steps=steps)
