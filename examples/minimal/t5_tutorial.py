"""A T5 that summarises, in the loop of torch's FSDP tutorial: its flags and policies, two ranks, no download.

    python t5_tutorial.py --run-validation --track-memory
    python t5_tutorial.py --epochs 4 --run-validation --save-model --bf16 --backend fsdp2
    torchrun --nproc-per-node 2 t5_tutorial.py

``wrap`` takes torch's own policies and settings. The texts are docstrings of the standard library, the tokens bytes.
"""

import argparse
import functools
import inspect
import os
import time
from importlib import import_module

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

import fsshard
from fsshard.model.precision import bfSixteen


def setup_model():
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=384, decoder_start_token_id=0, **sizes)
    return T5ForConditionalGeneration(config), ByT5Tokenizer()


def texts(modules=("argparse", "datetime", "logging", "pathlib", "random", "statistics", "subprocess", "typing")):
    owners = [import_module(name) for name in modules]
    owners += [each for owner in owners for _, each in inspect.getmembers(owner, inspect.isclass)]
    found = {inspect.getdoc(each) or "" for owner in owners for _, each in inspect.getmembers(owner)}
    return sorted((rest, first) for first, _, rest in (text.partition("\n\n") for text in found) if rest)


def collate(tokenizer, pairs):
    """``input_ids``, ``attention_mask`` and ``labels``; -100 is a place after the end, which counts nothing."""
    batch = tokenizer([text for text, _ in pairs], max_length=128, padding=True, truncation=True, return_tensors="pt")
    goal = tokenizer([first for _, first in pairs], max_length=64, padding=True, truncation=True, return_tensors="pt")
    return {**batch, "labels": goal.input_ids.masked_fill(goal.attention_mask == 0, -100)}


def run_epoch(ctx, model, loader, optimizer=None):
    """Train, or without an optimizer validate; the mean loss over the samples of all ranks."""
    model.train(optimizer is not None)
    totals = torch.zeros(2, dtype=torch.float64, device=ctx.device)
    with torch.set_grad_enabled(optimizer is not None):
        for batch in tqdm(loader, disable=ctx.rank > 0, desc="training" if optimizer else "validation"):
            loss = model(**{key: value.to(ctx.device) for key, value in batch.items()}).loss
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            totals += torch.tensor([loss.item(), 1.0], device=ctx.device) * len(batch["labels"])
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def train(ctx, args):
    torch.manual_seed(args.seed)
    model, tokenizer = setup_model()
    pairs, put_together = texts()[: args.samples], functools.partial(collate, tokenizer)
    sets = [pair for i, pair in enumerate(pairs) if i % 8], pairs[::8]
    samplers = [DistributedSampler(each, ctx.world_size, ctx.rank, drop_last=True) for each in sets]  # no sample twice
    train_loader = DataLoader(sets[0], args.batch_size, sampler=samplers[0], collate_fn=put_together)
    val_loader = DataLoader(sets[1], args.test_batch_size, sampler=samplers[1], collate_fn=put_together)

    model = fsshard.wrap(
        model.to(ctx.device),
        backend=args.backend,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
        mixed_precision=bfSixteen if args.bf16 else None,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
    )
    optimizer = fsshard.build_optimizer(model, torch.optim.Adadelta, lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    history, best = [], float("inf")
    for epoch in range(1, args.epochs + 1):
        samplers[0].set_epoch(epoch)
        start, loss = time.perf_counter(), run_epoch(ctx, model, train_loader, optimizer)
        told = f"epoch {epoch}: train {loss:.4f}, {time.perf_counter() - start:.1f} s"
        validation = run_epoch(ctx, model, val_loader) if args.run_validation else loss
        told += f", validation {validation:.4f}" if args.run_validation else ""
        told += f", {model.memory_report().worst.total / 1e6:.2f} MB on rank 0" if args.track_memory else ""
        if ctx.rank == 0:
            print(told, flush=True)
        scheduler.step()
        history.append((loss, validation))
        if args.save_model and validation < best:
            policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            state = model.state_dict(config=policy)  # on every rank: each sends its shards to rank 0
            if ctx.rank == 0:
                torch.save(state, args.save_model)
        best = min(best, validation)
    return history


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fsdp", help="fsdp, fsdp2")
    numbers = {"batch-size": 4, "test-batch-size": 4, "epochs": 1, "seed": 1, "samples": 240, "lr": 1.0, "gamma": 0.7}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help="%(default)s")
    for name in ("bf16", "run-validation", "track-memory", "no-cuda"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--save-model", nargs="?", const="t5.pt", metavar="FILE", help="whole, of the best epoch")
    parser.add_argument("--nprocs", type=int, default=os.environ.get("WORLD_SIZE") or torch.cuda.device_count() or 2)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = parse()
    fsshard.launch(train, args.nprocs, (args,), process_group_backend="gloo" if args.no_cuda else None)
