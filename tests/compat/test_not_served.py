"""Names of FairScale that are not served: one text for one name, with and without the redirect."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pickle
import pkgutil
import subprocess

import pytest

import fsshard
import fsshard.compat.fairscale as mirror
from fsshard.compat import front, not_served
from fsshard.compat.errors import NotServed
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


@pytest.mark.fairscale_row(29)
@pytest.mark.parametrize("name", ["nn.FlattenParamsWrapper", "nn.misc.FlattenParamsWrapper"])
def test_flatten_params_wrapper_names_what_shards(name: str) -> None:
    with pytest.raises(NotServed, match=r"(?s)is not served.*instead: torch.distributed.fsdp.fully_shard"):
        exec(f"from fsshard.compat.fairscale.{name.rpartition('.')[0]} import FlattenParamsWrapper", {})
    assert "instead of FlattenParamsWrapper: " in explain("fairscale.nn.misc.flatten_params_wrapper")


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


def test_the_table_is_what_can_be_imported() -> None:
    """Of every module but those that only hold a place, and raise when they are imported."""
    listed = {}
    for each in pkgutil.walk_packages(mirror.__path__, front.FRONT + "."):
        if not any(part.startswith("_") for part in each.name.split(".")):
            listed["fairscale" + each.name.removeprefix(front.FRONT)] = importlib.import_module(each.name).__all__
    assert {name: ", ".join(sorted(names)) for name, names in listed.items()} | {
        "fairscale": "nn, optim"
    } == front.SERVED


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
        "not_served.explain('fairscale.nn.x'); print('torch' in sys.modules)"
    )
    done = world.run("-c", code)
    assert done.stdout == "False\n", done.stderr


def test_a_look_is_no_import() -> None:
    assert not hasattr(mirror.nn, "SyncBatchNorm") and not hasattr(mirror.nn, "__wrapped__")
    with pytest.raises(AttributeError, match=r"fairscale\.nn\.SyncBatchNorm is not served"):
        _ = mirror.nn.SyncBatchNorm
    with pytest.raises(AttributeError, match=r"'fairscale\.nn' has no attribute '__wrapped__'"):
        _ = mirror.nn.__wrapped__
