"""FairScale's faults on torch 2.13: each shown in the raw library, and absent under both implementations."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.errors import OptimizerError, UnsupportedByBackend
from tests.on_ranks import on_ranks
from tests.optimizers import average
from tests.sets import often
from tests.training_runs import differences


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 4))


def data(step: int, group: Any = None) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(31 * step + dist.get_rank(group)))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def raw(model: nn.Module, optim: Any = torch.optim.SGD, group: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    """FairScale as its users write it."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    optimizer = OSS(model.parameters(), optim=optim, group=group, lr=0.1, **kwargs)
    return ShardedDataParallel(model, optimizer, process_group=group), optimizer


BOTH = pytest.mark.parametrize("which", ["real", "native"])


def engine(which: str) -> dict[str, Any]:
    """The arguments of ``wrap`` for DDP, or for an implementation of FairScale."""
    return {"backend": which} if which == "ddp" else {"backend": "fairscale", "implementation": which}


def ours(which: str, optim: Any = torch.optim.SGD, mesh: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    model = fsshard.wrap(mlp(), **engine(which), device_mesh=mesh)
    return model, fsshard.build_optimizer(model, optim, lr=0.1, **kwargs)


def loop(model: Any, optimizer: Any, steps: int = 4, group: Any = None) -> dict[str, Tensor]:
    for step in range(steps):
        model(data(step, group)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (
        weights(getattr(model, "module", model)) if not isinstance(model, fsshard.ShardedModule) else model.state_dict()
    )


def job_zero_grad(which: str) -> tuple[bool, bool]:
    """(raw FairScale equals DDP, ours equals DDP) after optimizer.zero_grad()."""
    reference = loop(*ours("ddp"))
    return not list(differences(reference, loop(*raw(mlp())))), not list(differences(reference, loop(*ours(which))))


@BOTH
def test_zero_grad_leaves_no_stale_bucket(ranks: Any, which: str) -> None:
    """FairScale issue #354: ``optimizer.zero_grad()`` sets None since torch 2.0, and a stale bucket is reduced."""
    assert ranks.run(job_zero_grad, 2, which) == [(False, True)] * 2


def job_accumulate_without_no_sync(kind: str) -> dict[str, Tensor]:
    model, optimizer = raw(mlp()) if kind == "raw" else ours(kind)
    for step in range(3):
        for micro in range(2):
            model(data(2 * step + micro)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.module.state_dict() if kind == "raw" else model.state_dict()


@BOTH
def test_accumulation_without_no_sync(ranks: Any, which: str) -> None:
    """Legal with DDP, which adds before it averages; FairScale averages the earlier micro batch twice."""
    reference, ours, wrong = (ranks.run(job_accumulate_without_no_sync, 2, k)[0] for k in ("ddp", which, "raw"))
    assert all(torch.equal(reference[k], ours[k]) for k in reference)
    assert max(float((reference[k] - wrong[k]).abs().max()) for k in reference) > 1e-4


class Checkpointed(nn.Module):
    """The last block, and with it the first gradient of backward, is behind a reentrant checkpoint."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.block, x, use_reentrant=True)


def checkpointed() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)]
    return nn.Sequential(nn.Linear(6, 8), *(Checkpointed(block) for block in blocks))


def zeroed(how: str) -> Any:
    def train(which: str) -> Any:
        model, optimizer = ours(which, momentum=0.9)
        for step in range(4):
            model(data(step)).square().mean().backward()
            optimizer.step()
            if how == "zeros":
                optimizer.zero_grad(set_to_none=False)
            elif how == "by hand":
                for parameter in model.module.parameters():
                    parameter.grad = None
            else:
                (model if how == "model" else model.module).zero_grad()
        return model.state_dict()

    return train


def reentrant(tied: bool) -> Any:
    def train(which: str) -> Any:
        module = checkpointed()
        if tied:  # used in a checkpointed block and outside: its gradient comes in twice
            module[4].block[2].weight = module[3].block[2].weight
        settings = {"static_graph": True} if tied and which == "ddp" else {}
        model = fsshard.wrap(module, **engine(which), **settings)
        return loop(model, fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9))

    return train


def under_fairscales_checkpoint(which: str) -> Any:
    from fairscale.nn.checkpoint import checkpoint_wrapper

    module = mlp()
    module[4] = checkpoint_wrapper(module[4])
    model = fsshard.wrap(module, **engine(which))
    return loop(model, fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1))


def inner_mode(which: str) -> Any:
    """Train, evaluate, and set the mode of the inner module only, as Lightning does after validation."""
    model, optimizer = ours(which)
    for step in range(4):
        model(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(data(step))
        model.module.train()
    return model.state_dict()


def exception_in_no_sync(which: str) -> Any:
    """FairScale has no finally there, and would accumulate for ever after."""
    model, optimizer = ours(which)
    with contextlib.suppress(ValueError), model.no_sync():
        raise ValueError
    return loop(model, optimizer)


def hooked(which: str) -> Any:
    calls: list[int] = []
    model, optimizer = ours(which)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    return {**loop(model, optimizer), "calls": len(calls)}


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.double()).float()


def two_optimizers(by_dtype: bool) -> Any:
    """OSS and ShardedDDP buckets hold one dtype; two optimizers of one dtype each train as ddp does."""

    def train(which: str) -> Any:
        torch.manual_seed(0)
        model = fsshard.wrap(nn.Sequential(nn.Linear(6, 6), Wide()) if by_dtype else mlp(), **engine(which))
        names = [name for name, _ in model.named_parameters()]
        kinds = (torch.optim.Adam if by_dtype else torch.optim.SGD, torch.optim.Adam)
        both = [
            fsshard.build_optimizer(model, kind, part, lr=0.01)
            for kind, part in zip(kinds, (names[:2], names[2:]), strict=False)
        ]
        for step in range(4):
            model(data(step)).square().mean().backward()
            for optimizer in both:
                optimizer.step()
            model.zero_grad()
        return model.state_dict()

    return train


CASES = {
    **{f"zeroed by {how}": zeroed(how) for how in ("model", "inner", "zeros", "by hand")},
    "reentrant checkpoints": reentrant(tied=False),
    "reentrant checkpoints and a tie": reentrant(tied=True),
    "FairScale's checkpoint": under_fairscales_checkpoint,
    "the inner module's mode": inner_mode,
    "an exception in no_sync": exception_in_no_sync,
    "hooks of a step run once": hooked,
    "two optimizers": two_optimizers(by_dtype=False),
    "two optimizers of two dtypes": two_optimizers(by_dtype=True),
}


def job_as_ddp(which: str) -> dict[str, list[str]]:
    found = {name: list(differences(train("ddp"), train(which))) for name, train in CASES.items()}
    return {name: different for name, different in found.items() if different}


@BOTH
def test_it_trains_as_ddp_does(ranks: Any, which: str) -> None:
    """Raw FairScale queues its end-of-backward flush in a reentrant checkpoint's backward, among other faults."""
    assert ranks.run(job_as_ddp, 2, which) == [{}, {}]


def job_freeze(kind: str, optim: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    cls = getattr(torch.optim, optim)
    hyper = {"momentum": 0.9} if optim == "SGD" else {}
    if kind == "raw":
        module = mlp()
        model, optimizer = raw(module, cls, **hyper)
    else:
        model, optimizer = ours(kind, cls, **hyper)
        module = model.module
    for step in range(6):
        if step == 3:
            module[2].requires_grad_(False)
        model(data(step)).square().mean().backward()
        optimizer.step()
        (model if kind == "raw" else optimizer).zero_grad(set_to_none=False)  # FairScale's own default
    mine = weights(module)
    theirs = copy.deepcopy(mine)
    for value in theirs.values():
        dist.broadcast(value, 0)
    return mine, theirs


@BOTH
@pytest.mark.parametrize("optim", ["SGD", "Adam"])
def test_freezing_a_layer_mid_training(ranks: Any, which: str, optim: str) -> None:
    """FairScale's owner goes on updating the frozen layer by momentum and tells nobody: ranks drift apart."""
    drift = [list(differences(*result)) for result in ranks.run(job_freeze, 2, "raw", optim)]
    assert drift[1], "raw FairScale used to drift here"
    ddp, patched = ranks.run(job_freeze, 2, "ddp", optim), ranks.run(job_freeze, 2, which, optim)
    assert [list(differences(a[0], b[0])) for a, b in zip(ddp, patched, strict=True)] == [[], []]


def exchanged(kind: str) -> list[Any]:
    """Weights are put aside by reference while others are evaluated, and later for good."""
    model, optimizer = ours(kind)
    found: list[Any] = [loop(model, optimizer)]
    parameters = list(model.module.parameters())
    aside = [p.data for p in parameters]
    for evaluated in (True, False):
        for parameter in parameters:
            parameter.data = torch.full_like(parameter, 0.25)
        if evaluated:
            with torch.no_grad():
                found.append({"output": model(data(0))})
            for parameter, value in zip(parameters, aside, strict=True):
                parameter.data = value
        found.append(loop(model, optimizer))
    return [*found, {str(i): value.clone() for i, value in enumerate(aside)}]


@BOTH
@on_ranks()
def test_memory_that_a_parameter_has_left_is_not_written_to(which: str) -> None:
    for expected, found in zip(exchanged("ddp"), exchanged(which), strict=True):
        assert list(differences(expected, found)) == []


def job_subgroup(kind: str) -> list[Tensor] | None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))["data"]
    group = mesh.get_group()
    if kind == "raw":
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS

        module = mlp()
        optimizer: Any = OSS(module.parameters(), optim=torch.optim.SGD, group=group, lr=0.1)
        model: Any = ShardedDataParallel(module, optimizer, process_group=group, reduce_buffer_size=0)
    else:
        model, optimizer = ours(kind, mesh=mesh)
    return list(loop(model, optimizer, group=group).values())


@pytest.mark.parametrize("which", often(["real", "native"], "native"))
def test_subgroup_trains_all_parameters(ranks: Any, which: str) -> None:
    """FairScale compares the owner's rank in the group with global ranks, and drops gradients (ranks [2, 3] of 4)."""
    reference = ranks.run(job_subgroup, 4, "ddp")
    assert [list(differences(a, b)) for a, b in zip(reference, ranks.run(job_subgroup, 4, which), strict=True)] == [
        []
    ] * 4
    wrong = ranks.run(job_subgroup, 4, "raw")
    assert list(differences(reference[2], wrong[2])), "raw FairScale used to lose gradients here"


def job_packing(which: str) -> str:
    from tests.zoo import ZOO

    module = fsshard.tensorfy(ZOO["tfno_tucker"].build())
    if which == "raw":
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS

        optimizer: Any = OSS(module.parameters(), optim=torch.optim.SGD, lr=0.1)
        model: Any = ShardedDataParallel(module, optimizer, sync_models_at_startup=False)
    else:
        model = fsshard.wrap(fsshard.untensorfy(module), **engine(which))
        fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    offsets = [p.storage_offset() for n, p in module.named_parameters() if n.endswith("__real")]
    return "even" if all(offset % 2 == 0 for offset in offsets) else "odd"


@pytest.mark.parametrize("which", often(["real", "native"], "native"))
def test_complex_weights_stay_aligned(ranks: Any, which: str) -> None:
    """OSS packs smallest first, and a TFNO with one output channel has a bias of one element."""
    assert ranks.run(job_packing, 2, "raw") == ["odd", "odd"]
    assert ranks.run(job_packing, 2, which) == ["even", "even"]


def job_metadata() -> str:
    from tests.zoo import ZOO

    module = fsshard.tensorfy(ZOO["tfno_tucker"].build())
    try:
        raw(module)
    except TypeError as error:
        return str(error)
    return ""


def test_metadata_in_the_state_dict(ranks: Any) -> None:
    """ShardedDDP broadcasts every value of ``state_dict()``; neuraloperator's holds a dict."""
    assert all("dict" in message for message in ranks.run(job_metadata, 2))


@BOTH
def test_no_optimizer_is_said(ranks: Any, which: str) -> None:
    """ShardedDDP needs the optimizer's partition; a training forward without one cannot be right."""
    errors = ranks.run_expecting_errors(job_forward_without_optimizer, 2, which)
    assert all(isinstance(error, OptimizerError) and "fsshard.build_optimizer" in str(error) for error in errors)


def job_forward_without_optimizer(which: str) -> None:
    model = fsshard.wrap(mlp(), **engine(which))
    model.eval()
    with torch.no_grad():
        model(data(0))  # evaluation needs no optimizer
    model.train()
    model(data(0))


def job_add_group(which: str) -> None:
    model = fsshard.wrap(mlp(), **engine(which))
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, ["0.weight"], lr=0.1)
    optimizer.add_param_group({"params": ["0.bias"]})


@BOTH
def test_add_param_group_is_refused(ranks: Any, which: str) -> None:
    errors = ranks.run_expecting_errors(job_add_group, 2, which)
    assert all(isinstance(error, UnsupportedByBackend) and "second optimizer" in str(error) for error in errors)


def test_mixed_dtypes_are_refused(ranks: Any) -> None:
    errors = ranks.run_expecting_errors(job_mixed_dtypes, 2, "real")
    assert all(isinstance(error, UnsupportedByBackend) and "one optimizer per dtype" in str(error) for error in errors)


def job_mixed_dtypes(which: str) -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6).double())
    fsshard.build_optimizer(fsshard.wrap(module, **engine(which)), torch.optim.SGD, lr=0.1)


def job_taken_over(implementation: str) -> tuple[list[str], str]:
    """What differs from bare replicas when a later optimizer takes over, and what the earlier one says then."""
    bare, model = mlp(), fsshard.wrap(mlp(), backend="fairscale", implementation=implementation)
    pairs = []
    for kind, lr in ((torch.optim.Adam, 0.01), (torch.optim.SGD, 0.1)):
        pairs.append((kind(bare.parameters(), lr=lr), fsshard.build_optimizer(model, kind, lr=lr)))
        native, optimizer = pairs[-1]
        bare(data(0)).square().mean().backward()
        average(bare)
        native.step()
        native.zero_grad()
        model(data(0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(data(0)).square().mean().backward()
    try:
        pairs[0][1].step()
    except OptimizerError as error:
        return list(differences(bare.state_dict(), model.state_dict())), str(error)
    return [], "stepped"


@pytest.mark.parametrize("implementation", ["real", "native"])
def test_a_parameter_has_one_optimizer(ranks: Any, implementation: str) -> None:
    """The earlier one would send buffers that the parameters have left, and ranks would drift apart, silently."""
    for different, message in ranks.run(job_taken_over, 2, implementation):
        assert not different and "Step the later one" in message
