"""The library does not grow unnoticed: upper bounds that are only ever lowered.

Whoever makes something smaller lowers its number here. Whoever must raise one says in the commit what it is for.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from fsshard.backends.base import Backend
from fsshard.torch_private.registry import everything

ROOT = Path(__file__).parents[1]
ADVICE = "make it smaller, or raise the bound and say in the commit why"

LINES = {
    "fsshard + compat": 54_600,
    "tests": 58_900,
}
"""Folders -> lines of their Python files, docstrings and comments included."""
PRIVATE_NAMES = 130
CONTRACT = 26
"""Public members of Backend."""
FLOORS = 10
"""Lines of the layers of imports in pyproject.toml."""
GUARDS = """
backends/clipping: count_all_ranks _norm _of_owners _each _as_torchs
backends/forward_guards: Watched LooksAtForwards ReadsGuard _is_asked_by_torch _name_of refuse_losses written
backends/forward_guards: check_places
backends/fsdp1: FSDP1Backend._watch FSDP1Backend._check_accumulation _GatheredGuard _no_guard
backends/fsdp1: _WrittenGuard _before_gather
backends/fsdp2: FSDP2Backend._watch FSDP2Backend._let_the_root_be_first _before_gather
backends/part_guards: PartsGuard _tree _before_state_dict _before_load _asked_by_torch _module_of _named
backends/part_guards: refuse_parameter refuse_numbers_of_parts _refuse
backends/reducer_arrivals: ReplicatedModel check_step Arrivals.__init__ Arrivals.finish Arrivals._begin Arrivals._end
backends/step_state: StepState.check_reduced
backends/step_counts: StepCounts _number _told
complex_params/shard_tensors: assign _set_item _numbers_of _dispatched _drawn _as_shards _refuse_random
complex_params/shown: _set_grad
oss/norm_and_scaling: owned_norms exchanged _norms count_owners _norm
parallel/domain/entering: marked_in_graph guard_losses _refuse_slabs _is_slab Entrance._look_at_checksums _header
parallel/domain/entering: _raise_everywhere _check_alike
parallel/replicas: SameGradients _tells _differing_norms
sharded/contents: check_same_parameters
sharded/forward_methods: explain_forward_error
sharded/controller: ModelController.check_knows_all_ranks
sharded/module: ShardedModule.__deepcopy__ ShardedModule.__reduce_ex__ ShardedModule._apply _refuse_on_parts
sharded/module: _check_trains_nothing
sharded/optimizer: ShardedOptimizer._check_unused ShardedOptimizer._check_groups_may_change ShardedOptimizer.state
sharded/optimizer: ShardedOptimizer._step_supports_amp_scaling check_unstepped retire refuse_foreign_optimizers
sharded/optimizer: _refuse_foreign
sharded/optimizer_checks: OptimizerRequest.check_separable OptimizerRequest._samples OptimizerRequest._build
sharded/optimizer_checks: OptimizerRequest.trained OptimizerRequest._trained OptimizerRequest._agrees_on_parts
sharded/optimizer_checks: OptimizerRequest.begins_with_closure _is_near _give_gradients _surroundings
sharded/optimizer_checks: OptimizerRequest.check_settings OptimizerRequest.asked rank_independent_text check_asked_alike
sharded/parameters: refuse_hooks _refuse_hook _Hollow _ShapeOnly
sharded/state_dict: asked_for honour_state_dict_type _request
"""
"""Functions and classes that only refuse, beside the checks of wrap; docs/limits.md says what each is for."""
GUARD_LINES = 1_500


def lines_below(*folders: str) -> int:
    """Count the lines of all Python files below folders of the project."""
    files = [
        file
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
        if ROOT / "fsshard/compat" not in file.parents
    ]
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


@pytest.mark.parametrize("folders", LINES)
def test_lines(folders: str) -> None:
    count = lines_below(*folders.split(" + "))
    assert count <= LINES[folders], f"{folders} has {count} lines, at most {LINES[folders]} are allowed: {ADVICE}"


def test_private_names_of_torch() -> None:
    count = len(everything())
    assert count <= PRIVATE_NAMES, f"{count} private names of torch, at most {PRIVATE_NAMES} are allowed: {ADVICE}"


def test_members_of_the_contract_of_backends() -> None:
    members = [name for name, _ in inspect.getmembers(Backend) if not name.startswith("_")]
    told = f"Backend has {len(members)} members, at most {CONTRACT} are allowed: {ADVICE}\n{members}"
    assert len(members) <= CONTRACT, told


def test_floors_of_imports() -> None:
    (layers,) = re.findall(
        r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    floors = layers.strip().splitlines()
    assert len(floors) <= FLOORS, f"{len(floors)} floors of imports, at most {FLOORS} are allowed: {ADVICE}"


def lines_of_definitions(file: Path) -> dict[str, int]:
    """Return the number of lines of each function and class, decorators included, by qualified name."""
    found: dict[str, int] = {}

    def visit(node: ast.Module | ast.ClassDef, prefix: str) -> None:
        for one in node.body:
            if isinstance(one, (ast.FunctionDef, ast.ClassDef)):
                first = min(each.lineno for each in (one, *one.decorator_list))
                found[prefix + one.name] = (one.end_lineno or 0) + 1 - first
                if isinstance(one, ast.ClassDef):
                    visit(one, f"{prefix}{one.name}.")

    visit(ast.parse(file.read_text("utf-8")), "")
    return found


def test_lines_of_guards() -> None:
    count = 0
    for line in GUARDS.strip().splitlines():
        name, guards = line.split(": ")
        lines = lines_of_definitions(ROOT / f"fsshard/{name}.py")
        count += sum(lines[guard] for guard in guards.split())
    assert count <= GUARD_LINES, f"guards have {count} lines, at most {GUARD_LINES} are allowed: {ADVICE}"
