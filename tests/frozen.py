"""Imported last by the process that forks: what is there by then is no longer looked through by its children."""

import gc

gc.collect()
gc.freeze()
