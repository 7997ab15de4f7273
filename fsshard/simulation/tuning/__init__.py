"""Which plan fits? A search over plans, with the simulation as judge."""
