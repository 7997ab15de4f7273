"""Lists what is wrong in FairScale 0.4.13 under torch 2.13, row by row, and what the same code does here.

A test that shows a row is marked ``@pytest.mark.fairscale_row(number)``.

    python -m tests.compat.fairscale.rows        # make rows: writes the table of docs/data/fairscale-faults.md
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.parity import page

PAGE, PART = Path(__file__).parents[3] / "docs/data/fairscale-faults.md", "FairScale's faults"

Severity = Literal["silent", "hang", "crash", "warning"]


@dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        severity: ``"silent"``: a wrong result and not a word; ``"hang"``, ``"crash"``; ``"warning"``: it is said, or
            documented, and a script may still not expect it.
        fault: what the real library does.
        here: what :mod:`fsshard.compat.fairscale` does, and from row 35 on ``backend="fairscale"``; "equal" is to the
            last bit, on two ranks, in float32.
    """

    severity: Severity
    fault: str
    here: str


EQUAL, PLAIN = "equal to DDP", "equal to the plain module"
EVEN = "parameters are laid at 64 bytes each, as memory of their own"

ROWS: dict[int, Row] = {
    1: Row("silent", "`optimizer.zero_grad()`, or `p.grad = None`: gradients of the step before are reduced", EQUAL),
    2: Row("silent", "a checkpointed last block under ShardedDDP: backward ends before its reduction", EQUAL),
    3: Row("silent", "a layer frozen in mid-training: its owner goes on updating it, the ranks diverge", EQUAL),
    4: Row("silent", "accumulation without `no_sync`: earlier micro-batches are averaged again", EQUAL),
    5: Row("silent", "gradients left from before the wrap: `ShardedDDP.zero_grad()` does nothing", EQUAL),
    6: Row("silent", "`OSS.add_param_group` after ShardedDDP: the new gradients are never reduced", EQUAL),
    7: Row("silent", "`OSS.add_param_group` after a freeze: parameters that no rank updates", EQUAL),
    8: Row("silent", "a process group of some ranks: owners lose their gradients and never train", EQUAL),
    9: Row("silent", "`clip_grad_norm` leaves out what was unfrozen after its first call", EQUAL),
    10: Row("silent", "`torch.compile(ShardedDDP(model))`: no gradient is reduced", EQUAL),
    11: Row("silent", "deepcopy of a checkpointed module (an EMA) runs on the original's weights", "a copy is its own"),
    12: Row("silent", "`checkpoint_wrapper` loses an instance's `forward`; a dict becomes a tuple of its keys", PLAIN),
    13: Row("silent", "AdaScale over OSS and ShardedDDP: another gain on each rank", "not served"),
    14: Row("silent", "`AdaScaleWrapper(debias_ewma=False)` sets `is_scaled_loss` instead", "not served"),
    15: Row(
        "silent", "`OSS(optim=LBFGS)`: NaN, each rank searches along its own shard", "raises: it needs all at once"
    ),
    16: Row("silent", "ShardedGradScaler, two optimizers overflow: the scale stays", "the scale is halved"),
    17: Row(
        "silent",
        "`broadcast_fp16` without AMP: rounding moves parameters more than training does",
        "raises; `False` is accepted",
    ),
    18: Row("hang", "ShardedGradScaler, gradients on the CPU: one rank skips the step, the others wait", "all skip it"),
    19: Row("crash", "parameters unused on some ranks, without buffers: the process aborts", EQUAL),
    20: Row("crash", "`clip_grad_norm` in bf16 where a rank owns no gradient: the process aborts", EQUAL),
    21: Row("crash", "two dtypes (bf16 and float32, complex and real) on one rank: AssertionError", EQUAL),
    22: Row("crash", "`checkpoint_wrapper` recomputes without CPU autocast, and with float16 for CUDA's", PLAIN),
    23: Row("crash", "`OSS(opt.param_groups, optim=AdamW, **opt.defaults)`: TypeError", EQUAL),
    24: Row("crash", "OneCycleLR, CyclicLR: ValueError, unless momentum or betas were given to OSS", EQUAL),
    25: Row("crash", "`force_broadcast_object` with a numpy number in a group: UnpicklingError", "round trip"),
    26: Row(
        "crash",
        "pickle and deepcopy of ShardedDDP, OSS, checkpointed modules: TypeError, or half a copy",
        "work; an OSS raises",
    ),
    27: Row("crash", "sparse gradients without buffers: NotImplementedError", "equal to DDP; dense at the owner"),
    28: Row(
        "crash",
        "an empty first group: IndexError; DCP's optimizer state: RuntimeError",
        "work; DCP after a consolidation",
    ),
    29: Row("crash", "FlattenParamsWrapper inside of a module does not load what it saved; deepcopy", "not served"),
    30: Row("crash", "AdaScale: its state does not load; `zero_grad(set_to_none=)`; unused parameters", "not served"),
    31: Row("crash", "`torch.autograd.grad` through a checkpointed module is refused", PLAIN),
    32: Row("warning", "ShardedGradScaler without CUDA turns itself off", "scales on the CPU too"),
    33: Row(
        "warning",
        "torch's `clip_grad_norm_` over a ShardedDDP model, or `p.grad` of another's parameter: garbage",
        "DDP's norm, to the last bit; None on other ranks",
    ),
    34: Row("warning", "step hooks fire twice; no BatchNorm statistics from checkpointed no_grad", "once; equal"),
    35: Row("crash", "OSS packs parameters unaligned: complex views fail after an odd number of reals", EVEN),
    36: Row("crash", "`state_dict()` has an entry that is no tensor (neuraloperator's): TypeError", "works"),
    37: Row("silent", "training in evaluation mode, or a mode set on the inner module only: nothing is reduced", EQUAL),
    38: Row("silent", "an exception inside `no_sync`: accumulates for the rest of the run", "the state is restored"),
    39: Row("silent", "a closure called again within `step` (SAM) sees only this rank's changes", "sees all ranks'"),
    40: Row("silent", "`p.data = ...` within `step` takes the parameter out of the buffer that OSS sends", "is sent"),
    41: Row("crash", "the first forward under `inference_mode`: training fails later", "works"),
    42: Row(
        "silent",
        "an optimizer keeps views from its constructor (DistributedShampoo): nothing moves",
        "works; build it again after freezing",
    ),
    43: Row("silent", "two OSS over the same parameters: the ranks diverge", "the earlier one raises at its step"),
}


def table() -> str:
    """Return the rows as a table in Markdown."""
    lines = [f"| {number} | {row.severity} | {row.fault} | {row.here} |" for number, row in ROWS.items()]
    return "\n".join(["| row | severity | in FairScale 0.4.13 on torch 2.13 | here |", "|--:|---|---|---|", *lines])


if __name__ == "__main__":
    page.write_part(PAGE, PART, table())
