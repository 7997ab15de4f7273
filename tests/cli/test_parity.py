"""``fsshard parity``: exit codes, what goes to which stream, and one line for every mistake.

Tests fsshard/__main__.py and fsshard/pictures.py too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsshard
import fsshard.launching.pool
import fsshard.parity
from fsshard.cli import app as cli
from fsshard.errors import RankFailed, RecipeError
from fsshard.parity import Cell, ParityReport, Recipe, Trace
from tests.forked import run_module
from tests.parity import faults
from tests.parity.test_report import bounded, different, exact, failed, refused, report

HERE = "tests.cli.test_parity"
ROOT = Path(__file__).resolve().parents[2]


def tiny() -> Recipe:
    """A recipe of a linear layer; it prints, as users' code does."""
    print("a recipe that talks")
    return Recipe(build=_linear, batches=_numbers, loss=_square)


def other() -> Recipe:
    return tiny()


def broken() -> Recipe:
    raise RuntimeError("no such data set")


def bad_field() -> Recipe:
    return Recipe(build=_linear, batches=_numbers, loss=_square, accumulate=0)


not_a_recipe = 3


def _linear() -> nn.Module:
    return nn.Linear(3, 2)


def _numbers(rank: int, world_size: int, number: int) -> Tensor:
    return torch.arange(6.0).reshape(2, 3) + rank + number


def _square(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


class Compare:
    """Stands for fsshard.parity.compare: remembers how it was called."""

    def __init__(self, *results: ParityReport | BaseException) -> None:
        self.results, self.calls = list(results), list[tuple[str, dict[str, Any]]]()

    def __call__(self, recipe: str, **options: Any) -> ParityReport:
        self.calls.append((recipe, options))
        options["progress"](0.5, 2.0, "fsdp2 on 2 ranks")
        os.write(1, b"a rank on stdout\n")
        os.write(2, b"a rank on stderr\na rank on stderr\n")
        result = self.results.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``fake(*results)``: compare gives (or raises) these, one after another."""

    def install(*results: ParityReport | BaseException) -> Compare:
        made = Compare(*results)
        monkeypatch.setattr(fsshard.parity, "compare", made)
        return made

    return install


def run(*arguments: str) -> int:
    return cli.main(["parity", *arguments])


# Exit codes and options


@pytest.mark.parametrize(
    ("cells", "code"),
    [([exact("ddp"), bounded()], 0), ([exact("ddp"), different()], 1), ([refused()], 1), ([failed()], 1)],
)
def test_exit_code_is_0_only_if_all_agree(cells: list[Cell], code: int, fake: Any, capfd: Any) -> None:
    made = report(*cells)
    fake(made)
    assert run(f"{HERE}:tiny") == code
    out, err = capfd.readouterr()
    assert out.strip() == str(made)
    assert err.splitlines() == ["a recipe that talks", "a rank on stdout", "a rank on stderr"]


def test_options_reach_compare(fake: Any) -> None:
    made = fake(report(exact("ddp")))
    words = "--backends fsdp2,ddp --world-size 1 --world-size 2,4 --steps 3 --reference none --timeout 9 --device cpu"
    assert run(f"{HERE}:tiny", *words.split()) == 0
    ((recipe, options),) = made.calls
    assert recipe == f"{HERE}:tiny" and options.pop("pool") and options.pop("progress")
    assert options == {
        "backends": ["fsdp2", "ddp"],
        "world_sizes": [1, 2, 4],
        "steps": 3,
        "reference": "none",
        "timeout": 9.0,
        "device": "cpu",
    }


def test_meshes_reach_compare(fake: Any) -> None:
    """Ranks and reference only where they are asked for."""
    made = fake(report(exact("ddp")), report(exact("ddp")))
    assert run(f"{HERE}:tiny", "--mesh", "data=2,tp=2", "--mesh", "data=4") == 0
    run(f"{HERE}:tiny", "--mesh", "data=4", "--world-size", "4", "--reference", "none")
    first, second = (options for _, options in made.calls)
    assert first["mesh"] == [{"data": 2, "tp": 2}, {"data": 4}]
    assert first["world_sizes"] is None and first["reference"] is None
    assert second["world_sizes"] == [4] and second["reference"] == "none"


def test_quiet_is_one_line_and_warnings_beside_it(fake: Any, capfd: Any) -> None:
    fake(replace(report(exact("ddp")), warnings=("no batch differs between ranks",)))
    assert run(f"{HERE}:tiny", "-q") == 0
    line = "recipes:mlp: all agree: 1 exact; 1 warning\n"
    assert capfd.readouterr() == (line, "fsshard: recipes:mlp: no batch differs between ranks\n")


def test_a_terminal_gets_a_table(fake: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    fake(report(exact("ddp"), different()))
    assert run(f"{HERE}:tiny") == 1
    out = capfd.readouterr().out
    assert "\x1b[1;31mDIFFERENT\x1b[0m" in out and "NOT the same training" in out and "first: step 2" in out


# JSON and pictures


def test_json_on_stdout_and_nothing_else_there(fake: Any, capfd: Any) -> None:
    made = report(exact("ddp"), different())
    fake(made)
    assert run(f"{HERE}:tiny", "--json", "-") == 1
    out, err = capfd.readouterr()
    assert ParityReport.from_json(out) == made
    assert str(made) in err


def test_pictures(fake: Any, tmp_path: Path) -> None:
    fake(report(exact("ddp")), report(exact("ddp")), report(exact("ddp")))
    assert run(f"{HERE}:tiny", "--plot", str(tmp_path / "one.png")) == 0
    assert run(f"{HERE}:tiny", f"{HERE}:other", "--plot", str(tmp_path / "many.svg")) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"one.png", f"many-{HERE}.tiny.svg", f"many-{HERE}.other.svg"}


# Bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected a RECIPE"),
        (["nonsense"], "expected 'module:attribute'"),
        (["no_such_module:x"], "there is no module 'no_such_module'"),
        ([f"{HERE}:missing"], "has no 'missing'"),
        ([f"{HERE}:not_a_recipe"], "is not a recipe"),
        ([f"{HERE}:tiny", "--backends", "fsdp3"], "got 'fsdp3'"),
        ([f"{HERE}:tiny", "--backends", ","], "expected a comma-separated list"),
        ([f"{HERE}:tiny", "--world-size", "two"], "--world-size 'two': expected positive whole numbers"),
        ([f"{HERE}:tiny", "--steps", "0"], "'--steps'"),
        ([f"{HERE}:tiny", "--plot", "parity.jpg"], "ends in .png, .svg or .pdf"),
        ([f"{HERE}:tiny", "--json", "nowhere/x.json"], "there is no folder"),
        ([f"{HERE}:tiny", "--bogus"], "--bogus"),
        ([f"{HERE}:tiny", "--json", "tests"], "'tests' is a folder"),
        ([f"{HERE}:tiny", "--plot", "tests/nowhere/x.png"], "there is no folder"),
        ([f"{HERE}:bad_field"], f"{HERE}:bad_field: recipe.accumulate: expected a positive integer"),
        ([f"{HERE}:tiny", "--mesh", "data=2", "--record", "x.json"], "--mesh has no effect together with --record"),
        ([f"{HERE}:tiny", "--mesh", "data=2", "--against", "x.json"], "--mesh has no effect together with --against"),
        (["--record", "t.json"], "expected a RECIPE"),
        ([f"{HERE}:tiny", f"{HERE}:other", "--record", "t.json"], "give one RECIPE"),
        ([f"{HERE}:tiny", "--record", "t.json", "--backends", "ddp,fsdp2"], "--record records one training"),
        ([f"{HERE}:tiny", "--tensors"], "give --record too"),
        ([f"{HERE}:tiny", "--against", "absent.json"], "absent.json: cannot be read: No such file"),
        ([f"{HERE}:tiny", "--against", "setup.cfg"], "setup.cfg: this is not JSON, or it is cut off"),
        (
            [f"{HERE}:tiny", "--against", "t.json", "--reference", "none"],
            "--reference has no effect together with --against",
        ),
        ([f"{HERE}:tiny", f"{HERE}:other", "--against", "t.json"], "give one RECIPE"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, fake: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake()
    monkeypatch.chdir(ROOT)
    assert run(*arguments) == 2
    out, err = capfd.readouterr()
    (line,) = [line for line in err.splitlines() if line != "a recipe that talks"]
    assert line.startswith("fsshard: ") and said in line and out == ""
    assert made.calls == []


def test_a_recipe_that_raises_shows_where(fake: Any, capfd: Any) -> None:
    fake()
    assert run(f"{HERE}:broken") == 2
    err = capfd.readouterr().err
    assert "cannot be created: RuntimeError: no such data set" in err and "in broken" in err


def test_a_missing_import_of_a_recipe_is_named(
    fake: Any, capfd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy_recipes.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    fake()
    assert run("needy_recipes:x") == 2
    assert capfd.readouterr().err == (
        "fsshard: 'needy_recipes:x' cannot be imported: No module named 'no_such_package'\n"
    )


def test_a_bad_recipe_does_not_lose_the_results_of_others(fake: Any, capfd: Any, tmp_path: Path) -> None:
    fine = report(exact("ddp"))
    fake(RecipeError("not deterministic"), fine)
    file = tmp_path / "parity.json"
    assert run(f"{HERE}:tiny", f"{HERE}:other", "--json", str(file)) == 2
    out, err = capfd.readouterr()
    assert out.strip() == str(fine) and f"fsshard: {HERE}:tiny: not deterministic\n" in err
    bad, good = json.loads(file.read_text())
    assert bad == {"recipe": f"{HERE}:tiny", "ok": False, "error": "not deterministic"}
    assert ParityReport.from_json(json.dumps(good)) == fine


def test_the_json_is_there_when_the_picture_fails(
    fake: Any, capfd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(report: ParityReport, path: Path) -> None:
        raise OSError("no space left")

    fake(report(exact("ddp")))
    monkeypatch.setattr(ParityReport, "plot", full)
    file = tmp_path / "parity.json"
    assert run(f"{HERE}:tiny", "--json", str(file), "--plot", str(tmp_path / "x.png")) == 2
    assert ParityReport.from_json(file.read_text()).ok and "no space left" in capfd.readouterr().err


def test_a_reference_that_fails_is_no_bad_input(fake: Any, capfd: Any) -> None:
    fake(RankFailed(1, "ValueError", "broken", "Traceback of rank 1"))
    assert run(f"{HERE}:tiny") == 1
    said = f"fsshard: {HERE}:tiny: rank 1 failed with ValueError: broken\n\nTraceback of rank 1"
    assert said in capfd.readouterr().err


def test_interrupted(fake: Any, capfd: Any) -> None:
    fake(report(exact("ddp")), KeyboardInterrupt())
    assert run(f"{HERE}:tiny", f"{HERE}:other") == 130
    out, err = capfd.readouterr()
    assert "all agree" in out and f"fsshard: {HERE}:other: interrupted" in err


def test_for_real(tmp_path: Path) -> None:
    """`python -m fsshard` in another process, from a folder with a recipe in it, on one rank."""
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom fsshard.parity import Recipe\n"
        "def build(): return torch.nn.Linear(3, 2)\n"
        "def batches(rank, world_size, number): return torch.ones(2, 3) + number\n"
        "def loss(model, batch): return model(batch).square().mean()\n"
        "def recipe():\n    print('talk')\n    return Recipe(build=build, batches=batches, loss=loss)\n"
    )
    words = "parity mine:recipe --backends fsdp2,ddp --world-size 1 --steps 2 --json - --plot p.png"
    done = run_module("fsshard", words.split(), tmp_path, {})
    assert done.returncode == 0, done.stderr
    made = ParityReport.from_json(done.stdout)
    assert [(c.backend, c.world_size, c.verdict) for c in made] == [("fsdp2", 1, "exact"), ("ddp", 1, "exact")]
    assert "all agree: 2 exact" in done.stderr and "talk" in done.stderr
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


# One training recorded

FAULTS = "tests.parity.faults:mlp"


def half_rate() -> Recipe:
    return replace(faults.mlp(), hyper={"lr": 0.05})


@pytest.fixture
def shared(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command takes the session's ranks, and leaves them running."""

    class Shared:
        most_ranks = ranks.most_ranks
        run = staticmethod(ranks.run)

        def __init__(self, device: str = "cpu") -> None:
            assert device == "cpu"

        def __enter__(self) -> Shared:
            return self

        def __exit__(self, *_: object) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(fsshard.launching.pool, "RankPool", Shared)
    monkeypatch.setattr("fsshard.parity.runs.RankPool", Shared)
    return


def test_recorded_and_compared(shared: None, tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "trace.json"
    assert cli.main(["parity", FAULTS, "--record", str(file), "--steps", "2", "--tensors"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[0] == f"2 steps of {FAULTS} under ddp on 2 ranks: {file}"
    assert f"  torch {torch.__version__}" in said
    assert said[-1] == f"compare with it: fsshard parity {FAULTS} --against {file}"
    trace = Trace.load(file)
    assert (trace.steps, trace.backend, trace.world_size, trace.detail) == (2, "ddp", 2, "tensors")
    assert cli.main(["parity", FAULTS, "--against", str(file), "--json", "-"]) == 0
    out, err = capfd.readouterr()
    (cell,) = json.loads(out)["cells"]
    assert (cell["backend"], cell["world_size"], cell["verdict"], len(cell["steps"])) == ("ddp", 2, "exact", 2)
    assert "all agree: 1 exact" in err
    assert cli.main(["parity", "tests.cli.test_parity:half_rate", "--against", str(file), "--backends", "fsdp2"]) == 1
    said = capfd.readouterr().out
    assert "recipe.hyper {'lr': 0.1} -> {'lr': 0.05}" in said
    assert "first: step 0, param_groups of group 0: lr, rank 0: expected 0.1, got 0.05; not equal" in said


def test_a_recipe_that_differs_from_itself_is_not_recorded(shared: None, tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "t.json"
    assert cli.main(["parity", "tests.parity.faults:restless", "--record", str(file), "--steps", "1", "-q"]) == 2
    assert "the recipe is not deterministic" in capfd.readouterr().err
    assert not file.exists()
