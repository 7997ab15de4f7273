"""ShardedModule: the same object under every backend."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.activation import checkpoint_blocks
from fsshard.errors import ConfigurationError, FsshardError, StateDictError
from tests.jobs import DISTRIBUTED, Run, compare, differences
from tests.models import Net, Spectral, batch, net

ALL = (*DISTRIBUTED, "none")


def ranks_for(backend: str) -> int:
    return 1 if backend == "none" else 2


def trained(backend: str, steps: int = 2, **settings: Any) -> tuple[fsshard.ShardedModule, fsshard.ShardedOptimizer]:
    model = fsshard.wrap(net(), backend=backend, **settings)
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=0.01)
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: Any, optimizer: Any, steps: Any) -> list[float]:
    losses = []
    for step in steps:
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


# ------------------------------------------------------------------------------------------------ what it is


def job_attributes(backend: str) -> list[Any]:
    model = fsshard.wrap(net(), backend=backend)
    model.last.out_features = 7  # reaches the user's module
    model.custom = 3
    return [
        model.backend.name,
        isinstance(model.module, Net),
        type(model.module.first).__name__,
        model.first.in_features,
        model.module.last.out_features,
        model.custom,
        [unit.name for unit in model.plan.units],
        model.explain().splitlines()[0],
        hasattr(model, "nonsense"),
    ]


@pytest.mark.parametrize("backend", ALL)
def test_attributes_fall_through(ranks: Any, backend: str) -> None:
    name, is_net, linear, width, written, custom, units, head, nonsense = ranks.run(
        job_attributes, ranks_for(backend), backend
    )[0]
    assert (name, is_net, linear, width, written, custom, nonsense) == (backend, True, "Linear", 4, 7, 3, False)
    assert units == ["", "middle.0", "middle.1"]
    assert head.startswith(f"backend {backend!r} on {ranks_for(backend)} rank")


def job_names(backend: str) -> tuple[list[Any], list[Any], list[str]]:
    reference = net()
    model = fsshard.wrap(net(), backend=backend)
    want = [(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in reference.named_parameters()]
    got = [(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in model.named_parameters()]
    return want, got, [n for n, _ in model.named_buffers()]


@pytest.mark.parametrize("backend", ALL)
def test_named_parameters_are_the_original_ones(ranks: Any, backend: str) -> None:
    for want, got, buffers in ranks.run(job_names, ranks_for(backend), backend):
        assert got == want
        assert buffers == ["steps"]


def job_copies(backend: str) -> list[str]:
    model = fsshard.wrap(net(), backend=backend)
    messages = []
    acts: list[Any] = [lambda: copy.deepcopy(model), lambda: pickle.dumps(model), lambda: model.to(torch.float64)]
    acts.append(lambda: model.to(memory_format=torch.channels_last))
    for act in acts:
        try:
            act()
        except FsshardError as error:
            messages.append(str(error))
    assert model.to("cpu") is model
    return messages


@pytest.mark.parametrize("backend", ALL)
def test_copying_and_casting_say_what_to_do(ranks: Any, backend: str) -> None:
    copied, pickled, cast, laid = ranks.run(job_copies, ranks_for(backend), backend)[0]
    assert "state_dict()" in copied and "state_dict()" in pickled
    assert "before fsshard.wrap" in cast and "memory_format" in laid


# ------------------------------------------------------------------------------------------------ state dicts


def job_state_dict(backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    model, _ = trained(backend)
    return model.state_dict(), net().state_dict()


@pytest.mark.parametrize("backend", ALL)
def test_state_dict_is_the_models_own(ranks: Any, backend: str) -> None:
    """Keys, order, dtypes and shapes; values equal on every rank; loads into the bare model."""
    results = ranks.run(job_state_dict, ranks_for(backend), backend)
    mine, native = results[0]
    assert [(k, v.dtype, v.shape) for k, v in mine.items()] == [(k, v.dtype, v.shape) for k, v in native.items()]
    assert [list(differences(mine, other)) for other, _ in results[1:]] == [[]] * (len(results) - 1)
    bare = net()
    bare.load_state_dict(mine)
    assert list(differences(dict(bare.state_dict()), mine)) == []


def job_rank0_only(backend: str) -> tuple[int, int]:
    model, optimizer = trained(backend)
    return len(model.state_dict(rank0_only=True, offload_to_cpu=True)), len(optimizer.state_dict(rank0_only=True))


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_rank0_only(ranks: Any, backend: str) -> None:
    """FSDP1's own ``offload_to_cpu`` crashes on CPU (pytorch issue #188989)."""
    assert ranks.run(job_rank0_only, 2, backend) == [(9, 2), (0, 0)]


def job_move(source: str, target: str) -> tuple[list[float], list[float], list[str]]:
    model, optimizer = trained(source, steps=3)
    weights, state = model.state_dict(), optimizer.state_dict()
    other = fsshard.wrap(Net(), backend=target)
    rebuilt = fsshard.build_optimizer(other, torch.optim.Adam, lr=0.5)
    other.load_state_dict(weights)
    rebuilt.load_state_dict(state)
    here, there = train(model, optimizer, range(3, 6)), train(other, rebuilt, range(3, 6))
    return here, there, list(differences(model.state_dict(), other.state_dict()))


@pytest.mark.parametrize("target", DISTRIBUTED)
@pytest.mark.parametrize("source", DISTRIBUTED)
def test_state_moves_between_backends(ranks: Any, source: str, target: str) -> None:
    """Model and optimizer of one backend go on under another as if nothing had happened."""
    for here, there, found in ranks.run(job_move, 2, source, target):
        assert here == there
        assert found == []


def job_bad_state(backend: str) -> tuple[list[Any], bool]:
    model, _ = trained(backend)
    before = model.state_dict()
    bad = {k: v for k, v in before.items() if k != "first.bias"}
    bad["middle.0.weight"] = torch.zeros(2, 2, dtype=torch.complex64)
    bad["stranger"] = torch.zeros(1)
    bad["last.weight"] = torch.full_like(before["last.weight"], 9.0)
    try:
        model.load_state_dict(bad)
    except StateDictError as error:
        listed = [error.missing, error.unexpected, error.mismatched, str(error)]
    return listed, not list(differences(before, model.state_dict()))


@pytest.mark.parametrize("backend", ALL)
def test_load_lists_what_does_not_fit_and_changes_nothing(ranks: Any, backend: str) -> None:
    for (missing, unexpected, mismatched, text), unchanged in ranks.run(job_bad_state, ranks_for(backend), backend):
        assert missing == ["first.bias"]
        assert unexpected == ["stranger"]
        assert mismatched == {"middle.0.weight": ((6, 6), (2, 2))}
        assert "__real" not in text
        assert unchanged


def job_not_strict(backend: str) -> tuple[list[str], list[str], bool]:
    model, _ = trained(backend)
    result = model.load_state_dict({"last.bias": torch.full((1,), 4.0), "stranger": torch.zeros(1)}, strict=False)
    with pytest.raises(ConfigurationError):
        model.load_state_dict(model.state_dict(), assign=True)
    return result.missing_keys, result.unexpected_keys, bool((model.state_dict()["last.bias"] == 4).all())


@pytest.mark.parametrize("backend", ALL)
def test_load_not_strict(ranks: Any, backend: str) -> None:
    missing, unexpected, loaded = ranks.run(job_not_strict, ranks_for(backend), backend)[0]
    assert "first.weight" in missing and "last.bias" not in missing
    assert (unexpected, loaded) == (["stranger"], True)


# ------------------------------------------------------------------------------------------------ full parameters


def job_full(backend: str) -> list[Any]:
    model, optimizer = trained(backend)
    want = model.state_dict()
    with model.full_parameters() as whole:
        same = list(differences(dict(whole), {k: v for k, v in want.items() if k != "steps"}))
        seen = torch.equal(model.module.middle[0].weight, want["middle.0.weight"])
        names = [(n, tuple(p.shape), p.dtype) for n, p in model.named_parameters()]
        refused = False
        try:
            model(batch(0))
        except FsshardError:
            refused = True
    with model.full_parameters(writeback=True) as whole, torch.no_grad():
        whole["middle.0.weight"].mul_(2)
        whole["last.bias"].fill_(5)
    after = model.state_dict()
    kept = [torch.equal(after["middle.0.weight"], 2 * want["middle.0.weight"]), float(after["last.bias"])]
    losses = train(model, optimizer, range(2, 4))
    return [same, seen, names, refused, kept, losses]


@pytest.mark.parametrize("backend", ALL)
def test_full_parameters(ranks: Any, backend: str) -> None:
    reference = [(n, tuple(p.shape), p.dtype) for n, p in net().named_parameters()]
    for same, seen, names, refused, kept, losses in ranks.run(job_full, ranks_for(backend), backend):
        assert (same, seen, names, refused, kept) == ([], True, reference, True, [True, 5.0])
        assert all(loss == loss for loss in losses)


# ------------------------------------------------------------------------------------------------ norms


def job_norm(backend: str, norm_type: float) -> tuple[float, float]:
    model = fsshard.wrap(net(), backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    model(batch(0)).square().mean().backward()
    ours = float(model.clip_grad_norm_(0.01, norm_type))
    optimizer.step()
    native = net()
    whole = torch.cat([batch_of(rank) for rank in range(dist.get_world_size())])
    native(whole).square().mean().backward()
    return ours, float(torch.nn.utils.clip_grad_norm_(native.parameters(), 0.01, norm_type))


def batch_of(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, float("inf")])
@pytest.mark.parametrize("backend", ALL)
def test_norm_counts_complex_numbers(ranks: Any, backend: str, norm_type: float) -> None:
    """The value of torch's own function on the unsharded model with native complex weights.

    1e-5: torch sums in float32 over some hundred numbers, and 0.5 takes the square of a sum.
    """
    ours = ranks.run(job_norm, ranks_for(backend), backend, norm_type)
    assert len({value for value, _ in ours}) == 1
    assert ours[0][0] == pytest.approx(ours[0][1], rel=1e-5)


def job_nonfinite(backend: str) -> None:
    model = fsshard.wrap(net(), backend=backend)
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    (model(batch(0)).sum() * float("inf")).backward()
    with pytest.raises(ConfigurationError):
        model.clip_grad_norm_(1.0, 0.0)
    model.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_nonfinite_norm_raises_on_every_rank(ranks: Any, backend: str) -> None:
    assert all("norm of order 2.0 is" in str(error) for error in ranks.run_expecting_errors(job_nonfinite, 2, backend))


# ------------------------------------------------------------------------------------------------ accumulation, buffers


def test_no_sync_is_one_big_batch(ranks: Any) -> None:
    runs = [Run("mlp_complex", backend, micro_batches=4) for backend in DISTRIBUTED]
    assert ranks.run(compare, 2, runs) == [[], []]


class Noisy(nn.Module):
    """Its buffers differ between ranks after each training forward."""

    seen: Tensor
    spectrum: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = Spectral(4), nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("spectrum", torch.zeros(4, dtype=torch.complex64))
        self.register_buffer("flag", torch.tensor(False), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.detach().mean(0)
            self.spectrum += torch.fft.fft(x.detach().mean(0))
        return self.norm(self.layer(x)) + self.seen


def job_buffers(backend: str) -> tuple[dict[str, Any], Tensor]:
    torch.manual_seed(0)
    model = fsshard.wrap(Noisy(), backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    train(model, optimizer, range(3))
    model.eval()
    with torch.no_grad():
        output = model(torch.ones(2, 4))
    return model.state_dict(), output


def test_buffers_are_rank_zeros_everywhere(ranks: Any) -> None:
    """DDP broadcasts buffers before a forward, FSDP1 and FSDP2 leave them to drift apart: one rule for all."""
    reference = ranks.run(job_buffers, 2, "ddp")
    assert list(differences(*[list(result) for result in reference])) == []
    for backend in DISTRIBUTED[1:]:
        for result in ranks.run(job_buffers, 2, backend):
            assert list(differences(list(reference[0]), list(result))) == []


def job_part_trains(backend: str) -> tuple[dict[str, Any], Tensor]:
    torch.manual_seed(0)
    model = fsshard.wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), backend=backend, auto_wrap_policy=None)
    model.eval()
    model.module[1].train()  # fine-tuning of a head
    with torch.no_grad():
        model(torch.ones(2, 4) * torch.tensor([[1.0], [3.0]]) * (1 + dist.get_rank()))
    model.eval()
    with torch.no_grad():
        output = model(torch.ones(2, 4))
    return model.state_dict(), output


def test_buffers_are_rank_zeros_where_only_a_part_is_in_training_mode(ranks: Any) -> None:
    reference = ranks.run(job_part_trains, 2, "ddp")
    assert reference[0][0]["1.num_batches_tracked"] == 1
    for backend in DISTRIBUTED:
        for result in ranks.run(job_part_trains, 2, backend):
            assert list(differences(list(reference[0]), list(result))) == []


def job_writes(backend: str) -> int:
    from neuralop.models import FNO

    torch.manual_seed(0)
    model = fsshard.wrap(
        FNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=4, n_layers=2, projection_channel_ratio=2),
        backend=backend,
    )
    model.fno_blocks.n_modes = (4, 4)
    blocks = model.module.fno_blocks
    convs = [getattr(conv, "module", conv) for conv in blocks.convs]
    return convs[0].n_modes[0]


@pytest.mark.parametrize("backend", ALL)
def test_attribute_writes_reach_the_units(ranks: Any, backend: str) -> None:
    """FSDP1 swallows ``fno_blocks.n_modes = ...``: its wrapper takes the write that is meant for the convolution."""
    assert ranks.run(job_writes, ranks_for(backend), backend)[0] == 4


# ------------------------------------------------------------------------------------------------ views of parameters


def job_freeze_views(backend: str, how: str) -> list[str]:
    def train_as(name: str) -> dict[str, Any]:
        model = fsshard.wrap(net(), backend=name)
        optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        if how == "all":
            model.requires_grad_(False)
            return {"trainable": [n for n, p in model.named_parameters() if p.requires_grad]}
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.startswith("middle.0"):
                parameter.requires_grad_(False)
        train(model, optimizer, range(2))
        return model.state_dict()

    reference = train_as("ddp")
    if how == "one":
        assert torch.equal(reference["middle.0.weight"], net().state_dict()["middle.0.weight"])
    return list(differences(reference, train_as(backend)))


@pytest.mark.parametrize("how", ["one", "all"])
@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "fairscale"])
def test_freezing_through_the_views(ranks: Any, backend: str, how: str) -> None:
    assert ranks.run(job_freeze_views, 2, backend, how) == [[], []]


def job_drop_gradients(backend: str) -> list[str]:
    def train_as(name: str, by_hand: bool) -> dict[str, Any]:
        model = fsshard.wrap(net(), backend=name)
        optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
        for step in range(3):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            if by_hand:
                for parameter in model.parameters():
                    parameter.grad = None
            else:
                optimizer.zero_grad()
        return model.state_dict()

    return list(differences(train_as("ddp", by_hand=False), train_as(backend, by_hand=True)))


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_dropping_gradients_through_the_views(ranks: Any, backend: str) -> None:
    assert ranks.run(job_drop_gradients, 2, backend) == [[], []]


def job_torch_clipping(backend: str) -> tuple[float, float]:
    model = fsshard.wrap(net(), backend=backend)
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    model(batch(0)).square().mean().backward()
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm), float(model.clip_grad_norm_(1e9))


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_torchs_own_norm_sees_the_gradients(ranks: Any, backend: str) -> None:
    torchs, ours = ranks.run(job_torch_clipping, 2, backend)[0]
    assert torchs == pytest.approx(ours, rel=1e-6)


def test_flat_shards_refuse_what_they_cannot_show(ranks: Any) -> None:
    """FSDP1: a gradient that reads as None would be skipped in silence."""
    for error in ranks.run_expecting_errors(job_torch_clipping, 2, "fsdp"):
        assert isinstance(error, FsshardError) and "model.clip_grad_norm_" in str(error)


# ------------------------------------------------------------------------------------------------ saving themselves


def job_saves_itself(backend: str, folder: str) -> tuple[str, dict[str, Any]]:
    from tests.zoo import ZOO

    model = fsshard.wrap(ZOO["tfno_tucker"].build(), backend=backend)
    refused = ""
    try:
        model.save_checkpoint(folder, "model")
    except FsshardError as error:
        refused = str(error)
    dist.barrier()
    with model.full_parameters():
        if dist.get_rank() == 0:
            model.save_checkpoint(folder, "model")
    weights = model.state_dict()
    return refused, {name: value for name, value in weights.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
def test_a_model_saves_itself_whole(ranks: Any, backend: str, tmp_path: Any) -> None:
    """neuraloperator's ``save_checkpoint`` writes half the numbers under raw FSDP1, and hangs under raw FSDP2."""
    from neuralop.models import TFNO

    refused, weights = ranks.run(job_saves_itself, 2, backend, str(tmp_path))[0]
    assert "full_parameters" in refused
    read = TFNO.from_checkpoint(tmp_path, "model").state_dict()
    assert list(differences(weights, {k: v for k, v in read.items() if isinstance(v, Tensor)})) == []


def job_buffer_names(backend: str) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()))
    checkpoint_blocks(model, lambda module: module is model[1])
    return [name for name, _ in fsshard.wrap(model, backend=backend).named_buffers()]


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_buffers_keep_their_names_under_checkpointing(ranks: Any, backend: str) -> None:
    names = ["1.0.running_mean", "1.0.running_var", "1.0.num_batches_tracked"]
    assert ranks.run(job_buffer_names, 2, backend) == [names, names]
