"""The advice of fsshard/checkpoint, simulation and launching, followed on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import fsshard
from fsshard.checkpoint.inspecting import inspect
from fsshard.checkpoint.interop.importing import import_checkpoint
from tests.advice.following import cases, plain, refused


def trained(kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> tuple[Any, Any]:
    model = fsshard.wrap(plain(), backend="none")
    optimizer = fsshard.build_optimizer(model, kind)
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    return model, optimizer


class Adam(torch.optim.Adam):
    """Another class of the same name."""


def case_saving_and_loading(folder: Path) -> None:
    with refused("a model on one process takes fsshard.wrap(model, backend='none')"):
        fsshard.save(folder / "runs" / "step-1", plain())  # type: ignore[arg-type]
    model, optimizer = trained()
    fsshard.save(folder / "runs" / "step-1", model, optimizer)
    with refused("take one of them, such as what fsshard.latest("):
        fsshard.load(folder / "runs", model, optimizer)
    newest = fsshard.latest(folder / "runs")
    fsshard.load(newest, model, optimizer)
    other = fsshard.wrap(plain(), backend="none")
    its = fsshard.build_optimizer(other, Adam)
    with refused(", or pass strict=False if they are the same"):
        fsshard.load(newest, other, its)
    fsshard.load(newest, other, its, strict=False)
    fsshard.load(newest, other)
    before = numpy.random.get_state(legacy=False)
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(3))
        with refused("choice: save what you need of it as state, and pass rng=False"):
            fsshard.save(folder / "numbers", model)
        fsshard.save(folder / "numbers", model, rng=False, generator=3)
    finally:
        numpy.random.set_bit_generator(numpy.random.MT19937(1))
        numpy.random.set_state(before)


def case_files_of_others(folder: Path) -> None:
    file, ours = folder / "it.pt", folder / "ours"
    module = plain()
    theirs = torch.optim.Adam(module.parameters())
    module(torch.ones(2, 4)).square().mean().backward()
    theirs.step()
    torch.save({"model": module.state_dict(), "optimizer": theirs.state_dict()}, file)
    with refused("load it with fsshard.load, or convert it with "):
        inspect(file)
    with refused("knows which is which: load it with fsshard.load(path, model, optimizer) and save that, or leave "):
        import_checkpoint(file, ours)
    import_checkpoint(file, ours, optimizer=False)
    inspect(ours)
    model, optimizer = trained()
    fsshard.load(file, model, optimizer)
    fsshard.save(folder / "again", model, optimizer)
    assert torch.equal(model.state_dict()["0.weight"], module[0].weight)
    torch.save({"model": {"w": torch.eye(3).to_sparse()}}, file)
    with refused("only plain ones are read: save it as such (tensor.to_dense())"):
        import_checkpoint(file, folder / "no")
    torch.save({"model": {"w": torch.eye(3).to_sparse().to_dense()}}, file)
    assert import_checkpoint(file, folder / "plain")


def case_exports(folder: Path) -> None:
    class Counts(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"count": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    fsshard.save(folder / "counts", fsshard.wrap(Counts(2, 2), backend="none"))
    with refused("use format='torch'"):
        fsshard.export(folder / "counts", folder / "it.safetensors")
    fsshard.export(folder / "counts", folder / "it.pt", "torch")
    wide, narrow = nn.Linear(2, 2).to(torch.complex128), nn.Linear(2, 2).to(torch.complex128).to(torch.complex64)
    fsshard.save(folder / "wide", fsshard.wrap(wide, backend="none"))
    with refused("use format='torch', or convert the "):
        fsshard.export(folder / "wide", folder / "wide.safetensors")
    fsshard.export(folder / "wide", folder / "wide.pt", "torch")
    fsshard.save(folder / "narrow", fsshard.wrap(narrow, backend="none"))
    fsshard.export(folder / "narrow", folder / "narrow.safetensors")


def case_estimates(_: Path) -> None:
    with refused("pass it as it was before "):
        fsshard.estimate(torch.compile(plain(), backend="eager"), world_size=2, backend="ddp", batch=torch.ones(2, 4))


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__)
def test_advice_is_right(ranks: Any, case: Any, tmp_path: Path) -> None:
    ranks.run(case, 1, tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a machine without GPUs has not")
def test_a_machine_without_gpus(ranks: Any) -> None:
    for given in ({"process_group_backend": "nccl"}, {"device": "cuda"}):
        with refused("needs a CUDA device and none was found; use process_group_backend='gloo' and device='cpu'"):
            fsshard.init(**given)
    with refused("moves CUDA tensors only, but device='cpu'; use process_group_backend='gloo'"):
        fsshard.init(process_group_backend="nccl", device="cpu")
    with refused("needs a CUDA device and none was found; use process_group_backend='gloo'"):
        fsshard.launch(print, nprocs=1, process_group_backend="nccl")
    ranks.run(case_launched, 1)


def case_launched(_: object = None) -> None:
    assert fsshard.init(process_group_backend="gloo", device="cpu").device == torch.device("cpu")
    with refused("torch finds no CUDA device here; leave device out, or pass device='cpu'"):
        fsshard.wrap(plain(), device="cuda:0")
    fsshard.wrap(plain(), device="cpu")(torch.ones(1, 4)).sum().backward()
