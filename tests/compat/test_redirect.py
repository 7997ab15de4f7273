"""fsshard.compat's redirect: what `import fairscale` gives, here and in all processes below.

Tests fsshard/launching/children/__init__.py, fsshard/launching/children/sitecustomize.py too.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from fsshard.compat.not_served import explain
from fsshard.launching.children import FOLDER, python_path
from fsshard.launching.children.sitecustomize import REDIRECT, TRACE
from tests.compat.redirect_world import World, build, together

INSTALL = """
import json, sys
from fsshard.compat import redirect
redirect.install_serving("standin")
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build(tmp_path_factory.mktemp("world"))


# -- one process -----------------------------------------------------------------------------------------------------

NAMES = """
import importlib, importlib.metadata, importlib.util, inspect, pickle
import fairscale
tree = fairscale.optim.oss.OSS.library, fairscale.nn.checkpoint.checkpoint_wrapper.__name__
import fairscale.optim.oss as oss, standin.optim.oss as ours
from fairscale.optim import OSS
try:
    import fairscale.nn.wrap.auto_wrap as package
except ImportError as error:        # as of FairScale: fairscale.nn.wrap is a function by now
    package = None
from fairscale.nn.wrap import auto_wrap
from fairscale.nn.wrap.auto_wrap import wrap
loaded = [name for name in sys.modules if name.startswith("fairscale")]
again = importlib.reload(fairscale.optim)
print(json.dumps({
    "tree": tree,
    "same": [oss is ours, fairscale is sys.modules["standin"], OSS is ours.OSS, again is sys.modules["standin.optim"],
             all(sys.modules[name] is sys.modules["standin" + name[9:]] for name in loaded)],
    "spec": [oss.__spec__.name, oss.__spec__._initializing],
    "pickle": [pickle.loads(pickle.dumps(OSS)) is OSS, pickle.loads(b"cfairscale.optim.oss\\nOSS\\n.") is OSS],
    "inspect": inspect.getmodule(OSS) is oss and "class OSS" in inspect.getsource(OSS),
    "wrap": [package is None, auto_wrap.__name__, wrap is fairscale.nn.wrap],
    "found": [bool(importlib.util.find_spec(name)) for name in ("fairscale", "fairscale.optim.oss")],
    "release": importlib.metadata.version("fairscale"),
    "torch": "torch" in sys.modules,
}))
"""


def test_both_names_are_one_module(world: World) -> None:
    world.write("names.py", INSTALL + NAMES)
    assert world.facts("names.py") == {
        "tree": ["front", "checkpoint_wrapper"],
        "same": [True] * 5,
        "spec": ["standin.optim.oss", False],
        "pickle": [True, True],
        "inspect": True,
        "wrap": [True, "auto_wrap", True],
        "found": [True, True],
        "release": "0.4.13",
        "torch": False,
    }


REFUSED = """
def refusal(code):
    try:
        exec(code, {})
    except Exception as error:
        return [type(error).__name__, str(error), getattr(error, "name", None)]
    return None
import fairscale.nn
print(json.dumps({
    "module": refusal("import fairscale.nn.extra"),
    "below": refusal("import fairscale.experimental.nn.offload"),
    "from package": refusal("from fairscale.nn import FlattenParamsWrapper"),
    "attribute": refusal("import fairscale; fairscale.nn.FlattenParamsWrapper"),
    "hasattr": hasattr(fairscale.nn, "FlattenParamsWrapper"),
    "broken": refusal("import fairscale.optim.broken"),
    "half": refusal("import fairscale.optim.half"),
    "real": [name for name in sys.modules if "fall_through.fairscale" in name],
}))
"""


def test_a_name_that_is_not_served_says_what_is(world: World) -> None:
    world.write("refused.py", INSTALL + REFUSED)
    # The library to keep out has these too, and they work there: a fallback would go unnoticed.
    for name, text in {"broken": "raise RuntimeError('the front is broken')", "half": "import no_such_thing"}.items():
        world.write(f"front/standin/optim/{name}.py", text)
        world.write(f"library/fairscale/optim/{name}.py", "")
    facts = world.facts("refused.py")
    kind, text, name = facts["module"]
    assert (kind, name) == ("NotServed", "fairscale.nn.extra") and "fairscale.nn.extra is not served" in text
    assert "    fairscale.nn.misc: checkpoint_wrapper\n" in text and "instead" not in text
    assert facts["below"][2] == "fairscale.experimental"
    kind, text, name = facts["from package"]
    assert kind == "NotServed" and text == explain("fairscale.nn.FlattenParamsWrapper")  # as without the redirect
    assert facts["attribute"][0] == "AttributeError" and not facts["hasattr"]
    assert facts["broken"][0] == "RuntimeError" and "the front is broken" in facts["broken"][1]
    assert facts["half"][0] == "ModuleNotFoundError" and facts["half"][2] == "no_such_thing"
    assert facts["real"] == []


FALLING = """
import importlib, pickle
from fsshard.compat import fall_through
import fairscale.nn.model_parallel.layers as layers
from fairscale.nn import Pipe, model_parallel
from fairscale.nn.model_parallel import Column, late
import fairscale.nn.pipe, fairscale.optim.oss
from fairscale.nn import moe
outer = importlib.import_module("fsshard.compat.fall_through.fairscale.optim.oss")
print(json.dumps({
    "library": [Column.library, Column.oss().library, late.OSS.library, outer.OSS.library],
    "one copy": [Pipe.column is Column, Column.oss() is outer.OSS, fairscale.nn.pipe.Pipe is Pipe,
                 model_parallel is sys.modules["fairscale.nn.model_parallel"],
                 layers is sys.modules[Column.__module__]],
    "front": [fairscale.optim.oss.OSS.library, fairscale.__name__, outer is not fairscale.optim.oss],
    "others": [name for name, module in sys.modules.items() if name.startswith(("fairscale", "standin"))
               and "/library/" in str(module.__file__) and not name.startswith(fall_through.FALL_THROUGH)],
    "class": [Column.__module__, outer.OSS.__module__],
    "pickle": [pickle.loads(pickle.dumps(Column)) is Column, pickle.loads(pickle.dumps(outer.OSS)) is outer.OSS],
}))
"""

ABSENT = """
import fsshard.compat.fall_through as beside
beside._find_root = lambda: None
def refusal(code):
    try:
        exec(code, {})
    except ImportError as error:
        return [type(error).__name__, str(error), error.name]
print(json.dumps([
    refusal("import fairscale.nn.pipe"), refusal("from fairscale.nn import model_parallel"),
    refusal("from fairscale.nn import MOELayer"), refusal("import fsshard.compat.fall_through.fairscale.optim.oss"),
]))
"""


def test_some_packages_are_the_real_ones_and_bring_no_others(world: World) -> None:
    world.write("falling.py", INSTALL + FALLING)
    facts = world.facts("falling.py")
    assert facts["library"] == ["the real library"] * 4
    assert facts["one copy"] == [True] * 5
    assert facts["front"] == ["front", "standin", True]
    assert facts["others"] == []
    assert facts["class"] == ["fairscale.nn.model_parallel.layers", "fsshard.compat.fall_through.fairscale.optim.oss"]
    assert facts["pickle"] == [True, True]


def test_without_the_real_library_they_say_so(world: World) -> None:
    world.write("absent.py", INSTALL + ABSENT)
    pipe, model_parallel, moe, oss = world.facts("absent.py")
    assert pipe[0] == model_parallel[0] == moe[0] == "NotServed"
    assert all("left to the real FairScale, which is not installed" in each[1] for each in (pipe, model_parallel, moe))
    assert "instead of Pipe: torch.distributed.pipelining.pipeline" in pipe[1]
    assert oss[0] == "ModuleNotFoundError" and oss[2] == "fairscale" and "pip install" in oss[1]


ORDER = """
import json, os, sys
before = dict(os.environ)
from fsshard.compat import install, redirect, uninstall
from fairscale.optim.oss import OSS
def refusal(call, *args):
    try:
        call(*args)
    except Exception as error:
        return [type(error).__name__, str(error)]
facts = {"before": OSS.library, "late": refusal(install)}
for name in [name for name in sys.modules if name.partition(".")[0] == "fairscale"]:
    del sys.modules[name]
redirect.install_serving("standin")
redirect.install_serving("standin")
facts["finders"] = sum(isinstance(finder, redirect.Redirect) for finder in sys.meta_path)
import fairscale.optim.oss
facts["on"] = fairscale.optim.oss.OSS.library
uninstall()
uninstall()
import fairscale.optim.oss
facts["off"] = fairscale.optim.oss.OSS.library
facts["environment"] = {k: os.environ.get(k) for k in {*before, *os.environ} if before.get(k) != os.environ.get(k)}
facts["late again"] = refusal(install)
print(json.dumps(facts))
"""


def test_install_comes_first_and_can_be_undone(world: World) -> None:
    world.write("order.py", ORDER)
    facts = world.facts("order.py", FSSHARD_REDIRECT="")
    assert facts["before"] == facts["off"] == "the real library" and facts["on"] == "front"
    for late in (facts["late"], facts["late again"]):
        assert late[0] == "RedirectError" and "fairscale is already imported" in late[1] and "/library/" in late[1]
    assert facts["finders"] == 1 and facts["environment"] == {"FSSHARD_REDIRECT": None}


def test_front_doors_that_need_no_redirect_do_not_load_it_nor_a_vendor() -> None:
    code = "import sys, fsshard.compat; print([n for n in sys.modules if n.startswith('fsshard.compat.')])"
    code += "; print(sorted({'neuralop', 'fairscale', 'transformers'} & set(sys.modules)))"
    code += "; from fsshard.compat import *; print(install.__name__, uninstall.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]", "install uninstall"]


# -- children --------------------------------------------------------------------------------------------------------

# Run by a parent whose hook is there; each child says which library it got. Top-level import, as in users' scripts.
FAMILY = """
import json, multiprocessing, os, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
from fairscale.optim.oss import OSS

def own(pipe, method=None, *more):
    found = [OSS.library, sys.modules["fairscale.optim.oss"].__name__]
    if method is not None:
        found = found + ask(method, *more)
    pipe.send(found)

def ask(method, *more):
    context = multiprocessing.get_context(method)
    mine, theirs = context.Pipe()
    process = context.Process(target=own, args=(theirs, *more))
    process.start()
    theirs.close()
    try:
        return mine.recv()
    finally:
        process.join()

def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()

def name_of(kind):
    return kind.__module__

if __name__ == "__main__":
    facts = {method: ask(method) for method in sys.argv[1].split(",")}
    if "nested" in sys.argv[2:]:
        multiprocessing.set_forkserver_preload(["json"])      # the script's own: it replaces any of ours
        facts["nested"] = ask("spawn", "spawn", "fork", "forkserver")
        facts["forkserver, own preload"] = ask("forkserver")
        facts["subprocess"] = python("from fairscale.optim.oss import OSS; print(OSS.library)")
        facts["idle"] = python("import sys; print(*{'fsshard', 'fsshard.compat', 'torch'}.intersection(sys.modules))")
        from fairscale.nn.model_parallel import Column
        from fsshard.compat.fall_through.fairscale.optim.oss import OSS
        kinds = OSS, Column
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            facts["unpickled"] = [pool.submit(name_of, kind).result() for kind in kinds]
    print(json.dumps(facts))
"""

FRONT_HERE = ["front", "standin.optim.oss"]


def test_children_have_the_redirect(world: World) -> None:
    world.write("family.py", FAMILY)
    facts = _last(world.run("-m", "fsshard.compat", "family.py", "spawn,forkserver,fork", "nested"))
    assert facts["spawn"] == facts["forkserver"] == facts["fork"] == FRONT_HERE
    assert facts["forkserver, own preload"] == FRONT_HERE
    assert facts["nested"] == FRONT_HERE * 4
    assert facts["subprocess"] == "front"
    # A child that does not use FairScale pays nothing. The light fsshard is there: the user's sitecustomize was run.
    assert facts["idle"] == "fsshard"
    assert facts["unpickled"] == [
        "fsshard.compat.fall_through.fairscale.optim.oss",
        "fairscale.nn.model_parallel.layers",
    ]


def test_children_of_a_traced_script_are_traced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sitecustomize serves both, and stays for the record when the redirect is undone."""
    monkeypatch.setenv(REDIRECT, f"fsshard.compat.fairscale@{sys.prefix}")
    monkeypatch.setenv(TRACE, json.dumps({"folder": "unused", "prefix": sys.prefix}))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([FOLDER, *python_path()]))
    code = "import os, sys; print([type(finder).__name__ for finder in sys.meta_path[:2]])"
    code += "; from fsshard.compat import install, uninstall; install(); uninstall(); print(os.environ['PYTHONPATH'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    finders, path = done.stdout.splitlines()
    assert finders == "['WaitingForFairScale', 'WaitingForTorch']" and path.split(os.pathsep)[0] == FOLDER


TORCH = """
import json, sys
import torch, torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset
from fairscale.optim.oss import OSS

class Names(Dataset):
    def __len__(self): return 1
    def __getitem__(self, index): return OSS.library

def rank(number, queue): queue.put(OSS.library)

if __name__ == "__main__":
    facts = {"loader": next(iter(DataLoader(Names(), num_workers=1, multiprocessing_context="spawn", batch_size=None)))}
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(rank, args=(queue,), nprocs=1)
    facts["mp.spawn"] = queue.get()
    from fsshard.backends.fairscale_patched import OSS as Patched
    from fsshard.compat.fall_through.fairscale.optim.oss import OSS as Real
    from fairscale.nn import Pipe
    from fairscale.nn.model_parallel import ColumnParallelLinear
    facts["backend"] = [Real is not OSS, Patched is Real, Real.__module__]
    facts["fall through"] = [Pipe.__module__, ColumnParallelLinear.__module__]
    print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def with_torch(world: World) -> list[subprocess.CompletedProcess[str]]:
    """Run the script that has torch start children, and workers under torchrun."""
    world.write("torch_family.py", TORCH)
    world.write("worker.py", WORKER)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d")
    family = ("-W", "ignore", "-m", "fsshard.compat", "torch_family.py")
    return together(
        functools.partial(world.run, *family, light=False, library=False),
        # The agent needs a whole torch; only it has one: the workers' fsshard is light.
        functools.partial(world.run, *launcher, "-m", "fsshard.compat", "--report", "worker.py", "--lr", "3"),
    )


@pytest.mark.long
def test_torch_starts_children_with_it_and_our_own_backend_has_the_real_library(
    with_torch: list[subprocess.CompletedProcess[str]],
) -> None:
    pytest.importorskip("fairscale")
    done = with_torch[0]
    facts = _last(done)
    assert facts["loader"] == facts["mp.spawn"] == "front"
    assert facts["backend"] == [True, True, "fsshard.compat.fall_through.fairscale.optim.oss"]
    assert facts["fall through"] == ["fairscale.nn.pipe.pipe", "fairscale.nn.model_parallel.layers"]


WORKER = """
import os, sys
from fairscale.optim.oss import OSS
from fsshard.compat.report import called
called("fairscale.optim.oss.OSS", "a stand-in")
os.write(1, f"rank {os.environ['RANK']} {OSS.library} {sys.argv[1:]} {__name__}\\n".encode())  # at once: ranks share it
"""


@pytest.mark.long
def test_torchrun_starts_it_and_reports_once(with_torch: list[subprocess.CompletedProcess[str]]) -> None:
    done = with_torch[1]
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert said == [f"rank {rank} front ['--lr', '3'] __main__" for rank in range(2)]
    assert done.stderr.count("what this run used of FairScale") == 1
    assert "served by a stand-in" in done.stderr


def _last(done: subprocess.CompletedProcess[str]) -> Mapping[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
