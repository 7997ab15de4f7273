"""Texts and their summaries that every machine has: docstrings, and their first lines.

A Python docstring begins with one line that says it all, and goes on with the rest. The rest is the text, the first
line its summary; the standard library that is installed holds about 2,300 such pairs, which take a few seconds to
read. They are split by module (a top-level file or package of the library), so that no summary to judge by was
written in a file that was trained on.

Or the text is a whole docstring, and the "summary" the name of the module that it stands in. A name is said only by
who has seen it, so these pairs, about 3,300 of 27 modules, are split by text.

    data = docstrings.load()                 # read from the library the first time, then from the user's cache
    data = docstrings.load("modules")        # docstrings, and the modules that they describe
    data = docstrings.load("aclsum")         # papers and their summaries, where the package aclsum is installed
    text, summary = data.train[0]

Call :func:`load` before the ranks are launched: they then all read what one process has made.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import logging
import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsshard import ConfigurationError, MissingExtra
from fsshard.demo import common

__all__ = ["SOURCES", "Pair", "Pairs", "find_modules", "find_pairs", "is_validation", "load", "named"]

Pair = tuple[str, str]
"""A text and its summary."""

SUMMARY_LENGTHS = range(15, 101)
"""Characters of a first line that says something, and says it in a line."""

SHORTEST_TEXT = 80
"""Characters of a text that there is something to summarise of."""

LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib"})
"""Folders that are not the library, or that not every distribution installs."""

SHORTEST_DOCSTRING = 60
"""Characters of a docstring that says what it is about."""

FEWEST_DOCSTRINGS = 40
"""Fewest docstrings of a module whose name can be learned."""

ONE_IN = 8
"""One module, or docstring, in so many is for validation."""

FORMAT = 1
"""Part of the cache's file name: raise it with any change to the pairs that :func:`load` returns."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pairs:
    """Pairs of text and summary, to train with and to judge by."""

    train: tuple[Pair, ...]
    validation: tuple[Pair, ...]

    def digest(self) -> str:
        """The same where, and only where, the pairs are the same."""
        return hashlib.sha256(json.dumps([self.train, self.validation]).encode()).hexdigest()

    def limited(self, n_train: int | None, n_validation: int | None) -> Pairs:
        """The first of each; None is all.

        Raises:
            ConfigurationError: there are not so many.
        """
        for name, asked, there in (
            ("n_train", n_train, len(self.train)),
            ("n_validation", n_validation, len(self.validation)),
        ):
            if asked is not None and not 1 <= asked <= there:
                raise ConfigurationError(f"{name}={asked}, but there are {there} pairs; choose 1 to {there}")
        return Pairs(self.train[:n_train], self.validation[:n_validation])


def load(source: str = "docstrings") -> Pairs:
    """The pairs of a source.

    Args:
        source: ``"docstrings"``, ``"modules"`` or ``"aclsum"``.

    Raises:
        ConfigurationError: there is no such source, or this Python has no library in files.
        MissingExtra: the package of the source is not installed.
    """
    if source not in SOURCES:
        raise ConfigurationError(f"there are no data {source!r}; choose one of {', '.join(SOURCES)}")
    return SOURCES[source]()


# The standard library ---------------------------------------------------------------------------------------------


def _load_docstrings() -> Pairs:
    return _from_library("docstrings", _docstring_pairs)


def _load_modules() -> Pairs:
    return _from_library("modules", _module_pairs)


def _docstring_pairs(library: Path) -> Pairs:
    found = list(find_pairs(library))
    return Pairs(
        tuple(pair for module, pair in found if not is_validation(module)),
        tuple(pair for module, pair in found if is_validation(module)),
    )


def _module_pairs(library: Path) -> Pairs:
    """In the order of the texts' hashes, so that the first few are of many modules."""
    found = sorted(find_modules(library), key=lambda pair: _hash(pair[0]))
    return Pairs(
        tuple(pair for pair in found if not is_validation(pair[0])),
        tuple(pair for pair in found if is_validation(pair[0])),
    )


def _from_library(source: str, read: Callable[[Path], Pairs]) -> Pairs:
    library = Path(sysconfig.get_path("stdlib"))
    place = hashlib.sha256(str(library).encode()).hexdigest()[:8]
    file = common.cache_dir(source) / f"v{FORMAT}-python{platform.python_version()}-{place}.json"
    pairs = _read_cache(file)
    if pairs is None:
        pairs = read(library)
        if not pairs.train or not pairs.validation:
            raise ConfigurationError(
                f"the standard library in {library} has no docstrings to read (a zipped or compiled one has none); "
                "choose --data aclsum, or a Python whose library lies in .py files"
            )
        _write_cache(file, pairs)
    return pairs


def is_validation(key: str) -> bool:
    """Return whether a module's name, or a text, is kept for validation; the same in every release of Python."""
    return _hash(key)[0] % ONE_IN == 0


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def find_pairs(library: Path) -> Iterator[tuple[str, Pair]]:
    """Every pair below a folder once, with the module (the top-level file or package) that it is first found in."""
    seen: set[Pair] = set()
    for module, docstring in _all_docstrings(library):
        pair = _pair(docstring)
        if pair is not None and pair not in seen:
            seen.add(pair)
            yield module, pair


def find_modules(library: Path) -> list[Pair]:
    """Every docstring below a folder once, in one line, and its module's name; of modules that have enough of them."""
    first: dict[str, str] = {}
    for module, docstring in _all_docstrings(library):
        text = " ".join(docstring.split())
        if len(text) >= SHORTEST_DOCSTRING:
            first.setdefault(text, module)
    sizes = Counter(first.values())
    return [(text, module) for text, module in first.items() if sizes[module] >= FEWEST_DOCSTRINGS]


def named(text: str, modules: Iterable[str]) -> str | None:
    """The first of these modules that a text names, in whatever case and with or without underscores around."""
    names = {module.strip("_").lower(): module for module in modules}
    return next((names[word] for word in re.findall(r"[a-z0-9]+", text.lower()) if word in names), None)


def _all_docstrings(library: Path) -> Iterator[tuple[str, str]]:
    """Yield each module and docstring that belongs to the library."""
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).with_suffix("").parts
        if LEFT_OUT.isdisjoint(parts):
            for docstring in _docstrings(file):
                yield parts[0], docstring


def _docstrings(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())  # bytes: the file itself says its encoding
    except (OSError, SyntaxError, ValueError, RecursionError) as error:  # templates and samples of bad code
        log.info("no docstrings from %s: %s", file, error)
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _pair(docstring: str) -> Pair | None:
    """Its first paragraph and the rest, each in one line; None where there is too little of either."""
    first, _, rest = docstring.partition("\n\n")
    summary, text = " ".join(first.split()), " ".join(rest.split())
    return (text, summary) if len(summary) in SUMMARY_LENGTHS and len(text) >= SHORTEST_TEXT else None


# The package aclsum -----------------------------------------------------------------------------------------------


def _load_aclsum() -> Pairs:
    """ACLSum (Takeshita et al., 2024): abstracts of papers, each with a summary of its challenge, approach, outcome.

    The text begins with the word that is asked for, as T5's texts do. The package's files are read as they lie; it is
    not imported, so what it imports itself need not be there.
    """
    spec = importlib.util.find_spec("aclsum")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra("aclsum", "t5", "--data aclsum")
    folder = Path(spec.submodule_search_locations[0]) / "dataset"
    return Pairs(tuple(_papers(folder / "train.jsonl")), tuple(_papers(folder / "val.jsonl")))


def _papers(file: Path) -> Iterable[Pair]:
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            paper: dict[str, Any] = json.loads(line)
            abstract = " ".join(paper["sentences"]["abstract"])
            for aspect, summary in paper["summary"].items():
                yield f"{aspect}: {abstract}", summary
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{file} cannot be read as ACLSum 0.1's papers, one JSON object a line: {type(error).__name__}: {error}"
        ) from error


SOURCES: dict[str, Callable[[], Pairs]] = {
    "docstrings": _load_docstrings,
    "modules": _load_modules,
    "aclsum": _load_aclsum,
}
"""The data that :func:`load` can be asked for."""


# The cache --------------------------------------------------------------------------------------------------------


def _write_cache(file: Path, pairs: Pairs) -> None:
    """Keep the pairs and their digest; a cache that cannot be written costs time, not the run."""
    content = {"sha256": pairs.digest(), "train": pairs.train, "validation": pairs.validation}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        common.replace_file(file, lambda temporary: temporary.write_text(json.dumps(content), encoding="utf-8"))
    except OSError as error:
        log.warning("cannot keep the docstrings in %s, the next run will look for them again: %s", file, error)


def _read_cache(file: Path) -> Pairs | None:
    """The cached pairs, or None where there are none or the file is not whole."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        train, validation = (tuple((text, summary) for text, summary in content[k]) for k in ("train", "validation"))
        pairs = Pairs(train, validation)
        if pairs.digest() != content["sha256"]:
            raise ValueError("its pairs have changed since they were written")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the cached docstrings in %s are damaged and will be looked for again: %s", file, error)
        return None
    return pairs
