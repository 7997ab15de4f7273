"""Models and short trainings for test_fully_sharded_data_parallel.py, under FairScale's names and under DDP."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import fairscale.nn.data_parallel as real
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsshard.compat.fairscale.nn import checkpoint_wrapper
from fsshard.compat.fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP
from fsshard.compat.fairscale.nn.data_parallel import auto_wrap_bn

Body = Callable[[Any, torch.Generator], None]

# ------------------------------------------------------------------------------------------------ models


def mlp(bn: bool = True) -> nn.Sequential:
    """BatchNorm and dropout inside; an odd number of elements everywhere, so that parts are padded."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(7) if bn else nn.LayerNorm(7)
    return nn.Sequential(
        nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 7), norm, nn.Dropout(0.2)), nn.GELU(), nn.Linear(7, 3)
    )


def tied() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    return model


class TwoHeads(nn.Module):
    """Ties inside of a unit that is itself inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 5)
        self.body = tied()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.first(x))


class Twice(nn.Module):
    """One module, called twice in a forward."""

    def __init__(self, kind: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = kind(nn.Linear(5, 5)), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(torch.relu(self.a(x))))


class Viewed(nn.Module):
    """Ends in a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin().unsqueeze(0).squeeze(0)


class Residual(nn.Module):
    """Adds to the output of a wrapper in place."""

    def __init__(self, kind: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([kind(Viewed()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            found = block(x)
            found += x
            x = found
        return x


def conv() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    return model.to(memory_format=torch.channels_last)


def t5(kind: Callable[[nn.Module], nn.Module]) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.1, decoder_start_token_id=0))
    for stack in (model.encoder, model.decoder):
        for index, block in enumerate(stack.block):
            stack.block[index] = kind(block)
    return kind(model)


def plainly(module: nn.Module) -> nn.Module:
    """In place of a wrapper, none."""
    return module


def nested(bn: bool = True, wrap_bn: bool = False, kind: Any = FSDP, **options: Any) -> Any:
    """The MLP in two wrappers, the inner one by hand."""
    model = mlp(bn)
    if wrap_bn:
        model[1] = auto_wrap_bn(model[1])
    model[1] = kind(model[1], **options)
    return kind(model, **options)


def around(kind: Callable[[nn.Module], nn.Module]) -> Any:
    """The MLP in a wrapper, and its middle in another kind."""
    model = mlp()
    model[1] = kind(model[1])
    return FSDP(model)


def raw(module: nn.Module, group: Any = None, **options: Any) -> Any:
    """In the real library's wrapper: on the CPU it can do everything but a forward."""
    group = group or dist.group.WORLD
    return real.FullyShardedDataParallel(module, group, group, compute_device=torch.device("cpu"), **options)


def ddp(model: nn.Module) -> DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the argument: ranks' BatchNorms are their own, as in FSDP
        return DistributedDataParallel(model, broadcast_buffers=False)


# ------------------------------------------------------------------------------------------------ training


def step(model: nn.Module, draw: torch.Generator) -> None:
    model(torch.randn(6, 5, generator=draw)).square().mean().backward()


def images(model: nn.Module, draw: torch.Generator) -> None:
    model(torch.randn(2, 3, 8, 8, generator=draw).to(memory_format=torch.channels_last)).square().mean().backward()


def sentences(model: nn.Module, draw: torch.Generator) -> None:
    ids = torch.randint(0, 32, (2, 6), generator=draw)
    model(input_ids=ids, labels=ids).loss.backward()


def without_sync(model: Any, draw: torch.Generator) -> None:
    with model.no_sync():
        step(model, draw)
        step(model, draw)
    step(model, draw)


def two_forwards(model: Any, draw: torch.Generator) -> None:
    """Two forwards and then two backwards without synchronisation, and then as always."""
    with model.no_sync():
        losses = [model(torch.randn(6, 5, generator=draw)).square().mean() for _ in range(2)]
        for loss in losses:
            loss.backward()
    step(model, draw)


def one_loss_of_two(model: nn.Module, draw: torch.Generator) -> None:
    sum(model(torch.randn(6, 5, generator=draw)).square().mean() for _ in range(2)).backward()  # type: ignore[union-attr]


def under_autocast(model: nn.Module, draw: torch.Generator) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(6, 5, generator=draw)).float().square().mean()
    loss.backward()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, body: Body = step, steps: int = 4, seed: int = 0) -> None:
    torch.manual_seed(10 + seed + dist.get_rank())
    draw = torch.Generator().manual_seed(seed + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        body(model, draw)
        optimizer.step()


def trained(model: Any, steps: int = 4) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = adam(model)
    train(model, optimizer, steps=steps)
    return model, optimizer


def differing(model: nn.Module, reference: nn.Module) -> dict[str, float]:
    """Names whose values are not the same to the last bit, with the largest difference; ``keys`` for other names."""
    found, wanted = model.state_dict(), reference.state_dict()
    if found.keys() != wanted.keys():
        return {"keys": 1.0}
    return {name: float((found[name].double() - wanted[name].double()).abs().max()) for name in unlike(found, wanted)}


def unlike(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in other if not torch.equal(one[name], other[name])]


def against_ddp(
    sharded: nn.Module, plain: nn.Module, body: Body = step, build: Callable[..., Any] = adam
) -> dict[str, float]:
    train(sharded, build(sharded), body)
    reference = ddp(plain)
    train(reference, build(reference), body)
    return differing(sharded, reference.module)


def told_by(call: Callable[[], Any]) -> str:
    """Return what is raised, by class and text; "" where nothing is."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def from_every_rank(value: Any) -> list[Any]:
    shared = [None] * dist.get_world_size()
    dist.all_gather_object(shared, value)
    return shared


def from_rank_0(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def consolidated(kind: Any, model: Any) -> dict[str, Tensor]:
    """A whole state, put together by a library's function from the parts of all ranks."""
    parts, descriptions = zip(*from_every_rank((model.local_state_dict(), model.local_metadata_dict())), strict=True)
    return kind.consolidate_shard_weights(list(parts), list(descriptions))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], dict[str, float]]] = {
    "t5": lambda: against_ddp(t5(FSDP), t5(plainly), sentences),
    "conv": lambda: against_ddp(FSDP(conv()), conv(), images),
    "tied": lambda: against_ddp(FSDP(tied()), tied()),
    "tied, unflattened": lambda: against_ddp(FSDP(tied(), flatten_parameters=False), tied()),
    "twice": lambda: against_ddp(FSDP(Twice(FSDP)), Twice(plainly)),
    "checkpointed": lambda: against_ddp(around(lambda m: FSDP(checkpoint_wrapper(m))), mlp()),
    "checkpointed outside": lambda: against_ddp(around(lambda m: checkpoint_wrapper(FSDP(m))), mlp()),
    "in place": lambda: against_ddp(FSDP(Residual(FSDP)), Residual(plainly)),
    "no_sync": lambda: against_ddp(nested(bn=False), mlp(bn=False), without_sync),
    "two forwards": lambda: against_ddp(nested(bn=False), mlp(bn=False), two_forwards),
    "one loss of two": lambda: against_ddp(nested(bn=False), mlp(bn=False), one_loss_of_two),
    "autocast": lambda: against_ddp(
        nested(mixed_precision=True, compute_dtype=torch.float32, clear_autocast_cache=True), mlp(), under_autocast
    ),
}
