"""Whole state dicts of a sharded model, assembled and loaded: original names, shapes and complex dtypes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.backends.base import Backend
from fsshard.backends.whole import copied, raw_state_dict, stream, to_rank0
from fsshard.comm.agreement import broadcast_tensors, check_alike, described_tensor, exchange
from fsshard.complex_params.pairs import is_dtensor
from fsshard.complex_params.slots import public_name
from fsshard.errors import ConfigurationError, StateDictError
from fsshard.patches import STATE_DICT_TYPE
from fsshard.planning.entries import Entry
from fsshard.sharded.contents import ModelBuffers
from fsshard.torch_private.modules import IncompatibleKeys, load_state_dict_post_hooks, load_state_dict_pre_hooks

NEURALOP_ARGUMENTS = "_metadata"
"""A key (torch's is an attribute) that neuralop's BaseModel adds to state dicts for its arguments: it is left alone."""
StateDict = Mapping[str, Any]
CONFIGS = {
    "FULL_STATE_DICT": "FullStateDictConfig",
    "SHARDED_STATE_DICT": "ShardedStateDictConfig",
    "LOCAL_STATE_DICT": "LocalStateDictConfig",
}
"""torch's ``StateDictType`` -> the class of its settings."""


# ----------------------------------------------------------------------------------------------- putting it together


def asked_for(config: Any, rank0_only: bool, offload_to_cpu: bool) -> tuple[bool, bool]:
    """Return both flags, from torch's ``FullStateDictConfig`` where one is given, here or by a context."""
    if config is None:
        return rank0_only, offload_to_cpu
    if not hasattr(config, "rank0_only") or not hasattr(config, "offload_to_cpu"):
        raise ConfigurationError(
            f"state_dict with {config!r}: expected torch's FullStateDictConfig, since fsshard returns whole tensors "
            "only; fsshard.save writes shards"
        )
    if rank0_only or offload_to_cpu:
        raise ConfigurationError(
            "state_dict with a config (an argument, or FSDP.state_dict_type around it) together with rank0_only or "
            "offload_to_cpu: give one of them"
        )
    return bool(config.rank0_only), bool(config.offload_to_cpu)


def honour_state_dict_type(model: nn.Module) -> None:
    """Let ``FSDP.state_dict_type(model, ...)`` hold for a ShardedModule under every engine, while it lives.

    torch's functions look for its own wrappers in the model. Under another engine than FSDP1 they find none: what was
    asked for is dropped without a word, and the context ends with ``KeyError: None`` (torch 2.13).
    """
    STATE_DICT_TYPE.keep_for(model, _request)


def _request(
    module: Any, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
) -> Callable[[], None] | None:
    """Have the next ``state_dict()`` give what is asked for; return what undoes that, or None for others' models."""
    controller = getattr(module, "_fsshard", None)
    if controller is None:
        return None
    config = state_dict_config
    if not config:
        # Who has a StateDictType has imported torch's FSDP.
        configs = sys.modules["torch.distributed.fsdp"]
        config = getattr(configs, CONFIGS[state_dict_type.name])()
    before = controller.requested_state_dict
    controller.requested_state_dict = config
    return partial(setattr, controller, "requested_state_dict", before)


def gather_state_dict(
    backend: Backend, buffers: ModelBuffers, rank0_only: bool, offload_to_cpu: bool
) -> dict[str, Any]:
    """Return whole tensors by the original keys; ``{}`` on the other ranks with ``rank0_only``. Collective."""
    keep = backend.settings.is_first or not rank0_only
    device = torch.device("cpu") if offload_to_cpu else backend.settings.device
    raw = raw_state_dict(backend)
    keys = dict.fromkeys([*backend.key_order, *raw])
    # Tied keys share one tensor, as they do natively.
    names = dict.fromkeys(backend.keys[key] for key in keys if key in backend.keys)
    entries = [backend.entries[name] for name in names]
    whole = {}
    # Every rank goes through all of them, also one that keeps none.
    values = _whole_values(backend, entries, rank0_only, device)
    for entry, value in zip(entries, values, strict=True):
        whole[entry.name] = value if keep else None
    result: dict[str, Any] = {}
    if not keep:
        return result
    for key in keys:
        if key in backend.keys:
            result[key] = whole[backend.keys[key]]
        elif key in raw:
            result[key] = buffers.for_user(key, raw[key], offload_to_cpu=offload_to_cpu)
    return result


def _whole_values(
    backend: Backend, entries: Iterable[Entry], rank0_only: bool, device: torch.device
) -> Iterator[Tensor | None]:
    """Yield the user's whole parameters, or None on a rank that does not keep them. Collective."""
    settings = backend.settings
    for is_divided, neighbours in groupby(entries, key=lambda entry: bool(entry.divided_over)):
        if is_divided:
            for entry in neighbours:
                # Ranks of all of data meet along the other dimensions: whichever is the first, it has what it needs.
                stored = stream(entry, settings, settings.device)
                part = entry.kind.to_user(stored)
                yield entry.put_together(part).to(device)
        elif rank0_only:
            together = list(neighbours)
            values = to_rank0(together, settings, device)
            for entry, arrived in zip(together, values, strict=True):
                yield None if arrived is None else entry.kind.to_user(arrived)
        else:
            for entry in neighbours:
                stored = stream(entry, settings, device)
                yield entry.kind.to_user(stored)


# ----------------------------------------------------------------------------------------------- loading it


def check_given_alike(backend: Backend, state_dict: StateDict | None, from_rank0: bool) -> None:
    """Raise RankMismatch on every rank unless all were given the same, before anything is read. Collective."""
    facts = {"broadcast_from_rank0": str(from_rank0)}
    if not from_rank0 and backend.settings.all_ranks > 1:
        facts["the state dict"] = f"a {type(state_dict).__name__}"
        if isinstance(state_dict, Mapping):
            facts["the state dict"] = "a mapping"
            for key, value in state_dict.items():
                facts[repr(key)] = type(value).__name__
                # Ranks may have other numbers in their buffers.
                if isinstance(value, Tensor) and key in backend.keys:
                    facts[repr(key)] = described_tensor(value)
    advice = "load the same on every rank (start new layers from one seed), or pass broadcast_from_rank0=True"
    check_alike(backend.settings.everyone, "load_state_dict()", facts, advice)


def load_whole(
    backend: Backend, state_dict: StateDict | None, buffers: ModelBuffers, strict: bool, from_rank0: bool
) -> IncompatibleKeys:
    """Load whole tensors, all or none; ``from_rank0``: only rank 0 has them, and they are sent. Collective."""
    check_given_alike(backend, state_dict, from_rank0)
    from_rank0 = from_rank0 and backend.settings.all_ranks > 1
    backend.reshard()
    raw = raw_state_dict(backend)
    if from_rank0 or not isinstance(state_dict, Mapping) or not _is_read_by_modules(backend, state_dict, raw):
        result = _load_by_entries(backend, state_dict, raw, strict, from_rank0)
    else:
        result = _load_by_modules(backend, state_dict, raw, strict)
    if from_rank0 or buffers.broadcast:
        # DDP's state dicts have each rank's own buffers, of which rank 0's count.
        buffers.send()
    return result


def _load_by_entries(
    backend: Backend, state_dict: StateDict | None, raw: StateDict, strict: bool, from_rank0: bool
) -> IncompatibleKeys:
    """Load parameter by parameter, of which each rank takes its part, and the rest by the modules."""
    missing, unexpected, keys = _agreed_keys(backend, state_dict, raw, strict, from_rank0)
    with torch.no_grad():
        for key, name in backend.keys.items():
            if key in keys:
                value = None if state_dict is None else state_dict[key]
                _load_entry(backend, backend.entries[name], value, from_rank0)
    others = {}
    if state_dict:
        for key, value in state_dict.items():
            if key in raw and key not in backend.keys:
                others[key] = value
    if others:
        with backend.bare() as module:
            module.load_state_dict(others, strict=False)
    return IncompatibleKeys(missing, unexpected)


def _is_read_by_modules(backend: Backend, state_dict: StateDict, raw: StateDict) -> bool:
    """Return whether modules have code of their own that reads state dicts, and it may make a difference."""
    if any(entry.divided_over for entry in backend.all):
        # No rank has room for, or is told of, the parts along other mesh dimensions.
        return False
    packages = set()
    with backend.bare() as module:
        for submodule in module.modules():
            for python_module in _load_code(submodule):
                package, *_ = python_module.split(".")
                packages.add(package)
    if packages - {"torch", "fsshard"}:
        return True
    # torch's own code fills in what older versions have not saved (num_batches_tracked), and changes nothing else.
    try:
        check_keys(backend, state_dict, raw, strict=True)
    except StateDictError:
        return True
    return False


def _load_code(module: nn.Module) -> Iterator[str]:
    """Yield the names of the Python modules whose code loads a module's state dict."""
    for cls in type(module).__mro__:
        if "_load_from_state_dict" in vars(cls):
            yield cls.__module__
            break
    for hooks in (load_state_dict_pre_hooks(module), load_state_dict_post_hooks(module)):
        for hook in hooks.values():
            # The function of a functools.partial.
            function = getattr(hook, "func", hook)
            yield str(getattr(function, "__module__", ""))


def _load_by_modules(backend: Backend, state_dict: StateDict, raw: StateDict, strict: bool) -> IncompatibleKeys:
    """Load as the bare model does, into whole parameters, of which each rank then takes its part. Collective."""
    whole = {}
    for entry in backend.all:
        # Copies: under engines that keep parameters whole a load that is refused would have changed them already.
        whole[entry.name] = stream(entry, backend.settings, backend.settings.device)
    buffers = []
    for key, value in raw.items():
        if key not in backend.keys and isinstance(value, Tensor) and not value.is_meta:
            buffers.append((value, copied(value)))
    full_tensors = {key: _whole_of(value) for key, value in state_dict.items()}
    try:
        with backend.bare() as module, backend.whole_parameters(whole):
            result = module.load_state_dict(full_tensors, strict=False)
        missing = _public_names(result.missing_keys)
        unexpected = _public_names(result.unexpected_keys)
        if strict and (missing or unexpected):
            raise StateDictError("the state dict", missing, unexpected)
    except Exception as error:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        # It says more of shapes than torch does.
        check_keys(backend, state_dict, raw, strict)
        if isinstance(error, StateDictError):
            raise
        raise StateDictError(f"the state dict, as the modules' own code reads it ({error}),") from error
    with torch.no_grad():
        for name, entry in backend.entries.items():
            entry.put(whole[name])
    return IncompatibleKeys(missing, unexpected)


def _public_names(keys: list[str]) -> list[str]:
    return [public_name(key) for key in keys if key != NEURALOP_ARGUMENTS]


def _agreed_keys(
    backend: Backend,
    state_dict: StateDict | None,
    raw: StateDict,
    strict: bool,
    from_rank0: bool,
) -> tuple[list[str], list[str], set[str]]:
    """Return missing and unexpected keys, and those that are there: rank 0's where only it has the dict."""

    def look() -> Any:
        shapes: dict[str, tuple[int, ...] | None] = {}
        if from_rank0 and not backend.settings.is_first:
            for key, value in raw.items():
                if key not in backend.keys and isinstance(value, Tensor):
                    shapes[key] = tuple(value.shape)
            return shapes
        if not isinstance(state_dict, Mapping):
            raise StateDictError(f"a {type(state_dict).__name__} (expected a mapping)")
        for key, value in state_dict.items():
            shapes[key] = None
            if isinstance(value, Tensor):
                shapes[key] = tuple(value.shape)
        return *check_keys(backend, state_dict, raw, strict), shapes

    answers = exchange(backend.settings.everyone, look) if from_rank0 else [look()]
    missing, unexpected, shapes = answers[0]
    for rank, shapes_of_buffers in enumerate(answers[1:], start=1):
        unlike = {}
        for key, shape in shapes_of_buffers.items():
            if shapes.get(key, shape) != shape:
                unlike[key] = (shape, shapes[key])
        if unlike:
            # This rank holds a buffer in another shape than rank 0 sends.
            raise StateDictError(f"the state dict of rank 0, on rank {rank},", mismatched=unlike)
    return missing, unexpected, set(shapes)


def check_keys(backend: Backend, state_dict: StateDict, raw: StateDict, strict: bool) -> tuple[list[str], list[str]]:
    """Return the missing and the unexpected keys of a state dict that is to be loaded. Local.

    ``raw`` is the model's ``raw_state_dict``, which is collective.

    Raises:
        StateDictError: names every missing or unexpected key, if ``strict``, and every wrongly shaped one.
    """
    # In order, as torch lists them.
    expected = dict.fromkeys([*raw, *backend.keys])
    missing = [key for key in expected if key not in state_dict and key != NEURALOP_ARGUMENTS]
    unexpected = [key for key in state_dict if key not in expected and key != NEURALOP_ARGUMENTS]
    wrong: dict[str, tuple[object, object]] = {}
    for key, value in state_dict.items():
        entry = None
        # An extra state has no shape.
        shape = getattr(raw.get(key), "shape", None)
        if key in backend.keys:
            entry = backend.entries[backend.keys[key]]
            shape = entry.full_shape
        if shape is None:
            continue
        if not isinstance(value, Tensor):
            wrong[key] = (tuple(shape), type(value).__name__)
        elif value.shape != shape:
            wrong[key] = (tuple(shape), tuple(value.shape))
        elif value.is_complex() and entry is not None and not entry.kind.is_complex:
            # torch would drop the imaginary parts, with a warning.
            wrong[key] = (entry.dtype, value.dtype)
    if wrong or (strict and (missing or unexpected)):
        raise StateDictError("the state dict", missing, unexpected, wrong)
    return missing, unexpected


def _load_entry(backend: Backend, entry: Entry, value: Any, from_rank0: bool) -> None:
    settings = backend.settings
    if from_rank0:
        whole = torch.empty(entry.full_shape, dtype=entry.dtype, device=settings.device)
        if settings.is_first:
            whole.copy_(_whole_of(value))
        assert settings.everyone is not None
        broadcast_tensors([whole], settings.everyone)
    else:
        whole = _whole_of(value).detach().to(settings.device)
    part = entry.take_part(whole)
    entry.put(entry.kind.to_stored(part))


def _whole_of(value: Any) -> Tensor:
    # torch's set_model_state_dict makes DTensors of whole tensors where the engine has some.
    whole: Tensor = value.full_tensor() if is_dtensor(value) else value
    return whole
