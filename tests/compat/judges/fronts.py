"""Whose tests judge what, which of them run, and what those that fail ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ONE_RANK = {
    "ACCELERATE_USE_CPU": "yes",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "RANK": "0",
    "WORLD_SIZE": "1",
}
"""In which Accelerate, and Hugging Face's Trainer over it, put a model under DDP."""
NO_HUB = {"HF_HUB_OFFLINE": "1"}
"""A test that would download asks five times without."""


@dataclass(frozen=True)
class Front:
    """Another library in front of which we stand.

    Attributes:
        library: its name.
        variable: of the environment: where a checkout of its repository is.
        plugin: the module here that puts ours into its tests.
        runs: parts of the tests, each with what the environment of their process has.
        folder: of the checkout, where pytest runs.
        left_out: part of the tests -> why it is not run.
        reasons: words of what a test failed with -> what it asks for that we do not give. The first that fits counts.
    """

    library: str
    variable: str
    plugin: str
    runs: tuple[tuple[tuple[str, ...], Mapping[str, str]], ...]
    folder: str = "."
    left_out: Mapping[str, str] = field(default_factory=dict)
    reasons: tuple[tuple[str, str], ...] = ()

    def reason(self, failure: str) -> str:
        """Why a test fails, in a few words; for one that the table lacks, its own last line."""
        found = next((why for words, why in self.reasons if words in failure), None)
        return found or next((line for line in failure.splitlines() if line.strip()), "nothing told")[:150]


LIGHTNING = Front(
    library="Lightning",
    variable="FSSHARD_LIGHTNING_CHECKOUT",
    plugin="tests.compat.judges.lightning",
    runs=(
        (
            (
                "tests_fabric/strategies/test_ddp_integration.py",
                "tests_fabric/test_fabric.py",
                "tests_pytorch/strategies/test_ddp_integration.py",
                "tests_pytorch/callbacks",
                "tests_pytorch/checkpointing",
                "tests_pytorch/models/test_hooks.py",
                "tests_pytorch/models/test_restore.py",
                "tests_pytorch/trainer/optimization",
            ),
            {},
        ),
    ),
    folder="tests",
    left_out={
        "tests_pytorch/callbacks/progress": "progress bars",
        "tests_pytorch/callbacks/test_pruning.py": "torch's pruning puts parameters in the place of parameters",
        "tests_pytorch/callbacks/test_spike.py": "its module assigns weight.data in training_step",
    },
    reasons=(
        ("has put under an engine", "another Trainer fits or tests the module again"),
        ("a Trainer over fsshard fits once", "the same Trainer fits again"),
        ("under FSDPModule already", "the same model is set up twice"),
        ("cannot be copied or pickled", "the Trainer or module is copied or pickled after fit()"),
        ("a loss is computed with", "reads a weight outside of the forward, where a rank has a part"),
        ("this rank's part of the weights", "asks the module, not the Trainer, for a state dict"),
        ("configure_optimizers gave no optimizer", "trains without an optimizer"),
        ("StochasticWeightAveraging averages", "stochastic weight averaging of parts"),
        ("past the engine", "manual optimization that calls layers past forward"),
        ("toggle_optimizer", "toggle_optimizer"),
        ("object layout differs", "torch's fully_shard takes no subclass of typing.Generic"),
        ("_MagicMock", "counts calls of a mock in the place of torch's optimizer, DDP or scheduler"),
        ("Mock name=", "counts calls of a mock in the place of torch's optimizer, DDP or scheduler"),
        ("expected call not found", "counts calls of a mock in the place of torch's optimizer, DDP or scheduler"),
    ),
)
TRANSFORMERS = Front(
    library="transformers",
    variable="FSSHARD_TRANSFORMERS_CHECKOUT",
    plugin="tests.compat.judges.transformers",
    runs=(
        (
            (
                "tests/trainer/test_trainer.py",
                "tests/trainer/test_trainer_callback.py",
                "tests/trainer/test_trainer_jit_checkpoint.py",
                "tests/trainer/test_trainer_seq2seq.py",
                "tests/trainer/test_trainer_utils.py",
            ),
            {**ONE_RANK, **NO_HUB},
        ),
    ),
    reasons=(("a loss is computed with", "reads weights after train() where a rank has a part"),),
)
ACCELERATE = Front(
    library="Accelerate",
    variable="FSSHARD_ACCELERATE_CHECKOUT",
    plugin="tests.compat.judges.accelerate",
    runs=(
        (
            (
                "tests/test_accelerator.py",
                "tests/test_compile.py",
                "tests/test_kwargs_handlers.py",
                "tests/test_optimizer.py",
                "tests/test_state_checkpointing.py",
            ),
            ONE_RANK,
        ),
        (  # two ranks, that are forked from a process without a group
            ("tests/test_cpu.py", "tests/test_grad_sync.py", "tests/test_metrics.py", "tests/test_scheduler.py"),
            {},
        ),
    ),
    reasons=(
        ("mixed_precision='fp16'", "fp16 on a CPU"),
        ("must both be inside no_sync()", "a forward under no_sync, with its backward outside of it"),
        ("is a flat shard of its unit", "reads gradients, of which a rank has a part"),
        ("a loss is computed with", "reads or moves weights outside of the forward, where a rank has a part"),
        ("cannot be copied or pickled", "the unwrapped model is pickled"),
        ("of 0 prepared models", "an optimizer is prepared without its model"),
        ("ShardedModule", "a hook of save_state looks at the class of what was wrapped"),
    ),
)
FRONTS = (LIGHTNING, TRANSFORMERS, ACCELERATE)
