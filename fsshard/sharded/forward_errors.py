"""What an error of an engine's forward means for its user, and what to do about it."""

from __future__ import annotations

import torch

from fsshard.backends.base import Backend
from fsshard.backends.forward_guards import READS_SHARD
from fsshard.errors import ConfigurationError, FsshardError, ModelError, PrecisionError, UnsupportedByBackend
from fsshard.model.unit_inputs import is_write_to_unit_input

__all__ = ["explain_forward_error"]

MIXED_UP = ("same dtype", "should be the same", "does not match weight dtype")
"""What torch 2.13 says of operands in two dtypes: linear, convolution, RNN."""
SHARD = "got mixed torch.Tensor and DTensor"
"""What torch 2.13 says where a forward computes with the weights of another unit under FSDP2."""
NO_HOOKS = "don't yet support saved tensor hooks"
"""What torch.func's reverse transforms of torch 2.13 say of checkpoints."""
NO_TANGENTS = ("but the jvp is not returning a view", "You must implement the jvp function")
"""What torch 2.13 says where dual numbers come to a node of FSDP2's or DDP's."""


def explain_forward_error(error: RuntimeError, backend: Backend) -> FsshardError | None:
    """Return an error of ours that says what torch's ``error`` means; None where it means what it says."""
    text = str(error)
    if NO_HOOKS in text:
        return ConfigurationError(
            "torch.func's reverse-mode transforms (grad, vjp) through recomputed blocks, which torch does not "
            "support; use torch.autograd.grad(..., create_graph=True), or leave activation_checkpointing off"
        )
    if any(part in text for part in NO_TANGENTS):
        return UnsupportedByBackend(
            "torch.autograd.forward_ad through its units",
            backend.name,
            "use torch.func.jvp (under 'ddp' without find_unused_parameters), or backend='fairscale'",
        )
    if SHARD in text and backend.facts.has_dtensors:
        return ModelError(READS_SHARD)
    param = backend.settings.precision.param
    if param not in (None, torch.float32) and any(part in text for part in MIXED_UP):
        return PrecisionError(
            f"{error}: the forward makes float32 tensors (from complex ones, or constants) that are used with weights "
            f"in {param}, or it was given some in an object that is not searched for tensors; call the model under "
            "`with model.autocast():`, which casts per operation too, or pass them in a dict, list, tuple or dataclass"
        )
    if is_write_to_unit_input(text) or "RegisterPostBackwardFunction" in text:
        return FsshardError(
            "a sharding unit changes its input in place, which FSDP2 does not allow, nor any backend where several "
            "tensors enter the unit; make the operation out of place, or leave the module out of auto_wrap_policy"
        )
    return None
