"""The pytest plugin, in sessions of its own. Where nothing but the plugin is at stake, a comparison is made up."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fsshard import parity
from fsshard.errors import RecipeError
from fsshard.launching.pool import RankPool
from fsshard.parity import Cell, ParityReport, Recipe
from fsshard.recipes.recipe import resolve
from tests.sets import often

MODEL = """
    import torch
    from torch import nn
    from fsshard.parity import Recipe

    def build():
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def batches(rank, world_size, number):
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * number + rank))

    def loss(model, batch):
        return model(batch).square().mean()

    def recipe():
        return Recipe(build=build, batches=batches, loss=loss)

    def with_lambdas():
        return Recipe(build=lambda: build(), batches=batches, loss=lambda model, batch: loss(model, batch))
"""


PATIENCE = 120  # seconds; a hang becomes a failure


@dataclass
class MadeUp:
    """Stands in for ``compare``."""

    verdicts: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None
    warnings: list[str] = field(default_factory=list)
    calls: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    paths: list[list[str]] = field(default_factory=list)

    def __call__(self, recipe: Any, **settings: Any) -> ParityReport:
        self.calls.append((recipe, settings))
        self.paths.append(list(sys.path))
        if self.error is not None:
            raise self.error
        cells = [
            Cell(backend=backend, world_size=size, verdict=self.verdicts.get(backend, "exact"))
            for size in settings["world_sizes"]
            for backend in settings["backends"]
        ]
        name = resolve(recipe).name
        return ParityReport(
            recipe=name, reference=settings["reference"], steps=settings["steps"], cells=cells, warnings=self.warnings
        )


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    found = MadeUp()
    monkeypatch.setattr(parity, "compare", found)
    return found


@pytest.fixture
def session(pytester: pytest.Pytester) -> pytest.Pytester:
    """A user's repository with a model."""
    pytester.makepyfile(model=MODEL)
    pytester.makeini("[pytest]\naddopts = --strict-markers -p no:cacheprovider\n")
    return pytester


MARK = "@pytest.mark.fsshard_parity(backends=['fsdp2'])"
IMPORTS = "import dataclasses, pytest, torch, unittest, model\n"


def write(session: pytest.Pytester, text: str) -> None:
    """Write test_them.py; MARK stands for a marker with one backend."""
    session.makepyfile(test_them=IMPORTS + textwrap.dedent(text).replace("MARK", MARK))


def output(result: pytest.RunResult) -> str:
    return "\n".join(result.outlines)


# Nothing for those who do not ask -----------------------------------------------------------------------------------


def test_a_session_without_parity_tests_pays_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test_it(): assert not {'torch', 'fsshard'} & set(sys.modules)")
    result = pytester.runpytest_subprocess("--strict-markers")
    result.assert_outcomes(passed=1)
    assert "= fsshard parity =" not in output(result)


# A project that has nothing to do with us -----------------------------------------------------------------------------

STRANGERS = {
    "torch.py": "raise ModuleNotFoundError('there is no torch here')\n",
    "numpy.py": "raise ModuleNotFoundError('there is no numpy here')\n",
    "pytest.ini": "[pytest]\naddopts = -p no:cacheprovider --strict-markers -W error\n"
    "markers =\n    parity(bits): even or odd\n",
    "theirs.py": "import pytest\n@pytest.fixture(scope='session')\ndef ranks(): return ['first', 'second']\n",
    "conftest.py": """
import pytest
pytest_plugins = ["theirs"]
def pytest_addoption(parser):
    parser.addoption("--parity-json", action="store_true")
    parser.addini("parity", "theirs")
@pytest.fixture
def parity(request): return request.node.get_closest_marker("parity").kwargs["backends"]
""",
    "test_bits.py": """
import sys, unittest, pytest
pytestmark = pytest.mark.parity(backends="odd")
def test_bits(parity, ranks, request, record_property):
    record_property("parity", "odd")
    assert (parity, ranks) == ("odd", ["first", "second"])
    assert request.config.getoption("--parity-json") is True
@pytest.mark.parametrize("ranks", [1, 2])
def test_parameter(ranks): assert ranks
class TestUnit(unittest.TestCase):
    def test_unit(self): assert not {"fsshard", "torch", "numpy"} & set(sys.modules)
""",
}
OTHER_PYTEST = Path(sys.prefix, "pytest8")


def strangers(folder: Path, *arguments: str, pytest_from: Path | None = None) -> subprocess.CompletedProcess[str]:
    for name, text in STRANGERS.items():
        (folder / name).write_text(text)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    if pytest_from is not None:
        environment["PYTHONPATH"] = str(pytest_from)
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)


@pytest.fixture(params=["installed", "8"])
def pytest_from(request: pytest.FixtureRequest) -> Path | None:
    """Where pytest is imported from: the plugin runs under those of its users."""
    if request.param == "installed":
        return None
    if not OTHER_PYTEST.is_dir():
        pytest.skip(f"there is no pytest 8 in {OTHER_PYTEST}; the set-up of `make test` puts it there")
    return OTHER_PYTEST


def test_a_project_with_names_of_its_own(tmp_path: Path, pytest_from: Path | None) -> None:
    done = strangers(tmp_path, "--parity-json", pytest_from=pytest_from)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout and "fsshard parity" not in done.stdout
    version = strangers(tmp_path, "--version", pytest_from=pytest_from)
    expected = importlib.metadata.version("pytest") if pytest_from is None else "pytest 8."
    assert expected in version.stdout + version.stderr


@pytest.mark.parametrize("shown", often(["--help", "--markers", "--fixtures"], "--fixtures"))
def test_what_is_registered_has_our_prefix(tmp_path: Path, shown: str) -> None:
    """This holds for everything that pytest lists with us and not without us, whatever way it came there."""
    ours, without = (strangers(tmp_path, shown, *more).stdout.splitlines() for more in ([], ["-p", "no:fsshard"]))
    added = [line for line in ours if line.strip() and line not in without]
    named = [line for line in added if re.match(r"( {0,2}--?\w| {2}\w|@|\w+ \[)", line)]
    assert named and all(re.match(r" *(--|@pytest\.mark\.)?fsshard", line) for line in named), added


def test_a_marker_of_before_is_not_passed_over(session: pytest.Pytester, made_up: MadeUp) -> None:
    session.makeini("[pytest]\naddopts = -p no:cacheprovider\n")
    session.makepyfile(
        "import pytest, model\n@pytest.mark.parity(backends=['fsdp2'])\ndef test_it(): model.recipe()\n"
        "@pytest.mark.parity(bits=3)\ndef test_other(): pass\n"
    )
    result = session.runpytest_inprocess()
    result.assert_outcomes(passed=2)
    assert output(result).count("nothing is compared") == 1
    result.stdout.fnmatch_lines(["*test_it: nothing is compared. *write pytest.mark.fsshard_parity, or set fsshard_*"])


def test_short_names_where_the_ini_asks_for_them(session: pytest.Pytester, made_up: MadeUp) -> None:
    session.makeini("[pytest]\naddopts = --strict-markers -p no:cacheprovider\nfsshard_short_names = true\n")
    session.makepyfile(
        """
        import pytest, model
        @pytest.mark.parity(backends=["fsdp2"])
        def test_it(): return model.recipe()
        @pytest.mark.fsshard_parity(backends=["fsdp"])
        def test_long(): return model.recipe()
        def test_fixture(ranks, fsshard_ranks): assert ranks is fsshard_ranks
        """
    )
    session.runpytest_inprocess().assert_outcomes(passed=3)
    assert [settings["backends"] for _, settings in made_up.calls] == [["fsdp2"], ["fsdp"]]
    listed = session.runpytest_inprocess("--markers")
    listed.stdout.fnmatch_lines(["@pytest.mark.fsshard_parity(*", "@pytest.mark.parity(backends*"])


def test_without_torch_a_parity_test_says_so(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.fsshard_parity(backends=['fsdp2'])\ndef test_it(): return 1\n"
    (tmp_path / "test_ours.py").write_text(text)
    done = strangers(tmp_path, "test_ours.py")
    assert done.returncode == 1
    assert (
        "ranks need fsshard and torch, which cannot be imported here: ModuleNotFoundError: there is no" in done.stdout
    )
    assert "Traceback" not in done.stdout


# What is compared ---------------------------------------------------------------------------------------------------


def test_three_lines_make_a_test(session: pytest.Pytester, made_up: MadeUp) -> None:
    session.makepyfile(
        """
        import pytest
        from model import with_lambdas
        test_model = pytest.mark.fsshard_parity(backends=["fairscale", "fsdp2"], world_size=2)(with_lambdas)
        """
    )
    session.runpytest_inprocess().assert_outcomes(passed=1)
    ((recipe, settings),) = made_up.calls
    assert (recipe.__module__, recipe.__name__) == ("model", "with_lambdas")  # the function: its lambdas stay there
    pool = settings.pop("pool")
    assert isinstance(pool, RankPool) and not pool._supervisor.ranks
    assert settings == {
        "backends": ["fairscale", "fsdp2"],
        "world_sizes": [2],
        "steps": 5,
        "reference": "ddp",
        "timeout": 120.0,
    }


def test_all_that_the_marker_takes(session: pytest.Pytester, made_up: MadeUp) -> None:
    session.makepyfile(
        """
        import pytest, model
        @pytest.mark.fsshard_parity(backends=("fsdp",), world_sizes=[1, 2], steps=3, reference="none", timeout=7)
        def test_it(): return model.recipe()
        @pytest.mark.fsshard_parity()
        def test_defaults(): return model.recipe()
        """
    )
    session.runpytest_inprocess().assert_outcomes(passed=2)
    first, second = (settings for _, settings in made_up.calls)
    assert first["pool"] is second["pool"]
    assert (first["backends"], first["world_sizes"], first["steps"]) == (["fsdp"], [1, 2], 3)
    assert (first["reference"], first["timeout"]) == ("none", 7)
    assert (second["backends"], second["world_sizes"]) == (["fairscale", "fsdp", "fsdp2", "ddp"], [2])


def test_several_markers_of_one_recipe(session: pytest.Pytester, made_up: MadeUp) -> None:
    """They sit on the function, so that one name cannot be told from another by its marker alone."""
    write(
        session,
        """
        test_two = pytest.mark.fsshard_parity(world_size=2)(model.recipe)
        test_four = pytest.mark.fsshard_parity(world_size=4)(model.recipe)
        @pytest.mark.fsshard_parity(backends=["ddp"])
        @pytest.mark.fsshard_parity(world_size=3)
        def test_both(): return model.recipe()
        """,
    )
    session.runpytest_inprocess("--fsshard-parity-json", "reports").assert_outcomes(passed=3)
    assert [settings["world_sizes"] for _, settings in made_up.calls] == [[2], [4], [3], [2]]
    assert made_up.calls[-1][1]["backends"] == ["ddp"]
    assert len(list(Path(session.path, "reports").iterdir())) == 4


def test_fixtures_parameters_and_methods(session: pytest.Pytester, made_up: MadeUp) -> None:
    write(
        session,
        """
        @pytest.fixture
        def rate(): return 0.5
        MARK
        @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
        def test_it(optimizer, rate):
            return dataclasses.replace(model.recipe(), optimizer=optimizer, hyper={"lr": rate})
        class TestThese:
            MARK
            def test_method(self): return model.recipe()
        """,
    )
    session.runpytest_inprocess().assert_outcomes(passed=3)
    recipes = [recipe for recipe, _ in made_up.calls]
    assert all(isinstance(recipe, Recipe) for recipe in recipes)
    assert [recipe.name for recipe in recipes] == ["test_it[SGD]", "test_it[Adam]", "test_method"]
    assert [recipe.optimizer.__name__ for recipe in recipes[:2]] == ["SGD", "Adam"]
    assert recipes[0].hyper == {"lr": 0.5}


def test_ranks_find_a_test_that_was_imported_by_its_path(session: pytest.Pytester, made_up: MadeUp) -> None:
    session.mkpydir("suite")
    Path(session.path, "suite", "test_deep.py").write_text(
        "import pytest\nfrom fsshard.parity import Recipe\n"
        "@pytest.mark.fsshard_parity(backends=['fsdp2'])\n"
        "def test_it(): return Recipe(build=lambda: 0, batches=lambda *a: 0, loss=lambda *a: 0)\n"
    )
    before = list(sys.path)
    session.runpytest_inprocess("--import-mode=importlib").assert_outcomes(passed=1)
    ((recipe, _),) = made_up.calls
    assert recipe.__module__ == "suite.test_deep"
    assert str(session.path) in made_up.paths[0]
    assert sys.path == before


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("['fsdp2']", "takes keyword arguments only, got *; write backends="),
        ("backend=['fsdp2']", "does not know backend; it takes backends, world_size"),
        ("backends='fsdp2'", "expects a list of backends, for example *, got 'fsdp2'"),
        ("backends=3", "expects a list of backends, for example *, got 3"),
        ("world_size=0", "expects positive integers as world size, got 0"),
        ("world_size='2'", "expects positive integers as world size, got '2'"),
        ("world_sizes=[]", "expects positive integers as world size, got "),
        ("world_sizes=2", "expects a list as world_sizes, for example *, got 2"),
        ("world_size=2, world_sizes=[1]", "takes world_size or world_sizes, got world_size=2"),
    ],
)
def test_wrong_arguments_of_the_marker(session: pytest.Pytester, made_up: MadeUp, arguments: str, text: str) -> None:
    write(session, f"@pytest.mark.fsshard_parity({arguments})\ndef test_it(): return model.recipe()\n")
    result = session.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"@pytest.mark.fsshard_parity {text}*"])
    assert not made_up.calls


REFUSED: dict[str, tuple[str, dict[str, int], str]] = {
    "nothing returned": (
        "MARK\ndef test_it(): model.recipe()",
        {"failed": 1},
        "*test_it is marked with fsshard_parity and returned None; it must return a recipe*",
    ),
    "a number": ("MARK\ndef test_it(): return 3", {"failed": 1}, "*test_it: *is not a recipe: expected build*"),
    "a class": ("MARK\ndef test_it(): return object", {"failed": 1}, "*test_it: *is not a recipe: expected build*"),
    "cannot be sent": (
        "MARK\ndef test_it(tmp_path): return model.with_lambdas()",
        {"failed": 1},
        "the recipe that *test_it returned cannot be sent to the ranks (*partial*",
    ),
    "a recipe is marked": (
        f"test_it = {MARK[1:]}(model.recipe())",
        {"errors": 1},
        "*test_it: pytest.mark.fsshard_parity(...) was given a Recipe; give it a function*",
    ),
    "a method of unittest": (
        "class Tests(unittest.TestCase):\n    MARK\n    def test_it(self): return model.recipe()\n"
        "    def test_other(self): pass",
        {"passed": 1, "failed": 1},
        "*::test_it: a parity test cannot be a method of unittest.TestCase; use a function*",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_compared(session: pytest.Pytester, made_up: MadeUp, what: str) -> None:
    text, outcomes, told = REFUSED[what]
    write(session, text)
    result = session.runpytest_inprocess()
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines([told])
    assert not made_up.calls and "Traceback" not in output(result) and "another exception" not in output(result)


def test_a_fixture_or_a_parameter_named_ranks_is_the_users(session: pytest.Pytester, made_up: MadeUp) -> None:
    write(
        session,
        """
        @pytest.fixture
        def ranks(): return 3
        MARK
        def test_fixture(ranks):
            assert ranks == 3
            return model.recipe()
        MARK
        @pytest.mark.parametrize("ranks", [1, 2])
        def test_parameter(ranks): return model.recipe()
        MARK
        def test_neither(): return model.recipe()
        """,
    )
    session.runpytest_inprocess().assert_outcomes(passed=4)
    assert all(isinstance(settings["pool"], RankPool) for _, settings in made_up.calls) and len(made_up.calls) == 4


def test_the_fixture_ranks_is_the_pool_of_the_marker(session: pytest.Pytester, made_up: MadeUp) -> None:
    session.makepyfile(
        """
        import pytest, model
        def test_it(fsshard_ranks, _fsshard_ranks): assert fsshard_ranks is _fsshard_ranks
        def test_failure(fsshard_ranks): fsshard_ranks.run(lambda: 0, 2)  # here
        """
    )
    result = session.runpytest_inprocess()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*fsshard_ranks.run(lambda: 0, 2)  # here", "E *LaunchError: *cannot be pickled*"])
    assert "def _pickled_call" not in output(result) and "def run(" not in output(result)


# What is told -------------------------------------------------------------------------------------------------------

TWO_TESTS = """
    import pytest, model
    @pytest.mark.fsshard_parity(backends=["fairscale", "fsdp2"], world_sizes=[1, 2])
    def test_one(): return model.recipe()
    @pytest.mark.fsshard_parity(backends=["ddp"])
    def test_two(): return model.recipe()
"""


@pytest.mark.parametrize("verdict", ["different", "refused", "failed"])
def test_a_failure_is_the_report_and_nothing_else(
    session: pytest.Pytester, made_up: MadeUp, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    made_up.verdicts = {"fsdp2": verdict, "fairscale": "bound"}
    session.makepyfile(TWO_TESTS)
    result = session.runpytest_inprocess()
    result.assert_outcomes(passed=1, failed=1)
    report = parity.compare(
        resolve_model, backends=["fairscale", "fsdp2"], world_sizes=[1, 2], steps=5, reference="ddp"
    )
    assert verdict in str(report) and str(report) in output(result)
    result.stdout.fnmatch_lines(["FAILED *::test_one - Failed: fsdp2 at 1 rank: *"])
    assert "Traceback" not in output(result) and "fsshard_pytest.py" not in output(result)


def resolve_model() -> Recipe:
    return Recipe(build=dict, batches=dict, loss=dict, name="test_one")  # type: ignore[arg-type]


def test_the_summary_has_a_line_per_test(session: pytest.Pytester, made_up: MadeUp) -> None:
    made_up.verdicts = {"fsdp2": "bound", "ddp": "different"}
    session.makepyfile(test_them=TWO_TESTS)
    result = session.runpytest_inprocess()
    result.stdout.fnmatch_lines(
        [
            "=* fsshard parity =*",
            "test_them.py::test_one: fairscale exact, fsdp2 bound (1 rank); fairscale exact, fsdp2 bound (2 ranks)",
            "test_them.py::test_two: ddp different (2 ranks)",
        ]
    )
    assert "= fsshard parity =" not in output(session.runpytest_inprocess("-q"))


def test_warnings_of_a_report_are_warnings(session: pytest.Pytester, made_up: MadeUp) -> None:
    """Where nothing else is printed of a test that passes, too."""
    made_up.warnings = ["all ranks get the same batches"]
    session.makepyfile(test_them=TWO_TESTS)
    result = session.runpytest_inprocess("-q")
    result.assert_outcomes(passed=2, warnings=2)
    result.stdout.fnmatch_lines(["*PytestWarning: test_them.py::test_one: all ranks get the same batches"])
    session.runpytest_inprocess("-W", "error").assert_outcomes(failed=2)


def test_reports_are_written_as_json(session: pytest.Pytester, made_up: MadeUp) -> None:
    made_up.verdicts = {"ddp": "different"}
    session.makepyfile(test_them=TWO_TESTS)
    session.runpytest_inprocess("--fsshard-parity-json", "out/reports").assert_outcomes(passed=1, failed=1)
    one, two = sorted(Path(session.path, "out", "reports").iterdir())
    assert one.name.startswith("test_them.py_test_one-") and one.suffix == ".json"
    report = ParityReport.from_json(two.read_text())
    assert report["ddp", 2].verdict == "different"
    assert json.loads(one.read_text())["recipe"] == "test_one"


def test_an_error_of_the_comparison_is_its_text(session: pytest.Pytester, made_up: MadeUp) -> None:
    made_up.error = RecipeError("the recipe is not deterministic: first at step 0")
    session.makepyfile(TWO_TESTS)
    result = session.runpytest_inprocess()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*::test_one: RecipeError: the recipe is not deterministic: first at step 0"])
    result.stdout.fnmatch_lines(["*::test_two: not compared, RecipeError"])
    told = output(result)
    assert not any(noise in told for noise in ("Traceback", "fsshard_pytest.py", "another exception"))


def test_an_error_of_the_test_itself_keeps_its_traceback(session: pytest.Pytester, made_up: MadeUp) -> None:
    session.makepyfile("import pytest\n@pytest.mark.fsshard_parity()\ndef test_it(): return 1 / 0  # here\n")
    result = session.runpytest_inprocess()
    result.stdout.fnmatch_lines(["*return 1 / 0  # here", "E *ZeroDivisionError*"])


# For real -----------------------------------------------------------------------------------------------------------


def test_real_comparisons(session: pytest.Pytester, ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the pool of this session."""
    monkeypatch.setattr(sys.modules["fsshard_pytest"], "lent", ranks, raising=False)
    session.makeconftest(
        """
        import pytest, fsshard_pytest
        @pytest.fixture(scope="session")
        def _fsshard_ranks(): return fsshard_pytest.lent
        """
    )
    session.makepyfile(
        real_model=MODEL,  # ranks that have served other sessions may know another ``model``
        test_real_comparisons="""
        import dataclasses, pytest, torch, real_model as model
        from fsshard.parity import Recipe
        @pytest.mark.fsshard_parity(backends=["fsdp2"], steps=2)
        def test_agrees(): return model.with_lambdas()
        def noisy(model, batch): return model(batch).square().mean() + torch.rand((), generator=new()) * 0.1
        def new():
            generator = torch.Generator()
            generator.seed()
            return generator
        @pytest.mark.fsshard_parity(backends=["fsdp2"], steps=2)
        def test_is_noisy(tmp_path): return dataclasses.replace(model.recipe(), loss=noisy)
        """,
    )
    result = session.runpytest_inprocess()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*::test_is_noisy: RecipeError: *not deterministic*"])
    result.stdout.fnmatch_lines(["test_real_comparisons.py::test_agrees: fsdp2 exact (2 ranks)"])
