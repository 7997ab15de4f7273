"""Where a rank is, read from the text of its stack: the collective that it waits in, and the user's line.

Two kinds of text tell it: the dump that ``faulthandler`` makes of a rank that does not answer, and the traceback of
a rank whose collective gave up by its own timeout. File and function names are those of torch 2.13 and FairScale
0.4.13.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["Place", "place_in_dump", "place_in_traceback", "timed_out"]

LIBRARY = str(Path(__file__).parent) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
STANDARD = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<"})
FOREIGN = ("/fairscale/", "/site-packages/_pytest/")

LONGEST_SOURCE = 100
TIMED_OUT = re.compile(r"timed out|wait timeout", re.IGNORECASE)
FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)', re.MULTILINE)
TRACEBACK = "Traceback (most recent call last)"

# Where ranks wait in code of ours, and what for; frames of the others are passed over.
OURS = tuple(f"{LIBRARY}backends{os.sep}{name}.py" for name in ("gloo_collectives", "shared_buckets", "shared_memory"))
OUR_NAMES = {"wait": "all_gather", "finish": "reduce_scatter", "average": "all_reduce"}

# Decorators and dispatchers between a collective and its caller.
WRAPPERS = {"wrapper", "__call__", "_fn", "decorate_context", "__torch_dispatch__", "__torch_function__", "inner"}
# torch 2.13 renamed them and kept the old names as aliases; everybody knows the old ones.
STANDARD_NAMES = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
BACKWARD = "_engine_run_backward"
REDUCER = "DDP's gradient reduction, in backward"  # in C++: the innermost Python frame is the backward itself

ENGINES = (
    ("/torch/distributed/fsdp/_fully_shard/", "FSDP2"),
    ("/torch/distributed/fsdp/", "FSDP"),
    ("/torch/nn/parallel/distributed.py", "DDP"),
    ("/fairscale/optim/", "FairScale OSS"),
    ("/fairscale/", "FairScale"),
    ("/fsshard/backends/fairscale", "FairScale"),
    ("/fsshard/backends/gloo_collectives.py", "FSDP2"),
    ("/fsshard/backends/shared_buckets.py", "DDP"),
)
STEPS = {
    "unshard": "unshard",
    "_unshard": "unshard",
    "wait_for_unshard": "unshard",
    "foreach_reduce": "gradient reduction",
    "post_backward": "gradient reduction",
    "_post_backward_hook": "gradient reduction",
    "_reduce_grad": "gradient reduction",
    "_backward_ends": "gradient reduction",
    "finish": "gradient reduction",
    "average": "gradient reduction",
    "clip_grad_norm_": "gradient norm",
    "clip_grad_norm": "gradient norm",
    "_sync_buffers": "broadcast of buffers",
    "_sync_module_states": "broadcast of the weights",
    "_sync_params_and_buffers": "broadcast of the weights",
    "_verify_param_shape_across_processes": "check of the shapes",
    "_broadcast_params": "broadcast of the weights",
}


class _Frame(NamedTuple):
    file: str
    line: int
    function: str

    def within(self, *folders: str) -> bool:
        return self.file.startswith(folders)


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        collective: the collective that it waits in, with the engine's step that called it, or "" if it is elsewhere.
        line: the innermost line of the user's own code, as ``file:number in function: source``.
        inner: the innermost line at all, where it is in no collective and no line is the user's.
    """

    collective: str = ""
    line: str = ""
    inner: str = ""

    def told(self, verb: str = "waits") -> str:
        """``"waits in all_reduce, at train.py:7 in step: dist.all_reduce(x)"``, or where else it is."""
        if not self.collective:
            inner = f"{self.inner}; no line of the user's is on its stack" if self.inner else "an unknown place"
            return f"{'is' if verb == 'waits' else 'was'} at {self.line or inner}"
        return f"{verb} in {self.collective}" + (f", at {self.line}" if self.line else "")


def timed_out(text: str) -> bool:
    """Whether an error's text says that a collective, or the store, waited too long."""
    return TIMED_OUT.search(text) is not None


def place_in_traceback(text: str) -> Place:
    """Where the rank was when the error arose that the traceback of a lost or late neighbour ends with."""
    parts = text.split(TRACEBACK)[1:]
    chosen = next((part for part in parts if timed_out(part)), parts[0] if parts else "")
    frames = _frames(chosen)[::-1]
    return _place(_collective(frames) or _hidden_collective(frames), frames)


def place_in_dump(text: str) -> Place:
    """Where the main thread is, from what ``faulthandler`` wrote about all threads."""
    threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE)
    main = next((part for part in threads if part.startswith("Current thread")), text)
    frames = _frames(main)
    collective = _collective(frames)
    if not collective and frames and frames[0].function == BACKWARD:
        # On a GPU, hooks run in the autograd engine's own threads, and the main thread waits for them.
        elsewhere = (_collective(_frames(part)) for part in threads if part is not main)
        collective = next(filter(None, elsewhere), REDUCER)
    return _place(collective, frames)


def _place(collective: str, frames: Sequence[_Frame]) -> Place:
    line = next((_told(frame) for frame in frames if _is_users(frame)), "")
    return Place(collective, line, _told(frames[0]) if frames and not line and not collective else "")


def _frames(text: str) -> list[_Frame]:
    return [_Frame(found["file"], int(found["line"]), found["function"]) for found in FRAME.finditer(text)]


def _collective(frames: Sequence[_Frame]) -> str:
    """The collective that the innermost frames (first) are in, or ""."""
    inside = list(_while_in_torch(frames))
    in_c10d = [i for i, f in inside if f.file.endswith("/distributed_c10d.py") and f.function not in WRAPPERS]
    others = [i for i, f in inside if f.within(f"{TORCH}distributed{os.sep}") and f.function not in WRAPPERS]
    ours = [i for i, f in inside if f.within(*OURS[:2]) and f.function in OUR_NAMES]
    if not in_c10d and not ours and not others:
        return ""
    depth = (in_c10d or ours or others)[0]
    function = frames[depth].function
    name = OUR_NAMES[function] if depth in ours else STANDARD_NAMES.get(function, function)
    notes = [_engine_step(frames[depth:])]
    if any(frame.function == BACKWARD for frame in frames[depth:]):
        notes.append("in backward")
    note = ", ".join(filter(None, notes))
    return f"{name} ({note})" if note else name


def _while_in_torch(frames: Sequence[_Frame]) -> Iterator[tuple[int, _Frame]]:
    """The innermost frames, up to the first that is neither torch's nor of our collectives.

    Beyond it other work is being done.
    """
    for number, frame in enumerate(frames):
        if not frame.within(TORCH, *OURS) or frame.function == BACKWARD:
            return
        yield number, frame


def _hidden_collective(frames: Sequence[_Frame]) -> str:
    """For a collective that failed without a frame of its own."""
    if not frames:
        return ""
    return REDUCER if frames[0].function == BACKWARD else "wait() of a collective started before"


def _engine_step(frames: Sequence[_Frame]) -> str:
    """``"FSDP2's unshard"``: the nearest engine among the callers, and what it was doing."""
    for part, engine in ENGINES:
        mine = [frame.function for frame in frames if part in frame.file]
        if mine:
            steps = [STEPS[function] for function in mine if function in STEPS]
            return f"{engine}'s {steps[0] if steps else mine[0]}"
    return ""


def _told(frame: _Frame) -> str:
    """``"train.py:7 in step: dist.all_reduce(x)"``."""
    source = linecache.getline(frame.file, frame.line).strip()
    source = source if len(source) <= LONGEST_SOURCE else source[: LONGEST_SOURCE - 3] + "..."
    name = os.path.relpath(frame.file) if frame.file.startswith(_here()) else frame.file
    return f"{name}:{frame.line} in {frame.function}" + (f": {source}" if source else "")


def _is_users(frame: _Frame) -> bool:
    if frame.within(TORCH, LIBRARY) or any(part in frame.file for part in FOREIGN):
        return False
    return "/site-packages/" in frame.file or not frame.within(*STANDARD)


def _here() -> str:
    try:
        return os.getcwd() + os.sep
    except OSError:
        return "\0"  # the folder is gone; no path starts with this
