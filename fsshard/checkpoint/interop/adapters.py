"""Adapters for export: weights with what was added to them, and PEFT's layout."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.checkpoint.format.index import Index, Range
from fsshard.checkpoint.format.tensors_file import Item, new_file, write
from fsshard.checkpoint.reader import TensorReader
from fsshard.errors import ConfigurationError
from fsshard.model.lora import ADAPTER, adapters_of, merged
from fsshard.sharded.module import ShardedModule

PEFT_FILES = ("adapter_model.safetensors", "adapter_config.json")
PARTS = ("base", "lora_A", "lora_B", "scale")


class MergedReader(TensorReader):
    """Reads the weights of :func:`fsshard.lora` with their adapters, under the names that they had without.

    Holds one of them at a time.

    Raises:
        ConfigurationError: there are none, or parts of some are missing.
    """

    def __init__(self, reader: TensorReader) -> None:
        self._reader, self._last = reader, ("", torch.empty(0))
        self._parts: dict[str, list[str]] = {}  # the tensor's name -> those of base, A, B and scale
        keys: dict[str, str | None] = {}
        own = reader.index.model.keys
        for key, tensor in own.items():
            adapter, _, part = key.rpartition(".")
            if not adapter.endswith(ADAPTER) or part not in PARTS:
                keys[key] = tensor
            elif part == "lora_A":
                _check_base(adapter, own)
                found = [own[f"{adapter}.{each}"] for each in PARTS]
                assert found[0] is not None
                keys[adapter.removesuffix(ADAPTER)] = found[0]
                self._parts[found[0]] = [name for name in found if name is not None]
        if not self._parts:
            peft = any(".base_layer." in key for key in own)
            instead = "PEFT merges its own: PeftModel.from_pretrained(base, folder).merge_and_unload()"
            raise ConfigurationError(
                f"merged=True: expected adapters of fsshard.lora, got a model without; "
                f"{instead if peft else 'leave merged= out'}"
            )
        index = reader.index
        self.index: Index = dataclasses.replace(index, model=index.model._replace(keys=keys))

    def __exit__(self, *_: object) -> None:
        """Do nothing: the reader beneath is another's."""

    def read(self, name: str, wanted: Range) -> Tensor:
        if name not in self._parts:
            return self._reader.read(name, wanted)
        if self._last[0] != name:
            base, a, b, scale = map(self._reader.tensor, self._parts[name])
            pairs = a.is_complex() and not base.is_complex()  # as tltorch keeps them
            full = merged(torch.view_as_complex(base) if pairs else base, a, b, scale)
            self._last = name, (torch.view_as_real(full) if pairs else full).reshape(-1)
        return self._last[1][slice(*wanted)]


def _check_base(adapter: str, keys: Mapping[str, Any]) -> None:
    if f"{adapter}.base" not in keys:
        raise ConfigurationError(
            f"merged=True: the checkpoint has no {adapter}.base: it was saved with only='trainable'. Load it into the "
            "wrapped model, and export that"
        )


# ------------------------------------------------------------------------------------------------ PEFT


def write_peft(model: ShardedModule, reader: TensorReader, folder: Path) -> None:
    """Write :data:`PEFT_FILES`, which ``PeftModel.from_pretrained(base, folder)`` reads, into a folder. On one rank.

    Args:
        model: with adapters of PEFT, which has its own method write them, or of :func:`fsshard.lora` on linear and
            convolutional layers.
        reader: of the model; trainable weights are read, and nothing else.
        folder: an empty one.

    Raises:
        ConfigurationError: the model has no adapters, or PEFT has no layer for one of them.
    """
    backend, keys = model.backend, reader.index.model.keys
    entries = {key: backend.entries[backend.keys[key]] for key in keys if key in backend.keys}
    trained = {key: keys[key] for key, entry in entries.items() if entry.parameter.requires_grad}
    tensors = {key: reader.tensor(name) for key, name in trained.items() if name is not None}
    inner: Any = model.module
    if hasattr(inner, "peft_config"):
        with backend.bare():  # it asks modules for the names in their state dicts
            # "auto" asks the Hub whether the embedding's size is another one.
            inner.save_pretrained(folder, state_dict=tensors, save_embedding_layers=False)
        return
    adapters = adapters_of(inner)
    if not adapters:
        raise ConfigurationError("format='peft': expected a model with adapters of PEFT or fsshard.lora, got none")
    items, kinds = [], set[tuple[int, float]]()
    for name, (module, attribute) in adapters.items():
        kept: Any = getattr(module, attribute + ADAPTER)
        a, b = tensors[f"{name}{ADAPTER}.lora_A"], tensors[f"{name}{ADAPTER}.lora_B"]
        kinds.add((a.shape[0], float(kept.scale)))
        place = "base_model.model." + name.rpartition(".")[0]
        for part, tensor in zip(("lora_A", "lora_B"), _as_layers(name, module, a, b), strict=True):
            items.append(Item(f"{place}.{part}.weight", tensor.dtype, tuple(tensor.shape), tensor.contiguous()))
    ((rank, scale),) = kinds  # one call of fsshard.lora: a second one finds adapters
    layers = "|".join(re.escape(name.rpartition(".")[0]) for name in adapters)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank * scale, "target_modules": layers, "bias": "none"}
    write(folder / PEFT_FILES[0], items, {"format": "pt"})
    with new_file(folder / PEFT_FILES[1]) as stream:
        stream.write(memoryview((json.dumps({**config, "inference_mode": True}, indent=2) + "\n").encode()))


def _as_layers(name: str, module: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of the two layers by which PEFT adapts one."""
    if isinstance(module, nn.Linear) and name.endswith("weight"):
        return a, b
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and module.groups == 1 and name.endswith("weight"):
        ones = (1,) * len(module.kernel_size)
        return a.view(-1, module.in_channels, *module.kernel_size), b.view(*b.shape, *ones)
    raise ConfigurationError(
        f"format='peft': expected adapters on linear and convolutional layers alone, got {name!r} of a "
        f"{type(module).__name__}, for which PEFT has none; use fsshard.save(..., only='trainable'), or "
        "merged=True"
    )
