"""What is recommended in place of FairScale's names: it exists, and it takes the arguments that are written."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

from fsshard.compat import front
from fsshard.compat.equivalents import _MODULES, BY_NAME, equivalents, steps


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


def names_in(text: str) -> list[str]:
    return re.findall(r"\b(?:torch|fsshard)(?:\.\w+)+", text)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_name_in_the_advice_exists(name: str) -> None:
    """Also those within a note, such as a function of fsshard that is only planned."""
    assert BY_NAME[name].advice
    for each in [*BY_NAME[name].torch, *names_in(BY_NAME[name].advice), *names_in("\n".join(BY_NAME[name].lines))]:
        assert look_up(each) is not None


@pytest.mark.parametrize("name", [name for name, each in BY_NAME.items() if each.lines])
def test_the_lines_to_write_are_imports_that_work_and_calls_that_fit(name: str) -> None:
    tree = ast.parse("\n".join(BY_NAME[name].lines))
    known: dict[str, Any] = {"torch": importlib.import_module("torch")}
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(imports, []), name, "exec"), known)
    for call, function in calls(tree, known):
        given = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
        starred = any(isinstance(argument, ast.Starred) for argument in call.args)
        binds = inspect.signature(function).bind_partial if starred else inspect.signature(function).bind
        binds(*[None for argument in call.args if not isinstance(argument, ast.Starred)], **given)


def calls(tree: ast.AST, known: dict[str, Any]) -> Iterator[tuple[ast.Call, Any]]:
    """Calls of what was imported, but of partial, which has no signature; not those on a script's own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            root = ast.unparse(node.func).partition(".")[0]
            if root in known and root != "partial":
                yield node, eval(ast.unparse(node.func), known)


def test_modules_lead_to_names_that_are_known() -> None:
    assert {each for found in _MODULES.values() for each in found} <= set(BY_NAME)


def test_equivalents_are_found_by_any_path() -> None:
    for path in ("fairscale.optim.OSS", "fairscale.optim.oss.OSS", "fairscale.optim.oss"):
        assert equivalents(path) == {"OSS": BY_NAME["OSS"]}
    assert equivalents("fairscale.nn.pipe.balance") == {"Pipe": BY_NAME["Pipe"]}
    assert list(equivalents("fairscale.optim")) == ["OSS", "ShardedGradScaler", "GradScaler", "AdaScale"]
    assert equivalents("fairscale.nn.extra") == {} and equivalents("fairscale") == {}


def test_all_that_is_served_has_lines_to_write() -> None:
    """Of torch, of fsshard, or the import from fsshard.compat; those lines too are run."""
    names = {f"{module}.{name}" for module, listed in front.SERVED.items() for name in listed.split(", ")}
    assert {"fairscale.nn.checkpoint.checkpoint_wrapper", "fairscale.nn.checkpoint.patch_batchnorm"} <= names
    for name in names:
        ((short, found),) = steps([name])
        assert short == [name.rpartition(".")[2]]
        if found.lines[0].startswith("from fsshard.compat"):
            known: dict[str, Any] = {}
            exec(found.lines[0], known)
            assert known[short[0]] is look_up(f"fsshard.compat.{name}")


def test_steps_are_one_script() -> None:
    """No line twice, no model wrapped twice, and what comes before the sharding stands before it."""
    whole = ["fairscale.optim.OSS", "fairscale.optim.grad_scaler", "fairscale.nn.data_parallel.ShardedDataParallel"]
    assert [names for names, _ in steps([*whole, "fairscale.nn.checkpoint.checkpoint_wrapper"])] == [
        ["checkpoint_wrapper"],
        ["OSS", "ShardedDataParallel"],
        ["ShardedGradScaler"],
        ["GradScaler"],
    ]
    ((names, found),) = steps([*whole[::2], "fairscale.nn.wrap.auto_wrap"])
    assert names == ["auto_wrap", "OSS", "ShardedDataParallel"] and "auto_wrap_policy" in found.lines[1]
    # A module stands for what is in it where nothing of it was named.
    assert [names for names, _ in steps(["fairscale.nn.data_parallel"])] == [
        ["ShardedDataParallel", "FullyShardedDataParallel"]
    ]
    assert steps(["fairscale.nn.extra", "fairscale"]) == []
