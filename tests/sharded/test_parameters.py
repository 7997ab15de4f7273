"""Checks that views of parameters keep no memory alive that an engine has left."""

from __future__ import annotations

import contextlib
import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsshard
from fsshard.errors import FsshardError, UnsupportedByBackend
from fsshard.simulation.tracking import Tracker
from tests.models import batch, net, take_step, with_sgd
from tests.on_ranks import on_backends, on_ranks
from tests.training_runs import DISTRIBUTED, ranks_of


def job_live_bytes(backend: str, looks: bool) -> list[int]:
    """Live bytes once the optimizer is built and their peak on the way; then, of owned parameters, with some frozen."""
    with Tracker() as tracker:
        model = fsshard.wrap(net(), backend=backend, sync_module_states=False)
        seen = list(model.parameters()) if looks else []
        tracker.reset()
        optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        gc.collect()
        found = [tracker.now, tracker.peak]
        if backend == "fairscale":
            for entry in model.backend.all[::2]:
                entry.parameter.requires_grad_(False)
            with torch.no_grad():
                model(batch(0))
            gc.collect()
            found.append(tracker.now)
            for view, parameter in zip(seen, optimizer.param_groups[0]["params"], strict=False):
                assert view.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        return found


@pytest.mark.parametrize("backend", ["none", *DISTRIBUTED])
def test_looking_at_parameters_keeps_no_second_copy(ranks: Any, backend: str) -> None:
    """OSS moves parameters into buffers of its own when it is built, and again when some are frozen."""
    size = ranks_of(backend)
    # Threads (gloo's, autograd's) may still hold their last work, more of it on a busy machine: the least of two runs.
    looked, again, not_looked = (ranks.run(job_live_bytes, size, backend, looks) for looks in (True, True, False))
    for mine, other, expected in zip(looked, again, not_looked, strict=True):
        least = map(min, mine, other)
        assert all(a - b <= 128 for a, b in zip(least, expected, strict=True)), (mine, other, expected)


@on_backends(["none", "ddp", "fairscale", "fsdp2"])
def test_a_view_has_the_gradient_of_now(backend: str) -> None:
    """A list made once (for torch's clipping, say) would else miss complex weights, in silence."""
    model = fsshard.wrap(net(), backend=backend)
    shown = dict(model.named_parameters())
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    model(batch(0)).square().mean().backward()
    entries = model.backend.entries
    weight, entry = shown["middle.0.weight"], entries["middle.0.weight"]
    local = entry.grad()
    found = [(weight.grad is None) == (local is None)]
    if local is not None:
        numbers = getattr(weight.grad, "_local_tensor", weight.grad)
        found.append(torch.equal(torch.view_as_real(numbers).reshape(-1), local.reshape(-1)))
    if backend in ("none", "ddp"):
        found.append(float(torch.nn.utils.clip_grad_norm_(list(shown.values()), 1e-3)) > 0.1)
        found.append(float(model.clip_grad_norm_(1e9)) == pytest.approx(1e-3, rel=1e-3))
    weight.grad = None
    found.append(entry.parameter.grad is None)
    if backend in ("none", "ddp"):  # under fairscale one rank has it
        weight.abs().sum().backward()  # a loss that is computed outside of the forward, as with a bare parameter
        found.append(torch.equal(torch.view_as_complex(entry.parameter.grad), weight.grad))
    copied = copy.deepcopy(shown["middle.1.weight"]) if backend in ("none", "ddp", "fairscale") else nn.Parameter()
    found.append(copied.grad is None and type(copied) is nn.Parameter)
    del optimizer
    assert all(found), found


class Rooted(nn.Module):
    """A unit, and a parameter of the root's own; three rows, which two ranks cannot share evenly."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(3, 6, dtype=dtype))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x) @ self.weight.real.T
        if self.fails:
            raise ArithmeticError("in the middle")
        return x


WRITES: dict[str, Any] = {
    "in place": lambda p: p.mul_(0.5),
    "data": lambda p: p.data.mul_(0.5),
    "assigned": lambda p: setattr(p, "data", p.data),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "init": nn.init.zeros_,
}


READS: dict[str, Any] = {
    "norm": lambda p: float(p.norm()),
    "list": lambda p: p.abs().max().tolist(),
    "foreach": lambda p: torch._foreach_norm([p]),
    "detached": lambda p: float(p.detach().norm()),
    "moved": lambda p: p.cpu(),
    "joined": lambda p: torch.cat([p, p.flatten().reshape(3, 6), torch.ones(3, 6)]),
}


FORM: list[tuple[Any, ...]] = [
    *((name,) for name in ("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "__len__")),
    *((name,) for name in ("storage_offset", "data_ptr", "type", "get_device", "untyped_storage", "is_floating_point")),
    *((name,) for name in ("requires_grad_", "retain_grad", "__hash__", "__repr__", "clone", "detach")),
    *((name,) for name in ("flatten", "t", "squeeze")),
    *(("view", -1), ("reshape", -1), ("transpose", 0, 1), ("permute", 1, 0), ("unsqueeze", 0), ("__getitem__", 0)),
]
"""Methods that tell a parameter's form, and their arguments."""


@on_backends(["fsdp", "fsdp2"])
def test_nothing_is_read_or_written_where_there_are_no_values(backend: str) -> None:
    """torch writes to the meta device without a word, and its kernels there gave memory that nobody had written."""
    dtype = torch.float32 if backend == "fsdp" else torch.complex64
    model = fsshard.wrap(Rooted(dtype), backend=backend, auto_wrap_policy={nn.Linear})
    weight = dict(model.named_parameters())["weight"]
    assert not weight.is_meta and weight.requires_grad and tuple(weight.shape) == (3, 6)
    shapes = [weight.detach().clone().shape, weight.reshape(-1).numel(), torch.zeros_like(weight).shape]
    assert shapes == [(3, 6), 18, (3, 6)] and torch.zeros_like(weight, device="cpu").add_(1).sum() == 18
    for name, *given in FORM:
        getattr(weight, name)(*given)
    taken = []
    for name, use in {**WRITES, **READS}.items():
        for graph in (False, True):
            told = ""
            try:
                with torch.set_grad_enabled(graph):
                    use(weight)
            except FsshardError as error:
                told = str(error)
            if "use model.full_parameters()" not in told or "full_parameters(writeback=True)" not in told:
                taken.append(name)
    assert not taken


@on_backends(DISTRIBUTED)
def test_hooks_are_called_or_refused(backend: str) -> None:
    """A view's gradient is the engine's, and torch would call its hooks never, nor those of FSDP's shards.

    By whose parameters and by kind of hook: how often each is called in two steps, or that it is refused.
    """
    model, optimizer = with_sgd(Rooted(torch.complex64), backend=backend, auto_wrap_policy={nn.Linear})
    calls = dict[tuple[str, str], dict[str, int | str]]()
    for kind in ("register_hook", "register_post_accumulate_grad_hook"):
        for whose, parameters in (("views", model.named_parameters()), ("module", model.module.named_parameters())):
            counts = calls[whose, kind] = {}
            for name, parameter in parameters:

                def count(seen: Any, name: str = name, counts: Any = counts, own: Any = parameter) -> None:
                    counts[name] += seen.dtype == own.dtype and seen.shape == own.shape

                counts[name] = 0
                try:
                    getattr(parameter, kind)(count)
                except UnsupportedByBackend:
                    counts[name] = "refused"
    for _ in range(2):
        model(torch.ones(2, 6)).abs().sum().backward()
        take_step(optimizer)
    found = {key: set(counts.values()) for key, counts in calls.items()}
    of_module = {kind: counts for (whose, kind), counts in found.items() if whose == "module"}
    called = {"ddp", "fairscale"}
    assert of_module["register_hook"] == ({2} if backend in called else {"refused"})
    called |= {"fsdp2"}
    assert of_module["register_post_accumulate_grad_hook"] == ({2} if backend in called else {"refused"})
    assert all(counts <= {2, "refused"} for counts in found.values()), found


def job_after_a_failed_forward(backend: str) -> list[float]:
    """Losses around a forward that raises, after which parameters are written."""
    model = fsshard.wrap(Rooted(), backend=backend, auto_wrap_policy={nn.Linear})
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=1e-3)
    module = model.backend.module
    module = getattr(module, "module", module)
    losses = []

    def step() -> None:
        loss = model(torch.ones(2, 6)).square().sum()
        loss.backward()
        take_step(optimizer)
        losses.append(float(loss.detach()))

    step()
    for write in ("in place", "whole", "loaded"):
        module.fails = True
        with pytest.raises(ArithmeticError):
            model(torch.ones(2, 6))
        module.fails = False
        if write == "loaded":
            model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
        elif write == "whole" or backend == "fsdp":  # there a write in place is refused
            with model.full_parameters(writeback=True) as whole, torch.no_grad():
                for value in whole.values():
                    value.mul_(0.5)
        else:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        step()
    return losses


@on_ranks()
def test_raw_fsdp2_does_not_see_what_is_written_after_a_failed_forward() -> None:
    """It keeps the root gathered, which believes to be in its forward still (torch 2.13)."""
    model = Rooted()
    fully_shard(model.inner)
    fully_shard(model)
    found, shard = list[float](), model.weight
    for fails in (False, True, False):
        model.fails = fails
        with torch.no_grad(), contextlib.suppress(ArithmeticError):
            found.append(float(model(torch.ones(2, 6)).abs().sum()))
        for unit in (model.inner, model):
            unit.reshard()
        if fails:
            shard.detach().to_local().zero_()
    before, after = found
    assert before > 0 and after > 0


def test_what_is_written_after_a_failed_forward_is_seen(ranks: Any) -> None:
    expected = ranks.run(job_after_a_failed_forward, 2, "ddp")
    for backend in DISTRIBUTED[1:]:
        assert ranks.run(job_after_a_failed_forward, 2, backend) == expected, backend


class Hyper(nn.Module):
    """Parameters of every kind, each with the hyper-parameters that it asks for, as S4's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.even, self.odd = (nn.Parameter(torch.randn(n, 4, dtype=torch.complex64)) for n in (4, 3))
        self.scale, self.phase = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(1 + 1j))
        self.conv = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        for number, parameter in enumerate(self.parameters()):
            hyper = parameter
            hyper._optim = {"lr": 0.01 * (number + 1), "weight_decay": 0.1 * (number % 3)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (self.first(x).to(torch.complex64) @ self.even * self.phase).abs() * self.scale
        return self.last(hidden) + self.odd.abs().sum() + self.conv(x.new_ones(1, 2, 3, 3)).sum()  # type: ignore[no-any-return]


def _asked(parameters: Any) -> list[Any]:
    return [getattr(parameter, "_optim", None) for parameter in parameters]


class Asking(torch.optim.SGD):
    """Its rate is what the parameter says."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                with torch.no_grad():
                    if parameter.grad is None:  # a rank may hold nothing of it
                        continue
                    parameter.add_(parameter.grad, alpha=-parameter._optim["lr"])


def _two_steps(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    for step in range(2):
        samples = torch.arange(12.0).view(3, 4) / (
            step + 3
        )  # the same on all ranks, so that means are the bare model's
        model(samples).square().mean().backward()
        take_step(optimizer)
    return model.state_dict()


@on_backends(["none", *DISTRIBUTED])
def test_python_attributes_of_parameters_are_those_of_the_bare_model(backend: str) -> None:
    torch.manual_seed(0)
    bare = Hyper()
    with torch.device("meta"):
        empty = Hyper()
    copied = Hyper()
    copied.load_state_dict(bare.state_dict())
    model = fsshard.wrap(copied, backend=backend, auto_wrap_policy={nn.Linear})
    filled = fsshard.wrap(empty, backend=backend, param_init_fn=lambda _: None, auto_wrap_policy={nn.Linear})
    found = {"asked": _asked(bare.parameters())}
    found |= {"wrapped": _asked(model.parameters()), "module": _asked(model.module.parameters())}
    found |= {"meta": _asked(filled.parameters())}
    with model.full_parameters():
        found |= {"whole": _asked(model.parameters()), "whole module": _asked(model.module.parameters())}
    expected = _two_steps(bare, Asking(bare.parameters(), lr=1.0))
    state = _two_steps(model, fsshard.build_optimizer(model, Asking, lr=1.0, separable=True))
    found["state"] = [name for name, value in expected.items() if not torch.equal(state[name], value)]
    for parameter in model.parameters():
        parameter.later = parameter._optim["lr"]
    found["later"] = [getattr(parameter, "later", None) for parameter in model.module.parameters()]
    asked = found.pop("asked")
    assert found.pop("state") == []
    assert found.pop("later") == [each["lr"] for each in asked]
    assert found == dict.fromkeys(found, asked)
