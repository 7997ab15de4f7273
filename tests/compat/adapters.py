"""PEFT's adapters under every front: trained, saved, resumed, merged. What each rank runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from tests.compat.accelerate import trainings as accelerated
from tests.compat.transformers import trainings
from tests.compat.transformers.trainings import BEST, gpt2, samples, t5
from tests.models import take_step

KINDS: dict[str, Any] = {
    "gpt2": (gpt2, {"target_modules": ["c_attn"], "task_type": "CAUSAL_LM", "modules_to_save": ["ln_f"]}),
    "t5": (t5, {"target_modules": ["q", "v"], "task_type": "SEQ_2_SEQ_LM"}),
}
"""Name -> model, and what LoRA is put on; layers that are trained whole, too, in the first."""


def base(kind: str) -> Any:
    torch.manual_seed(1)
    return KINDS[kind][0]()


def adapted(kind: str) -> Any:
    """With dropout, and with adapters that do something from the beginning."""
    config = LoraConfig(r=2, lora_dropout=0.1, init_lora_weights=False, **KINDS[kind][1])
    return get_peft_model(base(kind), config)


def files(folder: str) -> dict[str, Tensor]:
    """Return the files that an adapter was saved in."""
    torch.distributed.barrier()
    return load_file(Path(folder, "adapter_model.safetensors"))


def merged(kind: str, folder: str) -> dict[str, Tensor]:
    """Load a saved adapter and merge it, as everybody does."""
    torch.distributed.barrier()
    return dict(PeftModel.from_pretrained(base(kind), folder).merge_and_unload().state_dict())


def by_trainer(engine: str, kind: str, folder: str) -> dict[str, Any]:
    """Two epochs, of which the first one is the best, and from its checkpoint a second time; by transformers."""
    trainer = trainings.trainer_of(engine, folder, adapted(kind), **BEST)
    trainer.train()
    trainer.save_model(f"{folder}/best")
    found = {"history": trainings.history(trainer)}
    found |= {each: files(f"{folder}/{each}") for each in ("best", "checkpoint-2", "checkpoint-4")}
    found["merged"] = merged(kind, f"{folder}/best")
    again = trainings.trainer_of(engine, f"{folder}/again", adapted(kind), max_grad_norm=0.0)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    again.save_model(f"{folder}/last")
    if engine != "hf":  # once more, from a checkpoint into a model that an engine has
        again._load_from_checkpoint(f"{folder}/checkpoint-2")
        again.save_model(f"{folder}/earlier")
    return found | {
        "last": files(f"{folder}/last"),
        "earlier": files(f"{folder}/{'earlier' if engine != 'hf' else 'best'}"),
    }


def _batches() -> DataLoader[Any]:
    return DataLoader([{name: each[name] for name in ("input_ids", "labels")} for each in samples()], 2)  # type: ignore[arg-type]


def by_accelerator(engine: str, folder: str) -> dict[str, Tensor]:
    """An epoch by Accelerate, saved as its documentation does it, and as our error says where PEFT asks modules."""
    found = {}
    for kind in KINDS:
        accelerator = accelerated.accelerator_of(engine)
        model = adapted(kind)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, _batches())
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            take_step(optimizer)
        inner, path, whole = accelerator.unwrap_model(model), f"{folder}/{kind}", accelerator.get_state_dict(model)
        if kind == "t5" or engine == accelerated.OWN:
            inner.save_pretrained(path, is_main_process=accelerator.is_main_process, state_dict=whole)
        else:
            with model.full_parameters():
                inner.save_pretrained(path, is_main_process=accelerator.is_main_process)
        found |= files(path)
    return found
