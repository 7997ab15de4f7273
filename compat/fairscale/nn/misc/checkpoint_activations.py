"""The path of ``checkpoint_wrapper`` before FairScale 0.4, from which scripts still import it."""

from __future__ import annotations

from ....not_served import missing_from
from ..checkpoint.checkpoint_activations import checkpoint_wrapper
from ..checkpoint.checkpoint_utils import patch_batchnorm

__all__ = ["checkpoint_wrapper", "patch_batchnorm"]

__getattr__ = missing_from(__name__)
