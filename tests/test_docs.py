"""Checks that the documentation is true: its code runs, its commands and links exist."""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import functools
import io
import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsshard
from benchmarks import summary
from benchmarks.page import sections_of
from fsshard.backends.registry import loaded_backends
from tests.documents import ROOT, blocks, training
from tools import changelog, faults

DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT")),
    *sorted(DOCS.rglob("*.md")),
]
FOLDERS = ("fsshard", "compat", "tests", "docs", "benchmarks", "examples", "tools", "website")


def job_train(code: str) -> str:
    names = {"__name__": "docs"}
    exec(compile(code, "docs/memory.md", "exec"), names)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names["train"](SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size()))
    return printed.getvalue()


def test_estimate(ranks: Any) -> None:
    text = (DOCS / "memory.md").read_text(encoding="utf-8")
    (code,) = (block for block in blocks(DOCS / "memory.md", "python") if "def train" in block)
    printed = ranks.run(job_train, 2, code)[0]
    explained, _, tracked = printed.partition("memory under")
    assert f"```\n{explained}```" in text
    head, *rows = (re.split(" {2,}", line) for line in tracked.splitlines())
    shown = text.partition("memory under")[2].splitlines()
    assert head[0] == shown[0] and rows[0] == re.split(" {2,}", shown[1])
    assert rows[-1][-1] == re.split(" {2,}", shown[6])[-1], "where the peak is"


# ------------------------------------------------------------------------------------------------------------ README


def job_readme(code: str, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the README's training in ``folder``: the weights that it returns, and those of its checkpoint."""
    names = {"__name__": "docs"}
    exec(compile(code, "README.md", "exec"), names)
    before = os.getcwd()
    os.chdir(folder)
    try:
        weights = names["train"](SimpleNamespace(rank=dist.get_rank(), device=torch.device("cpu")))
        bare = names["TFNO"](n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16)
        model = fsshard.wrap(bare, backend="ddp")
        fsshard.load("ckpt/last", model)
    finally:
        os.chdir(before)
    return tensors(weights), tensors(model.state_dict())


def tensors(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def test_the_readmes_training_runs(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("neuralop")
    (returned, saved), (others, _) = ranks.run(job_readme, 2, training(), str(tmp_path))
    assert any(value.is_complex() for value in returned.values())
    assert returned.keys() == saved.keys() == others.keys()
    for name, value in returned.items():
        assert torch.equal(value, saved[name]) and torch.equal(value, others[name]), name


def job_raw_engines() -> list[str]:
    """Return what FSDP1 and FSDP2 say of the README's model."""
    from neuralop.models import TFNO
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    build = functools.partial(TFNO, n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=4, n_layers=1)
    said = []
    for sharded in (
        lambda: FullyShardedDataParallel(build(), device_id=torch.device("cpu"), use_orig_params=True),
        lambda: fully_shard(build())(torch.ones(1, 1, 8, 8)),
    ):
        try:
            sharded()
        except (ValueError, AssertionError) as error:
            said.append(str(error))
    return said


def test_the_readme_quotes_what_torchs_engines_say(ranks: Any) -> None:
    pytest.importorskip("neuralop")
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    (quoted,) = re.findall(r"\(FSDP1: `([^`]+)`, FSDP2: `([^`]+)`\)", text)
    for said in ranks.run(job_raw_engines, 2):
        assert len(said) == 2 and all(part in whole for part, whole in zip(quoted, said, strict=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_is_python(page: Path) -> None:
    for code in blocks(page, "python"):
        compile(code, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_make_and_scripts_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)`", text)) <= targets
    for command in re.findall(r"python ((?:benchmarks|examples)/\S+\.py)", text):
        assert (ROOT / shlex.split(command)[0]).is_file(), command


def test_ci_runs_the_versions_of_torch_that_are_pinned_and_the_newest() -> None:
    pinned, makefile, workflow, ci = (
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("constraints.txt", "Makefile", ".github/workflows/ci.yml", ".ci/run")
    )
    versions = re.findall(r"^torch==(\S+)$", pinned, re.MULTILINE)
    versions += re.findall(r"^(?:NEWEST_TORCH|TORCHS_BETWEEN) *:= (.*)$", makefile, re.MULTILINE)
    assert set(" ".join(versions).split()) == set(re.findall(r"\b\d+\.\d+\.\d+\b", workflow))
    assert re.findall(r"^make .*$", ci, re.MULTILINE) == ["make test", "make test-newest"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_cells_of_tables_are_short(page: Path) -> None:
    """On a phone a longer one is a column of single words: write a list, or a section that the search finds."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    cells = [cell for row in re.findall(r"^\|.*\|$", text, re.MULTILINE) for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell.split()) > 25] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" not in link:
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_faults_are_those_of_the_table_and_each_is_shown() -> None:
    assert faults.PAGE.read_text(encoding="utf-8") == faults.page(), "python -m tools.faults"
    for rows in faults.faults().values():
        for row in rows:
            assert row["tests"] and {*row["tests"]} <= known_tests() | files(), row


def test_ratios_are_those_that_were_measured() -> None:
    _, measured = sections_of(summary.MEASURED.read_text(encoding="utf-8"))
    assert summary.table(measured) in summary.PAGE.read_text(encoding="utf-8"), "python -m benchmarks.summary"


def test_pages_are_short() -> None:
    """Nobody reads a longer one. What commands write, docs/data, has no bound; what is only looked up has another."""
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *(DOCS / "reference").glob("*.md")]
    words = {str(page.relative_to(ROOT)): len(page.read_text(encoding="utf-8").split()) for page in pages}
    bounds = {"README.md": 800, "docs/troubleshooting.md": 1_900}
    assert {name: count for name, count in words.items() if count > bounds.get(name, 1_200)} == {}
    assert sum(words.values()) <= 35_000


# -------------------------------------------------------------------------------------------- names of files and tests


@functools.cache
def files() -> frozenset[str]:
    return frozenset(
        str(path.relative_to(ROOT))
        for top in FOLDERS
        for path in (ROOT / top).rglob("*")
        if "__pycache__" not in str(path)
    )


@functools.cache
def known_tests() -> frozenset[str]:
    """All test functions, as ``file::name``."""
    found = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py")}
    return frozenset(f"{file}::{name}" for file, text in found.items() for name in re.findall(r"def (test_\w+)", text))


def named(page: Path) -> list[str]:
    """Return what a page has in backticks, outside of blocks of code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """With their whole path, but for tests, of which a page may name the file alone."""
    for name in named(page):
        path = name.partition("::")[0]
        if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./-]*", path):
            assert path.rstrip("/") in {*files(), *FOLDERS}, name
        elif re.fullmatch(r"([\w-]+/)*test_\w+\.py", path):
            assert any(file.endswith(f"/{path}") for file in files()), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_exist(page: Path) -> None:
    for name in named(page):
        if match := re.fullmatch(r"(?:([\w/-]+\.py)::)?(test_[\w*]+)", name):
            assert fnmatch.filter(known_tests(), f"*{match[1] or ''}::{match[2]}"), name


# -------------------------------------------------------------------------------------------------------------- rooms


ROOMS = sorted(path.parent for path in (ROOT / "fsshard").rglob("__init__.py") if path.parent != ROOT / "fsshard")


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_says_which_question_it_answers(room: Path) -> None:
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    first = text.partition("\n\n")[0]
    assert first.count("?") == 1 and "\n" not in first, f"one question, in one line: {first!r}"


def test_the_changelog_of_a_release_fits_on_a_page() -> None:
    changelog.main(ROOT / "CHANGELOG.md")


def test_each_option_of_an_engine_has_a_row_and_a_test() -> None:
    """A new one, too: whoever changes engines finds there what becomes of it, and no option is without a test."""
    page = DOCS / "torch-arguments.md"
    rows = [line.split("|")[1] for line in page.read_text().splitlines() if line.startswith("| `")]
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for engine in loaded_backends():
        for name in engine.facts.option_names:
            assert any(f"`{name}=" in row for row in rows), f"{page} has no row for {name}= of {engine.name}"
            assert re.search(rf"\b{name}=|[\"']{name}[\"']:", tests), f"no test passes {name}= of {engine.name}"


def test_the_architecture_has_every_room() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    top = [path.relative_to(ROOT) for path in ROOMS if path.parent == ROOT / "fsshard"]
    assert [str(room) for room in top if f"| `{room}/` |" not in text] == []


def test_the_drawing_has_the_rooms_in_the_order_of_the_layers() -> None:
    """From top to bottom, as import-linter checks them."""
    (layers,) = re.findall(r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    order = [name.removeprefix("fsshard.") for name in re.findall(r"fsshard\.\w+", layers)]
    (drawing, *_) = blocks(ROOT / "ARCHITECTURE.md", "")
    drawn = re.findall(r"(\w+)(?:/|\.py) ", drawing)
    assert [name for name in drawn if name != "compat"] == order


def test_the_architecture_names_files_in_full_or_by_room() -> None:
    """A path without its first folder lies in fsshard/; a bare file name in a room's row lies in that room."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", text):
        assert any(f"/{file}".endswith(f"/{name.rstrip('/')}") for file in (*files(), *FOLDERS)), name
