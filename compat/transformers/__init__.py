"""Hugging Face's Trainer over :func:`fsshard.wrap`; needs the extra ``fsshard[transformers]``.

from fsshard.compat.transformers import Trainer  # or Seq2SeqTrainer
trainer = Trainer(model, args, train_dataset=data, fsshard={"backend": "fsdp2"})
"""

from fsshard.errors import MissingExtra

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise MissingExtra("transformers and accelerate", "transformers", "fsshard.compat.transformers") from error

from .trainer import Seq2SeqTrainer, Trainer

__all__ = ["Seq2SeqTrainer", "Trainer"]
