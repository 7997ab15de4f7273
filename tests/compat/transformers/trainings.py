"""Trainings by Hugging Face's Trainer, over its own DDP and over ours. What each rank runs."""

from __future__ import annotations

import gc
import operator
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsshard
from fsshard.compat.transformers import Seq2SeqTrainer, Trainer
from fsshard.recipes.models import small_t5
from tests.compat.common import told

WORDS, LENGTH, SAMPLES = 24, 6, 8
CASES: dict[str, dict[str, Any]] = {
    "generated": {"max_grad_norm": 0.0, "predict_with_generate": True, "generation_max_length": 5},
    "accumulated": {"gradient_accumulation_steps": 2, "max_grad_norm": 1e6, "weight_decay": 0.1},
    "bf16": {"bf16": True, "max_grad_norm": 0.0, "lr_scheduler_type": "cosine"},
    "smoothed": {
        "label_smoothing_factor": 0.1,
        "max_grad_norm": 0.0,
        "ddp_find_unused_parameters": False,
        "optim": "adamw_torch",
    },
    "scaled": {"scaled": True, "max_grad_norm": 0.0, "lr_scheduler_type": "cosine"},
    "complex": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0},
    "clipped": {"max_grad_norm": 0.1, "activation_checkpointing": True},
}
TIMES = ("runtime", "per_second", "preparation_time")


def t5() -> Any:
    """With dropout, so that random numbers count, too."""
    return small_t5(words=WORDS, width=8, heads=2, layers=1, dropout_rate=0.1, pad_token_id=0)


def gpt2() -> Any:
    """A causal model, whose labels are shifted."""
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": LENGTH, "vocab_size": WORDS}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))


class Complex(nn.Module):
    """None of transformers' own, with a complex weight."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.first = nn.Linear(LENGTH, 8)
        self.weight = nn.Parameter(torch.randn(8, 4, dtype=dtype))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = (self.first(input_ids / WORDS).to(self.weight.dtype) @ self.weight).abs().sum(1)
        return {"loss": (found - labels.float().mean(1)).square().mean(), "logits": found}


class Overflowing(Complex):
    """Real, for torch's scaler; the loss of the second of two ranks is infinite, once."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.forwards = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().forward(input_ids, labels)
        self.forwards += self.training
        if self.training and self.forwards == 2 and torch.distributed.get_rank() == 1:
            found["loss"] = found["loss"] * float("inf")
        return found


MODELS: dict[str, Any] = {"smoothed": gpt2, "scaled": Overflowing, "complex": Complex}
"""Case -> model; T5 for the others."""


def samples() -> list[dict[str, Tensor]]:
    """Words and the same reversed; sentences have several lengths, so that ranks have several numbers of labels."""
    numbers = torch.Generator().manual_seed(3)
    found = []
    for index in range(SAMPLES):
        words = torch.randint(2, WORDS, (LENGTH,), generator=numbers)
        labels = words.flip(0).clone()
        labels[LENGTH - index % 3 :] = -100
        found.append({"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels})
    return found


def metrics(found: Any) -> dict[str, float]:
    """Something that depends on every generated word."""
    words = np.asarray(found.predictions, dtype=np.int64)
    return {"words": float((words * np.arange(1, 1 + words.size).reshape(words.shape)).sum())}


def trainer_of(engine: Any, folder: str, model: Any, **given: Any) -> Any:
    """Hugging Face's own, or ours over an engine, or with a dict of settings.

    Not with ``optim="adamw_torch_fused"``, its default: what torch's fused kernel makes of a number on the CPU depends
    in the last digit on where in the tensor it is, and so on the shard.
    """
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    parts, scaled = given.pop("parts", False), given.pop("scaled", False)
    generates = given.get("predict_with_generate", False)
    settings = {
        "output_dir": folder, "num_train_epochs": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "per_device_eval_batch_size": 4, "logging_steps": 1, "eval_strategy": "epoch", "save_strategy": "no",
        "report_to": [], "disable_tqdm": True, "use_cpu": True, "warmup_steps": 1, "dataloader_pin_memory": False,
        "seed": 7, "optim": "adamw_torch",
    } | given  # fmt: skip
    words = samples()
    arguments = {"train_dataset": words, "eval_dataset": words}
    arguments["compute_metrics"] = metrics if generates else None
    args = (transformers.Seq2SeqTrainingArguments if generates else transformers.TrainingArguments)(**settings)
    own, ours = (transformers.Seq2SeqTrainer, Seq2SeqTrainer) if generates else (transformers.Trainer, Trainer)
    if engine != "hf":
        own, arguments["fsshard"] = ours, {"backend": engine} if isinstance(engine, str) else engine
        arguments["save_distributed_checkpoint"] = parts
    made = own(model, args, **arguments)
    made.remove_callback(transformers.PrinterCallback)
    if scaled:  # Accelerate makes one for GPUs only
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    return made


def history(trainer: Any) -> list[dict[str, Any]]:
    """Return what was logged, without times."""
    return [
        {name: value for name, value in each.items() if not any(time in name for time in TIMES)}
        for each in trainer.state.log_history
    ]


def trained(engine: str, folder: str, model: Any, resume: str | None = None, **given: Any) -> dict[str, Any]:
    """History, and the weights as ``from_pretrained`` reads them from what was saved at the end."""
    kind = type(model)  # FSDP2 gives the model another
    trainer = trainer_of(engine, folder, model, **given)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(Path(folder) / "end"))
    torch.distributed.barrier()
    end = Path(folder) / "end"
    plain = not hasattr(kind, "from_pretrained")
    state = load_file(end / "model.safetensors") if plain else kind.from_pretrained(str(end)).state_dict()
    return {"history": history(trainer), "state": state, "trainer": trainer}


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """Return what can travel."""
    return {key: value for key, value in found.items() if key != "trainer"}


def every_case(engine: str, folder: str) -> dict[str, dict[str, Any]]:
    found = {}
    for case, given in CASES.items():
        torch.manual_seed(0)
        found[case] = plain(trained(engine, f"{folder}/{case}", MODELS.get(case, t5)(), **given))
    return found


BEST: dict[str, Any] = {
    "save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "loss",
    "greater_is_better": True, "max_grad_norm": 0.0,
}  # fmt: skip
"""The best is the one with the largest loss: that of the first epoch, which is not what is there at the end."""
RESUMED = {"fsdp2": "hf", "fsdp": "fsdp2", "hf": "fsdp"}
"""Engine -> whose checkpoint of the first epoch it goes on from."""


def resumed(folder: str) -> dict[str, dict[str, Any]]:
    """Two epochs under each engine, and the second one from the checkpoint of another."""
    found = {}
    for engine in RESUMED:
        found[engine] = _saved(engine, f"{folder}/{engine}", None)
    for engine, source in RESUMED.items():
        path = f"{folder}/{source}/checkpoint-2"
        found[f"{engine} from {source}"] = _saved(engine, f"{folder}/{engine}-{source}", path)
    return found


def _saved(engine: str, folder: str, resume: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    found = plain(trained(engine, folder, t5(), resume, **BEST))
    last = Path(folder) / "checkpoint-4"
    found["last"] = transformers.T5ForConditionalGeneration.from_pretrained(str(last)).state_dict()
    found["optimizer"] = torch.load(last / "optimizer.pt", weights_only=True)
    return found


class Halved(transformers.Trainer):  # type: ignore[misc]
    """A user's own."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **kwargs)
        return (found[0] / 2, found[1]) if isinstance(found, tuple) else found / 2


class HalvedOverOurs(Trainer, Halved):
    """Likewise, over an engine."""


def around(engine: str, folder: str) -> dict[str, Any]:
    """A subclass with an optimizer and a schedule of its own: trained twice, asked to predict."""
    torch.manual_seed(0)
    model = t5()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    made = trainer_of("hf", folder, t5(), max_grad_norm=0.0)
    words = samples()
    given = {"train_dataset": words, "eval_dataset": words, "optimizers": (optimizer, schedule)}
    own = Halved if engine == "hf" else HalvedOverOurs
    trainer = own(model, made.args, **given, **({} if engine == "hf" else {"fsshard": {"backend": engine}}))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    first = history(trainer)
    trainer.train()
    predicted = trainer.predict(words)
    refused = {} if engine == "hf" else {
        "clip": told(lambda: trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)),
        "save": told(lambda: trainer.model.save_pretrained(folder)),
        "whole": _saved_whole(trainer, folder),
        "inner": trainer.accelerator.unwrap_model(trainer.model_wrapped) is trainer.model,
    }  # fmt: skip
    return {"history": first + history(trainer), "predicted": predicted.predictions[0], "refused": refused}


def _saved_whole(trainer: Any, folder: str) -> bool:
    """Return whether ``save_pretrained`` writes every weight in the context that shows them."""
    with trainer.model_wrapped.full_parameters() as whole:
        trainer.model.save_pretrained(f"{folder}/whole")
        torch.distributed.barrier()  # rank 0 writes
        written = load_file(f"{folder}/whole/model.safetensors")
        return set(written) == set(whole) and all(torch.equal(written[name], value) for name, value in whole.items())


class Averages(transformers.TrainerCallback):
    """An average of the weights: by torch over Hugging Face's own, by ``fsshard.EMA`` over an engine."""

    average: Any = None

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        wrapped = self.trainer.model_wrapped
        if isinstance(wrapped, fsshard.ShardedModule):
            self.average = self.average or fsshard.EMA(wrapped, decay=0.7)
            self.average.update()
        else:
            self.average = self.average or AveragedModel(given["model"], multi_avg_fn=get_ema_multi_avg_fn(0.7))
            self.average.update_parameters(given["model"])


def averaged(engine: str, folder: str) -> dict[str, Any]:
    """The average, and what a Trainer's evaluation says to it."""
    torch.manual_seed(0)
    given = {"max_grad_norm": 0.0, "eval_strategy": "no"}
    trainer = trainer_of(engine, folder, Complex(), **given)
    callback = Averages(trainer)
    trainer.add_callback(callback)
    trainer.train()
    if engine == "hf":
        module = callback.average.module
        return {"loss": trainer_of("hf", folder, module, **given).evaluate()["eval_loss"], "state": module.state_dict()}
    refused = [told(lambda: AveragedModel(trainer.model)), told(lambda: fsshard.EMA(trainer.model))]
    with callback.average.swapped():
        found = {"loss": trainer.evaluate()["eval_loss"], "state": trainer.model_wrapped.state_dict()}
    return {**found, "refused": refused}


class MakesAnother(transformers.TrainerCallback):
    """In the midst of a training."""

    told = ""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.told = told(lambda: Trainer(given["model"], args, fsshard={"backend": "ddp"}))


def by_two_trainers(engine: str, folder: str) -> dict[str, Any]:
    """One model: trained, given to another Trainer that goes on from a checkpoint, and to a third that evaluates."""
    torch.manual_seed(0)
    model = t5()
    kind, parameters = type(model), list(model.parameters())
    given = {"max_grad_norm": 0.0, "save_strategy": "epoch"}
    first = trainer_of(engine, folder, model, **given)
    busy = MakesAnother()
    if engine != "hf":
        first.add_callback(busy)
    first.train()
    engines = [weakref.ref(each) for each in (first.model_wrapped, first.optimizer) if engine != "hf"]
    saved = max(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    found = trained(engine, folder, model, str(saved), **given | {"num_train_epochs": 3, "bf16": True})
    unsaved = "" if engine == "hf" else told(lambda: first.save_model(f"{folder}/first"))
    gc.collect()
    kept = sum(each() is not None for each in engines)
    if engine == "hf":  # accelerate (1.15) leaves autocast around the forward, whatever the next Trainer asks for
        weights, model = model.state_dict(), t5()
        model.load_state_dict(weights)
    third = trainer_of(engine, folder, model)
    evaluated = third.evaluate()["eval_loss"]
    return plain(found) | {
        "evaluated": evaluated,
        "last": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "plain": type(model) is kind and all(map(operator.is_, model.parameters(), parameters)),
        "bare": not {"forward", "save_pretrained"} & set(vars(model)),
        "former": "" if engine == "hf" else told(first.train),
        "kept": kept,
        "unsaved": unsaved,
        "busy": busy.told,
    }


def evaluated_first(engine: str, folder: str) -> dict[str, Any]:
    """The loss before a training, and this rank's norms in it."""
    torch.manual_seed(0)
    trainer = trainer_of(engine, folder, t5(), max_grad_norm=0.0)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return {"before": before, "norms": [each["grad_norm"] for each in history(trainer) if "grad_norm" in each]}


def in_parts(folder: str) -> dict[str, dict[str, Any]]:
    """As :func:`resumed`, but the checkpoints of one engine are in parts, from which another goes on."""
    found = {}
    for name, engine, source in (("whole", "fsdp2", None), ("from", "fairscale", "whole"), ("plain", "fsdp2", None)):
        torch.manual_seed(0)
        resume = None if source is None else f"{folder}/{source}/checkpoint-2"
        given = {**BEST, "parts": name == "whole"}
        found[name] = plain(trained(engine, f"{folder}/{name}", t5(), resume, **given))
        found[name]["files"] = files(f"{folder}/{name}/checkpoint-4")
    return found


def files(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def written_over(folder: str) -> dict[str, Any]:
    """Checkpoints of one kind in the folders that an earlier run has filled with the other, and a mixed one."""
    found = {}
    plain = {"eval_strategy": "no", "save_strategy": "epoch", "max_grad_norm": 0.0, "num_train_epochs": 1}
    for first in (True, False):
        for parts in (first, not first):
            torch.manual_seed(parts)
            trainer = trainer_of("fsdp2", f"{folder}/{first}", t5(), parts=parts, **plain)
            trainer.train()
        path = f"{folder}/{first}/checkpoint-2"
        torch.distributed.barrier()  # rank 0 writes
        again = trainer_of("fsdp2", f"{folder}/{first}", t5(), **plain)
        again.train(resume_from_checkpoint=path)
        last, loaded = (each.model_wrapped.state_dict() for each in (trainer, again))
        same = all(torch.equal(loaded[name], value) for name, value in last.items())
        found["parts" if parts else "whole"] = {"same": same, "files": files(path)}
    mixed = Path(path)
    torch.distributed.barrier()  # files have been listed
    if torch.distributed.get_rank() == 0:
        (mixed / "optimizer.pt").touch()
    torch.distributed.barrier()
    found["mixed"] = told(lambda: again.train(resume_from_checkpoint=path))
    return found


def counted_gpt2() -> Any:
    """A causal model without dropout.

    Hugging Face (5.23) knows by a class's name that the first label of each text is none: by ...ForCausalLM.
    """
    torch.manual_seed(0)
    model = gpt2()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.loss_type = "ForCausalLM"
    return model


def counted_t5() -> Any:
    torch.manual_seed(0)
    return small_t5(words=WORDS, width=8, heads=2, layers=1, dropout_rate=0.0, pad_token_id=0)


def token_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return what T5 lacks: its own loss is a mean already."""
    logits = outputs.logits.flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return total / num_items_in_batch


COUNTED: dict[str, tuple[Any, dict[str, Any]]] = {
    "causal": (counted_gpt2, {}),
    "encoder and decoder": (counted_t5, {"compute_loss_func": token_mean}),
}
"""Model, and what its Trainer is given."""


def counted_samples() -> list[dict[str, Tensor]]:
    """From one label to all in a sentence; words that the decoder reads, as DataCollatorForSeq2Seq makes them."""
    found = samples()
    for index, sample in enumerate(found):
        sample["labels"][1 + (5 * index) % LENGTH :] = -100
        sample["decoder_input_ids"] = counted_t5().prepare_decoder_input_ids_from_labels(sample["labels"][None])[0]
    return found


def averaged_over_tokens(engine: str, folder: str) -> dict[str, dict[str, Tensor]]:
    """One step of all samples: two micro-batches of two on each of two ranks."""
    found = {}
    for case, (build, given) in COUNTED.items():
        trainer = trainer_of(
            engine, folder, build(), gradient_accumulation_steps=2, max_steps=1, optim="sgd", max_grad_norm=0.0,
            lr_scheduler_type="constant", warmup_steps=0, learning_rate=1.0, eval_strategy="no",
        )  # fmt: skip
        trainer.compute_loss_func = given.get("compute_loss_func")
        words = counted_samples()
        if case == "causal":
            words = [{key: value for key, value in each.items() if "decoder" not in key} for each in words]
        trainer.train_dataset = words
        trainer.train()
        wrapped = trainer.model_wrapped
        found[case] = {name: value.clone() for name, value in wrapped.state_dict().items()}
    return found


def counted_by_hand() -> dict[str, dict[str, Tensor]]:
    """One step of torch alone, on one process, over the mean of all labels."""
    found = {}
    for case, (build, _) in COUNTED.items():
        model = build().train()
        total, count = torch.zeros(()), 0
        for sample in counted_samples():
            words = {name: value[None] for name, value in sample.items() if name not in ("labels", "decoder_input_ids")}
            labels = sample["labels"]
            if case != "causal":
                words["decoder_input_ids"] = sample["decoder_input_ids"][None]
            logits = model(**words).logits[0]
            if case == "causal":
                logits, labels = logits[:-1], labels[1:]
            total = total + nn.functional.cross_entropy(logits, labels, reduction="sum")
            count += int((labels != -100).sum())
        (total / count).backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        found[case] = {name: value.detach() for name, value in model.state_dict().items()}
    return found
