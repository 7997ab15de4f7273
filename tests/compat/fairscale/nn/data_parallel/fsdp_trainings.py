"""What the ranks run in test_fully_sharded_data_parallel.py: small trainings under FairScale's names, and under DDP."""

from __future__ import annotations

import gc
import io
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import fairscale.nn.data_parallel as real
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsshard.compat.fairscale.nn import auto_wrap, checkpoint_wrapper, enable_wrap, wrap
from fsshard.compat.fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP
from fsshard.compat.fairscale.nn.data_parallel import TrainingState, auto_wrap_bn, get_fsdp_instances

Model = Callable[[], nn.Module]
Body = Callable[[nn.Module, torch.Generator], None]


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
        self.first = nn.Linear(5, 5)
        self.body = tied()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(self.first(x))
        return output


class Twice(nn.Module):
    """One module, called twice in a forward."""

    def __init__(self, shard: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a: nn.Module = nn.Linear(5, 5)
        self.b = nn.Linear(5, 5)
        self.a = FSDP(self.a) if shard else self.a

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.b(self.a(torch.relu(self.a(x))))
        return output


class Viewed(nn.Module):
    """Ends in a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x).sin().unsqueeze(0).squeeze(0)
        return output


class Residual(nn.Module):
    """Adds to the output of a wrapper in place."""

    def __init__(self, shard: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [Viewed() for _ in range(3)]
        self.blocks = nn.ModuleList([FSDP(block) for block in blocks] if shard else blocks)

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


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.1, decoder_start_token_id=0))


def nested(bn: bool = True, wrap_bn: bool = False, kind: Any = FSDP, **options: Any) -> Any:
    """The MLP in two wrappers, the inner one by hand."""
    model = mlp(bn)
    if wrap_bn:
        model[1] = auto_wrap_bn(model[1])
    model[1] = kind(model[1], **options)
    return kind(model, **options)


def real_nested(bn: bool = True) -> Any:
    """The same in the real library's wrappers: on the CPU it can do everything but a forward."""
    group = dist.group.WORLD
    options = {"process_group": group, "process_group_reduce_scatter": group, "compute_device": torch.device("cpu")}
    return nested(bn, kind=real.FullyShardedDataParallel, **options)


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


def differing(model: nn.Module, reference: nn.Module) -> dict[str, float]:
    """Names whose values are not the same to the last bit, with the largest difference; ``keys`` for other names."""
    found, wanted = model.state_dict(), reference.state_dict()
    if list(found) != list(wanted):
        return {"keys": 1.0}
    wrong = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    return {name: float((found[name].double() - wanted[name].double()).abs().max()) for name in wrong}


def against_ddp(
    sharded: nn.Module, plain: nn.Module, body: Body = step, build: Callable[..., Any] = adam
) -> dict[str, float]:
    train(sharded, build(sharded), body)
    reference = ddp(plain)
    train(reference, build(reference), body)
    return differing(sharded, reference.module)


# ------------------------------------------------------------------------------------------------ parity


def parity_mlp(options: dict[str, Any], wrap_bn: bool) -> dict[str, float]:
    return against_ddp(nested(wrap_bn=wrap_bn, **options), mlp())


def parity_model(name: str) -> dict[str, float]:
    if name == "t5":
        model = t5()
        for stack in (model.encoder, model.decoder):
            for index, block in enumerate(stack.block):
                stack.block[index] = FSDP(block)
        model = FSDP(model)
        assert model.config.d_model == 16
        return against_ddp(model, t5(), sentences)
    if name == "conv":
        return against_ddp(FSDP(conv()), conv(), images)
    if name == "tied":
        return against_ddp(FSDP(tied()), tied())
    if name == "tied, unflattened":
        return against_ddp(FSDP(tied(), flatten_parameters=False), tied())
    if name == "in place":
        return against_ddp(FSDP(Residual(True)), Residual(False))
    assert name == "twice"
    return against_ddp(FSDP(Twice(True)), Twice(False))


def parity_wrapped_by_policy() -> tuple[dict[str, float], int]:
    def small(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
        return unwrapped_params >= 20 or module_is_root

    with enable_wrap(small, wrapper_cls=FSDP):
        model = auto_wrap(mlp())
    return against_ddp(model, mlp()), len(get_fsdp_instances(model))


def parity_wrapped_by_hand() -> dict[str, float]:
    model = mlp()
    with enable_wrap(wrapper_cls=FSDP, reshard_after_forward=False):
        model[1] = wrap(model[1], reshard_after_forward=True)
        model = wrap(model)  # type: ignore[assignment]
    assert [each.reshard_after_forward for each in get_fsdp_instances(model)] == [False, True]
    return against_ddp(model, mlp())


def parity_checkpointed(outside: bool) -> dict[str, float]:
    model = mlp()
    model[1] = checkpoint_wrapper(FSDP(model[1])) if outside else FSDP(checkpoint_wrapper(model[1]))
    return against_ddp(FSDP(model), mlp())


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


def parity_body(name: str) -> dict[str, float]:
    body = {"no_sync": without_sync, "two_forwards": two_forwards, "one_loss": one_loss_of_two}[name]
    return against_ddp(nested(bn=False), mlp(bn=False), body)


def frozen(model: Any, part: nn.Module, flags: list[bool], again: Callable[[nn.Module], nn.Module]) -> Any:
    optimizer = sgd(model)
    for seed, flag in enumerate(flags):
        for parameter in part.parameters():
            parameter.requires_grad_(flag)
        model = again(model)
        train(model, optimizer, seed=seed)
    return model


def parity_frozen(flags: list[bool]) -> dict[str, float]:
    """Freeze and unfreeze a wrapper between steps; DDP is built again each time, which it needs."""
    model, plain = nested(bn=False), mlp(bn=False)
    frozen(model, model[1], flags, lambda same: same)
    optimizer = sgd(plain)
    for seed, flag in enumerate(flags):
        plain[1].requires_grad_(flag)
        train(ddp(plain), optimizer, seed=seed)
    return differing(model, plain)


def gradients_of_accumulation(backwards: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """By parameter: the gradient after two synchronised backwards, and the means of each alone over ranks."""
    model, plain = nested(bn=False).eval(), mlp(bn=False).eval()
    draw = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(6, 5, generator=draw) for _ in range(2)]
    if backwards == "in turn":
        for batch in batches:
            model(batch).square().mean().backward()
    elif backwards == "after both forwards":
        losses = [model(batch).square().mean() for batch in batches]
        for loss in losses:
            loss.backward()
    else:
        batches[1] = batches[0]
        loss = model(batches[0]).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    alone = []
    for batch in batches:
        plain.zero_grad()
        plain(batch).square().mean().backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
        alone.append([parameter.grad for parameter in plain.parameters()])
    values = [parameter.detach().clone() for parameter in plain.parameters()]
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(parameter.grad)
    with model.summon_full_params(volatile=True):
        found = [parameter.detach().clone() for parameter in model.parameters()]
    assert len(found) == len(values)
    return list(zip(found, *alone, strict=True))  # type: ignore[arg-type]


def clipping(norm_type: float) -> tuple[list[tuple[float, float]], dict[str, float]]:
    norms: dict[bool, list[float]] = {True: [], False: []}

    def body(model: Any, draw: torch.Generator) -> None:
        step(model, draw)
        ours = isinstance(model, FSDP)
        clip = model.clip_grad_norm_ if ours else lambda *a: torch.nn.utils.clip_grad_norm_(model.parameters(), *a)
        norms[ours].append(float(clip(0.05, norm_type)))

    wrong = against_ddp(nested(bn=False), mlp(bn=False), body, sgd)
    return list(zip(norms[True], norms[False], strict=True)), wrong


def said_by(call: Callable[[], Any]) -> str:
    """What is raised, by class and text; "" where nothing is."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def optimizers_from_before() -> dict[str, Any]:
    """What an optimizer says at its step that was built before wrapping, over all or over what an inner one took."""
    found: dict[str, Any] = {}
    for name, part in (("all", lambda m: m), ("outer", lambda m: m[0]), ("inner", lambda m: m[1])):
        plain = mlp(bn=False)
        optimizer = torch.optim.AdamW(part(plain).parameters())
        plain[1] = FSDP(plain[1])
        model = FSDP(plain)
        model(torch.ones(2, 5)).sum().backward()
        found[name] = said_by(optimizer.step)
        torch.optim.AdamW(model.parameters()).step()
    plain = mlp(bn=False)
    optimizer = adam(plain)
    plain[1] = FSDP(plain[1], flatten_parameters=False)
    kept = FSDP(plain, flatten_parameters=False)
    found["unflattened"] = against_ddp(kept, mlp(bn=False), build=lambda m: optimizer if m is kept else adam(m))
    return found


def clipped_by_torch() -> list[Any]:
    """What marks say to torch's clip_grad_norm_, at once and after steps and conversions; and with one rank each."""
    found: list[Any] = []
    for options in ({}, {"flatten_parameters": False}):
        model = nested(bn=False, **options)
        at_once = {getattr(p, "_fsshard_clip_with", "") for p in model.parameters()}
        train(model, adam(model))
        x = torch.ones(2, 5)
        if model.flatten_parameters:
            model.double()
            x = x.double()
        later = {getattr(p, "_fsshard_clip_with", "") for p in model.parameters()}
        model(x).sum().backward()
        gradients = [p.grad.clone() for p in model.params_with_grad]
        said = said_by(lambda m=model: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05))
        same = all(torch.equal(p.grad, g) for p, g in zip(model.params_with_grad, gradients, strict=True))
        found.append((at_once | later, said, same, float(model.clip_grad_norm_(0.05)) > 0))
    return found


# ------------------------------------------------------------------------------------------------ what is in the way


def whole_after_a_forward() -> list[bool]:
    """Values that are changed between forwards without a backward are those that are computed with."""
    model, plain = nested(bn=False).eval(), mlp(bn=False).eval()
    x = torch.ones(2, 5)
    right = []
    for factor in (2.0, 0.5):
        model(x)
        with model.summon_full_params(), torch.no_grad():
            for parameter in [*model.parameters(), *plain.parameters()]:
                parameter.mul_(factor)
        right.append(torch.equal(model(x), plain(x)))
    for parameter in [*model.parameters(), *plain.parameters()]:
        parameter.data.mul_(3)
    return [*right, torch.equal(model(x), plain(x))]


def replaced_values() -> bool:
    """Parameters, or their data, that are replaced and not written in place, stay too."""
    model = nested(bn=False)
    with model.summon_full_params():
        model[0].weight.data = torch.ones(7, 5)
        model[1][0].bias = nn.Parameter(torch.full((7,), 3.0))
    found = model.state_dict()
    return bool((found["0.weight"] == 1).all() and (found["1.0.bias"] == 3).all())


def part_before_whole() -> dict[str, float]:
    """An inner wrapper is used by itself before the outer one is."""
    model = nested()
    model[1].state_dict()
    model.eval()
    model[1](torch.ones(2, 7))
    model.train()
    return against_ddp(model, mlp())


def wrapped_again() -> tuple[dict[str, float], bool]:
    inner = FSDP(mlp(bn=False))
    inner(torch.ones(4, 5)).sum().backward()
    inner.zero_grad()
    outer = FSDP(inner)
    return against_ddp(outer, mlp(bn=False)), outer._has_params


def after_an_exception(where: str) -> dict[str, float]:
    """A forward or a backward breaks off, the script goes on: as if it had not been."""
    model, plain = nested(bn=False), ddp(mlp(bn=False))
    optimizers = adam(model), adam(plain)
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        train(each, optimizer, steps=2)
    hook: Any = None
    if where == "forward":
        hook = model[3].register_forward_pre_hook(_break)
    for _ in range(2):
        try:
            output = model(torch.ones(2, 5))
            if where == "backward":
                output.register_hook(_break)
            output.sum().backward()
        except ZeroDivisionError:
            continue
        raise AssertionError("nothing was raised")
    if hook is not None:
        hook.remove()
        assert model.training_state is TrainingState.IDLE
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        train(each, optimizer, steps=2, seed=1)
    return differing(model, plain.module)


def _break(*_: Any) -> None:
    raise ZeroDivisionError


def freed(forward_only: bool) -> bool:
    model = nested(bn=False)
    engine = weakref.ref(model.module)
    output = model(torch.ones(2, 5))
    if not forward_only:
        output.sum().backward()
    del model, output
    gc.collect()
    return engine() is None


def states() -> list[TrainingState]:
    seen: list[TrainingState] = []
    model = nested(bn=False)
    model[0].register_forward_hook(lambda *_: seen.append(model.training_state))
    output = model(torch.ones(2, 5))
    output.register_hook(lambda _: seen.append(model.training_state))
    seen.append(model.training_state)
    output.sum().backward()
    seen.append(model.training_state)
    with model.summon_full_params():
        seen.append(model.training_state)
    return [*seen, model.training_state]


# ------------------------------------------------------------------------------------------------ options


def dtypes(options: dict[str, Any]) -> dict[str, Any]:
    """Trained a little: dtypes as seen inside, of parameters, gradients, reduction, buffers and state dict."""
    plain = mlp(bn=False)
    plain[1][1].register_buffer("offset", torch.ones(1))  # type: ignore[index, operator]
    plain[1] = FSDP(plain[1], **options)
    model = FSDP(plain, **options)
    seen: dict[str, Any] = {}
    model[0].register_forward_hook(lambda _, x, y: seen.update(input=x[0].dtype, output=y.dtype))
    model[1][1].register_forward_hook(lambda m, *_: seen.update(buffer=m.offset.dtype))
    train(model, adam(model))
    state = model.state_dict()
    assert all(bool(torch.isfinite(value).all()) for value in state.values())
    seen.update(parameter=model.params[0].dtype, gradient=model.params[0].grad.dtype)
    seen.update(reduction=model.module._handle._reduce_dtype)
    seen.update(saved={value.dtype for value in state.values() if value.is_floating_point()})
    return seen


def parity_autocast() -> dict[str, float]:
    def body(model: nn.Module, draw: torch.Generator) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(6, 5, generator=draw)).float().square().mean()
        loss.backward()

    options = {"mixed_precision": True, "compute_dtype": torch.float32, "clear_autocast_cache": True}
    return against_ddp(nested(**options), mlp(), body)


def mixed_with_bn() -> tuple[set[torch.dtype], set[torch.dtype], bool]:
    """BatchNorm in wrappers of its own, float32 in a model that computes in float16."""
    model = auto_wrap_bn(mlp())
    inside: set[torch.dtype] = set()
    bn = model[1][1]  # type: ignore[index]
    bn.module.module.register_forward_hook(lambda m, *_: inside.add(m.weight.dtype))
    whole = FSDP(model, mixed_precision=True)
    train(whole, adam(whole))
    return inside, {bn.params[0].dtype}, bn.flatten_parameters


def smoke_under_autocast() -> list[bool]:
    """A policy wraps, autocast casts, mixed precision does too: forward and backward end, gradients are finite."""

    def policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
        return unwrapped_params >= 40

    with enable_wrap(policy, wrapper_cls=FSDP, mixed_precision=True):
        torch.manual_seed(0)
        parts = [nn.Linear(5, 5), nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))]
        model = auto_wrap(nn.Sequential(*parts))
    x = torch.rand(1, 5)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.mse_loss(x, model(x).float())
    loss.backward()
    return [
        parameter.grad is not None and bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters()
    ]


def norms_under_autocast(dtype: torch.dtype) -> list[str]:
    """What a norm says under an autocast of the CPU: in float16, in a plain module too, and in float32."""
    in_float32 = FSDP(mlp(), mixed_precision=True, compute_dtype=torch.float32)

    def run(model: nn.Module) -> None:
        with torch.autocast("cpu", dtype):
            model(torch.rand(4, 5)).float().sum().backward()

    return [said_by(lambda m=model: run(m)) for model in (FSDP(mlp(), mixed_precision=True), mlp().half(), in_float32)]


def converted() -> list[Any]:
    """``half()`` and ``float()`` after wrapping, and between trainings."""
    model = nested(bn=False).half()
    found = [model.compute_dtype]
    for dtype in (torch.float16, torch.float32):
        model.to(dtype)
        output = model(torch.ones(2, 5, dtype=dtype))
        output.float().sum().backward()
        found += [output.dtype, model.params[0].grad.dtype]
        model.zero_grad()
    return found


def kept_whole(options: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the outer and the inner wrapper's parameters are whole between a forward and its backward."""
    model = nested(bn=False, **options)
    output = model(torch.ones(2, 5))
    whole = [not each.module._handle.needs_unshard() for each in get_fsdp_instances(model)]
    output.sum().backward()
    return whole[0], whole[1]


WRITES: dict[str, Callable[[Any, nn.Module], None]] = {
    "in place": lambda model, plain: [p.data.mul_(2) for p in (*model.parameters(), *plain.parameters())] and None,
    "shown whole": lambda model, plain: _doubled(model, plain),
    "loaded": lambda model, plain: _loaded(model, plain),
    "one rank's": lambda model, plain: _on_one_rank(model, plain),
}


def _doubled(model: Any, plain: nn.Module) -> None:
    with model.summon_full_params(), torch.no_grad():
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.mul_(2)


def _loaded(model: Any, plain: nn.Module) -> None:
    torch.manual_seed(5)
    state = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    model.load_state_dict(state)
    plain.load_state_dict(state)


def _on_one_rank(model: Any, plain: nn.Module) -> None:
    """The second rank's part of the outer wrapper; the other rank must gather again, too."""
    if dist.get_rank() == 1:
        model.params[0].data.zero_()
    outer = [parameter for name, parameter in plain.named_parameters() if not name.startswith("1.")]
    values = torch.cat([parameter.detach().reshape(-1) for parameter in outer])
    values[-model.params[0].numel() :] = 0  # an even number: no padding
    torch.nn.utils.vector_to_parameters(values, outer)


def written_after_no_sync(how: str, options: dict[str, Any]) -> bool:
    """Parameters that are written to after a backward without reduction are those that are computed with."""
    model, plain = nested(bn=False, **options).eval(), mlp(bn=False).eval()
    with model.no_sync():
        model(torch.ones(2, 5)).sum().backward()
    WRITES[how](model, plain)
    output = model(torch.ones(2, 5))
    right = torch.equal(output, plain(torch.ones(2, 5)))
    output.sum().backward()
    return right


def empty_gradients(build: str) -> tuple[list[str], list[str], dict[str, float]]:
    """Parameters without a gradient after a backward that used them, and after one that did not; and a training."""
    model = nested(bn=False, flatten_parameters=False)
    step(model, torch.Generator().manual_seed(dist.get_rank()))
    missing = [name for name, p in model.named_parameters() if p.grad is None or p.grad.shape != p.shape]
    model.zero_grad()
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    kind = {"adam": adam, "sgd": sgd}[build]

    def body(model: nn.Module, draw: torch.Generator) -> None:
        step(model, draw)
        ours = isinstance(model, FSDP)
        _ = model.clip_grad_norm_(100.0) if ours else torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)

    return missing, left, against_ddp(nested(bn=False, flatten_parameters=False), mlp(bn=False), body, kind)


def states_of_the_module() -> dict[str, Any]:
    """``wrapper.module.state_dict()`` of ours, and of the real library where it has one."""
    group = dist.group.WORLD
    options = {"process_group": group, "process_group_reduce_scatter": group, "compute_device": torch.device("cpu")}
    ours, theirs = FSDP(tied(), flatten_parameters=False), tied()
    theirs = real.FullyShardedDataParallel(theirs, flatten_parameters=False, **options)
    wanted, found = theirs.module.state_dict(), ours.module.state_dict()
    flat = FSDP(tied())
    said = [said_by(each.module.state_dict) for each in (flat, real.FullyShardedDataParallel(tied(), **options))]
    with flat.summon_full_params():
        whole = flat.module.state_dict()
    plain = tied().state_dict()
    single = FSDP(tied(), dist.new_subgroups(group_size=1)[0])
    alone = single.module.state_dict()
    return {
        "parts": list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted),
        "flat": said,
        "whole": [list(each) == list(plain) and not _unlike(each, plain) for each in (whole, alone)],
    }


def _unlike(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in other if not torch.equal(one[name], other[name])]


def divided(options: dict[str, Any], factors: tuple[float, float] | None) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients on this rank with the options, and without."""
    found = []
    for kwargs in (options, {}):
        model = nested(bn=False, **kwargs).eval()
        if kwargs is options and factors is not None:
            model.set_gradient_divide_factors(*factors, recursive=True)
        draw = torch.Generator().manual_seed(dist.get_rank())
        step(model, draw)
        found.append([parameter.grad for parameter in model.parameters()])
    return found[0], found[1]  # type: ignore[return-value]


def floats_for_halves() -> tuple[torch.dtype, bool]:
    module = FSDP(nn.Linear(5, 5), force_input_to_fp32=True)
    x = torch.ones(2, 5, dtype=torch.float16, requires_grad=True)
    output = module(x)
    output.sum().backward()
    return output.dtype, x.grad is not None and x.grad.dtype is torch.float16


def keys_by_rank(options: dict[str, Any]) -> list[str]:
    return list(nested(**options).state_dict())


def other_groups() -> list[int]:
    """The group to reduce in has another size: it is not used."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    module = FSDP(nn.Linear(5, 5), process_group_reduce_scatter=group)
    return [module.process_group_reduce_scatter.size(), module.world_size]


def reset() -> list[Any]:
    found: list[Any] = [said_by(FSDP(nn.Linear(5, 5)).reset_parameters)]
    module = FSDP(nn.Linear(5, 5), allow_reset_parameters=True)
    for inside in (False, True):
        before = module.state_dict()
        torch.manual_seed(3 + inside)
        if inside:
            with module.summon_full_params():
                module.reset_parameters()
        else:
            module.reset_parameters()
        torch.manual_seed(3 + inside)
        wanted = nn.Linear(5, 5).state_dict()
        after = module.state_dict()
        found.append(all(torch.equal(after[k], wanted[k]) and not torch.equal(after[k], before[k]) for k in after))
    return found


def names(options: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    model = nested(**options)
    flat = [name for name, _ in model.named_parameters()]
    with model.summon_full_params():
        whole = [name for name, _ in model.named_parameters()]
    return flat, whole, [name for name, _ in real_nested().named_parameters()]


# ------------------------------------------------------------------------------------------------ state


def saved_and_loaded() -> list[bool]:
    model = nested()
    train(model, adam(model))
    state = model.state_dict()
    snapshot = {name: value.clone() for name, value in state.items()}
    other, plain = nested(), mlp()
    other.load_state_dict(state)
    plain.load_state_dict(state)
    same = [not differing(other, plain)]
    train(model, adam(model), steps=1)
    same.append(all(torch.equal(state[name], snapshot[name]) for name in state))  # a copy, buffers too
    with model.summon_full_params():
        inside = model.state_dict()
    outside = model.state_dict()
    file = io.BytesIO()
    torch.save(outside, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    same.append(not any(vars(value) for value in outside.values()))
    same.append(all(torch.equal(inside[name], outside[name]) for name in outside))
    return [*same, all(torch.equal(inside[name], again[name]) for name in inside)]


def in_a_plain_model() -> tuple[dict[str, float], dict[str, float], bool]:
    """Wrappers inside of a module that is none: save, load, and train, with nothing around them."""
    model = mlp()
    model[1], model[3] = FSDP(model[1]), FSDP(model[3])
    before = differing(model, mlp())
    state = {name: value + 1 for name, value in mlp().state_dict().items()}
    result = model.load_state_dict(state)
    changed = mlp()
    changed.load_state_dict(state)
    return before, differing(model, changed), result.missing_keys == result.unexpected_keys == []


def misfit(where: str) -> tuple[str, dict[str, float]]:
    """A state that does not fit, on all ranks or on one: what is raised, and what has changed."""
    model = nested()
    before = mlp()
    state = model.state_dict()
    bad = {name: value + 1 for name, value in state.items() if name != "3.bias"}
    bad["0.weight"], bad["strange"] = torch.zeros(2, 2), torch.zeros(1)
    if where == "on one rank" and dist.get_rank() == 0:
        bad = state
    text = ""
    try:
        model.load_state_dict(bad)
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    return text, differing(model, before)


def loosely() -> tuple[bool, list[str], bool]:
    model = nested()
    state = {"0.bias": torch.full((7,), 2.0), "1.strange": torch.zeros(1)}
    result, plain = model.load_state_dict(state, strict=False), mlp().load_state_dict(state, strict=False)
    loaded = bool((model.state_dict()["0.bias"] == 2).all())
    return result.missing_keys == plain.missing_keys, result.unexpected_keys, loaded


def local_parts(options: dict[str, Any]) -> tuple[list[str], list[bool], dict[str, float]]:
    """Names of a rank's parts, whether ours and the real library put them together alike, and a round trip."""
    model = nested(**options)
    train(model, adam(model))
    part = model.local_state_dict()
    shared: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shared, (part, model.local_metadata_dict()))
    whole = model.state_dict()
    right = []
    own = [name for name in whole if "running" in name and dist.get_rank()]  # the first rank's statistics are taken
    for kind in (FSDP, real.FullyShardedDataParallel):
        found = kind.consolidate_shard_weights([each[0] for each in shared], [each[1] for each in shared])
        same = [torch.equal(found[name], whole[name]) for name in whole if name not in own]
        right.append(found.keys() == whole.keys() and all(same))
    other = nested(**options)
    other.load_local_state_dict(part)
    plain = mlp()
    plain.load_state_dict(whole)
    return list(part), right, differing(other, plain)


def real_parts() -> tuple[bool, bool, bool, dict[str, float]]:
    """What the real library writes of its parts is what we write, and what we load."""
    theirs, ours = real_nested(), nested()
    for parameter in theirs.parameters():
        parameter.data.add_(1)
    part, own = theirs.local_state_dict(), ours.local_state_dict()
    shared: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shared, (part, theirs.local_metadata_dict()))
    whole = FSDP.consolidate_shard_weights([each[0] for each in shared], [each[1] for each in shared])
    plain = mlp()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
    wanted = plain.state_dict()
    ours.load_local_state_dict(part)
    return (
        list(part) == list(own) and all(part[name].shape == own[name].shape for name in own),
        theirs.local_metadata_dict() == ours.local_metadata_dict(),
        whole.keys() == wanted.keys() and all(torch.equal(whole[name], wanted[name]) for name in wanted),
        differing(ours, plain),
    )


def fewer_elements_than_ranks(flatten: bool) -> list[bool]:
    """Parts that are padding and nothing else: cut as the real library cuts them, and nothing is lost."""

    def tiny(kind: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 1), nn.Linear(1, 3))
        model[1] = kind(model[1], flatten_parameters=flatten, **options)
        return kind(model, flatten_parameters=flatten, **options)

    group = dist.group.WORLD
    theirs = tiny(
        real.FullyShardedDataParallel,
        process_group=group,
        process_group_reduce_scatter=group,
        compute_device=torch.device("cpu"),
    )
    ours, other = tiny(FSDP), tiny(FSDP)
    part, wanted = ours.local_state_dict(), theirs.local_state_dict()
    right = [ours.local_metadata_dict() == theirs.local_metadata_dict()]
    right.append(part.keys() == wanted.keys() and all(torch.equal(part[name], wanted[name]) for name in wanted))
    optimizer = adam(ours)
    train(ours, optimizer)
    other.load_local_state_dict(ours.local_state_dict())
    right.append(not differing(other, ours))
    if flatten:
        box = [ours.gather_full_optim_state_dict(optimizer)]
        dist.broadcast_object_list(box, 0)
        full: Any = box[0]
        found, state = ours.get_shard_from_optim_state_dict(full)["state"], optimizer.state_dict()["state"]
        right.append(all(torch.equal(found[n][k], state[n][k]) for n in state for k in state[n]))
    return right


def parts_of_one_rank(flatten: bool) -> list[bool]:
    """A group of one rank: parts are what the real library's are, and come back; flat ones of before too."""
    group = dist.group.WORLD
    options = {"process_group_reduce_scatter": group, "compute_device": torch.device("cpu")}
    theirs = real.FullyShardedDataParallel(tied(), group, flatten_parameters=flatten, **options)
    ours, other = (FSDP(tied(), flatten_parameters=flatten) for _ in range(2))
    part, wanted = ours.local_state_dict(), theirs.local_state_dict()
    right = [list(part) == list(wanted) and not _unlike(part, wanted)]
    plain = tied().state_dict()
    changed = {name: value + 1 for name, value in part.items()}
    for given in (changed, {name: value.reshape(-1) for name, value in changed.items()}):
        with other.summon_full_params(), torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other.load_local_state_dict(given)
        found = other.state_dict()
        right.append(all(torch.equal(found[name], plain[name] + 1) for name in plain))
        whole = FSDP.consolidate_shard_weights([given], [ours.local_metadata_dict()])
        right.append(all(torch.equal(whole[name], plain[name] + 1) for name in plain))
    return right


def shared_parts() -> dict[str, bool]:
    """Ties inside of an inner wrapper: whose consolidation has them."""
    found = {}
    for name, kind in (("ours", FSDP), ("real", real.FullyShardedDataParallel)):
        group = dist.group.WORLD
        options = {"process_group_reduce_scatter": group, "compute_device": torch.device("cpu")}
        torch.manual_seed(0)
        model = TwoHeads()
        wanted = {key: value.clone() for key, value in model.state_dict().items()}
        model.body = kind(model.body, group, **options)
        whole = kind(model, group, **options)
        shared: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shared, (whole.local_state_dict(), whole.local_metadata_dict()))
        try:
            state = kind.consolidate_shard_weights([each[0] for each in shared], [each[1] for each in shared])
        except KeyError:
            found[name] = False
            continue
        found[name] = state.keys() == wanted.keys() and all(torch.equal(state[key], wanted[key]) for key in wanted)
    return found


def local_misfit() -> str:
    model = nested()
    part = model.local_state_dict()
    if dist.get_rank() == 1:
        part["flat_param_0"] = part["flat_param_0"][:-1]
        del part["1.flat_param_0"]
    return said_by(lambda: model.load_local_state_dict(part))


class Fairseq(FSDP):
    """As fairseq's subclass does: chooses between whole and parts, and gives nothing on other ranks."""

    def __init__(self, *args: Any, use_sharded_state: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_sharded_state = use_sharded_state

    @property
    def unwrapped_module(self) -> Any:
        return self.module.module if self.flatten_parameters else self.module

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        if self.use_sharded_state:
            return super().local_state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if self.rank == 0:
            return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        super().state_dict()
        return destination or {}

    def load_state_dict(self, state_dict: Any, strict: bool = True, model_cfg: Any = None) -> Any:
        if self.use_sharded_state:
            return super().load_local_state_dict(state_dict, strict=strict)
        box = [state_dict]
        dist.broadcast_object_list(box, 0)
        return super().load_state_dict(box[0], strict=strict)


def subclassed(parts: bool) -> tuple[list[str], str, bool]:
    model = nested(kind=Fairseq, use_sharded_state=parts)
    train(model, adam(model))
    state = model.state_dict()
    other = nested(kind=Fairseq, use_sharded_state=parts)
    other.load_state_dict(state)
    for each in [*get_fsdp_instances(model), *get_fsdp_instances(other)]:
        each.use_sharded_state = False  # type: ignore[attr-defined]
    with model.summon_full_params(volatile=True), other.summon_full_params(volatile=True):
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        return list(state), type(model.unwrapped_module).__name__, all(torch.equal(a, b) for a, b in pairs)


# ------------------------------------------------------------------------------------------------ optimizer state


def optimizer_states(wrap_bn: bool) -> dict[str, Any]:
    """A gathered state against that of the plain optimizer under DDP, cut and loaded again, and trained on with."""
    model, reference = nested(wrap_bn=wrap_bn), ddp(mlp())
    optimizer, plain = adam(model), adam(reference)
    train(model, optimizer)
    train(reference, plain)
    full = model.gather_full_optim_state_dict(optimizer, recipient_rank=0)
    box = [full]
    dist.broadcast_object_list(box, 0)
    found = box[0]
    assert found is not None
    order = [name for each in get_fsdp_instances(model, skip_empty=True) for name in _own_names(model, each)]
    place = {name: index for index, (name, _) in enumerate(reference.module.named_parameters())}
    wanted = plain.state_dict()["state"]
    same = [
        torch.equal(torch.as_tensor(value), wanted[place[order[number]]][key])
        for number, state in found["state"].items()
        for key, value in state.items()
    ]
    other = nested(wrap_bn=wrap_bn)
    again = adam(other)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(other.get_shard_from_optim_state_dict(found))
    train(model, optimizer, steps=2, seed=1)
    train(other, again, steps=2, seed=1)
    train(reference, plain, steps=2, seed=1)
    return {
        "none elsewhere": (full is None) == (dist.get_rank() != 0),
        "states": len(same) == 3 * len(place) and all(same),
        "in place": "param_id_map" not in found,
        "resumed": differing(other, reference.module),
        "uninterrupted": differing(model, reference.module),
    }


def _own_names(model: nn.Module, instance: Any) -> list[str]:
    path = next(name for name, module in model.named_modules() if module is instance)
    path = ".".join(part for part in path.split(".") if part != "_fsdp_wrapped_module")
    return [f"{path}.{each.name}" if path else each.name for each in instance.module.own()]


def gathered_form() -> dict[str, Any] | None:
    model = nested(bn=False)
    optimizer = adam(model)
    train(model, optimizer)
    return model.gather_full_optim_state_dict(optimizer)  # type: ignore[no-any-return]


def real_optimizer_state() -> tuple[list[bool], bool, str]:
    """A state that the real library gathered, cut by ours; what becomes of the real one's live optimizer."""
    theirs, ours = real_nested(), nested()
    draw = torch.Generator().manual_seed(dist.get_rank())
    for each in real.get_fsdp_instances(theirs):
        for parameter, padding in zip(each.params, each.numel_padded_per_param, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=draw)
            parameter.grad[parameter.numel() - padding :] = 0
            parameter._full_param_padded = torch.zeros(parameter.numel() * dist.get_world_size())  # as after a forward
    optimizer = torch.optim.Adam(theirs.parameters())
    optimizer.step()
    before = {n: {k: v.clone() for k, v in s.items()} for n, s in optimizer.state_dict()["state"].items()}
    copy_to_cpu = torch.Tensor.cpu
    torch.Tensor.cpu = torch.Tensor.clone  # type: ignore[method-assign]  # as from a GPU: it gathers into one buffer
    try:
        box = [theirs.gather_full_optim_state_dict(optimizer)]
    finally:
        torch.Tensor.cpu = copy_to_cpu  # type: ignore[method-assign]
    dist.broadcast_object_list(box, 0)
    part = ours.get_shard_from_optim_state_dict(box[0])
    same = [torch.equal(part["state"][n][k], before[n][k]) for n in before for k in before[n]]
    torch.optim.Adam(ours.parameters()).load_state_dict(part)
    return same, part.keys() == optimizer.state_dict().keys(), said_by(optimizer.step)


class Unused(nn.Module):
    """A frozen wrapper in the middle, without state in the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(4, 4)
        self.not_trained = FSDP(nn.Linear(4, 4).requires_grad_(False))
        self.l2 = FSDP(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.l2(self.l(x)) - self.not_trained(x)
        return output


def unused_states(first_frozen: bool) -> tuple[dict[int, int | None], bool]:
    whole = Unused()
    if first_frozen:
        whole.l.requires_grad_(False)
    model = FSDP(whole)
    optimizer = sgd(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    box = [model.gather_full_optim_state_dict(optimizer)]
    dist.broadcast_object_list(box, 0)
    ids = dict(box[0]["param_id_map"])  # type: ignore[index]
    part, wanted = model.get_shard_from_optim_state_dict(box[0])["state"], optimizer.state_dict()["state"]  # type: ignore[arg-type]
    return ids, part.keys() == wanted.keys() and all(
        torch.equal(part[n][k], wanted[n][k]) for n in part for k in part[n]
    )


def alone() -> dict[str, Any]:
    """BatchNorms of one rank each: not gathered, not to be clipped."""
    model = FSDP(auto_wrap_bn(mlp(), single_rank_pg=True))
    optimizer = adam(model)
    train(model, optimizer)
    found: dict[str, Any] = {}
    found["clip"] = said_by(lambda: model.clip_grad_norm_(1.0))
    limit = 0.5 * max(each.grad.abs().max().item() for each in model.params_with_grad)
    torch.nn.utils.clip_grad_value_(model.parameters(), limit)
    assert max(each.grad.abs().max().item() for each in model.params_with_grad) <= limit
    together = FSDP(auto_wrap_bn(mlp(), single_rank_pg=False))
    train(together, adam(together))
    found["norm of one group"] = together.clip_grad_norm_(1.0).item()
    full = model.gather_full_optim_state_dict(optimizer)
    bn = get_fsdp_instances(model)[1]
    found["kept out"] = bn.no_broadcast_optim_state
    gradient = bn.params[0].grad
    every = [torch.zeros_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(every, gradient)
    found["own gradients"] = not torch.equal(every[0], every[1])
    if full is not None:
        found["uncollected"] = full["uncollected_local_ids"]
        part = model.get_shard_from_optim_state_dict(full)["state"]
        wanted = optimizer.state_dict()["state"]
        found["first rank's"] = all(torch.equal(part[n][k], wanted[n][k]) for n in wanted for k in wanted[n])
    return found


def of_another_model() -> list[str]:
    """What is raised for optimizers, and states, of something else."""
    model, other = nested(bn=False), nested(bn=False)
    said = []

    def attempt(call: Callable[[], Any]) -> None:
        said.append(said_by(call))

    attempt(lambda: model.gather_full_optim_state_dict(adam(other)))
    attempt(lambda: model.gather_full_optim_state_dict(adam(mlp(False))))
    first, second = model.parameters()
    groups = [{"params": [first]}, {"params": [second]}]
    attempt(lambda: model.gather_full_optim_state_dict(torch.optim.Adam(groups)))
    unflat = nested(bn=False, flatten_parameters=False)
    attempt(lambda: unflat.gather_full_optim_state_dict(adam(unflat)))
    optimizer = adam(model)
    train(model, optimizer, steps=1)
    box = [model.gather_full_optim_state_dict(optimizer)]
    dist.broadcast_object_list(box, 0)
    full: Any = box[0]
    attempt(lambda: FSDP(mlp(False)).get_shard_from_optim_state_dict(dict(full)))
    attempt(lambda: model.get_shard_from_optim_state_dict(optimizer.state_dict()))
    wider = {n: {**s, "exp_avg": torch.zeros(2, 2)} if n == 0 else s for n, s in full["state"].items()}
    attempt(lambda: model.get_shard_from_optim_state_dict({**full, "state": wider}))
    attempt(lambda: other.load_state_dict(model.state_dict()))
    return said


def apart(call: str, other: str) -> str:
    """What is raised when the first rank makes one call and the others another."""
    group = dist.new_group(timeout=timedelta(seconds=30))  # its ranks are out of step afterwards
    model = nested(bn=False, process_group=group)
    optimizer = adam(model)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    calls: dict[str, Callable[[], Any]] = {
        "gather_full_optim_state_dict": lambda: model.gather_full_optim_state_dict(optimizer),
        "state_dict": model.state_dict,
        "load_state_dict": lambda: model.load_state_dict({}),
        "load_local_state_dict": lambda: model.load_local_state_dict({}),
        "summon_full_params": lambda: model.summon_full_params().__enter__(),
    }
    return said_by(calls[other if dist.get_rank() else call])


# ------------------------------------------------------------------------------------------------ refused


class Group:
    """Looks like a process group, as FairScale's and fairseq's tests make them."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def inner_calls() -> list[str]:
    model = nested(bn=False)
    model(torch.ones(2, 5))
    said = [said_by(call) for call in (lambda: model[1].clip_grad_norm_(1.0), lambda: model[1].no_sync().__enter__())]
    with model.summon_full_params():
        return [*said, said_by(lambda: model.summon_full_params().__enter__())]


def reported() -> tuple[int, str, str]:
    model = nested(bn=False, verbose=True)
    return model[3].out_features, repr(model), repr(nested(bn=False))


def applied() -> bool:
    model = nested(bn=False)

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            assert module.weight.dim() == 2
            module.weight.data.fill_(2.0)

    assert model.apply(fill) is model
    state = model.state_dict()
    return all(bool((state[f"{name}.weight"] == 2).all()) for name in ("0", "1.0", "3"))
