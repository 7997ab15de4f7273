"""Adapters for export: weights with what was added to them, and PEFT's layout."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.checkpoint.format.division import Range
from fsshard.checkpoint.format.index import some
from fsshard.checkpoint.format.tensors_file import Item, new_file, write
from fsshard.checkpoint.reader import TensorReader
from fsshard.errors import ConfigurationError
from fsshard.model.lora import ADAPTER, adapters_of, merged
from fsshard.sharded.module import ShardedModule
from fsshard.torch_private.modules import EXTRA_STATE

_PREFIX = "base_model.model."  # of the keys in PEFT's files
_OF_ADAPTERS = re.compile(rf"{ADAPTER}\.lora_[AB]$")
PEFT_FILES = ("adapter_model.safetensors", "adapter_config.json")
PARTS = ("base", "lora_A", "lora_B", EXTRA_STATE)


class MergedReader(TensorReader):
    """Reads the weights of :func:`fsshard.lora` with their adapters, under the names that they had without.

    Holds one of them at a time.

    Raises:
        ConfigurationError: there are none.
    """

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self._last = ("", torch.empty(0))
        # The tensor's name -> those of base, A, B and alpha.
        self._parts: dict[str, list[str]] = {}
        keys = {}
        own = reader.index.model.keys
        for key, tensor in own.items():
            adapter, _, part = key.rpartition(".")
            if not adapter.endswith(ADAPTER) or part not in PARTS:
                keys[key] = tensor
            elif part == "lora_A":
                names = [own[f"{adapter}.{each}"] for each in PARTS]
                base = names[0]
                assert base is not None
                keys[adapter.removesuffix(ADAPTER)] = base
                self._parts[base] = [name for name in names if name is not None]
        if not self._parts:
            instead = "leave merged= out"
            if any(".base_layer." in key for key in own):
                instead = "PEFT merges its own: PeftModel.from_pretrained(base, folder).merge_and_unload()"
            raise ConfigurationError(f"merged=True: expected adapters of fsshard.lora, got a model without; {instead}")
        index = reader.index
        self.index = dataclasses.replace(index, model=index.model._replace(keys=keys))

    def __exit__(self, *_: object) -> None:
        """Do nothing: the reader beneath is another's."""

    def read(self, name: str, wanted: Range) -> Tensor:
        if name not in self._parts:
            return self._reader.read(name, wanted)
        if self._last[0] != name:
            base, a, b, alpha = map(self._reader.tensor, self._parts[name])
            # As tltorch keeps complex numbers.
            pairs = a.is_complex() and not base.is_complex()
            if pairs:
                base = torch.view_as_complex(base)
            full = merged(base, a, b, float(alpha))
            if pairs:
                full = torch.view_as_real(full)
            self._last = name, full.reshape(-1)
        start, stop = wanted
        return self._last[1][start:stop]


# ------------------------------------------------------------------------------------------------ PEFT


def write_peft(model: ShardedModule, reader: TensorReader, folder: Path) -> None:
    """Write :data:`PEFT_FILES`, which ``PeftModel.from_pretrained(base, folder)`` reads, into a folder. On one rank.

    Args:
        model: with adapters of PEFT, which has its own method write them, or of :func:`fsshard.lora` on linear and
            convolutional layers; modules that are trained besides those are PEFT's ``modules_to_save``.
        reader: of the model; what is written is read, and nothing else.
        folder: an empty one.

    Raises:
        ConfigurationError: the model has no adapters, or several, or PEFT has no place for some that is trained.
    """
    backend = model.backend
    keys = reader.index.model.keys
    trained = []
    for key, name in backend.keys.items():
        if key in keys and backend.entries[name].parameter.requires_grad:
            trained.append(key)
    # PEFT asks modules for the names in their state dicts.
    with backend.bare() as inner:
        if hasattr(inner, "peft_config"):
            _save_by_peft(inner, reader, folder, trained)
            return
        adapters = adapters_of(inner)
        if not adapters:
            raise ConfigurationError("format='peft': expected a model with adapters of PEFT or fsshard.lora, got none")
        others = [key for key in trained if not _OF_ADAPTERS.search(key)]
        beside = _modules_beside(inner, others)
    items = list[Item]()
    kinds = set[tuple[int, float]]()
    for name, (module, attribute) in adapters.items():
        low_rank = getattr(module, attribute + ADAPTER)
        a = reader.tensor(str(keys[f"{name}{ADAPTER}.lora_A"]))
        b = reader.tensor(str(keys[f"{name}{ADAPTER}.lora_B"]))
        kinds.add((a.shape[0], low_rank.alpha))
        place = _PREFIX + name.rpartition(".")[0]
        a, b = _as_layers(name, module, a, b)
        items.append(_item(f"{place}.lora_A.weight", a))
        items.append(_item(f"{place}.lora_B.weight", b))
    prefixes = tuple(f"{name}." for name in beside)
    for key, tensor_name in keys.items():
        if tensor_name is not None and key.startswith(prefixes):
            items.append(reader.item(_PREFIX + key, tensor_name))
    # One call of fsshard.lora: a second one finds adapters.
    ((rank, alpha),) = kinds
    layers = [re.escape(name.rpartition(".")[0]) for name in adapters]
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": "|".join(layers),
        "bias": "none",
        "modules_to_save": beside or None,
        "inference_mode": True,
    }
    weights_file, config_file = PEFT_FILES
    write(folder / weights_file, items, {"format": "pt"})
    text = json.dumps(config, indent=2) + "\n"
    with new_file(folder / config_file) as stream:
        stream.write(memoryview(text.encode()))


def _item(name: str, tensor: Tensor) -> Item:
    return Item(name, tensor.dtype, tuple(tensor.shape), tensor.contiguous())


def _save_by_peft(
    inner: Any,
    reader: TensorReader,
    folder: Path,
    trained: list[str],
) -> None:
    """Have PEFT write its only adapter; of the whole state dict read what PEFT chooses of it."""
    from peft import get_peft_model_state_dict

    names = list(inner.peft_config)
    if len(names) != 1:
        raise ConfigurationError(
            f"format='peft': expected one adapter of PEFT, got {', '.join(map(repr, names))}; use "
            "fsshard.save(..., only='trainable')"
        )
    name = names[0]
    index = reader.index
    blank = {}
    own = {}
    for key, tensor_name in index.model.keys.items():
        if tensor_name is not None:
            info = index.tensors[tensor_name]
            own[key] = tensor_name
            blank[key] = torch.empty(info.shape, dtype=info.kind, device="meta")
    whole = {}
    # Prompts are computed of their encoder's weights, of which a rank may have a part only.
    if inner.peft_config[name].is_prompt_learning:
        whole = {key: reader.tensor(own[key]) for key in trained}
    # "auto" asks the Hub whether the embedding's size is another one.
    with _in_place(inner, whole):
        chosen = get_peft_model_state_dict(inner, blank, name, save_embedding_layers=False)
    wanted = set(map(id, chosen.values()))
    # For adapters that PEFT computes of their tensors.
    wanted.update(id(blank[key]) for key in trained)
    tensors = {}
    for key, tensor in blank.items():
        if id(tensor) in wanted:
            tensors[key] = reader.tensor(own[key])
    with _in_place(inner, whole):
        inner.save_pretrained(folder, state_dict=tensors, save_embedding_layers=False)
    # PEFT's, for an adapter that is not named "default".
    if (folder / name).is_dir():
        for file in PEFT_FILES:
            (folder / name / file).rename(folder / file)


@contextmanager
def _in_place(inner: nn.Module, whole: dict[str, Tensor]) -> Iterator[None]:
    """Context in which modules have these parameters, by name in the state dict."""
    before = []
    try:
        for key, tensor in whole.items():
            owner, _, name = key.rpartition(".")
            parameters = inner.get_submodule(owner)._parameters
            before.append((parameters, name, parameters.get(name)))
            parameters[name] = nn.Parameter(tensor, requires_grad=False)
        yield
    finally:
        for parameters, name, value in reversed(before):
            parameters[name] = value


def _modules_beside(inner: nn.Module, trained: list[str]) -> list[str]:
    """Return the modules that have these parameters, for PEFT's ``modules_to_save``; raise if PEFT cannot take them."""
    owners = sorted({key.rpartition(".")[0] for key in trained})
    beside = []
    for name in owners:
        if not any(name.startswith(f"{other}.") for other in owners):
            beside.append(name)
    # PEFT makes copies of all modules whose names end so, which may have adapters.
    ends = tuple(beside)
    is_unfit = False
    for name, module in inner.named_modules(remove_duplicate=False):
        if name in beside:
            is_unfit = is_unfit or not name or _has_no_forward_or_adapters(module)
        elif name.endswith(ends):
            is_unfit = True
    if is_unfit:
        raise ConfigurationError(
            "format='peft': expected what is trained besides the adapters of fsshard.lora to be whole modules, whose "
            f"names end like no other's, got {some(trained)}; use fsshard.save(..., only='trainable'), or merged=True"
        )
    return beside


def _has_no_forward_or_adapters(module: nn.Module) -> bool:
    containers = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)
    return isinstance(module, containers) or bool(adapters_of(module))


def _as_layers(name: str, module: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of the two layers by which PEFT adapts one, which is a part of a model."""
    if "." not in name:
        raise ConfigurationError(
            f"format='peft': expected adapters on layers of a model, got {name!r} of the model itself; put it into "
            "nn.Sequential"
        )
    if name.endswith("weight"):
        if isinstance(module, nn.Linear):
            return a, b
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and module.groups == 1:
            kernel = module.kernel_size
            ones = (1,) * len(kernel)
            a = a.view(-1, module.in_channels, *kernel)
            return a, b.view(*b.shape, *ones)
    raise ConfigurationError(
        f"format='peft': expected adapters on linear and convolutional layers alone, got {name!r} of a "
        f"{type(module).__name__}, for which PEFT has none; use fsshard.save(..., only='trainable'), or "
        "merged=True"
    )
