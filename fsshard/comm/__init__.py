"""How do ranks talk? What is under a collective: stores, and processes that inherit what they cannot use."""
