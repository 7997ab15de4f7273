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
from fsshard.errors import FsshardError, ModelError, OptimizerError
from tests.dropped import PASSES, Known, run_pass
from tests.models import Net, batch, net, take_step, with_adam, with_sgd
from tests.on_ranks import on_backends, on_ranks
from tests.parity.bare import average
from tests.sharded.training import ALL, train, trained
from tests.training_runs import DISTRIBUTED, check_equal, differences, lost_by_saving, ranks_of

# ------------------------------------------------------------------------------------------------ what it is


@on_backends(ALL)
def test_attributes_and_names_are_the_users_and_copying_says_what_to_do(backend: str) -> None:
    reference = net()
    model = fsshard.wrap(net(), backend=backend)
    model.last.out_features = 7  # reaches the user's module
    model.custom, model.module.moves = 3, 4
    assert isinstance(model.module, Net) and type(model.module.first).__name__ == "Linear"
    assert model.first.in_features == 4 and model.module.last.out_features == 7 and model.custom + model.moves == 7
    assert model.backend.name == backend and not hasattr(model, "nonsense")
    assert [unit.name for unit in model.plan.units] == ["", "middle.0", "middle.1"]
    want, got = ([(n, p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()] for m in (reference, model))
    assert want == got and [n for n, _ in model.named_buffers()] == ["steps"]
    messages = [model.explain().splitlines()[0]]
    acts = [lambda: copy.deepcopy(model), lambda: pickle.dumps(model), lambda: model.to(torch.float64)]
    for act in acts:
        with pytest.raises(FsshardError) as error:
            act()
        messages.append(str(error.value))
    assert model.to("cpu") is model
    head, copied, pickled, cast = messages
    whose = " (FairScale 0.4.13, patched)" if backend == "fairscale" else ""
    assert head.startswith(f"backend {backend!r}{whose} on {ranks_of(backend)} rank")
    assert "state_dict()" in copied and "state_dict()" in pickled
    assert "before fsshard.wrap" in cast


# ------------------------------------------------------------------------------------------------ full parameters


@on_backends(ALL)
def test_full_parameters(backend: str) -> None:
    model, optimizer = trained(backend)
    want = model.state_dict()
    with model.full_parameters() as whole:
        check_equal(dict(whole), {k: v for k, v in want.items() if k != "steps"})
        assert torch.equal(model.module.middle[0].weight, want["middle.0.weight"])
        shapes = [[(n, tuple(p.shape), p.dtype) for n, p in each.named_parameters()] for each in (model, net())]
        assert shapes[0] == shapes[1]
        with pytest.raises(FsshardError):
            model(batch(0))
    with model.full_parameters(writeback=True) as whole, torch.no_grad():
        whole["middle.0.weight"].mul_(2)
        whole["last.bias"].fill_(5)
    after = model.state_dict()
    assert torch.equal(after["middle.0.weight"], 2 * want["middle.0.weight"]) and float(after["last.bias"]) == 5.0
    assert all(loss == loss for loss in train(model, optimizer, range(2, 4)))


# ------------------------------------------------------------------------------------------------ accumulation


@pytest.mark.parametrize("backend", ALL)
@on_ranks(ranks_of)
def test_ddps_attribute_is_no_sync(backend: str) -> None:
    """nanoGPT's loop, beside bare replicas that are averaged after the last micro-batch."""

    def steps(model: Any, optimizer: Any, averaged: Any) -> None:
        for step in range(2):
            for micro in range(3):
                model.require_backward_grad_sync = micro == 2
                model(batch(3 * step + micro)).square().mean().backward()
            averaged()
            take_step(optimizer)

    bare = net()
    steps(bare, torch.optim.Adam(bare.parameters(), lr=0.01), lambda: dist.get_world_size() > 1 and average(bare))
    model, optimizer = with_adam(net(), backend=backend)
    steps(model, optimizer, lambda: None)
    found = list(differences(dict(bare.state_dict()), dict(model.state_dict())))
    found += lost_by_saving(model, optimizer, net, torch.optim.Adam, lr=0.01)
    model.require_backward_grad_sync = False
    model(batch(0)).square().mean().backward()
    with pytest.raises(OptimizerError, match="the gradients are local"):
        optimizer.step()
    assert not found and not model.require_backward_grad_sync


@on_backends(ALL)
def test_the_attribute_may_change_in_no_sync_and_all_freeze_in_full_parameters(backend: str) -> None:
    model = fsshard.wrap(net(), backend=backend)
    with model.no_sync():
        model.require_backward_grad_sync = False
    model.require_backward_grad_sync = True
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    train(model, optimizer, range(2))
    with model.full_parameters():
        model.requires_grad_(False)
    silenced = model._fsshard.step.is_silent
    flags = [parameter.requires_grad for parameter in model.parameters()]
    assert not silenced and not any(flags)


@pytest.mark.parametrize("backend", ALL)
@on_ranks(ranks_of)
def test_attribute_writes_reach_the_units(backend: str) -> None:
    """FSDP1 swallows ``fno_blocks.n_modes = ...``: its wrapper takes the write that is meant for the convolution."""
    from neuralop.models import FNO

    torch.manual_seed(0)
    model = fsshard.wrap(
        FNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=4, n_layers=2, projection_channel_ratio=2),
        backend=backend,
    )
    model.fno_blocks.n_modes = (4, 4)
    blocks = model.module.fno_blocks
    convs = [getattr(conv, "module", conv) for conv in blocks.convs]
    assert convs[0].n_modes[0] == 4


# ------------------------------------------------------------------------------------------------ dropped gradients


@on_backends(ALL)
def test_a_gradient_that_is_dropped_by_hand_moves_nothing(backend: str, tmp_path: Any) -> None:
    """A last layer that is not trained in the first step, as in SwAV and DINO; beside replicas averaged by hand."""
    replica = net()
    bare = torch.optim.AdamW(replica.parameters(), lr=0.01, weight_decay=0.1)
    model = fsshard.wrap(net(), backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    for step in range(3):
        for each_model in (replica, model):
            each_model(batch(step)).square().mean().backward()
            if each_model is replica and dist.get_world_size() > 1:
                average(replica)
            for name, parameter in each_model.named_parameters():
                if step == 0 and (name.startswith("last") or parameter.is_complex()):
                    parameter.grad = None
        for each in (bare, optimizer):
            take_step(each)
    fsshard.save(tmp_path / "saved", model, optimizer)
    fsshard.load(tmp_path / "saved", model, optimizer)
    state = optimizer.state_dict()["state"]
    expected = {name: bare.state[parameter] for name, parameter in replica.named_parameters()}
    check_equal([replica.state_dict(), expected], [model.state_dict(), state])


# ------------------------------------------------------------------------------------------------ saving themselves


@on_backends(["fsdp", "fsdp2"])
def test_a_model_saves_itself_whole(backend: str, tmp_path: Any) -> None:
    """neuraloperator's ``save_checkpoint`` writes half the numbers under raw FSDP1, and hangs under raw FSDP2."""
    from neuralop.models import TFNO

    from tests.zoo import ZOO

    model = fsshard.wrap(ZOO["tfno_tucker"].build(), backend=backend)
    with pytest.raises(FsshardError, match="full_parameters"):
        model.save_checkpoint(tmp_path, "model")
    dist.barrier()
    with model.full_parameters():
        if dist.get_rank() == 0:
            model.save_checkpoint(tmp_path, "model")
    dist.barrier()
    states = model.state_dict(), TFNO.from_checkpoint(tmp_path, "model").state_dict()
    check_equal(*({k: v for k, v in state.items() if isinstance(v, Tensor)} for state in states))


# ------------------------------------------------------------------------------------------------ its end


@pytest.mark.covering
@pytest.mark.parametrize("kind", PASSES)
@on_backends(DISTRIBUTED)
def test_a_dropped_model_is_freed(backend: str, kind: str) -> None:
    """With its shards, whatever it was in the middle of."""
    model, optimizer = with_sgd(net(), backend=backend)
    known = Known(engine=model.backend.engine, **{entry.name: entry.parameter for entry in model.backend.all})
    run_pass(model, kind)
    dist.barrier()  # who lets go first breaks the pass of a rank that is behind: each is to break by itself
    del model, optimizer
    wrong = known.left()
    assert not wrong


# ------------------------------------------------------------------------------------------------ containers


class Named(nn.ModuleDict):
    """A container that is called; FSDP2 takes no others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self["a"](x)  # type: ignore[no-any-return]


@on_backends([*DISTRIBUTED, "none"])
def test_a_container_is_one_when_wrapped(backend: str) -> None:
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]
    model = fsshard.wrap(nn.Sequential(*layers), backend=backend)
    found = [isinstance(model, fsshard.ShardedModule), isinstance(model.module, nn.Sequential)]
    found += [len(model) == 3, len(list(model)) == 3, model[1] is layers[1], model[-1] is model.module[-1], bool(model)]
    found += [len(model[:2]) == 2, layers[1] in model, nn.Tanh() not in model, type(model).__name__ == "ShardedModule"]
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    found.append(model(torch.ones(1, 4)).shape == (1, 2))
    model[1] = nn.ReLU()
    found.append(model(torch.ones(1, 4)).shape == (1, 2))
    model.append(nn.Linear(2, 2))
    with pytest.raises(ModelError, match=r"added: 3\.weight"):
        model.state_dict()  # which always looks, and forwards at times
    plain = fsshard.wrap(net(), backend=backend)
    found += [bool(plain), not hasattr(type(plain), "__len__"), type(plain) is fsshard.ShardedModule]
    for use in (lambda: plain[0], lambda: len(plain), lambda: iter(plain)):
        with pytest.raises(TypeError):
            use()
    named = fsshard.wrap(Named({"a": nn.Linear(2, 2)}), backend=backend)
    assert all([*found, "a" in named, list(named) == ["a"], named["a"] is named.module["a"]]), found


# ------------------------------------------------------------------------------------------------ modes


class Merging(nn.Linear):
    """A layer as of loralib: eval() merges the adapter into the weight, train() takes it out."""

    def __init__(self) -> None:
        super().__init__(4, 6)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(6, 2))
        self.merged = False
        self.weight.requires_grad_(False)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode == self.merged:
            change = self.up @ self.down
            self.weight.data += -change if mode else change
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        plain = nn.functional.linear(x, self.weight, self.bias)
        return plain if self.merged else plain + x @ self.down.T @ self.up.T


@on_backends(DISTRIBUTED)
def test_layers_that_merge_weights_in_eval(backend: str) -> None:
    torch.manual_seed(0)
    model = fsshard.wrap(nn.Sequential(Merging(), nn.Tanh(), nn.Linear(6, 2)), backend=backend)
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    before = model(torch.ones(2, 4)).detach()
    text = ""
    try:
        model.eval()
    except ModelError as error:
        text = str(error)
        model.module[0].merged = False
        nn.Module.train(model.module[0], True)
        with model.full_parameters(writeback=True):
            model.eval()
    apart = float((model(torch.ones(2, 4)).detach() - before).abs().max())
    assert apart < 1e-5
    assert ("write: with model.full_parameters(writeback=True): model.eval()" in text) == (backend == "fsdp")
