"""Rules about the source: which rooms may import which, what is private, how long functions are, who tests what."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Set
from pathlib import Path

import torch
from torch import nn

from fsshard.backends.registry import _OURS
from fsshard.torch_private import registry
from tests.import_graph import (
    Import,
    circles,
    imports,
    package_of,
    parsed,
    private_attributes,
    room_of,
    sources,
    unused_overrides,
)
from tests.sets import FAST
from tools.torch_behaviour import counted_on

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
LONGEST = 80


def files_of_ours() -> list[Path]:
    return sorted([*(ROOT / "fsshard").rglob("*.py"), *(ROOT / "compat").rglob("*.py"), ROOT / "fsshard_pytest.py"])


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_library_does_not_know_its_front_doors() -> None:
    """But for the demo, which is a user's training that comes along."""
    for path in (ROOT / "fsshard").rglob("*.py"):
        doors = ("examples", "tests", *(() if path.parent.name == "demo" else ("fsshard.compat", "compat")))
        assert not {name for name in imported(path) if name.startswith(doors)}, path


def rooms() -> dict[str, int]:
    """Room -> its floor, counted from the top: the order of import-linter's contract, with what is above it."""
    text = (ROOT / "pyproject.toml").read_text()
    (contract,) = re.findall(r'^name = "arrows point one way"$.*?^\]$', text, re.DOTALL | re.MULTILINE)
    assert "ignore_imports" not in contract, "no arrow may point upward, so there is nothing to leave out"
    named = [re.findall(r"fsshard\.(\w+)", line) for line in contract.splitlines() if "fsshard." in line]
    assert named[0] == ["cli", "demo"]  # one floor, where the command knows the demo, which uses what users do
    floors = [["cli"], ["demo"], ["compat"], [""], *named[1:]]  # "" is fsshard itself: it has names of all rooms below
    return {room: floor for floor, group in enumerate(floors) for room in group}


def upward(found: list[Import], floors: dict[str, int]) -> list[str]:
    """Imports of a room that is not below."""
    between = [(one, room_of(one.module), room_of(one.target)) for one in found]
    return [str(one) for one, here, there in between if here != there and floors[there] <= floors[here]]


def test_no_import_points_upward() -> None:
    """In functions and for type checking as well: an arrow that is hidden is an arrow."""
    found, floors = imports(sources(ROOT)), rooms()
    assert len(found) > 1000
    assert {room_of(module) for module in sources(ROOT)} == set(floors), "each room has a floor"
    assert upward(found, floors) == []


def test_an_import_that_points_upward_is_found() -> None:
    for code in (
        "from fsshard.checkpoint import saving",
        "def later():\n    from fsshard.checkpoint.saving import save",
        "if TYPE_CHECKING:\n    import fsshard.checkpoint.saving",
        "from ..checkpoint.saving import save",
        "from fsshard import save",
    ):
        texts = {"fsshard.model.checks": code, "fsshard.checkpoint.saving": "", "fsshard.checkpoint.__init__": ""}
        assert len(upward(imports({**texts, "fsshard.__init__": ""}), rooms())) == 1, code
    texts = {"fsshard.checkpoint.saving": "from fsshard.model.checks import agree", "fsshard.model.checks": ""}
    assert upward(imports(texts), rooms()) == []


def edges(found: list[Import]) -> dict[str, set[str]]:
    return {module: {one.target for one in found if one.module == module} for module in {one.module for one in found}}


def test_no_modules_import_each_other() -> None:
    assert circles(edges(imports(sources(ROOT)))) == []


def test_a_circle_is_found() -> None:
    texts = {
        "fsshard.a": "import fsshard.b",
        "fsshard.b": "def f():\n    from .c import x",
        "fsshard.c": "import fsshard.a, fsshard.d",
        "fsshard.d": "",
    }
    assert circles(edges(imports(texts))) == [["fsshard.a", "fsshard.b", "fsshard.c"]]


TORCHS = {
    *(
        name
        for one in (nn.Module(), torch.Tensor, torch.optim.Optimizer, torch.amp.GradScaler("cpu"))
        for name in dir(one)
    ),
    *("_fields", "_asdict", "_replace"),  # of named tuples
    *("_param_infos", "_shared_param_infos", "_tensors"),  # of FSDP1's flat parameter
    *("_fsdp_wrapped_module", "_world"),  # of FSDP1, of torch.distributed.distributed_c10d
}
"""Attributes with an underscore that are torch's, and that classes of ours have too: subclasses, and stand-ins."""


def test_underscores_stay_within_their_package() -> None:
    """No other package imports a name that begins with one, or looks it up on an object of its classes."""
    texts = sources(ROOT)
    taken = [one for one in imports(texts) if package_of(one.module) != package_of(one.target)]
    private = [str(one) for one in taken if any(re.match("_(?!_)", x) for x in (one.name, *one.target.split(".")))]
    assert private == []
    assert private_attributes(texts, TORCHS) == []


def test_a_private_attribute_of_another_room_is_found() -> None:
    here = "class Model:\n    def __init__(self):\n        self._entries = []\n    def _sync(self): ..."
    there = "def save(model):\n    model._sync()\n    return model._entries, self._entries, model._parameters"
    texts = {"fsshard.sharded.module": here, "fsshard.sharded.near": there, "fsshard.checkpoint.saving": there}
    told = private_attributes(texts, TORCHS)
    assert [text.partition(" ")[2] for text in told] == [
        "model._sync: of fsshard.sharded",
        "model._entries: of fsshard.sharded",
    ]


FAIRSCALES = {
    *("_clear_counters", "_setup_backward_hooks")  # of its ShardedDataParallel, which calls them
}


def test_no_private_method_of_a_subclass_is_one_that_nothing_calls() -> None:
    """Such as the override of a method that has another name now."""
    looked_up = TORCHS | FAIRSCALES | {"_step_supports_amp_scaling"}  # by torch's GradScaler, of an optimizer
    assert unused_overrides(sources(ROOT), looked_up) == []


def test_an_override_that_nothing_calls_is_found() -> None:
    base = "class Base:\n    def step(self): self._refresh()\n    def _refresh(self): ...\n    def _old(self): ..."
    sub = "class Sub(base.Base):\n    def _refresh(self): ...\n    def _settle(self): ...\n    def _apply(self): ..."
    texts = {"fsshard.oss.base": base, "fsshard.backends.sub": sub}
    assert unused_overrides(texts, {"_apply"}) == ["fsshard.backends.sub:3 Sub._settle"]
    texts["fsshard.backends.by_name"] = "HOOKS = ('_settle',)"
    assert unused_overrides(texts, {"_apply"}) == []


def test_functions_are_short() -> None:
    for path in sorted((ROOT / "fsshard").rglob("*.py")):
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                assert lines <= LONGEST, f"{path}: {node.name}: {lines} lines"


ABOUT_OLD_FILES = "WROTE_IN_MEMORY_ORDER"
"""A constant that says which backend wrote old checkpoints in an order of its own: no class of today can tell."""


def asks_for_a_backend(source: str) -> list[str]:
    """Comparisons with a backend's name, with a constant that is one, and with the name of an object's backend."""
    tree = parsed(source)
    constants = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and _names_in(node.value)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id != ABOUT_OLD_FILES
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".startswith", ".endswith")):
            sides = [*node.args]
        else:
            continue
        texts = [ast.unparse(side) for side in sides]
        if any(map(_names_in, sides)) or any(x in constants or x.endswith("backend.name") for x in texts):
            found.append(ast.unparse(node))
    return found


def _names_in(node: ast.expr) -> bool:
    """Return whether it is the name of a backend of ours, or names of several."""
    parts = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    return any(isinstance(part, ast.Constant) and part.value in _OURS for part in parts)


def test_backend_names_are_asked_for_nowhere_else() -> None:
    """All that others ask of a backend is on its class."""
    for path in files_of_ours():
        if (ROOT / "fsshard" / "backends") not in path.parents:
            found = asks_for_a_backend(path.read_text())
            # where FairScale is a package whose imports are served
            if ROOT / "compat" in path.parents or path.name == "sitecustomize.py":
                found = [text for text in found if "'fairscale'" not in text]
            assert found == [], path


def test_what_asks_for_a_backend_by_name_is_found() -> None:
    asked = (
        'if backend == "ddp": ...',
        'if job.backend not in ("fsdp", "none"): ...',
        "if model.backend.name != chosen: ...",
        'if name.startswith("fsdp"): ...',
        'match name:\n    case "fairscale": ...',
        'NAMES = ("ddp", "none")\nif name in NAMES: ...',
    )
    for code in asked:
        assert len(asks_for_a_backend(code)) == 1, code
    assert asks_for_a_backend('if policy == "auto" or wrap(m, backend="ddp") is None: ...') == []


@functools.cache
def files_of_tests() -> list[Path]:
    return sorted(path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))


def mirrored(module: Path) -> list[Path]:
    """Where the tests of a module are looked for first."""
    folder = (module.relative_to("fsshard") if module.parts[0] == "fsshard" else module).parent
    name = (module.parent.name if module.stem == "__init__" else module.stem).strip("_")
    folders = [folder, folder.parent] if module.stem == "__init__" else [folder]
    return [path for path in files_of_tests() if path.parent in folders and f"{path.stem}_".startswith(f"test_{name}_")]


def mentions(text: str, module: Path) -> bool:
    """Return whether a test imports a module, or names it by its path."""
    dotted = ".".join((module.parent if module.stem == "__init__" else module.with_suffix("")).parts)
    dotted = dotted if module.parts[0] == "fsshard" else f"fsshard.{dotted}"
    room, _, name = dotted.rpartition(".")
    imports = rf"\b{re.escape(dotted)}\b|from {re.escape(room)} import .*\b{re.escape(name)}\b"
    return module.as_posix() in text or re.search(imports, text) is not None


def does_something(module: Path) -> bool:
    """Return whether there is anything to test: a package that imports only has nothing."""
    body = parsed((ROOT / module).read_text()).body
    return module.stem != "__init__" or any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in body)


@functools.cache
def modules() -> list[Path]:
    found = [path.relative_to(ROOT) for room in ("fsshard", "compat") for path in (ROOT / room).rglob("*.py")]
    return [path for path in sorted(found) if does_something(path)]


def test_every_module_has_tests_of_its_name_or_ones_that_name_it() -> None:
    text = "\n".join((TESTS / path).read_text() for path in files_of_tests())
    lacking = [str(path) for path in modules() if not mirrored(path) and not mentions(text, path)]
    assert not lacking, (
        f"add tests/<the same path>/test_<name>.py, or name its path in the file that tests it: {lacking}"
    )


NO_TORCH = {
    *("_parameters", "_buffers", "_modules"),  # nn.Module's, which all of torch and its users go by
    *("_apply", "_load_from_state_dict", "_save_to_state_dict"),  # what subclasses of nn.Module override
    *("_asdict", "_fields", "_make", "_replace"),  # of named tuples
    *(
        "_current_frames",
        "_exit",
        "_getframe",
        "_run_exitfuncs",
        "_run_module_as_main",
    ),  # Python's: os, sys, atexit, runpy
    *("_forkserver", "_forkserver_pid", "_inheriting"),  # Python's: multiprocessing
    *("_no_split_modules", "_init_kwargs", "_fixtureinfo"),  # of transformers, neuraloperator and pytest
    *("_is_accelerate_prepared", "_models"),  # of Accelerate
}
"""Attributes that begin with an underscore and are not torch's, or that torch documents."""
OURS = ("_fsshard_", "_register_")
"""Prefixes: our marks on tensors and modules; hooks that torch documents."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and not name.startswith(OURS) and name not in NO_TORCH


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    found = set()
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else set()
    return frozenset(found)


def own_names(paths: Iterable[Path]) -> set[str]:
    """Return what modules define: functions, classes, variables, and attributes of ``self``."""
    return set().union(*map(names_in, paths))


def members_in(path: Path) -> set[str]:
    """Return the members of classes in a file of torch's, and what it sets on objects."""
    found = set()
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.ClassDef):
            targets = [x for one in node.body if isinstance(one, ast.Assign) for x in one.targets]
            targets += [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
            found |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            found |= {one.id for one in targets if isinstance(one, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


@functools.cache
def torchs_names() -> frozenset[str]:
    """Private names that the registry lists, and all others that classes have in the files that these stand on."""
    entries, site = registry.everything(), Path(torch.__file__).parent.parent
    files = {site / entry.source for entry in entries if entry.source.endswith(".py")}
    files |= {site / f"{one.name.partition(':')[0].replace('.', '/')}.py" for one in counted_on()}
    listed = {entry.name.replace(":", ".").rpartition(".")[2] for entry in entries}
    found = listed.union(*(members_in(path) for path in files if path.exists()))
    return frozenset(name for name in found if is_private(name))


def private_torch(source: str, own: set[str], ours: set[str], torchs: Set[str]) -> list[str]:
    """Each use of a private name of torch: in an import, as an attribute, or as a string.

    Args:
        source: the text of a file.
        own: what the file defines. A name of torch's is its own on ``self``, or another variable; not on a member of
            it (``self.engine._is_root``), which is an object of another class.
        ours: what any file of ours defines.
        torchs: what torch has; who overrides such a name in one file does not make it ours in another.
    """
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names] if not node.level else []
            from_torch = (name for name in names if name.startswith("torch."))
            found += [name for name in from_torch if any(is_private(part) for part in name.split("."))]
            found += [name for name in names if name.startswith("unittest")]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            direct = isinstance(node.value, ast.Name) or ast.unparse(node.value) == "super()"
            mine = direct and node.attr in own if node.attr in torchs else node.attr in ours
            found += [] if mine else [ast.unparse(node)]
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value in torchs
            and node.value not in own
        ):
            found.append(repr(node.value))
    return found


ANOTHERS = {
    "compat/fairscale/nn/data_parallel/_fsdp_state.py": {"_fsdp_wrapped_module"},  # FairScale's FSDP has it too
    "fsshard/backends/fairscale.py": {"_sync_params_and_buffers"},  # of FairScale's ShardedDDP
    "fsshard/sharded/state_dict.py": {"_metadata"},  # a key of neuralop's
    "fsshard/planning/torch_settings.py": {"_HYBRID_SHARD_ZERO2"},  # of a public enum: users may write it
}
"""Names that something else has as well as torch, by the file that means those. May only shrink."""


def test_one_room_touches_private_torch() -> None:
    files = [path for path in files_of_ours() if path.parent.name != "torch_private"]
    ours = own_names(files)
    found = {}
    for path in files:
        own = {*names_in(path), *ANOTHERS.get(name := str(path.relative_to(ROOT)), ())}
        if uses := private_torch(path.read_text(), own, ours, torchs_names()):
            found[name] = uses
    assert not found, "\n".join(f"{name}: {len(uses)}: {', '.join(uses)}" for name, uses in found.items())


def test_what_goes_past_the_door_to_torch_is_found() -> None:
    assert {"_is_root", "_reset_lazy_init", "_sync_buffers", "_orig_mod"} <= torchs_names()
    own, ours = {"_is_root", "_own"}, {"_is_root", "_reset_lazy_init", "_own", "_our_other"}
    for code in (
        "from torch._utils import _flatten_dense_tensors",
        "import unittest.mock",
        "torch._no_such_name",
        "inner._reset_lazy_init()",
        "self.engine._is_root",
        'getattr(self, "_all_fsdp_states", ())',
    ):
        assert len(private_torch(code, own, ours, torchs_names())) == 1, code
    assert private_torch("self._is_root, other._our_other, x.y._own, '_no_such'", own, ours, torchs_names()) == []


def test_the_fast_tests_have_a_file_of_each_room() -> None:
    assert [name for name in FAST if not (ROOT / name).is_file()] == []
    rooms = {path.name for path in (ROOT / "fsshard").iterdir() if (path / "__init__.py").is_file()} | {"compat"}
    assert rooms - {Path(name).parts[1] for name in FAST} == set()
