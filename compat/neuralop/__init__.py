"""neuraloperator's trainers for models under :func:`fsshard.wrap`; needs the extra ``fsshard[neuralop]``."""

from fsshard.errors import MissingExtra

try:
    import neuralop  # noqa: F401
except ImportError as error:
    raise MissingExtra("neuraloperator", "neuralop", "fsshard.compat.neuralop") from error

from .trainer import IncrementalFNOTrainer, Trainer

__all__ = ["IncrementalFNOTrainer", "Trainer"]
