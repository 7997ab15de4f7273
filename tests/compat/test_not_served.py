"""Names of FairScale that are not served: one text for one name, with and without the redirect; what to write instead.

Tests compat/report.py, too.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest

import fsshard
import fsshard.compat.fairscale as mirror
from fsshard.compat import not_served
from fsshard.compat.errors import NotServed
from fsshard.compat.not_served import BY_NAME, FRONT, SERVED, explain, instead_of, steps


@pytest.mark.fairscale_row(29)
@pytest.mark.parametrize("name", ["nn.FlattenParamsWrapper", "nn.misc.FlattenParamsWrapper"])
def test_flatten_params_wrapper_names_what_shards(name: str) -> None:
    with pytest.raises(NotServed, match=r"(?s)is not served.*instead: torch.distributed.fsdp.fully_shard"):
        exec(f"from fsshard.compat.fairscale.{name.rpartition('.')[0]} import FlattenParamsWrapper", {})
    assert "instead of FlattenParamsWrapper: " in explain("fairscale.nn.misc.flatten_params_wrapper")


@pytest.mark.fairscale_row(13)
@pytest.mark.fairscale_row(14)
@pytest.mark.fairscale_row(30)
@pytest.mark.parametrize("name", ["AdaScale", "AdaScaleWrapper"])
def test_adascale_is_refused_with_what_to_write_instead(name: str) -> None:
    instead = r"(?s)is not served.*instead: a plain torch optimizer whose learning rate is scaled by hand"
    with pytest.raises(NotServed, match=instead):
        exec(f"from fsshard.compat.fairscale.optim import {name}", {})
    with pytest.raises(AttributeError, match=instead):
        getattr(mirror.optim, name)(None)
    assert f"instead of {name}: a plain torch optimizer" in explain("fairscale.optim.adascale")


def test_the_text() -> None:
    first, *lines, last = explain("fairscale.experimental.nn").splitlines()
    assert (
        first == "fairscale.experimental.nn is not served: fairscale is fsshard.compat.fairscale here (fsshard.compat)"
    )
    assert lines[0].startswith("  instead of DistributedPipeline: torch.distributed.pipelining.pipeline")
    assert {"  instead of SyncBatchNorm: torch.nn.SyncBatchNorm", "    fairscale.optim.oss: OSS"} <= set(lines)
    assert last == "  to use the real FairScale: run the script without fsshard.compat"
    assert "\n  instead: torch.distributed.fsdp.fully_shard, or" in explain("fairscale.nn.OSS")
    assert "instead" not in explain("fairscale.nn.no_such_name")


def test_the_table_is_what_can_be_imported_and_every_module_refuses() -> None:
    listed = {"fairscale": "nn, optim"}
    for each in pkgutil.walk_packages(mirror.__path__, FRONT + "."):
        if not any(part.startswith("_") for part in each.name.split(".")):
            module = importlib.import_module(each.name)
            assert inspect.getmodule(vars(module)["__getattr__"]) is not_served, each.name
            listed["fairscale" + each.name.removeprefix(FRONT)] = ", ".join(sorted(module.__all__))
    assert listed == SERVED


def test_one_class_that_is_caught_and_travels() -> None:
    error = NotServed(explain("fairscale.optim"), "fairscale.optim")
    assert isinstance(error, fsshard.FsshardError) and isinstance(error, ModuleNotFoundError)
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is NotServed and str(twin) == str(error)


def test_a_look_is_no_import() -> None:
    assert not hasattr(mirror.nn, "SyncBatchNorm") and not hasattr(mirror.nn, "__wrapped__")
    with pytest.raises(AttributeError, match=r"fairscale\.nn\.SyncBatchNorm is not served"):
        _ = mirror.nn.SyncBatchNorm
    with pytest.raises(AttributeError, match=r"'fairscale\.nn' has no attribute '__wrapped__'"):
        _ = mirror.nn.__wrapped__


# -- what to write instead: it exists, and takes the arguments that are written


def look_up(name: str) -> Any:
    """A dotted name, as deep a module of it as there is."""
    module, _, rest = name.partition(".")
    found = importlib.import_module(module)
    for part in rest.split(".") if rest else []:
        module = f"{module}.{part}"
        if not hasattr(found, part):
            importlib.import_module(module)
        found = getattr(found, part)
    return found


def calls(tree: ast.AST, known: dict[str, Any]) -> Iterator[tuple[ast.Call, Any]]:
    """Calls of what was imported; not those on a script's own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).partition(".")[0] in known:
            yield node, eval(ast.unparse(node.func), known)


@pytest.mark.parametrize("name", BY_NAME)
def test_names_in_the_advice_exist_and_the_lines_are_calls_that_fit(name: str) -> None:
    advice, lines = BY_NAME[name]
    assert all(look_up(each) is not None for each in re.findall(r"\b(?:torch|fsshard)(?:\.\w+)+", f"{advice}\n{lines}"))
    tree = ast.parse(lines)
    known = {"torch": importlib.import_module("torch")}
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(imports, []), name, "exec"), known)
    for call, function in calls(tree, known):
        starred = any(isinstance(argument, ast.Starred) for argument in call.args)
        binds = inspect.signature(function).bind_partial if starred else inspect.signature(function).bind
        given = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
        binds(*[None for argument in call.args if not isinstance(argument, ast.Starred)], **given)


def test_it_is_found_by_any_path() -> None:
    for path in ("fairscale.optim.OSS", "fairscale.optim.oss.OSS"):
        assert instead_of(path) == {"OSS": BY_NAME["OSS"]}
    assert instead_of("fairscale.nn.pipe.balance") == {"Pipe": BY_NAME["Pipe"]}
    assert instead_of("fairscale.nn.extra") == instead_of("fairscale") == {}


def test_all_that_is_served_has_lines_to_write() -> None:
    """The lines are torch's, fsshard's, or the import from fsshard.compat, which is run too."""
    for module, listed in SERVED.items():
        for name in listed.split(", ") if module != "fairscale" else ():
            ((names, instead),) = steps([f"{module}.{name}"])
            assert names == [name]
            if instead.lines.startswith("from fsshard.compat"):
                known = {}
                exec(instead.lines, known)
                assert known[name] is look_up(f"fsshard.compat.{module}.{name}")


def test_steps_are_one_script() -> None:
    """No line twice, no model wrapped twice, and what comes before the sharding stands before it."""
    whole = ["fairscale.optim.OSS", "fairscale.optim.grad_scaler.GradScaler", "fairscale.nn.ShardedDataParallel"]
    assert [names for names, _ in steps([*whole, "fairscale.nn.checkpoint.checkpoint_wrapper", "fairscale.nn"])] == [
        ["checkpoint_wrapper"],
        ["OSS", "ShardedDataParallel"],
        ["GradScaler"],
    ]
    ((names, instead),) = steps([*whole[::2], "fairscale.nn.wrap.auto_wrap"])
    assert names == ["auto_wrap", "OSS", "ShardedDataParallel"] and "auto_wrap_policy" in instead.lines
    assert steps(["fairscale.nn.extra", "fairscale"]) == []
