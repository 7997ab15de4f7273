"""A FairScale script, unmodified, under ``python -m fsshard.compat``, with a library called fairscale in its way."""

from __future__ import annotations

import functools
import json
import subprocess

import pytest

from tests.compat.redirect_world import World, build, together

COMPAT = ("-W", "ignore", "-m", "fsshard.compat")

TRAINS = """
import copy, json
import torch
from torch import nn
from fairscale.nn import checkpoint_wrapper
from fairscale.nn.wrap import auto_wrap, enable_wrap, wrap

class Named(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)

def step(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item(), [value.tolist() for value in model.state_dict().values()]

torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
checkpointed, automatic, by_hand = (copy.deepcopy(plain) for _ in range(3))
checkpointed[1] = checkpoint_wrapper(checkpointed[1])
calls = []
checkpointed[1].register_forward_hook(lambda *_: calls.append("hook"))
inner = checkpointed[1].forward.original or type(checkpointed[1]).forward
checkpointed[1].forward.original = lambda x: (calls.append("forward"), inner(checkpointed[1], x))[1]
with enable_wrap(wrapper_cls=Named):
    automatic = auto_wrap(automatic, auto_wrap_policy=lambda module, recurse, **_: recurse or type(module) is nn.Linear)
    by_hand[0] = wrap(by_hand[0])
assert wrap(plain) is plain
x = torch.randn(8, 4)
expected = step(plain, x)
print(json.dumps({
    "equal": [step(model, x) == expected for model in (checkpointed, automatic, by_hand)],
    "forwards": calls,
    "wrapped": [[type(part).__name__ for part in model] for model in (automatic, by_hand)],
    "from": sorted({each.__module__ for each in (checkpoint_wrapper, auto_wrap, wrap)}),
}))
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = build(tmp_path_factory.mktemp("command"))
    world.write("trains.py", TRAINS)
    return world


@pytest.fixture(scope="module")
def runs(world: World) -> dict[str, subprocess.CompletedProcess[str]]:
    """Of the script with a report, of the one without, of one that imports what is not served; of that by itself."""
    noted = "\nfrom fsshard.compat.report import notes\nprint([n for n in notes() if n.kind == 'call'])"
    world.write("quiet.py", TRAINS + noted)
    world.write("library/fairscale/optim/adam.py", "class Adam: library = 'the real library'")
    world.write("adam.py", "import torch\nfrom fairscale.optim.adam import Adam\nprint('ran on', Adam.library)")
    words = {"trains.py": ("--report", "trains.py"), "quiet.py": ("quiet.py",), "adam.py": ("adam.py",)}
    run = functools.partial(world.run, light=False, FSSHARD_REDIRECT="")
    each = [functools.partial(run, *COMPAT, *given) for given in words.values()]
    return dict(zip([*words, "real"], together(*each, functools.partial(run, "adam.py")), strict=True))


def test_a_script_trains_on_ours_and_the_report_says_so(runs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    done = runs["trains.py"]
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["equal"] == [True] * 3  # to the last bit, running statistics included
    assert facts["forwards"] == ["forward", "hook", "forward"]  # computed again in backward: it was checkpointed
    assert facts["wrapped"] == [
        ["Named", "BatchNorm1d", "Named"],
        ["Named", "BatchNorm1d", "Linear"],
    ]
    assert {each.split(".nn.")[0] for each in facts["from"]} == {"fsshard.compat.fairscale"}
    rows = [" ".join(line.split()) for line in done.stderr.splitlines()]
    called = rows[rows.index("called:") + 1 : rows.index("modules:")]
    assert called == [
        "fairscale.nn.checkpoint.checkpoint_wrapper served by torch.utils.checkpoint, not reentrant",
        "fairscale.nn.wrap.auto_wrap served by fsshard",
        "fairscale.nn.wrap.wrap served by fsshard, fsshard; outside of enable_wrap, modules stay as they are",
    ]
    assert "fairscale from fsshard.compat.fairscale" in rows
    assert "instead of checkpoint_wrapper:" in rows


def test_without_report_nothing_is_noted_or_printed(runs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    done = runs["quiet.py"]
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_is_not_served_fails_at_its_import_with_the_way_out(
    runs: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    done = runs["adam.py"]
    assert done.returncode == 1 and done.stdout == ""  # not on the library that is installed beside it
    lines = done.stderr.splitlines()
    assert "fsshard.compat.errors.NotServed: fairscale.optim.adam is not served: fairscale is " in done.stderr
    assert "    from fairscale.optim.adam import Adam" in lines
    assert "  instead of Adam: torch.optim.Adam (with fused=True)" in lines
    assert "    fairscale.nn.misc: checkpoint_wrapper" in lines
    assert lines[-1] == "  to use the real FairScale: run the script without fsshard.compat"
    assert runs["real"].stdout == "ran on the real library\n"
