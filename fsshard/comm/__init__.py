"""How do ranks talk to each other? Agreements, rendezvous, stores, and who is missing.

``agreement`` is for a step that all ranks take at the same line, in the group that they train in: ``wrap``, a new
optimizer. ``rendezvous`` is for what goes on beside the training, in threads too, and must name who does not come:
saving and loading. ``presence`` names the rank that is gone once a collective has failed.
"""
