"""Models and arguments of Hugging Face as recipes. What each rank runs, too."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from fsshard.compat.transformers import from_transformers
from fsshard.parity import Recipe
from fsshard.parity.training import Job, Training
from tests.compat.transformers.trainings import WORDS, gpt2, history, samples, t5, trainer_of

CASES: dict[str, dict[str, Any]] = {
    "t5": {"max_grad_norm": 0.0, "weight_decay": 0.1, "lr_scheduler_type": "cosine"},
    "gpt2": {"max_grad_norm": 0.0, "label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "bert": {"max_grad_norm": 0.0, "weight_decay": 0.1, "gradient_accumulation_steps": 2},
}
COMMON: dict[str, Any] = {
    "num_train_epochs": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "warmup_steps": 1, "seed": 7,
    "optim": "adamw_torch", "use_cpu": True, "report_to": [],
}  # fmt: skip


def model_of(case: str) -> Any:
    """Without dropout: the Trainer's ranks draw other random numbers than a recipe's."""
    if case == "bert":
        sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(
            transformers.BertConfig(vocab_size=WORDS, intermediate_size=8, pad_token_id=0, **sizes, **quiet)
        )
    model = t5() if case == "t5" else gpt2()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    return model


def _recipe(case: str, **options: Any) -> Recipe:
    torch.manual_seed(0)
    args = transformers.TrainingArguments(output_dir="unused", **COMMON, **CASES[case])
    return from_transformers(model_of(case), samples(), args=args, **options)


def t5_recipe() -> Recipe:
    return _recipe("t5")


def gpt2_recipe() -> Recipe:
    return _recipe("gpt2")


def bert_recipe() -> Recipe:
    return _recipe("bert")


def compiled_recipe() -> Recipe:
    return _recipe("bert", settings={"compile": {"backend": "aot_eager"}})


def by_trainer(case: str, folder: str) -> list[tuple[float, float]]:
    """Mean loss over ranks and the learning rate, step by step, by Hugging Face's Trainer over its own DDP."""
    torch.manual_seed(0)
    made = trainer_of("hf", folder, model_of(case), **{**COMMON, "eval_strategy": "no", **CASES[case]})
    made.train()
    return [(each["loss"], each["learning_rate"]) for each in history(made) if "loss" in each]


def by_recipe(case: str, engine: str, steps: int) -> list[tuple[float, float]]:
    """Likewise, by the loop that ``compare`` runs."""
    source = f"{__name__}:{case}_recipe"
    training = Training(Job(source=source, engine=engine, steps=steps, world_size=2, folder=""))
    found = []
    for step in range(steps):
        loss = torch.tensor(training.losses(training.batches(step)))
        rate = training.engine.optimizer.param_groups[0]["lr"]
        training.finish()
        losses = [torch.zeros_like(loss) for _ in range(2)]
        torch.distributed.all_gather(losses, loss)
        found.append((float(torch.stack(losses).mean()), rate))
    return found
