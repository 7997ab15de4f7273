"""Where a rank is, read from the text of its stack. Real hangs are in test_ranks.py."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch

from fsshard.comm import gloo
from fsshard.comm.stacks import StackLocation, location_in_dump, location_in_traceback, location_of_this_rank, timed_out

TORCH = Path(torch.__file__).parent
FOLDER = Path(gloo.__file__).parent
C10D = f"{TORCH}/distributed/distributed_c10d.py"
WRAPPER = (f"{TORCH}/distributed/c10d_logger.py", "wrapper")
BACKWARD = (f"{TORCH}/autograd/graph.py", "_engine_run_backward")
USER = ("/home/somebody/train.py", "step")
GLOO = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"

CASES = {
    "all_reduce": [USER, WRAPPER, (C10D, "all_reduce")],
    "all_gather_into_tensor": [USER, WRAPPER, (C10D, "all_gather_single")],
    "broadcast": [
        USER,
        (f"{TORCH}/optim/optimizer.py", "wrapper"),
        ("/lib/site-packages/fairscale/optim/oss.py", "_broadcast_params"),
        WRAPPER,
        (C10D, "broadcast"),
    ],
    "reduce_scatter_tensor (in backward)": [
        USER,
        BACKWARD,
        (f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "post_backward"),
        (f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_reduce"),
        (f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "__call__"),
        WRAPPER,
        (C10D, "reduce_scatter_single"),
    ],
    "_distributed_broadcast_coalesced": [
        USER,
        (f"{TORCH}/nn/parallel/distributed.py", "forward"),
        (f"{TORCH}/nn/parallel/distributed.py", "_distributed_broadcast_coalesced"),
    ],
    "a collective in backward": [USER, (f"{TORCH}/_tensor.py", "backward"), BACKWARD],
    "all_gather": [
        USER,
        (f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "wait_for_unshard"),
        (f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_all_gather_copy_out"),
        (f"{FOLDER}/collectives.py", "wait"),
    ],
    "wait_tensor": [
        USER,
        (f"{TORCH}/distributed/_functional_collectives.py", "wait_tensor"),
        (f"{TORCH}/_ops.py", "__call__"),
    ],
}
"""The collective, and the frames that say so, outermost first."""


def dumped(frames: list[tuple[str, str]], thread: str = "Current thread 0x01") -> str:
    lines = [f'  File "{file}", line 7 in {function}' for file, function in reversed(frames)]
    return "\n".join([f"{thread} (most recent call first):", *lines, ""])


def traced(frames: list[tuple[str, str]], end: str = GLOO) -> str:
    lines = [f'  File "{file}", line 7, in {function}\n    some(source)' for file, function in frames]
    return "\n".join(["Traceback (most recent call last):", *lines, end, ""])


@pytest.mark.parametrize("collective", CASES)
def test_both_kinds_of_text_name_the_collective(collective: str) -> None:
    watcher = dumped([("/lib/python3/threading.py", "_bootstrap")], "Thread 0x02")
    for place in (
        location_in_dump(watcher + "\n" + dumped(CASES[collective])),
        location_in_traceback(traced(CASES[collective])),
    ):
        assert place == StackLocation(collective, "/home/somebody/train.py:7 in step")


def test_work_that_a_collective_has_called_is_no_wait() -> None:
    frames = [(C10D, "all_reduce"), ("/home/somebody/hooks.py", "slow")]
    assert location_in_dump(dumped(frames)) == StackLocation("", "/home/somebody/hooks.py:7 in slow")


def test_on_a_gpu_hooks_wait_in_a_thread_of_the_engine() -> None:
    hook = [(f"{TORCH}/distributed/fsdp/_runtime_utils.py", "_post_backward_hook"), (C10D, "reduce_scatter_single")]
    text = dumped(hook, "Thread 0x02") + "\n" + dumped([USER, BACKWARD])
    assert location_in_dump(text).collective == "reduce_scatter_tensor"


def test_a_collective_without_a_frame_of_its_own() -> None:
    assert location_in_traceback(traced([USER])).collective == "an earlier collective"
    assert location_in_dump(dumped([USER])).collective == ""


def test_the_part_of_a_chain_that_timed_out_is_read() -> None:
    text = "\n".join(
        [traced([("/other.py", "load")], "KeyError: 'x'"), traced([USER, (C10D, "barrier")]), traced([USER], "E")]
    )
    assert location_in_traceback(text) == StackLocation("barrier", "/home/somebody/train.py:7 in step")


def test_the_users_line_comes_with_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "train.py"
    source.write_text("\n" * 6 + "    dist.all_reduce(x)" + "  # far" * 20 + "\n")
    monkeypatch.chdir(tmp_path)
    line = location_in_dump(dumped([(str(source), "step")])).line
    assert line.startswith("train.py:7 in step: dist.all_reduce(x)  # far") and line.endswith("...")


def test_a_line_of_torch_is_not_taken_for_the_users() -> None:
    assert location_in_dump(dumped([(C10D, "all_reduce")])).told() == "waits in all_reduce"
    place = location_in_dump(dumped([(f"{TORCH}/nn/modules/linear.py", "forward")]))
    assert place.line == "" and place.told().startswith("is at ") and place.told("waited").startswith("was at ")
    assert "linear.py:7 in forward" in place.told() and "no line of the user's is on its stack" in place.told()


def test_nothing_is_made_of_nothing() -> None:
    assert location_in_dump("") == location_in_traceback("no traceback at all") == StackLocation()
    assert StackLocation().told() == "is at an unknown place"
    assert timed_out(GLOO) and timed_out("DistStoreError: wait timeout after 500ms") and not timed_out("reset by peer")


def test_a_frame_between_two_lines_is_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = traceback.walk_stack
    monkeypatch.setattr(traceback, "walk_stack", lambda frame: [(f, None) for f, _ in walk(frame)])
    assert ":0 in " in location_of_this_rank().line
