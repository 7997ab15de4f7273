"""``FlattenParamsWrapper``: a module whose parameters are views of one or several flat parameters."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.errors import ConfigurationError
from fsshard.torch_private.modules import metadata_of

from ....errors import MisuseError
from ....not_served import missing_from
from ....report import called

__all__ = ["FlatParameter", "FlattenParamsWrapper"]

__getattr__ = missing_from(__name__)

INNER = "_fpw_module"
FLAT = "flat_param"

Owner = tuple[str, nn.Module, str]
"""Name of a module within the wrapped one, the module, name of its parameter."""

Alias = tuple[str, str, nn.Module, str, nn.Module, str]
"""Names of the module and of the first owner's, the module, its parameter's name, the first owner, the name there."""


class FlatParameter(nn.Parameter):
    """Parameters behind each other in one.

    Args:
        params: at least one parameter (or tensor), all of one dtype.
        requires_grad: as in :class:`torch.nn.Parameter`.

    Raises:
        ConfigurationError: there is nothing to flatten, something else than tensors, or what is flat already.
    """

    _param_numels: list[int]
    _param_shapes: list[torch.Size]
    _param_infos: list[Owner]
    _shared_param_infos: list[Alias]

    def __new__(cls, params: Sequence[Tensor], requires_grad: bool = True) -> FlatParameter:
        """Copy the values into one tensor."""
        if not isinstance(params, (list, tuple)) or not params:
            raise ConfigurationError("FlatParameter: expected a list of at least one parameter")
        if not all(isinstance(parameter, Tensor) for parameter in params):
            raise ConfigurationError("FlatParameter: expected parameters or tensors only")
        if any(isinstance(parameter, FlatParameter) for parameter in params):
            raise ConfigurationError("FlatParameter: one of the parameters is flat already; flatten it once, outermost")
        data = torch.cat([parameter.detach().reshape(-1) for parameter in params])
        return super().__new__(cls, data, requires_grad)

    def __init__(self, params: Sequence[Tensor], requires_grad: bool = True) -> None:
        self._param_numels = [parameter.numel() for parameter in params]
        self._param_shapes = [parameter.shape for parameter in params]
        self._param_infos = []
        self._shared_param_infos = []

    def get_param_views(self, external_data: Tensor | None = None) -> Iterator[Tensor]:
        """Give what was flattened, as views in the original shapes.

        Args:
            external_data: a tensor of as many elements to take views of, in place of this one.

        Raises:
            ConfigurationError: it has another number of elements.
        """
        data = self if external_data is None else external_data
        if data.numel() != sum(self._param_numels):
            raise ConfigurationError(f"expected {sum(self._param_numels)} elements, got {data.numel()}")
        pieces = data.split(self._param_numels)
        return (piece.view(shape) for piece, shape in zip(pieces, self._param_shapes, strict=True))

    def metadata(self) -> tuple[list[str], list[torch.Size], list[int]]:
        """Give names, shapes and numbers of elements of what was flattened."""
        names = [f"{module}.{name}" if module else name for module, _, name in self._param_infos]
        return names, self._param_shapes, self._param_numels

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        # torch's own calls type(self)(data, requires_grad): "ValueError: An non-empty list or tuple argument is
        # needed" in FairScale 0.4.13
        if id(self) not in memo:
            memo[id(self)] = self._twin()
        found: FlatParameter = memo[id(self)]
        return found

    def _twin(self) -> FlatParameter:
        twin = FlatParameter([self.detach()], self.requires_grad)
        twin._param_numels, twin._param_shapes = list(self._param_numels), list(self._param_shapes)
        twin._param_infos, twin._shared_param_infos = list(self._param_infos), list(self._shared_param_infos)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = (self._param_numels, self._param_shapes, self._param_infos, self._shared_param_infos)
        return FlatParameter, ([self.data], self.requires_grad), state

    def __setstate__(self, state: Any) -> None:
        self._param_numels, self._param_shapes, self._param_infos, self._shared_param_infos = state


class FlattenParamsWrapper(nn.Module):
    """Run a module on views of flat parameters, so that what works on parameters has few of them.

    State dicts have the names and shapes of the module alone, and load from and into it, also where the wrapper is
    a part of another module; :meth:`flat_state_dict` is the flat form. In FairScale 0.4.13 a wrapper inside of a plain
    module does not load what it saved ("Missing key(s) in state_dict: 0.flat_param_0"), and a copy cannot be made.

    Args:
        module: changed in place: parameters that are flattened become plain attributes.
        param_list: the parameters to flatten, or a list of such lists, one for each flat parameter; parameters that
            are not the module's are passed over. None is all of them; an empty list is none.
        flat_param_names: a name for each flat parameter, behind ``flat_param_``; None counts from 0.

    Attributes:
        flat_params: the flat parameters; empty while the module is not flat.
        is_flattened: whether it is flat now.
        num_params_managed: how many parameters were flattened.

    Raises:
        ConfigurationError: a parameter is in two lists, or the names do not fit.
        MisuseError: parameters of one list differ in dtype or ``requires_grad``.
    """

    def __init__(
        self,
        module: nn.Module,
        param_list: Any = None,
        flat_param_names: list[str] | None = None,
    ) -> None:
        super().__init__()
        called("fairscale.nn.misc.FlattenParamsWrapper", "fsshard, with views of flat torch parameters")
        self._fpw_module = module
        self.is_flattened = False
        self._auto_unflatten_state_dict = True
        self._loading: Any = None
        self._orders = [(part, list(part._parameters)) for part in module.modules() if part._parameters]
        groups = _parameter_groups(module, param_list)
        self.num_params_managed = sum(len(group) for group in groups)
        owners = [found for group in groups if (found := _owners_in(self, group))]
        self.flat_param_names = _flat_names(flat_param_names, len(owners))
        self.flat_params: list[FlatParameter] = []
        self._flatten_params([_flat_parameter(found) for found in owners])
        nn.Module._register_state_dict_hook(self, _drop_prefix)
        nn.Module.register_load_state_dict_post_hook(self, _loaded)

    @property
    def module(self) -> Any:
        """The wrapped module."""
        return self._fpw_module

    @property
    def flat_param(self) -> FlatParameter:
        """The flat parameter, where there is one only."""
        if len(self.flat_params) != 1:
            raise MisuseError(f"flat_param: there are {len(self.flat_params)} flat parameters; use flat_params")
        return self.flat_params[0]

    @property
    def _param_infos(self) -> Iterator[Owner]:
        return itertools.chain.from_iterable(flat._param_infos for flat in self.flat_params)

    @property
    def _shared_param_infos(self) -> Iterator[Alias]:
        return itertools.chain.from_iterable(flat._shared_param_infos for flat in self.flat_params)

    # ---------------------------------------------------------------------------------------- flat and not flat

    def _flatten_params(self, flat_params: list[FlatParameter]) -> None:
        self.is_flattened = True
        self.flat_params = flat_params
        for name, flat in zip(self.flat_param_names, flat_params, strict=True):
            self.register_parameter(name, flat)
        for owner, name in self._places():
            owner._parameters.pop(name, None)
        self._unflatten_params_as_views()

    def _places(self) -> Iterator[tuple[nn.Module, str]]:
        yield from ((owner, name) for _, owner, name in self._param_infos)
        yield from ((owner, name) for _, _, owner, name, _, _ in self._shared_param_infos)

    def _unflatten_params_as_views(self) -> None:
        """Set views of the flat parameters where the module looks for its own; they carry gradients to them."""
        views = list(self.get_param_views())
        for (_, owner, name), view in zip(self._param_infos, views, strict=True):
            setattr(owner, name, view)
        for _, _, owner, name, first, first_name in self._shared_param_infos:
            setattr(owner, name, getattr(first, first_name))
        self._fpw_module.__dict__["_unflattened_param_views"] = views

    def _unflatten_params(self, external_data: Sequence[Tensor | None] | None = None) -> None:
        """Register parameters of their own again, over the memory of the flat ones, in the module's order."""
        views = list(self.get_param_views(external_data))
        infos, shared = list(self._param_infos), list(self._shared_param_infos)
        trainable = [flat.requires_grad for flat in self.flat_params for _ in flat._param_infos]
        for (_, owner, name), view, requires_grad in zip(infos, views, trainable, strict=True):
            _register(owner, name, nn.Parameter(view.detach(), requires_grad))
        for _, _, owner, name, first, first_name in shared:
            _register(owner, name, getattr(first, first_name))
        for part, names in self._orders:
            for name in [name for name in names if name in part._parameters]:
                part._parameters[name] = part._parameters.pop(name)
        self._fpw_module.__dict__.pop("_unflattened_param_views", None)
        for name in self.flat_param_names:
            del self._parameters[name]
        self.flat_params = []
        self.is_flattened = False

    @contextmanager
    def unflatten_params(self, flat_params: Sequence[Tensor | None] | None = None) -> Iterator[None]:
        """Give the module its parameters back for a while. Values that are written into them, or that replace them,
        are in the flat parameters afterwards.

        Args:
            flat_params: tensors to show in place of the flat parameters, one for each; what is written into them does
                not reach the module's. The module must be flat.

        Raises:
            MisuseError: ``flat_params`` are given and the module is not flat.
        """
        if flat_params is not None and not self.is_flattened:
            raise MisuseError("unflatten_params(flat_params=...): the module is not flat")
        if not self.is_flattened:
            yield
            return
        own = self.flat_params
        self._unflatten_params(flat_params)
        try:
            yield
        finally:
            self._flatten_again(own, keep=flat_params is None)

    def _flatten_again(self, flat_params: list[FlatParameter], keep: bool) -> None:
        if keep:
            _collect(flat_params)
        self._flatten_params(flat_params)

    def get_param_views(self, external_data_list: Sequence[Tensor | None] | None = None) -> Iterator[Tensor]:
        """Give views of all that was flattened, in the original shapes.

        Args:
            external_data_list: for each flat parameter a tensor to take views of, or None for itself.

        Raises:
            MisuseError: it has another length.
        """
        given = [None] * len(self.flat_params) if external_data_list is None else external_data_list
        if len(given) != len(self.flat_params):
            raise MisuseError(
                f"expected {len(self.flat_params)} tensors, one for each flat parameter, got {len(given)}"
            )
        views = [flat.get_param_views(data) for flat, data in zip(self.flat_params, given, strict=True)]
        return itertools.chain.from_iterable(views)

    def metadata(self, flat_param_idx: int) -> tuple[list[str], list[torch.Size], list[int]]:
        """Give names, shapes and numbers of elements of what is in a flat parameter."""
        return self.flat_params[flat_param_idx].metadata()

    # ---------------------------------------------------------------------------------------- as a module

    def forward(self, *inputs: Any, **kwinputs: Any) -> Any:
        """Run the module on the flat parameters."""
        self._flatten_after_load()
        if self.is_flattened:
            self._unflatten_params_as_views()
        return self.module(*inputs, **kwinputs)

    def __getattr__(self, name: str) -> Any:
        """Look in the wrapped module for what is not here."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == INNER:
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: int) -> Any:
        """Index the wrapped module."""
        return self.module.__getitem__(key)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.is_flattened:  # the views are of the memory of before
            self.flat_params = [_as_flat(self._parameters[name], flat) for name, flat in self._named_flat()]
            self._flatten_params(self.flat_params)
        return self

    def _named_flat(self) -> Iterator[tuple[str, FlatParameter]]:
        return zip(self.flat_param_names, self.flat_params, strict=True)

    # ---------------------------------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        """The state with the module not flat: views neither copy nor pickle as such."""
        memo: dict[int, Any] = {}
        return self._not_flat(memo)

    def _not_flat(self, memo: dict[int, Any]) -> dict[str, Any]:
        self._flatten_after_load()
        places = [[(module, name) for module, _, name in flat._param_infos] for flat in self.flat_params]
        trainable = [flat.requires_grad for flat in self.flat_params]
        was_flat = self.is_flattened
        with self.unflatten_params():
            state = {key: value for key, value in self.__dict__.items() if key not in ("flat_params", "_loading")}
            state = copy.deepcopy(state, memo)
        return {**state, "_flat_again": (was_flat, places, trainable)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Flatten again."""
        was_flat, places, _ = state.pop("_flat_again")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._loading = None
        self.flat_params = []
        if was_flat:
            modules = dict(self.named_modules())
            groups = [{modules[module]._parameters[name] for module, name in group} for group in places]
            self._flatten_params([_flat_parameter(_owners_in(self, group)) for group in groups])

    def __deepcopy__(self, memo: dict[int, Any]) -> FlattenParamsWrapper:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        own = list(self.flat_params)
        twin.__setstate__(self._not_flat(memo))
        memo.update({id(flat): copied for flat, copied in zip(own, twin.flat_params, strict=True)})
        return twin

    # ---------------------------------------------------------------------------------------- state dicts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Give the module's state, in its own names and shapes."""
        self._flatten_after_load()
        if not self._auto_unflatten_state_dict:
            return super().state_dict(*args, **kwargs)
        with self.unflatten_params():
            return super().state_dict(*args, **kwargs)

    def flat_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Give the module's state with the flat parameters as they are; it loads into a wrapper of the same kind.

        Raises:
            MisuseError: the module is not flat.
        """
        if not self.is_flattened:
            raise MisuseError("flat_state_dict: the module is not flat")
        self._auto_unflatten_state_dict = False
        try:
            found: dict[str, Any] = self.state_dict(*args, **kwargs)
        finally:
            self._auto_unflatten_state_dict = True
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # torch calls this for a part of a model too, where it does not call load_state_dict; the parts of this part
        # are loaded next, and then the hook below is called.
        self._flatten_after_load()
        older = prefix + FLAT  # one flat parameter without a number: releases before 0.3
        if older in state_dict:
            state_dict[f"{older}_0"] = state_dict.pop(older)
        names = {prefix + name for name in self.flat_param_names}
        for key in [key for key in state_dict if key.startswith(prefix) and key not in names]:
            state_dict[f"{prefix}{INNER}.{key[len(prefix) :]}"] = state_dict.pop(key)
        if self.is_flattened and self.flat_params and not names & state_dict.keys():
            own = self.flat_params
            self._unflatten_params()
            self._loading = own
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _flatten_after_load(self) -> None:
        """Be flat again after a load, be it one that an exception ended."""
        if self._loading is not None:
            own, self._loading = self._loading, None
            self._flatten_again(own, keep=True)


# ------------------------------------------------------------------------------------------------ building


def _parameter_groups(module: nn.Module, param_list: Any) -> list[set[nn.Parameter]]:
    given = list(module.parameters()) if param_list is None else list(param_list)
    lists = [given] if given and isinstance(given[0], nn.Parameter) else given
    groups = [set(parameters) for parameters in lists]
    if len(set().union(*groups)) != sum(len(group) for group in groups):
        raise ConfigurationError("FlattenParamsWrapper: a parameter is in two lists; flatten it in one of them")
    return groups


def _owners_in(wrapper: nn.Module, group: set[nn.Parameter]) -> list[Owner]:
    """Where the parameters of a group are, every name of a shared one."""
    return [
        (module_name, module, name)
        for module_name, module in wrapper.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter in group
    ]


def _flat_names(given: list[str] | None, count: int) -> list[str]:
    names = [str(index) for index in range(count)] if given is None else list(given)
    if len(names) != count:
        raise ConfigurationError(f"flat_param_names: expected {count} names, one for each list, got {len(names)}")
    if len(set(names)) != count:
        raise ConfigurationError(f"flat_param_names: a name occurs twice: {', '.join(names)}")
    return [f"{FLAT}_{name}" for name in names]


def _flat_parameter(owners: list[Owner]) -> FlatParameter:
    first: dict[nn.Parameter, Owner] = {}
    shared: list[Alias] = []
    for module_name, module, name in owners:
        parameter = module._parameters[name]
        assert parameter is not None
        if parameter in first:
            known = first[parameter]
            shared.append((module_name, known[0], module, name, known[1], known[2]))
        else:
            first[parameter] = (module_name, module, name)
    for what in ("dtype", "requires_grad"):
        kinds = {str(getattr(parameter, what)): f"{o[0]}.{o[2]}" for parameter, o in first.items()}
        if len(kinds) > 1:
            found = ", ".join(f"{kind} ({name})" for kind, name in kinds.items())
            raise MisuseError(f"parameters of one flat parameter must have one {what}, got {found}; use several lists")
    flat = FlatParameter(list(first), next(iter(first)).requires_grad)
    flat._param_infos, flat._shared_param_infos = list(first.values()), shared
    return flat


def _register(owner: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter where a view was."""
    owner.__dict__.pop(name, None)
    owner.register_parameter(name, parameter)


@torch.no_grad()
def _collect(flat_params: list[FlatParameter]) -> None:
    """Copy parameters that were replaced, and so are not over the flat memory, into it."""
    for flat in flat_params:
        for (_, owner, name), view in zip(flat._param_infos, flat.data.split(flat._param_numels), strict=True):
            now = owner._parameters.get(name)
            if now is not None and now.data_ptr() != view.data_ptr():
                view.copy_(now.reshape(-1))


def _as_flat(parameter: nn.Parameter | None, before: FlatParameter) -> FlatParameter:
    """The flat parameter after a conversion, which may have put a plain parameter in its place."""
    if isinstance(parameter, FlatParameter):
        return parameter
    assert parameter is not None
    flat = FlatParameter([parameter.detach()], parameter.requires_grad)
    flat._param_numels, flat._param_shapes = before._param_numels, before._param_shapes
    flat._param_infos, flat._shared_param_infos = before._param_infos, before._shared_param_infos
    return flat


# ------------------------------------------------------------------------------------------------ hooks


def _drop_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Take the wrapper's own level out of names, and of the versions that torch keeps beside them."""
    inner = f"{prefix}{INNER}"
    for key in [key for key in state_dict if key.startswith(f"{inner}.")]:
        state_dict[prefix + key[len(inner) + 1 :]] = state_dict.pop(key)
    versions = metadata_of(state_dict)
    for key in [key for key in versions if key == inner or key.startswith(f"{inner}.")]:
        versions[(prefix + key[len(inner) + 1 :]).rstrip(".")] = versions.pop(key)


def _loaded(module: nn.Module, incompatible_keys: Any) -> None:
    assert isinstance(module, FlattenParamsWrapper)
    module._flatten_after_load()
    for keys in (incompatible_keys.missing_keys, incompatible_keys.unexpected_keys):
        keys[:] = [key.replace(f"{INNER}.", "") for key in keys]
