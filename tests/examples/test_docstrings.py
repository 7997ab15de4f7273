"""Docstrings as texts and summaries: what is found, how it is split, the cache, and the package aclsum."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from examples import docstrings
from fsshard import ConfigurationError, MissingExtra

REST = "It goes on for a while, so that there is something to summarise here, and then it ends at last."


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may read or write the user's cache."""
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(variable, str(tmp_path / "cache"))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small standard library: one module to judge by, the others to train with."""
    folder = tmp_path / "library"
    for number in range(20):
        write(folder / f"module{number}.py", f"Do the thing number {number}.")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(folder))
    return folder


def write(file: Path, summary: str, rest: str = REST, encoding: str = "utf-8") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'# coding: {encoding}\ndef f():\n    """{summary}\n\n    {rest}\n    """\n', encoding=encoding)


# What is found ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_installed_library_has_about_two_thousand_pairs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    data = docstrings.load()
    assert len(data.train) > 1000 and len(data.validation) > 100
    assert len(set(data.train + data.validation)) == len(data.train + data.validation)
    for text, summary in data.train + data.validation:
        assert len(text) >= 80 and 15 <= len(summary) <= 100
        assert "\n" not in text + summary
    assert docstrings.load() == data


def test_first_lines_of_every_kind_of_docstring(tmp_path: Path) -> None:
    code = [
        '"""The module itself, all of it.\n\n{}\n"""',
        'class C:\n    """The class that is here.\n\n    {}\n    """',
    ]
    code += ['async def f():\n    """A  function\n    on two lines.\n\n    {}\n\n    More.\n    """']
    (tmp_path / "one.py").write_text("\n\n\n".join(code).replace("{}", REST))
    pairs = dict(pair[::-1] for _, pair in docstrings.find_pairs(tmp_path))
    assert pairs == {
        "The module itself, all of it.": REST,
        "The class that is here.": REST,
        "A function on two lines.": f"{REST} More.",
    }


def described(first: int, count: int) -> str:
    """The source of functions with docstrings that are all of one paragraph."""
    lines = [f'def f{n}():\n    """Do the thing number {n},\n\n    {REST}"""' for n in range(first, first + count)]
    return "\n".join(lines)


def test_a_docstring_and_its_module_are_split_by_the_text(library: Path) -> None:
    """So that both are seen of each module; what a module has too few of, or another has first, is left out."""
    for name, first, count in (("_abc", 0, 45), ("few", 100, 39), ("many/part", 200, 50), ("same", 0, 45)):
        file = library / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(described(first, count))
    data = docstrings.load("modules")
    pairs = data.train + data.validation
    assert dict(pairs) == {
        f"Do the thing number {n}, {REST}": "_abc" if n < 45 else "many" for n in (*range(45), *range(200, 250))
    }
    assert {name for _, name in data.train} == {name for _, name in data.validation} == {"_abc", "many"}
    assert {name for _, name in data.train[:12]} == {"_abc", "many"}, "the first few are of one module"
    assert len(data.validation) < 0.25 * len(pairs)
    assert docstrings.load("modules") == data != docstrings.load()


def test_a_library_without_sources_raises(library: Path) -> None:
    for file in library.iterdir():
        file.unlink()
    with pytest.raises(ConfigurationError, match=r"has no docstrings to read .* choose --data aclsum"):
        docstrings.load()


@pytest.fixture
def aclsum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package laid out as aclsum is, which cannot be imported: it wants one that is not there."""
    folder = tmp_path / "packages" / "aclsum"
    (folder / "dataset").mkdir(parents=True)
    (folder / "__init__.py").write_text("import sienna_that_is_not_installed\n")
    for name, words in (("train", ["first", "second"]), ("val", ["third"])):
        papers = [
            {"sentences": {"abstract": [f"The {w} .", "It ends ."]}, "summary": {"challenge": f"c {w}", "outcome": "é"}}
            for w in words
        ]
        lines = "".join(json.dumps(paper) + "\n" for paper in papers)
        (folder / "dataset" / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, "aclsum", raising=False)
    return folder


def test_aclsum_is_read_where_it_is_installed(aclsum: Path) -> None:
    data = docstrings.load("aclsum")
    assert data.train[:2] == (("challenge: The first . It ends .", "c first"), ("outcome: The first . It ends .", "é"))
    assert len(data.train) == 4
    assert data.validation == (("challenge: The third . It ends .", "c third"), ("outcome: The third . It ends .", "é"))


def test_aclsum_that_is_not_installed_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"--data aclsum needs the package 'aclsum'.*pip install 'fsshard\[t5\]'"):
        docstrings.load("aclsum")
