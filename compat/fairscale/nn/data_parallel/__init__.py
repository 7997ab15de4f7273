"""The place of ``fairscale.nn.data_parallel``: ShardedDataParallel, FullyShardedDataParallel. Not served yet."""

from __future__ import annotations

from ....errors import NotServed
from ....not_served import explain, place_of

raise NotServed(explain(place_of(__name__)), place_of(__name__))
