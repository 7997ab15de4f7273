"""How ranks wait for each other, and find out who is elsewhere."""

from __future__ import annotations

import gc
import logging
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsshard.compat.fairscale.optim.grad_scaler import ShardedGradScaler
from fsshard.oss import collective_watch
from fsshard.oss.collective_watch import CollectiveWatch
from fsshard.oss.optimizer import OSS
from tests.oss.trainings import mlp, refusal

# ------------------------------------------------------------------------------------------------ works


class Ends:
    """A collective that ends right after a wait with a limit has run out."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.waits = error, 0

    def wait(self, limit: timedelta | None = None) -> None:
        self.waits += 1
        if limit is not None:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return True


def job_ends() -> list[Any]:
    watch = CollectiveWatch.of(dist.group.WORLD)
    work = Ends()
    watch.wait(work, "step()")
    found: list[Any] = [work.waits, watch.waited]
    with pytest.raises(RuntimeError, match="peer is gone"):
        watch.wait(Ends(RuntimeError("peer is gone")), "step()")
    return [*found, watch.waited]


def test_a_collective_that_ends_between_two_looks_is_no_failure(ranks: Any) -> None:
    assert ranks.run(job_ends, 2) == [[2, 1, 1]] * 2


# ------------------------------------------------------------------------------------------------ late, or elsewhere


def stepped(group: Any = None) -> tuple[nn.Module, Any]:
    model = mlp()
    optimizer = OSS(model.parameters(), lr=0.1, momentum=0.9, group=group)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer


class Note(logging.Handler):
    """Keeps messages, and lets the other rank go on."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        dist.distributed_c10d._get_default_store().set("said", "1")


def job_late() -> Any:
    """Rank 1 comes when rank 0 has waited long enough to say so."""
    _, optimizer = stepped()
    note = Note()
    with mock.patch.object(collective_watch, "SAY_EVERY", 0.0):
        if dist.get_rank() == 0:
            logging.getLogger("fsshard").addHandler(note)
        else:
            dist.distributed_c10d._get_default_store().wait(["said"])
        found = refusal(lambda: optimizer.consolidate_state_dict(-1))
        logging.getLogger("fsshard").removeHandler(note)
    return found, len(optimizer.state_dict()["state"]), note.messages[:1]


def test_a_rank_that_is_late_is_waited_for(ranks: Any) -> None:
    (here, count, said), there = ranks.run(job_late, 2)
    assert here is None and count == 6 and there == (None, 6, [])
    assert said[0].startswith("consolidate_state_dict(-1) has waited") and said[0].endswith(
        "for rank 1 to call it as well"
    )


def job_gone() -> Any:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=50))
    _, optimizer = stepped(group)
    patience = optimizer._watch._patience
    if dist.get_rank() == 0:
        return patience, refusal(optimizer.consolidate_state_dict)
    dist.destroy_process_group(group)
    del optimizer, group
    gc.collect()
    return None


def test_a_rank_that_has_left_is_not_waited_for(ranks: Any) -> None:
    (patience, found), _ = ranks.run(job_gone, 2)
    assert patience == 50.0
    assert found[0] == "NotTogether" and "rank 1 ended, or left the process group, without it" in found[1]


def job_elsewhere(what: str) -> Any:
    """Rank 0 consolidates, rank 1 goes on; then both go on."""
    _, optimizer = stepped()
    scaler = ShardedGradScaler()
    scaler.scale(torch.ones(()))
    reduced = torch.ones(())
    calls = {
        "step": optimizer.step,
        "scaler": lambda: scaler.unscale_(optimizer),
        "reduction": lambda: optimizer._wait(dist.broadcast(reduced, 0, async_op=True), "forward()"),
    }
    found = refusal(optimizer.consolidate_state_dict if dist.get_rank() == 0 else calls[what])
    later = [refusal(call) for call in (optimizer.step, optimizer.consolidate_state_dict)]
    return found, later


@pytest.mark.parametrize("what", ["step", "scaler", "reduction"])
def test_ranks_that_are_out_of_step_do_not_go_on(ranks: Any, what: str) -> None:
    (here, later), (there, also) = ranks.run(job_elsewhere, 2, what)
    place = {"step": "step()", "scaler": "GradScaler.unscale_()", "reduction": "forward()"}[what]
    assert here[0] == there[0] == "NotTogether"
    assert f"rank 1 called {place}" in here[1] and f"rank 1 waits for it in {place}" in there[1]
    for name, text in [*later, *also]:
        assert name == "NotTogether" and "out of step: end the process group" in text


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")


def job_fails_on_one() -> Any:
    _, optimizer = stepped()
    if dist.get_rank() == 1:
        next(iter(optimizer.optim.state.values()))["handle"] = Uncopyable()
    return refusal(optimizer.consolidate_state_dict)


def test_a_state_that_cannot_be_collected_on_one_rank_is_told_to_all(ranks: Any) -> None:
    here, there = ranks.run(job_fails_on_one, 2)
    assert there == ("TypeError", "cannot be copied")
    assert here[0] == "NotTogether" and "and failed there: TypeError: cannot be copied" in here[1]
