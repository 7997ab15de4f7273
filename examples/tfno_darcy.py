"""Train a Tucker-factorised TFNO (complex64 weights) on Darcy flow; the engine is one word.

    python examples/tfno_darcy.py --backends fairscale,fsdp2 --world-size 2 --plot darcy.png
    torchrun --nproc-per-node 2 examples/tfno_darcy.py --backends fsdp2 --trainer neuralop

It is ``fsshard demo``, whose code is fsshard/demo/tfno_darcy.py; examples/minimal has loops to copy.
"""

from __future__ import annotations

import sys

from fsshard.cli.app import main

if __name__ == "__main__":
    raise SystemExit(main(["demo", *sys.argv[1:]]))
