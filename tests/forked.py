"""Processes that are started as the standard library spawns them, but from a copy of one that has imported torch.

A spawned rank imports torch and its engines for four seconds before it does anything. What a test shows of a rank's
failures, deaths and messages does not depend on that; tests of the start itself spawn.
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import logging
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection, context, forkserver, get_context, popen_forkserver, reduction, spawn, util
from multiprocessing import resource_tracker as trackers
from multiprocessing.context import SpawnProcess, set_spawning_popen
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fsshard.launching.pool import RankPool

PRELOADED = [
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint"),
    *("fsshard.launching.pool", "fsshard.wrapping", "pytest", "tests.forked", "tests.frozen"),
]
"""Modules that start no thread when they are imported, for threads do not survive a fork."""
OF_OTHERS = ("matplotlib.pyplot", "neuralop", "transformers.trainer", "transformers.models.t5.modeling_t5", "lightning")
"""Imported too where a session has many tests: each rank would, one after the other."""


class _Envelope:
    """A process object with the environment and the outputs that a spawned process would have."""

    def __init__(self, environment: dict[str, str], process: bytes) -> None:
        self._environment, self._process = environment, process
        self._outputs = [reduction.DupFd(number) for number in (1, 2)]

    def _bootstrap(self, parent_sentinel: int) -> NoReturn:
        for number, output in enumerate(self._outputs, 1):
            os.dup2(output.detach(), number)
        os.environ.clear()
        os.environ.update(self._environment)
        # The server that has made this process serves it too, which multiprocessing does not know (Python 3.11).
        vars(forkserver._forkserver)["ensure_running"] = lambda: None
        process = pickle.loads(self._process)
        code = process._bootstrap(parent_sentinel)
        atexit._run_exitfuncs()  # a forked process ends without
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Popen(popen_forkserver.Popen):
    """As its base, but with the environment of now."""

    def _launch(self, process_obj: Any) -> None:
        start, data = io.BytesIO(), io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(process_obj, data)
            reduction.dump(spawn.get_preparation_data(process_obj._name), start)
            reduction.dump(_Envelope(dict(os.environ), data.getvalue()), start)
        finally:
            set_spawning_popen(None)
        self.sentinel, writer = forkserver.connect_to_new_process(self._fds)
        self.finalizer = util.Finalize(self, util.close_fds, (os.dup(writer), self.sentinel))
        with open(writer, "wb", closefd=True) as pipe:
            pipe.write(start.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


def serve_from_here() -> None:
    """Fork the process that others are forked from, which has the imports of this one, while this has one thread."""
    server = forkserver._forkserver
    trackers.ensure_running()
    address = connection.arbitrary_address("AF_UNIX")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive, held = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if not process:
            try:
                os.close(held)  # else it would never see that this process has ended
                _forget_pytest()
                forkserver.main(listener.detach(), alive, PRELOADED)
            finally:
                os._exit(0)
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, held, process


def _forget_pytest() -> None:
    """Undo in a copy of pytest's process what pytest has set, so that it is as a new process with some imports."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")]
    faulthandler.disable()
    atexit._clear()
    logging.getLogger().handlers.clear()
    warnings.resetwarnings()
    for ignored in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", ignored)


_SPAWNS = SpawnProcess.__dict__["_Popen"]


@contextmanager
def forking(*, forks: bool = True) -> Iterator[None]:
    """Context manager: fork processes of the context "spawn" from one that has imported torch; or again not."""
    context._concrete_contexts["forkserver"].set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpawnProcess, "_Popen", staticmethod(_Popen) if forks else _SPAWNS)
        yield


class ForkedPool(RankPool):
    """A pool whose ranks may be lost: others are there at once."""

    def _start(self, count: int) -> None:
        with forking():
            super()._start(count)


class ForkedButFirst(ForkedPool):
    """Rank 0 is spawned, as users start theirs: it iterates over sets in another order than the others."""

    def _start(self, count: int) -> None:
        RankPool._start(self, 1)
        super()._start(count)


def run_script(
    script: Path, arguments: Sequence[str], environment: Mapping[str, str], timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """``python -W ignore script arguments``, and the ranks that it launches, forked."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        words = [str(script), *arguments]
        with forking():
            process = get_context("spawn").Process(target=_script, args=(words, folder))
            process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(words, timeout)
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(words, process.exitcode, out, err)


def run_module(
    name: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """``python -W ignore -m name arguments`` in a folder, and the ranks that it launches, forked."""
    script = folder / "run_module.py"
    script.write_text(
        f"import os, runpy, sys\nos.chdir({str(folder)!r})\nsys.argv = {[name, *arguments]!r}\n"
        f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)\n"
    )
    return run_script(script, [], environment)


def _script(words: list[str], folder: str) -> None:
    """In a process of its own."""
    for number, name in ((1, "out"), (2, "err")):
        with open(Path(folder, name), "w") as file:
            os.dup2(file.fileno(), number)
    warnings.simplefilter("ignore")
    served = ("fairscale", "fsshard.compat", "fsshard.backends.fairscale_patched")  # the script's redirect comes first
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith(served)]
    for name in [name for name in sys.modules if name.startswith(served)]:
        del sys.modules[name]
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    main = types.ModuleType("__main__")
    main.__file__ = words[0]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # by which its ranks know it
    with forking():
        exec(compile(Path(words[0]).read_text(), words[0], "exec"), vars(main))
