"""FairScale 0.4.13's import tree, served by fsshard and torch.

``import fsshard.compat.fairscale as fairscale`` in place of ``import fairscale``. As there, this import alone makes the
sub-packages reachable as attributes.
"""

from __future__ import annotations

from ..not_served import missing_from
from . import nn, optim
from .version import __version_tuple__

__all__ = ["nn", "optim"]

__version__ = ".".join(str(part) for part in __version_tuple__)
__getattr__ = missing_from(__name__)
