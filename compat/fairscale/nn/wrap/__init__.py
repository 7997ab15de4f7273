"""``fairscale.nn.wrap``: wraps chosen submodules while a model is built."""

from __future__ import annotations

from ....not_served import missing_from
from .auto_wrap import auto_wrap, config_auto_wrap_policy, default_auto_wrap_policy, enable_wrap, wrap

__all__ = ["auto_wrap", "config_auto_wrap_policy", "default_auto_wrap_policy", "enable_wrap", "wrap"]

__getattr__ = missing_from(__name__)
