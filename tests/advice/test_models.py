"""The advice of fsshard/model, complex_params and planning, followed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from tests.advice.following import DIVIDED, Scale, batch, cases, is_right, plain, refused, square
from tests.models import net

ENGINES = ("ddp", "fairscale", *DIVIDED)


def with_third(module: nn.Module) -> Any:
    return nn.Sequential(*plain(), module)


def case_shapes_and_places() -> None:
    lazy = with_third(nn.LazyLinear(3))
    with refused("run one forward first"):
        fsshard.wrap(lazy, backend="fsdp2")
    lazy(torch.ones(1, 4))
    bare = copy.deepcopy(lazy)
    is_right(fsshard.wrap(lazy, backend="fsdp2"), lambda: copy.deepcopy(bare))
    split = with_third(nn.Linear(2, 2))
    split[0].to("meta")
    with refused("build the whole model under torch.device('meta'), or all of it outside"):
        fsshard.wrap(split, backend="fsdp2")
    with torch.device("meta"):
        hollow = plain()
    with refused("no such method in 1 (Scale); pass a function that initialises a module"):
        fsshard.wrap(hollow, backend="fsdp2", param_init_fn="reset_parameters")
    fsshard.wrap(hollow, backend="fsdp2", param_init_fn=fill)
    model = fsshard.wrap(plain() if dist.get_rank() == 0 else hollow_plain(), backend="fsdp2")
    is_right(model)
    model = fsshard.wrap(hollow_plain(), backend="fsdp2")
    with refused("load a state dict that has them, or wrap with a param_init_fn that sets them"):
        model(batch())
    model.load_state_dict(plain().state_dict())
    is_right(model)
    with refused("make rank 0's the real one"):
        fsshard.wrap(plain() if dist.get_rank() == 1 else hollow_plain(), backend="fsdp2")


def hollow_plain() -> Any:
    with torch.device("meta"):
        return plain()


def fill(module: Any) -> None:
    for value in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        nn.init.ones_(value)


class Table(nn.Module):
    """A buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return x * self.table


def case_buffers_without_values() -> None:
    with torch.device("meta"):
        hollow, table = with_third(Table()), Table()
    model = fsshard.wrap(hollow, backend="fsdp2")
    model.load_state_dict(plain().state_dict())
    with refused("wrap with a param_init_fn that sets them (what it leaves alone can come from a state dict"):
        model(batch())
    with torch.device("meta"):
        hollow = with_third(Table())
    model = fsshard.wrap(hollow, backend="fsdp2", param_init_fn=lambda m: fill(m) if isinstance(m, Table) else None)
    model.load_state_dict(plain().state_dict())
    is_right(model, lambda: with_third(Table()))
    half = with_third(table)
    with refused("materialise them before wrap, or build the whole model under torch.device('meta')"):
        fsshard.wrap(half, backend="fsdp2")
    half[3].table = torch.ones(2)
    is_right(fsshard.wrap(half, backend="fsdp2"), lambda: with_third(Table()))


class Fills(nn.Module):
    """Initialises another unit's weight."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers, self.scale = layers, nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x) * self.scale


def reaches(module: Any) -> None:
    fill(module)
    if isinstance(module, Fills):
        module.layers[0].weight.fill_(2.0)


def case_initialisers() -> None:
    with torch.device("meta"):
        hollow = [Fills(plain()) for _ in range(3)]
    units = {"auto_wrap_policy": {nn.Linear}, "merge_below": 0}
    with refused("initialise only the module's own parameters (children are called first), put both into one unit"):
        fsshard.wrap(hollow[0], backend="fsdp2", param_init_fn=reaches, **units)
    fsshard.wrap(hollow[1], backend="fsdp2", param_init_fn=fill, **units)
    one_unit = fsshard.wrap(hollow[2], backend="fsdp2", param_init_fn=reaches, auto_wrap_policy=None)
    assert one_unit.state_dict()["layers.0.weight"].eq(2).all()
    with torch.device("meta"):
        hollow[0] = plain()
    with refused("do that before fsshard.wrap"):
        fsshard.wrap(hollow[0], backend="fsdp2", param_init_fn=lambda m: m.register_buffer("more", torch.ones(1)))
    hollow = [hollow_plain()]
    for module in hollow[0].modules():
        module.register_buffer("more", torch.ones(1, device="meta"))
    fsshard.wrap(hollow[0], backend="fsdp2", param_init_fn=fill)


def case_compiled_models() -> None:
    scripted = with_third(torch.jit.script(nn.Linear(2, 2)))
    with refused("wrap the module that torch.jit was given (fsshard.wrap(..., compile=True)"):
        fsshard.wrap(scripted, backend="fsdp2")
    model = fsshard.wrap(plain(), backend="fsdp2", compile={"backend": "aot_eager"})
    is_right(model)
    bare = plain()
    bare.load_state_dict(model.state_dict())
    assert torch.jit.script(bare)(batch()).shape == (3, 2)

    compiled = torch.compile(plain(), backend="aot_eager")
    with refused("leave one out"):
        fsshard.wrap(compiled, backend="fsdp2", compile={"backend": "aot_eager"})
    is_right(fsshard.wrap(compiled, backend="fsdp2"))
    hooked: Any = torch.compile(plain(), backend="aot_eager")
    hooked.register_forward_hook(lambda module, _, output: output * 2)
    with refused("register them on the module before torch.compile, or on what wrap returns"):
        fsshard.wrap(hooked, backend="fsdp2")
    is_right(fsshard.wrap(torch.compile(doubled(), backend="aot_eager"), backend="fsdp2"), doubled)
    model = fsshard.wrap(torch.compile(plain(), backend="aot_eager"), backend="fsdp2")
    model.register_forward_hook(lambda module, _, output: output * 2)
    is_right(model, doubled)
    with refused("wrap the bare module"):
        fsshard.wrap(torch.compiler.disable(plain()), backend="fsdp2")
    both = plain()
    both[0] = torch.compile(both[0], backend="aot_eager")
    both[2] = torch.compile(both[2], backend="eager")
    with refused("compile them alike, or wrap the bare model with compile="):
        fsshard.wrap(both, backend="fsdp2")
    both = plain()
    both[0], both[2] = (torch.compile(layer, backend="aot_eager") for layer in (both[0], both[2]))
    is_right(fsshard.wrap(both, backend="fsdp2"))


def doubled() -> Any:
    model = plain()
    model.register_forward_hook(lambda module, _, output: output * 2)
    return model


def case_compiled_and_recomputed() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    eager = {"compile": {"backend": "aot_eager"}}
    before = with_third(checkpoint_wrapper(nn.Linear(2, 2)))
    with refused("remove it and use activation_checkpointing="):
        fsshard.wrap(before, backend="fsdp2", auto_wrap_policy=None, **eager)
    settings = {"activation_checkpointing": {nn.Linear}, **eager}
    with refused("name the blocks in auto_wrap_policy, too, so that each is compiled by itself"):
        fsshard.wrap(plain(), backend="fsdp2", auto_wrap_policy=None, **settings)
    is_right(fsshard.wrap(plain(), backend="fsdp2", auto_wrap_policy={nn.Linear}, **settings))


def case_shared_memory() -> None:
    expanded = with_third(Scale(torch.ones(1).expand(2)))
    with refused("nn.Parameter(value.resolve_neg().contiguous()) before wrap"):
        fsshard.wrap(expanded, backend="fsdp2")
    expanded[3].weight = nn.Parameter(expanded[3].weight.detach().resolve_neg().contiguous())
    is_right(fsshard.wrap(expanded, backend="fsdp2"), lambda: with_third(Scale(torch.ones(2))))
    for backend in (*DIVIDED, "fairscale"):
        twins = two_scales()
        twins[4].weight.data = twins[3].weight.data
        with refused("assign one nn.Parameter to both places (tied weights), or a clone to one of them"):
            fsshard.wrap(twins, backend=backend)
        is_right(fsshard.wrap(tied(), backend=backend), tied)
        is_right(fsshard.wrap(two_scales(), backend=backend), two_scales)


def two_scales() -> Any:
    return nn.Sequential(*plain(), Scale(torch.ones(2)), Scale(torch.ones(2)))


def tied() -> Any:
    model = two_scales()
    model[4].weight = model[3].weight
    return model


def case_hooks_and_gradients() -> None:
    hooked = plain()
    hooked[2].bias.register_hook(lambda gradient: gradient * 2)
    for backend in DIVIDED:
        with refused("hook the module's output, or use backend='ddp' or 'fairscale'"):
            fsshard.wrap(hooked, backend=backend)
    model = net()
    model.middle[0].weight.register_hook(lambda gradient: gradient * 2)
    with refused("register them after fsshard.wrap, on the module's output, or remove them"):
        fsshard.wrap(model, backend="ddp")

    def twice() -> Any:
        build = plain()
        build[2].bias.register_hook(lambda gradient: gradient * 2)
        return build

    for backend in ("ddp", "fairscale"):
        is_right(fsshard.wrap(twice(), backend=backend), twice)
    seen: list[Tensor] = []
    model = fsshard.wrap(plain(), backend="fsdp2")
    model.module[0].register_forward_hook(lambda module, _, output: output.register_hook(seen.append) and None)
    is_right(model)
    assert len(seen) == 2


class Embeds(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(4, 2, sparse=sparse)

    def forward(self, x: Tensor) -> Any:
        return self.table(x.abs().long().clamp(max=3))


def case_sparse_gradients() -> None:
    for backend in DIVIDED:
        with refused("build it with sparse=False, or use backend='ddp' in float32, which reduces sparse gradients"):
            fsshard.wrap(Embeds(sparse=True), backend=backend)
        is_right(fsshard.wrap(Embeds(sparse=False), backend=backend), lambda: Embeds(sparse=False))
    is_right(fsshard.wrap(Embeds(sparse=True), backend="ddp"), lambda: Embeds(sparse=False))


def case_dtypes_of_gradients() -> None:
    def build() -> Any:
        model = plain()
        model[0].weight.grad_dtype = torch.bfloat16
        return model

    for backend in ENGINES:
        with refused("leave grad_dtype as it is"):
            fsshard.wrap(build(), backend=backend)
        is_right(fsshard.wrap(plain(), backend=backend))


def case_precisions() -> None:
    with refused("leave fp32_units=None"):
        fsshard.Precision(fp32_units=torch.bfloat16)
    precision = fsshard.Precision(param=torch.bfloat16, fp32_units=None)
    trains(fsshard.wrap(net(), backend="ddp", mixed_precision=precision))
    with refused("call model.float() before wrap, or leave mixed_precision=None"):
        fsshard.wrap(plain().bfloat16(), backend="ddp", mixed_precision="bf16")
    trains(fsshard.wrap(plain().bfloat16().float(), backend="ddp", mixed_precision="bf16"))
    trains(fsshard.wrap(plain().bfloat16(), backend="ddp"), torch.bfloat16)


def trains(model: Any, dtype: torch.dtype = torch.float32) -> None:
    """Train one step that changes every weight; of what is narrower there is no other judge here."""
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(batch().to(dtype)).float().square().mean().backward()
    optimizer.step()
    after = model.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name, _ in model.named_parameters())


class SharedBuffer(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.net = net()
        self.net.middle[0].register_buffer("shift", torch.ones(1))
        self.net.last.register_buffer("shift", self.net.middle[0].shift if shared else torch.ones(1))

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


def case_buffers_of_two_dtypes() -> None:
    narrow = {"mixed_precision": fsshard.Precision(param=torch.bfloat16, buffer=torch.bfloat16)}
    with refused("leave buffer=None, or give each its own tensor"):
        fsshard.wrap(SharedBuffer(shared=True), backend="ddp", **narrow)
    trains(fsshard.wrap(SharedBuffer(shared=False), backend="ddp", **narrow))
    trains(fsshard.wrap(SharedBuffer(shared=True), backend="ddp", mixed_precision="bf16"))


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class MakesFloats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = plain()

    def forward(self, x: Tensor) -> Any:
        return self.layers(x.float() + torch.ones(4))


class TakesBox(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = plain()

    def forward(self, box: Any) -> Any:
        return self.layers(box["value"] if isinstance(box, dict) else box.value)


def case_dtypes_that_meet() -> None:
    for backend in ENGINES:
        model = fsshard.wrap(MakesFloats(), backend=backend, mixed_precision="bf16", auto_wrap_policy=None)
        fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        with refused("call the model under `with model.autocast():`, which casts per operation too"):
            model(batch())
        model = fsshard.wrap(MakesFloats(), backend=backend, mixed_precision="bf16", auto_wrap_policy=None)
        fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        with model.autocast():
            loss = model(batch()).square().mean()
        loss.backward()
        model = fsshard.wrap(TakesBox(), backend=backend, mixed_precision="bf16", auto_wrap_policy=None)
        fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        with refused("pass them in a dict, list, tuple or dataclass"):
            model(Box(batch()))
        model = fsshard.wrap(TakesBox(), backend=backend, mixed_precision="bf16", auto_wrap_policy=None)
        fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        model({"value": batch()}).square().mean().backward()


class Cache(list[Tensor]):
    """As those of transformers say how long they are."""

    def get_seq_length(self) -> int:
        return len(self)


class Appends(Scale):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        if cache is not None:
            cache.append(x)
        return super().forward(x)


class CallsWith(nn.Module):
    def __init__(self, use_cache: bool) -> None:
        super().__init__()
        self.first, _, self.last = plain()
        self.block, self.use_cache = Appends(torch.linspace(0.5, 1.5, 6)), use_cache

    def forward(self, x: Tensor) -> Any:
        return self.last(self.block(self.first(x), Cache() if self.use_cache else None))


def case_blocks_that_cannot_run_again() -> None:
    def build() -> Any:
        return CallsWith(use_cache=False)

    settings: dict[str, Any] = {"backend": "ddp", "activation_checkpointing": {Appends}}
    model = fsshard.wrap(CallsWith(use_cache=True), **settings)
    with refused("call the model with use_cache=False, or leave the block out of activation_checkpointing"):
        square(model, batch()).backward()
    is_right(fsshard.wrap(CallsWith(use_cache=True), backend="ddp"), build)
    is_right(fsshard.wrap(CallsWith(use_cache=False), **settings), build)
    model = fsshard.wrap(TakesIterator(iterator=True), **{**settings, "activation_checkpointing": {Sums}})
    with refused("pass a list, or leave the block out of activation_checkpointing"):
        square(model, batch()).backward()
    for settings in ({"activation_checkpointing": {Sums}}, {}):
        iterator = not settings
        is_right(
            fsshard.wrap(TakesIterator(iterator=iterator), backend="ddp", **settings),
            lambda: TakesIterator(iterator=False),
        )


class Sums(Scale):
    def forward(self, xs: Any) -> Tensor:
        return super().forward(sum(xs))  # type: ignore[arg-type]


class TakesIterator(nn.Module):
    def __init__(self, iterator: bool) -> None:
        super().__init__()
        self.first, _, self.last = plain()
        self.block, self.iterator = Sums(torch.linspace(0.5, 1.5, 6)), iterator

    def forward(self, x: Tensor) -> Any:
        xs = [self.first(x), self.first(x * 2)]
        return self.last(self.block(iter(xs) if self.iterator else xs))


def case_derivatives() -> None:
    model = fsshard.wrap(plain(), backend="fsdp")
    with refused("use loss.backward() and parameter.grad, or backend='ddp' or 'fairscale' (there each rank gets"):
        torch.autograd.grad(square(model, batch()), list(model.parameters()))
    is_right(fsshard.wrap(plain(), backend="fsdp"))
    bare = plain()
    expected = torch.autograd.grad(square(bare, batch()), list(bare.parameters()))
    for backend in ("ddp", "fairscale"):
        model = fsshard.wrap(plain(), backend=backend)
        fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        found = torch.autograd.grad(square(model, batch()), list(model.parameters()))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Yields(nn.Module):
    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.layers, self.listed = plain(), listed

    def forward(self, x: Tensor) -> Any:
        items = (layer(x) for layer in [self.layers])
        return list(items) if self.listed else items


def case_generators() -> None:
    for backend in DIVIDED:
        model = fsshard.wrap(Yields(listed=False), backend=backend)
        with refused("return its items: list(...)"):
            model(batch())
        model = fsshard.wrap(Yields(listed=True), backend=backend)
        is_right(model, lambda: Yields(listed=True), lambda m, x: m(x)[0].square().mean())


def case_changed_models() -> None:
    model = fsshard.wrap(plain(), backend="fsdp2")
    model.module[2] = nn.Linear(6, 2)
    with refused("Change the model first and wrap it then; to change values, use model.load_state_dict, or write in"):
        model(batch())

    def changed() -> Any:
        build = plain()
        build[2] = Scale(torch.ones(6))
        return build

    is_right(fsshard.wrap(changed(), backend="fsdp2"), changed)
    for backend in ENGINES:
        model = fsshard.wrap(plain(), backend=backend)
        state = {name: torch.zeros_like(value) for name, value in plain().state_dict().items()}
        model.load_state_dict(state)
        assert not any(value.any() for value in model.state_dict().values())


def case_complex_parameters() -> None:
    pairs: Any = fsshard.tensorfy(net())
    with refused("cast the real parameters only, as model.double(), .float(), .half() and .bfloat16() do"):
        pairs.to(torch.bfloat16)
    for cast in ("double", "float", "half", "bfloat16"):
        found, native = getattr(fsshard.tensorfy(net()), cast)(), getattr(net(), cast)()
        shown = {name: value.dtype for name, value in found.state_dict().items()}
        assert shown == {name: value.dtype for name, value in native.state_dict().items()}
    stale = net()
    optimizer = torch.optim.SGD(stale.parameters(), lr=0.1)
    model = fsshard.wrap(stale, backend="ddp")
    model(batch()).square().mean().backward()
    with refused("or build the optimizer with fsshard.build_optimizer"):
        optimizer.step()
    is_right(fsshard.wrap(net(), backend="ddp"), net)


def case_policies() -> None:
    with refused("put the class in a set, {Linear}"):
        fsshard.wrap(plain(), backend="fsdp2", auto_wrap_policy=nn.Linear)
    with refused("expected 'auto', None, a set of module classes or their names, a number of bytes, a callable"):
        fsshard.wrap(plain(), backend="fsdp2", auto_wrap_policy=1.5)
    with refused("the only string is 'auto'; see fsshard.plan"):
        fsshard.wrap(plain(), backend="fsdp2", auto_wrap_policy="size")
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policies: list[Any] = ["auto", None, {nn.Linear}, {"Linear"}, 64, lambda m: isinstance(m, nn.Linear)]
    for policy in [*policies, ModuleWrapPolicy({nn.Linear})]:
        fsshard.plan(plain(), auto_wrap_policy=policy)
        fsshard.wrap(plain(), backend="ddp", auto_wrap_policy=policy)
    with refused("expected None, True (the plan's units), a module class, a set of classes or their names, a callable"):
        fsshard.wrap(plain(), backend="fsdp2", activation_checkpointing="always")
    with refused("name the classes of the blocks to recompute, for example {torch.nn.TransformerEncoderLayer}"):
        fsshard.wrap(plain(), backend="fsdp2", activation_checkpointing=True, auto_wrap_policy=None)
    choices = [None, nn.Linear, {nn.Linear}, {"Linear"}, lambda m: isinstance(m, nn.Linear), fsshard.Checkpointing()]
    for choice in [*choices, ModuleWrapPolicy({nn.Linear})]:
        fsshard.wrap(plain(), backend="ddp", auto_wrap_policy={nn.Linear}, activation_checkpointing=choice)


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__)
def test_advice_is_right(ranks: Any, case: Any) -> None:
    ranks.run(case, 2)
