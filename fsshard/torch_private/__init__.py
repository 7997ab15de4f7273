"""Which private names of torch does the library stand on? One file per area; nothing else touches them.

Each name is noted in :mod:`fsshard.torch_private.registry` with the source of torch 2.13 that has it, what it is for
and what happens where it is missing, which is probed for and never concluded from a version. ``fsshard doctor`` lists
what is missing.
"""
