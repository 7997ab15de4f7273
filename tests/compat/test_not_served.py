"""Names of FairScale that are not served: one text for one name, with and without the redirect."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pickle
import pkgutil
import subprocess
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import fsshard
import fsshard.compat.fairscale as mirror
from fsshard.compat import fall_through, front, not_served
from fsshard.compat.errors import NotServed
from fsshard.compat.front import falls_through
from fsshard.compat.not_served import explain
from tests.compat.redirect_world import World, build, together

REFUSALS = """
import json, sys
def refusal(statement):
    try:
        exec(statement, {})
    except ImportError as error:
        return [type(error).__module__, type(error).__name__, str(error), error.name]
print(json.dumps([refusal(each) for each in json.loads(sys.argv[1])]))
"""
NAMES = {
    "from fairscale.nn import SyncBatchNorm": "fairscale.nn.SyncBatchNorm",
    "from fairscale.nn.misc import ParamBucket": "fairscale.nn.misc.ParamBucket",
    "from fairscale.nn.wrap.auto_wrap import no_such_name": "fairscale.nn.wrap.auto_wrap.no_such_name",
    "from fairscale.nn.data_parallel import no_such_name": "fairscale.nn.data_parallel.no_such_name",
    "from fairscale.optim.oss import no_such_name": "fairscale.optim.oss.no_such_name",
    "from fairscale.optim import Adam": "fairscale.optim.Adam",
    "from fairscale import experimental": "fairscale.experimental",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = build(tmp_path_factory.mktemp("not_served"))
    world.write("refusals.py", REFUSALS)
    return world


@pytest.mark.long
def test_the_redirect_and_the_package_say_the_same(world: World) -> None:

    def refusals(before: tuple[str, ...], package: str) -> subprocess.CompletedProcess[str]:
        statements = [each.replace("fairscale", package, 1) for each in NAMES]
        return world.run(*before, "refusals.py", json.dumps(statements), light=False, FSSHARD_REDIRECT="")

    ways = (((), "fsshard.compat.fairscale"), (("-m", "fsshard.compat"), "fairscale"))
    found = []
    for done in together(*(functools.partial(refusals, *way) for way in ways)):
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    for (module, kind, text, name), statement in zip(found[0], NAMES, strict=True):
        assert (module, kind) == ("fsshard.compat.errors", "NotServed"), statement
        assert text == explain(name)
    assert [name for *_, name in found[0]] == list(NAMES.values())


WAYS = {
    "import": "import {name}",
    "import as": "import {name} as found",
    "from": "from {parent} import {leaf}",
    "star": "from {name} import *",
    "importlib": "import importlib; importlib.import_module({name!r})",
    "relative": "import importlib; importlib.import_module('.' + {leaf!r}, {parent!r})",
    "__import__": "__import__({name!r})",
    "fromlist": "__import__({name!r}, fromlist=['x'])",
    "below": "import {name}.deeper.still",
}
MODULES = [  # of FairScale 0.4.13, and one that it never had
    "experimental",
    "experimental.nn.offload",
    "internal.containers",
    "nn.data_parallel.fsdp_optim_utils",
    "nn.misc.param_bucket",
    "nn.never",
    "optim.adam",
    "utils",
]
LEFT = ["nn.moe", "nn.moe.top2gate", "nn.pipe", "nn.model_parallel.layers"]


@pytest.mark.parametrize("package", ["fairscale", pytest.param("fsshard.compat.fairscale", marks=pytest.mark.long)])
def test_every_way_to_import_a_module(world: World, package: str) -> None:
    """Without the real library, so that what is left to it is refused too."""
    names = [f"{package}.{name}" for name in (*MODULES, *LEFT)]
    cases = [
        (name, way.format(name=name, parent=name.rpartition(".")[0], leaf=name.rpartition(".")[2]))
        for name in names
        for way in WAYS.values()
    ]
    absent = "import fsshard.compat.fall_through as beside\nbeside._find_root = lambda: None\n"
    world.write("ways.py", absent + REFUSALS)
    before = ("-m", "fsshard.compat") if package == "fairscale" else ()
    statements = json.dumps([statement for _, statement in cases])
    done = world.run(*before, "ways.py", statements, light=False, library=False, FSSHARD_REDIRECT="")
    assert done.returncode == 0, done.stderr
    for (name, statement), found in zip(cases, json.loads(done.stdout), strict=True):
        assert found is not None, statement
        assert found[:2] == ["fsshard.compat.errors", "NotServed"], (statement, found)
        asked = found[2].partition(" is ")[0]
        public = "fairscale" + name.removeprefix(package)
        assert (public + ".").startswith(asked + ".") or asked == public + ".x", (statement, found[2])


@pytest.mark.fairscale_row(29)
@pytest.mark.parametrize("name", ["nn.FlattenParamsWrapper", "nn.misc.FlattenParamsWrapper"])
def test_flatten_params_wrapper_names_what_shards(name: str) -> None:
    with pytest.raises(NotServed, match=r"(?s)is not served.*instead: torch.distributed.fsdp.fully_shard"):
        exec(f"from fsshard.compat.fairscale.{name.rpartition('.')[0]} import FlattenParamsWrapper", {})
    assert "instead of FlattenParamsWrapper: " in explain("fairscale.nn.misc.flatten_params_wrapper")


LEAVES = """
import importlib.util, json
def outcome(statement):
    try:
        return str(eval(statement, {"util": importlib.util}))
    except ImportError as error:
        return [type(error).__name__, str(error).partition("\\n")[0], error.name]
names = json.loads(__import__("sys").argv[1])
print(json.dumps([outcome(name) for name in names]))
"""


@pytest.mark.long
def test_a_list_of_names_gives_the_package_as_in_python(world: World) -> None:
    """``__import__(name, fromlist=["x"])`` is how to get the module ``name`` itself, whether it has an x or not."""
    world.write("leaves.py", LEAVES)
    statements = [
        f"__import__({name!r}, fromlist=[{part!r}]).__name__"
        for name in ("fairscale.optim", "fairscale.nn.moe", "fairscale.nn.model_parallel", "fairscale")
        for part in ("x", "", "layers")
    ]
    statements += [
        "util.find_spec('fairscale.nn.model_parallel.never')",
        "util.find_spec('fsshard.compat.fairscale.never')",
        "exec('from fairscale.nn.model_parallel import never')",
        "exec('import fairscale.nn.model_parallel.never')",
        "hasattr(__import__('fairscale.nn.model_parallel', fromlist=['x']), 'never')",
    ]
    done = world.run("-m", "fsshard.compat", "leaves.py", json.dumps(statements), light=False, FSSHARD_REDIRECT="")
    assert done.returncode == 0, done.stderr
    *found, absent, here, name, module, has = json.loads(done.stdout)
    parts = ["fsshard.compat.fairscale.optim", "fairscale.nn.moe", "fairscale.nn.model_parallel"]
    assert found == [each for part in [*parts, "fsshard.compat.fairscale"] for each in [part] * 3]
    assert (absent, here, has) == ("None", "None", "False")
    assert name == module
    assert module[0] == "NotServed" and module[2] == "fairscale.nn.model_parallel.never"
    assert "left to the real FairScale, which is installed and does not have it" in module[1]


def test_the_text() -> None:
    lines = explain("fairscale.experimental.nn").splitlines()
    assert (
        lines[0]
        == "fairscale.experimental.nn is not served: fairscale is fsshard.compat.fairscale here (fsshard.compat)"
    )
    assert lines[1].startswith("  instead of DistributedPipeline: torch.distributed.pipelining.pipeline")
    assert "  instead of SyncBatchNorm: torch.nn.SyncBatchNorm" in lines and "    fairscale.optim.oss: OSS" in lines
    assert (
        "    fairscale.nn.wrap: auto_wrap, config_auto_wrap_policy, default_auto_wrap_policy, enable_wrap, wrap"
        in lines
    )
    assert lines[-1] == "  to use the real FairScale: run the script without fsshard.compat"
    assert explain("fairscale.nn.OSS").splitlines()[1].startswith("  instead: torch.distributed.fsdp.fully_shard (")
    assert "instead" not in explain("fairscale.nn.no_such_name")


def test_the_text_of_what_falls_through(monkeypatch: pytest.MonkeyPatch) -> None:
    assert falls_through("fairscale.nn.Pipe") and falls_through("fairscale.nn.moe.top2gate")
    assert not falls_through("fairscale.nn.pipeline") and not falls_through("fairscale.nn")
    monkeypatch.setattr(fall_through, "is_installed", lambda: False)
    assert "fairscale.nn.Pipe is left to the real FairScale, which is not installed" in explain("fairscale.nn.Pipe")
    monkeypatch.setattr(fall_through, "is_installed", lambda: True)
    assert explain("fairscale.nn.Pipe").startswith("fairscale.nn.Pipe is left to the real FairScale; import it")


def test_the_list_is_what_can_be_imported() -> None:
    listed = [line.strip().partition(": ") for line in front.served_lines(front.FRONT)]
    for module, _, names in listed:
        found = importlib.import_module(front.FRONT + module.removeprefix("fairscale"))
        assert sorted(found.__all__) == names.split(", ")
        assert all(hasattr(found, name) for name in names.split(", "))


def test_every_module_of_the_front_refuses() -> None:
    for each in pkgutil.walk_packages(mirror.__path__, front.FRONT + "."):
        if not each.name.rpartition(".")[2].startswith("_"):
            assert inspect.getmodule(vars(importlib.import_module(each.name))["__getattr__"]) is not_served, each.name


def test_one_class_that_is_caught_and_travels() -> None:
    error = NotServed(explain("fairscale.optim"), "fairscale.optim")
    assert isinstance(error, fsshard.FsshardError) and isinstance(error, ModuleNotFoundError)
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is NotServed and str(twin) == str(error)
    assert importlib.import_module("fsshard.compat.redirect").NotServed is NotServed


def test_nothing_of_this_needs_torch(world: World) -> None:
    code = (
        "import sys; from fsshard.compat import errors, not_served, equivalents, report, redirect; "
        "not_served.explain('fairscale.nn.x', 'standin'); print('torch' in sys.modules)"
    )
    done = world.run("-c", code)
    assert done.stdout == "False\n", done.stderr


def test_a_look_is_no_import() -> None:
    assert not hasattr(mirror.nn, "SyncBatchNorm") and not hasattr(mirror.nn, "__wrapped__")
    with pytest.raises(AttributeError, match=r"fairscale\.nn\.SyncBatchNorm is not served"):
        _ = mirror.nn.SyncBatchNorm
    with pytest.raises(AttributeError, match=r"'fairscale\.nn' has no attribute '__wrapped__'"):
        _ = mirror.nn.__wrapped__


def test_a_loader_that_has_no_source_to_give(tmp_path: Path) -> None:
    file = tmp_path / "served.py"
    file.write_text("__all__ = ['two', 'one']\n")
    spec = ModuleSpec("served", Loader(), origin=str(file))  # pytest's, which rewrites asserts, is such a one
    assert front._names(spec, "served") == ["one", "two"]
