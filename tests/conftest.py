"""What all tests share. The fixture ``ranks``, the pool of spawned ranks, is the one of our own pytest plugin."""

from __future__ import annotations

import os

# Before any rank starts: they inherit it. No test may go to the network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before torch is imported, here and in every process that is started. Models of these sizes gain nothing from a second
# thread, and on a busy machine two threads spend their time waiting for each other: up to a hundredfold.
os.environ["OMP_NUM_THREADS"] = "1"

pytest_plugins = ["pytester", "tests.compat.fairscale.row_table"]
