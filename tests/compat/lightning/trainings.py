"""Trainings by Lightning's Trainer, over its own DDP and over ours. What each rank runs."""

from __future__ import annotations

import contextlib
import copy
import fractions
import functools
import io
import logging
import pickle
import warnings
from collections import Counter
from typing import Any
from unittest.mock import patch

import lightning
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader, Subset, TensorDataset

import fsshard
from fsshard.compat.lightning import FabricStrategy, Strategy
from fsshard.compat.lightning import after_fit as coming_back
from fsshard.compat.lightning.plugins import Launched, WholeLauncher
from fsshard.model.checks import is_managed
from fsshard.parallel import shard_domain
from tests.compat.common import refusals
from tests.compat.common import told as told_by


class Module(lightning.LightningModule):
    """A complex weight, a BatchNorm, a schedule, validations in between; remembers all losses."""

    def __init__(self, complex_weight: bool = True) -> None:
        super().__init__()
        dtype = torch.complex64 if complex_weight else torch.float32
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.weight = nn.Parameter(torch.randn(8, 4, dtype=dtype))
        self.losses: list[float] = []
        self.validations: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        found = self.norm(self.first(x)).to(self.weight.dtype) @ self.weight
        return found.abs().sum(1)

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.validations.append(loss.item())
        self.log("validation", loss, sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Adversaries(lightning.LightningModule):
    """A generator with a complex weight and a discriminator, which take their steps themselves."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.automatic_optimization, self.wrong = False, wrong
        self.generator, self.discriminator = nn.Linear(6, 4), nn.Linear(4, 1)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float32 if wrong == "scaled" else torch.complex64))
        self.losses: list[float] = []
        self.calls = 0
        self.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def forward(self, which: str, x: Tensor) -> Tensor:
        if which == "discriminator":
            return self.discriminator(x)
        return (self.generator(x).to(self.weight.dtype) @ self.weight).abs()

    def training_step(self, batch: Any, number: int) -> None:
        first, second = self.optimizers()
        toggles = self.wrong in ("toggle", "steps")
        if toggles:
            self.toggle_optimizer(first)
        if self.wrong == "nosync":
            with first.toggle_model(sync_grad=False):
                pass
        made = self.generator(batch[0]) if self.wrong == "past" else self("generator", batch[0])
        loss = nn.functional.softplus(-self("discriminator", made)).mean()
        if self.wrong == "own":
            loss = loss + self.generator.bias.square().sum()
        if not toggles:
            first.zero_grad()
        self.manual_backward(loss)
        if self.wrong == "clip":
            self.clip_gradients(first, 1.0, "norm")
        if self.wrong == "clipped":
            own = [parameter for group in first.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(own, 0.1)
        if self.wrong == "steps":
            second.step()
        first.step()
        if toggles:  # what the discriminator would have got of this loss is not to be there
            first.zero_grad()
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
        real, fake = batch[0][:, :4], made.detach()
        judged = self("discriminator", torch.cat([real, fake]))
        other = nn.functional.softplus(judged[len(real) :]).mean() + nn.functional.softplus(-judged[: len(real)]).mean()
        if not toggles:
            second.zero_grad()
        self.manual_backward(other)
        second.step()
        if toggles:
            second.zero_grad()
            self.untoggle_optimizer(second)
        self.losses += [loss.item(), other.item()]

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam([*self.generator.parameters(), self.weight], lr=1e-2)
        return first, torch.optim.Adam(self.discriminator.parameters(), lr=1e-2)


def adversaries(engine: str) -> dict[str, Any]:
    """Case -> losses, weights and calls of the forward, or what is said: of calls past the engine, and the like."""
    found = {}
    cases = {case: {} for case in ("", "toggle", "scaled", "clipped", "own")}
    if engine != "lightning":
        cases |= {case: {} for case in ("past", "clip", "steps", "nosync")}
    if engine in ("fsdp", "fsdp2"):
        cases["recomputed"] = {"auto_wrap_policy": {nn.Linear}, "activation_checkpointing": {nn.Linear}}
    for case, settings in cases.items():
        torch.manual_seed(0)
        module, weights = Adversaries(case), Weights()
        unused = {"find_unused_parameters": True} if engine in ("ddp", "lightning") else settings
        plugins = [scaled(torch.amp.GradScaler("cpu", init_scale=1024.0))] if case == "scaled" else []
        theirs = engine == "lightning"
        strategy = DDPStrategy(cluster_environment=Launched(), **unused) if theirs else Strategy(engine, **unused)
        trainer = trainer_of(strategy, callbacks=[weights], plugins=plugins)
        said = told_by(functools.partial(trainer.fit, module, loader()))
        trained = {"losses": module.losses, "state": weights.state, "calls": module.calls}
        found[case] = trained if said == "nothing" else said
    return found


def loader(batch: int = 4) -> DataLoader[Any]:
    numbers = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 6, generator=numbers), torch.randn(32, generator=numbers)
    return DataLoader(TensorDataset(x, y), batch)


def scaled(scaler: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


def strategy_of(engine: Any, **settings: Any) -> Any:
    """Lightning's own, or ours over an engine; a strategy as it is."""
    if engine == "lightning":
        return DDPStrategy(cluster_environment=Launched())
    return Strategy(engine, **settings) if isinstance(engine, str) and engine != "auto" else engine


def trainer_of(engine: Any, epochs: int = 1, settings: dict[str, Any] | None = None, **arguments: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
    quiet["enable_checkpointing"] = any(isinstance(each, ModelCheckpoint) for each in arguments.get("callbacks", ()))
    arguments.setdefault("devices", torch.distributed.get_world_size())
    strategy = strategy_of(engine, **(settings or {}))
    return lightning.Trainer(accelerator="cpu", strategy=strategy, max_epochs=epochs, **quiet, **arguments)


def every_epoch(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)


class Weights(Callback):
    """Weights as the training begins and ends, whole ones behind it, and the class of the optimizer."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}
        self.kind = ""  # which LearningRateMonitor writes

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.first = cloned(trainer.strategy.model.state_dict())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.kind, self.last = type(trainer.optimizers[0]).__name__, cloned(trainer.strategy.model.state_dict())

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.state = cloned(trainer.strategy.lightning_module_state_dict())


def cloned(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name.removeprefix("module."): v.detach().clone() for name, v in state.items() if isinstance(v, Tensor)}


def fit(engine: Any, arguments: dict[str, Any], epochs: int = 2, **more: Any) -> dict[str, Any]:
    """Losses, validations and, on rank 0, weights; the scale of the loss and when it grows."""
    torch.manual_seed(0)
    module, weights = Module(more.pop("complex_weight", True)), Weights()
    if scaler := arguments.get("fp16"):
        arguments = {"plugins": [scaled(torch.amp.GradScaler("cpu", **scaler))]}
    callbacks = [weights, *more.pop("callbacks", [])]
    trainer = trainer_of(engine, epochs, more.pop("settings", None), callbacks=callbacks, **arguments)
    with contextlib.redirect_stderr(io.StringIO()):
        trainer.fit(module, loader(), loader(), **more)
    found = {"losses": module.losses, "validations": module.validations, "state": weights.state}
    if scaler:
        now = trainer.precision_plugin.scaler
        found["scale"] = (now.get_scale(), now.get_growth_interval())
    return {**found, "trainer": trainer, "module": module, "kind": weights.kind}


def told(found: dict[str, Any]) -> dict[str, Any]:
    """Return what can travel."""
    return {key: value for key, value in found.items() if key not in ("trainer", "module", "kind")}


def fit_told(engine: str, epochs: int) -> dict[str, Any]:
    return told(fit(engine, {}, epochs))


CASES: dict[str, dict[str, Any]] = {
    "clipped": {"gradient_clip_val": 0.5},
    "accumulated": {"accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-mixed"},
    # precision="16-mixed" is bf16 to Lightning on a CPU
    "fp16": {"fp16": {"init_scale": 256.0, "growth_factor": 4.0, "growth_interval": 3}},
    "by value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
}


def every_case(engine: str) -> dict[str, dict[str, Any]]:
    return {
        case: told(fit(engine, given, complex_weight=case not in ("by value", "fp16"))) for case, given in CASES.items()
    }


class Remembers(Callback):
    """Has a state of a class that nobody is told to trust, and needs it as the fit starts."""

    def __init__(self, kept: Any) -> None:
        self.kept, self.at_start = kept, None

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["kept"]

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.at_start = self.kept


def resumed(engine: str, folder: str, epochs: int, path: str | None) -> dict[str, Any]:
    """A training that writes Lightning's checkpoints, from one of them on, and a test of what came out."""
    remembers = Remembers(None if path else fractions.Fraction(1, 3))
    found = fit(engine, {}, epochs, callbacks=[every_epoch(folder), remembers], ckpt_path=path, weights_only=False)
    trainer = found["trainer"]
    tested = trainer.validate(trainer.lightning_module, loader(), verbose=False)
    return {**told(found), "tested": tested, "at_start": remembers.at_start}


def searched(engine: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Lightning looks for a rate, and puts weights and optimizer back in the midst of the fit; then a validation."""
    torch.manual_seed(0)
    module, kept = Module(), Weights()
    start = cloned(module.state_dict())
    search = LearningRateFinder(num_training_steps=4, update_attr=False)
    trainer = trainer_of(engine, 1, settings, callbacks=[search, kept])
    with contextlib.redirect_stderr(io.StringIO()):
        trainer.fit(module, loader())
    before = trainer.strategy.model.state_dict()
    trainer.validate(module, loader(), verbose=False)
    after = trainer.strategy.model.state_dict()
    same = [name for name, value in start.items() if "norm.running" not in name and "num" not in name]
    return {
        "start": all(torch.equal(kept.first[name], start[name]) for name in same),
        "end": all(map(torch.equal, before.values(), after.values())),
        "trained": not torch.equal(before["weight"], start["weight"]),
    }


class Backboned(Module):
    """For BaseFinetuning: its optimizer has what is trained as it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.norm: Any = nn.Identity()  # one process would see other batches
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], 0.002, momentum=0.5)


def finetuned(engine: str, folder: str, **settings: Any) -> list[dict[str, Any]]:
    """A backbone that is frozen for one epoch of three, and the third one again from a checkpoint: this rank's weights
    and the optimizer's groups. ``"auto"``: on one process, of both ranks' samples."""
    found = []
    for path in (None, f"{folder}/epoch=1.ckpt"):
        torch.manual_seed(0)
        module, thaw = Backboned(), BackboneFinetuning(1, backbone_initial_ratio_lr=0.5, verbose=False)
        size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        kept = Weights()
        callbacks = [thaw, every_epoch(folder), kept]
        trainer = trainer_of(engine, 3, settings, callbacks=callbacks, use_distributed_sampler=False)
        mine = Subset(loader().dataset, range(rank, 32, size))
        with contextlib.redirect_stderr(io.StringIO()):
            trainer.fit(module, DataLoader(mine, 8 // size), ckpt_path=path)
        groups = [(len(group["params"]), group["lr"]) for group in trainer.optimizers[0].param_groups]
        found.append({"state": kept.last, "groups": groups})
    return found


def _without_optimizer() -> Module:
    module = Module()
    module.configure_optimizers = lambda: None
    return module  # type: ignore[no-any-return]


def _load_no_states() -> None:
    trainer = trainer_of("fsdp2", 1, {"save_distributed_checkpoint": True})  # so that it stays
    trainer.fit(Module(), loader())
    trainer.strategy.load_optimizer_state_dict({"optimizer_states": []})


def refused() -> dict[str, str]:
    """Map each thing that is refused to the error's type and text."""

    def fit_with(module: Any = None, parts: bool = False, **arguments: Any) -> Any:
        settings = {"save_distributed_checkpoint": parts}
        return lambda: trainer_of("fsdp2", 1, settings, **arguments).fit((module or Module)(), loader())

    own_scaler = type("OwnScaler", (torch.amp.GradScaler,), {})
    tried = {
        "precision": fit_with(precision="bf16-true"),
        "devices": fit_with(devices=1),
        "without": fit_with(_without_optimizer),
        "wrapped": fit_with(lambda: fsshard.wrap(Module(), backend="fsdp2").module),
        "states": _load_no_states,
        "scaler": lambda: fit_with(plugins=[scaled(own_scaler("cpu"))])(),
        "averaged in parts": fit_with(parts=True, callbacks=[EMAWeightAveraging()]),
        "averaged at the end": fit_with(callbacks=[StochasticWeightAveraging(swa_lrs=0.01)]),
    }
    return refusals(tried)


def after_fit(engine: str, path: str) -> dict[str, Any]:
    """A file written after ``fit``, a training that goes on from it; the first Trainer validates another module."""
    first = fit(engine, {})
    trainer = first["trainer"]
    trainer.save_checkpoint(path)
    torch.manual_seed(5)
    tested = trainer.validate(Module(), loader(), verbose=False)
    own = trainer.validate(first["module"], loader(), verbose=False)
    optimizer = trainer.optimizers[0]
    copied = pickle.loads(pickle.dumps(optimizer))  # as of a Trainer that torch.save writes
    told = [(type(each).__name__, each.state_dict().get("param_groups")) for each in (optimizer, copied)]
    losses = fit(engine, {}, 3, ckpt_path=path)["losses"]
    stepped = "" if engine == "lightning" else told_by(optimizer.step)
    return {"losses": losses, "tested": tested, "own": own, "copied": told[0] == told[1], "stepped": stepped}


class Later(Module):
    """Made in ``configure_model``, on a device of choice; what is not on the meta device gets its values there."""

    def __init__(self, device: str) -> None:
        lightning.LightningModule.__init__(self)
        self.on, self.losses, self.validations = device, [], []
        self.seen: set[str] = set()

    def configure_model(self) -> None:
        with torch.device(self.on):
            self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
            self.weight = nn.Linear(8, 4, bias=False).weight
        if self.on != "meta":
            self.apply(values)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.first(x)) @ self.weight.T).abs().sum(1)

    def configure_optimizers(self) -> Any:
        self.seen = {parameter.device.type for parameter in self.parameters()}
        return super().configure_optimizers()


def values(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        torch.nn.init.constant_(parameter, 0.1)
    for name, buffer in module.named_buffers(recurse=False):
        buffer.fill_(1 if name == "running_var" else 0)


def started(engine: str, device: str) -> dict[str, Any]:
    """A module that is made late; on the meta device its values are set by ``param_init_fn``."""
    module = Later(device)
    trainer_of(engine, 1, {"param_init_fn": values} if device == "meta" else {}).fit(module, loader())
    return {"losses": module.losses, "seen": module.seen}


def sampled(domain: int, data: int) -> dict[str, Any]:
    """The samplers' numbers, over a mesh of two dimensions."""
    from neuralop.models import FNO

    whole = init_device_mesh("cpu", (domain, data), mesh_dim_names=("domain", "data"))
    model = FNO((4, 4), in_channels=1, out_channels=1, hidden_channels=4, n_layers=1)
    shard_domain(model, whole["domain"])
    module = Module()
    module.operator = model
    found = {}
    for name, settings in (("mesh", {"device_mesh": whole["data"]}), ("domain", {}), ("plain", {})):
        trainer = trainer_of("fsdp2", 1, settings)
        trainer.strategy.connect(module if name == "domain" else Module())
        found[name] = trainer.distributed_sampler_kwargs
    fabric = lightning.Fabric(accelerator="cpu", devices=domain * data, strategy=FabricStrategy("fsdp2"))
    fabric.launch()
    found["loader first"] = fabric.setup_dataloaders(loader()).sampler.num_replicas
    found["refused"] = told_by(lambda: fabric.setup(model))
    return found


def by_former_name(name: str) -> dict[str, Any]:
    """Under a name of Lightning 1.x, and Lightning's registry; or over Lightning's own DDP."""
    from lightning.pytorch.strategies import StrategyRegistry

    found = fit(name if name == "lightning" else StrategyRegistry.get(name), {}, 1)
    return {"losses": found["losses"], "backend": getattr(found["trainer"].strategy, "backend", None)}


def handed_back(engine: str) -> dict[str, Any]:
    """Return what a process reads from rank 0 after ``start_method="fork"``, and the ranks' weights."""
    found = fit(engine, {}, 1)
    trainer = found["trainer"]
    output = WholeLauncher(trainer.strategy, start_method="fork")._collect_rank_zero_results(trainer, None)
    read = None if output is None else torch.load(output.weights_path, weights_only=True)
    return {"read": read, "state": found["state"], "kind": found["kind"]}


class Counted(EMAWeightAveraging):
    """A user's, with methods of the base class's in front of it."""

    calls: Counter[str]

    def __init__(self) -> None:
        super().__init__(decay=0.7, update_every_n_steps=2)
        self.calls = Counter()
        self.sent = self.held = 0

    def on_train_batch_end(self, *given: Any) -> None:
        with CommDebugMode() as mode:
            super().on_train_batch_end(*given)
        self.sent += mode.get_total_counts()
        average = self._average_model
        self.held = sum(parameter.nbytes for parameter in average.module.parameters())

    def _swap_models(self, pl_module: Any) -> None:
        self.calls["swapped"] += 1
        super()._swap_models(pl_module)

    def _copy_average_to_current(self, pl_module: Any) -> None:
        self.calls["copied"] += 1
        super()._copy_average_to_current(pl_module)


def averaged(engine: str, folder: str) -> dict[str, Any]:
    """With an average of the weights, whole and gone on from the last file, and the average's own numbers."""
    found = {}
    for name, epochs, path in (("whole", 3, None), ("half", 2, None), ("last", 3, "last")):
        keep = ModelCheckpoint(dirpath=f"{folder}/{'half' if path else name}", save_last=True)
        average = Counted() if name == "whole" else EMAWeightAveraging(decay=0.7, update_every_n_steps=2)
        found[name] = told(fit(engine, {}, epochs, callbacks=[average, keep], ckpt_path=path))
        found[name]["calls"] = dict(getattr(average, "calls", {}))
        found[name] |= {what: getattr(average, what, 0) for what in ("sent", "held")}
    return found


class Fails(Callback):
    """Ends a training in its second epoch as Ctrl-C does."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch:
            raise KeyboardInterrupt


def average_in_a_file(engine: str, folder: str) -> dict[str, Any]:
    """Files with an average that are written after ``fit``: after one that ended, one that was interrupted, one that
    has not begun to average, where ranks were not made alike, the same from its file on, and one with a search for the
    rate. What is tested then, and with the first file."""
    found = {}
    cases = {name: [] for name in ("ended", "late", "goes on")}
    cases["interrupted"] = [Fails()]
    cases["search"] = [LearningRateFinder(num_training_steps=4, update_attr=False)]
    for name, more in cases.items():
        torch.manual_seed(torch.distributed.get_rank() if name == "late" else 0)
        starts = 7 if name in ("late", "goes on") else 2
        average = EMAWeightAveraging(decay=0.7, update_starting_at_step=starts)
        module, path = Module(), f"{folder}/{name}.ckpt"
        source = {"ckpt_path": f"{folder}/late.ckpt", "weights_only": False} if name == "goes on" else {}
        trainer = trainer_of(engine, 1 if name == "late" else 2, callbacks=[average, *more])
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(KeyboardInterrupt, SystemExit):
            trainer.fit(module, loader(), loader(), **source)
        trainer.save_checkpoint(path)
        tested = [trainer.validate(module, loader(), verbose=False)]
        if name in ("ended", "interrupted"):
            for run in (trainer.validate, trainer.test):
                tested.append(run(module, loader(), ckpt_path=path, verbose=False, weights_only=False))
        other = functools.partial(trainer.validate, Module(), loader(), verbose=False)
        refused = told_by(other) if name == "interrupted" and engine != "lightning" else ""
        tested.append(trainer.validate(module, loader(), verbose=False))
        found[name] = {"tested": tested, "losses": module.losses, "validations": module.validations, "refused": refused}
        if torch.distributed.get_rank() == 0:
            written = torch.load(path, weights_only=False)
            kept = ("state_dict", "current_model_state", "averaging_state")
            found[name]["files"] = {f"{what} {key}": v for what in kept for key, v in written[what].items()}
    return found


def divided(engine: str, folder: str, path: str | None, epochs: int, tested: bool = False) -> dict[str, Any]:
    """A training whose checkpoints are directories, from one of them on; a whole one; what a bare module says to it,
    and what a whole checkpoint in its place, and a directory of weights alone."""
    settings, remembers = {} if path else {"save_distributed_checkpoint": True}, Remembers(None if path else 3)
    found = fit(engine, {}, epochs, callbacks=[every_epoch(folder), remembers], ckpt_path=path, settings=settings)
    trainer, weights = found["trainer"], f"{folder}/weights.ckpt"

    def validate() -> None:
        trainer_of(engine).validate(Module(), loader(), ckpt_path=path, verbose=False)

    def replace() -> None:
        if path is not None:
            trainer.save_checkpoint(path)
        else:
            trainer.save_checkpoint(weights, weights_only=True)
            fit(engine, {}, epochs, ckpt_path=weights)

    refused = told_by(validate) if tested else ""
    return {**told(found), "refused": refused, "replaced": told_by(replace), "at_start": remembers.at_start}


class Listed(Module):
    """Holds a weight in a list, too; a layer is frozen, and two have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.tied = nn.Linear(6, 6), nn.Linear(6, 8)
        self.frozen.requires_grad_(False)
        self.tied.weight = self.first.weight
        self.listed = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.frozen(x)) + self.tied(x).sum(1)


def again(engine: str) -> dict[str, Any]:
    """One module through one Trainer twice, others in between, and Lightning's own on one device."""
    torch.manual_seed(0)
    module, units = Listed(), {"auto_wrap_policy": {nn.Linear}} if engine in ("fsdp", "fsdp2") else {}
    kind, parameters, members = type(module), dict(module.named_parameters()), set(vars(module))
    found = {"tested": [], "states": []}

    def trainer() -> lightning.Trainer:
        return trainer_of(engine, 1, units)

    def plain() -> tuple[bool, bool, list[str]]:
        same = all(value is parameters[name] for name, value in module.named_parameters())
        return same and module.listed[0] is module.weight, type(module) is kind, sorted(set(vars(module)) - members)

    first = trainer()
    first.fit(module, loader(), loader())
    found["plain"] = [plain()]
    found["rates"] = [first.optimizers[0].param_groups[0]["lr"]]
    found["tested"] += [one.validate(module, loader(), verbose=False) for one in (first, trainer())]
    found["states"].append(copy.deepcopy(module).state_dict())
    trainer().fit(module, loader())
    found["states"].append({name: value.clone() for name, value in module.state_dict().items()})
    first.fit_loop.max_epochs = 2
    first.fit(module, loader())
    found["rates"].append(first.optimizers[0].param_groups[0]["lr"])
    found["tested"].append(first.test(module, loader(), verbose=False))
    alone = trainer_of("auto", devices=1)
    alone.fit(module, loader(8))
    found["plain"].append(plain())
    found["states"].append(module.state_dict())
    return {**found, "losses": module.losses, "modes": [each.training for each in module.modules()]}


def left_in_parts() -> dict[str, Any]:
    """Where hosts have no room for whole weights, and where ranks write their own parts: tests, and a second fit, which
    needs room."""
    found = {}
    for case in ("no room", "own files"):
        torch.manual_seed(0)
        module = Module()
        first = trainer_of("fsdp2", 1, {"save_distributed_checkpoint": case == "own files"})
        other = trainer_of("fsdp")
        with (
            patch.object(coming_back, "free_memory", return_value=0) if case == "no room" else contextlib.nullcontext()
        ):
            first.fit(module, loader())
            found[case] = {"parts": is_managed(module), "tested": []}
            for one in (first, other):
                found[case]["tested"] += one.validate(module, loader(), verbose=False)
            if case == "no room":
                found[case]["refused"] = told_by(functools.partial(other.fit, module, loader()))
        trainer_of("fsdp").fit(module, loader())
        found[case] |= {"still": is_managed(module), "losses": module.losses}
    return found


class Changing(Module):
    """Copies itself, fails, and changes in the end what no gradient goes to."""

    def __init__(self, divided: bool) -> None:
        super().__init__()
        self.fails, self.divided, self.activation, self.unused = True, divided, nn.ReLU(), nn.Dropout()

    def on_train_start(self) -> None:
        if not self.divided:
            assert isinstance(copy.deepcopy(self), Changing)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.fails:
            raise ZeroDivisionError("asked for")

    def on_train_end(self) -> None:
        self.activation = nn.Identity()
        del self.unused
        self.later = nn.Parameter(torch.ones(2), requires_grad=False)


def changed(engine: str) -> dict[str, Any]:
    """A module whose first ``fit()`` fails; again, with an average of its weights; then one weight is no number."""
    torch.manual_seed(0)
    module = Changing(engine in ("fsdp", "fsdp2"))
    with contextlib.suppress(ZeroDivisionError):
        trainer_of(engine).fit(module, loader())
    module.fails = False
    trainer_of(engine, 1, callbacks=[EMAWeightAveraging(decay=0.7)]).fit(module, loader())
    found = {
        "children": [*map(str, module.children())],
        "losses": module.losses,
        "state": copy.deepcopy(module.state_dict()),
    }
    with torch.no_grad():
        module.weight[0, 0] = float("nan")
    return {**found, "tested": str(trainer_of(engine).validate(module, loader(), verbose=False))}
