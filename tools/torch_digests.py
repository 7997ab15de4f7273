"""Which lines of torch have changed since they were last read? Digests of what the areas stand on, by version of torch.

Behaviour changes under unchanged names. So for every name of :mod:`fsshard.torch_private.registry` the parts of
torch's source that it stands on are digested (:mod:`tools.torch_sources`): a function itself, a class with
its methods, and of an attribute of objects all that mentions it in the file that has it. Of what is written in C++
there is the signature at most: the rest is left to the tests.

``torch_digests.json`` has the digests under which this was read. A part whose digest is the same from a version on is
in it once; behind the digest of one that changed stands what the change means here. After a new torch::

    python -m tools.torch_digests             # lists what differs: the lines to read
    python -m tools.torch_digests --record    # notes the digests of the torch that is installed
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fsshard.torch_private.registry import Private, everything
from tools.torch_behaviour import CountedOn, counted_on
from tools.torch_sources import Part, digest_of, parts_of

RECORDED = Path(__file__).with_name("torch_digests.json")
SITE = Path(torch.__file__).parent.parent
GONE = "gone"
Key: TypeAlias = tuple[str, str, str]
"""Area, file of torch, and the name of a part of it."""


# ------------------------------------------------------------------------------------------------ what torch says


@dataclass(frozen=True)
class Ground:
    """A part of torch that an area stands on.

    Attributes:
        digest: of what it says.
        lines: where; nothing for a signature.
        names: the private names, or the reasons, for which it is stood on.
    """

    digest: str
    lines: str
    names: tuple[str, ...]


def ground(site: Path = SITE) -> dict[Key, Ground]:
    """All that the areas stand on, in the torch that is installed.

    Args:
        site: the folder that has torch's.
    """
    names: dict[Key, list[str]] = {}
    found: dict[Key, tuple[str, str]] = {}
    for entry in everything():
        for key, digest, lines in _parts_of_private(entry, site):
            found[key] = digest, lines
            names.setdefault(key, []).append(entry.name.partition(":")[2])
    for one in counted_on():
        for key, part in _parts_below(one, site):
            found[key] = part.digest, part.lines
            names.setdefault(key, []).append(one.why)
    return {key: Ground(*found[key], tuple(dict.fromkeys(names[key]))) for key in sorted(found)}


def unsigned() -> list[Private]:
    """Names of C++ of which not even a signature can be had: that they behave as before is left to the tests."""
    return [entry for entry in everything() if not entry.source.endswith(".py") and _signature(entry) is None]


def _parts_of_private(entry: Private, site: Path) -> Iterator[tuple[Key, str, str]]:
    if entry.source.endswith(".py"):
        for part in _parts_for(entry, parts_of(site / entry.source)):
            yield (entry.area, entry.source, part.name), part.digest, part.lines
    elif signature := _signature(entry):
        yield (entry.area, entry.source, entry.name.partition(":")[2]), digest_of(signature), ""


def _parts_for(entry: Private, parts: Mapping[str, Part]) -> list[Part]:
    path = entry.name.partition(":")[2]
    if not entry.is_attribute and path in parts:
        return _with_members(path, parts)
    last = path.rpartition(".")[2]
    return [part for part in parts.values() if last in part.mentioned]


def _with_members(path: str, parts: Mapping[str, Part]) -> list[Part]:
    return [part for name, part in parts.items() if name == path or name.startswith(f"{path}.")]


def _parts_below(one: CountedOn, site: Path) -> Iterator[tuple[Key, Part]]:
    module, _, path = one.name.partition(":")
    folder = module.replace(".", "/")
    file = f"{folder}/__init__.py" if (site / folder).is_dir() else f"{folder}.py"
    parts = parts_of(site / file)
    for part in _with_members(path, parts) if path else parts.values():
        if part.name != "__all__":
            yield (one.area, file, part.name), part


def _signature(entry: Private) -> str | None:
    """Return the arguments that a function of C++ takes, as far as torch tells."""
    if not entry.present:
        return None
    operator = next(part for part in reversed(entry.name.split(".")) if part != "default").rpartition(":")[2]
    if entry.source.endswith(".yaml"):
        packet = getattr(torch.ops.aten, operator)
        return "\n".join(str(getattr(packet, name)._schema) for name in packet.overloads())
    value: Any = entry.value
    if isinstance(value, torch._ops.OpOverload):
        return str(value._schema)
    told = [line for line in (getattr(value, "__doc__", None) or "").splitlines() if "->" in line]
    return re.sub(r" at 0x[0-9a-f]+", "", "\n".join(told)) or None


# ------------------------------------------------------------------------------------------------ what is recorded


@dataclass(frozen=True)
class Record:
    """The digests under which torch's source was read.

    Attributes:
        versions: minor version of torch -> the full version that was recorded.
        said: part -> minor version -> its digest from that version on, or ``"gone"``; then what the change means here.
    """

    versions: dict[str, str]
    said: dict[Key, dict[str, str]]

    @classmethod
    def read(cls, path: Path = RECORDED) -> Record:
        """Return what is in a file."""
        tree = json.loads(path.read_text(encoding="utf-8"))
        versions = tree.pop("torch")
        said = {
            (area, file, name): {min(versions, key=_order): text} if isinstance(text, str) else text
            for area, files in tree.items()
            for file, parts in files.items()
            for name, text in parts.items()
        }
        return cls(versions, said)

    def write(self, path: Path = RECORDED) -> None:
        """Into a file, with a line for each part, so that a diff shows what a torch has changed."""
        first = min(self.versions, key=_order)
        lines = [f' "torch": {json.dumps(self.versions)}']
        for area in sorted({key[0] for key in self.said}):
            files = [
                f"  {json.dumps(file)}: {{\n" + ",\n".join(self._lines(area, file, first)) + "\n  }"
                for file in sorted({key[1] for key in self.said if key[0] == area})
            ]
            lines.append(f" {json.dumps(area)}: {{\n" + ",\n".join(files) + "\n }")
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    def _lines(self, area: str, file: str, first: str) -> Iterator[str]:
        for key, said in sorted(self.said.items()):
            if key[:2] == (area, file):
                value = said[first] if list(said) == [first] else said
                yield f"   {json.dumps(key[2])}: {json.dumps(value, ensure_ascii=False)}"

    def digests(self, minor: str) -> dict[Key, str]:
        """Return what is there in a minor version, as far as it was recorded."""
        found = {key: _digest(_said(said, minor)) for key, said in self.said.items()}
        return {key: digest for key, digest in found.items() if digest != GONE}

    def nearest(self, minor: str) -> str:
        """The minor version to compare one with: itself, or the newest before it that is recorded, or the oldest."""
        earlier = [one for one in self.versions if _order(one) <= _order(minor)]
        return max(earlier, key=_order) if earlier else min(self.versions, key=_order)

    def unread(self) -> list[str]:
        """Changes from one minor version to the next behind whose digest nobody has said what they mean here."""
        return [
            f"{file}, {name}, {minor}"
            for (_, file, name), said in sorted(self.said.items())
            for minor, text in said.items()
            if minor != min(self.versions, key=_order) and " " not in text
        ]

    def noting(self, version: str, now: Mapping[Key, Ground]) -> Record:
        """With the digests of a torch that is installed.

        What is stood on for the first time is taken to be the same in later versions, until these are recorded. What
        is not stood on any more is left out, if this very torch was recorded before: it is not torch that has changed.

        Args:
            version: of torch, in full.
            now: what the areas stand on in it.
        """
        version, minor = _without_build(version), _minor(version)
        minors = sorted({*self.versions, minor}, key=_order)
        before = self.digests(minor) if self.versions.get(minor) == version else {}
        said = {
            key: _noted(self.said.get(key, {}), minor, now[key].digest if key in now else GONE, minors)
            for key in {*self.said, *now}
            if key in now or key not in before
        }
        versions = {one: version if one == minor else self.versions[one] for one in minors}
        return Record(versions, {key: texts for key, texts in said.items() if texts})


def _noted(said: Mapping[str, str], minor: str, digest: str, minors: list[str]) -> dict[str, str]:
    texts = {one: _said(said, one) for one in minors}
    for one in minors:
        if (one == minor or (not said and _order(one) > _order(minor))) and _digest(texts[one]) != digest:
            texts[one] = digest
    changed, last = {}, GONE
    for one in minors:
        if _digest(texts[one]) != last:
            changed[one], last = texts[one], _digest(texts[one])
    return changed


def _said(said: Mapping[str, str], minor: str) -> str:
    since = [one for one in said if _order(one) <= _order(minor)]
    return said[max(since, key=_order)] if since else GONE


def _digest(text: str) -> str:
    return text.partition(" ")[0]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _order(minor: str) -> tuple[int, ...]:
    return tuple(map(int, minor.split(".")))


def _without_build(version: str) -> str:
    return version.partition("+")[0]


# ------------------------------------------------------------------------------------------------ what differs


@dataclass(frozen=True)
class Change:
    """A part of torch that is not as recorded.

    Attributes:
        area: the file of this room that stands on it.
        file: of torch.
        part: a function, a class or a method in it.
        kind: ``"changed"``, ``"new"`` (it did not mention the names before) or ``"gone"``.
        lines: where to read it; nothing where it is gone, and for signatures.
        names: the private names, or the reasons, for which it is stood on.
    """

    area: str
    file: str
    part: str
    kind: str
    lines: str = ""
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{self.file}:{self.lines}" if self.lines else self.file
        return f"{where}: {self.part} {self.kind}{': ' if self.names else ''}{'; '.join(self.names)}"


@dataclass(frozen=True)
class Comparison:
    """The torch that is installed, beside what is recorded.

    Attributes:
        version: of torch.
        recorded: the version that it is compared with, in full.
        same_minor: whether that is its own minor version.
        parts: how many parts of torch were compared.
        changes: those that differ.
    """

    version: str
    recorded: str
    same_minor: bool
    parts: int
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        with_what = f"torch {self.recorded}" + ("" if self.same_minor else f"; {_minor(self.version)} is not recorded")
        told = f"{len(self.changes)} of {self.parts} parts of torch {self.version} are not as recorded with {with_what}"
        return "\n".join([told, *map(str, self.changes)])


def compare(version: str = torch.__version__, record: Record | None = None, site: Path = SITE) -> Comparison:
    """Find what the areas stand on that is not as recorded. Reads about forty files of torch: a few seconds.

    Args:
        version: of the torch that is installed.
        record: what was recorded; by default what this checkout has.
        site: the folder that has torch's.
    """
    record = record or Record.read()
    minor = record.nearest(_minor(version))
    then, now = record.digests(minor), ground(site)
    changes = tuple(_changes(then, now))
    version = _without_build(version)
    return Comparison(version, record.versions[minor], minor == _minor(version), len({*then, *now}), changes)


def _changes(then: Mapping[Key, str], now: Mapping[Key, Ground]) -> Iterator[Change]:
    for key in sorted({*then, *now}):
        if key not in now:
            yield Change(*key, kind=GONE)
        elif then.get(key) != now[key].digest:
            kind = "changed" if key in then else "new"
            yield Change(*key, kind=kind, lines=now[key].lines, names=now[key].names)


def users_of(area: str) -> list[str]:
    """Return the files of the library that use an area: those whose behaviour rests on it."""
    root = Path(__file__).parents[1]
    imports = re.compile(rf"fsshard\.torch_private(\.{area} import|  *import\b.*\b{area}\b)")
    files = sorted(file for folder in ("fsshard", "compat") for file in (root / folder).rglob("*.py"))
    users = [file for file in files if file.parent.name != "torch_private" and imports.search(file.read_text("utf-8"))]
    return [str(file.relative_to(root)) for file in users]


def main(arguments: list[str] | None = None) -> int:
    """The command: list what differs, or record it."""
    parser = argparse.ArgumentParser(prog="python -m tools.torch_digests", description=__doc__)
    parser.add_argument("--record", action="store_true", help="note the digests of the torch that is installed")
    parser.add_argument("--file", type=Path, default=RECORDED, help="where they are noted; by default beside this file")
    asked = parser.parse_args(arguments)
    record = Record.read(asked.file)
    if asked.record:
        record = record.noting(torch.__version__, ground())
        record.write(asked.file)
    print(compare(record=record))
    print(f"no source, no signature, judged by tests alone: {', '.join(entry.name for entry in unsigned())}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
