"""Parts of ``t5_summarization.py`` that have nothing to do with engines: tokens, batches, checkpoint file, picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.docstrings import Pair
from fsshard import ConfigurationError, RankMismatch
from fsshard.demo.common import Stopwatch, replace_file
from fsshard.pictures import FAINT, GREY, draw_picture

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
    "learn_tokenizer",
    "picture",
    "read_checkpoint",
    "read_notes",
    "read_tokenizer",
    "rouge",
    "to_device",
    "tokenizer_json",
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

# Tokens -----------------------------------------------------------------------------------------------------------


def learn_tokenizer(pairs: Sequence[Pair], size: int) -> Any:
    """At most ``size`` subwords (byte-level BPE: Sennrich et al., 2016; all 256 bytes are among them).

    The same for the same pairs. Returns a tokenizer as transformers has them.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "</s>"],  # 0 and 1, as ByT5 has them
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((each for pair in pairs for each in pair), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return _fast(tokenizer)


def _fast(tokenizer: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def tokenizer_json(tokenizer: Any) -> str:
    """Return a learned tokenizer in the format of the library tokenizers; ``""`` stands for bytes (None)."""
    if tokenizer is None:
        return ""
    tokenizer.backend_tokenizer.no_truncation()  # the last call's length is no part of what was learned
    return str(tokenizer.backend_tokenizer.to_str())


def read_tokenizer(file: Path) -> Any:
    """The tokenizer of a checkpoint's weights; None: bytes."""
    from tokenizers import Tokenizer

    with _opened(file) as (_, notes):
        content = notes.get("tokenizer")
        try:
            return _fast(Tokenizer.from_str(content)) if content else None
        except Exception as error:  # tokenizers raises no narrower one
            raise ValueError(f"its tokenizer: {error}") from error


# Batches ----------------------------------------------------------------------------------------------------------


def encode(pairs: Sequence[Pair], text_length: int, summary_length: int, tokenizer: Any = None) -> list[Example]:
    """Texts and summaries as tokens (int64, one dimension), cut to these lengths, end token included.

    Without a tokenizer they are bytes.
    """
    tokenizer = tokenizer or _byte_tokenizer()

    def tokens(text: str, length: int) -> Tensor:
        return torch.tensor(tokenizer(text, truncation=True, max_length=length).input_ids)

    return [(tokens(text, text_length), tokens(summary, summary_length)) for text, summary in pairs]


def _byte_tokenizer() -> Any:
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


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
def generate(
    model: Any,
    pairs: Sequence[Pair],
    text_length: int,
    summary_length: int,
    tokenizer: Any = None,
    *,
    unrepeated: int = 8,
    batch_size: int = 64,
) -> list[str]:
    """Summarize each text with a bare model: greedily, never the same ``unrepeated`` tokens twice (0: as it comes)."""
    speaker = tokenizer or _byte_tokenizer()
    examples = encode(pairs, text_length, summary_length, tokenizer)
    said: list[str] = []
    model.eval()
    for begin in range(0, len(examples), batch_size):
        batch = collate(examples[begin : begin + batch_size])
        made = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=summary_length,
            do_sample=False,
            num_beams=1,
            no_repeat_ngram_size=unrepeated,  # a young model would say "the the the"
        )
        said += [str(text).strip() for text in speaker.batch_decode(made, skip_special_tokens=True)]
    return said


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
    with _opened(file) as (content, notes):
        state = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118 (it is no mapping)
        return {**state, **{key: state[name] for key, name in json.loads(notes["tied"]).items()}}


def read_notes(file: Path) -> dict[str, str]:
    """The notes that :func:`write_checkpoint` was given. Raises as :func:`read_checkpoint` does."""
    with _opened(file) as (_, notes):
        return {key: value for key, value in notes.items() if key != "tied"}


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    from safetensors import SafetensorError, safe_open

    expected = "expected a file that --save has written"
    if not file.is_file():
        raise ConfigurationError(f"{file} does not exist; {expected}")
    try:
        with safe_open(file, framework="pt") as content:
            yield content, content.metadata() or {}
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read; {expected}: {type(error).__name__}: {error}") from error


# The picture ------------------------------------------------------------------------------------------------------


def picture(
    file: Path,
    runs: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    token: str = "byte",
    right: Mapping[str, Sequence[float]] | None = None,
    baselines: Mapping[str, float] | None = None,
) -> None:
    """Draw the loss curves: training per step, validation per epoch. Equal curves are nested bands, the first widest.

    Args:
        file: its suffix says the format. It appears in one piece.
        runs: by name, the losses per step and per epoch.
        token: what the losses are per.
        right: by name, the share of summaries that are right, per epoch; drawn beside the losses.
        baselines: by name, shares that need no training, as dashed lines.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    draw_picture(file, (10 if right else 8, 4), lambda figure: paint(figure, runs, token, right, baselines or {}))


def paint(
    figure: Any,
    runs: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    token: str,
    right: Mapping[str, Sequence[float]] | None,
    baselines: Mapping[str, float],
) -> None:
    """Fill a figure; the arguments are those of :func:`picture`."""
    panels = figure.subplots(1, 2 if right else 1, squeeze=False)[0]
    for losses, _ in runs.values():
        panels[0].plot(range(1, len(losses) + 1), losses, color=FAINT, linewidth=0.8)
    losses, first = next(iter(runs.values()))
    validations = {name: validation for name, (_, validation) in runs.items()}
    _bands(panels[0], validations, len(losses) // len(first))
    title = "grey: training, each step; coloured: validation, each epoch"
    panels[0].set(xlabel="step", ylabel=f"loss (nats per {token})", title="" if right else title)
    if len(runs) > 1:
        apart = max(abs(x - y) for other in validations.values() for x, y in zip(first, other, strict=True))
        panels[0].legend(title=f"largest difference: {apart:g}")
    if right is None:
        return
    panels[0].set_title("loss: training grey, validation blue")
    _bands(panels[1], {name: [100 * share for share in shares] for name, shares in right.items()}, 1)
    for name, share in baselines.items():
        panels[1].axhline(100 * share, color=GREY, linestyle="--", linewidth=1)
        place = (max(map(len, right.values())), 100 * share)
        panels[1].annotate(name, place, (0, 3), textcoords="offset points", color=GREY, ha="right")
    panels[1].set(xlabel="epoch", ylabel="%", title="answers that are exactly right", ylim=(0, 100))


def _bands(axes: Any, curves: Mapping[str, Sequence[float]], every: int) -> None:
    """Draw curves with a point at each multiple of ``every``, thinner and thinner, so that equal ones all show."""
    for number, (name, curve) in enumerate(curves.items()):
        width = 2.0 + 2.5 * (len(curves) - 1 - number)
        places = range(every, every * len(curve) + 1, every)
        axes.plot(places, curve, linewidth=width, marker="o", markersize=3 + width, label=name)
