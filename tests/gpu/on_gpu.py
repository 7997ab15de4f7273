"""Runs jobs of the CPU's tests on a GPU: tensors that their modules make are moved there, the library's stay.

Random numbers are drawn on the CPU, so that each job has the numbers that it has there.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import fsshard

TESTS = str(Path(__file__).parents[1])
OTHERS = (str(Path(fsshard.__file__).parent), str(Path(torch.optim.__file__).parent))
"""The library, and torch's optimizers, which count steps on the CPU."""


class Case(NamedTuple):
    """A job of a module of tests, and what it returns where all is right; an argument "FOLDER" is an empty folder."""

    job: Callable[..., Any]
    args: tuple[Any, ...] = ()
    expected: Any = None  # a value, or a function that tells from the result whether all is right

    def run(self, folder: Path) -> str:
        """Return what is wrong; nothing if all is right."""
        folder.mkdir(exist_ok=True)
        args = [folder if one == "FOLDER" else one for one in self.args]
        # torch numbers nodes of a graph by thread, and adds up gradients in that order. A derivative's graph is made in
        # the device's thread: sums of three and more would depend on what both threads have done before.
        with OnGpu(), torch.autograd.set_multithreading_enabled(False):
            found = self.job(*args)
        right = self.expected(found) if callable(self.expected) else found == self.expected
        return "" if right else f"{self.job.__name__} returned {found}"


class OnGpu(TorchFunctionMode):
    """Context in which factory functions that a module of tests has called give tensors on the current GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        settings = dict(kwargs or {})
        if func not in _device_constructors() or settings.get("device") is not None or not _asked_by_tests():
            return func(*args, **settings)
        trained = settings.pop("requires_grad", False)
        made = func(*args, **settings).cuda()
        return made.requires_grad_(trained) if trained else made


def _asked_by_tests() -> bool:
    """Return whether tests have called torch, or somebody who did for them, and not the library."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OTHERS):
            return False
        if file.startswith(TESTS):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def run_case(case: Case, folder: str) -> str:
    """Run a case on this rank of a job over nccl."""
    return case.run(Path(folder))


def run_cases(context: Any, cases: Mapping[str, Case], folder: str) -> None:
    """Run cases on ranks over gloo that share the first GPU; each rank notes what is wrong in ``folder/name.rank``.

    Where one raises, ranks may be in different collectives: the job ends.
    """
    torch.cuda.set_device(0)
    for name, case in cases.items():
        note = Path(folder) / f"{name}.{context.rank}"
        try:
            note.write_text(case.run(Path(folder) / f"files of {name}"))
        except Exception as error:
            lines = "".join(traceback.format_tb(error.__traceback__)[-3:])
            note.write_text(f"{type(error).__name__}: {error}\n{lines}")
            raise


def run_on_shared_gpu(cases: Mapping[str, Case], ranks: int, folder: Path) -> dict[str, str]:
    """Return by name what is wrong with each case, on ranks over gloo that share a GPU.

    Ranks that have failed in a case are started anew for the next ones.
    """
    left, found = dict(cases), dict[str, str]()
    while left:
        lost = ""
        try:
            fsshard.launch(run_cases, nprocs=ranks, args=(left, str(folder)), process_group_backend="gloo", timeout=60)
        except fsshard.RankFailed as error:
            lost = str(error)
        done = [name for name in left if (folder / f"{name}.0").exists() or (folder / f"{name}.1").exists()]
        for name in done or list(left)[:1]:
            notes = [note.read_text() for rank in range(ranks) if (note := folder / f"{name}.{rank}").exists()]
            found[name] = "; ".join(filter(None, notes)) or ("" if len(notes) == ranks else lost or "not run")
            del left[name]
    return found
