"""Training arguments of Hugging Face that no engine can honour: each refusal says what to ask for instead."""

from __future__ import annotations

from typing import Any

import transformers

from fsshard.errors import ConfigurationError

from ..accelerate.arguments import MESH, check_one_precision, check_scaled, check_settings
from ..trainers import check_scaler

# Methods of Hugging Face's Trainer, version 5.23, that it does not document and that are overridden or called. One
# that is gone would be silently left out: gradients clipped by one rank's norm, say.
OVERRIDDEN = (
    "_clip_grad_norm",
    "_get_grad_norm",
    "_has_mixed_mesh_grads",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_prepare_for_training",
    "_save",
    "_save_optimizer_and_scheduler",
    "_wrap_model",
)

ANOTHER_ENGINE = "fsshard= names the engine; leave it out"
# Argument -> what to do. It is asked for where it has a value other than its default, which is None or False.
INSTEAD = {
    "auto_find_batch_size": "a model that an engine has divided is not divided again; set per_device_train_batch_size",
    "bf16_full_eval": "an engine's parameters keep their dtype; use bf16=True",
    "ddp_broadcast_buffers": 'pass fsshard={"broadcast_buffers": ...}',
    "ddp_bucket_cap_mb": 'pass fsshard={"backend": "ddp", "bucket_cap_mb": ...}',
    "ddp_static_graph": 'pass fsshard={"backend": "ddp", "static_graph": ...}',
    "deepspeed": ANOTHER_ENGINE,
    "fp16_full_eval": "an engine's parameters keep their dtype; use bf16=True",
    "fsdp": ANOTHER_ENGINE,
    "parallelism_config": MESH,
    "torch_compile": 'pass fsshard={"compile": True}, which compiles unit by unit',
}


def check_library(trainer: type = transformers.Trainer) -> None:
    """Raise ConfigurationError if transformers' Trainer lacks a method that is overridden here."""
    lacking = [name for name in OVERRIDDEN if not callable(getattr(trainer, name, None))]
    if lacking:
        raise ConfigurationError(
            f"transformers {transformers.__version__}: its Trainer has no {', '.join(lacking)}, which "
            "fsshard.compat.transformers relies on; use transformers 5.23, or write the loop over fsshard.wrap"
        )


def check_arguments(args: Any, model: Any, settings: Any) -> None:
    """Raise ConfigurationError, before anything is changed, for an argument that is not served.

    Args:
        args: Hugging Face's TrainingArguments, or None for its defaults.
        model: the model, or None where ``model_init`` makes it.
        settings: what was passed as ``fsshard=``.
    """
    check_settings(settings)
    for name, advice in INSTEAD.items():
        value = getattr(args, name, None)
        if value or (value is False and name == "ddp_broadcast_buffers"):  # whose default is None
            raise ConfigurationError(f"TrainingArguments({name}={value!r}): {advice}")
    # where there is one process, several GPUs would be given to DataParallel
    if args is not None and args.n_gpu > 1:
        raise ConfigurationError(f"{args.n_gpu} GPUs and one process: start one per GPU (torchrun, or fsshard.launch)")
    if args is not None and args.bf16:
        check_one_precision("TrainingArguments(bf16=True)", settings)
    if args is not None and args.activation_checkpointing and settings.get("activation_checkpointing"):
        raise ConfigurationError("TrainingArguments(activation_checkpointing=True) and fsshard's: choose one")
    _check_placed(model)


def _check_placed(model: Any) -> None:
    if getattr(model, "is_distributed_loading_by_transformers", False) or (getattr(model, "tp_size", None) or 1) > 1:
        raise ConfigurationError(
            "from_pretrained(tp_plan=... or distributed_config=...) has divided the model (tp_size "
            f"{getattr(model, 'tp_size', None)}); load it without"
        )
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(places) > 1:
        raise ConfigurationError(
            f"from_pretrained(device_map=...) has put the model on {len(places)} devices; load it without"
        )


def check_launcher(trainer: Any) -> None:
    """Raise ConfigurationError if ``accelerate launch`` has chosen an engine, or has promised what nobody does."""
    for name, chosen in (("use_fsdp", trainer.is_fsdp_enabled), ("use_deepspeed", trainer.is_deepspeed_enabled)):
        if chosen:
            raise ConfigurationError(f"accelerate's configuration has {name}: {ANOTHER_ENGINE}")
    check_scaler(trainer.accelerator.scaler)
    check_scaled(trainer.accelerator)
