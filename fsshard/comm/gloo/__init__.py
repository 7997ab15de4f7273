"""How does gloo get faster? Collectives with fewer copies, and shared memory between the ranks of one host."""
