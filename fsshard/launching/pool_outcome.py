"""Holds what became of a job, of the pool or of launch(), rank by rank, and picks the failure that tells most."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fsshard.comm.presence import UNEQUAL_CALLS
from fsshard.errors import RankFailed, RankHung
from fsshard.launching.failures import Failure, first_failure, unpack_error
from fsshard.launching.hang_diagnosis import (
    StackLocation,
    location_in_dump,
    location_in_traceback,
    may_compute,
    timed_out,
)

__all__ = ["JobOutcome", "with_stack"]


@dataclass
class JobOutcome:
    """What became of a job, rank by rank.

    Attributes:
        timeout: seconds that the job may take; once it is over, those for which its ranks were waited for.
    """

    world_size: int
    timeout: float
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)  # of those that did not answer

    def error(self) -> RankFailed | None:
        """The first real failure; else the rank that waited in vain; else the first echo of what nobody reported."""
        late = [f for f in self.failures.values() if f.consequence and timed_out(f.traceback)]
        real = [f for f in self.failures.values() if not f.consequence]
        if not real and (late or self.stacks):
            return self._hang(late)
        if not self.failures:
            return None
        failure = first_failure(self.failures.values())
        others = self._others(failure.rank)
        return RankFailed(failure.rank, failure.type_name, failure.message, failure.traceback, others)

    def error_of(self, rank: int) -> RankFailed | None:
        """The failure of one rank, whatever happened on the others."""
        failures = {rank: self.failures[rank]} if rank in self.failures else {}
        stacks = {rank: self.stacks[rank]} if rank in self.stacks else {}
        return JobOutcome(self.world_size, self.timeout, {}, failures, stacks).error()

    def cause(self, rank: int) -> BaseException | None:
        """The exception that the rank raised, where it can be pickled."""
        return unpack_error(self.failures[rank].pickled) if rank in self.failures else None

    def _hang(self, late: list[Failure]) -> RankHung:
        found = [(location_in_traceback(f.traceback), f.rank) for f in sorted(late, key=lambda f: f.time)]
        found += [(location_in_dump(text), rank) for rank, text in sorted(self.stacks.items())]
        place, rank = next((entry for entry in found if entry[0].collective), found[0])
        if rank in self.failures:
            message, trace = f"rank {rank} {place.told('waited')}, and gave up", self.failures[rank].traceback
        else:
            computing = ", unless it is still computing" if may_compute(place) else ""
            message = f"rank {rank} {place.told()} (no answer within {self.timeout:g} s{computing})"
            trace = self.stacks[rank]
        missing = self._missing(rank, place)
        told = f"{missing}; {message}. {UNEQUAL_CALLS}" if missing else message
        return RankHung(rank, place.collective, told, trace, self._others(rank))

    def _missing(self, waiting: int, place: StackLocation) -> str:
        """Name the ranks that never came to the collective that a rank waits in, and where the first of them is."""
        absent = []
        for rank in range(self.world_size) if place.collective else ():
            found = self._place(rank)
            if (
                rank != waiting
                and self._describe_rank(rank)
                and (found is None or found.collective != place.collective)
            ):
                absent.append((found is not None and bool(found.collective), rank))
        if not absent:
            return ""
        # One that is in no collective at all tells more than one that waits in another.
        first, *others = [rank for _, rank in sorted(absent)]
        more = f" (nor did rank {', '.join(map(str, others))})" if others else ""
        return f"rank {first} never came to {place.collective}{more}: it {self._describe_rank(first)}"

    def _place(self, rank: int) -> StackLocation | None:
        """Where a rank waits or waited, as far as its stack tells; None if it does not."""
        if rank in self.stacks:
            return location_in_dump(self.stacks[rank])
        failure = self.failures.get(rank)
        return location_in_traceback(failure.traceback) if failure is not None and _is_echo(failure) else None

    def _others(self, rank: int) -> dict[int, str]:
        return {
            other: self._describe_rank(other)
            for other in range(self.world_size)
            if other != rank and self._describe_rank(other)
        }

    def _describe_rank(self, rank: int) -> str:
        """What became of a rank, in one line."""
        if rank in self.stacks:
            return _describe_location(location_in_dump(self.stacks[rank]))
        if rank in self.failures:
            failure, place = self.failures[rank], self._place(rank)
            if place is not None:
                return _describe_echo(failure, place)
            first = failure.message.strip().partition("\n")[0]
            return f"died: {failure.type_name}" if failure.died else f"raised {failure.type_name}: {first}"
        return "had finished" if rank in self.results else ""


def _describe_location(place: StackLocation) -> str:
    return place.told("waited") if place != StackLocation() else "did not answer"


def _is_echo(failure: Failure) -> bool:
    """Whether a rank raised nothing but what a collective raises when another rank is gone or late."""
    return failure.consequence and ("gloo" in failure.traceback or timed_out(failure.traceback))


def _describe_echo(failure: Failure, place: StackLocation) -> str:
    where = place.told("waited") if place.collective or place.line else ""
    if timed_out(failure.traceback):
        return f"{where or 'waited'}, and gave up"
    return f"lost its neighbour{' while it ' if where else ''}{where}"


def with_stack(death: Failure, stack: str) -> Failure:
    """Return the death of a rank with where it was; ``stack`` is what ``faulthandler`` has written, "" if nothing."""
    if not stack:
        return death
    place = location_in_dump(stack).told("waited")
    return replace(death, message=f"{death.message}; it {place}", traceback=stack)
