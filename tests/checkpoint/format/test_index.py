"""The index: what is written is read, and no statement that is not true of a checkpoint."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsshard.checkpoint.format.division import Piece, cover
from fsshard.checkpoint.format.index import Index, ModelInfo, OptimizerInfo, Origin, TensorInfo, says_ours, sealed
from fsshard.checkpoint.format.tensors_file import FileEntry
from fsshard.checkpoint.format.tree import encode
from fsshard.errors import CorruptCheckpoint

ONE, TWO = "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"


def sample(files: dict[str, FileEntry] | None = None) -> Index:
    def tree(value: Any) -> Any:
        return encode(value, lambda path, tensor: "optimizer/main/w/exp_avg")

    moment = TensorInfo("float32", (6,), (Piece(ONE, "optimizer/main/w/exp_avg", 0, 6),))
    return Index(
        id="0af3",
        ordinal=7,
        saved_at="2026-01-02T03:04:05+00:00",
        origin=Origin("0.1.0", "2.13.0", "fsdp2", 2),
        files=files or {ONE: FileEntry(400, 1), TWO: FileEntry(300, 2**32 - 1)},
        tensors={
            "model/w": TensorInfo("complex64", (2, 3), (Piece(ONE, "model/w@0", 0, 4), Piece(TWO, "model/w@4", 4, 6))),
            "model/s": TensorInfo("int64", (), (Piece(TWO, "model/s", 0, 1),)),
            "model/empty": TensorInfo("bool", (0, 3), ()),
            "optimizer/main/w/exp_avg": moment,
        },
        model=ModelInfo(
            {"w": "model/w", "s": "model/s", "e": "model/empty", "x": None, "y": None},
            {"x": tree({1: 2})},
            {"y": "is rebuilt"},
        ),
        tied={"v": "w"},
        optimizers={
            "main": OptimizerInfo(
                "Adam",
                [tree({"lr": 0.1, "betas": (0.9, 0.99), "params": ["w"]})],
                {"w": {"step": 3, "exp_avg": tree(torch.ones(6))}},
            )
        },
        objects={"scheduler": {"all": tree({"best": float("inf")})}, "data": {"per_rank": [1, 2]}},
        rng={"per_rank": [None, tree((1, 2))]},
    )


def parse(value: Any, seal: bool = True) -> Index:
    """A JSON value as an index; with a digest that is right, so that what is said in it has to be wrong."""
    value = {key: item for key, item in value.items() if key != "sha256"}
    return Index.from_json(sealed(value) if seal else json.dumps(value).encode(), "index.json")


def test_comes_back_with_its_order() -> None:
    index = sample()
    again = Index.from_json(index.to_json(), "index.json")
    assert again == index and list(again.model.keys) == list(index.model.keys)
    assert again.to_json() == index.to_json() and again.tensors_in(TWO) == ["model/w", "model/s"]
    bare = Index("0", 0, "2026-01-02T03:04:05+00:00", Origin("", "", "none", 1), {}, {}, ModelInfo({}, {}, {}))
    assert Index.from_json(bare.to_json(), "x") == bare


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """A change: the last of ``path`` to where the others lead; ``del`` removes it."""

    def change(value: Any) -> None:
        *way, key, new = path
        for step in way:
            value = value[step]
        if new == "del":
            del value[key]
        else:
            value[key] = new

    return change


W = ("tensors", "model/w")
DEEP = "[" * 100_000 + "]" * 100_000
CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    **{f"without {key}": put(key, "del") for key in json.loads(sample().to_json()) if key != "sha256"},
    "another format": put("format", "zip"),
    "version 0": put("format_version", 0),
    **{
        f"file {name!r}": put("files", name, {"bytes": 1, "crc32": 1}) for name in ("../x", "/etc/passwd", "index.json")
    },
    "unknown dtype": put(*W, "dtype", "qint8"),
    "other shape": put(*W, "shape", [2, 4]),
    "a gap": put(*W, "pieces", 1, 2, 5),
    "an overlap": put(*W, "pieces", 1, 2, 3),
    "more than its file": put("files", TWO, "bytes", 15),
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_false_statement_is_enough(name: str) -> None:
    value = copy.deepcopy(json.loads(sample().to_json()))
    CHANGES[name](value)
    with pytest.raises(CorruptCheckpoint, match=r"^index\.json(?!.*checksum)"):
        parse(value)
    with pytest.raises(CorruptCheckpoint, match=r"^index\.json"):
        parse(value, seal=False)


def test_a_newer_format_names_who_wrote_it() -> None:
    value = {"format": "fsshard-checkpoint", "format_version": 4, "origin": {"fsshard": "9.8"}, "all": "else is new"}
    for seal in (True, False):
        with pytest.raises(CorruptCheckpoint, match=r"format version 4.*'fsshard': '9\.8'"):
            parse(value, seal)
        with pytest.raises(CorruptCheckpoint, match="format version 4"):
            parse({**value, "origin": []}, seal)


def test_an_index_without_its_digest_is_cut_short() -> None:
    value = json.loads(sample().to_json())
    del value["sha256"]
    with pytest.raises(CorruptCheckpoint, match="checksum at its end is missing"):
        Index.from_json(json.dumps(value, separators=(",", ":")).encode(), "index.json")


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    data = bytearray(sample().to_json())
    for text in (b"", b"null", b"[]", DEEP.encode()):
        with pytest.raises(CorruptCheckpoint, match=r"^index\.json"):
            Index.from_json(text, "index.json")
    for position in range(len(data)):
        with pytest.raises(CorruptCheckpoint, match=r"^index\.json"):
            Index.from_json(data[:position], "index.json")
        for bit in range(8):
            data[position] ^= 1 << bit
            with pytest.raises(CorruptCheckpoint, match=r"^index\.json"):
                Index.from_json(data, "index.json")
            data[position] ^= 1 << bit
    assert Index.from_json(data, "index.json") == sample()


def test_whose_index_it_is(tmp_path: Path) -> None:
    def said(text: bytes) -> bool:
        (tmp_path / "index.json").write_bytes(text)
        return says_ours(tmp_path)

    assert not says_ours(tmp_path) and said(sample().to_json())
    assert said(json.dumps(json.loads(sample().to_json()), indent=2).encode())
    others = (b'{"photos": []}', b"[]", b'{"format":"zip"}', b"", b"{", bytes(100))
    assert not any(said(text) for text in others)


def test_what_a_reader_needs_of_the_pieces() -> None:
    one, two, three = pieces = [Piece("f", "w", start, stop) for start, stop in [(0, 4), (4, 9), (9, 12)]]
    assert list(cover(pieces, (3, 10))) == [(one, 3, 4), (two, 4, 9), (three, 9, 10)]
    assert list(cover(pieces, (4, 4))) == []
