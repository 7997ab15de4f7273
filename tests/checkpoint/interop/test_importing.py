"""Checkpoints of others: recognised, read by slices into any engine, and never unpickled without leave."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import fsshard
from fsshard.checkpoint.interop.foreign import foreign
from fsshard.checkpoint.interop.importing import import_checkpoint
from fsshard.errors import CheckpointError, ConfigurationError, CorruptCheckpoint, StateDictError
from tests.checkpoint.in_and_out import Planted, everything, job_save, optimizer_of, same, step
from tests.models import Spectral

TIED, KEPT = "layers.2.weight", "layers.0.weight"


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of ours, its state dicts, and the model's after the next step."""
    path = tmp_path_factory.mktemp("importing") / "ckpt"
    return path, *ranks.run(job_save, 2, path, "ddp")[0]


def job_load(path: Path, backend: str, with_optimizer: bool, trust: bool = False) -> tuple[Any, Any, Any, Any]:
    """Load into other weights; the state dicts then, the model's after a step, and what else was there."""
    model = fsshard.wrap(everything(1), backend=backend, auto_wrap_policy={nn.Linear, Spectral})
    optimizer = optimizer_of(model, lr=5.0)
    loaded = fsshard.load(path, model, optimizer if with_optimizer else None, trust_pickle=trust)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer_state = optimizer.state_dict()
    step(model, optimizer, 2)
    return state, optimizer_state, model.state_dict(), (dict(loaded.state), dict(loaded.origin))


def numbered(optimizer_state: dict[str, Any]) -> dict[str, Any]:
    """As torch's own optimizers number it."""
    names = [name for group in optimizer_state["param_groups"] for name in group["params"]]
    groups = [{**g, "params": [names.index(name) for name in g["params"]]} for g in optimizer_state["param_groups"]]
    return {"state": {names.index(n): item for n, item in optimizer_state["state"].items()}, "param_groups": groups}


def write(path: Path, form: str, saved: Any) -> None:
    """The saved training in a form of others."""
    checkpoint, state, optimizer_state, _ = saved
    optimizer = numbered(optimizer_state)
    if form == "dcp":
        fsshard.export(checkpoint, path, "dcp", optimizer=True)
    elif form == "hf":
        fsshard.export(checkpoint, path, "hf", config={"model_type": "x"}, max_shard_bytes=300)
    elif form == "safetensors":
        fsshard.export(checkpoint, path)
    elif form == "ddp":
        torch.save({"model": {f"module.{k}": v for k, v in state.items()}, "optim": optimizer, "epoch": 3}, path)
    elif form == "compiled":
        model = {
            f"_orig_mod.{k.replace('layers.1', 'layers.1._checkpoint_wrapped_module')}": v for k, v in state.items()
        }
        lightning = {"state_dict": model, "optimizer_states": [optimizer], "lr_schedulers": [], "epoch": 3}
        torch.save(lightning, path, _use_new_zipfile_serialization=False)
    elif form == "fairscale":  # ShardedDDP in DDP; FairScale keeps tied weights, and leaves {} for what it never saw
        model = {f"module.module.{k}": v.clone() for k, v in state.items()}
        torch.save({"net": model, "oss": optimizer, "epoch": 3}, path)
    elif form == "bare":
        torch.save(state, path)


@pytest.mark.parametrize(
    ("form", "backend"),
    [
        ("safetensors", "fsdp2"),
        ("hf", "fsdp"),
        ("ddp", "fsdp2"),
        ("compiled", "fairscale"),
        ("fairscale", "fsdp"),
        ("bare", "ddp"),
        ("dcp", "fairscale"),
    ],
)
def test_goes_on(ranks: Any, saved: Any, tmp_path: Path, form: str, backend: str) -> None:
    suffix = {"safetensors": ".safetensors", "hf": "", "dcp": ""}.get(form, ".pt")
    path = tmp_path / f"theirs{suffix}"
    write(path, form, saved)
    _, state, optimizer_state, later = saved
    whole = form not in ("safetensors", "hf", "bare")
    assert foreign(path) == {"safetensors": "safetensors", "hf": "hf", "dcp": "dcp"}.get(form, "torch")
    for got, got_optimizer, after, (others, origin) in ranks.run(job_load, 2, path, backend, whole, form == "dcp"):
        assert same(state, got)
        assert origin["backend"] == foreign(path)
        if whole:
            assert same(optimizer_state["state"], got_optimizer["state"]) and same(later, after)
            assert [group["lr"] for group in got_optimizer["param_groups"]] == [1e-2, 2e-2]
            assert (form == "dcp") or others["epoch"] == 3


# ------------------------------------------------------------------------------------------------ torch's engines


def plain(seed: int = 0) -> nn.Module:
    """A model that torch's own engines take."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8))


def job_torch(path: Path) -> dict[str, Any]:
    """Train under torch's FSDP1 and FSDP2, and save as their users do."""
    states = {}
    for engine in ("fsdp1", "fsdp2"):
        model = plain()
        if engine == "fsdp1":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        else:
            fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(2):
            step(model, optimizer, number)
        for flat in (False, True) if engine == "fsdp2" else (False,):
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            theirs = {
                "model": get_model_state_dict(model, options=options),
                "optim": get_optimizer_state_dict(model, optimizer, options=options),
            }
            dcp.save({"app": theirs, "epoch": 3} if flat else theirs, checkpoint_id=str(path / f"{engine}{flat}"))
        states[engine] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        step(model, optimizer, 2)
        states[engine + "later"] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return states


def job_load_plain(path: Path, backend: str) -> tuple[Any, Any]:
    model = fsshard.wrap(plain(1), backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=3.0)
    fsshard.load(path, model, optimizer)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    step(model, optimizer, 2)
    return state, model.state_dict()


def test_torchs_own_sharded_checkpoints(ranks: Any, tmp_path: Path) -> None:
    states = ranks.run(job_torch, 2, tmp_path)[0]
    for name, backend in (("fsdp1False", "fsdp2"), ("fsdp2False", "fairscale"), ("fsdp2True", "fsdp")):
        for state, later in ranks.run(job_load_plain, 2, tmp_path / name, backend):
            assert same(states[name[:5]], state) and same(states[name[:5] + "later"], later), name


# ------------------------------------------------------------------------------------------------ FairScale


def job_resume(kind: str, folder: Path, backend: str) -> dict[str, Any]:
    """Load what the real FairScale saved, by fsshard.load; the weights after some more steps."""
    from tests.compat import test_fairscale_checkpoints as old

    model, optimizer = old.ours(getattr(old, kind), "AdamW", backend)
    fsshard.load(folder / "both.pt", model, optimizer)
    return old.run(model, [optimizer], old.STEPS)


@pytest.mark.parametrize(("kind", "backend"), [("Text", "fsdp2"), ("Nested", "fsdp")])
def test_fairscales_own(ranks: Any, tmp_path: Path, kind: str, backend: str) -> None:
    """A consolidated OSS with ShardedDDP, and FSDP over one flat parameter, whose optimizer state was gathered."""
    from tests.compat import test_fairscale_checkpoints as old

    if kind == "Text":
        expected = ranks.run(old.job_write_oss, 2, old.Text, "AdamW", str(tmp_path))[0]
    else:
        expected = ranks.run(old.job_write_fsdp, 2, "AdamW", str(tmp_path), ())[0]
    optimizer = old.read(str(tmp_path), "optimizer")
    whole = {"model": old.read(str(tmp_path), "model"), "optimizer": optimizer[0] if kind == "Text" else optimizer}
    torch.save(whole, tmp_path / "both.pt")
    for got in ranks.run(job_resume, 2, kind, tmp_path, backend):
        assert same(expected, got)


# ------------------------------------------------------------------------------------------------ neuraloperator


def job_neuralop(path: Path, backend: str) -> tuple[bool, str, Any]:
    from tests.zoo import ZOO

    case = ZOO["tfno_tucker"]
    if not dist.get_rank():
        from neuralop.training.training_state import save_training_state

        native = case.build()
        optimizer = torch.optim.Adam(native.parameters(), lr=1e-2)
        for parameter in native.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        save_training_state(path, "best_model", native, optimizer, scheduler, epoch=4)
    dist.barrier()
    model = fsshard.wrap(case.build(), backend=backend)
    mine = fsshard.build_optimizer(model, torch.optim.Adam, lr=3.0)
    schedule = torch.optim.lr_scheduler.StepLR(mine, 3)
    loaded = fsshard.load(path, model, mine, schedule, trust_pickle=True)
    expected = torch.load(path / "best_model_state_dict.pt", weights_only=False)
    expected.pop("_metadata")
    theirs = torch.load(path / "optimizer.pt", weights_only=True)
    got = model.state_dict()
    got.pop("_metadata", None)
    names = list(model.backend.entries)
    state = {names[number]: item for number, item in theirs["state"].items()}
    return same(expected, got) and same(state, mine.state_dict()["state"]), foreign(path) or "", dict(loaded.state)


def test_neuraloperators_folders(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("neuralop")
    for equal, kind, rest in ranks.run(job_neuralop, 2, tmp_path, "fsdp2"):
        assert equal and kind == "neuralop" and rest == {"epoch": 4}


# ------------------------------------------------------------------------------------------------ without a model


def test_import_makes_a_checkpoint_of_ours(ranks: Any, saved: Any, tmp_path: Path) -> None:
    _, state, optimizer_state, later = saved
    for form in ("dcp", "hf", "ddp"):
        suffix = ".pt" if form == "ddp" else ""
        write(tmp_path / f"{form}{suffix}", form, saved)
        trust, named = form == "dcp", form != "ddp"
        made = import_checkpoint(tmp_path / f"{form}{suffix}", tmp_path / "ours", trust_pickle=trust, optimizer=named)
        assert made == tmp_path / "ours" and foreign(made) is None
        for got, got_optimizer, after, (rest, _) in ranks.run(job_load, 2, made, "fsdp2", form == "dcp"):
            assert same(state, got) and (form != "ddp" or rest["epoch"] == 3)
            assert form != "dcp" or (same(optimizer_state["state"], got_optimizer["state"]) and same(later, after))
    with pytest.raises(CheckpointError, match=r"numbers its parameters.*--no-optimizer"):
        import_checkpoint(tmp_path / "ddp.pt", tmp_path / "other")
    with pytest.raises(CheckpointError, match="expected a checkpoint, found no such file or folder"):
        import_checkpoint(tmp_path / "nothing", tmp_path / "other")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".other", "other"))]


# ------------------------------------------------------------------------------------------------ hostile files


PLACES = (
    "ours/index.json",
    "dcp/.metadata",
    "hf3/pytorch_model.bin",
    "neuralop/model_state_dict.pt",
    "neuralop3/optimizer.pt",
    "file.pt",
    "file.safetensors",
)


def plant(path: Path, marker: Path, form: str) -> None:
    """A pickle that leaves a marker, in one of the formats of torch.save or bare, and what lies around it."""
    path.parent.mkdir(exist_ok=True)
    if path.parent.name.startswith("neuralop"):
        torch.save(plain().state_dict(), path.parent / "model_state_dict.pt")
    if form == "bare":
        path.write_bytes(pickle.dumps({"model": Planted(marker)}))
    else:
        with path.open("wb") as stream:  # torch.save takes no path that begins with a dot
            torch.save({"model": Planted(marker)}, stream, _use_new_zipfile_serialization=form == "zip")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("form", ["zip", "legacy", "bare"])
def test_a_planted_pickle_is_never_run(tmp_path: Path, form: str) -> None:
    folder, marker = tmp_path / "planted", tmp_path / "marker"
    folder.mkdir()
    for place in PLACES:
        plant(folder / place, marker, form)
    model = fsshard.wrap(plain(), backend="none")
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for target in {target for place in PLACES for target in (folder / place, (folder / place).parent)}:
        for call in (
            lambda: fsshard.load(target, model, optimizer),  # noqa: B023
            lambda: import_checkpoint(target, tmp_path / "ours"),  # noqa: B023
            lambda: fsshard.export(target, tmp_path / "out.safetensors"),  # noqa: B023
        ):
            with pytest.raises((CheckpointError, StateDictError)):
                call()
    assert same(before, model.state_dict()) and [path.name for path in tmp_path.iterdir()] == ["planted"]
    if form == "zip":  # the payload does run where it is trusted: the test above would fail if it could
        with pytest.raises(CheckpointError):
            import_checkpoint(folder / "file.pt", tmp_path / "ours", trust_pickle=True)
        assert marker.exists()


def test_an_index_that_leads_elsewhere(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "hf"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    for name, text in (
        ("../outside.safetensors", "no weight_map of keys to files next to it"),
        ("missing.safetensors", "missing"),
    ):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CorruptCheckpoint, match=text):
            import_checkpoint(folder, tmp_path / "ours")
    shutil.copy(tmp_path / "outside.safetensors", folder / "one.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(CorruptCheckpoint, match="lists tensors that its files lack: b"):
        import_checkpoint(folder, tmp_path / "ours")
    for content in (b"[" * 100_000, b'{"weight_map": []}'):
        index.write_bytes(content)
        with pytest.raises(CorruptCheckpoint):
            import_checkpoint(folder, tmp_path / "ours")


def test_damaged_files(tmp_path: Path, saved: Any) -> None:
    write(tmp_path / "whole.pt", "ddp", saved)
    whole = (tmp_path / "whole.pt").read_bytes()
    for name, content in (("cut.pt", whole[: len(whole) // 2]), ("short.pt", b"PK\x03\x04"), ("odd.pt", b"\x80\x02.")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError):
            import_checkpoint(tmp_path / name, tmp_path / "ours")
    write(tmp_path / "dcp", "dcp", saved)
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CorruptCheckpoint):
        import_checkpoint(tmp_path / "dcp", tmp_path / "ours", trust_pickle=True)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CorruptCheckpoint, match="holds a list"):
        import_checkpoint(tmp_path / "list.pt", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


# ------------------------------------------------------------------------------------------------ what does not fit


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "shape": ("adamw", {}, "StateDictError", "odd: expected float32 (3,), got float32 (4,)"),
    "missing": ("", {}, "StateDictError", "missing: odd"),
    "dtype": ("", {}, "StateDictError", "odd: expected float32 (3,), got bfloat16 (3,)"),
    "flat": ("", {}, "StateDictError", "put them together with join_model_shards first"),
    "nothing": ("", {}, "StateDictError", "missing: layers.0.weight"),
    "model": ("adamw", {}, "CheckpointError", "optimizer states in it: none"),
    "whole": ("sgd", {}, "CheckpointError", "it is of another class"),
    "whole, two": ("both", {}, "CheckpointError", "2 optimizer(s) to load"),
    "lost": ("adamw", {}, "StateDictError", "missing: state of odd"),
    "whole, verified": ("", {"verify": True}, "CheckpointError", "keeps no checksums"),
    "whole, step": ("", {"step": torch.nn.Linear(1, 1)}, "CheckpointError", "nothing was saved as step"),
}
"""A file of :func:`files_that_do_not_fit` and a word -> optimizers, arguments, and the error."""


def files_that_do_not_fit(folder: Path, saved: Any) -> None:
    _, state, optimizer_state, _ = saved
    optimizer = numbered(optimizer_state)
    lost = {**optimizer, "state": {number: item for number, item in optimizer["state"].items() if number}}
    once = {key: value for key, value in state.items() if key != TIED}
    for name, value in {
        "shape": {"model": {**state, "odd": torch.ones(4)}, "optimizer": optimizer},
        "missing": {"model": {key: value for key, value in state.items() if key != "odd"}, "extra": 1},
        "flat": {"flat_param_0": torch.ones(5)},
        "nothing": {"epoch": 3},
        "model": state,
        "whole": {"model": state, "optimizer": optimizer},
        "lost": {"model": state, "optimizer": lost},
    }.items():
        torch.save(value, folder / name)
    save_file({**once, "odd": state["odd"].to(torch.bfloat16)}, folder / "dtype")


def job_refused(path: Path) -> dict[str, tuple[str, str]]:
    model = fsshard.wrap(everything(1), backend="fsdp2")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    adamw, sgd = optimizer_of(model), fsshard.build_optimizer(model, torch.optim.SGD, lr=1e-2)
    optimizers = {"": None, "adamw": adamw, "sgd": sgd, "both": [adamw, sgd]}
    told = {}
    for case, (optimizer, arguments, _, _) in REFUSED.items():
        with pytest.raises((StateDictError, CheckpointError, ConfigurationError)) as caught:
            fsshard.load(path / case.partition(",")[0], model, optimizers[optimizer], **arguments)
        told[case] = (type(caught.value).__name__, str(caught.value))
    return told if same(before, model.state_dict()) and not adamw.state_dict()["state"] else {}


def test_what_does_not_fit_changes_nothing(ranks: Any, saved: Any, tmp_path: Path) -> None:
    files_that_do_not_fit(tmp_path, saved)
    for told in ranks.run(job_refused, 2, tmp_path):
        assert told.keys() == REFUSED.keys()
        for case, (_, _, kind, text) in REFUSED.items():
            assert told[case][0] == kind and text in told[case][1], told[case]
