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
from fsshard import ConfigurationError, RankMismatch

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


def test_what_fills_up_counts_nothing() -> None:
    alone = parts.collate([parts.EMPTY])
    assert alone["labels"].tolist() == [[-100]] and alone["decoder_input_ids"].tolist() == [[0]]
    among = parts.collate([*parts.encode(PAIRS, 64, 64), parts.EMPTY])
    assert among["labels"][2].tolist() == [-100] * 4
    assert among["attention_mask"][2].sum() == 1  # a text without any token would have no attention to spread


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


def test_the_old_checkpoint_lives_until_the_new_one_does(
    state: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    file = tmp_path / "best.safetensors"
    parts.write_checkpoint(file, state, {})
    before = file.read_bytes()
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parts.write_checkpoint(file, {"a": torch.zeros(1)}, {})
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_no_checkpoint_raises(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "best.safetensors"
    with pytest.raises(ConfigurationError, match=r"best\.safetensors does not exist; expected a file that --save has"):
        parts.read_checkpoint(file)
    save_file({"a": torch.zeros(1)}, file)  # without notes
    with pytest.raises(ConfigurationError, match=r"cannot be read; expected .* KeyError: 'tied'"):
        parts.read_checkpoint(file)
    parts.write_checkpoint(file, state, {})
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        parts.read_checkpoint(file)
    parts.write_checkpoint(file, state, {"tokenizer": "{"})
    with pytest.raises(ConfigurationError, match=r"cannot be read; .* its tokenizer: "):
        parts.read_tokenizer(file)


# Gauges and agreement ---------------------------------------------------------------------------------------------


def test_the_stopwatch() -> None:
    with parts.Stopwatch(torch.device("cuda" if torch.cuda.is_available() else "cpu")) as watch:
        torch.ones(2**20)
    assert watch.seconds > 0


def job_agree(differ: bool) -> None:
    parts.check_same(f"digest {dist.get_rank() if differ else 0}", "the data")


def test_ranks_agree_on_the_data(ranks: Any) -> None:
    assert ranks.run(job_agree, 2, False) == [None, None]
    for error in ranks.run_expecting_errors(job_agree, 2, True):
        assert type(error) is RankMismatch and str(error) == "ranks [1] differ from rank 0 in the data"


# The picture ------------------------------------------------------------------------------------------------------


def test_the_picture_has_a_curve_per_run_and_shows_equal_ones(tmp_path: Path) -> None:
    from matplotlib.image import imread

    def colours(runs: dict[str, tuple[list[float], list[float]]]) -> set[tuple[int, ...]]:
        file = tmp_path / "new" / f"{len(runs)}.png"
        parts.picture(file, runs)
        pixels = (imread(file)[..., :3] * 255).round().astype(int)
        return {tuple(pixel) for pixel in pixels.reshape(-1, 3).tolist()}

    run = ([4.0, 3.0, 2.0, 1.0], [3.5, 1.5])
    first, second = (31, 119, 180), (255, 127, 14)  # matplotlib's C0 and C1
    one, two = colours({"ddp": run}), colours({"ddp": run, "fsdp2": run})
    width = imread(tmp_path / "new" / "2.png").shape[1]
    assert first in one and second not in one
    assert {first, second} <= two
    assert sorted(each.name for each in (tmp_path / "new").iterdir()) == ["1.png", "2.png"]
    parts.picture(tmp_path / "names.png", {"ddp": run}, "subword", {"ddp": [0.2, 0.6]}, {"the commonest": 0.1})
    assert imread(tmp_path / "names.png").shape[1] > width, "no place for how many are right"
