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

from fsshard.checkpoint.format.index import Index, Range, some
from fsshard.checkpoint.format.tensors_file import Item, new_file, write
from fsshard.checkpoint.reader import TensorReader
from fsshard.errors import ConfigurationError
from fsshard.model.lora import ADAPTER, adapters_of, merged
from fsshard.sharded.module import ShardedModule
from fsshard.torch_private.modules import EXTRA_STATE

_PREFIX = "base_model.model."  # of the keys in PEFT's files
PEFT_FILES = ("adapter_model.safetensors", "adapter_config.json")
PARTS = ("base", "lora_A", "lora_B", EXTRA_STATE)


class MergedReader(TensorReader):
    """Reads the weights of :func:`fsshard.lora` with their adapters, under the names that they had without.

    Holds one of them at a time.

    Raises:
        ConfigurationError: there are none.
    """

    def __init__(self, reader: TensorReader) -> None:
        self._reader, self._last = reader, ("", torch.empty(0))
        self._parts: dict[str, list[str]] = {}  # the tensor's name -> those of base, A, B and alpha
        keys: dict[str, str | None] = {}
        own = reader.index.model.keys
        for key, tensor in own.items():
            adapter, _, part = key.rpartition(".")
            if not adapter.endswith(ADAPTER) or part not in PARTS:
                keys[key] = tensor
            elif part == "lora_A":
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
            base, a, b, alpha = map(self._reader.tensor, self._parts[name])
            pairs = a.is_complex() and not base.is_complex()  # as tltorch keeps them
            full = merged(torch.view_as_complex(base) if pairs else base, a, b, float(alpha))
            self._last = name, (torch.view_as_real(full) if pairs else full).reshape(-1)
        return self._last[1][slice(*wanted)]


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
    backend, keys = model.backend, reader.index.model.keys
    ours = [key for key in keys if key in backend.keys]
    trained = [key for key in ours if backend.entries[backend.keys[key]].parameter.requires_grad]
    with backend.bare() as inner:  # PEFT asks modules for the names in their state dicts
        if hasattr(inner, "peft_config"):
            _save_by_peft(inner, reader, folder, trained)
            return
        adapters = adapters_of(inner)
        if not adapters:
            raise ConfigurationError("format='peft': expected a model with adapters of PEFT or fsshard.lora, got none")
        beside = _modules_beside(inner, [key for key in trained if not re.search(rf"{ADAPTER}\.lora_[AB]$", key)])
    items, kinds = list[Item](), set[tuple[int, float]]()
    for name, (module, attribute) in adapters.items():
        kept: Any = getattr(module, attribute + ADAPTER)
        a, b = (reader.tensor(str(keys[f"{name}{ADAPTER}.{part}"])) for part in ("lora_A", "lora_B"))
        kinds.add((a.shape[0], kept.alpha))
        place = _PREFIX + name.rpartition(".")[0]
        for part, tensor in zip(("lora_A", "lora_B"), _as_layers(name, module, a, b), strict=True):
            items.append(Item(f"{place}.{part}.weight", tensor.dtype, tuple(tensor.shape), tensor.contiguous()))
    for key, tensor_name in keys.items():
        if tensor_name is not None and any(key.startswith(f"{name}.") for name in beside):
            items.append(reader.item(_PREFIX + key, tensor_name))
    ((rank, alpha),) = kinds  # one call of fsshard.lora: a second one finds adapters
    layers = "|".join(re.escape(name.rpartition(".")[0]) for name in adapters)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": layers, "bias": "none"}
    config |= {"modules_to_save": beside or None, "inference_mode": True}
    write(folder / PEFT_FILES[0], items, {"format": "pt"})
    with new_file(folder / PEFT_FILES[1]) as stream:
        stream.write(memoryview((json.dumps(config, indent=2) + "\n").encode()))


def _save_by_peft(inner: Any, reader: TensorReader, folder: Path, trained: list[str]) -> None:
    """Have PEFT write its only adapter; of the whole state dict read what PEFT chooses of it."""
    from peft import get_peft_model_state_dict

    names = [*inner.peft_config]
    if len(names) != 1:
        raise ConfigurationError(
            f"format='peft': expected one adapter of PEFT, got {', '.join(map(repr, names))}; use "
            "fsshard.save(..., only='trainable')"
        )
    index = reader.index
    own = {key: tensor for key, tensor in index.model.keys.items() if tensor is not None}
    infos = {key: index.tensors[tensor] for key, tensor in own.items()}
    blank = {key: torch.empty(info.shape, dtype=info.kind, device="meta") for key, info in infos.items()}
    # Prompts are computed of their encoder's weights, of which a rank may have a part only.
    whole = {key: reader.tensor(own[key]) for key in trained} if inner.peft_config[names[0]].is_prompt_learning else {}
    # "auto" asks the Hub whether the embedding's size is another one.
    with _in_place(inner, whole):
        chosen = get_peft_model_state_dict(inner, blank, names[0], save_embedding_layers=False)
    wanted = {id(tensor) for tensor in chosen.values()}
    wanted |= {id(blank[key]) for key in trained}  # for adapters that PEFT computes of their tensors
    tensors = {key: reader.tensor(own[key]) for key, tensor in blank.items() if id(tensor) in wanted}
    with _in_place(inner, whole):
        inner.save_pretrained(folder, state_dict=tensors, save_embedding_layers=False)
    if (folder / names[0]).is_dir():  # PEFT's, for an adapter that is not named "default"
        for file in PEFT_FILES:
            (folder / names[0] / file).rename(folder / file)


@contextmanager
def _in_place(inner: nn.Module, whole: dict[str, Tensor]) -> Iterator[None]:
    """Context in which modules have these parameters, by name in the state dict."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for key, tensor in whole.items():
            owner, _, name = key.rpartition(".")
            parameters: dict[str, Any] = inner.get_submodule(owner)._parameters
            before.append((parameters, name, parameters.get(name)))
            parameters[name] = nn.Parameter(tensor, requires_grad=False)
        yield
    finally:
        for parameters, name, value in reversed(before):
            parameters[name] = value


def _modules_beside(inner: nn.Module, trained: list[str]) -> list[str]:
    """Return the modules that have these parameters, for PEFT's ``modules_to_save``; raise if PEFT cannot take them."""
    owners = sorted({key.rpartition(".")[0] for key in trained})
    beside = [name for name in owners if not any(name.startswith(f"{other}.") for other in owners)]
    names = [name for name, _ in inner.named_modules(remove_duplicate=False)]
    # PEFT makes copies of all modules whose names end so, which may have adapters.
    taken = [name for name in names if name not in beside and any(name.endswith(part) for part in beside)]
    refused = [name for name in beside if not name or _has_no_forward_or_adapters(inner.get_submodule(name))]
    if taken or refused:
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
