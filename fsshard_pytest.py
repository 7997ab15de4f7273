"""The pytest plugin of fsshard: the marker ``fsshard_parity`` and the fixture ``fsshard_ranks``.

A test that is marked returns a recipe, or is the function that returns it; the plugin trains the recipe under every
backend on the session's pool of ranks, and the test fails, with the report as its text, unless all agree::

    import pytest
    from model import recipe

    test_parity = pytest.mark.fsshard_parity(backends=["fairscale", "fsdp2"], world_size=2)(recipe)

The plugin is active in every session of an environment that has fsshard, also in those of projects that know nothing of
it. So whatever it registers has a name that begins with ``fsshard``, it acts on nothing without such a name, and
neither torch nor fsshard is imported before the first test that needs them. The short names ``parity`` and ``ranks``
are there too where the project's own ini says ``fsshard_short_names = true``.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pickle
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from fsshard.launching.pool import RankPool
    from fsshard.parity import ParityReport

MARKER = "fsshard_parity"
SHORT_MARKER = "parity"
SHORT_NAMES = "fsshard_short_names"
POOL = "_fsshard_ranks"
DEFAULTS: dict[str, Any] = {
    "backends": ("fairscale", "fsdp", "fsdp2", "ddp"),
    "world_size": None,
    "world_sizes": None,
    "steps": 5,
    "reference": "ddp",
    "timeout": 120.0,
}
DEFAULT_WORLD_SIZE = 2
OF_SCRIPTS = ("scripts", "world_size", "steps")
HELP = (
    "(backends, world_size=2, world_sizes=None, steps=5, reference='ddp', timeout=120): the test returns a "
    "recipe, which must train the same under all backends, at one world size or at each of world_sizes. Or "
    "(scripts=[old, new], world_size=2, steps=None): two scripts beside the test must train the same under torchrun."
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fsshard", "parity of training engines")
    group.addoption(
        "--fsshard-parity-json",
        metavar="DIR",
        default=None,
        help="write the report of each parity test into DIR, as JSON",
    )
    parser.addini(SHORT_NAMES, "the marker parity and the fixture ranks are fsshard's", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    for name in _markers(config):
        config.addinivalue_line("markers", name + HELP)
    if config.getini(SHORT_NAMES):
        config.pluginmanager.register(ShortNames(), "fsshard_short_names")


def _markers(config: pytest.Config) -> tuple[str, ...]:
    return (MARKER, SHORT_MARKER) if config.getini(SHORT_NAMES) else (MARKER,)


def _marker(item: pytest.Item) -> pytest.Mark | None:
    """Return the closest marker of fsshard."""
    return next((mark for mark in item.iter_markers() if mark.name in _markers(item.config)), None)


@pytest.fixture(scope="session")
def _fsshard_ranks() -> Iterator[RankPool]:
    """Yield the pool that the marker uses; a fixture or parameter ``ranks`` of the user must not get in its way."""
    problem = _problem(lambda: importlib.import_module("fsshard.parity"), ImportError)
    if problem is not None:
        _fail(f"ranks need fsshard and torch, which cannot be imported here: {type(problem).__name__}: {problem}")
    from fsshard.launching.pool import RankPool

    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def fsshard_ranks(_fsshard_ranks: RankPool) -> RankPool:
    """The session's pool of ranks (``fsshard.launching.pool.RankPool``); its processes start with the first job."""
    return _fsshard_ranks


class ShortNames:
    """A plugin of its own, for the fixtures of those who ask for short names."""

    @pytest.fixture(scope="session")
    def ranks(self, _fsshard_ranks: RankPool) -> RankPool:
        """The session's pool of ranks (``fsshard.launching.pool.RankPool``); its processes start with the first job."""
        return _fsshard_ranks


# ------------------------------------------------------------------------------------------------------- what is asked


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> None:
    """Refuse a marker on something other than a function, which would silently be no test."""
    mark = obj.mark if isinstance(obj, pytest.MarkDecorator) else None
    if mark is None or not mark.args or mark.name not in _markers(collector.config):
        return
    if collector.funcnamefilter(name):  # type: ignore[attr-defined]
        raise collector.CollectError(
            f"{name}: pytest.mark.{mark.name}(...) was given a {type(mark.args[0]).__name__}; give it a function that "
            f"returns the recipe, for example: def {name}(): return recipe"
        )


def pytest_itemcollected(item: pytest.Item) -> None:
    if not isinstance(item, pytest.Function):
        return
    if _marker(item) is None:
        _warn_of_the_old_name(item)
        return
    if _of_unittest(item):
        return
    if POOL not in item.fixturenames:
        item.fixturenames.append(POOL)


def _warn_of_the_old_name(item: pytest.Function) -> None:
    """Warn of a test from before the marker had its prefix: it would train nothing, and pass in pytest 8.0 to 8.3.

    Only where the project has not registered a marker ``parity`` of its own and the arguments are ours.
    """
    mark = item.get_closest_marker(SHORT_MARKER)
    if mark is None or "backends" not in mark.kwargs or not set(mark.kwargs) <= set(DEFAULTS):
        return
    if not any(re.match(rf"{SHORT_MARKER}\b", line) for line in item.config.getini("markers")):
        item.warn(
            pytest.PytestWarning(
                f"{item.nodeid}: nothing is compared. If pytest.mark.{SHORT_MARKER} means fsshard's, write "
                f"pytest.mark.{MARKER}, or set {SHORT_NAMES} = true in pytest's ini"
            )
        )


def _of_unittest(item: pytest.Function) -> bool:
    unittest = sys.modules.get("unittest")  # who has a test case of it, has imported it
    return unittest is not None and item.cls is not None and issubclass(item.cls, unittest.TestCase)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Refuse methods of unittest, which drops what they return: such a test would always pass."""
    if isinstance(item, pytest.Function) and _of_unittest(item) and _marker(item) is not None:
        _fail(f"{item.nodeid}: a parity test cannot be a method of unittest.TestCase; use a function")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = _marker(pyfuncitem)
    if marker is None:
        return None
    if "scripts" in marker.kwargs:
        _compare_scripts(pyfuncitem, marker)
        return True
    settings = [_settings(mark) for mark in _asked(pyfuncitem, marker)]
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    recipe = _recipe(pyfuncitem, pyfuncitem.obj(**arguments), with_arguments=bool(arguments))
    for number, asked in enumerate(settings):
        with _importable(pyfuncitem.module):
            report = _compared(pyfuncitem, recipe, asked)
        _publish(pyfuncitem, report, f"-{number + 1}" if len(settings) > 1 else "")
        if not report.ok:
            from fsshard.parity.render import summary

            # pytest's own summary shows the first line only, and no more of it than fits: begin with what differs.
            whole = summary(report)
            _fail(f"{whole.partition(': ')[2] or whole}\n\n{report}")
    return True


def _asked(item: pytest.Function, closest: pytest.Mark) -> list[pytest.Mark]:
    """Return the markers that a test obeys: its own, in the order in which they were set, or else the closest.

    A marker sits on the function, not on the name: two tests made of one recipe have both. As many names as markers are
    taken to be one for each; else each test obeys all of them.
    """
    own = [mark for mark in getattr(item.function, "pytestmark", []) if mark.name in _markers(item.config)]
    parent: Any = item.parent
    names = [name for name, value in vars(parent.obj).items() if value is item.function and parent.funcnamefilter(name)]
    if item.originalname in names and len(own) == len(names):
        return [own[names.index(item.originalname)]]
    return own or [closest]


def _settings(marker: pytest.Mark) -> dict[str, Any]:
    """Return the keyword arguments of ``compare`` that the marker asks for."""
    if marker.args:
        _misused(f"takes keyword arguments only, got {', '.join(map(repr, marker.args))}; write backends=[...]")
    unknown = sorted(set(marker.kwargs) - set(DEFAULTS))
    if unknown:
        _misused(f"does not know {', '.join(unknown)}; it takes {', '.join(DEFAULTS)}")
    given = {**DEFAULTS, **marker.kwargs}
    if isinstance(given["backends"], (str, Mapping)) or not isinstance(given["backends"], Iterable):
        _misused(f"expects a list of backends, for example ['fairscale', 'fsdp2'], got {given['backends']!r}")
    sizes = _world_sizes(given.pop("world_size"), given.pop("world_sizes"))
    return {**given, "backends": list(given["backends"]), "world_sizes": sizes}


def _world_sizes(one: object, several: object) -> list[int]:
    if one is not None and several is not None:
        _misused(f"takes world_size or world_sizes, got world_size={one!r} and world_sizes={several!r}")
    if several is not None and (isinstance(several, str) or not isinstance(several, Iterable)):
        _misused(f"expects a list as world_sizes, for example [1, 2], got {several!r}")
    sizes: list[Any] = list(several) if isinstance(several, Iterable) else [DEFAULT_WORLD_SIZE if one is None else one]
    if not sizes or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
        _misused(f"expects positive integers as world size, got {sizes if several is not None else one!r}")
    return sizes


def _recipe(item: pytest.Function, made: Any, *, with_arguments: bool) -> Any:
    """Return what goes to the ranks: the test function itself, where they can import it, or else what it returned."""
    if made is None:
        _fail(
            f"{item.nodeid} is marked with {MARKER} and returned None; it must return a recipe "
            "(fsshard.parity.Recipe, or an object with build, batches and loss)"
        )
    from fsshard.errors import FsshardError
    from fsshard.recipes.recipe import resolve

    problem = _problem(lambda: resolve(made), FsshardError)
    if problem is not None:
        _fail(f"{item.nodeid}: {problem}")
    if not with_arguments and _found_by_name(item.obj):
        return item.obj
    if dataclasses.is_dataclass(made) and not isinstance(made, type) and getattr(made, "name", None) == "":
        made = dataclasses.replace(made, name=item.name)
    problem = _problem(lambda: pickle.dumps(made), Exception)
    if problem is not None:
        _fail(
            f"the recipe that {item.nodeid} returned cannot be sent to the ranks ({problem}). Make it of functions at "
            "the top level of a module, or of functools.partial of them. Lambdas and local functions are fine in a "
            "test without arguments at the top level of its module, which the ranks call themselves"
        )
    return made


def _problem(call: Callable[[], object], kind: type[Exception]) -> Exception | None:
    """Return what a call raises: a failure raised while it is handled would be reported with its trace."""
    try:
        call()
    except kind as error:
        return error
    return None


def _found_by_name(function: Callable[..., Any]) -> bool:
    module = sys.modules.get(getattr(function, "__module__", ""))
    return inspect.isfunction(function) and getattr(module, function.__qualname__, None) is function


@contextmanager
def _importable(module: Any) -> Iterator[None]:
    """Let the ranks, who get our ``sys.path``, find the test's module under pytest's import mode ``importlib`` too."""
    file = getattr(module, "__file__", None)
    if file is None:
        yield
        return
    depth = module.__name__.count(".") + (Path(file).name == "__init__.py")
    folder = str(Path(file).resolve().parents[depth])
    added = folder not in sys.path
    if added:
        sys.path.append(folder)
    try:
        yield
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)


# ------------------------------------------------------------------------------------------------------- what is found


def _compared(item: pytest.Function, recipe: Any, settings: Mapping[str, Any]) -> ParityReport:
    from fsshard import parity
    from fsshard.errors import FsshardError

    pool: Any = item.funcargs[POOL]
    reports: list[ParityReport] = []
    problem = _problem(lambda: reports.append(parity.compare(recipe, pool=pool, **settings)), FsshardError)
    if problem is not None:
        item.user_properties.append((MARKER, f"not compared, {type(problem).__name__}"))
        _fail(f"{item.nodeid}: {type(problem).__name__}: {problem}")
    return reports[0]


def _compare_scripts(item: pytest.Function, marker: pytest.Mark) -> None:
    """Run two scripts on as many ranks, and fail unless they train the same; the test itself is not called."""
    from fsshard.errors import FsshardError
    from fsshard.parity.scripts.command import run
    from fsshard.parity.scripts.comparing import ScriptReport, compare_scripts
    from fsshard.parity.scripts.recorder import Settings

    given = marker.kwargs
    if unknown := sorted(set(given) - set(OF_SCRIPTS)):
        _misused(f"does not know {', '.join(unknown)} beside scripts; it takes {', '.join(OF_SCRIPTS)}")
    if isinstance(given["scripts"], str) or len(given["scripts"]) != 2:
        _misused(f"expects two paths, scripts=['old_train.py', 'new_train.py'], got {given['scripts']!r}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    reports: list[ScriptReport] = []

    def compare() -> None:
        records = []
        for number, script in enumerate(given["scripts"]):
            records.append(Path(temporary, f"{number}-{Path(script).stem}"))
            command = [*torchrun, str(given.get("world_size", DEFAULT_WORLD_SIZE)), str(item.path.parent / script)]
            if code := run(command, records[-1], Settings(last=given.get("steps"))):
                _fail(f"{script} ended with exit code {code}")
        reports.append(compare_scripts(*records))

    with tempfile.TemporaryDirectory() as temporary:
        problem = _problem(compare, FsshardError)
    if problem is not None:
        _fail(f"{item.nodeid}: {type(problem).__name__}: {problem}")
    item.user_properties.append((MARKER, reports[0].sentence))
    if not reports[0].ok:
        _fail(str(reports[0]))


def _publish(item: pytest.Function, report: ParityReport, suffix: str) -> None:
    """Leave the line of the summary, the warnings, and the file, if one is asked for."""
    item.user_properties.append((MARKER, _verdicts(report)))
    for text in report.warnings:
        item.warn(pytest.PytestWarning(f"{item.nodeid}: {text}"))
    folder = item.config.getoption("--fsshard-parity-json")
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        # The number keeps tests apart whose names differ in other characters only.
        name = f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', item.nodeid).strip('_')}-{zlib.crc32(item.nodeid.encode()):08x}"
        Path(folder, f"{name}{suffix}.json").write_text(report.to_json() + "\n")


def _verdicts(report: ParityReport) -> str:
    """``"fairscale exact, fsdp2 bound (2 ranks)"``, one such part per world size."""
    parts = []
    for size in dict.fromkeys(cell.world_size for cell in report.cells):
        cells = ", ".join(f"{cell.backend} {cell.verdict}" for cell in report.cells if cell.world_size == size)
        parts.append(f"{cells} ({size} rank{'s' if size > 1 else ''})")
    return "; ".join(parts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.verbosity < 0:
        return
    lines = list(_summary(terminalreporter.stats))
    if lines:
        terminalreporter.section("fsshard parity")
        for line in lines:
            terminalreporter.line(line)


def _summary(stats: Mapping[str, list[Any]]) -> Generator[str, None, None]:
    for outcome in ("passed", "failed"):
        for report in stats.get(outcome, []):
            for name, text in getattr(report, "user_properties", ()):
                if name == MARKER and getattr(report, "when", "") == "call":
                    yield f"{report.nodeid}: {text}"


def _misused(text: str) -> NoReturn:
    _fail(f"@pytest.mark.{MARKER} {text}")


def _fail(text: str) -> NoReturn:
    pytest.fail(text, pytrace=False)
