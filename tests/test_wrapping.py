"""wrap(): what it refuses, on every rank, before anything is changed; and the ways in."""

from __future__ import annotations

import builtins
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsshard
from fsshard.errors import (
    AlreadyWrapped,
    ConfigurationError,
    FsshardError,
    MissingExtra,
    ModelError,
    PrecisionError,
    RankMismatch,
    UnknownBackend,
    UnsupportedByBackend,
)
from tests.models import Net, batch, net, take_step, with_sgd
from tests.on_ranks import on_backends, on_ranks
from tests.training_runs import DISTRIBUTED, check_equal, differences, ranks_of


class Words(nn.Module):
    """An embedding whose gradient names the rows that were looked up."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.linear = nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 1)

    def forward(self, index: Tensor) -> Tensor:
        return self.linear(self.table(index))


class OnGpu(nn.Parameter):
    """Says that it is on a GPU, on machines that have none."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]


def changed(name: str, value: Any) -> nn.Module:
    module = net()
    setattr(module.last if name != "odd" else module, name, value(module.last.bias.data))
    return module


def with_buffer(values: Tensor) -> nn.Module:
    module = net()
    module.register_buffer("odd", values)
    return module


def mesh(*names: str) -> Any:
    return init_device_mesh("cpu", (*[1] * (len(names) - 1), 2), mesh_dim_names=names)


def expanded() -> nn.Module:
    """On rank 1 alone."""
    return changed("weight", lambda bias: nn.Parameter(torch.ones(1).expand(1, 6))) if dist.get_rank() else net()


Refusal = tuple[Callable[[], Any], Callable[[], dict[str, Any]], type[FsshardError], str]
"""The model's factory; settings, over ``backend="fsdp2"``; the error's type; a part of its text."""


def setting(kind: type[FsshardError], text: str, build: Callable[[], Any] = net, **settings: Any) -> Refusal:
    return build, lambda: settings, kind, text


REFUSED: dict[str, Refusal] = {
    "not a module": setting(ModelError, "expected an nn.Module", lambda: "model"),
    "lazy": setting(ModelError, "1.weight", lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))),
    "scripted": setting(
        ModelError, "the model is compiled by torch.jit", lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    ),
    "traced inside": setting(
        ModelError,
        "module '1' is compiled by torch.jit",
        lambda: nn.Sequential(nn.Linear(2, 2), torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))),
    ),
    "no parameters": setting(ModelError, "expected parameters", nn.ReLU),
    "two devices": setting(ModelError, "model: expected one device, got ", lambda: changed("bias", OnGpu)),
    "expanded": setting(ModelError, "last.weight", expanded),
    "mixed dtypes": setting(
        UnsupportedByBackend,
        "float32 and float64",
        lambda: changed("odd", lambda bias: nn.Parameter(bias.double())),
        auto_wrap_policy=None,
    ),
    "sparse buffer": setting(
        ModelError,
        "buffer 'odd' is sparse_coo: ranks exchange dense tensors only",
        lambda: with_buffer(torch.eye(4).to_sparse()),
    ),
    "quantized buffer": setting(
        ModelError,
        "buffer 'odd' is quantized: ranks exchange dense tensors only",
        lambda: with_buffer(torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8)),
    ),
    "sparse parameter": setting(
        ModelError,
        "parameter 'odd' is sparse_coo: ranks exchange dense tensors only",
        lambda: changed("odd", lambda _: nn.Parameter(torch.eye(4).to_sparse())),
        backend="ddp",
    ),
    **{
        f"sparse gradients, {backend}, {precision}": setting(
            UnsupportedByBackend,
            "sparse gradients (module 'table': Embedding with sparse=True)",
            Words,
            backend=backend,
            mixed_precision=precision,
        )
        for backend, precision in (("fsdp", None), ("fsdp2", "fp16"), ("ddp", "fp16"), ("fairscale", "bf16"))
    },
    "unknown backend": setting(UnknownBackend, "none, ddp, fsdp, fsdp2, fairscale", backend="zero3"),
    "none": setting(UnsupportedByBackend, "use 'ddp'", backend="none"),
    "option": setting(ConfigurationError, "backward_prefetch", backend="fsdp", reshard_after_forward=True),
    "float32 of a float64 model": setting(
        PrecisionError,
        "model.float",
        lambda: net().double(),
        backend="ddp",
        mixed_precision=fsshard.Precision(param=torch.float32),
        auto_wrap_policy=None,
    ),
    "bf16 of a bf16 model": setting(
        PrecisionError, "stay float32", lambda: net().bfloat16(), backend="ddp", mixed_precision="bf16"
    ),
    "float64 compute": setting(
        PrecisionError, "param=torch.float64", mixed_precision=fsshard.Precision(param=torch.float64)
    ),
    "strategy": setting(
        UnsupportedByBackend, "backend='fsdp2' or 'fsdp'", backend="ddp", sharding_strategy="FULL_SHARD"
    ),
    "strategy type": setting(ConfigurationError, "ShardingStrategy", backend="fsdp", sharding_strategy=3),
    "hybrid without mesh": setting(UnsupportedByBackend, "init_device_mesh", sharding_strategy="HYBRID_SHARD"),
    "offload": setting(UnsupportedByBackend, "host memory already", cpu_offload=True),
    "offload fairscale": setting(UnsupportedByBackend, "on a GPU", backend="fairscale", cpu_offload=True),
    "offload type": setting(ConfigurationError, "CPUOffload", cpu_offload="yes"),
    "checkpointing": setting(
        ConfigurationError,
        "activation_checkpointing: the model has no Conv2d; it has Linear",
        activation_checkpointing={nn.Conv2d},
    ),
    "checkpointing type": setting(ConfigurationError, "fsshard.Checkpointing", activation_checkpointing="always"),
    "policy": setting(ConfigurationError, "'auto'", auto_wrap_policy="automatic"),
    "policy class": setting(ConfigurationError, "the model has no Conv2d", auto_wrap_policy={nn.Conv2d}),
    "mesh": setting(ConfigurationError, "mesh['data']", device_mesh=3),
    "2-D full shard": (
        net,
        lambda: {"backend": "fsdp", "device_mesh": mesh("replica", "shard"), "sharding_strategy": "FULL_SHARD"},
        UnsupportedByBackend,
        "HYBRID_SHARD",
    ),
    "2-D ddp": (
        net,
        lambda: {"backend": "ddp", "device_mesh": mesh("replica", "shard")},
        UnsupportedByBackend,
        "leave device_mesh out",
    ),
    "mesh of three": (net, lambda: {"device_mesh": mesh("a", "b", "c")}, ConfigurationError, "mesh['a']"),
}


def job_refused() -> dict[str, tuple[type, str]]:
    """Ask for each; where it is refused, look whether the model is as it was."""
    found = {}
    for what, (build, settings, _, _) in REFUSED.items():
        module = build()
        before = list(module.named_parameters()) if isinstance(module, nn.Module) else []
        try:
            fsshard.wrap(module, **{"backend": "fsdp2", **settings()})
        except FsshardError as error:
            same = [name for name, _ in before] == [name for name, _ in before and module.named_parameters()]
            found[what] = type(error), str(error) if same else "the model was changed"
    return found


class Shifts(nn.Module):
    """A buffer and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor([0.5, -0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.shift)


def with_scripted_shift() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), torch.jit.script(Shifts()), nn.Linear(2, 2), torch.jit.script(nn.ReLU()))


def train_scripted(model: Any, optimizer: Any) -> None:
    for step in range(2):
        model(torch.ones(3, 2) + step).square().mean().backward()
        take_step(optimizer)


@on_backends(DISTRIBUTED)
def test_a_part_of_torch_jit_without_parameters_is_left_alone(backend: str) -> None:
    """Two steps of a model with a part of torch.jit that holds nothing to shard."""
    model = with_scripted_shift()
    train_scripted(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sharded, optimizer = with_sgd(with_scripted_shift(), backend=backend)
    train_scripted(sharded, optimizer)
    assert torch.equal(sharded.state_dict()["0.weight"], model[0].weight)  # type: ignore[index]


def test_bad_input_raises_on_every_rank_and_changes_nothing(ranks: Any) -> None:
    for told in ranks.run(job_refused, 2):
        for what, (_, _, kind, text) in REFUSED.items():
            assert told[what][0] is kind and text in told[what][1], (what, told[what])


def test_a_fault_of_one_rank_names_it(ranks: Any) -> None:
    there, here = (told["expanded"][1] for told in ranks.run(job_refused, 2))
    assert there.startswith("rank 1: ") and "'last.weight' is expanded" in here


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("shape", r"  last\.weight +\(1, 6\) torch\.float32 +\(2, 6\) torch\.float32$"),
        ("name", r"  extra\.weight +- +\(2, 2\) torch\.float32$"),
        ("frozen", r"  first\.weight +\(.*\) torch\.float32 +\(.*\) torch\.float32, no gradient$"),
        ("tie", r"  pair\.1\.weight .* tied to 'pair\.0\.weight'$"),
    ],
)
@on_ranks()
def test_models_that_differ_between_ranks(how: str, text: str) -> None:
    module = net()
    module.pair = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    if dist.get_rank() == 1:
        if how == "shape":
            module.last = nn.Linear(6, 2)
        elif how == "name":
            module.extra = nn.Linear(2, 2)
        elif how == "tie":
            module.pair[1].weight = module.pair[0].weight
        else:
            module.first.requires_grad_(False)
    with pytest.raises(RankMismatch) as raised:
        fsshard.wrap(module, backend="ddp")
    told = str(raised.value)
    assert "ranks 0 and 1 hold different models" in told
    assert re.search(r"^ +rank 0 +rank 1$", told, re.MULTILINE)
    assert re.search(text, told, re.MULTILINE)


def job_one_rank_bad() -> None:
    module = net()
    fsshard.wrap(module, backend="ddp" if dist.get_rank() == 0 else "zero3")


def test_one_bad_rank_does_not_strand_the_other(ranks: Any) -> None:
    good, bad = ranks.run_expecting_errors(job_one_rank_bad, 2)
    assert type(good) is UnknownBackend and "rank 1" in str(good)
    assert type(bad) is UnknownBackend and "zero3" in str(bad)


FRAMES = ["torch_settings.py", "compiling.py", "wrapping.py", "agreement.py", "agreement.py"]


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_a_traceback_has_few_frames_of_ours(world_size: int) -> None:
    with pytest.raises(UnknownBackend) as raised:
        fsshard.wrap(net(), backend="zero3")
    assert [entry.path.name for entry in raised.traceback][1:] == FRAMES  # type: ignore[union-attr]


def job_twice(how: str) -> None:
    module = net()
    model = fsshard.wrap(module, backend="ddp")
    if how == "result":
        fsshard.wrap(model, backend="ddp")
    elif how == "module":
        fsshard.wrap(module, backend="fsdp2")
    else:
        raw = nn.parallel.DistributedDataParallel(Net())
        fsshard.wrap(nn.Sequential(raw), backend="ddp")


@pytest.mark.parametrize("how", ["result", "module", "torch"])
def test_wrapping_twice(ranks: Any, how: str) -> None:
    for error in ranks.run_expecting_errors(job_twice, 2, how):
        assert type(error) is AlreadyWrapped


def job_without_fairscale() -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "fairscale":
            raise ModuleNotFoundError("No module named 'fairscale'", name="fairscale")
        return real(name, *args, **kwargs)

    hidden = {m: sys.modules.pop(m) for m in list(sys.modules) if m.endswith("fairscale_patched")}
    builtins.__import__ = absent
    try:
        fsshard.wrap(net(), backend="fairscale", implementation="real")
    finally:
        builtins.__import__ = real
        sys.modules.update(hidden)


def test_a_missing_extra_says_the_pip_line(ranks: Any) -> None:
    for error in ranks.run_expecting_errors(job_without_fairscale, 2):
        assert type(error) is MissingExtra
        assert "pip install 'fsshard[fairscale]'" in str(error)


class Odd(nn.Module):
    """Buffers that a constructor makes in one line, and that nobody can write to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        number = torch.randn(4, dtype=torch.complex64)
        self.register_buffer("expanded", torch.ones(1).expand(4))
        self.register_buffer("windows", torch.arange(6.0).unfold(0, 4, 1))
        self.register_buffer("conjugated", number.conj())
        self.register_buffer("negated", number.conj().imag)
        self.register_buffer("turned", torch.randn(3, 4).t())
        for module in (self.linear, self.other):
            module.register_buffer("expanded", self.expanded)

    def forward(self, x: Tensor) -> Tensor:
        y = self.other(self.linear(x)) * self.expanded * self.conjugated.abs() * self.negated
        return y @ self.turned + self.windows.sum()


@on_backends([*DISTRIBUTED, "none"])
def test_buffers_without_memory_of_their_own_get_it(backend: str) -> None:
    expected = [Odd().state_dict(), Odd()(torch.ones(2, 4))]
    model = fsshard.wrap(Odd(), backend=backend, auto_wrap_policy={nn.Linear}).eval()
    found = [dict(model.state_dict()), model(torch.ones(2, 4)).detach()]
    found[0] = {key: value.resolve_conj() for key, value in found[0].items()}
    module = model.module
    assert module.windows.add_(1).sum() == module.windows.sum()  # each can be written to
    found = list(differences([dict(expected[0]), expected[1].detach()], found))
    shared = module.expanded is model.linear.expanded
    assert found == [] and shared


@pytest.mark.parametrize("backend", ["ddp", "fairscale", "none"])
@on_ranks(ranks_of)
def test_sparse_gradients_train_as_dense_ones_do(backend: str) -> None:
    def train(sparse: bool) -> list[Any]:
        model, optimizer = with_sgd(Words(sparse), backend=backend)
        norms = []
        for step in range(3):
            model(torch.tensor([[1, 2, 3], [3, 4, 5 + step]][dist.get_rank()])).square().mean().backward()
            norms.append(model.clip_grad_norm_(0.1, [2.0, 1.0, float("inf")][step]))
            take_step(optimizer)
        return [norms, dict(model.state_dict())]

    assert not list(differences(train(False), train(True)))


def job_sync(backend: str, sync: bool) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    module = Net()
    module.steps.fill_(dist.get_rank() + 3)
    model = fsshard.wrap(module, backend=backend, sync_module_states=sync)
    return model.module.state_dict() if backend == "ddp" else model.state_dict()


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_every_rank_starts_with_rank_zeros_values(ranks: Any, backend: str) -> None:
    one, other = ranks.run(job_sync, 2, backend, True)
    check_equal(dict(one), dict(other))
    assert int(other["steps"]) == 3
    torch.manual_seed(0)
    assert torch.equal(one["middle.0.weight"], Net().state_dict()["middle.0.weight"])


def test_sync_can_be_left_out(ranks: Any) -> None:
    one, other = ranks.run(job_sync, 2, "ddp", False)
    assert not torch.equal(one["first.weight"], other["first.weight"])


def job_auto() -> str:
    return fsshard.wrap(net()).backend.name


def test_auto_backend(ranks: Any) -> None:
    assert ranks.run(job_auto, 2) == ["fsdp2", "fsdp2"]
    assert ranks.run(job_auto, 1) == ["none"]


@on_ranks(1)
def test_a_notebook_works() -> None:
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    model = fsshard.wrap(net())
    assert model.backend.name == "none"
    assert dist.get_world_size() == 1


def trained(backend: str, clip: float = 0.1, kind: Any = torch.optim.Adam, **settings: Any) -> tuple[Any, Any]:
    """The model and its optimizer after three steps; it is used and read in between."""
    model = fsshard.wrap(net(), backend=backend, **settings)
    optimizer = fsshard.build_optimizer(model, kind, lr=0.01)
    for number in range(3):
        model(batch(number)).square().mean().backward()
        if clip:
            model.clip_grad_norm_(clip)
        take_step(optimizer)
        with torch.no_grad():
            model(batch(number))
        model.state_dict()  # between steps, whatever the engine left unsharded
    return model, optimizer


def job_mesh(backend: str) -> tuple[int, dict[str, Any]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))["data"]
    model, _ = trained(backend, device_mesh=mesh, replicated={})
    return model.backend.settings.world_size, model.state_dict()


@pytest.mark.parametrize("backend", DISTRIBUTED[1:])
def test_a_slice_of_a_mesh(ranks: Any, backend: str) -> None:
    """Two pairs of ranks train a model each; within a pair the result is ddp's."""
    reference, mine = ranks.run(job_mesh, 4, "ddp"), ranks.run(job_mesh, 4, backend)
    assert [size for size, _ in mine] == [2] * 4
    assert [list(differences(a, b)) for (_, a), (_, b) in zip(reference, mine, strict=True)] == [[]] * 4
    assert list(differences(mine[0][1], mine[2][1]))


@pytest.mark.covering
@pytest.mark.parametrize(("policy", "units"), [(None, 1), ({"Spectral", "Linear"}, 5), (100, 4), ("auto", 3)])
@on_backends(["fsdp", "fsdp2"])
def test_units_do_not_change_the_training(backend: str, policy: Any, units: int) -> None:
    (model, _), (reference, _) = trained(backend, 0, auto_wrap_policy=policy), trained("ddp", 0, auto_wrap_policy=None)
    count = len(model.plan.units)
    found = list(differences(reference.state_dict(), model.state_dict()))
    assert count == units
    assert found == []


class Walked(nn.Module):
    """Counts the walks over its modules that the library makes, and not torch's own."""

    walks = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_globals["__name__"].startswith("torch.nn.modules."):  # modules(), parameters(), buffers()
            frame = frame.f_back  # type: ignore[assignment]
        Walked.walks += frame.f_globals["__name__"].startswith("fsshard.")
        return super().named_modules(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)) + (x.to(torch.complex64) @ self.weight).real


@pytest.mark.parametrize("backend", ["none", "ddp", "fsdp2"])
@on_ranks(ranks_of)
def test_the_modules_are_walked_once_and_the_table_is_handed_on(backend: str) -> None:
    model = Walked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Walked.walks = 0
    fsshard.wrap(model, optimizer, backend=backend)
    # Beside the table: the look for compiled modules, the engine's units, its entries and own look, and ModelBuffers.
    assert Walked.walks <= 6
