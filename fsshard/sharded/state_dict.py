"""Whole state dicts of a sharded model, assembled and loaded: original names, shapes and complex dtypes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.backends.base import Backend
from fsshard.backends.whole import raw_state_dict, stream
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


# ----------------------------------------------------------------------------------------------- putting it together


def asked_for(config: Any, rank0_only: bool, offload_to_cpu: bool) -> tuple[bool, bool]:
    """Return both flags, from torch's ``FullStateDictConfig`` where one is given, here or by a context."""
    if config is None:
        return rank0_only, offload_to_cpu
    if not (hasattr(config, "rank0_only") and hasattr(config, "offload_to_cpu")):
        raise ConfigurationError(
            f"state_dict with {config!r}: expected torch's FullStateDictConfig, since fsshard returns whole tensors "
            "only (for get_model_state_dict: StateDictOptions(full_state_dict=True)); fsshard.save writes shards"
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
    names = {"FULL_STATE_DICT": "FullStateDictConfig", "SHARDED_STATE_DICT": "ShardedStateDictConfig"}
    configs = sys.modules["torch.distributed.fsdp"]
    config = state_dict_config or getattr(configs, names.get(state_dict_type.name, "LocalStateDictConfig"))()
    before = controller.requested_state_dict
    controller.requested_state_dict = config
    return partial(setattr, controller, "requested_state_dict", before)


def gather_state_dict(
    backend: Backend, buffers: ModelBuffers, rank0_only: bool, offload_to_cpu: bool
) -> dict[str, Any]:
    """Return whole tensors by the original keys; ``{}`` on the other ranks with ``rank0_only``. Collective."""
    keep = backend.settings.is_first or not rank0_only
    device = torch.device("cpu") if offload_to_cpu else backend.settings.device
    others = {key: value for key, value in raw_state_dict(backend).items() if key not in backend.keys}
    whole: dict[str, Tensor | None] = {}
    result: dict[str, Any] = {}
    for key in dict.fromkeys([*backend.key_order, *others]):
        name = backend.keys.get(key)
        if name is None:
            if keep and key in others:
                result[key] = buffers.for_user(key, others[key], offload_to_cpu=offload_to_cpu)
            continue
        if name not in whole:  # tied keys share one tensor, as they do natively
            value = _whole_value(backend, backend.entries[name], rank0_only, device)
            whole[name] = value if keep else None
        if keep:
            result[key] = whole[name]
    return result


def _whole_value(backend: Backend, entry: Entry, rank0_only: bool, device: torch.device) -> Tensor | None:
    """Return the user's whole parameter, or None on a rank that does not keep it. Collective."""
    if not entry.divided_over:
        stored = stream(entry, backend.settings, rank0_only=rank0_only, device=device)
        return None if stored is None else entry.kind.to_user(stored)
    # Ranks of all of data meet along the other dimensions: whichever of them is the first, it has what it needs.
    part = stream(entry, backend.settings, rank0_only=False, device=backend.settings.device)
    return None if part is None else entry.put_together(entry.kind.to_user(part)).to(device)


# ----------------------------------------------------------------------------------------------- loading it


def check_given_alike(backend: Backend, state_dict: Mapping[str, Any] | None, from_rank0: bool) -> None:
    """Raise RankMismatch on every rank unless all were given the same, before anything is read. Collective."""
    facts = {"broadcast_from_rank0": str(from_rank0)}
    if not from_rank0 and backend.settings.all_ranks > 1:
        is_mapping = isinstance(state_dict, Mapping)
        facts["the state dict"] = "a mapping" if is_mapping else f"a {type(state_dict).__name__}"
        for key, value in state_dict.items() if state_dict is not None and is_mapping else ():
            is_parameter = isinstance(value, Tensor) and key in backend.keys  # buffers may differ
            facts[repr(key)] = described_tensor(value) if is_parameter else type(value).__name__
    advice = "load the same on every rank (start new layers from one seed), or pass broadcast_from_rank0=True"
    check_alike(backend.settings.everyone, "load_state_dict()", facts, advice)


def load_whole(
    backend: Backend, state_dict: Mapping[str, Any] | None, buffers: ModelBuffers, strict: bool, from_rank0: bool
) -> IncompatibleKeys:
    """Load whole tensors, all or none; ``from_rank0``: only rank 0 has them, and they are sent. Collective."""
    check_given_alike(backend, state_dict, from_rank0)
    from_rank0 = from_rank0 and backend.settings.all_ranks > 1
    backend.reshard()
    raw = raw_state_dict(backend)
    if not from_rank0 and isinstance(state_dict, Mapping) and _is_read_by_modules(backend, state_dict, raw):
        result = _load_by_modules(backend, state_dict, raw, strict)
    else:
        result = _load_by_entries(backend, state_dict, raw, strict, from_rank0)
    if from_rank0 or buffers.broadcast:  # as DDP's state dicts have each rank's own, of which rank 0's count
        buffers.send()
    return result


def _load_by_entries(
    backend: Backend, state_dict: Mapping[str, Any] | None, raw: Mapping[str, Any], strict: bool, from_rank0: bool
) -> IncompatibleKeys:
    """Load parameter by parameter, of which each rank takes its part, and the rest by the modules."""
    missing, unexpected, given = _agreed_keys(backend, state_dict, raw, strict, from_rank0)
    with torch.no_grad():
        for key, name in backend.keys.items():
            if key in given:
                value = None if state_dict is None else state_dict[key]
                _load_entry(backend, backend.entries[name], value, from_rank0)
    others = {k: v for k, v in (state_dict or {}).items() if k in raw and k not in backend.keys}
    if others:
        with backend.bare() as module:
            module.load_state_dict(others, strict=False)
    return IncompatibleKeys(missing, unexpected)


def _is_read_by_modules(backend: Backend, given: Mapping[str, Any], raw: Mapping[str, Any]) -> bool:
    """Return whether modules have code of their own that reads state dicts, and it may make a difference."""
    if any(entry.divided_over for entry in backend.all):
        return False  # no rank has room for, or is told of, the parts along other mesh dimensions
    with backend.bare() as module:
        rooms = {room.partition(".")[0] for each in module.modules() for room in _load_code(each)}
    if rooms - {"torch", "fsshard"}:
        return True
    try:  # torch's own fills in what older versions have not saved (num_batches_tracked), and changes nothing else
        check_keys(backend, given, raw, strict=True)
    except StateDictError:
        return True
    return False


def _load_code(module: nn.Module) -> Iterator[str]:
    """Yield the names of the Python modules whose code loads a module's state dict."""
    yield next(cls.__module__ for cls in type(module).__mro__ if "_load_from_state_dict" in vars(cls))
    for hook in (*load_state_dict_pre_hooks(module).values(), *load_state_dict_post_hooks(module).values()):
        yield str(getattr(getattr(hook, "func", hook), "__module__", ""))


def _load_by_modules(
    backend: Backend, given: Mapping[str, Any], raw: Mapping[str, Any], strict: bool
) -> IncompatibleKeys:
    """Load as the bare model does, into whole parameters, of which each rank then takes its part. Collective."""
    whole: dict[str, Tensor] = {}
    for entry in backend.all:
        # Copies: under engines that keep parameters whole a load that is refused would have changed them already.
        copied = stream(entry, backend.settings, rank0_only=False, device=backend.settings.device)
        if copied is not None:
            whole[entry.name] = copied
    buffers = [v for k, v in raw.items() if k not in backend.keys and isinstance(v, Tensor) and not v.is_meta]
    before = [value.clone() for value in buffers]
    try:
        with backend.bare() as module, backend.whole_parameters(whole):
            result = module.load_state_dict(given, strict=False)
        missing, unexpected = ([public_name(k) for k in keys if k != NEURALOP_ARGUMENTS] for keys in result)
        if strict and (missing or unexpected):
            raise StateDictError("the state dict", missing, unexpected)
    except Exception as error:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        check_keys(backend, given, raw, strict)  # says more of shapes
        if isinstance(error, StateDictError):
            raise
        raise StateDictError(f"the state dict, as the modules' own code reads it ({error}),") from error
    with torch.no_grad():
        for name, entry in backend.entries.items():
            entry.put(whole[name])
    return IncompatibleKeys(missing, unexpected)


def _agreed_keys(
    backend: Backend, state_dict: Mapping[str, Any] | None, raw: Mapping[str, Any], strict: bool, from_rank0: bool
) -> tuple[list[str], list[str], set[str]]:
    """Return missing and unexpected keys, and those that are there: rank 0's where only it has the dict."""

    def look() -> Any:
        if from_rank0 and not backend.settings.is_first:
            return {key: tuple(v.shape) for key, v in raw.items() if key not in backend.keys and isinstance(v, Tensor)}
        if not isinstance(state_dict, Mapping):
            raise StateDictError(f"a {type(state_dict).__name__} (expected a mapping)")
        given = {key: tuple(v.shape) if isinstance(v, Tensor) else None for key, v in state_dict.items()}
        return (*check_keys(backend, state_dict, raw, strict), given)

    told, *others = exchange(backend.settings.everyone, look) if from_rank0 else [look()]
    missing, unexpected, given = told
    for rank, shapes in enumerate(others, start=1):
        unlike = {k: (shape, given[k]) for k, shape in shapes.items() if given.get(k, shape) != shape}
        if unlike:  # another rank holds a buffer in another shape
            raise StateDictError(f"the state dict of rank 0, on rank {rank},", mismatched=unlike)
    return missing, unexpected, set(given)


def check_keys(
    backend: Backend, given: Mapping[str, Any], raw: Mapping[str, Any], strict: bool
) -> tuple[list[str], list[str]]:
    """Return the missing and the unexpected keys of a state dict that is to be loaded. Local.

    ``raw`` is the model's ``raw_state_dict``, which is collective.

    Raises:
        StateDictError: names every missing or unexpected key, if ``strict``, and every wrongly shaped one.
    """
    expected = {**raw, **dict.fromkeys(backend.keys)}
    missing = [key for key in expected if key not in given and key != NEURALOP_ARGUMENTS]
    unexpected = [key for key in given if key not in expected and key != NEURALOP_ARGUMENTS]
    wrong: dict[str, tuple[object, object]] = {}
    for key, value in given.items():
        known = key in backend.keys
        want = backend.entries[backend.keys[key]].full_shape if known else getattr(raw.get(key), "shape", None)
        got = value.shape if isinstance(value, Tensor) else None
        if want is not None and got != want:
            wrong[key] = (tuple(want), tuple(got) if got is not None else type(value).__name__)
        elif known and value.is_complex() and not backend.entries[backend.keys[key]].kind.is_complex:
            wrong[key] = (backend.entries[backend.keys[key]].dtype, value.dtype)
    if wrong or (strict and (missing or unexpected)):
        raise StateDictError("the state dict", missing, unexpected, wrong)
    return missing, unexpected


def _load_entry(backend: Backend, entry: Entry, value: Any, from_rank0: bool) -> None:
    whole, device = value, backend.settings.device
    if from_rank0:
        whole = torch.empty(entry.full_shape, dtype=entry.dtype, device=device)
        if backend.settings.is_first:
            whole.copy_(_whole_of(value))
        assert backend.settings.everyone is not None
        broadcast_tensors([whole], backend.settings.everyone)
    entry.put(entry.kind.to_stored(entry.take_part(_whole_of(whole).detach().to(device))))


def _whole_of(value: Any) -> Tensor:
    # torch's set_model_state_dict makes DTensors of whole tensors where the engine has some.
    whole: Tensor = value.full_tensor() if is_dtensor(value) else value
    return whole
