"""Train a Tucker-factorised TFNO (complex64 weights) on Darcy flow; the engine is one word.

    python examples/tfno_darcy.py --backend fairscale fsdp2 --nprocs 2 --picture darcy.png
    torchrun --nproc-per-node 2 examples/tfno_darcy.py --backend fsdp2 --trainer neuralop

It is ``fsshard demo``, whose code is fsshard/demo/tfno_darcy.py; examples/minimal has loops to copy.
"""

from __future__ import annotations

import sys

from fsshard.demo.tfno_darcy import main

if __name__ == "__main__":
    main(sys.argv[1:])
