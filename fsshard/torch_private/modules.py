"""``nn.Module``: its state-dict hooks, its buffers that are not saved, classes without a public name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from fsshard.torch_private.registry import Area

__all__ = [
    "CHECKPOINTED",
    "COMPILED",
    "EXTRA_STATE",
    "LOAD_STATE_DICT_POST_HOOKS",
    "LOAD_STATE_DICT_PRE_HOOKS",
    "BatchNorm",
    "Dropout",
    "IncompatibleKeys",
    "call_hooks",
    "classes_of_policy",
    "compiled_within",
    "has_call_hooks",
    "is_compiled",
    "is_policy",
    "load_state_dict_post_hooks",
    "load_state_dict_pre_hooks",
    "metadata_of",
    "non_persistent_buffers",
    "run_policy",
    "state_dict_hooks",
    "state_dict_pre_hooks",
]

AREA = Area("modules")
MODULE = "torch/nn/modules/module.py"
_HOOKS = {"source": MODULE, "otherwise": "hooks on state dicts cannot be ordered: no watching of parts of states"}

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.nn.modules.dropout import _DropoutNd as Dropout
    from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
else:
    BatchNorm = AREA.take(
        "torch.nn.modules.batchnorm:_BatchNorm",
        source="torch/nn/modules/batchnorm.py",
        use="all batch normalizations, torch's and users'",
        otherwise="those of a user's own class, and lazy ones, are not known for batch normalizations",
        fallback=(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    )
    Dropout = AREA.take(
        "torch.nn.modules.dropout:_DropoutNd",
        source="torch/nn/modules/dropout.py",
        use="all dropouts, torch's and users'",
        otherwise="those of a user's own class are not known for dropouts",
        fallback=(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    )
    IncompatibleKeys = AREA.take(
        "torch.nn.modules.module:_IncompatibleKeys",
        source=MODULE,
        use="what load_state_dict gives back",
        otherwise="load_state_dict",
    )

state_dict_hooks: Callable[[nn.Module], OrderedDict[int, Any]] = AREA.reader(
    "torch.nn:Module._state_dict_hooks", use="to take an engine's hooks off, or put ours first", **_HOOKS
)
state_dict_pre_hooks: Callable[[nn.Module], OrderedDict[int, Any]] = AREA.reader(
    "torch.nn:Module._state_dict_pre_hooks", use="as _state_dict_hooks", **_HOOKS
)
load_state_dict_pre_hooks: Callable[[nn.Module], OrderedDict[int, Any]] = AREA.reader(
    "torch.nn:Module._load_state_dict_pre_hooks", use="as _state_dict_hooks", **_HOOKS
)
LOAD_STATE_DICT_PRE_HOOKS = AREA.attribute(
    "torch.nn:Module._load_state_dict_pre_hooks", use="as _state_dict_hooks", **_HOOKS
)
load_state_dict_post_hooks: Callable[[nn.Module], OrderedDict[int, Any]] = AREA.reader(
    "torch.nn:Module._load_state_dict_post_hooks", use="as _state_dict_hooks", **_HOOKS
)
LOAD_STATE_DICT_POST_HOOKS = AREA.attribute(
    "torch.nn:Module._load_state_dict_post_hooks", use="as _state_dict_hooks", **_HOOKS
)
_NON_PERSISTENT = AREA.attribute(
    "torch.nn:Module._non_persistent_buffers_set",
    source=MODULE,
    use="which buffers a state dict leaves out",
    otherwise="all buffers are taken for such as are saved",
)
_CALL_HOOKS: tuple[Callable[[nn.Module], Any], ...] = tuple(
    AREA.reader(
        f"torch.nn:Module.{name}",
        source=MODULE,
        use="whether hooks were put on what torch.compile(module) returned; to take FSDP2's off for a while",
        otherwise="models that were compiled before wrap()",
    )
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
)
_COMPILED_CALL = AREA.attribute(
    "torch.nn:Module._compiled_call_impl",
    source=MODULE,
    use="whether module.compile() was called",
    otherwise="a module that was compiled in place is not told from another, and its memory is counted wrongly",
)
EXTRA_STATE = AREA.take(
    "torch.nn.modules.module:_EXTRA_STATE_KEY_SUFFIX",
    source=MODULE,
    use="how the keys end of what a module's get_extra_state() gives",
    otherwise="the name that torch documents",
    fallback="_extra_state",
)
_VERSIONS = AREA.attribute(
    "torch.nn.modules.module:_metadata",
    source=MODULE,
    use="what a state dict keeps beside its tensors: of each module the version of its format",
    otherwise="FairScale's FullyShardedDataParallel leaves it out of their state dicts",
)
COMPILED = AREA.attribute(
    "torch._dynamo.eval_frame:OptimizedModule._orig_mod",
    source="torch/_dynamo/eval_frame.py",
    use="the part of names under which torch.compile(module) holds the module",
    otherwise="state dicts of such modules cannot be read without renaming",
)
CHECKPOINTED = AREA.attribute(
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:ActivationWrapper._checkpoint_wrapped_module",
    source="torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py",
    use="the part of names under which torch's checkpoint_wrapper holds a module",
    otherwise="modules that torch's checkpoint_wrapper was put around before wrap()",
)
_RUN_POLICY = AREA.attribute(
    "torch.distributed.fsdp.wrap:_Policy._run_policy",
    source="torch/distributed/fsdp/wrap.py",
    use="what ModuleWrapPolicy and CustomPolicy pick",
    otherwise="these policies of torch's are called as functions, or refused",
)
_CLASSES = AREA.attribute(
    "torch.distributed.fsdp.wrap:ModuleWrapPolicy._module_classes",
    source="torch/distributed/fsdp/wrap.py",
    use="the classes that a ModuleWrapPolicy is to pick",
    otherwise="a class that is not in the model is not noticed",
)


def non_persistent_buffers(module: nn.Module) -> Iterable[str]:
    """The names of its own buffers that a state dict leaves out."""
    found: Iterable[str] = getattr(module, _NON_PERSISTENT, ())
    return found


def metadata_of(state_dict: Any) -> dict[str, Any]:
    """Of each module, by name, the version of its format in a state dict; to be changed in place."""
    found: dict[str, Any] = getattr(state_dict, _VERSIONS, {})
    return found


def is_compiled(module: nn.Module) -> bool:
    """Whether its call is compiled: by ``module.compile()``, or by ``torch.compile(module)``."""
    return getattr(module, _COMPILED_CALL, None) is not None or type(module).__name__ == "OptimizedModule"


def compiled_within(module: nn.Module) -> nn.Module | None:
    """The module that ``torch.compile(module)`` was given; None for any other module."""
    inner = getattr(module, COMPILED, None) if type(module).__name__ == "OptimizedModule" else None
    return inner if isinstance(inner, nn.Module) else None


def call_hooks(module: nn.Module) -> tuple[OrderedDict[int, Any], ...]:
    """The hooks on a module's forward: those behind it, and those in front of it."""
    return tuple(read(module) for read in _CALL_HOOKS[:2])


def has_call_hooks(module: nn.Module) -> bool:
    """Whether hooks run around its own call, forward or backward."""
    return any(read(module) for read in _CALL_HOOKS)


def is_policy(value: object) -> bool:
    """Whether it is one of torch's wrap policies that are no plain functions."""
    return hasattr(value, _RUN_POLICY)


def classes_of_policy(policy: Any) -> Collection[type[nn.Module]]:
    """Those that a ModuleWrapPolicy picks; of other policies none."""
    found: Collection[type[nn.Module]] = getattr(policy, _CLASSES, ())
    return found


def run_policy(policy: Any, model: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """The modules that one of torch's policies picks, each with the settings that it asks for."""
    found: dict[nn.Module, dict[str, Any]] = getattr(policy, _RUN_POLICY)(model, ignored_modules=set(), root_kwargs={})
    return found


# ------------------------------------------------------------------------------------------------ counted on

AREA.stands_on(
    "torch.nn.modules.module:Module",
    why="in which order hooks run around a call, a state dict and a load, and what .to() does to parameters",
)
