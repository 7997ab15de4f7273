"""Whoever names a line to write in an error makes a promise; here is which test keeps it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERBS = (
    "add|build|call|cast|change|choose|compute|give|hand|keep|leave|load|make|move|name|pass|put|run|save|say|see|set|"
    "take|use|wrap|write"
)
ADVICE = re.compile(rf"\b({VERBS})\b[^;]*?(\w=[\w'\[{{(]|\w\(|fsshard\.\w|torch\.\w|`)", re.IGNORECASE)
"""A verb, and within the same part of the sentence a call, an argument, a name of fsshard or torch, or quoted code."""

GPU, VERSION = "needs a GPU", "needs another version of a library"
NO_ADVICE = "names code, and advises nothing but where to look"

FOLLOWED = {
    "advice/test_engines.py": {
        "or train with fsshard.wrap(model, backend='fairscale')": "case_no_optimizer_yet",
        "use the state_dict and load_state_dict of what fsshard.wrap": "case_state_of_a_part",
    },
    "advice/test_fairscale.py": {
        "call torch.distributed.init_process_group first": "case_oss_states",
    },
    "advice/test_fields.py": {
        "pass domain.scatter(x)": "case_fields",
    },
    "advice/test_files.py": {
        "or call fsshard.init() for one rank here": "case_launched",
    },
    "advice/test_fronts.py": {
        "pass cpu=True for ranks on the CPU": "case_accelerate",
    },
    "advice/test_sharded.py": {
        "for a model of fsshard.wrap fsshard.GradScaler": "case_loss_scales",
    },
    "backends/test_ddp.py": {
        "Call optimizer.step() after loss.backward()": "test_the_other_ways_to_step_are_right",
        "Keep what it returns, and call that": "test_a_return_value_that_is_not_kept_is_named",
    },
    "backends/test_fairscale.py": {
        "Step the later one": "test_a_parameter_has_one_optimizer",
    },
    "backends/test_prefetching.py": {
        "wrap the model with fast_collectives=False": "test_without_fast_collectives_torch_does_as_it_does",
    },
    "checkpoint/interop/test_exporting.py": {
        "pass overwrite=True to replace it": "test_another_number_of_shards_replaces_the_old_ones",
    },
    "checkpoint/interop/test_importing.py": {
        "Pass trust_pickle=True (--trust-pickle) if you know": "job_load_plain",
    },
    "comm/gloo/test_collectives.py": {
        "give wrap an auto_wrap_policy without them": "test_experts_are_no_units_of_their_own",
        "wrap the model with shared_memory=False": "test_the_order_of_sums",
    },
    "compat/fairscale/nn/data_parallel/test_fully_sharded_data_parallel.py": {
        "use torch.nn.utils.clip_grad_value_, or one group": "test_wrappers_of_one_rank",
    },
    "compat/fairscale/test_under_the_command.py": {
        "the real FairScale: run the script without": "test_what_is_not_served_fails_at_its_import_with_the_way_out",
    },
    "compat/lightning/test_samples.py": {
        "set up the model first, or give loaders samplers": "test_ranks_that_share_samples_get_the_same_ones",
    },
    "compat/lightning/test_strategy.py": {
        ", the number of ranks on a node": "test_refused_on_every_rank",
        "leave out save_distributed_checkpoint=True": "test_refused_on_every_rank",
        "run the module by validate(), test() or predict()": "test_refused_on_every_rank",
        "call fit() again, which makes optimizers anew": "test_a_module_is_trained_and_tested_again_by_any_trainer",
        "which replaces a checkpoint in parts": "test_a_checkpoint_in_parts_goes_on_elsewhere",
        "call torch.nn.utils.clip_grad_norm_(parameters of this optim": "test_two_optimizers_that_the_module_steps_itself_toggled_and_with_a_loss_scale",  # noqa: E501
        "let forward call the parts": "test_two_optimizers_that_the_module_steps_itself_toggled_and_with_a_loss_scale",
    },
    "compat/test_fairscale_checkpoints.py": {
        "never had a gradient pass strict=False": "test_a_parameter_without_state_starts_anew_if_one_says_so",
        "pass names=fsdp_names(model, units) with the wrapped modules' names": "test_fsdp_goes_on",
    },
    "compat/test_neuralop.py": {
        "pass global_loss_reduction='sum' or 'mean' to Trainer": "test_losses_schedulers_and_optimizers",
        "False, where each rank has all patches": "test_modes_grow_and_samples_are_patched_as_on_one_process",
        "wrap it first: model = fsshard.wrap(model, backend=...)": "test_losses_schedulers_and_optimizers",
    },
    "compat/test_redirect.py": {
        "call install() before the first import of fairscale, or run:": "test_children_have_the_redirect",
    },
    "compat/transformers/test_recipe.py": {
        'pass settings={"compile": True} to from_transformers': "test_a_compiled_model_as_the_error_advises",
    },
    "compat/transformers/test_trainer.py": {
        "make one of it when train() has returned": "test_a_model_is_given_to_another_trainer",
        "use bf16=True": "test_losses_evaluations_words_and_weights_are_those_of_their_ddp",
    },
    "launching/test_processes.py": {
        "and at most {} ranks are started on them; pass nprocs=": "test_rank_0_result_context_and_environment",
    },
    "model/test_checks.py": {
        "on every rank: `with torch.no_grad()": "test_embeddings_with_max_norm_are_refused_and_what_the_error_says_is_right",  # noqa: E501
    },
    "model/test_compiling.py": {},
    "parallel/domain/test_sharding.py": {
        "call fsshard.parallel.shard_domain(model, ": "test_copies_and_files",
    },
    "parallel/test_model_mesh.py": {
        "name it in replicated= or sharded=, or pass replicated={():": "test_a_dimension_that_is_named_nowhere",
    },
    "parity/test_lightning_modules.py": {
        "write a Recipe with the loss alone": "test_the_loss_alone_of_a_module_that_takes_its_steps_itself",
        "else write a Recipe": "test_what_a_recipe_cannot_say_is_refused",
    },
    "parity/test_mesh_comparison.py": {
        "say: return loss.full_tensor()": "test_a_loss_that_is_a_dtensor",
        "there is no dimension of data; add data=1": "test_the_examples_and_replicas_of_shards",
        "give it a function split(model, mesh)": "test_a_transformer_that_is_split_by_hand",
        "have add up to it: replicated={...: mesh[": "test_split_along_every_dimension",
        "if the losses of {}'s ranks add up, Split(adds=(": "test_split_along_every_dimension",
        "must return keyword arguments of fsshard.wrap": "test_a_transformer_that_is_split_by_hand",
    },
    "parity/test_unusual_recipes.py": {
        "expected a backend's name, a dict of fsshard.wrap's arguments": "test_strategies_and_units_of_ones_own",
        "is not a recipe: expected build(), batches(rank, world_size": "test_batches_of_all_kinds",
    },
    "sharded/test_explaining.py": {
        "Give fsshard.estimate the settings of fsshard.wrap": "test_an_estimate_stands_below",
    },
    "sharded/test_forward_methods.py": {
        "egister_forward_method(model, {}) after fsshard.wrap": "test_an_unregistered_method_says_what_to_write",
    },
    "sharded/test_optimizer_step.py": {
        "keep tensors shaped like the": "test_nested_state_is_not_that_of_the_first_rank",
    },
    "simulation/test_estimating.py": {
        'under `if __name__ == "__main__":`; and it does not have': "test_a_script_estimates_below_its_guard",
        "pass real=True (--real on the command line)": "test_a_step_that_reads_numbers_runs_on_real_tensors",
    },
    "parallel/test_dtensors.py": {
        "or estimate(fsshard.plan(model)": "job_estimate",
        "use backend='fsdp2', 'fsdp' or 'ddp', or a size that": "test_unequal_parts",
    },
    "parallel/test_replicas.py": {
        "and wrap was told nothing of the others: if they save": "job_nothing_said",
    },
}
"""Part of a message -> who does as it says, by test file."""

FOLLOWED_PARTS = [part for named in FOLLOWED.values() for part in named]

NOT_RUN: dict[str, str] = {
    "Look for what ranks do not call equally often": NO_ADVICE,
    "equally often: is it under `if rank == 0`": NO_ADVICE,
    "use backend='fsdp2' or 'fsdp' on a GPU": GPU,
    "or less, or backend='gloo' to run on the CPU": GPU,
    "use device='cpu'": GPU,
    "use mode='max-autotune-no-cudagraphs'": GPU,
    "leave move_grads_to_cpu=None": GPU,
    "move it to one with model.to(device)": GPU,
    'wrap(model, backend="fsdp2", cpu_offload=True)': GPU,
    "use transformers 5.23, or write the loop over fsshard.wrap": VERSION,
    "Run a script as python does, where every": NO_ADVICE,
    "Set allow_unused=True if this is the desired behavior": NO_ADVICE,
    "`requires_grad` is fixed at `wrap`": NO_ADVICE,
    "{}, by fsshard {} with torch {}, backend {}": NO_ADVICE,
}
"""Part of a message -> why no test here can do as it says."""


def texts(tree: ast.Module) -> Iterator[str]:
    """The strings of a file but for docstrings; what is put into one is ``{}``."""
    nodes = list(ast.walk(tree))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def messages() -> dict[str, str]:
    """What the code says with a line to write in it -> the file that says it; what torch_private says is no advice."""
    files = [*(ROOT / "fsshard").rglob("*.py"), *(ROOT / "compat").rglob("*.py")]
    told = [(text, str(file.relative_to(ROOT))) for file in files for text in texts(parsed(file))]
    return {text: file for text, file in told if len(text) > 25 and ADVICE.search(text) and "torch_private" not in file}


@functools.cache
def in_this_folder() -> list[str]:
    found = [
        text
        for file in Path(__file__).parent.glob("test_*.py")
        if file != Path(__file__)
        for text in texts(parsed(file))
    ]
    return [text for text in found if len(text) >= 15]


def test_every_advice_is_followed_by_a_test() -> None:
    known = [*in_this_folder(), *FOLLOWED_PARTS, *NOT_RUN]
    left = [f"{file}: {text}" for text, file in messages().items() if not any(part in text for part in known)]
    assert left == [], "follow each in a test of tests/advice, or name the test that does in FOLLOWED"


def test_what_is_listed_is_there() -> None:
    assert min(map(len, (*FOLLOWED_PARTS, *NOT_RUN))) >= 8, "a part that many messages have"
    assert [part for part in (*FOLLOWED_PARTS, *NOT_RUN) if not any(part in text for text in messages())] == []
    for file, named in FOLLOWED.items():
        code = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert [name for name in named.values() if f"def {name}(" not in code] == [], file


def test_advice_is_told_from_other_texts() -> None:
    assert ADVICE.search("no gradient reached it; pass find_unused_parameters=True to fsshard.wrap")
    assert ADVICE.search("use model.state_dict()")
    assert not ADVICE.search("the model has no parameters; there is nothing to shard")
