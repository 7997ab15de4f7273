"""How does a training survive its job? Portable checkpoints: any engine, any number of ranks, no pickle."""
