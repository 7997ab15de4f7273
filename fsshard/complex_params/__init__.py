"""How is a complex weight kept? As pairs of real numbers that engines can shard, shown as complex by its module."""
