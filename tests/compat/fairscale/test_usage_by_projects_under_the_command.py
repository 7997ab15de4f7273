"""Imports of known projects, in scripts under ``python -m fsshard.compat``, and what is left to the real FairScale."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess

import pytest

from tests.compat.redirect_world import World, build, together

COMPAT = ("-W", "ignore", "-m", "fsshard.compat")

SERVED = {
    "ESPnet, X-VLM": """
import fairscale
names = [
    fairscale.optim.oss.OSS, fairscale.optim.grad_scaler.ShardedGradScaler, fairscale.nn.checkpoint.checkpoint_wrapper,
    fairscale.nn.data_parallel.ShardedDataParallel,
]
assert fairscale.optim.OSS is fairscale.optim.oss.OSS
""",
    "Hugging Face": """
import importlib.util
assert importlib.util.find_spec("fairscale") is not None
import fairscale
from fairscale.nn.data_parallel import FullyShardedDataParallel as FullyShardedDDP
from fairscale.nn.data_parallel import ShardedDataParallel as ShardedDDP
from fairscale.nn.wrap import auto_wrap
from fairscale.optim import OSS
from fairscale.optim.grad_scaler import ShardedGradScaler
names = [FullyShardedDDP, ShardedDDP, auto_wrap, OSS, ShardedGradScaler]
""",
    "fairseq, unilm": """
try:
    from fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP, TrainingState
    from fairscale.nn import checkpoint_wrapper, wrap, enable_wrap, auto_wrap
    from fairscale.nn.wrap import wrap as the_same
    has_fsdp = True
except ImportError:
    has_fsdp = False
assert has_fsdp and the_same is wrap
from fairscale.nn.checkpoint import checkpoint_wrapper as again
assert again is checkpoint_wrapper
names = [FSDP, TrainingState, checkpoint_wrapper, wrap, enable_wrap, auto_wrap]
""",
    "SlowFast, detectron2": """
try:
    from fairscale.nn.checkpoint import checkpoint_wrapper
except ImportError:
    checkpoint_wrapper = None
from fairscale.nn.checkpoint.checkpoint_activations import checkpoint_wrapper as one
from fairscale.nn.misc import checkpoint_wrapper as two
from fairscale.nn.misc.checkpoint_activations import checkpoint_wrapper as three
assert checkpoint_wrapper is one is two is three
names = [checkpoint_wrapper]
""",
}
EACH = """
import json, sys
def modules(text):
    scope = {"__name__": "project"}
    try:
        exec(text, scope)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return sorted({each.__module__ for each in scope["names"]})
print(json.dumps({
    "served": {name: modules(text) for name, text in json.loads(sys.argv[1]).items()},
    "real": sorted(name for name in sys.modules if name.startswith("fsshard.compat.fall_through.")),
}))
"""

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

from fairscale.nn.checkpoint import checkpoint_wrapper   # of the same script: ours
print(type(up).__module__, checkpoint_wrapper.__module__)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = build(tmp_path_factory.mktemp("usages"))
    world.write("each.py", EACH)
    world.write("llama.py", LLAMA)
    return world


@pytest.fixture(scope="module")
def runs(world: World) -> list[subprocess.CompletedProcess[str]]:
    """Of what projects import, and of Llama's script."""
    run = functools.partial(world.run, *COMPAT, light=False, library=False, FSSHARD_REDIRECT="")
    return together(functools.partial(run, "each.py", json.dumps(SERVED)), functools.partial(run, "llama.py"))


@pytest.fixture(scope="module")
def facts(runs: list[subprocess.CompletedProcess[str]]) -> dict:
    done = runs[0]
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize("project", SERVED)
def test_what_a_project_imports_is_ours(facts: dict, project: str) -> None:
    assert facts["served"][project]
    assert all(module.startswith("fsshard.compat.fairscale.") for module in facts["served"][project])
    assert facts["real"] == []  # nothing of the library that is installed


@pytest.mark.long
def test_llama_falls_through_to_the_real_library(runs: list[subprocess.CompletedProcess[str]]) -> None:
    if importlib.util.find_spec("fairscale") is None:
        pytest.skip("needs fairscale")
    done = runs[1]
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == [
        "fairscale.nn.model_parallel.layers",
        "fsshard.compat.fairscale.nn.checkpoint.checkpoint_activations",
    ]
