"""The parts of the summarization example: tokens, batches, the checkpoint file, the data."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from examples import docstrings
from examples import summarization as parts

PAIRS = [("abc def", "xyz"), ("a", "é")]

# Batches ----------------------------------------------------------------------------------------------------------


def test_subwords_are_learned_from_the_texts() -> None:
    pairs = [("Get the default domain of a name", "Return the default domain.")] * 3 + PAIRS
    tokens = parts.learn_tokenizer(pairs, 280)
    learned = parts.tokenizer_json(tokens)
    (text, summary), *_, (_, accented) = parts.encode(pairs, 64, 64, tokens)
    assert len(tokens) == 280 and text[-1] == summary[-1] == 1 and parts.PAD not in text
    assert len(set(text.tolist()) & set(summary.tolist()) - {1}) >= 2, "a word has the same tokens in both"
    assert len(summary) < len("Return the default domain.") and len(parts.encode(pairs, 4, 4, tokens)[0][0]) == 4
    said = tokens.batch_decode([summary, accented], skip_special_tokens=True)
    assert [each.strip() for each in said] == ["Return the default domain.", "é"]
    assert learned == parts.tokenizer_json(tokens) == parts.tokenizer_json(parts.learn_tokenizer(pairs, 280))
    assert parts.tokenizer_json(None) == ""


def test_a_batch_is_padded_and_the_decoder_reads_one_place_late() -> None:
    batch = parts.collate(parts.encode(PAIRS, 64, 64))
    x, z = (3 + ord(c) for c in "xz")
    assert batch["labels"].tolist() == [[x, x + 1, z, 1], [3 + 0xC3, 3 + 0xA9, 1, -100]]
    assert batch["decoder_input_ids"].tolist() == [[0, x, x + 1, z], [0, 3 + 0xC3, 3 + 0xA9, 1]]
    assert batch["attention_mask"].tolist() == [[1] * 8, [1, 1] + [0] * 6]
    assert (batch["input_ids"] == 0).tolist() == (batch["attention_mask"] == 0).tolist()


# The checkpoint ---------------------------------------------------------------------------------------------------


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """With a tied weight, a scalar, an integer and a tensor that is not contiguous."""
    shared = torch.randn(3, 2)
    return {"a": shared, "b": torch.randn(2, 3).t(), "a.again": shared, "n": torch.tensor(3)}


def test_a_checkpoint_comes_back_as_it_was(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    file = tmp_path / "new" / "best.safetensors"
    parts.write_checkpoint(file, state, {"epoch": "2"})
    back = parts.read_checkpoint(file)
    assert set(back) == set(state) and all(torch.equal(back[key], value) for key, value in state.items())
    assert back["a"] is back["a.again"] and parts.read_notes(file) == {"epoch": "2"}
    assert parts.read_tokenizer(file) is None  # bytes
    assert stat.S_IMODE(os.stat(file).st_mode) & 0o044, "others could not read it"


# The data -----------------------------------------------------------------------------------------------------------


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
