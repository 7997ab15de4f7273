"""Accelerate's loops over :func:`fsshard.wrap`; needs the extra ``fsshard[accelerate]``.

from fsshard.compat.accelerate import Accelerator
accelerator = Accelerator(fsshard={"backend": "fsdp2"})
"""

from fsshard.errors import MissingExtra

try:
    import accelerate  # noqa: F401
except ImportError as error:
    raise MissingExtra("accelerate", "accelerate", "fsshard.compat.accelerate") from error

from .accelerator import Accelerator

__all__ = ["Accelerator"]
