"""The place of ``fairscale.nn.data_parallel``: ShardedDataParallel, FullyShardedDataParallel. Not served yet."""

from __future__ import annotations

from ...errors import NotServed
from ...served import explain

raise NotServed(explain("nn.data_parallel"), name=__name__)
