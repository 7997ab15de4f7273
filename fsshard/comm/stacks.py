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
BACKWARD = f"{TORCH}autograd{os.sep}graph.py"  # each backward goes through a function of this file into C++
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
EARLIER = "an earlier collective"  # whose wait() was called, or in which another one is stuck


class _StackFrame(NamedTuple):
    file: str
    line: int
    function: str

    def within(self, *folders: str) -> bool:
        return self.file.startswith(folders)


@dataclass(frozen=True)
class StackLocation:
    """The place in the code where a rank is."""

    collective: str = ""  # that it waits in, or "" if it is elsewhere
    line: str = ""  # the innermost line of the user's own code, as "file:number in function: source"
    inner: str = ""  # the innermost line at all, where it is in no collective and no line is the user's

    @property
    def may_compute(self) -> bool:
        """Return whether a rank there may as well be computing, since a backward has no frames of its own."""
        return self.collective == IN_BACKWARD

    def told(self, verb: str = "waits") -> str:
        """Say ``"waits in all_reduce, at train.py:7 in step: dist.all_reduce(x)"``, or where else it is."""
        if not self.collective:
            inner = f"{self.inner}; no line of the user's is on its stack" if self.inner else "an unknown place"
            return f"{'is' if verb == 'waits' else 'was'} at {self.line or inner}"
        preposition = "for" if self.collective == EARLIER else "in"
        return f"{verb} {preposition} {self.collective}" + (f", at {self.line}" if self.line else "")


def timed_out(text: str) -> bool:
    """Tell whether an error's text says that a collective, or the store, waited too long."""
    return TIMED_OUT.search(text) is not None


def location_in_traceback(text: str) -> StackLocation:
    """Return where the rank was when the error arose that the traceback of a lost or late neighbour ends with."""
    parts = text.split(TRACEBACK)[1:]
    chosen = next((part for part in parts if timed_out(part)), parts[0] if parts else "")
    frames = _frames(chosen)[::-1]
    # One that was started before has no frame of its own.
    hidden = IN_BACKWARD if frames and _in_backward(frames[0]) else EARLIER
    return _place(_collective(frames) or (hidden if frames else ""), frames)


def location_in_dump(text: str) -> StackLocation:
    """Return where the main thread is, from what ``faulthandler`` wrote about all threads."""
    threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE)
    # Where one of gloo's threads aborts, none of Python's is the current one. The main one comes last.
    current = (part for part in threads if part.startswith("Current thread"))
    main = next(current, threads[-1])
    return _located(_frames(main), [_frames(part) for part in threads if part is not main])


def location_of_this_rank() -> StackLocation:
    """Return where the main thread of this process is; asked by another thread."""
    stacks = {  # between two lines of code a frame has none
        ident: [_StackFrame(f.f_code.co_filename, n or 0, f.f_code.co_name) for f, n in traceback.walk_stack(frame)]
        for ident, frame in sys._current_frames().items()
    }
    main = stacks.pop(threading.main_thread().ident or 0, [])
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith("fsshard-")}
    return _located(main, [frames for ident, frames in stacks.items() if ident not in ours])


def _located(main: Sequence[_StackFrame], others: Iterable[Sequence[_StackFrame]]) -> StackLocation:
    collective = _collective(main)
    if not collective and main and _in_backward(main[0]):
        # On a GPU, hooks run in the autograd engine's own threads, and the main thread waits for them.
        collective = next(filter(None, map(_collective, others)), IN_BACKWARD)
    return _place(collective, main)


def _place(collective: str, frames: Sequence[_StackFrame]) -> StackLocation:
    line = next((_describe_frame(frame) for frame in frames if _is_users(frame)), "")
    return StackLocation(collective, line, _describe_frame(frames[0]) if frames and not line and not collective else "")


def _frames(text: str) -> list[_StackFrame]:
    return [_StackFrame(found["file"], int(found["line"]), found["function"]) for found in FRAME.finditer(text)]


def _collective(frames: Sequence[_StackFrame]) -> str:
    """Return the collective that the innermost frames (first) are in, or ""."""
    # Beyond the first frame that is neither torch's nor of our own collectives other work is being done.
    inside = list(takewhile(lambda frame: frame.within(TORCH, GLOO) and not _in_backward(frame), frames))
    calls = [(depth, frame) for depth, frame in enumerate(inside) if frame.function not in WRAPPERS]
    in_c10d = [depth for depth, frame in calls if frame.file.endswith("/distributed_c10d.py")]
    in_ours = [depth for depth, frame in calls if frame.within(GLOO) and frame.function == "wait"]
    in_torch = [depth for depth, frame in calls if frame.within(f"{TORCH}distributed{os.sep}")]
    in_cpp = [0] if inside and inside[0].file.endswith(DDP) else []  # its broadcast has no frame of its own
    depths = in_c10d or in_ours or in_torch or in_cpp
    if not depths:
        return ""
    function = frames[depths[0]].function
    name = "all_gather" if depths is in_ours else STANDARD_NAMES.get(function, function)
    return f"{name} (in backward)" if any(map(_in_backward, frames[depths[0] :])) else name


def _in_backward(frame: _StackFrame) -> bool:
    return frame.file == BACKWARD  # the innermost in Python while a backward runs in C++


def _describe_frame(frame: _StackFrame) -> str:
    """Say ``"train.py:7 in step: dist.all_reduce(x)"``."""
    source = linecache.getline(frame.file, frame.line).strip()
    source = source if len(source) <= LONGEST_SOURCE else source[: LONGEST_SOURCE - 3] + "..."
    name = frame.file
    with suppress(OSError):  # the folder is gone
        name = name.removeprefix(os.getcwd() + os.sep)
    return f"{name}:{frame.line} in {frame.function}" + (f": {source}" if source else "")


def _is_users(frame: _StackFrame) -> bool:
    if frame.within(TORCH, LIBRARY) or any(part in frame.file for part in FOREIGN):
        return False
    return "/site-packages/" in frame.file or not frame.within(*STANDARD)
