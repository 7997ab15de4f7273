"""The process that simulates, so that nothing changes in the caller's; models are sent to it as shapes."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.errors import ConfigurationError, FsshardError, ModelError
from fsshard.launching.pool_worker import freeze_imports
from fsshard.launching.supervisor import Handed, handed, take_over
from fsshard.simulation.simulation import Job, Measured, simulate


def rebuilt(data: bytes) -> nn.Module:
    """Rebuild a model that was sent from another process, of fake tensors within a fake mode."""
    try:
        model: nn.Module = pickle.loads(data)
        return model
    except (AttributeError, ImportError) as error:
        # The text is such as "Can't get attribute 'Net' on <module '__main__'".
        raise ConfigurationError(
            f"the process that estimates cannot build the model: {error}; it cannot see what is defined in a "
            "notebook or at a prompt, so put the model into a module of its own and import it"
        ) from None


class _Packer(pickle.Pickler):
    """Pickles a tensor as its shape, or with its values as what it is on the CPU; ties between parameters stay."""

    def __init__(self, buffer: io.BytesIO, real: bool) -> None:
        super().__init__(buffer)
        self._real = real

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or (self._real and obj.device.type == "cpu"):
            return NotImplemented
        value = obj.detach().cpu() if self._real else (tuple(obj.shape), obj.stride(), obj.dtype)
        return _tensor_of, (value, obj.requires_grad, isinstance(obj, nn.Parameter))


def _tensor_of(value: Any, requires_grad: bool, is_parameter: bool) -> Tensor:
    if not isinstance(value, Tensor):
        shape, stride, dtype = value
        value = torch.empty_strided(shape, stride, dtype=dtype)
    return nn.Parameter(value, requires_grad) if is_parameter else value


def packed(model: nn.Module, *, real: bool) -> Callable[[], nn.Module]:
    """Return what rebuilds ``model`` in another process, without its values unless ``real``."""
    buffer = io.BytesIO()
    try:
        _Packer(buffer, real).dump(model)
    except Exception as error:
        raise ConfigurationError(_unsendable(type(model).__name__, error)) from error
    return functools.partial(rebuilt, buffer.getvalue())


class SimulatorDied(FsshardError):
    """The process is gone: nothing more can be asked."""


class Simulator(ProcessPoolExecutor):
    """Context with a process of its own, for the user's call of ``function``; ``quiet``: without what ``wrap`` logs."""

    def __init__(self, function: str, *, quiet: bool = False) -> None:
        self._function = function
        arguments = (tuple(handed.values()), quiet)
        super().__init__(1, mp_context=get_context("spawn"), initializer=_prepare_process, initargs=arguments)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run ``function`` there; raise ConfigurationError if an argument cannot be sent, SimulatorDied if it dies."""
        try:
            pickle.dumps(arguments)
        except Exception as error:
            raise ConfigurationError(_unsendable("the recipe, or an argument,", error)) from error
        try:
            return self.submit(function, *arguments).result()
        except BrokenProcessPool as error:
            raise SimulatorDied(
                "the process that simulates has died. It imports the script again, so put what calls "
                f'{self._function} under `if __name__ == "__main__":`; and it does not have what is defined in a '
                "notebook or at a prompt, so put the model and its loss into a module of their own and import them"
            ) from error


def _unsendable(what: str, error: BaseException) -> str:
    return (
        f"{what} cannot be sent to the process that estimates ({type(error).__name__}: {error}); give a recipe by "
        "name, 'module:function', or define everything that it uses at the top level of a module"
    )


def simulate_all(jobs: Sequence[Job], progress: Callable[[int, int], None] | None = None) -> list[Measured]:
    """Run the jobs one after the other, in a process of their own; raise the first error."""
    measured: list[Measured] = []
    with Simulator("fsshard.estimate") as simulator:
        for job in jobs:
            if progress is not None:
                progress(len(measured), len(jobs))
            measured.append(simulator.ask(run_job, job))
    return measured


def _prepare_process(handed_on: Handed, quiet: bool) -> None:
    take_over(handed_on)
    # Nothing here needs a GPU, and a context alone takes memory there.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # FSDP1 checks by addresses whether somebody else has changed a unit's memory, and fake tensors have none: "the
    # unsharded flat parameter should be allocated", where units stay gathered after the forward (torch 2.13).
    os.environ["FSDP_SKIP_WRITEBACK_CHECK"] = "1"
    torch.set_num_threads(1)
    # torch's, of engines and fake tensors; a real run gives those that matter. Not a filter: libraries set their own.
    warnings.showwarning = lambda *_, **__: None
    # A shape that does not fit is told by our error; torch 2.13 logs its traceback through fake tensors with it. And
    # FSDP1 logs that it leaves out what is said above.
    for name in ("torch._subclasses.fake_tensor", "torch.distributed.fsdp._flat_param"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if quiet:
        logging.getLogger("fsshard").setLevel(logging.ERROR)
    # What a model prints as it is made must not get into the JSON.
    sys.stdout = sys.stderr


def run_job(job: Job) -> Measured:
    """Simulate here, with errors that a user can understand."""
    # Each simulation begins with a garbage collection, which need not look at modules.
    freeze_imports()
    with errors_in_words(job):
        return simulate(job)


@contextlib.contextmanager
def errors_in_words(job: Job) -> Iterator[None]:
    """Context in which errors of a simulated step say what they mean for an estimate."""
    from fsshard.torch_private.fake_tensors import DataDependentOutputException, DynamicOutputShapeException

    try:
        yield
    except FsshardError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        asks = "its result as a Python number" if isinstance(error, DataDependentOutputException) else "their number"
        raise ModelError(
            f"the training step depends on the values of tensors, which an estimate does not have: {error.func} asks "
            f"for {asks}{_place(error)}. A step that branches on values has no single estimate; to run it on real "
            "tensors, as one rank, pass real=True (--real on the command line)"
        ) from None
    except Exception as error:
        hint = "" if job.real else "; if it needs real numbers, pass real=True (--real on the command line)"
        line = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        where = f"under backend {job.backend!r}{_place(error)}"
        raise ModelError(f"the training step fails {where}: {line}{hint}") from None


def _place(error: BaseException) -> str:
    """Return where the user's code was: the innermost frame outside of torch and fsshard."""
    skipped = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*skipped, "<")):
            return f", at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return ""
