"""How do ranks talk to each other? Agreements, one watchdog, and a channel for saving.

``agreement`` raises on all ranks what one has raised. ``watchdog`` says who is missing, where each rank waits, and why
one has left. ``agreement.Channel`` connects the ranks apart from the training, in threads too: for saving, loading.
"""
