"""Imports of known projects, in a script under ``python -m fsshard.compat``, and what is left to the real FairScale."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.redirect_world import build

LLAMA = """
import os, tempfile
import torch
import torch.distributed as dist
import fairscale.nn.model_parallel.initialize as fs_init
from fairscale.nn.model_parallel.initialize import get_model_parallel_rank, initialize_model_parallel
from fairscale.nn.model_parallel.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear

with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    initialize_model_parallel(1)
    torch.manual_seed(1)
    assert fs_init.get_model_parallel_world_size() == 1 and get_model_parallel_rank() == 0
    same = lambda weight: weight
    up = ColumnParallelLinear(4, 6, bias=False, gather_output=False, init_method=same)
    down = RowParallelLinear(6, 4, bias=False, input_is_parallel=True, init_method=same)
    embedding = ParallelEmbedding(10, 4, init_method=same)
    for each in (up, down, embedding):
        torch.nn.init.normal_(each.weight)
    x = embedding(torch.tensor([[1, 2, 3]]))
    expected = torch.nn.functional.embedding(torch.tensor([[1, 2, 3]]), embedding.weight) @ up.weight.T @ down.weight.T
    assert torch.equal(down(up(x)), expected)
    down(up(x)).sum().backward()
    dist.destroy_process_group()
print(type(up).__module__)
"""
OURS = """
import importlib.util
assert importlib.util.find_spec("fairscale") is not None                          # Hugging Face
import fairscale
assert tuple(map(int, fairscale.__version__.split("."))) >= (0, 3, 4)             # Lightning
from fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP, ShardedDataParallel as ShardedDDP
from fairscale.nn.data_parallel import TrainingState
from fairscale.nn.data_parallel.sharded_ddp import ShardedDataParallel
from fairscale.nn import checkpoint_wrapper, wrap, enable_wrap, auto_wrap         # fairseq
from fairscale.nn.wrap import wrap as the_same
from fairscale.nn.misc.checkpoint_activations import checkpoint_wrapper as again  # SlowFast, before FairScale 0.4
from fairscale.optim import OSS
from fairscale.optim.grad_scaler import ShardedGradScaler
assert the_same is wrap and again is checkpoint_wrapper and ShardedDDP is ShardedDataParallel
assert fairscale.optim.oss.OSS is OSS                                             # ESPnet
class OSSAdamW(OSS):                                                              # mmcv
    pass
names = [FSDP, ShardedDDP, TrainingState, checkpoint_wrapper, wrap, enable_wrap, auto_wrap, ShardedGradScaler]
print({each.__module__.rpartition("fairscale.")[0] for each in [*names, *OSSAdamW.__mro__[1:2]]})
"""


@pytest.mark.long
def test_llama_falls_through_to_the_real_library_and_others_do_not(tmp_path: Path) -> None:
    pytest.importorskip("fairscale", reason="needs fairscale")
    world = build(tmp_path)
    world.write("projects.py", LLAMA + OURS)
    command = ("-W", "ignore", "-m", "fsshard.compat", "projects.py")
    done = world.run(*command, light=False, library=False, FSSHARD_REDIRECT="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["fairscale.nn.model_parallel.layers", "{'fsshard.compat.'}"]
