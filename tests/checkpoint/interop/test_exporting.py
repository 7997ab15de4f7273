"""Exports: read by those whose format it is, the same from every engine, in little memory.

Tests fsshard/checkpoint/interop/torch_formats.py too.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

import fsshard
from fsshard.errors import CheckpointError, ConfigurationError
from tests.checkpoint.in_and_out import everything, job_live, job_save, same, step
from tests.on_ranks import on_ranks
from tests.training_runs import DISTRIBUTED

TIED, KEPT = "layers.2.weight", "layers.0.weight"


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of two ranks, its state dicts, and the state dict after the next step."""
    path = tmp_path_factory.mktemp("exporting") / "ckpt"
    return path, *ranks.run(job_save, 2, path, "fsdp2")[0]


def test_safetensors(saved: Any, tmp_path: Path) -> None:
    checkpoint, state, *_ = saved
    file = tmp_path / "model.safetensors"
    assert fsshard.export(checkpoint, file) == [file]
    assert same({key: value for key, value in state.items() if key != TIED}, load_file(file))
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", TIED: KEPT}
        assert opened.get_slice("layers.1.weight").get_dtype() == "C64"
    model = everything(1)
    load_model(model, file)
    assert same(state, model.state_dict())


def test_above_a_size_shards_as_on_the_hub(saved: Any, tmp_path: Path) -> None:
    checkpoint, state, *_ = saved
    files = fsshard.export(checkpoint, tmp_path / "model.safetensors", max_shard_bytes=300)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = [f"model-{n:05d}-of-{len(files) - 1:05d}.safetensors" for n in range(1, len(files))]
    assert [file.name for file in files] == [*names, "model.safetensors.index.json"] and len(names) > 2
    assert index["metadata"]["total_size"] == sum(t.nbytes for key, t in state.items() if key != TIED)
    got = {}
    for name in names:
        part = load_file(tmp_path / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == set(part)
        assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= 300
        got |= part
    assert same({key: value for key, value in state.items() if key != TIED}, got)


def test_another_number_of_shards_replaces_the_old_ones(saved: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    fsshard.export(saved[0], file, max_shard_bytes=300)
    with pytest.raises(CheckpointError, match=r"exists; pass overwrite=True"):
        fsshard.export(saved[0], file)
    fsshard.export(saved[0], file, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_it_without_unpickling(saved: Any, tmp_path: Path, mmap: bool) -> None:
    checkpoint, state, optimizer_state, later = saved
    file = tmp_path / "model.pt"
    fsshard.export(checkpoint, file)
    got = torch.load(file, weights_only=True, mmap=mmap)
    assert same(state, got) and list(got) == list(state)
    assert got[TIED].data_ptr() == got[KEPT].data_ptr()
    assert zipfile.ZipFile(file).testzip() is None
    fsshard.export(checkpoint, file, optimizer=True, overwrite=True)
    got = torch.load(file, weights_only=True, mmap=mmap)
    model = everything(1)
    model.load_state_dict(got["model"])
    named = dict(model.named_parameters())
    groups = [{"params": [named[name] for name in group["params"]]} for group in optimizer_state["param_groups"]]
    optimizer = torch.optim.AdamW(groups, lr=7.0)
    optimizer.load_state_dict(got["optimizer"])
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 2e-2]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = next(name for name, each in named.items() if each is parameter)
            assert same(optimizer_state["state"][name], optimizer.state[parameter])
    # The same batch on both ranks: their mean gradient is each one's, to the last bit.
    step(model, optimizer, 2)
    assert same(later, model.state_dict())


def test_dcp_loads_it(saved: Any, tmp_path: Path) -> None:
    checkpoint, state, optimizer_state, _ = saved
    (tmp_path / "dcp").mkdir()
    assert fsshard.export(checkpoint, tmp_path / "dcp", "dcp", optimizer=True) == [tmp_path / "dcp"]
    blank_state = {name: _blank(item) for name, item in optimizer_state["state"].items()}
    blank = {"model": _blank(state), "optimizer": {"state": blank_state}}
    dcp.load(blank, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert same(state, blank["model"])
    for name, expected in optimizer_state["state"].items():
        assert same(expected, blank_state[name])
    with pytest.raises(CheckpointError, match="exists; pass overwrite=True"):
        fsshard.export(checkpoint, tmp_path / "dcp", "dcp")
    fsshard.export(checkpoint, tmp_path / "dcp", "dcp", overwrite=True)
    flat = _blank(state)
    dcp.load(flat, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert same(state, flat) and [path.name for path in tmp_path.iterdir()] == ["dcp"]


def _blank(state: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.full_like(value, 9) for key, value in state.items()}


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_a_live_model_of_any_engine_gives_the_same_bytes(ranks: Any, saved: Any, tmp_path: Path, backend: str) -> None:
    names = ["model.safetensors", "model.pt", "dcp"] if backend == "fsdp" else ["model.safetensors", "model.pt"]
    written = ranks.run(job_live, 2, tmp_path, backend, names)
    assert written == [[[name] for name in names]] * 2
    for name, optimizer in (("model.safetensors", False), ("model.pt", True)):
        fsshard.export(saved[0], tmp_path / f"of-ckpt-{name}", optimizer=optimizer)
        assert (tmp_path / f"of-ckpt-{name}").read_bytes() == (tmp_path / name).read_bytes()
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def job_hf(path: Path) -> bool:
    from tests.zoo import ZOO

    torch.manual_seed(0)
    model = fsshard.wrap(ZOO["t5"].build(), backend="fsdp2")
    fsshard.export(model, path / "live", "hf", max_shard_bytes=20_000)
    fsshard.save(path / "ckpt", model)
    state = model.state_dict()
    if torch.distributed.get_rank() == 0:
        fsshard.export(path / "ckpt", path / "cold", "hf", config=model.config)
    kinds = [
        type(model.module).from_pretrained(path / name) for name in ("live", "cold")[: 2 - torch.distributed.get_rank()]
    ]
    return all(same(state, again.state_dict()) for again in kinds)


def test_from_pretrained_reads_it(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(job_hf, 2, tmp_path) == [True, True]
    assert len(list((tmp_path / "live").glob("model-*.safetensors"))) > 1
    assert [path.name for path in sorted((tmp_path / "cold").iterdir())] == ["config.json", "model.safetensors"]


# ------------------------------------------------------------------------------------------------ memory


class Large(nn.Module):
    """One large parameter, so that holding a whole one shows."""

    def __init__(self) -> None:
        super().__init__()
        # 128 MiB: a few pieces of a MiB each, and what Python's heap grows by, are up to 0.055 of 64.
        self.weight = nn.Parameter(torch.ones(32, 1 << 20))
        self.small = nn.Parameter(torch.ones(3))

    def forward(self, x: Any) -> Any:
        return x


def high_water() -> int:
    """The most memory that this process had, in bytes, since :func:`forget_high_water`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def forget_high_water() -> int:
    """Start to measure; the memory that there is now."""
    Path("/proc/self/clear_refs").write_text("5")
    return high_water()


def job_memory(path: Path) -> list[float]:
    """The bytes that each export takes more, as a share of the parameters' bytes."""
    found = []
    for build in (everything, Large):  # the first time imports modules and fills torch's caches
        model = fsshard.wrap(build(), backend="fsdp2")
        total = sum(parameter.numel() * parameter.itemsize for parameter in build().parameters())
        fsshard.save(path / "ckpt", model)
        found = []
        for source, name in [
            (model, "m.safetensors"),
            *((path / "ckpt", name) for name in ("m.safetensors", "m.pt", "m")),
        ]:
            if source is model or torch.distributed.get_rank() == 0:
                before = forget_high_water()
                fsshard.export(source, path / name, "dcp" if name == "m" else None, overwrite=True)
                found.append((high_water() - before) / total)
    return found


def test_extra_memory(ranks: Any, tmp_path: Path) -> None:
    rank0, (other,) = ranks.run(job_memory, 2, tmp_path)
    live, of_safetensors, of_torch, of_dcp = rank0
    print(rank0, other)
    assert max(live, other, of_safetensors, of_torch) <= 0.05
    assert of_dcp <= 1.05  # the largest parameter, which is nearly all


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.usefixtures("alone")
def test_complex128(tmp_path: Path) -> None:
    model = fsshard.wrap(nn.Linear(3, 2, bias=False, dtype=torch.complex128), backend="none")
    fsshard.export(model, tmp_path / "wide.pt")
    (weight,) = torch.load(tmp_path / "wide.pt", weights_only=True).values()
    assert weight.dtype is torch.complex128 and torch.equal(weight, model.state_dict()["weight"])
    with pytest.raises(CheckpointError, match="has no complex128, which 'weight' is; use format='torch'"):
        fsshard.export(model, tmp_path / "wide.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["wide.pt"]


@pytest.mark.parametrize(
    ("file", "arguments", "text"),
    [
        ("model", {}, "expected one of safetensors, torch, dcp, hf"),
        ("model.pt", {"format": "onnx"}, "format='onnx' into"),
        ("model.pt", {"format": "safetensors"}, "that the suffix does not contradict"),
        ("model.safetensors", {"optimizer": True}, "optimizer= goes with 'torch'"),
        ("model.pt", {"optimizer": "other"}, "the checkpoint has 'optimizer'"),
        ("model.safetensors", {"max_shard_bytes": "5GB"}, "expected a positive number of bytes"),
        ("model.safetensors", {"config": {}}, "config= with 'hf'"),
        ("hf", {"format": "hf"}, "the model has none"),
        ("hf", {"format": "hf", "config": "/nowhere/config.json"}, "cannot be read as JSON"),
    ],
)
def test_questions_without_meaning(saved: Any, tmp_path: Path, file: str, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        fsshard.export(saved[0], tmp_path / file, **arguments)
    assert not list(tmp_path.iterdir())


@on_ranks()
def test_a_failure_on_rank_0_is_every_ranks(tmp_path: Path) -> None:
    path = tmp_path
    model = fsshard.wrap(everything(), backend="fsdp")
    (path / "file").touch()
    with pytest.raises(CheckpointError) as caught:
        fsshard.export(model, path / "file" / "model.safetensors")
    fsshard.export(model, path / "model.safetensors", overwrite=True)  # and the ranks still understand each other
    message = str(caught.value)
    assert "cannot write" in message
