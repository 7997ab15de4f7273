"""Estimates against real runs: peak and payloads of a training step, per model, backend and world size.

    python benchmarks/estimate_vs_real.py [--world-size 2,4] [--backends ddp,fsdp] [--models tfno] [--device cuda]

The estimate runs on fake tensors in one process. The real runs train on ranks: live bytes of tensors are traced inside
of each, payloads are counted at the collectives, and the rank with the highest peak is shown. On GPUs, what CUDA's own
allocator has handed out at most is shown beside it. Bytes, not seconds: the table is the same at every run.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from fsshard.launching.pool import RankPool
from fsshard.planning.text import size
from fsshard.recipes.recipe import Recipe
from fsshard.simulation.estimating import estimate
from fsshard.simulation.result import Estimate
from fsshard.simulation.simulation import Job, Measured, measure

BACKENDS = ("ddp", "fsdp", "fsdp2", "fairscale")
PEAK, BYTES = 0.03, 0.01
"""How far peak and payloads of an estimate may be off."""


def _fields(rank: int, world_size: int, number: int) -> dict[str, Tensor]:
    x = torch.randn(8, 1, 32, 32, generator=torch.Generator().manual_seed(1000 * rank + number))
    return {"x": x, "y": x.roll(1, -1)}


def _field_error(model: Callable[..., Tensor], batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def _operator(name: str) -> nn.Module:
    import neuralop.models

    kwargs: dict[str, Any] = {"factorization": "tucker", "rank": 0.42} if name == "TFNO" else {}
    model: nn.Module = getattr(neuralop.models, name)(
        n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=48, n_layers=4, **kwargs
    )
    return model


def _tfno() -> nn.Module:
    return _operator("TFNO")


def _fno() -> nn.Module:
    return _operator("FNO")


def tfno() -> Recipe:
    """Complex Tucker factors, a unit for each convolution."""
    return Recipe(build=_tfno, batches=_fields, loss=_field_error)


def fno() -> Recipe:
    """Complex weights in full."""
    return Recipe(build=_fno, batches=_fields, loss=_field_error)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=2048,
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=4,
        num_heads=8,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def _words(rank: int, world_size: int, number: int) -> dict[str, Tensor]:
    tokens = torch.randint(1, 2048, (8, 64), generator=torch.Generator().manual_seed(1000 * rank + number))
    return {"input_ids": tokens, "labels": tokens.flip(1)[:, :32].contiguous()}


def _own_loss(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def t5() -> Recipe:
    """Encoder and decoder with tied embeddings, a unit for each block."""
    return Recipe(build=_t5, batches=_words, loss=_own_loss)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32,
        patch_size=4,
        num_channels=1,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=3,
        num_labels=10,
    )
    return ViTForImageClassification(config)


def _images(rank: int, world_size: int, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return {
        "pixel_values": torch.randn(8, 1, 32, 32, generator=generator),
        "labels": torch.randint(0, 10, (8,), generator=generator),
    }


def vit() -> Recipe:
    """A vision transformer with dropout in place, a unit for each layer."""
    return Recipe(build=_vit, batches=_images, loss=_own_loss)


MODELS = {"tfno": tfno, "fno": fno, "t5": t5, "vit": vit}


def real_run(job: Job) -> tuple[Measured, int]:
    """This rank's step, and the most bytes that CUDA's allocator has handed out; collective."""
    warnings.filterwarnings("ignore")
    measured = measure(job)
    return measured, torch.cuda.max_memory_allocated() if job.device == "cuda" else 0


def row(name: str, estimated: Estimate, ran: list[tuple[Measured, int]]) -> tuple[list[str], bool]:
    """A line of the table, and whether the estimate is true."""
    heaviest = max((measured for measured, _ in ran), key=lambda measured: measured.usage.peak)
    peak, (least, most) = heaviest.usage.peak, estimated.interval
    off = estimated.peak / peak - 1
    payloads = {traffic.kind: traffic.nbytes for traffic in heaviest.usage.collectives}
    claimed = {traffic.kind: traffic.nbytes for traffic in estimated.collectives}
    bytes_off = max(abs(claimed.get(kind, 0) / nbytes - 1) for kind, nbytes in payloads.items())
    inside = abs(off) <= PEAK or least <= peak <= most
    true = inside and bytes_off <= BYTES and set(payloads) == set(claimed)
    allocated = max(nbytes for _, nbytes in ran)
    cells = [
        name,
        estimated.backend,
        str(estimated.world_size),
        size(estimated.peak) + (f" to {size(most)}" if most != least else ""),
        size(peak),
        f"{off:+.3%}",
        size(sum(claimed.values())),
        f"{bytes_off:.3%}",
        str(estimated.moment),
        *([f"{size(allocated)} ({allocated / estimated.peak:.3f})"] if allocated else []),
    ]
    return cells, true


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-size", default="2,4")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    sizes, backends = [int(n) for n in options.world_size.split(",")], options.backends.split(",")
    extra = ["CUDA allocator (of estimate)"] if options.device == "cuda" else []
    head = ["model", "backend", "ranks", "peak estimated", "peak real", "off", "payload", "off", "peak at", *extra]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    all_true = True
    with RankPool(device=options.device) as pool:
        for name in options.models.split(","):
            recipe = MODELS[name]()
            for one in estimate(recipe, backend=backends, world_size=sizes, device=options.device):
                job = Job(source=recipe, changes={}, backend=one.backend, mesh=one.mesh, device=options.device)
                cells, true = row(name, one, pool.run(real_run, one.world_size, job, timeout=600))
                print("| " + " | ".join(cells) + " |" + ("" if true else " **not true**"), flush=True)
                all_true &= true
    print(
        f"\npeak within {PEAK:.0%} or inside the interval, payloads within {BYTES:.0%}: {'yes' if all_true else 'NO'}"
    )
    return 0 if all_true else 1


if __name__ == "__main__":
    sys.exit(main())
