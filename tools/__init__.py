"""For maintainers; not shipped: which lines of torch have changed, and old checkpoints."""
