"""How does gloo get faster? FSDP2's collectives by other primitives."""
