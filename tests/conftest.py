"""What all tests share. The fixture ``ranks``, the pool of spawned ranks, is the one of our own pytest plugin."""

from __future__ import annotations

import os

# Before any rank starts: they inherit it. No test may go to the network.
os.environ["HF_HUB_OFFLINE"] = "1"

pytest_plugins = ["pytester", "tests.compat.fairscale.row_table"]
