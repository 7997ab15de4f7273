"""What the summarization example is made of: tokens, batches, the checkpoint file, gauges, the picture."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples import summarization as parts
from fsshard import RankMismatch

PAIRS = [("abc def", "xyz"), ("a", "é")]

# Batches ----------------------------------------------------------------------------------------------------------


def test_texts_become_bytes_and_an_end() -> None:
    (text, summary), (short, accented) = parts.encode(PAIRS, 5, 64)
    assert bytes(text[:-1] - 3) == b"abc " and text[-1] == 1  # cut to five, end included
    assert bytes(summary[:-1] - 3) == b"xyz"
    assert len(short) == 2 and bytes(accented[:-1] - 3).decode() == "é"
    assert max(int(t.max()) for pair in parts.encode(PAIRS, 5, 64) for t in pair) < parts.VOCABULARY


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


# Gauges and agreement ---------------------------------------------------------------------------------------------


def job_agree(differ: bool) -> None:
    parts.check_same(f"digest {dist.get_rank() if differ else 0}", "the data")


def test_ranks_agree_on_the_data(ranks: Any) -> None:
    assert ranks.run(job_agree, 2, False) == [None, None]
    for error in ranks.run_expecting_errors(job_agree, 2, True):
        assert type(error) is RankMismatch and str(error) == "ranks [1] differ from rank 0 in the data"
