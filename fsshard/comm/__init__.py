"""How do ranks talk to each other? Agreements, one watchdog, and a channel for saving.

``agreement`` raises on all ranks what one has raised. ``watchdog`` says who is missing, where each rank waits, and why
one has left. ``channel`` connects the ranks independently of the training, in threads too: saving and loading.
"""
