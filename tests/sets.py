"""Which tests a command runs, and what files cost: the options ``--fast``, ``--long`` and ``--cpu-times`` of pytest.

Loaded by ``tests/conftest.py``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

FAST = (
    "tests/test_architecture.py",
    "tests/test_docs.py",
    "tests/test_errors.py",
    "tests/backends/test_fsdp2.py",
    "tests/backends/test_training.py",
    "tests/checkpoint/test_saving.py",
    "tests/cli/test_app.py",
    "tests/comm/test_channel.py",
    "tests/compat/test_main.py",
    "tests/complex_params/test_tensorfy.py",
    "tests/demo/test_darcy.py",
    "tests/launching/test_outcome.py",
    "tests/model/test_unit_inputs.py",
    "tests/oss/test_state_dict.py",
    "tests/parallel/test_data_rank.py",
    "tests/parity/test_backends_agree.py",
    "tests/planning/test_plan.py",
    "tests/recipes/test_recipes.py",
    "tests/sharded/test_module.py",
    "tests/simulation/test_tracking.py",
    "tests/stub_cuda/test_paths.py",
    "tests/tools/test_torch_digests.py",
    "tests/torch_private/test_registry.py",
)
"""A file of each room, the one that says most for its seconds, and what breaks first with another torch."""

FAST_TRAININGS = "test_backends_agree[{}]"
"""Names of tests of the parity matrix; a fast run has the fewest rows with every model, variant and optimizer."""

TICKS = os.sysconf("SC_CLK_TCK")
SHOWN = 40


def pytest_addoption(parser: pytest.Parser) -> None:
    """As ``make test-fast``, ``make test-all`` and ``make slow`` give them."""
    group = parser.getgroup("fsshard's own tests")
    group.addoption("--fast", action="store_true", help="two minutes: a file of each room, and covering trainings")
    group.addoption("--long", action="store_true", help="those marked long, too")
    group.addoption("--cpu-times", action="store_true", help="print the CPU time of each file, with its ranks'")


def pytest_configure(config: pytest.Config) -> None:
    """Count from here on, if it was asked for."""
    if config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes(), "cpu-times")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for."""
    wanted = set(_fast(items)) if config.getoption("--fast") else set(items)
    by_name = any("::" in str(argument) for argument in config.args)
    if not (by_name or config.getoption("--long") or config.getoption("markexpr")):
        later = set(_later(items))
        config.stash[LEFT_OUT] = len(later)
        wanted -= later
    left_out = [item for item in items if item not in wanted]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in wanted]


LEFT_OUT: pytest.StashKey[int] = pytest.StashKey()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many tests were not run, and how to run them."""
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{count} long tests were left out: make test-all runs them, or pytest --long")


def _later(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the tests marked long; of one marked covering, the rows whose values all occur in a few others of it."""
    from tests.parity import matrix

    rows = {}
    for item in items:
        mark = item.get_closest_marker("covering")
        if item.get_closest_marker("long") is not None:
            yield item
        elif mark is not None:
            if not hasattr(item, "callspec"):
                raise pytest.UsageError(f"{item.nodeid} is marked covering, and has no parameters")
            values = item.callspec.params
            row = tuple(str(values[name]) for name in sorted(values))  # whatever the order of the decorators
            together = [*mark.args, *mark.kwargs.values()]
            rows.setdefault((item.nodeid.partition("[")[0], *together), {})[row] = item
    for (_, *together), by_values in rows.items():
        few = set(matrix.fewest([*by_values], *together))
        yield from (item for values, item in by_values.items() if values not in few)


def _fast(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    from tests.parity import matrix

    rows = {(row.model, row.variant, row.optimizer): row for row in matrix.covering() if row in matrix.often()}
    names = {FAST_TRAININGS.format(rows[few]) for few in matrix.fewest([*rows])}
    for item in items:
        if item.nodeid.partition("::")[0] in FAST or item.name in names:
            yield item


def often(values: Iterable[Any], *at_once: Any) -> list[Any]:
    """Mark all but some of a test's values, or rows of them, long."""
    values = [*values]
    if unknown := [value for value in at_once if value not in values]:
        raise ValueError(f"often: {unknown} are none of {values}")
    return [value if value in at_once else pytest.param(*_row(value), marks=pytest.mark.long) for value in values]


def _row(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


class CpuTimes:
    """Adds up what the session's processes have computed, file by file; a pool's first user pays for its start."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._before = tree_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """After a file's last test, count."""
        result = yield
        file = item.nodeid.partition("::")[0]
        if nextitem is None or nextitem.nodeid.partition("::")[0] != file:
            now = tree_seconds()
            self.seconds[file] += now - self._before  # type: ignore[assignment]
            self._before = now
        return result

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The dearest first."""
        total = sum(self.seconds.values())
        terminalreporter.write_line(f"seconds of CPU by file, of {total:.0f} in all:")
        for file, seconds in self.seconds.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:8.1f}  {file}")


def tree_seconds() -> float:
    """Seconds of CPU time, of user and system, of this process, its descendants, and those of them that have ended."""
    parents = {}
    ticks = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # has ended meanwhile
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))  # proc(5): utime, stime, and those of waited children
    todo, total = [os.getpid()], 0
    while todo:
        process = todo.pop()
        total += ticks.get(process, 0)
        todo += parents.get(process, [])
    return total / TICKS
