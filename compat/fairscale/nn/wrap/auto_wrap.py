"""Wraps chosen submodules while, or after, a model is built: by hand, by size, or by a tag on the module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any

from torch import nn

from ....errors import MisuseError, NestedContext
from ....not_served import missing_from
from ....report import called

__all__ = [
    "ConfigAutoWrap",
    "auto_wrap",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "wrap",
]

__getattr__ = missing_from(__name__)

Policy = Callable[..., bool]
Classes = set[type[nn.Module]]


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool,
    min_num_params: int = int(1e8),
    force_leaf_modules: Classes | None = None,
    exclude_wrap_modules: Classes | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """Wrap what has enough parameters that no child's wrapper has already.

    :func:`auto_wrap` gives a policy the first four arguments, by name; the others are for ``functools.partial``.

    Args:
        module: the module in question.
        recurse: the question is whether to go into its children, else whether to wrap the module.
        unwrapped_params: its parameters that are in no wrapper yet, counted in elements.
        module_is_root: it is what :func:`auto_wrap` was called with.
        min_num_params: enough, in elements.
        force_leaf_modules: classes whose children stay as they are; None is ``FORCE_LEAF_MODULES`` of this function.
        exclude_wrap_modules: classes that are not wrapped; None is ``EXCLUDE_WRAP_MODULES`` of this function.
        skip_params_check_for_root: wrap the root however small the rest of it is.
    """
    enough = unwrapped_params >= min_num_params
    if recurse:
        leaves = _FORCE_LEAF if force_leaf_modules is None else force_leaf_modules
        return enough and not isinstance(module, tuple(leaves))
    excluded = _EXCLUDE_WRAP if exclude_wrap_modules is None else exclude_wrap_modules
    return (enough or (module_is_root and skip_params_check_for_root)) and not isinstance(module, tuple(excluded))


# The same sets under the function's attributes: users extend a copy, or change them in place.
_EXCLUDE_WRAP: Classes = {nn.ModuleList, nn.ModuleDict}
_FORCE_LEAF: Classes = {nn.MultiheadAttention}
default_auto_wrap_policy.EXCLUDE_WRAP_MODULES = _EXCLUDE_WRAP  # type: ignore[attr-defined]
default_auto_wrap_policy.FORCE_LEAF_MODULES = _FORCE_LEAF  # type: ignore[attr-defined]


def config_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool,
) -> bool:
    """Wrap modules that have an attribute ``wrapper_config``, wherever they are."""
    return recurse or hasattr(module, "wrapper_config")


def enable_wrap(auto_wrap_policy: Policy | None = None, **wrapper_kwargs: Any) -> ConfigAutoWrap:
    """Make :func:`wrap` and :func:`auto_wrap` wrap within a ``with``; outside of it they give their module back.

    Args:
        auto_wrap_policy: for :func:`auto_wrap`; None is :func:`default_auto_wrap_policy`. :func:`wrap` asks no policy.
        **wrapper_kwargs: ``wrapper_cls`` (needed): what is called with a module to wrap it; ``move_module_cuda_half``:
            do ``.cuda().half()`` before; and what ``wrapper_cls`` is given by name.

    Raises:
        MisuseError: there is no ``wrapper_cls``.
        NestedContext: this is inside of ``enable_wrap`` already.
    """
    return ConfigAutoWrap(auto_wrap_policy, **wrapper_kwargs)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module inside of :func:`enable_wrap`; give it back outside.

    Args:
        module: an attribute ``wrapper_config`` of it, a dict, comes before the arguments of :func:`enable_wrap`.
        **wrap_overrides: come before both.
    """
    _report("fairscale.nn.wrap.wrap")
    if ConfigAutoWrap.in_autowrap_context:
        return _wrap(module, wrap_overrides)
    return module


def _report(call: str) -> None:
    inside = ConfigAutoWrap.in_autowrap_context
    called(call, "fsshard" if inside else "fsshard; outside of enable_wrap, modules stay as they are")


def _wrap(module: nn.Module, overrides: dict[str, Any]) -> nn.Module:
    own = getattr(module, "wrapper_config", {})
    if not isinstance(own, dict):
        raise MisuseError(f"wrapper_config of {type(module).__name__}: expected a dict, got {type(own).__name__}")
    settings = {"wrapper_cls": ConfigAutoWrap.wrapper_cls, **ConfigAutoWrap.kwargs, **own, **overrides}
    wrapper_cls = settings.pop("wrapper_cls")
    if ConfigAutoWrap.move_module_cuda_half:
        module = module.cuda().half()
    wrapped: nn.Module = wrapper_cls(module, **settings)
    return wrapped


def auto_wrap(module: nn.Module, auto_wrap_policy: Policy | None = None, **kwargs: Any) -> nn.Module:
    """Wrap the sub-modules that a policy chooses, innermost first, inside of :func:`enable_wrap`.

    Parameters that two sub-modules share should end in one wrapper, or they may stop being shared.

    Args:
        module: nothing in it is wrapped yet.
        auto_wrap_policy: in place of that of :func:`enable_wrap`.
        **kwargs: as the overrides of :func:`wrap`, for every module that is wrapped.
    """
    _report("fairscale.nn.wrap.auto_wrap")
    if not ConfigAutoWrap.in_autowrap_context:
        return module
    wrapper: Any = ConfigAutoWrap.wrapper_cls
    # A function such as checkpoint_wrapper leaves no trace of its own to look for.
    if isinstance(wrapper, type):
        for name, child in module.named_modules():
            if isinstance(child, wrapper):
                raise MisuseError(
                    f"auto_wrap: {name or 'the module itself'} is a {wrapper.__name__} already; give modules a "
                    "wrapper_config and use config_auto_wrap_policy to wrap in several passes"
                )
    return ConfigAutoWrap.recursive_wrap(module, auto_wrap_policy=auto_wrap_policy, module_is_root=True, **kwargs)[0]


class ConfigAutoWrap(ContextDecorator):
    """The context behind :func:`enable_wrap`. What is in force is kept on the class: there is one at a time."""

    in_autowrap_context: bool = False
    move_module_cuda_half: bool = False
    wrapper_cls: Callable[..., Any] | None = None
    kwargs: dict[str, Any] = {}  # noqa: RUF012  # FairScale's tests read and replace it on the class
    auto_wrap_policy: Policy | None = None

    def __init__(self, auto_wrap_policy: Policy | None = None, **kwargs: Any) -> None:
        self.auto_wrap_policy = auto_wrap_policy
        self.kwargs = kwargs

    def __enter__(self) -> None:
        self.enable_autowrap_context(self.auto_wrap_policy, self.kwargs)

    def __exit__(self, *error: object) -> None:
        self.disable_autowrap_context()

    @staticmethod
    def enable_autowrap_context(auto_wrap_policy: Policy | None, kwargs: dict[str, Any]) -> None:
        """Put settings in force."""
        if ConfigAutoWrap.in_autowrap_context:
            raise NestedContext("enable_wrap inside of enable_wrap; leave the outer one first")
        # This is checked first: FairScale 0.4.13 stays in the context for good after it.
        if "wrapper_cls" not in kwargs:
            raise MisuseError("enable_wrap needs wrapper_cls=, the class that wraps a module")
        settings = dict(kwargs)
        ConfigAutoWrap.move_module_cuda_half = bool(settings.pop("move_module_cuda_half", False))
        ConfigAutoWrap.wrapper_cls = settings.pop("wrapper_cls")
        ConfigAutoWrap.kwargs = settings
        ConfigAutoWrap.auto_wrap_policy = auto_wrap_policy or default_auto_wrap_policy
        ConfigAutoWrap.in_autowrap_context = True

    @staticmethod
    def disable_autowrap_context() -> None:
        """Put nothing in force."""
        ConfigAutoWrap.in_autowrap_context = ConfigAutoWrap.move_module_cuda_half = False
        ConfigAutoWrap.wrapper_cls = ConfigAutoWrap.auto_wrap_policy = None
        ConfigAutoWrap.kwargs = {}

    @staticmethod
    def recursive_wrap(
        module: nn.Module,
        auto_wrap_policy: Policy | None,
        module_is_root: bool,
        **kwargs: Any,
    ) -> tuple[nn.Module, int]:
        """Wrap what the policy chooses; return what is in the module's place, and its elements that are in wrappers."""
        policy = auto_wrap_policy or ConfigAutoWrap.auto_wrap_policy or default_auto_wrap_policy
        total = sum(parameter.numel() for parameter in module.parameters())
        if not policy(module=module, recurse=True, unwrapped_params=total, module_is_root=module_is_root):
            return module, 0
        wrapped = 0
        for name, child in module.named_children():
            replacement, count = ConfigAutoWrap.recursive_wrap(child, policy, False, **kwargs)
            setattr(module, name, replacement)
            wrapped += count
        if policy(module=module, recurse=False, unwrapped_params=total - wrapped, module_is_root=module_is_root):
            return _wrap(module, kwargs), total
        return module, wrapped
