"""``nn.Module``: its state-dict hooks, its buffers that are not saved, classes without a public name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from fsshard.torch_private.registry import Area

AREA = Area("modules")
_HOOKS = "hooks on state dicts cannot be ordered: no watching of parts of states"

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.nn.modules.dropout import _DropoutNd as Dropout
    from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
else:
    # The classes that torch's own inherit from, and that users' inherit from too: no public name, but a public way.
    BatchNorm = nn.BatchNorm1d.__base__
    Dropout = nn.Dropout.__base__
    IncompatibleKeys = type(nn.Identity().load_state_dict({}))

state_dict_hooks: Callable[[nn.Module], OrderedDict[int, Any]] = AREA.reader(
    "torch.nn.modules.module:Module._state_dict_hooks",
    use="to take an engine's hooks off, or put ours first",
    otherwise=_HOOKS,
)
state_dict_pre_hooks: Callable[[nn.Module], OrderedDict[int, Any]] = AREA.reader(
    "torch.nn.modules.module:Module._state_dict_pre_hooks", use="as _state_dict_hooks", otherwise=_HOOKS
)
load_state_dict_pre_hooks: Callable[[nn.Module], OrderedDict[int, Any]] = AREA.reader(
    "torch.nn.modules.module:Module._load_state_dict_pre_hooks", use="as _state_dict_hooks", otherwise=_HOOKS
)
LOAD_STATE_DICT_PRE_HOOKS = AREA.attribute(
    "torch.nn.modules.module:Module._load_state_dict_pre_hooks", use="as _state_dict_hooks", otherwise=_HOOKS
)
load_state_dict_post_hooks: Callable[[nn.Module], OrderedDict[int, Any]] = AREA.reader(
    "torch.nn.modules.module:Module._load_state_dict_post_hooks", use="as _state_dict_hooks", otherwise=_HOOKS
)
_NON_PERSISTENT = AREA.attribute(
    "torch.nn.modules.module:Module._non_persistent_buffers_set",
    use="which buffers a state dict leaves out",
    otherwise="all buffers are taken for such as are saved",
)
_COMPILED_CALL = AREA.attribute(
    "torch.nn.modules.module:Module._compiled_call_impl",
    use="whether module.compile() was called",
    otherwise="a module that was compiled in place is not told from another, and its memory is counted wrongly",
)
EXTRA_STATE = "_extra_state"  # how the keys end of what get_extra_state() gives, as torch documents
_VERSIONS = AREA.attribute(
    "torch.nn.modules.module:_metadata",
    use="what a state dict keeps besides its tensors: of each module the version of its format",
    otherwise="FairScale's FullyShardedDataParallel leaves it out of their state dicts",
)
# Parts of names in state dicts that torch has written: what torch.compile(module) and checkpoint_wrapper hold.
COMPILED = "_orig_mod"
CHECKPOINTED = "_checkpoint_wrapped_module"
_RUN_POLICY = AREA.attribute(
    "torch.distributed.fsdp.wrap:_Policy._run_policy",
    use="what ModuleWrapPolicy and CustomPolicy pick",
    otherwise="these policies of torch's are called as functions, or refused",
)
_CLASSES = AREA.attribute(
    "torch.distributed.fsdp.wrap:ModuleWrapPolicy._module_classes",
    use="the classes that a ModuleWrapPolicy is to pick",
    otherwise="a class that is not in the model is not noticed",
)


def non_persistent_buffers(module: nn.Module) -> Iterable[str]:
    """The names of its own buffers that a state dict leaves out."""
    names: Iterable[str] = getattr(module, _NON_PERSISTENT, ())
    return names


def share_non_persistent_buffers(wrapper: nn.Module, module: nn.Module) -> None:
    """Let a wrapper, which gives a module's buffers as its own, tell which of them a state dict leaves out."""
    vars(wrapper)[_NON_PERSISTENT] = non_persistent_buffers(module)


def metadata_of(state_dict: Any) -> dict[str, Any]:
    """Return, by module, the version of its format in a state dict; to be changed in place."""
    versions: dict[str, Any] = getattr(state_dict, _VERSIONS, {})
    return versions


def is_compiled(module: nn.Module) -> bool:
    """Return whether its call is compiled: by ``module.compile()``, or by ``torch.compile(module)``."""
    return getattr(module, _COMPILED_CALL, None) is not None or type(module).__name__ == "OptimizedModule"


def holds_compiled(modules: Iterable[nn.Module]) -> bool:
    """Tell whether ``torch.compile(module)`` returned one of these."""
    names = {kind.__name__ for kind in set(map(type, modules))}
    return "OptimizedModule" in names


def compiled_within(module: nn.Module) -> nn.Module | None:
    """The module that ``torch.compile(module)`` was given; None for any other module."""
    if type(module).__name__ == "OptimizedModule":
        return next(module.children(), None)
    return None


def call_hooks(module: nn.Module) -> list[OrderedDict[Any, Any]]:
    """Return the tables of hooks around a module's own call, forward and backward; some hold flags of hooks."""
    tables = ((name, table) for name, table in vars(module).items() if isinstance(table, OrderedDict))
    return [table for name, table in tables if "_hooks" in name and "state_dict" not in name]


def has_call_hooks(module: nn.Module) -> bool:
    """Tell whether hooks run around a module's own call, forward or backward."""
    return any(call_hooks(module))


def is_policy(value: object) -> bool:
    """Return whether it is one of torch's wrap policies that are no plain functions."""
    return hasattr(value, _RUN_POLICY)


def classes_of_policy(policy: Any) -> Collection[type[nn.Module]]:
    """Return those that a ModuleWrapPolicy picks; of other policies none."""
    found: Collection[type[nn.Module]] = getattr(policy, _CLASSES, ())
    return found


def run_policy(policy: Any, model: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """The modules that one of torch's policies picks, each with the settings that it asks for."""
    run = getattr(policy, _RUN_POLICY)
    found: dict[nn.Module, dict[str, Any]] = run(model, ignored_modules=set(), root_kwargs={})
    return found
