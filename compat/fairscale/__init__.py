"""FairScale 0.4.13's import tree, served by fsshard and torch.

FairScale itself is imported only where :func:`fsshard.compat.use` was told so.

``import fsshard.compat.fairscale as fairscale`` in place of ``import fairscale``. As there, this import alone makes the
sub-packages reachable as attributes.
"""

from __future__ import annotations

from ..engine import serve as _serve
from ..not_served import Refusing as _Refusing
from ..not_served import missing_from

_Refusing.install()
_serve()  # before any part below: it decides which library their names are of

from . import nn, optim  # noqa: E402
from .version import __version_tuple__  # noqa: E402

__all__ = ["nn", "optim"]

__version__ = ".".join(str(part) for part in __version_tuple__)
__getattr__ = missing_from(__name__)
