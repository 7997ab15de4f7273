"""The place of ``fairscale.optim``: OSS, the gradient scalers, AdaScale. Not served yet."""

from __future__ import annotations

from ...errors import NotServed
from ...not_served import explain, place_of

raise NotServed(explain(place_of(__name__)), place_of(__name__))
