"""Train a T5 to summarise, from scratch and without a download; the engine is one word.

    python examples/t5_summarization.py --backend fsdp2 --nprocs 2 --data modules --picture t5.png
    python examples/t5_summarization.py --backend fsdp2 --nprocs 2 --save checkpoints
    python examples/t5_summarization.py --backend fairscale fsdp fsdp2 ddp --picture t5.png
    python examples/t5_summarization.py --precision bf16 --activation-checkpointing --optimizer adadelta
    python examples/t5_summarization.py --pretrained google/byt5-small --rouge 50        # a T5 over bytes, or a folder
    torchrun --nproc-per-node 2 examples/t5_summarization.py --backend fsdp --data aclsum

The texts are docstrings of the installed standard library, the summaries their first lines (``docstrings.py``); the
tokens are bytes. ``--data modules`` asks for the module that a docstring describes instead, in subwords that the
training texts teach, and ends with the share of names that are exactly right. Losses are means over tokens, and over
the tokens of all ranks: a rank with short summaries counts for less. With several backends the same training runs
under each, and the last lines show the largest difference between their losses.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a script from anywhere

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import fsshard
from examples import docstrings
from examples import summarization as parts
from fsshard.demo.common import held_bytes, largest_difference, progress
from fsshard.sharded.reports import MemoryReport

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], float]] = {
    "adamw": (torch.optim.AdamW, 4e-3),
    "adadelta": (torch.optim.Adadelta, 1.0),
}
"""The class and its learning rate."""

FOR_MODULES: dict[str, Any] = {
    "subwords": 2000,
    "text_length": 64,
    "summary_length": 16,
    "epochs": 10,
    "batch_size": 8,
    "lr": 1.5e-3,  # of adamw
    "gamma": 0.9,
    "layers": 1,
}
"""Defaults of options where ``--data modules`` is given."""

FEWEST_SUBWORDS = 300
"""The 256 bytes are among them."""

BACKENDS = ("fairscale", "fsdp", "fsdp2", "ddp", "none")


@dataclass
class Outcome:
    """The results of a run: the same on every rank, but for ``held`` and ``best``.

    Attributes:
        losses: of the global batch, per step.
        validation: per epoch.
        accuracy: per epoch, the share of the validation set's tokens that the model would have said.
        whole: likewise the share of its summaries, to the last token.
        epochs: per epoch, the seconds that training took, and the peak memory of its last step on the rank with most.
        held: bytes that this rank holds between backward and step.
        best: the weights of the best epoch, in host memory; rank 0 has them, the others have ``{}``.
        best_epoch: counted from 1.
    """

    backend: str
    losses: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    epochs: list[tuple[float, MemoryReport]] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    best: dict[str, Tensor] = field(default_factory=dict)
    best_epoch: int = 0


def build_model(args: argparse.Namespace, tokenizer: Any = None) -> nn.Module:
    """A T5 over bytes, or over a tokenizer's subwords; the same weights at every call.

    Raises:
        ConfigurationError: ``--pretrained`` is no T5 over bytes.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    if args.pretrained:
        model = T5ForConditionalGeneration.from_pretrained(args.pretrained, dropout_rate=args.dropout)
        if model.config.vocab_size != parts.VOCABULARY:
            raise fsshard.ConfigurationError(
                f"--pretrained {args.pretrained} has {model.config.vocab_size} tokens; expected a T5 over bytes, which "
                f"has {parts.VOCABULARY}, such as google/byt5-small"
            )
        return model  # type: ignore[no-any-return, unused-ignore]
    config = T5Config(  # type: ignore[call-arg, unused-ignore]
        vocab_size=parts.VOCABULARY if tokenizer is None else len(tokenizer),
        d_model=args.width,
        d_kv=args.width // 4,
        d_ff=4 * args.width,
        num_layers=args.layers,
        num_heads=4,
        dropout_rate=args.dropout,
        decoder_start_token_id=parts.PAD,
        use_cache=False,  # nobody reads the cache of keys and values while training
    )
    torch.manual_seed(args.seed)
    return T5ForConditionalGeneration(config)


def token_losses(model: nn.Module, batch: parts.Batch) -> tuple[Tensor, Tensor]:
    """The sum of the cross entropy over this rank's tokens; and five sums over all ranks, float64.

    These are the loss, the tokens, those that are guessed, the summaries, and those that are guessed to the last token.
    float64, so that the order in which ranks are summed does not show.
    """
    logits = model(**{key: batch[key] for key in ("input_ids", "attention_mask", "decoder_input_ids")}).logits
    labels = batch["labels"]
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=parts.IGNORED, reduction="sum"
    )
    guessed, counts = logits.argmax(-1) == labels, labels != parts.IGNORED
    summaries = counts.any(1)
    whole = summaries & (guessed | ~counts).all(1)
    sums = (loss.detach(), counts.sum(), guessed.sum(), summaries.sum(), whole.sum())
    totals = torch.stack([each.double() for each in sums])
    dist.all_reduce(totals)
    return loss, totals


class Trainer:
    """One model under one engine. The only line that knows the engine is the one with ``backend=backend``."""

    def __init__(self, ctx: fsshard.Context, args: argparse.Namespace, backend: str, tokenizer: Any = None) -> None:
        self.ctx, self.args, self.outcome = ctx, args, Outcome(backend)
        self.tokenizer = tokenizer
        self.model = fsshard.wrap(
            build_model(args, tokenizer).to(ctx.device),
            backend=backend,
            mixed_precision=args.precision,
            activation_checkpointing=args.activation_checkpointing,
        )
        if args.weights:
            self.model.load_state_dict(parts.read_checkpoint(args.weights))
        optimizer_class, lr = OPTIMIZERS[args.optimizer]
        self.optimizer = fsshard.build_optimizer(self.model, optimizer_class, lr=lr if args.lr is None else args.lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=args.gamma)
        # float16 has too few small numbers for gradients; the scaler skips a step that overflows, on all ranks alike.
        self.scaler: Any = fsshard.GradScaler(self.model) if args.precision == "fp16" else None

    def train_epoch(self, loader: parts.Loader, epoch: int, report: Any) -> MemoryReport:
        """One pass over this rank's part of the training set; returns the memory of the last step, on every rank."""
        self.model.train()
        loader.sampler.set_epoch(epoch)
        memory = fsshard.MemoryTracker(self.model)  # of one step: each is as the others, and slower when watched
        for number, batch in enumerate(loader, 1):
            with memory if number == len(loader) else nullcontext():
                with self.model.autocast():
                    loss, totals = token_losses(self.model, parts.to_device(batch, self.ctx.device))
                # Engines take the mean of the ranks' gradients; this makes it the gradient of the mean over all tokens.
                self.step(loss * (self.ctx.world_size / totals[1]).to(loss.dtype))
            self.outcome.losses.append(float(totals[0] / totals[1]))
            report(self.outcome.losses[-1])
        return memory.report(all_ranks=True)

    def step(self, loss: Tensor) -> None:
        """Backward, clip, update."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self.model.clip_grad_norm_(self.args.clip)
        if not self.outcome.held and self.outcome.losses:  # from the second step on the optimizer has its state
            self.outcome.held = held_bytes(self.model)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def validate(self, loader: parts.Loader) -> tuple[float, float, float]:
        """Mean loss over all tokens of the validation set, and the shares of them, and of summaries, that are guessed.

        To be guessed to the last token is to be said by greedy generation: each token follows from those before it.
        """
        self.model.eval()
        total = torch.zeros(5, dtype=torch.float64, device=self.ctx.device)
        for batch in loader:
            with self.model.autocast():
                total += token_losses(self.model, parts.to_device(batch, self.ctx.device))[1]
        return float(total[0] / total[1]), float(total[2] / total[1]), float(total[4] / total[3])

    def keep_if_best(self, epoch: int) -> bool:
        """Stream the weights to rank 0 if this epoch's validation loss is the smallest. Every rank takes part."""
        newest = self.outcome.validation[-1]
        if not math.isfinite(newest):
            raise fsshard.FsshardError(f"the validation loss of epoch {epoch} is {newest}; a smaller --lr may help")
        if newest >= min(self.outcome.validation[:-1], default=math.inf):
            return False
        self.outcome.best_epoch = epoch
        self.outcome.best = self.model.state_dict(rank0_only=True, offload_to_cpu=True)
        if self.args.save and self.ctx.rank == 0:
            notes = {"epoch": str(epoch), "validation_loss": repr(newest), "config": self.model.config.to_json_string()}
            notes["tokenizer"] = parts.tokenizer_json(self.tokenizer)
            parts.write_checkpoint(checkpoint_file(self.args, self.outcome.backend), self.outcome.best, notes)
        return True


def train(
    ctx: fsshard.Context, args: argparse.Namespace, backend: str, sets: parts.Sets, tokenizer: Any = None
) -> Outcome:
    """All epochs under one engine."""
    trainer = Trainer(ctx, args, backend, tokenizer)
    outcome, loaders = trainer.outcome, make_loaders(ctx, args, sets)
    torch.manual_seed(args.seed + 1 + ctx.rank)  # dropout: another mask on every rank, the same under every engine
    steps = args.epochs * len(loaders[0])
    with progress(ctx, f"{backend}, {ctx.world_size} ranks", steps) as advance, scalars(ctx, args, backend) as writer:

        def report(loss: float) -> None:
            advance(loss)
            writer.add_scalar("loss/train", loss, len(outcome.losses))

        for epoch in range(1, args.epochs + 1):
            lr = trainer.optimizer.param_groups[0]["lr"]
            with parts.Stopwatch(ctx.device) as watch:
                peak = trainer.train_epoch(loaders[0], epoch, report)
            kept = (outcome.validation, outcome.accuracy, outcome.whole)
            for scores, score in zip(kept, trainer.validate(loaders[1]), strict=True):
                scores.append(score)
            trainer.scheduler.step()
            is_best = trainer.keep_if_best(epoch)
            outcome.epochs.append((watch.seconds, peak))
            if ctx.rank == 0:
                print(describe_epoch(outcome, lr, len(loaders[0]), is_best), flush=True)
            told = {"loss/validation": outcome.validation[-1], "accuracy": outcome.accuracy[-1]}
            told |= {"whole": outcome.whole[-1], "lr": lr, "seconds": watch.seconds}
            for name, value in told.items():
                writer.add_scalar(name, value, len(outcome.losses))
            peak.write(writer, len(outcome.losses))
    return outcome


def describe_epoch(outcome: Outcome, lr: float, steps: int, is_best: bool) -> str:
    """One line; the training loss is the epoch's mean over steps."""
    seconds, memory = outcome.epochs[-1]
    loss = sum(outcome.losses[-steps:]) / steps
    return (
        f"{outcome.backend:>9}  epoch {len(outcome.validation)}  train {loss:.4f}  "
        f"validation {outcome.validation[-1]!r}  accuracy {100 * outcome.accuracy[-1]:.1f} %  "
        f"whole {100 * outcome.whole[-1]:.1f} %  lr {lr:.2g}  {seconds:.1f} s  {memory.worst.total / 1e6:.1f} MB"
        + ("  best so far" if is_best else "")
    )


def make_loaders(ctx: fsshard.Context, args: argparse.Namespace, sets: parts.Sets) -> tuple[parts.Loader, parts.Loader]:
    """This rank's part of the training set, in another order every epoch, and of the validation set."""
    options: dict[str, Any] = {"batch_size": args.batch_size // ctx.world_size, "collate_fn": parts.collate}
    options["pin_memory"] = ctx.device.type == "cuda"
    place: dict[str, Any] = {"num_replicas": ctx.world_size, "rank": ctx.rank}
    train_set, validation_set = sets
    shuffled: Any = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True, **place)  # type: ignore[arg-type]
    # The sampler would fill the last ranks up with copies, which would count twice; what is empty counts nothing.
    filled = validation_set + [parts.EMPTY] * (-len(validation_set) % ctx.world_size)
    in_order: Any = DistributedSampler(filled, shuffle=False, **place)  # type: ignore[arg-type]
    return (
        DataLoader(train_set, sampler=shuffled, drop_last=True, **options),  # type: ignore[arg-type]
        DataLoader(filled, sampler=in_order, **options),  # type: ignore[arg-type]
    )


def scalars(ctx: fsshard.Context, args: argparse.Namespace, backend: str) -> AbstractContextManager[Any]:
    """A context that gives a writer with ``add_scalar``: TensorBoard's on rank 0 where asked, else one of nothing."""
    if ctx.rank or not args.tensorboard:
        return nullcontext(SimpleNamespace(add_scalar=lambda name, value, step: None))
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(args.tensorboard / backend))  # type: ignore[no-any-return, unused-ignore]


def checkpoint_file(args: argparse.Namespace, backend: str) -> Path:
    """Where the best weights of a run go."""
    return Path(args.save) / f"t5-{args.data}-{backend}.safetensors"


def job(ctx: fsshard.Context, args: argparse.Namespace) -> None:
    """Train on one rank; every rank calls it."""
    if ctx.local_rank == 0:
        load_data(args)  # so that one process of each machine reads the library and the others find the cache
    dist.barrier()
    data = load_data(args)
    outcomes = train_all(ctx, args, data)
    if ctx.rank == 0:
        report(ctx, args, data, outcomes)


def train_all(ctx: fsshard.Context, args: argparse.Namespace, data: docstrings.Pairs) -> list[Outcome]:
    """The same training under each engine in turn."""
    size = args.batch_size
    if size % ctx.world_size:
        raise fsshard.ConfigurationError(f"--batch-size {size} must be a multiple of the {ctx.world_size} ranks")
    if size > len(data.train):
        raise fsshard.ConfigurationError(f"--batch-size {size} is more than all {len(data.train)} pairs to train with")
    parts.check_same(data.digest(), "the data; let all machines have the same release of Python or of aclsum")
    tokenizer = tokens_of(args, data)
    learned = hashlib.sha256(parts.tokenizer_json(tokenizer).encode()).hexdigest()
    parts.check_same(
        learned, "the tokenizer; let all machines have the same release of tokenizers, or the same --weights"
    )
    shape = (args.text_length, args.summary_length, tokenizer)
    sets = (parts.encode(data.train, *shape), parts.encode(data.validation, *shape))
    return [train(ctx, args, backend, sets, tokenizer) for backend in args.backend]


def tokens_of(args: argparse.Namespace, data: docstrings.Pairs) -> Any:
    """That of ``--weights``, or what the training set teaches, the same at every call; None: bytes."""
    if args.weights:
        return parts.read_tokenizer(args.weights)
    return parts.learn_tokenizer(data.train, args.subwords) if args.subwords else None


def load_data(args: argparse.Namespace) -> docstrings.Pairs:
    """Load the data that the command line asks for."""
    return docstrings.load(args.data).limited(args.n_train, args.n_validation)


def report(ctx: fsshard.Context, args: argparse.Namespace, data: docstrings.Pairs, outcomes: list[Outcome]) -> None:
    """The table, the differences, some summaries, the picture."""
    from rich.console import Console
    from rich.table import Table

    where = f"{ctx.world_size} ranks, {args.precision}"
    table = Table(title=f"T5 on {args.data}, {args.epochs} epochs of {len(data.train)} pairs, {where}")
    for column in ("backend", "last", "best", "right", "params", "grads", "optim", "total", "s"):
        table.add_column(column, justify="left" if column == "backend" else "right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(outcome.backend, *table_row(outcome))
    console = Console(highlight=False)
    console.print(table)
    tokenizer = tokens_of(args, data)
    token = "byte" if tokenizer is None else "subword"
    console.print(
        f"Validation losses in nats per {token}; {token}s that the best epoch guesses right; MB that rank 0 holds "
        "between backward and step; training's seconds."
    )
    for other in outcomes[1:]:
        for kind in ("losses", "validation"):
            gap = largest_difference(getattr(outcomes[0], kind), getattr(other, kind))
            name = "training" if kind == "losses" else kind
            console.print(f"largest difference in {name} loss, {outcomes[0].backend} - {other.backend}: {gap!r}")
    show_answers(args, data, Speaker(args, tokenizer, outcomes[0].best))
    if args.picture:
        draw(args, data, token, outcomes)
        console.print(f"wrote {args.picture}")


def draw(args: argparse.Namespace, data: docstrings.Pairs, token: str, outcomes: list[Outcome]) -> None:
    """The losses; of names also how many are right, beside what needs no model."""
    runs = {outcome.backend: (outcome.losses, outcome.validation) for outcome in outcomes}
    if args.data != "modules":
        return parts.picture(args.picture, runs, token)
    right = {outcome.backend: outcome.whole for outcome in outcomes}
    shares = {name: share_right(said, data) for name, said in guesses(data).items()}
    return parts.picture(args.picture, runs, token, right, shares)


def table_row(outcome: Outcome) -> list[str]:
    """Validation losses, bytes and seconds."""
    losses = (outcome.validation[-1], min(outcome.validation))
    sizes = [outcome.held.get(key, 0) for key in ("parameters", "gradients", "optimizer state")]
    seconds = sum(seconds for seconds, _ in outcome.epochs)
    accuracy = f"{100 * outcome.accuracy[outcome.best_epoch - 1]:.1f} %"
    return (
        [f"{x:.4f}" for x in losses]
        + [accuracy]
        + [f"{x / 1e6:.2f}" for x in (*sizes, sum(sizes))]
        + [f"{seconds:.0f}"]
    )


class Speaker:
    """The best weights in a bare model, on rank 0 alone: they are whole there already, other ranks need no copy.

    (The newest weights would speak inside ``with model.full_parameters():``, entered on every rank.)
    """

    def __init__(self, args: argparse.Namespace, tokenizer: Any, weights: dict[str, Tensor]) -> None:
        self.args, self.tokenizer = args, tokenizer
        self.model = build_model(args, tokenizer)
        self.model.load_state_dict(weights)

    def say(self, pairs: Sequence[docstrings.Pair]) -> list[str]:
        """A summary of each text. Names are short enough to need no help against repetitions."""
        unrepeated = 0 if self.args.data == "modules" else 8 if self.tokenizer is None else 3
        lengths = (self.args.text_length, self.args.summary_length)
        return parts.generate(self.model, pairs, *lengths, self.tokenizer, unrepeated=unrepeated)


def show_answers(args: argparse.Namespace, data: docstrings.Pairs, speaker: Speaker) -> None:
    """Print the answers that the command line asks for."""
    if args.summaries:
        show_summaries(data.validation[:: max(1, len(data.validation) // args.summaries)][: args.summaries], speaker)
    if args.rouge:
        show_rouge(args, data.validation[: args.rouge], speaker)
    if args.data == "modules":
        show_names(data, speaker)


def show_summaries(chosen: tuple[docstrings.Pair, ...], speaker: Speaker) -> None:
    """Some texts of the validation set, and what is said about them."""
    for (text, summary), made in zip(chosen, speaker.say(chosen), strict=True):
        print(f"\ntext       {text[:200]}{'...' if len(text) > 200 else ''}\nsummary    {summary}\ngenerated  {made}")


def show_rouge(args: argparse.Namespace, pairs: tuple[docstrings.Pair, ...], speaker: Speaker) -> None:
    """ROUGE of the best weights' summaries, beside that of the texts' own beginnings, which need no model."""
    length = args.summary_length * (1 if speaker.tokenizer is None else 4)  # characters; a subword is about four
    begun = [text[:length] for text, _ in pairs]
    wanted = [summary for _, summary in pairs]
    print(f"\nROUGE F1 of {len(pairs)} summaries, in percent")
    for name, said in (("T5", speaker.say(pairs)), ("text's beginning", begun)):
        scores = parts.rouge(said, wanted)
        print(f"{name:>16}  " + "  ".join(f"{kind} {100 * score:.1f}" for kind, score in scores.items()))


def show_names(data: docstrings.Pairs, speaker: Speaker) -> None:
    """How many names of the validation set are exactly right, beside what needs no model."""
    answers = {"T5": speaker.say(data.validation), **guesses(data)}
    told = ", ".join(f"{name} {100 * share_right(said, data):.1f} %" for name, said in answers.items())
    print(f"\nnames of modules, exactly right: {told}")


def guesses(data: docstrings.Pairs) -> dict[str, list[str]]:
    """Names for the validation set: always the commonest; or else the first that a text itself mentions."""
    names = Counter(name for _, name in data.train)
    commonest = names.most_common(1)[0][0]
    own = [docstrings.named(text, names) or commonest for text, _ in data.validation]
    return {f"the commonest ({commonest})": [commonest] * len(own), "the text's own words": own}


def share_right(said: Sequence[str], data: docstrings.Pairs) -> float:
    """Return the share of the validation set's summaries that are said exactly."""
    return sum(a == b for a, (_, b) in zip(said, data.validation, strict=True)) / len(said)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--backend", nargs="+", choices=BACKENDS, default=["fsdp2"], help="one engine, or several to compare")
    add("--nprocs", type=int, default=2, help="ranks to start (ignored under torchrun)")
    add("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    add("--activation-checkpointing", action="store_true", help="recompute each block in backward")
    changed = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in FOR_MODULES.items())
    add("--data", choices=list(docstrings.SOURCES), default="docstrings", help=f"modules wants {changed}")
    add("--n-train", type=int, help="pairs to train with; all, if left out")
    add("--n-validation", type=int, help="pairs to judge by; all, if left out")
    add(
        "--subwords",
        type=int,
        metavar="N",
        help="tokens are N subwords that the training texts teach, or bytes (0)",
    )
    add("--text-length", type=int, default=128, help="tokens of a text that are read")
    add("--summary-length", type=int, default=64, help="tokens of a summary that are learned")
    add("--epochs", type=int, default=5)
    add("--batch-size", type=int, default=16, help="of all ranks together")
    add("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    add("--lr", type=float, help="in the first epoch; 4e-3 for adamw, 1.0 for adadelta")
    add("--gamma", type=float, default=0.85, help="the learning rate's factor from epoch to epoch (StepLR)")
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--width", type=int, default=64, help="d_model; a multiple of 4")
    add("--layers", type=int, default=2, help="of encoder and of decoder")
    add("--dropout", type=float, default=0.1)
    add("--seed", type=int, default=0)
    add("--weights", type=Path, help="start from the weights in this file of --save; the optimizer starts anew")
    add(
        "--pretrained",
        metavar="NAME",
        help="start from a pretrained T5 over bytes: a folder, or a name of Hugging Face's",
    )
    add("--rouge", type=int, default=0, metavar="N", help="ROUGE of N summaries of the validation set, at the end")
    add("--save", type=Path, help="folder for the weights of the best epoch")
    add("--tensorboard", type=Path, help="folder for TensorBoard's scalars")
    add("--summaries", type=int, default=3, help="how many to show at the end")
    add("--picture", type=Path, help="PNG of the loss curves")
    add("--timeout", type=float, default=60.0, help="seconds a collective may take")
    args = parser.parse_args(arguments)
    if args.subwords and (args.weights or args.pretrained):
        parser.error(f"--subwords {args.subwords} is for a T5 that starts anew: other weights have their own tokens")
    if args.data == "modules":
        parser.set_defaults(**FOR_MODULES if args.optimizer == "adamw" else {**FOR_MODULES, "lr": None})
        args = parser.parse_args(arguments)
    args.subwords = 0 if args.weights or args.pretrained else args.subwords or 0
    args.world = int(os.environ.get("WORLD_SIZE", args.nprocs))
    check(parser, args)
    return args


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop at what cannot be."""
    for name in ("batch_size", "epochs", "width", "layers", "text_length", "summary_length", "nprocs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.batch_size % args.world:
        parser.error(f"--batch-size {args.batch_size} must be a multiple of the {args.world} ranks")
    if "none" in args.backend and args.world > 1:
        parser.error(f"--backend none is for one process, not for {args.world} ranks")
    if args.width % 4:
        parser.error(f"--width {args.width} must be a multiple of 4, the number of heads")
    if args.subwords and args.subwords < FEWEST_SUBWORDS:
        parser.error(f"--subwords {args.subwords} must be at least {FEWEST_SUBWORDS}: the 256 bytes are among them")


def check_extras(args: argparse.Namespace) -> None:
    """Say at once, before any rank has started, that a package or a file is missing."""
    wanted = {"transformers": "T5", "rich": "the progress bar"}
    wanted |= {"tensorboard": f"--tensorboard {args.tensorboard}"} if args.tensorboard else {}
    wanted |= {"fairscale": "--backend fairscale"} if "fairscale" in args.backend else {}
    wanted |= {"rouge_score": f"--rouge {args.rouge}"} if args.rouge else {}
    wanted |= {"matplotlib": f"--picture {args.picture}"} if args.picture else {}
    for package, purpose in wanted.items():
        if importlib.util.find_spec(package) is None:
            raise fsshard.MissingExtra(package, "t5", purpose)
    if args.weights:
        parts.read_checkpoint(args.weights)


def main(arguments: list[str] | None = None) -> None:
    """Start the ranks here, or join those that torchrun or SLURM started."""
    args = parse(arguments)
    check_extras(args)
    launched = "RANK" in os.environ or "SLURM_STEP_ID" in os.environ
    if not launched:
        load_data(args)
    fsshard.launch(job, None if launched else args.nprocs, (args,), timeout=args.timeout)


if __name__ == "__main__":
    main()
