"""What is sharded how? A pure function from a model and policies to a plan, without a process group."""
