"""Reads from a stack where a rank is: the collective in which it waits, and the user's line.

File and function names are those of torch 2.13 and FairScale 0.4.13.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch

LIBRARY = str(Path(__file__).parents[1]) + os.sep
GLOO = str(Path(__file__).parent / "gloo") + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
DDP = "/torch/nn/parallel/distributed.py"
# Each backward goes through a function of this file into C++.
BACKWARD = f"{TORCH}autograd{os.sep}graph.py"
STANDARD = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<"})
FOREIGN = ("/site-packages/_pytest/", "/fairscale/")
LONGEST_SOURCE = 100
TIMED_OUT = re.compile(r"timed out|wait timeout", re.IGNORECASE)
FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)', re.MULTILINE)
TRACEBACK = "Traceback (most recent call last)"

# Decorators and dispatchers between a collective and its caller.
WRAPPERS = {"wrapper", "__call__", "_fn", "decorate_context", "__torch_dispatch__", "__torch_function__", "inner"}
# torch 2.13 renamed them and kept the old names as aliases; everybody knows the old ones.
STANDARD_NAMES = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
IN_BACKWARD = "a collective in backward"
# One whose wait() was called, or in which another one is stuck.
EARLIER = "an earlier collective"


class _StackFrame(NamedTuple):
    file: str
    line: int
    function: str

    def within(self, *folders: str) -> bool:
        return self.file.startswith(folders)


@dataclass(frozen=True)
class StackLocation:
    """The place in the code where a rank is."""

    # The collective that it waits in, or "" if it is elsewhere.
    collective: str = ""
    # The innermost line of the user's own code, as "file:number in function: source".
    line: str = ""
    # The innermost line at all, where it is in no collective and no line is the user's.
    inner: str = ""

    @property
    def may_compute(self) -> bool:
        """Return whether a rank there may as well be computing, since a backward has no frames of its own."""
        return self.collective == IN_BACKWARD

    def told(self, verb: str = "waits") -> str:
        """Say ``"waits in all_reduce, at train.py:7 in step: dist.all_reduce(x)"``, or where else it is."""
        if self.collective:
            preposition = "for" if self.collective == EARLIER else "in"
            line = f", at {self.line}" if self.line else ""
            return f"{verb} {preposition} {self.collective}{line}"
        was = "is" if verb == "waits" else "was"
        if self.line:
            return f"{was} at {self.line}"
        if self.inner:
            return f"{was} at {self.inner}; no line of the user's is on its stack"
        return f"{was} at an unknown place"


def timed_out(text: str) -> bool:
    """Tell whether an error's text says that a collective, or the store, waited too long."""
    return TIMED_OUT.search(text) is not None


def location_in_traceback(text: str) -> StackLocation:
    """Return where the rank was when the error arose that the traceback of a lost or late neighbour ends with."""
    parts = text.split(TRACEBACK)[1:]
    frames = []
    if parts:
        late = next(filter(timed_out, parts), parts[0])
        frames = _frames(late)[::-1]
    collective = _collective(frames)
    if not collective and frames:
        # One that was started before has no frame of its own.
        collective = IN_BACKWARD if _in_backward(frames[0]) else EARLIER
    return _place(collective, frames)


def location_in_dump(text: str) -> StackLocation:
    """Return where the main thread is, from what ``faulthandler`` wrote about all threads."""
    threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE)
    # Where one of gloo's threads aborts, none of Python's is the current one. The main one comes last.
    current = (part for part in threads if part.startswith("Current thread"))
    main = next(current, threads[-1])
    return _located(_frames(main), [_frames(part) for part in threads if part is not main])


def location_of_this_rank() -> StackLocation:
    """Return where the main thread of this process is; asked by another thread."""
    stacks = {}
    for ident, innermost in sys._current_frames().items():
        frames = []
        for frame, line in traceback.walk_stack(innermost):
            # Between two lines of code a frame has none.
            frames.append(_StackFrame(frame.f_code.co_filename, line or 0, frame.f_code.co_name))
        stacks[ident] = frames
    main = stacks.pop(threading.main_thread().ident or 0, [])
    for thread in threading.enumerate():
        if thread.name.startswith("fsshard-"):
            stacks.pop(thread.ident or 0, None)
    return _located(main, stacks.values())


def _located(main: Sequence[_StackFrame], others: Iterable[Sequence[_StackFrame]]) -> StackLocation:
    collective = _collective(main)
    if not collective and main and _in_backward(main[0]):
        # On a GPU, hooks run in the autograd engine's own threads, and the main thread waits for them.
        collective = next(filter(None, map(_collective, others)), IN_BACKWARD)
    return _place(collective, main)


def _place(collective: str, frames: Sequence[_StackFrame]) -> StackLocation:
    for frame in frames:
        if _is_users(frame):
            return StackLocation(collective, _describe_frame(frame))
    if frames and not collective:
        return StackLocation(inner=_describe_frame(frames[0]))
    return StackLocation(collective)


def _frames(text: str) -> list[_StackFrame]:
    frames = []
    for match in FRAME.finditer(text):
        frames.append(_StackFrame(match["file"], int(match["line"]), match["function"]))
    return frames


def _collective(frames: Sequence[_StackFrame]) -> str:
    """Return the collective that the innermost frames (first) are in, or ""."""
    # Beyond the first frame that is neither torch's nor of our own collectives other work is being done.
    inside = list(takewhile(lambda frame: frame.within(TORCH, GLOO) and not _in_backward(frame), frames))
    in_c10d = []
    in_ours = []
    in_torch = []
    for depth, frame in enumerate(inside):
        if frame.function in WRAPPERS:
            continue
        if frame.file.endswith("/distributed_c10d.py"):
            in_c10d.append(depth)
        if frame.within(GLOO) and frame.function == "wait":
            in_ours.append(depth)
        if frame.within(f"{TORCH}distributed{os.sep}"):
            in_torch.append(depth)
    depths = in_c10d or in_ours or in_torch
    # DDP's broadcast has no frame of its own.
    if not depths and inside and inside[0].file.endswith(DDP):
        depths = [0]
    if not depths:
        return ""
    depth = depths[0]
    function = frames[depth].function
    name = STANDARD_NAMES.get(function, function)
    if depths is in_ours:
        name = "all_gather"
    if any(map(_in_backward, frames[depth:])):
        return f"{name} (in backward)"
    return name


def _in_backward(frame: _StackFrame) -> bool:
    # The innermost frame in Python while a backward runs in C++.
    return frame.file == BACKWARD


def _describe_frame(frame: _StackFrame) -> str:
    """Say ``"train.py:7 in step: dist.all_reduce(x)"``."""
    name = frame.file
    # The folder may be gone.
    with suppress(OSError):
        name = name.removeprefix(os.getcwd() + os.sep)
    text = f"{name}:{frame.line} in {frame.function}"
    source = linecache.getline(frame.file, frame.line).strip()
    if len(source) > LONGEST_SOURCE:
        source = source[: LONGEST_SOURCE - 3] + "..."
    if source:
        text = f"{text}: {source}"
    return text


def _is_users(frame: _StackFrame) -> bool:
    if frame.within(TORCH, LIBRARY) or any(part in frame.file for part in FOREIGN):
        return False
    return "/site-packages/" in frame.file or not frame.within(*STANDARD)
