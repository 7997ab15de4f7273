"""Trainings of other programs go on here to the last bit, and what is left of them, or could be another, is said.

Tests fsshard/checkpoint/interop/deepspeed.py and fsshard/checkpoint/interop/pickles.py too.
"""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import fsshard
from fsshard.checkpoint.interop.importing import import_checkpoint
from fsshard.errors import CheckpointError, ConfigurationError, CorruptCheckpoint
from tests.checkpoint.in_and_out import same
from tests.models import take_step

OTHERS = Path(__file__).parent / "others"  # made by tools/make_deepspeed.py and make_megatron_fsdp.py


def build(seed: int = 1) -> nn.Module:
    """The model of tools/make_deepspeed.py."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.Linear(3, 3, bias=False))
    model[3].requires_grad_(False)
    return model


def groups(model: Any) -> list[dict[str, Any]]:
    """The groups of tools/make_deepspeed.py."""
    first, *rest = [value for value in model.parameters() if value.requires_grad]
    return [{"params": [first], "lr": 1e-2}, {"params": rest, "lr": 2e-2}]


def loss_of(model: Any, number: int, rank: int) -> Tensor:
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * number + rank))
    return model(x).square().mean()


def step(model: Any, optimizer: Any, number: int, rank: int) -> None:
    loss_of(model, number, rank).backward()
    take_step(optimizer)


def job_go_on(path: Path, backend: str) -> dict[str, Tensor]:
    """Load what others trained for three steps, and train the fourth."""
    model = fsshard.wrap(build(), backend=backend, broadcast_buffers=False)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, groups(model), lr=5.0)
    fsshard.load(path, model, optimizer)
    step(model, optimizer, 3, dist.get_rank())
    return model.state_dict()


def job_as_one(path: Path) -> dict[str, Tensor]:
    """Load the same on one process, and train the fourth step with both ranks' gradients averaged by hand."""
    model = fsshard.wrap(build(), backend="none")
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, groups(model), lr=5.0)
    fsshard.load(path, model, optimizer)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss_of(model, 3, 1).backward()
    for name, buffer in model.named_buffers():  # those of rank 0 count
        buffer.copy_(buffers[name])
    loss_of(model, 3, 0).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    optimizer.step()
    return model.state_dict()


def check_went_on(name: str, got: dict[str, Tensor]) -> None:
    """Compare with what the others' library made of the fourth step: on another CPU, whose kernels round otherwise."""
    expected = torch.load(OTHERS / f"{name}_next.pt")
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(
    ("name", "backend"),
    [("zero1", "fsdp2"), ("zero2", "fairscale"), ("zero3", "fsdp"), ("zero3", "ddp"), ("megatron_fsdp", "fsdp2")],
)
def test_they_go_on(ranks: Any, tmp_path: Path, name: str, backend: str) -> None:
    theirs = OTHERS / name
    paths = [theirs]
    if name.startswith("zero"):  # whose states have names, so that no model is needed
        paths += [theirs / "global_step3", import_checkpoint(theirs, tmp_path / "ours")]
    for path in paths:
        got = ranks.run(job_go_on, 2, path, backend)[0]
        assert same(ranks.run(job_as_one, 1, path)[0], got)
        check_went_on(name, got)


STATE = build().state_dict()
OTHER = {name: torch.full_like(value, 7) for name, value in STATE.items()}


def stepped(path: Path) -> Path:
    """A file of AdamW's state after a step."""
    model = build()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    step(model, optimizer, 0, 0)
    torch.save(optimizer.state_dict(), path)
    return path


def saved(path: Path, value: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    torch.save(value, path)
    return path


def copied(path: Path, source: str, *without: str) -> Path:
    shutil.copytree(OTHERS / source, path / source)
    for name in without:
        (path / source / "global_step3" / name).unlink()
    return path / source


def accelerate(path: Path) -> Path:
    saved(path / "checkpoint_0" / "scheduler.bin", {})
    shutil.copytree(OTHERS / "megatron_fsdp", path / "checkpoint_0" / "pytorch_model_fsdp_0")
    return path / "checkpoint_0"


def tensor_parallel(path: Path) -> Path:
    return saved(copied(path, "zero1") / "global_step3" / "mp_rank_01_model_states.pt", {}).parents[1]


def without_frozen(path: Path) -> Path:
    """As ``save_checkpoint(exclude_frozen_parameters=True)`` may leave it."""
    for file in copied(path, "zero3").glob("*/*model_states.pt"):
        saved(file, {**torch.load(file, weights_only=True), "frozen_param_shapes": None})
    return path / "zero3"


ZERO3_FILE = OTHERS / "zero3/global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt"
RANK1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "two models": (
        lambda path: saved(path / "it.pt", {"teacher": OTHER, "student": STATE}),
        r"'teacher' \(9 tensors\), 'student' \(9 tensors\); choose one: --key student",
    ),
    "a file of ZeRO-3": (lambda path: Path(shutil.copy(ZERO3_FILE, path)), r"optim_states\.pt; pass their folder"),
    "without numbers": (
        lambda path: saved(path / "it.pt", {"model": {name: torch.empty(0) for name in STATE}}),
        "all 9 tensors are empty",
    ),
    "a rank is missing": (lambda path: copied(path, "zero2", RANK1), "files of 2 ranks, found 1"),
    "frozen weights are missing": (without_frozen, r"no file has the numbers of 3\.weight"),
    "tensor parallel": (tensor_parallel, r"zero_to_fp32\.py"),
    "Accelerate's folder": (
        accelerate,
        r"\(with pytorch_model_fsdp_0, .*\) is not .*pass one of those in it: .*pytorch_model_fsdp",
    ),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("what", REFUSED)
def test_is_refused(tmp_path: Path, what: str) -> None:
    make, text = REFUSED[what]
    with pytest.raises(CheckpointError, match=text):
        import_checkpoint(make(tmp_path), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    if make is accelerate:
        with pytest.raises(CheckpointError, match=text):
            loaded(tmp_path / "checkpoint_0")


def loaded(path: Path, *, optimizer: bool = False, **options: Any) -> tuple[dict[str, Any], Any]:
    model = fsshard.wrap(build(2), backend="none")
    its = fsshard.build_optimizer(model, torch.optim.AdamW, groups(model), lr=5.0) if optimizer else None
    rest = fsshard.load(path, model, its, **options)
    return model.state_dict(), its.state_dict() if its else rest.state


@pytest.mark.usefixtures("alone")
def test_one_of_several(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path / "it.pt", {"nets": {"teacher": OTHER, "student": STATE}, "step": 3})
    with pytest.raises(CheckpointError, match=r"several.*key='nets\.student' in code"):
        loaded(path)
    with pytest.raises(CheckpointError, match=r"one of its state dicts: 'nets\.teacher', .*; got 'pupil'"):
        loaded(path, key="pupil")
    with pytest.raises(ConfigurationError, match="key= is an option and takes text"):
        loaded(path, key=3)
    assert same(STATE, loaded(path, key="nets.student")[0])
    ours = import_checkpoint(path, tmp_path / "ours", key="nets.student")
    with pytest.raises(ConfigurationError, match="key= goes with another program's"):
        loaded(ours, key="student")
    state, rest = loaded(ours)
    assert same(STATE, state) and same(OTHER, rest["nets"]["teacher"])
    both = {f"teacher.{name}": value for name, value in OTHER.items()}
    both |= {f"student.{name}": value for name, value in STATE.items()}
    path = saved(tmp_path / "flat.pt", {"state_dict": both})
    assert same(STATE, loaded(path, key="state_dict.student")[0])
    assert "of 18 values of 'state_dict', 9 are read" in caplog.text
    path = saved(tmp_path / "named.pt", {"model": STATE, "ema": OTHER})
    assert same(STATE, loaded(path)[0]) and "'model' is read as the model" in caplog.text


@pytest.mark.usefixtures("alone")
def test_names_that_all_begin_alike(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path / "it.pt", {"state_dict": {f"net.{name}": value for name, value in STATE.items()}})
    assert same(STATE, loaded(path)[0]) and "'net.', which begins every name, is taken off" in caplog.text
    import_checkpoint(path, tmp_path / "ours")
    assert "--key state_dict.net takes it off" in caplog.text
    assert same(STATE, loaded(import_checkpoint(path, tmp_path / "ours", key="state_dict.net"))[0])
    outer = nn.ModuleDict({"net": build(2)})
    fsshard.load(saved(path, STATE), fsshard.wrap(outer, backend="none"))
    assert same(STATE, outer["net"].state_dict())


@pytest.mark.usefixtures("alone")
def test_a_trainers_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    save_file(STATE, tmp_path / "checkpoint-2" / "model.safetensors")
    saved(tmp_path / "checkpoint-2" / "rng_state.pth", {})
    theirs = torch.load(stepped(tmp_path / "checkpoint-2" / "optimizer.pt"))
    state, optimizer = loaded(tmp_path / "checkpoint-2", optimizer=True)
    assert same(STATE, state) and same(theirs["state"][0], optimizer["state"]["0.weight"])
    assert "not read are rng_state.pth" in caplog.text
    with pytest.raises(CheckpointError, match=r"'optimizer' numbers its parameters.*--no-optimizer"):
        import_checkpoint(tmp_path / "checkpoint-2", tmp_path / "ours")


@pytest.mark.usefixtures("alone")
def test_our_own_export_comes_back(tmp_path: Path) -> None:
    model = fsshard.wrap(build(), backend="none")
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, groups(model))
    step(model, optimizer, 0, 0)
    fsshard.export(model, tmp_path / "it.pt", optimizer=optimizer)
    state, its = loaded(import_checkpoint(tmp_path / "it.pt", tmp_path / "ours"), optimizer=True)
    assert same(model.state_dict(), state) and same(optimizer.state_dict(), its)


class Theirs:
    """An object that no checkpoint of ours holds."""


class WindowsPath:
    """Pickled, it is a path of Windows, which cannot be made here."""

    def __reduce__(self) -> Any:
        return pathlib.WindowsPath, ("C:\\", "runs")


@pytest.mark.usefixtures("alone")
def test_paths_and_objects_beside_the_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Paths need no trust, of whatever system; other objects do, and are left out with a word."""
    callbacks = {"dirpath": PosixPath("/runs"), "best": WindowsPath()}
    monkeyed = {"state_dict": STATE, "callbacks": callbacks}
    path = saved(tmp_path / "it.pt", monkeyed)
    _, rest = loaded(import_checkpoint(path, tmp_path / "ours"))
    assert rest == {"callbacks": {"dirpath": "/runs", "best": "C:\\runs"}}
    saved(path, {**monkeyed, "hparams": Theirs()})
    with pytest.raises(CheckpointError, match=r"plain values \(tests\.checkpoint.*Theirs\).*--trust-pickle"):
        import_checkpoint(path, tmp_path / "other")
    _, rest = loaded(import_checkpoint(path, tmp_path / "other", trust_pickle=True))
    assert rest == {"callbacks": {"dirpath": "/runs", "best": "C:\\runs"}}
    assert "'hparams' is left out" in caplog.text


@pytest.mark.usefixtures("alone")
def test_a_hostile_dcp(tmp_path: Path) -> None:
    """Pieces outside of the directory."""
    copied(tmp_path, "megatron_fsdp")
    place = tmp_path / "megatron_fsdp" / ".metadata"
    place.write_bytes(place.read_bytes().replace(b"__0_0.distcp", b"../_0.distcp"))
    with pytest.raises(CorruptCheckpoint, match=r"pieces in '\.\./_0\.distcp'"):
        import_checkpoint(place.parent, tmp_path / "ours")
