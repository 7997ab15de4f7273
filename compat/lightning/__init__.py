"""Lightning's Trainer and Fabric over :func:`fsshard.wrap`; needs the extra ``fsshard[lightning]``.

import fsshard.compat.lightning
trainer = lightning.Trainer(strategy="fsshard_fsdp2", accelerator="cpu", devices=2)     # or Strategy("fsdp2", ...)
    fabric = lightning.Fabric(strategy="fsshard_fsdp2", accelerator="cpu", devices=2)         # or FabricStrategy
"""

from fsshard.errors import MissingExtra

try:
    import lightning  # noqa: F401
except ImportError as error:
    raise MissingExtra("lightning", "lightning", "fsshard.compat.lightning") from error

from .fabric import FabricStrategy
from .strategy import Strategy, register

register()

__all__ = ["FabricStrategy", "Strategy", "register"]
