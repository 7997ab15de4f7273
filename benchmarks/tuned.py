"""The tuned plan beside the usual plans: peak and traffic per rank, by simulation, without a GPU.

    python benchmarks/tuned.py [tfno] [t5] [--world-size 4] [--memory 4GiB]

TFNO of neuraloperator's FSDP tutorial (benchmarks/tfno_memory.py) and T5-base (transformers' model from its published
sizes, random weights, 4 documents of 512 tokens and summaries of 128 per rank), Adam as it is on a GPU, float32. The
rows of torch's policies are those policies themselves, estimated one by one: what the search has to be at least as good
as. The last line says how many seconds of processor the search took.
"""

from __future__ import annotations

import argparse
import functools
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

import fsshard
from fsshard.errors import FsshardError
from fsshard.planning.text import size
from fsshard.recipes.recipe import Recipe
from fsshard.simulation.result import Estimate


def t5_base() -> nn.Module:
    """T5-base, with its published sizes."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128}
    model: nn.Module = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes))
    return model


def documents(rank: int, world_size: int, number: int) -> dict[str, Tensor]:
    """As many tokens as 4 documents and their summaries have."""
    tokens = torch.ones(4, 512, dtype=torch.long)
    return {"input_ids": tokens, "attention_mask": tokens, "labels": torch.ones(4, 128, dtype=torch.long)}


def own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The model's."""
    loss: Tensor = model(**batch).loss
    return loss


def t5() -> Recipe:
    """``fsshard tune benchmarks.tuned:t5 --device cuda --world-size 4``."""
    return Recipe(build=t5_base, batches=documents, loss=own_loss, name="T5-base")


def layers(model: str) -> Any:
    """Return the classes that torch's policy for transformers is given."""
    if model == "t5":
        from transformers.models.t5.modeling_t5 import T5Block

        return {T5Block}
    from neuralop.layers.spectral_convolution import SpectralConv

    return {SpectralConv}


RECIPES = {"tfno": "benchmarks.tfno_memory:tutorial", "t5": "benchmarks.tuned:t5"}


def line(name: str, one: Estimate, tuned: Estimate) -> str:
    """A row of the table."""
    cells = [
        name,
        size(one.interval[1]),
        f"{one.interval[1] / tuned.peak:.3f}",
        f"{one.sent / one.parameters:.2f}",
        str(sum(traffic.count for traffic in one.collectives)),
        str(one.units),
        str(one.moment),
    ]
    return "| " + " | ".join(cells) + " |"


def compare(model: str, world_size: int, memory: str | None) -> None:
    """Print the table of a model."""
    recipe = RECIPES[model]
    where: dict[str, Any] = {"world_size": world_size, "device": "cuda"}
    before = _seconds()
    found = fsshard.tune(recipe, backend="fsdp2", memory=memory, **where)
    took = _seconds() - before
    tuned = found.winner.estimate
    said = ["peak", "of tuned", "sent / parameters", "collectives", "units", "peak at"]
    head = [f"{found.name}, {world_size} ranks", *said]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    print(line("fsdp2, tuned", tuned, tuned), flush=True)
    policies = {
        "fsdp2, auto": "auto",
        "fsdp2, torch's size-based": size_based_auto_wrap_policy,
        "fsdp2, torch's transformer": functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls=layers(model)
        ),
        "fsdp2, one unit": None,
    }
    for name, policy in policies.items():
        try:
            one = fsshard.estimate(recipe, backend="fsdp2", auto_wrap_policy=policy, **where)
            print(line(name, one, tuned), flush=True)
        except FsshardError as error:
            print(f"| {name} | cannot be: {error} |" + " |" * (len(head) - 2), flush=True)
    print(f"\n{len(found.tried)} plans in {took:.0f} s of processor time. The winner:\n\n{found.code()}", flush=True)


def _seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[[], *RECIPES], default=[])
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--memory", help="the least time within so much, instead of the least peak")
    options = parser.parse_args()
    for model in options.models or RECIPES:
        compare(model, options.world_size, options.memory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
