"""What ``t5_summarization.py`` would also need without an engine: batches, a checkpoint file, a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.docstrings import Pair
from fsshard import ConfigurationError, RankMismatch
from fsshard.demo.common import Stopwatch, replace_file

__all__ = [
    "EMPTY",
    "IGNORED",
    "PAD",
    "VOCABULARY",
    "Batch",
    "Example",
    "Loader",
    "Sets",
    "Stopwatch",
    "check_same",
    "collate",
    "encode",
    "generate",
    "picture",
    "read_checkpoint",
    "rouge",
    "to_device",
    "write_checkpoint",
]

PAD, VOCABULARY = 0, 384
"""ByT5's: three special tokens, 256 bytes, 125 sentinels."""

IGNORED = -100
"""The label of a place that counts nothing."""

Batch = dict[str, Tensor]
Example = tuple[Tensor, Tensor]
Sets = tuple[list[Example], list[Example]]
Loader = Any  # DataLoader[Batch], whose sampler is a DistributedSampler

# Batches ----------------------------------------------------------------------------------------------------------


def encode(pairs: Sequence[Pair], text_length: int, summary_length: int) -> list[Example]:
    """Texts and summaries as byte tokens (int64, one dimension), cut to these lengths, end token included."""
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()

    def tokens(text: str, length: int) -> Tensor:
        return torch.tensor(tokenizer(text, truncation=True, max_length=length).input_ids)

    return [(tokens(text, text_length), tokens(summary, summary_length)) for text, summary in pairs]


EMPTY: Example = (torch.tensor([1]), torch.tensor([], dtype=torch.int64))
"""No text but its end, and no summary: fills a batch up and counts nothing."""


def collate(examples: list[Example]) -> Batch:
    """``input_ids`` and ``attention_mask`` (N, text), ``decoder_input_ids`` and ``labels`` (N, summary).

    Both are padded to the longest. The decoder reads the summary one place late, from a padding token on, and says
    what comes next.
    """
    pad = nn.utils.rnn.pad_sequence
    input_ids = pad([text for text, _ in examples], batch_first=True, padding_value=PAD)
    labels = pad([summary for _, summary in examples], batch_first=True, padding_value=IGNORED)
    if not labels.shape[1]:  # all are empty, and T5 wants one place at least
        labels = labels.new_full((len(labels), 1), IGNORED)
    late = nn.functional.pad(labels[:, :-1], (1, 0), value=PAD)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != PAD).long(),
        "decoder_input_ids": late.masked_fill(late == IGNORED, PAD),
        "labels": labels,
    }


def to_device(batch: Batch, device: torch.device) -> Batch:
    """All tensors of a batch; from pinned memory the copy runs beside the computation."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


@torch.no_grad()
def generate(model: Any, pairs: Sequence[Pair], text_length: int, summary_length: int) -> list[str]:
    """What a bare model says about each text: greedily, byte by byte, never the same eight bytes twice."""
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    batch = collate(encode(pairs, text_length, summary_length))
    model.eval()
    made = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=summary_length,
        do_sample=False,
        num_beams=1,
        no_repeat_ngram_size=8,  # a young model would say "the the the"
    )
    return [str(text) for text in tokenizer.batch_decode(made, skip_special_tokens=True)]


def rouge(said: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    """The mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004), by Google's ``rouge_score``; between 0 and 1."""
    from rouge_score.rouge_scorer import RougeScorer

    kinds = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(kinds, use_stemmer=True)
    scores = [scorer.score(target, prediction) for prediction, target in zip(said, wanted, strict=True)]
    return {kind: sum(score[kind].fmeasure for score in scores) / len(scores) for kind in kinds}


def check_same(digest: str, what: str) -> None:
    """Raise on every rank if ranks have different digests. Collective."""
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    other = [rank for rank, each in enumerate(digests) if each != digests[0]]
    if other:
        raise RankMismatch(f"ranks {other} differ from rank 0 in {what}")


# The checkpoint ---------------------------------------------------------------------------------------------------


def write_checkpoint(file: Path, state: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """One safetensors file, whole or not at all. Tied weights are written once; the notes say who shares them."""
    from safetensors.torch import save_file

    first: dict[int, str] = {}
    tied = {key: name for key, value in state.items() if (name := first.setdefault(id(value), key)) != key}
    tensors = {key: value.contiguous() for key, value in state.items() if key not in tied}
    file.parent.mkdir(parents=True, exist_ok=True)
    metadata = {**notes, "tied": json.dumps(tied)}

    def write(temporary: Path) -> None:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(tensors, temporary, metadata)
        temporary.chmod(mode)  # safetensors 0.8 leaves a file that nobody but its owner may read

    replace_file(file, write)


def read_checkpoint(file: Path) -> dict[str, Tensor]:
    """The state dict that :func:`write_checkpoint` was given.

    Raises:
        ConfigurationError: there is no such file, or it is another kind of file.
    """
    from safetensors import SafetensorError, safe_open

    expected = "expected a file that --save has written"
    if not file.is_file():
        raise ConfigurationError(f"{file} does not exist; {expected}")
    try:
        with safe_open(file, framework="pt") as content:
            tied = json.loads((content.metadata() or {})["tied"])
            state = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118 (it is no mapping)
        return {**state, **{key: state[name] for key, name in tied.items()}}
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read; {expected}: {type(error).__name__}: {error}") from error


# The picture ------------------------------------------------------------------------------------------------------


def picture(file: Path, runs: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """Draw the loss curves: training per step, validation per epoch. Equal curves are nested bands, the first widest.

    Args:
        file: its suffix says the format. It appears in one piece.
        runs: by name, the losses per step and per epoch.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    for number, (name, (losses, validation)) in enumerate(runs.items()):
        width = 1.5 + 2.0 * (len(runs) - 1 - number)
        per_epoch = len(losses) // len(validation)
        ax.plot(range(1, len(losses) + 1), losses, color=f"C{number}", linewidth=width / 3, alpha=0.35)
        steps = [per_epoch * (epoch + 1) for epoch in range(len(validation))]
        ax.plot(steps, validation, color=f"C{number}", linewidth=width, marker="o", markersize=3 + width, label=name)
    ax.set(xlabel="step", ylabel="loss (nats per byte)", title="thin: training, per step; thick: validation, per epoch")
    ax.legend()
    ax.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, lambda temporary: figure.savefig(temporary, dpi=160))
