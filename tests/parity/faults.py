"""Trainings with one fault each, planted in raw libraries or in ours, for the comparison to find."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.model.activation_checkpointing import checkpoint_blocks
from fsshard.parity import Engine, Recipe
from fsshard.parity.engine import State, WrappedEngine
from tests.zoo import ComplexAffine, Tied, ToReal, conv_batchnorm, generator, mean_square

# ------------------------------------------------------------------------------------------------------------ recipes


def normal(*shape: int) -> Any:
    """Batches of one tensor, other for every rank and number."""
    return lambda rank, world_size, number: torch.randn(*shape, generator=generator(rank, number))


def loss(model: Any, batch: Tensor) -> Tensor:
    return mean_square(model(batch))


def real_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def recipe(shape: tuple[int, ...] = (4, 6), **given: Any) -> Recipe:
    return Recipe(**{"build": real_mlp, "batches": normal(*shape), "loss": loss, **given})


mlp = functools.partial(recipe, optimizer=torch.optim.SGD, hyper={"lr": 0.1})
adam_mlp = functools.partial(recipe, hyper={"lr": 0.01})
clipped = functools.partial(recipe, clip=0.05)
tied = functools.partial(recipe, build=Tied, shape=(4, 4))
batchnorm = functools.partial(recipe, build=conv_batchnorm, shape=(4, 1, 6, 6))


class Block(nn.Module):
    """A layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.outer = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.drop(torch.tanh(self.inner(x))))


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), Block(), Block(), nn.Linear(8, 3))


def fp32_unit_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), ComplexAffine(8), ToReal(), nn.Linear(8, 3))


dropout = functools.partial(recipe, build=blocks, settings={"auto_wrap_policy": {Block}})
fp32_unit = functools.partial(recipe, build=fp32_unit_model)


# -------------------------------------------------------------------------------------------------- raw FairScale


class RawFairScale(Engine):
    """A FairScale script as they are written: OSS, ShardedDataParallel, ``optimizer.zero_grad()``."""

    name = "raw fairscale"

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        super().__init__(recipe, module)
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS

        self.module = module
        self.optimizer = OSS(module.parameters(), optim=recipe.optimizer, **recipe.hyper)
        self.model = self.sharded = ShardedDataParallel(module, self.optimizer)

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        yield from ()  # only owners hold them

    def states(self) -> Iterator[tuple[str, State]]:
        yield from ()

    def groups(self) -> list[dict[str, Any]]:
        return []


class CarefulFairScale(RawFairScale):
    """The same with the one ``zero_grad`` that FairScale hears of."""

    name = "careful fairscale"

    def zero_grad(self) -> None:
        self.sharded.zero_grad()


# -------------------------------------------------------------------------------------------------- raw torch


class RawDDP(Engine):
    """A script over torch's DDP, without a fault."""

    name = "raw ddp"

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        super().__init__(recipe, module)
        self.module = module
        self.model = nn.parallel.DistributedDataParallel(module)
        self.optimizer = recipe.optimizer(module.parameters(), **recipe.hyper)


class Summed(RawDDP):
    """Forgets to divide by the number of ranks."""

    name = "summed"

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        super().__init__(recipe, module)
        self.model.register_comm_hook(None, _sum)  # type: ignore[attr-defined]


class Off(RawDDP):
    """The gradient of one bias is off by a part of itself."""

    name, part = "off by 1e-3", 1e-3

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        gradient = list(self.module.parameters())[-1].grad
        assert gradient is not None
        if self.part:
            gradient.mul_(1 + self.part)
        else:
            gradient[:1] = torch.nextafter(gradient[:1], torch.full((1,), torch.inf))


class OffBy5(Off):
    name, part = "off by 1e-5", 1e-5


class OffBy6(Off):
    name, part = "off by 1e-6", 1e-6


class OneUnitOff(Off):
    """One element has the next number."""

    name, part = "one unit off", 0.0


def _sum(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    dist.all_reduce(bucket.buffer())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class StaleOptimizer(Engine):
    """Builds the optimizer before ``fully_shard`` replaces the parameters."""

    name = "stale optimizer"

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        super().__init__(recipe, module)
        from torch.distributed.fsdp import fully_shard

        self.optimizer = recipe.optimizer(list(module.parameters()), **recipe.hyper)
        self.model = self.module = fully_shard(module)

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for name, parameter in self.module.named_parameters():
            yield name, parameter.grad.full_tensor()  # type: ignore[union-attr, operator]

    def groups(self) -> list[dict[str, Any]]:
        return []

    def zero_grad(self) -> None:
        self.module.zero_grad()


# -------------------------------------------------------------------------------------------------- ours, sabotaged


class Sabotaged(WrappedEngine):
    """An engine of fsshard in which something is done otherwise."""

    settings: ClassVar[dict[str, Any]] = {"backend": "ddp"}
    count = 0

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        super().__init__(recipe, module, self.settings)


class OtherNumbers(Sabotaged):
    """Rank 1 draws other random numbers."""

    name = "other numbers"

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        if dist.get_rank() == 1:
            torch.rand(1)


def _next_number(gradient: Tensor) -> Tensor:
    return torch.nextafter(gradient, torch.full_like(gradient, torch.inf))


class NextNumbers(Sabotaged):
    """One rank's gradients are the next numbers, before they are reduced."""

    name = "next numbers"
    culprits: ClassVar[dict[int, int]] = {4: 3, 8: 6}

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        super().__init__(recipe, module)
        if dist.get_rank() == self.culprits[dist.get_world_size()]:
            for parameter in module.parameters():
                parameter.register_hook(_next_number)


class OtherWeights(Sabotaged):
    """Rank 1 starts from weights of another seed, and nobody is told."""

    name, settings = "other weights", {"backend": "ddp", "sync_module_states": False}

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        if dist.get_rank() == 1:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(99)
                module[2].reset_parameters()  # type: ignore[index]
        super().__init__(recipe, module)


class Untied(Sabotaged):
    """Gives the second owner of a shared weight a copy of its own."""

    name, settings = "untied", {"backend": "fsdp2"}

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        module.second.w = nn.Parameter(module.first.w.detach().clone())  # type: ignore[union-attr, operator]
        super().__init__(recipe, module)


class LocalClip(Sabotaged):
    """Clips each shard by its own norm."""

    name, settings = "local clip", {"backend": "fsdp2"}

    def clip(self, max_norm: float, norm_type: float) -> float:
        backend = self.model.backend
        local = [g for e in backend.entries.values() if (g := e.grad()) is not None]
        norm = torch.stack([g.norm() for g in local]).norm()
        for gradient in local:
            gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return float(norm)


class ForgetfulCheckpointing(Sabotaged):
    """Recomputes dropout with fresh random numbers."""

    name, settings = "forgetful checkpointing", {"backend": "fsdp2"}

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        checkpoint_blocks(module, {Block}, preserve_rng_state=False)
        super().__init__(recipe, module)


class LowFp32Unit(Sabotaged):
    """Sends an fp32 unit's input through bfloat16."""

    name, settings = "low fp32 unit", {"backend": "fsdp"}

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        owner = next(m for m in module.modules() if isinstance(m, ComplexAffine))
        owner.register_forward_pre_hook(lambda _, inputs: tuple(x.bfloat16().float() for x in inputs))
        super().__init__(recipe, module)


class SkippedStep(Sabotaged):
    """Rank 1 leaves out the third step."""

    name = "skipped step"

    def step(self) -> None:
        self.count += 1
        if not (self.count == 3 and dist.get_rank() == 1):
            super().step()


class SkippedShard(Sabotaged):
    """The third step changes nothing on rank 1, which holds a part of each weight. A step left out, fsshard refuses."""

    name, settings = "skipped shard", {"backend": "fsdp2"}

    def step(self) -> None:
        self.count += 1
        parts = [parameter.to_local().detach() for parameter in self.model.parameters()]
        before = [part.clone() for part in parts]
        super().step()
        if self.count == 3 and dist.get_rank() == 1:
            for part, value in zip(parts, before, strict=True):
                part.copy_(value)


class OtherAverage(Sabotaged):
    """The new weights' part in the average has another last bit."""

    name, settings = "other average", {"backend": "fsdp2"}

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        super().__init__(recipe, module)
        vars(self.model)["ema"] = fsshard.EMA(self.model, decay=0.75 + 2.0**-26)


class OtherNorms(Sabotaged):
    """The norm of the second term has another last bit."""

    name, settings = "other norms", {"backend": "fsdp2"}

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        super().__init__(recipe, module)
        right = self.model.term_gradients
        off = torch.tensor([1, 1 + 2.0**-23])
        vars(self.model)["term_gradients"] = lambda terms: (lambda f: f._replace(norms=f.norms * off))(right(terms))


class OtherWords(Sabotaged):
    """The last letter that rank 1 writes is another."""

    name, settings = "other words", {"backend": "fsdp2"}

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        super().__init__(recipe, module)
        right, off = self.model.generate, torch.zeros(4, 6, dtype=torch.long)
        off[-1, -1] = dist.get_rank()
        vars(self.model)["generate"] = lambda *args, **kwargs: right(*args, **kwargs) ^ off


# -------------------------------------------------------------------------------------------------- bad recipes


def _restless_build() -> nn.Module:
    model = real_mlp()
    with torch.no_grad():
        model[2].bias.copy_(torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8).float())
    return model


def _restless_batches(rank: int, world_size: int, number: int) -> Tensor:
    return torch.frombuffer(bytearray(os.urandom(24)), dtype=torch.uint8).float().reshape(4, 6) / 256


def _restless_loss(model: Any, batch: Tensor) -> Tensor:
    return loss(model, batch) * (1 + os.urandom(2)[0])


def _partial_batches(rank: int, world_size: int, number: int) -> Tensor:
    return normal(4, 6)(rank, world_size, number + 100 * _sharded())


def _wider_batches(rank: int, world_size: int, number: int) -> Tensor:
    return normal(4, 6 + _sharded())(rank, world_size, number)


def _sharded() -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(item, FSDPModule) for item in _built)


_built: list[nn.Module] = []


def _remembered_build() -> nn.Module:
    _built[:] = [real_mlp()]
    return _built[0]


# Weights, batches and a loss from the system's random numbers; batches that depend on the engine.
restless = functools.partial(recipe, build=_restless_build)
restless_batches = functools.partial(recipe, batches=_restless_batches)
restless_loss = functools.partial(recipe, loss=_restless_loss)
partial = functools.partial(recipe, build=_remembered_build, batches=_partial_batches)
wider = functools.partial(recipe, build=_remembered_build, batches=_wider_batches)


class Raises(Sabotaged):
    """Rank 1 raises in the second step."""

    name, settings = "raises", {"backend": "fsdp2"}

    def step(self) -> None:
        self.count += 1
        if self.count == 2 and dist.get_rank() == 1:
            raise ZeroDivisionError("planted")
        super().step()


class Hangs(Raises):
    """Rank 1 goes away for a while in the second step, and rank 0 waits for it in a collective."""

    name = "hangs"

    def step(self) -> None:
        self.count += 1
        if self.count == 2 and dist.get_rank() == 1:
            threading.Event().wait()  # for ever
        WrappedEngine.step(self)
