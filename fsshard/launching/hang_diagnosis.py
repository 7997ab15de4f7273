"""Reads from a stack's text where a rank is: the collective in which it waits, and the user's line.

Two kinds of text tell it: the dump that ``faulthandler`` makes of a rank that does not answer, and the traceback of
a rank whose collective gave up by its own timeout. File and function names are those of torch 2.13 and FairScale
0.4.13.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from fsshard.comm.whereabouts import read_stacks

__all__ = [
    "STEPS_BY_COLLECTIVE",
    "EngineFrames",
    "StackLocation",
    "ask_for_frames",
    "location_in_dump",
    "location_in_traceback",
    "may_compute",
    "timed_out",
]

LIBRARY = str(Path(__file__).parents[1]) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
BACKWARD = f"{TORCH}autograd{os.sep}graph.py"  # each backward goes through a function of this file into C++
STANDARD = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<"})
FOREIGN = "/site-packages/_pytest/"

LONGEST_SOURCE = 100
TIMED_OUT = re.compile(r"timed out|wait timeout", re.IGNORECASE)
FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)', re.MULTILINE)
TRACEBACK = "Traceback (most recent call last)"

# Decorators and dispatchers between a collective and its caller.
WRAPPERS = {"wrapper", "__call__", "_fn", "decorate_context", "__torch_dispatch__", "__torch_function__", "inner"}
# torch 2.13 renamed them and kept the old names as aliases; everybody knows the old ones.
STANDARD_NAMES = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}

STEPS_BY_COLLECTIVE = {
    **dict.fromkeys(("all_gather", "all_gather_into_tensor"), "unshard"),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_tensor", "all_reduce"), "gradient reduction"),
    "broadcast": "broadcast of the weights",
}
"""What an engine that shards parameters does by each collective."""


@dataclass(frozen=True, kw_only=True)
class EngineFrames:
    """How an engine is recognised on a stack.

    Attributes:
        parts: (part of a file's path, what the engine is called there), the one that tells most first. What lies there
            is no code of the user's.
        steps: function, or collective where no function of the engine's says it -> what the engine does in it.
        waits: end of a file's path, outside of torch -> those of its functions that wait in a collective, and in which
            one. Other frames of these files are helpers, and are passed over on the way to the collective.
        in_backward: what it waits for in C++, where the innermost Python frame is the backward itself; or "".
    """

    parts: tuple[tuple[str, str], ...] = ()
    steps: Mapping[str, str] = field(default_factory=dict)
    waits: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    in_backward: str = ""


_known_frames: Callable[[], Iterable[EngineFrames]] = tuple


def ask_for_frames(source: Callable[[], Iterable[EngineFrames]]) -> None:
    """Let ``source`` say how engines are recognised on a stack; it is asked only when there is a stack to read."""
    global _known_frames
    _known_frames = source


class _StackFrame(NamedTuple):
    file: str
    line: int
    function: str

    def within(self, *folders: str) -> bool:
        return self.file.startswith(folders)


@dataclass(frozen=True)
class StackLocation:
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


def location_in_traceback(text: str) -> StackLocation:
    """Where the rank was when the error arose that the traceback of a lost or late neighbour ends with."""
    parts = text.split(TRACEBACK)[1:]
    chosen = next((part for part in parts if timed_out(part)), parts[0] if parts else "")
    frames = _frames(chosen)[::-1]
    return _place(_collective(frames) or _hidden_collective(frames), frames)


def location_in_dump(text: str) -> StackLocation:
    """Where the main thread is, from what ``faulthandler`` wrote about all threads."""
    threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE)
    # Where one of gloo's threads aborts, none of Python's is the current one, and the main one comes last.
    main = next((part for part in threads if part.startswith("Current thread")), threads[-1])
    frames = _frames(main)
    collective = _collective(frames)
    if not collective and frames and _in_backward(frames[0]):
        # On a GPU, hooks run in the autograd engine's own threads, and the main thread waits for them.
        elsewhere = (_collective(_frames(part)) for part in threads if part is not main)
        collective = next(filter(None, elsewhere), _wait_in_backward())
    return _place(collective, frames)


def _place(collective: str, frames: Sequence[_StackFrame]) -> StackLocation:
    line = next((_describe_frame(frame) for frame in frames if _is_users(frame)), "")
    return StackLocation(collective, line, _describe_frame(frames[0]) if frames and not line and not collective else "")


def _frames(text: str) -> list[_StackFrame]:
    return [_StackFrame(found["file"], int(found["line"]), found["function"]) for found in FRAME.finditer(text)]


def _collective(frames: Sequence[_StackFrame]) -> str:
    """The collective that the innermost frames (first) are in, or ""."""
    engines = list(_known_frames())
    inside = list(_while_in_torch(frames, engines))
    in_c10d = [i for i, f in inside if f.file.endswith("/distributed_c10d.py") and f.function not in WRAPPERS]
    others = [i for i, f in inside if f.within(f"{TORCH}distributed{os.sep}") and f.function not in WRAPPERS]
    ours = [i for i, f in inside if f.function in (_waits(f, engines) or ())]
    if not in_c10d and not ours and not others:
        return ""
    depth = (in_c10d or ours or others)[0]
    function = frames[depth].function
    named = _waits(frames[depth], engines) if depth in ours else STANDARD_NAMES
    name = (named or {}).get(function, function)
    notes = [_engine_step(name, frames[depth:], engines)]
    if any(map(_in_backward, frames[depth:])):
        notes.append("in backward")
    note = ", ".join(filter(None, notes))
    return f"{name} ({note})" if note else name


def _while_in_torch(
    frames: Sequence[_StackFrame], engines: Sequence[EngineFrames]
) -> Iterator[tuple[int, _StackFrame]]:
    """The innermost frames, up to the first that is neither torch's nor of an engine's own collectives.

    Beyond it other work is being done.
    """
    for number, frame in enumerate(frames):
        mine = frame.within(TORCH) or _waits(frame, engines) is not None
        if not mine or _in_backward(frame):
            return
        yield number, frame


def _waits(frame: _StackFrame, engines: Sequence[EngineFrames]) -> Mapping[str, str] | None:
    """Which functions of the frame's file wait in a collective; None where the file is no engine's."""
    found = (functions for engine in engines for file, functions in engine.waits.items() if frame.file.endswith(file))
    return next(found, None)


def _hidden_collective(frames: Sequence[_StackFrame]) -> str:
    """For a collective that failed without a frame of its own."""
    if not frames:
        return ""
    return _wait_in_backward() if _in_backward(frames[0]) else "wait() of a collective started before"


def _wait_in_backward() -> str:
    """What a rank can wait for without a frame that says so."""
    return next((engine.in_backward for engine in _known_frames() if engine.in_backward), "a collective in backward")


def may_compute(location: StackLocation) -> bool:
    """Whether a rank there may as well be computing, since a backward has no frames of its own."""
    return location.collective == _wait_in_backward()


def _whether_and_where(dump: str) -> tuple[bool, str]:
    location = location_in_dump(dump)
    # On the CPU a main thread that computes in a backward does not stand still.
    computes = may_compute(location) and torch.cuda.is_initialized()
    return bool(location.collective) and not computes, location.told()


read_stacks(_whether_and_where)


def _in_backward(frame: _StackFrame) -> bool:
    """Tell whether a frame is the innermost in Python while a backward runs in C++."""
    return frame.file == BACKWARD


def _engine_step(collective: str, frames: Sequence[_StackFrame], engines: Sequence[EngineFrames]) -> str:
    """``"FSDP2's unshard"``: the nearest engine among the callers, and what it was doing."""
    near = next((engine for frame in frames if (engine := _engine_of(frame, engines)) is not None), None)
    for part, name in near.parts if near is not None else ():
        mine = [frame.function for frame in frames if part in frame.file]
        if mine:
            assert near is not None
            steps = [near.steps[function] for function in mine if function in near.steps]
            return f"{name}'s {steps[0] if steps else near.steps.get(collective, mine[0])}"
    return ""


def _engine_of(frame: _StackFrame, engines: Sequence[EngineFrames]) -> EngineFrames | None:
    """The engine that a frame belongs to: where folders lie in each other, the innermost one's."""
    found = [(len(part), engine) for engine in engines for part, _ in engine.parts if part in frame.file]
    return max(found, key=lambda one: one[0])[1] if found else None


def _describe_frame(frame: _StackFrame) -> str:
    """``"train.py:7 in step: dist.all_reduce(x)"``."""
    source = linecache.getline(frame.file, frame.line).strip()
    source = source if len(source) <= LONGEST_SOURCE else source[: LONGEST_SOURCE - 3] + "..."
    name = os.path.relpath(frame.file) if frame.file.startswith(_here()) else frame.file
    return f"{name}:{frame.line} in {frame.function}" + (f": {source}" if source else "")


def _is_users(frame: _StackFrame) -> bool:
    if frame.within(TORCH, LIBRARY) or FOREIGN in frame.file or _engine_of(frame, list(_known_frames())) is not None:
        return False
    return "/site-packages/" in frame.file or not frame.within(*STANDARD)


def _here() -> str:
    try:
        return os.getcwd() + os.sep
    except OSError:
        return "\0"  # the folder is gone; no path starts with this
