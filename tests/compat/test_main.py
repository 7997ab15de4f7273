"""python -m fsshard.compat: everything but FairScale as python has it."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from fsshard.compat import report
from fsshard.compat.report import Note
from tests.compat.redirect_world import World, build

COMPAT = ("-m", "fsshard.compat")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = build(tmp_path_factory.mktemp("main"))
    world.write("scripts/beside.py", "value = 'the module beside the script'")
    world.write("scripts/look.py", LOOK)
    world.write("package/__init__.py", "")
    world.write("package/look.py", LOOK.replace("import beside", "beside = None"))
    world.write("package/__main__.py", LOOK.replace("import beside", "beside = None"))
    return world


# -- what a script sees ----------------------------------------------------------------------------------------------

LOOK = """
import atexit, json, sys
import beside
import __main__
def later(): print("at exit", __main__ is sys.modules["__main__"], beside is not later)
atexit.register(later)
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "package": __package__,
    "spec": __spec__ and __spec__.name, "loader": type(__loader__).__name__, "cached": __cached__,
    "names": sorted(globals()), "builtins": type(__builtins__).__name__, "main": vars(__main__) is globals(),
    "code": sys._getframe().f_code.co_filename,
}))
"""

TARGETS = {"script": ("scripts/look.py",), "module": ("-m", "package.look"), "package": ("-m", "package")}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_script_sees_what_it_sees_under_python(world: World, target: tuple[str, ...]) -> None:
    arguments = (*target, "--report", "-m", "x y", "--", "--help")  # all of it the script's own
    plain, ours = world.run(*arguments), world.run(*COMPAT, *arguments)
    assert plain.returncode == ours.returncode == 0, ours.stderr
    expected, seen = (json.loads(each.stdout.splitlines()[0]) for each in (plain, ours))
    assert seen == expected
    assert ours.stdout == plain.stdout and ours.stderr == plain.stderr == ""


# -- how a script ends -----------------------------------------------------------------------------------------------

ENDS = {
    "text": "import sys; sys.exit('a reason')",
    "error": "def f():\n    raise ValueError('no')\ntry:\n    f()\nexcept ValueError as e:\n    raise KeyError from e",
    "hook": "import sys\nsys.excepthook = lambda kind, error, trace: print('mine', kind)\n1 / 0",
    "signal": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor i in range(10**9): pass",
    "hard": "import os; os._exit(7)",
    "thread": "import threading, sys\nimport __main__\n"
    "t = threading.Thread(target=lambda: (threading.main_thread().join(), print(__main__.t is t)))\nt.start()",
    "at exit": "import atexit\natexit.register(lambda: print('bye'))\nraise SystemExit(4)",
}


@pytest.mark.parametrize("ending", ENDS)
def test_a_script_ends_as_under_python(world: World, ending: str) -> None:
    world.write("ending.py", ENDS[ending])
    plain, ours = world.run("ending.py"), world.run(*COMPAT, "ending.py")
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    lines = iter(ours.stderr.splitlines())
    assert all(line in lines for line in plain.stderr.splitlines())  # a traceback has our frames above the script's
    assert ending != "signal" or ours.returncode == -signal.SIGINT
    assert ending != "error" or (ours.returncode == 1 and "ending.py" in ours.stderr)


# -- the command itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("no_such.py",), r"can't open file '/.*/no_such.py': no such file or directory"),
        ((), "no script"),
        (("-m",), "-m needs the name of a module"),
        (("--reprot", "x.py"), "unknown option '--reprot'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(world: World, arguments: tuple[str, ...], text: str) -> None:
    done = world.run(*COMPAT, *arguments)
    first, *rest = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == "" and re.fullmatch(f"fsshard.compat: {text}", first)
    assert not rest or rest[0].startswith("usage: python -m fsshard.compat")
    if not arguments:
        assert world.run(*COMPAT, "--help").stdout.startswith("usage: python -m fsshard.compat [--report]")


# -- the report ------------------------------------------------------------------------------------------------------

USES = """
import multiprocessing, os, sys
from fairscale.optim.oss import OSS
import fairscale.nn.checkpoint
from fsshard.compat.report import called

def train(rank):
    from fairscale.nn.wrap import auto_wrap
    called("fairscale.optim.oss.OSS", "a stand-in")
    called(f"fairscale.nn.checkpoint.checkpoint_wrapper", "torch.utils.checkpoint")
    os._exit(0)                                     # many scripts' ranks end like this

if __name__ == "__main__":
    ranks = [multiprocessing.get_context("spawn").Process(target=train, args=(rank,)) for rank in range(2)]
    for each in ranks: each.start()
    for each in ranks: each.join()
    if os.fork() == 0:
        sys.exit()                                  # runs its copy of the exit handlers
    os.wait()
    print("done")
"""


def test_the_report_is_printed_once_and_has_what_children_did(world: World, tmp_path: Path) -> None:
    world.write("uses.py", USES)
    done = world.run(*COMPAT, "--report", "uses.py", TMPDIR=str(tmp_path))
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr
    lines = done.stderr.splitlines()
    rows = [line.split() for line in lines]
    assert lines[0] == "fsshard.compat: what this run used of FairScale"
    assert rows.count(["fairscale.optim.oss.OSS", "served", "by", "a", "stand-in"]) == 1
    assert ["fairscale", "from", "standin"] in rows
    assert lines.count("  to leave FairScale, write:") == 1
    assert lines.count("    instead of OSS:") == 1
    assert any("fsshard.wrap(model, optimizer" in line for line in lines)
    assert list(tmp_path.glob("fsshard-report-*")) == []


def test_other_ranks_and_inner_runs_print_no_report(world: World) -> None:
    world.write("alone.py", "import fairscale.nn")
    world.write(
        "outer.py",
        "import subprocess, sys\nsubprocess.run([sys.executable, *'-m fsshard.compat --report alone.py'.split()])",
    )
    assert world.run(*COMPAT, "--report", "alone.py", RANK="1").stderr == ""
    assert world.run(*COMPAT, "alone.py").stderr == ""
    assert world.run(*COMPAT, "--report", "alone.py", RANK="0").stderr.count("what this run used") == 1
    outer = world.run(*COMPAT, "--report", "outer.py").stderr
    assert outer.count("what this run used") == 1 and "fairscale  from" in outer


def test_the_report_as_text() -> None:
    assert report.text([]) == "fsshard.compat: this run used nothing of FairScale"
    found = [
        Note("call", "fairscale.nn.checkpoint.checkpoint_utils.patch_batchnorm", "an engine"),
        Note("module", "fairscale.nn.pipe", "the real FairScale"),
    ]
    assert report.text(found).splitlines() == [
        "fsshard.compat: what this run used of FairScale",
        "  called:",
        "    fairscale.nn.checkpoint.checkpoint_utils.patch_batchnorm  served by an engine",
        "  modules:",
        "    fairscale.nn.pipe  from the real FairScale",
        "  to leave FairScale, write:",
        "    instead of patch_batchnorm:",
        "        # torch has nothing like it; import it from fsshard.compat",
        "        from fsshard.compat.fairscale.nn.checkpoint.checkpoint_utils import patch_batchnorm",
        "    instead of Pipe:",
        "        # torch.distributed.pipelining.pipeline, torch.distributed.pipelining.ScheduleGPipe",
        "        from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline",
        "        pipe = pipeline(model, mb_args=(micro_batch,), split_spec={'layers.4': SplitPoint.BEGINNING})",
        "        schedule = ScheduleGPipe(pipe.build_stage(rank, device), n_microbatches=8, loss_fn=loss_fn)",
    ]
