"""What happens to the module? What is done to it before, and behind the back of, an engine."""
