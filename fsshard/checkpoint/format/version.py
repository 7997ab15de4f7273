"""The version of fsshard: written into each checkpoint, shown as ``fsshard.__version__``, read by setup.cfg."""

from __future__ import annotations

__version__ = "0.1.0"
"""As in semantic versioning."""
