"""The place of ``fairscale.optim``: OSS, the gradient scalers, AdaScale. Not served yet."""

from __future__ import annotations

from ..errors import NotServed
from ..served import explain

raise NotServed(explain("optim"), name=__name__)
