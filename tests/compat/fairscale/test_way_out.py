"""The report of a FairScale script, end to end: the lines that it says to write train the same in their place."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.forked import run_module, run_script

WAY_OUT = "  to leave FairScale, write:"

SCRIPT = """
import sys, tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.1)
    def forward(self, x):
        return x + self.drop(torch.tanh(self.linear(x)))

def train(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{{folder}}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Block(), Block(), nn.Linear(6, 1))
    layer = model[1]
{engine}
    torch.manual_seed(1)
    data = torch.Generator().manual_seed(rank)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4, generator=data)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        total = loss.detach().double()
        dist.all_reduce(total)
        if rank == 0:
            print(repr(total.item()), flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, args=(folder,), nprocs=2, start_method="fork")
    print("fairscale" in sys.modules)
"""
OSS = """
from fairscale.nn.checkpoint import checkpoint_wrapper
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.grad_scaler import ShardedGradScaler
from fairscale.optim.oss import OSS
checkpoint_wrapper(layer)
optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=0.05)
model = ShardedDataParallel(model, optimizer)
scaler = ShardedGradScaler()
"""
FSDP = """
import fairscale.nn
from fairscale.nn import enable_wrap, wrap
from fairscale.nn.data_parallel import FullyShardedDataParallel
from fairscale.optim.grad_scaler import ShardedGradScaler
with enable_wrap(wrapper_cls=FullyShardedDataParallel):
    model[1], model[2] = wrap(model[1]), wrap(model[2])
    model = wrap(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scaler = ShardedGradScaler()
"""
CASES = {
    "OSS": (
        OSS,
        {
            "fairscale.nn.checkpoint.checkpoint_wrapper": "torch.utils.checkpoint, not reentrant",
            "fairscale.nn.data_parallel.ShardedDataParallel": None,
            "fairscale.optim.grad_scaler.ShardedGradScaler": None,
            "fairscale.optim.oss.OSS": None,
        },
        ["checkpoint_wrapper", "OSS, ShardedDataParallel", "ShardedGradScaler"],
    ),
    "FSDP": (
        FSDP,
        {
            "fairscale.nn.data_parallel.FullyShardedDataParallel": None,
            "fairscale.nn.wrap.wrap": "fsshard",
            "fairscale.optim.grad_scaler.ShardedGradScaler": None,
        },
        ["wrap, FullyShardedDataParallel", "ShardedGradScaler"],
    ),
}


def script(engine: str) -> str:
    return SCRIPT.format(engine=textwrap.indent(engine.strip("\n"), "    "))


def section(lines: list[str], title: str) -> list[str]:
    """The lines below a title."""
    start = lines.index(title) + 1
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("    ")), len(lines))
    return lines[start:end]


@pytest.mark.parametrize("case", ["OSS", pytest.param("FSDP", marks=pytest.mark.long)])
def test_the_lines_to_write_train_the_same(tmp_path: Path, case: str) -> None:
    """A script as it was, with its report; and with the lines that the report says to write."""
    text, engines, replaced = CASES[case]
    (tmp_path / "before.py").write_text(script(text))
    before = run_module("fsshard.compat", ["--report", "before.py"], tmp_path, {})
    assert before.returncode == 0, before.stderr
    report = before.stderr[before.stderr.index("fsshard.compat: what this run used") :].splitlines()
    said = dict(line.strip().split(" served by ", 1) for line in section(report, "  called:"))
    said = {name.strip(): by for name, by in said.items()}
    assert list(said) == list(engines)
    assert all(by and (engines[name] is None or by == engines[name]) for name, by in said.items())
    way_out = section(report, WAY_OUT)
    titles = [line for line in way_out if not line.startswith(8 * " ")]
    assert titles == [f"    instead of {names}:" for names in replaced]
    instead = [line.strip() for line in way_out if line.startswith(8 * " ")]
    plain = "optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)"
    (tmp_path / "after.py").write_text(script("\n".join([plain, *instead])))
    after = run_script(tmp_path / "after.py", [], {})
    assert after.returncode == 0, after.stderr
    *losses, has_fairscale = before.stdout.splitlines()
    assert len(losses) == 4 and after.stdout.splitlines() == [*losses, "False"] and has_fairscale == "False"
