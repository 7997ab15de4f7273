"""wrap(): what it refuses, on every rank, before anything is changed; and the ways in.

Tests fsshard/comm/broadcast.py too.
"""

from __future__ import annotations

import builtins
import gc
import logging
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

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
from tests.models import Net, batch, net
from tests.training_runs import DISTRIBUTED, differences, ranks_of


class OnGpu(nn.Parameter):
    """Says that it is on a GPU, on machines that have none."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]


def job_refused(what: str) -> None:
    """Ask for ``what``; if it is refused, check that the model is as it was."""
    module, settings = net(), {"backend": "fsdp2"}
    if what == "unknown backend":
        settings = {"backend": "zero3"}
    elif what == "not a module":
        fsshard.wrap("model")  # type: ignore[call-overload]
    elif what == "lazy":
        fsshard.wrap(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))
    elif what == "float32 of a float64 model":
        module, settings = module.double(), {"backend": "ddp", "mixed_precision": "fp32", "auto_wrap_policy": None}
        settings["mixed_precision"] = fsshard.Precision(param=torch.float32)
    elif what == "scripted":
        fsshard.wrap(torch.jit.script(nn.Linear(2, 2)))
    elif what == "traced inside":
        fsshard.wrap(nn.Sequential(nn.Linear(2, 2), torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))))
    elif what == "no parameters":
        fsshard.wrap(nn.ReLU())
    elif what == "two devices":
        module.last.bias = OnGpu(module.last.bias.data)
    elif what == "bf16 of a bf16 model":
        module, settings = module.bfloat16(), {"backend": "ddp", "mixed_precision": "bf16"}
    elif what == "float64 compute":
        settings = {"mixed_precision": fsshard.Precision(param=torch.float64)}
    elif what == "strategy":
        settings = {"backend": "ddp", "sharding_strategy": "FULL_SHARD"}
    elif what == "strategy type":
        settings = {"backend": "fsdp", "sharding_strategy": 3}
    elif what == "hybrid without mesh":
        settings = {"backend": "fsdp2", "sharding_strategy": "HYBRID_SHARD"}
    elif what == "offload":
        settings = {"backend": "fsdp2", "cpu_offload": True}
    elif what == "offload fairscale":
        settings = {"backend": "fairscale", "cpu_offload": True}
    elif what == "offload type":
        settings = {"cpu_offload": "yes"}
    elif what == "option":
        settings = {"backend": "fsdp", "reshard_after_forward": True}
    elif what == "none":
        settings = {"backend": "none"}
    elif what == "checkpointing":
        settings = {"activation_checkpointing": {nn.Conv2d}}
    elif what == "checkpointing type":
        settings = {"activation_checkpointing": "always"}
    elif what == "mesh":
        settings = {"device_mesh": 3}
    elif what == "policy":
        settings = {"auto_wrap_policy": "automatic"}
    elif what == "policy class":
        settings = {"auto_wrap_policy": {nn.Conv2d}}
    elif what == "mixed dtypes":
        settings = {"auto_wrap_policy": None}
        module.odd = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    elif what in ("2-D full shard", "2-D ddp"):
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "shard"))
        full = {"backend": "fsdp", "device_mesh": mesh, "sharding_strategy": "FULL_SHARD"}
        settings = full if what == "2-D full shard" else {"backend": "ddp", "device_mesh": mesh}
    elif what == "mesh of three":
        from torch.distributed.device_mesh import init_device_mesh

        settings = {"device_mesh": init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))}
    elif what == "expanded" and dist.get_rank() == 1:
        module.last.weight = nn.Parameter(torch.ones(1).expand(1, 6))
    names = [name for name, _ in module.named_parameters()]
    try:
        fsshard.wrap(module, **settings)
    except FsshardError:
        assert [name for name, _ in module.named_parameters()] == names, "the model was changed"
        assert isinstance(module.middle[0].weight, nn.Parameter)
        raise


REFUSED: dict[str, tuple[type[FsshardError], str]] = {
    "unknown backend": (UnknownBackend, "none, ddp, fsdp, fsdp2, fairscale"),
    "not a module": (ModelError, "torch.nn.Module"),
    "lazy": (ModelError, "1.weight"),
    "float32 of a float64 model": (PrecisionError, "model.float"),
    "bf16 of a bf16 model": (PrecisionError, "stay float32"),
    "float64 compute": (PrecisionError, "param=torch.float64"),
    "scripted": (ModelError, "the model is compiled by torch.jit"),
    "traced inside": (ModelError, "module '1' is compiled by torch.jit"),
    "no parameters": (ModelError, "no parameters"),
    "two devices": (ModelError, "several devices"),
    "strategy": (UnsupportedByBackend, "backend='fsdp2' or 'fsdp'"),
    "strategy type": (ConfigurationError, "ShardingStrategy"),
    "hybrid without mesh": (UnsupportedByBackend, "init_device_mesh"),
    "2-D full shard": (UnsupportedByBackend, "HYBRID_SHARD"),
    "2-D ddp": (UnsupportedByBackend, "leave device_mesh out"),
    "offload": (UnsupportedByBackend, "host memory already"),
    "offload fairscale": (UnsupportedByBackend, "on a GPU"),
    "offload type": (ConfigurationError, "CPUOffload"),
    "option": (ConfigurationError, "backward_prefetch"),
    "none": (UnsupportedByBackend, "use 'ddp'"),
    "checkpointing": (ConfigurationError, "activation_checkpointing: the model has no Conv2d; it has Linear"),
    "checkpointing type": (ConfigurationError, "fsshard.Checkpointing"),
    "mesh": (ConfigurationError, "mesh['data']"),
    "mesh of three": (ConfigurationError, "mesh['a']"),
    "policy": (ConfigurationError, "'auto'"),
    "policy class": (ConfigurationError, "the model has no Conv2d"),
    "mixed dtypes": (UnsupportedByBackend, "float32 and float64"),
    "expanded": (ModelError, "last.weight"),
}


class Shifts(nn.Module):
    """A buffer and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor([0.5, -0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.shift)


def job_scripted_without_parameters(backend: str) -> Tensor:
    """Two steps of a model with a part of torch.jit that holds nothing to shard."""
    model = with_scripted_shift()
    sharded = fsshard.wrap(model, backend=backend)
    optimizer = fsshard.build_optimizer(sharded, torch.optim.SGD, lr=0.1)
    train_scripted(sharded, optimizer)
    return sharded.state_dict()["0.weight"]


def with_scripted_shift() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), torch.jit.script(Shifts()), nn.Linear(2, 2), torch.jit.script(nn.ReLU()))


def train_scripted(model: Any, optimizer: Any) -> None:
    for step in range(2):
        model(torch.ones(3, 2) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_a_part_of_torch_jit_without_parameters_is_left_alone(ranks: Any, backend: str) -> None:
    model = with_scripted_shift()
    train_scripted(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for weight in ranks.run(job_scripted_without_parameters, 2, backend):
        assert torch.equal(weight, model[0].weight)  # type: ignore[index]


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_raises_on_every_rank_and_changes_nothing(ranks: Any, what: str) -> None:
    kind, text = REFUSED[what]
    for error in ranks.run_expecting_errors(job_refused, 2, what):
        assert type(error) is kind
        assert text in str(error)


def test_a_fault_of_one_rank_names_it(ranks: Any) -> None:
    there, here = ranks.run_expecting_errors(job_refused, 2, "expanded")
    assert str(there).startswith("rank 1: ")
    assert "'last.weight' is expanded" in str(here)


def job_differs(how: str) -> None:
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
    fsshard.wrap(module, backend="ddp")


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("shape", "last.weight"),
        ("name", "extra.weight"),
        ("frozen", "first.weight"),
        ("tie", "tied to 'pair.0.weight'"),
    ],
)
def test_models_that_differ_between_ranks(ranks: Any, how: str, text: str) -> None:
    for error in ranks.run_expecting_errors(job_differs, 2, how):
        assert type(error) is RankMismatch
        assert "ranks 0 and 1 hold different models" in str(error)
        assert text in str(error)


def job_one_rank_bad() -> None:
    module = net()
    fsshard.wrap(module, backend="ddp" if dist.get_rank() == 0 else "zero3")


def test_one_bad_rank_does_not_strand_the_other(ranks: Any) -> None:
    good, bad = ranks.run_expecting_errors(job_one_rank_bad, 2)
    assert type(good) is UnknownBackend and "rank 1" in str(good)
    assert type(bad) is UnknownBackend and "zero3" in str(bad)


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


def job_odd(backend: str) -> tuple[list[str], bool]:
    expected = [Odd().state_dict(), Odd()(torch.ones(2, 4))]
    model = fsshard.wrap(Odd(), backend=backend, auto_wrap_policy={nn.Linear}).eval()
    found = [dict(model.state_dict()), model(torch.ones(2, 4)).detach()]
    found[0] = {key: value.resolve_conj() for key, value in found[0].items()}
    module = model.module
    assert module.windows.add_(1).sum() == module.windows.sum()  # each can be written to
    return list(differences([dict(expected[0]), expected[1].detach()], found)), module.expanded is model.linear.expanded


@pytest.mark.parametrize("backend", [*DISTRIBUTED, "none"])
def test_buffers_without_memory_of_their_own_get_it(ranks: Any, backend: str) -> None:
    for found, shared in ranks.run(job_odd, ranks_of(backend), backend):
        assert found == [] and shared


NOT_DENSE = {
    "sparse buffer": "buffer 'odd' is sparse_coo: ranks exchange dense tensors only",
    "quantized buffer": "buffer 'odd' is quantized: ranks exchange dense tensors only",
    "sparse parameter": "parameter 'odd' is sparse_coo: ranks exchange dense tensors only",
    "expanded parameter": "parameter 'odd' is expanded or lazily negated",
}


def job_not_dense(backend: str, what: str) -> tuple[str, bool]:
    module, values = net(), torch.eye(4)
    if what.startswith("quantized"):
        values = torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)
    values = values.to_sparse() if what.startswith("sparse") else values[:1].expand(4, 4)
    if what.endswith("buffer"):
        module.register_buffer("odd", values)
    else:
        module.odd = nn.Parameter(values)
    before = dict(module.named_parameters())
    try:
        fsshard.wrap(module, backend=backend)
    except ModelError as error:
        return str(error), list(map(id, before.values())) == [id(p) for p in module.parameters()]
    return "", False


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
@pytest.mark.parametrize("what", NOT_DENSE)
def test_tensors_that_are_not_dense_are_named_before_anything_is_changed(ranks: Any, backend: str, what: str) -> None:
    for told, unchanged in ranks.run(job_not_dense, 2, backend, what):
        assert NOT_DENSE[what] in told and unchanged


class Words(nn.Module):
    """An embedding whose gradient names the rows that were looked up."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.linear = nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 1)

    def forward(self, index: Tensor) -> Tensor:
        return self.linear(self.table(index))


def job_sparse(backend: str, settings: dict[str, Any]) -> None:
    fsshard.wrap(Words(), backend=backend, **settings)


@pytest.mark.parametrize(
    ("backend", "precision"),
    [("fsdp", None), ("fsdp2", None), ("fsdp2", "fp16"), ("ddp", "fp16"), ("fairscale", "bf16"), ("none", "bf16")],
)
def test_sparse_gradients_that_cannot_be_reduced(ranks: Any, backend: str, precision: Any) -> None:
    for error in ranks.run_expecting_errors(job_sparse, ranks_of(backend), backend, {"mixed_precision": precision}):
        assert type(error) is UnsupportedByBackend
        assert "sparse gradients (module 'table': Embedding with sparse=True)" in str(error)
        assert "sparse=False, or use backend='ddp' in float32" in str(error)


def job_sparse_training(backend: str) -> list[str]:
    def train(sparse: bool) -> list[Any]:
        model = fsshard.wrap(Words(sparse), backend=backend)
        optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        norms = []
        for step in range(3):
            model(torch.tensor([[1, 2, 3], [3, 4, 5 + step]][dist.get_rank()])).square().mean().backward()
            norms.append(model.clip_grad_norm_(0.1, [2.0, 1.0, float("inf")][step]))
            optimizer.step()
            optimizer.zero_grad()
        return [norms, dict(model.state_dict())]

    return list(differences(train(False), train(True)))


@pytest.mark.parametrize("backend", ["ddp", "fairscale", "none"])
def test_sparse_gradients_train_as_dense_ones_do(ranks: Any, backend: str) -> None:
    assert not any(ranks.run(job_sparse_training, ranks_of(backend), backend))


# ------------------------------------------------------------------------------------------------ the ways in


def job_sync(backend: str, sync: bool) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    module = Net()
    module.steps.fill_(dist.get_rank() + 3)
    return (
        fsshard.wrap(module, backend=backend, sync_module_states=sync).module.state_dict()
        if backend == "ddp"
        else (fsshard.wrap(module, backend=backend, sync_module_states=sync).state_dict())
    )


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_every_rank_starts_with_rank_zeros_values(ranks: Any, backend: str) -> None:
    one, other = ranks.run(job_sync, 2, backend, True)
    assert list(differences(dict(one), dict(other))) == []
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


def job_no_group() -> tuple[str, int, bool]:
    dist.destroy_process_group()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsshard").addHandler(handler)
    logging.getLogger("fsshard").setLevel(logging.INFO)
    import os

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    model = fsshard.wrap(net())
    return model.backend.name, dist.get_world_size(), any("one-rank" in record for record in records)


def test_a_notebook_works(ranks: Any) -> None:
    assert ranks.run(job_no_group, 1)[0][:2] == ("none", 1)


def job_mesh(backend: str) -> tuple[int, dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))["data"]
    model = fsshard.wrap(net(), backend=backend, device_mesh=mesh, replicated={})
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=0.01)
    for number in range(3):
        model(batch(number)).square().mean().backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model.backend.settings.world_size, model.state_dict()


@pytest.mark.parametrize("backend", DISTRIBUTED[1:])
def test_a_slice_of_a_mesh(ranks: Any, backend: str) -> None:
    """Two pairs of ranks train a model each; within a pair the result is ddp's."""
    reference, mine = ranks.run(job_mesh, 4, "ddp"), ranks.run(job_mesh, 4, backend)
    assert [size for size, _ in mine] == [2] * 4
    assert [list(differences(a, b)) for (_, a), (_, b) in zip(reference, mine, strict=True)] == [[]] * 4
    assert list(differences(mine[0][1], mine[2][1]))


def job_hybrid(backend: str) -> tuple[int, int, dict[str, Any], dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    settings = {"device_mesh": mesh, "sharding_strategy": "HYBRID_SHARD"} if backend != "ddp" else {}
    model = fsshard.wrap(net(), backend=backend, **settings)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    for number in range(3):
        model(batch(number)).square().mean().backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    held = sum(entry.local().numel() for entry in model.backend.entries.values())
    whole = sum(entry.stored_shape.numel() for entry in model.backend.entries.values())
    return held, whole, model.state_dict(), optimizer.state_dict()["state"]


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
def test_hybrid_sharding(ranks: Any, backend: str) -> None:
    """Shards within pairs, replicas across; against ddp on four ranks, whose sums have another order.

    2^-20: three SGD steps at rate 0.1 with gradients clipped to 0.1 add up rounding errors of numbers below 1.
    """
    reference = ranks.run(job_hybrid, 4, "ddp")[0]
    for held, whole, weights, state in ranks.run(job_hybrid, 4, backend):
        assert 0.4 * whole < held < 0.6 * whole
        for name, value in reference[2].items():
            assert (value - weights[name]).abs().max() <= 2.0**-20, name
        for name, moments in reference[3].items():
            assert (moments["momentum_buffer"] - state[name]["momentum_buffer"]).abs().max() <= 2.0**-20, name


def job_strategy(backend: str, strategy: Any) -> list[str]:
    def train(name: str, **settings: Any) -> dict[str, Any]:
        model = fsshard.wrap(net(), backend=name, **settings)
        optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=0.01)
        for number in range(3):
            model(batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(batch(number))
            model.state_dict()  # between steps, whatever the engine left unsharded
        return model.state_dict()

    return list(differences(train("ddp"), train(backend, sharding_strategy=strategy)))


@pytest.mark.covering
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "enum"])
@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
def test_sharding_strategies(ranks: Any, backend: str, strategy: str) -> None:
    from torch.distributed.fsdp import ShardingStrategy

    given = ShardingStrategy.SHARD_GRAD_OP if strategy == "enum" else strategy
    assert ranks.run(job_strategy, 2, backend, given) == [[], []]


def job_policies(backend: str, policy: Any) -> tuple[int, list[str]]:
    def train(name: str, chosen: Any) -> Any:
        model = fsshard.wrap(net(), backend=name, auto_wrap_policy=chosen)
        optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=0.01)
        for number in range(2):
            model(batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    model = train(backend, policy)
    return len(model.plan.units), list(differences(train("ddp", None).state_dict(), model.state_dict()))


@pytest.mark.covering
@pytest.mark.parametrize(("policy", "units"), [(None, 1), ({"Spectral", "Linear"}, 5), (100, 4), ("auto", 3)])
@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
def test_units_do_not_change_the_training(ranks: Any, backend: str, policy: Any, units: int) -> None:
    for count, found in ranks.run(job_policies, 2, backend, policy):
        assert count == units
        assert found == []


class Walked(nn.Module):
    """Counts the walks over its modules while it is wrapped, and those among them that look where parameters are."""

    walks = 0
    tables = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        Walked.walks += 1
        Walked.tables += sys._getframe(1).f_code.co_name == "parameter_slots"
        return super().named_modules(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)) + (x.to(torch.complex64) @ self.weight).real


def job_walks(backend: str) -> tuple[int, int]:
    gc.collect()  # models of other tests, whose fields were split: while there is one, wrap looks for it
    Walked.walks = Walked.tables = 0
    model = Walked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Walked.walks = 0
    fsshard.wrap(model, optimizer, backend=backend)
    return Walked.tables, Walked.walks


@pytest.mark.parametrize("backend", ["none", "ddp", "fsdp2"])
def test_the_table_of_parameters_is_made_once_and_handed_on(ranks: Any, backend: str) -> None:
    for tables, walks in ranks.run(job_walks, ranks_of(backend), backend):
        # One before anything is changed; then the backend's of what is stored, and one of what is there when all is.
        assert tables == 3
        assert walks <= 45  # each is linear in the model; checks of max_norm and LayerDrop, and views, are among them
