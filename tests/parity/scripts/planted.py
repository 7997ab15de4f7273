"""Plants changes in a small training, and pairs that are equal: does ``fsshard compare`` find, and name, each of them?

python -m tests.parity.scripts.planted --table docs/data/planted.md    # 1 if a change is called the same
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim

import fsshard
from fsshard.parity.scripts.comparing import ScriptReport, compare_scripts

Hook = Callable[["Training"], Any]
STEPS = 4


def nothing(_: Any) -> None:
    """Change nothing."""


class Net(nn.Module):
    """Two blocks with batch norm, a parameter of its own, and a mask that it may take."""

    def __init__(self, s: Training) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, **s.norm), s.activation()) for _ in range(2))
        self.blocks, self.drop = nn.ModuleList(blocks), nn.Dropout(s.dropout)
        self.head, self.prior = nn.Linear(8, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.head(self.drop(x)) + self.prior
        return x if mask is None else x * mask

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.forward(x), y)


@dataclass
class Training:
    """A training of four steps; a change replaces a field or two."""

    seed: int = 0
    norm: dict[str, Any] = field(default_factory=dict)
    activation: Callable[[], nn.Module] = nn.Tanh
    dropout: float = 0.0
    prepare: Hook = nothing  # the model, before an engine or optimizer has it
    engine: Callable[[nn.Module], nn.Module] = lambda model: model
    groups: Callable[[Any], Any] = lambda s: s.net.parameters()
    optimizer: Callable[..., Any] = optim.AdamW
    settings: dict[str, Any] = field(default_factory=dict)
    rows: Callable[[int], Any] = lambda step: range(8 * step, 8 * step + 8)
    noise: float = 0.0
    parts: int = 1
    compute: Callable[[Any, Tensor, Tensor], Tensor] = lambda s, x, y: F.cross_entropy(s.model(x), y)
    backward: Callable[[Any, Tensor], Any] = lambda s, loss: loss.backward()
    gradients: Hook = nothing  # between backward and step
    step: Hook = lambda s: s.optim.step()
    after: Hook = nothing  # a step, before gradients are dropped
    zero: Hook = lambda s: s.optim.zero_grad()
    steps: int = STEPS

    def run(self) -> None:
        """Train."""
        torch.manual_seed(self.seed)
        self.net = Net(self)
        self.number = -1
        self.prepare(self)
        self.model: Any = self.engine(self.net)
        self.optim = self.optimizer(self.groups(self), **({"lr": 0.05} | self.settings))
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for number in range(self.steps):
            self.number = number
            rows = torch.tensor([*self.rows(self.number * size + rank)])
            x = torch.sin(rows[:, None] * torch.arange(1.0, 9.0)) * (1 + self.noise * torch.arange(1.0, 9.0))
            for part, target in zip(x.chunk(self.parts), (rows % 3).chunk(self.parts), strict=True):
                self.backward(self, self.compute(self, part, target) / self.parts)
            self.gradients(self)
            self.step(self)
            self.after(self)
            self.zero(self)


def at(step: int, hook: Hook) -> Hook:
    """Return a hook that is called at one step."""
    return lambda s: hook(s) if s.number == step else None


def fixed(**settings: Any) -> dict[str, Any]:
    """Return what optimizers other than the usual one are built with."""
    return {"settings": settings}


def using(kind: Any, **settings: Any) -> dict[str, Any]:
    """Return a training by another optimizer."""
    return {"optimizer": kind, **fixed(**settings)}


def group(key: str, *values: Any, order: int = 1) -> dict[str, Any]:
    """Return two groups of weights and of vectors, with a setting each."""

    def groups(s: Any) -> list[dict[str, Any]]:
        named = [[p for p in s.net.parameters() if (p.dim() > 1) == wide] for wide in (True, False)]
        return [{"params": p, key: value} for p, value in zip(named, values, strict=True)][::order]

    return {"groups": groups}


def without(*names: str) -> Callable[[Any], list[Tensor]]:
    """Return what hands all parameters but some to the optimizer."""
    return lambda s: [p for name, p in s.net.named_parameters() if name not in names]


def averaged(decay: float, kind: str = "module") -> dict[str, Any]:
    """Return an average of the weights that the training keeps."""

    def prepare(s: Any) -> None:
        if kind == "module":
            s.average = torch.optim.swa_utils.AveragedModel(s.net, multi_avg_fn=_ema(decay))
        else:
            held = {name: p.detach().clone() for name, p in s.net.named_parameters()}
            s.average = held if kind == "dict" else [*held.values()]

    @torch.no_grad()
    def after(s: Any) -> None:
        if kind == "module":
            return s.average.update_parameters(s.net)
        for one, p in zip(s.average.values() if kind == "dict" else s.average, s.net.parameters(), strict=True):
            one.lerp_(p, 1 - decay)

    return {"prepare": prepare, "after": after}


_ema = torch.optim.swa_utils.get_ema_multi_avg_fn


def scheduled(make: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a training with a scheduler."""

    def after(s: Any) -> None:
        if s.number == 0:
            s.schedule = make(s.optim)
        s.schedule.step()

    return {"after": after}


def clipped(limit: float, function: Any = nn.utils.clip_grad_norm_) -> dict[str, Any]:
    """Return a training with clipped gradients."""
    return {"gradients": lambda s: function(s.net.parameters(), limit)}


def loss(**settings: Any) -> dict[str, Any]:
    """Return a training with another loss."""
    return {"compute": lambda s, x, y: F.cross_entropy(s.model(x), y, **settings)}


def scaled(scale: float) -> dict[str, Any]:
    """Return a training under a GradScaler."""

    def prepare(s: Any) -> None:
        s.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step(s: Any) -> None:
        s.scaler.step(s.optim)
        s.scaler.update()

    return {"prepare": prepare, "step": step, "backward": lambda s, loss: s.scaler.scale(loss).backward()}


def masked(name: str) -> dict[str, Any]:
    """Return a training whose model takes a mask."""
    masks = {"ones": torch.ones(3), "last": torch.tensor([1.0, 1.0, 0.0]), "none": None}
    return {"compute": lambda s, x, y: F.cross_entropy(s.model(x, masks[name]), y)}


class Signed(optim.SGD):
    """A step that calls that of its parent."""

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for one in self.param_groups for p in one["params"] if p.grad is not None):
            parameter.grad.sign_()
        return super().step(closure)


class Plain(optim.AdamW):
    """Does nothing else."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def weights_of(s: Any) -> dict[str, Tensor]:
    """Return weights that a script loads."""
    return {name: value * 1.5 if value.is_floating_point() else value for name, value in s.net.state_dict().items()}


SGD, MOMENTUM = using(optim.SGD), using(optim.SGD, momentum=0.9)
STEPPING = [  # of AdamW: setting, its value, the new one
    ("lr", 0.05, 0.05 * 1.00001), ("lr", 0.05, 0.1), ("betas", (0.9, 0.999), (0.9, 0.99)), ("eps", 1e-8, 1.1e-8),
    ("betas", (0.9, 0.999), (0.8, 0.999)), ("weight_decay", 0.1, 0.1001), ("weight_decay", 0.0, 0.1),
    ("amsgrad", False, True), ("maximize", False, True),
]  # fmt: skip
ROWS: dict[str, tuple[str, Any]] = {
    "another seed of the sampler": ("was given", lambda k: range(8 * k + 1, 8 * k + 9)),
    "samples in another order": ("same samples in another order", lambda k: range(8 * k + 7, 8 * k - 1, -1)),
    "smaller batches": ("was given|were given 4 samples", lambda k: range(8 * k, 8 * k + 4)),
    "batches in another order": ("was given", lambda k: range(24 - 8 * k, 32 - 8 * k)),
    "the first batch again and again": ("step 1: rank 0 was given", lambda k: range(8)),
    "drop_last=False": ("step 3: the ranks were given", lambda k: range(8 * k, min(8 * k + 8, 27))),
}
Change = tuple[str, str, dict[str, Any], dict[str, Any]]
CHANGES: list[Change] = [
    *((f"{key} {old} -> {new}", f"{key} of group 0", fixed(**{key: old}), fixed(**{key: new}))
      for key, old, new in STEPPING),
    *((f"{kind.__name__} -> {other.__name__}", f"optimizer of group 0 {kind.__name__} -> {other.__name__}",
       using(kind), using(other)) for kind, other in (
        (optim.RMSprop, optim.Adagrad), (optim.Adam, optim.AdamW), (optim.SGD, optim.Adam), (optim.SGD, Signed),
        (optim.Adam, optim.NAdam), (optim.Adamax, optim.Adam), (optim.AdamW, optim.RAdam), (optim.SGD, optim.Rprop))),
    *((f"SGD with {key} {old} -> {new}", f"{key} of group 0", using(optim.SGD, **(rest | {key: old})),
       using(optim.SGD, **(rest | {key: new}))) for key, old, new, rest in (
        ("momentum", 0.9, 0.8, {}), ("nesterov", False, True, {"momentum": 0.9}), ("momentum", 0.0, 0.9, {}),
        ("dampening", 0.0, 0.1, {"momentum": 0.9}), ("weight_decay", 0.0, 1e-3, {}))),
    *((f"lr of the {('weights', 'vectors')[k]} halved", f"lr of group {k} 0.05", group("lr", 0.05, 0.05),
       group("lr", *((0.025, 0.05), (0.05, 0.025))[k])) for k in range(2)),
    ("no weight decay of vectors", "weight_decay of", group("weight_decay", 0.1, 0.1), group("weight_decay", 0.1, 0.0)),
    ("settings of two groups swapped", "weight_decay of", group("weight_decay", 0.1, 0.0),
     group("weight_decay", 0.0, 0.1)),
    *((f"{name} is in no group", f"{name} is in no group", {}, {"groups": without(name)})
      for name in ("prior", "head.bias", "blocks.0.0.weight", "blocks.1.1.bias")),
    *((f"{name} is left out and decays no longer", f"{name} is in no group", fixed(weight_decay=0.5),
       {"groups": without(name), **fixed(weight_decay=0.5)}) for name in ("head.weight", "blocks.0.1.weight")),
    *((what, f"{name} is frozen in the new script", {}, {"prepare": lambda s, n=name: freeze(s, n)})
      for what, name in (("a frozen bias", "head.bias"), ("a frozen prior", "prior"))),
    ("a frozen layer with clipping", "head.bias, head.weight are frozen", clipped(0.01),
     {**clipped(0.01), "prepare": lambda s: s.net.head.requires_grad_(False)}),
    *((f"a layer is frozen from step {k} on", f"step {k}: head.bias, head.weight are frozen", {},
       {"after": at(k - 1, lambda s: s.net.head.requires_grad_(False))}) for k in (1, 2, 3)),
    ("a layer is no longer frozen from step 2 on", "step 2: head.bias, head.weight are frozen in the old script",
     {"prepare": lambda s: s.net.head.requires_grad_(False)},
     {"prepare": lambda s: s.net.head.requires_grad_(False),
      "after": at(1, lambda s: s.net.head.requires_grad_(True))}),
    *((f"the state is lost after step {k}", f"step {k + 1}: the new script has lost", MOMENTUM,
       {**MOMENTUM, "after": at(k, lambda s: s.optim.state.clear())}) for k in (0, 1, 2)),
    ("the state of one parameter is lost", "lost the optimizer's state of prior", {},
     {"after": at(1, lambda s: s.optim.state.pop(s.net.prior))}),
    ("another optimizer object from step 2 on", "step 2: the new script has lost", {},
     {"after": at(1, lambda s: setattr(s, "optim", optim.AdamW(s.net.parameters(), lr=0.05)))}),
    *((f"lr is {word} at step {k}", f"step {k}: lr of group 0", {},
       {"after": at(k - 1, lambda s, f=f: s.optim.param_groups[0].update(lr=0.05 * f))})
      for word, f in (("halved", 0.5), ("1.0001 times as large", 1.0001)) for k in (1, 3)),
    *((f"{what}", "lr of group 0", {}, scheduled(make)) for what, make in (
        ("StepLR", lambda o: optim.lr_scheduler.StepLR(o, 2)),
        ("ExponentialLR", lambda o: optim.lr_scheduler.ExponentialLR(o, 0.99)),
        ("CosineAnnealingLR", lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 10)))),
    ("another period of a schedule", "step 2: lr of group 0", scheduled(lambda o: optim.lr_scheduler.StepLR(o, 1)),
     scheduled(lambda o: optim.lr_scheduler.MultiStepLR(o, [1]))),
    ("a schedule of betas", "betas of group 0", {},
     {"after": at(1, lambda s: s.optim.param_groups[0].update(betas=(0.8, 0.99)))}),
    *((what, cause, {}, {"rows": rows}) for what, (cause, rows) in ROWS.items()),
    ("noise on samples", "was given other samples", {}, {"noise": 1e-3}),
    *((f"dropout {old} -> {new}", "layers: Dropout(p", {"dropout": old}, {"dropout": new})
      for old, new in ((0.0, 0.1), (0.1, 0.2), (0.5, 0.0))),
    ("another seed", "another seed?", {}, {"seed": 1}),
    ("another seed with dropout", "another seed?", {"dropout": 0.1}, {"dropout": 0.1, "seed": 1}),
    *((f"Tanh -> {kind.__name__}", "layers: Tanh() 2 -> 0", {}, {"activation": kind})
      for kind in (nn.ReLU, nn.GELU, nn.Sigmoid, nn.Identity)),
    ("ReLU -> ReLU6 of the same values", "layers: ReLU() 2 -> 0, ReLU6() 0 -> 2", {"activation": nn.ReLU},
     {"activation": nn.ReLU6}),
    *((f"batch norm with {key} {old} -> {new}", "layers: BatchNorm1d", {"norm": {key: old}}, {"norm": {key: new}})
      for key, old, new in (("track_running_stats", True, False), ("momentum", 0.1, 0.2), ("eps", 1e-5, 1e-3))),
    ("a layer of another number of parameters", "parameters of the old script alone", {}, {"norm": {"affine": False}}),
    *((f"{what} in evaluation mode", f"mode of {path}", {}, {"prepare": lambda s, p=path: module(s, p).eval()})
      for what, path in (("one block", "blocks.1"), ("one activation", "blocks.0.2"), ("dropout of 0", "drop"))),
    ("the model in evaluation mode", "evaluation", {}, {"prepare": lambda s: s.net.eval()}),
    ("evaluation mode from step 2 on", "step 2: models put out float32 -> float32, in evaluation mode", {},
     {"after": at(1, lambda s: s.net.eval())}),
    ("one layer in bf16", "dtype of the output of head", {}, {"prepare": lambda s: lower(s)}),
    ("the model in float64", "other dtypes: float32 -> float64", {}, {"prepare": lambda s: s.net.double(),
     "compute": lambda s, x, y: F.cross_entropy(s.model(x.double()), y)}),
    ("autocast", "autocast to torch.bfloat16", {}, {"compute": lambda s, x, y: lowered(s, x, y)}),
    *((f"loss with {key}", "loss", {}, loss(**{key: value})) for key, value in (
        ("label_smoothing", 0.1), ("weight", torch.tensor([1.0, 2.0, 1.0])), ("ignore_index", 1))),
    *((f"a sum in place of a mean, {parts} parts", "all gradients are 8 times as large: a sum in place of a mean" if
       parts == 1 else "all gradients are 4 times as large", {**SGD, "parts": parts},
       {**SGD, "parts": parts, **loss(reduction="sum")}) for parts in (1, 2)),
    ("a scaled loss", "all gradients are 2 times as large", SGD,
     {**SGD, "backward": lambda s, loss: (2 * loss).backward()}),
    ("a constant in the loss alone", "loss", {}, {"compute": lambda s, x, y: F.cross_entropy(s.model(x), y) + 1e-3}),
    ("a penalty without a gradient", "loss", {}, {"compute": lambda s, x, y: penalty(s, x, y)}),
    ("gradients accumulated over 2 parts", "backward passes 1 -> 2", {}, {"parts": 2}),
    ("gradients accumulated over 4 parts, not 2", "backward passes 2 -> 4", {"parts": 2}, {"parts": 4}),
    ("gradients are not dropped", "gradients have another norm", {}, {"zero": nothing}),
    ("gradients of one step are not dropped", "step 2", {}, {"zero": lambda s: s.number == 1 or s.optim.zero_grad()}),
    *((f"clipped to {old} -> {new}", f"clipped to a norm of {old} -> {new}", clipped(old), clipped(new))
      for old, new in ((0.01, 0.02), (0.01, 0.0101), (0.05, 0.1))),
    ("clipping left out", "clipped to a norm of 0.01 -> nothing", clipped(0.01), {}),
    ("clipped by value", "gradients", {}, clipped(0.01, nn.utils.clip_grad_value_)),
    ("no gradient of one parameter", "gradients in the old script alone: prior", {},
     {"gradients": lambda s: setattr(s.net.prior, "grad", None)}),
    ("a gradient of zeros", "gradients", {}, {"gradients": lambda s: s.net.head.weight.grad.zero_()}),
    ("noise on gradients", "gradients have another norm", {},
     {"gradients": lambda s: s.net.head.weight.grad.add_(0.1)}),
    ("weights clamped", "", {}, {"after": lambda s: clamp(s)}),
    ("one weight set to zero after step 1", "", {}, {"after": at(1, lambda s: s.net.prior.data.zero_())}),
    ("two steps per batch", "number of optimizer steps 1 -> 2", {}, {"after": lambda s: s.optim.step()}),
    ("a step fewer", "4 steps (0 to 3), new 3 steps (0 to 2)", {}, {"steps": 3}),
    ("a step more", "new 5 steps (0 to 4)", {}, {"steps": 5}),
    ("a step left out", "step 2: backward passes 1 -> 2", {}, {"step": lambda s: s.number == 2 or s.optim.step()}),
    *((f"an average in a {kind} with another decay", "", averaged(0.9, kind), averaged(0.8, kind))
      for kind in ("module", "dict", "list")),
    ("an average that one side lacks", "an average, or another copy", averaged(0.9), {}),
    ("another average that one side lacks", "an average, or another copy", {}, averaged(0.9, "dict")),
    ("a padding mask", "another argument 1; the other arguments are equal", masked("ones"), masked("last")),
    ("a mask that one side lacks", "an argument 1 more", masked("none"), masked("last")),
    ("a buffer that one side lacks", "buffers of the new script alone: extra", {},
     {"prepare": lambda s: s.net.register_buffer("extra", torch.ones(2))}),
    ("a layer that is never called", "layers: Dropout", {}, {"prepare": lambda s: s.net.add_module("e", nn.Dropout())}),
    ("statistics reset after step 1", "", {}, {"after": at(1, lambda s: s.net.blocks[0][1].reset_running_stats())}),
    ("a bare tensor with another rate", "lr of group 1 0.1 -> 0.5", *(
        {"groups": lambda s, r=rate: [{"params": s.net.parameters()}, {"params": [bare(s)], "lr": r}],
         "compute": lambda s, x, y: F.cross_entropy(s.model(x), y) + (s.bare - 1).square().sum()}
        for rate in (0.1, 0.5))),
    ("a prior that is frozen, below a method that is called", "prior is frozen", {
        "compute": lambda s, x, y: s.net.loss(x, y)}, {"compute": lambda s, x, y: s.net.loss(x, y),
        "prepare": lambda s: freeze(s, "prior")}),
]  # fmt: skip
EQUAL: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("nothing", {}, {}),
    *((f"nothing, by {kind.__name__}", using(kind), using(kind)) for kind in (optim.SGD, optim.RMSprop, optim.Adagrad)),
    ("model.loss(x)", {}, {"compute": lambda s, x, y: s.net.loss(x, y)}),
    ("model.forward(x)", {}, {"compute": lambda s, x, y: F.cross_entropy(s.net.forward(x), y)}),
    ("a keyword", masked("none"), {"compute": lambda s, x, y: F.cross_entropy(s.model(x=x, mask=None), y)}),
    ("foreach", fixed(foreach=False), fixed(foreach=True)),
    ("set_to_none=False", {}, {"zero": lambda s: s.optim.zero_grad(set_to_none=False)}),
    ("model.zero_grad()", {}, {"zero": lambda s: s.net.zero_grad()}),
    ("gradients dropped before backward", {"zero": nothing, "compute": lambda s, x, y: dropped(s, x, y)}, {}),
    *((f"a scale of {scale:g}", {}, scaled(scale)) for scale in (2.0, 65536.0)),
    ("two scales", scaled(4.0), scaled(1024.0)),
    ("two groups with the settings of one", {}, group("lr", 0.05, 0.05)),
    ("groups in another order", group("weight_decay", 0.1, 0.0), group("weight_decay", 0.1, 0.0, order=-1)),
    ("frozen in no group", {"prepare": lambda s: freeze(s, "prior")},
     {"prepare": lambda s: freeze(s, "prior"), "groups": without("prior")}),
    ("a schedule by hand", scheduled(lambda o: optim.lr_scheduler.ExponentialLR(o, 0.5)),
     {"after": lambda s: s.optim.param_groups[0].update(lr=s.optim.param_groups[0]["lr"] * 0.5)}),
    ("a schedule that stays", {}, scheduled(lambda o: optim.lr_scheduler.ConstantLR(o, 1.0))),
    ("a step that calls its parent's", using(Plain), using(Plain)),
    *((f"an average in a {kind}", averaged(0.9, kind), averaged(0.9, kind)) for kind in ("module", "dict", "list")),
    ("a snapshot of the weights", {}, {"prepare": lambda s: setattr(s, "copy", copy.deepcopy(s.net))}),
    ("another snapshot", {}, {"prepare": lambda s: snapshot(s)}),
    ("a loss in a module", {}, {"compute": lambda s, x, y: nn.CrossEntropyLoss()(s.model(x), y)}),
    ("torch.compile", {}, {"engine": lambda model: torch.compile(model, backend="eager")}),
    ("DataParallel's wrapper", {}, {"engine": lambda model: Wrapper(model)}),
    ("a forward before weights are loaded", {"prepare": lambda s: s.net.load_state_dict(weights_of(s))},
     {"prepare": lambda s: dry(s, load=True)}),
    ("a forward before training", {}, {"prepare": lambda s: dry(s)}),
    ("FLOPs on the meta device", {}, {"prepare": lambda s: count(s, "meta")}),
    ("FLOPs under FakeTensorMode", {}, {"prepare": lambda s: count(s, "fake")}),
    ("another model is tried before", {}, {"prepare": lambda s: count(s, "cpu")}),
    ("a validation after each step", {}, {"after": lambda s: validate(s)}),
    ("random numbers for something else", {}, {"after": lambda s: torch.rand(3)}),
    ("clipping that changes nothing", {}, clipped(1e9)),
    ("a loss in two backward passes", {"backward": lambda s, loss: halves(loss)},
     {"backward": lambda s, loss: halves(loss)}),
    ("torch.autograd.backward", {}, {"backward": lambda s, loss: torch.autograd.backward([loss])}),
    ("a closure", {}, {"step": lambda s: s.optim.step(lambda: None)}),
    ("a mask of ones as a bool", masked("ones"), masked("ones")),
    ("a detached metric", {}, {"after": lambda s: s.net.prior.detach().norm().item()}),
    ("parameters by name", {}, {"groups": lambda s: s.net.named_parameters()}),
    ("modules printed", {}, {"prepare": lambda s: repr(s.net)}),
]  # fmt: skip


class Wrapper(nn.Module):
    """Stands for an engine's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.module(*arguments, **keywords)


def freeze(s: Any, name: str) -> None:
    dict(s.net.named_parameters())[name].requires_grad_(False)


def module(s: Any, path: str) -> nn.Module:
    return s.net.get_submodule(path)  # type: ignore[no-any-return]


def lower(s: Any) -> None:
    s.net.head.register_forward_pre_hook(lambda one, given: (given[0].bfloat16(),))
    s.net.head.bfloat16()


def lowered(s: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(s.model(x), y)


def penalty(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(s.model(x), y) + s.net.prior.detach().square().sum()


@torch.no_grad()
def clamp(s: Any) -> None:
    for parameter in s.net.parameters():
        parameter.clamp_(-0.3, 0.3)


def bare(s: Any) -> Tensor:
    s.bare = torch.zeros(2, requires_grad=True)
    return s.bare  # type: ignore[no-any-return]


def dropped(s: Any, x: Tensor, y: Tensor) -> Tensor:
    s.optim.zero_grad()
    return F.cross_entropy(s.model(x), y)


def dry(s: Any, load: bool = False) -> None:
    state = weights_of(s) if load else None
    s.net.eval()(torch.zeros(2, 8))
    s.net.train()
    if state:
        s.net.load_state_dict(state)


def count(s: Any, device: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.random.fork_rng(), FakeTensorMode() if device == "fake" else contextlib.nullcontext():
        with torch.device("cpu" if device == "fake" else device):
            Net(s)(torch.zeros(2, 8)).sum().backward()


def validate(s: Any) -> None:
    s.net.eval()
    with torch.no_grad():
        s.net(torch.zeros(2, 8))
    s.net.train()


def snapshot(s: Any) -> None:
    s.snapshot = [parameter.detach().clone() for parameter in s.net.parameters()]


def halves(loss: Tensor) -> None:
    (loss / 2).backward(retain_graph=True)
    (loss / 2).backward()


def compared(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> ScriptReport:
    """Train twice, recorded, and compare."""
    for name, change in (("old", old), ("new", new)):
        with fsshard.trace(folder / name):
            dataclasses.replace(Training(), **change).run()
    return compare_scripts(folder / "old", folder / "new")


def row(what: str, cause: str, found: ScriptReport) -> tuple[str, bool]:
    """Return a line of the table, and whether the cause is named."""
    said = [one for one in [*found.causes, found.sentence] if any(part in one for part in cause.split("|"))]
    parting = found.report.cells[0].first_divergence
    where = f"step {parting.step}, {parting.quantity}" if parting else "equal weights"
    told = (found.causes or [found.sentence.partition(": ")[2]])[0]
    return f"| {what} | {_short(where)} | {_short(told)} |", bool(said)


def _short(cell: str) -> str:
    """Return at most 24 words: on a phone a longer cell is a column of single words."""
    words = cell.split()
    return cell if len(words) <= 25 else f"{' '.join(words[:24])} …"


def main() -> int:
    """Write the table; 1 if a change is called the same, or an equal pair different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines, wrong, unnamed = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, (what, cause, old, new) in enumerate(CHANGES):
            found = compared(Path(folder, f"change{number}"), old, new)
            line, named = row(what, cause, found)
            lines.append(line)
            wrong += [what] if found.ok else []
            unnamed += [] if named else [f"{what}: {found}"]
        for number, (what, old, new) in enumerate(EQUAL):
            found = compared(Path(folder, f"equal{number}"), old, new)
            wrong += [] if found.ok else [f"{what}: {found}"]
    named = len(CHANGES) - len(unnamed)
    said = (
        f"{len(CHANGES)} changes, {named} with their cause named; {len(EQUAL)} equal pairs; {len(wrong)} wrong answers."
    )
    print(said, *unnamed, *wrong, sep="\n")
    if given.table:
        pairs = ", ".join(what for what, *_ in EQUAL)
        table = "\n".join(["| change | found at | named first |", "|---|---|---|", *lines])
        given.table.write_text(f"{HEAD}\n{said}\n\n{table}\n\nEqual pairs: {pairs}.\n", "utf-8")
    return bool(wrong)


HEAD = """# Changes that `fsshard compare` finds

Written by `make planted`: each change is planted in a small training on one process, recorded and compared.
"""

if __name__ == "__main__":
    sys.exit(main())
