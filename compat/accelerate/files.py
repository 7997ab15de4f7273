"""Files of Accelerate, written and read by ranks that have parts of models: as its own DDP writes them."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import MODEL_NAME, OPTIMIZER_NAME, RNG_STATE_NAME, SAFE_MODEL_NAME
from safetensors.torch import load_model
from torch import nn

import fsshard
from fsshard.comm.agreement import Channel, agree
from fsshard.errors import CheckpointError, ConfigurationError
from fsshard.sharded.controller import controller_of
from fsshard.sharded.module import ShardedModule

from ..trainers import State, by_name, by_number
from .preparing import PreparedOptimizer

log = logging.getLogger("fsshard")
# Seconds that ranks wait for one another.
PATIENCE = 300.0


def world() -> dist.ProcessGroup | None:
    """Return the group of all ranks."""
    if dist.is_initialized():
        return dist.group.WORLD
    return None


def meet(call: str) -> None:
    """Return when all ranks have come here.

    Args:
        call: as users write it.

    Raises:
        CheckpointError: a rank did not come in time, or came for something else; it is named.
    """
    # Accelerate's DDP lets one rank save by itself, and scripts do: here the others would wait forever.
    Channel.of(world()).arrive(f"accelerator.{call}()", PATIENCE)


def check_optimizers(folder: Path, optimizers: Sequence[PreparedOptimizer]) -> None:
    """Raise unless each has a file that fits. One collective.

    Raises:
        CheckpointError: there is none.
        StateDictError: groups of other sizes, or state of another shape. Both on every rank.
    """

    def check() -> None:
        for number, prepared in enumerate(optimizers):
            saved = torch.load(_file(folder, [f"{OPTIMIZER_NAME}{{}}.bin"], number), "cpu", mmap=True)
            prepared.optimizer.check_state_dict(by_name(saved, prepared.optimizer))

    agree(world(), check)


def load_models(folder: Path, models: Sequence[nn.Module], *, strict: bool = True) -> None:
    """Give models their weights. Collective.

    Raises:
        CheckpointError: there is no file.
        StateDictError: names every key that is missing, unexpected or of another shape.
    """
    kinds = [f"{SAFE_MODEL_NAME}{{}}.safetensors", f"{MODEL_NAME}{{}}.bin"]
    paths = agree(world(), lambda: [_file(folder, kinds, number) for number in range(len(models))])
    for path, model in zip(paths, models, strict=True):
        if isinstance(model, ShardedModule):
            fsshard.load(path, model, strict=strict, rng=False)
        elif path.suffix == ".safetensors":
            # Accelerate writes such a file of a model that was prepared for evaluation.
            load_model(model, path, strict=strict)
        else:
            model.load_state_dict(torch.load(path, "cpu"), strict=strict)


def _file(folder: Path, kinds: Sequence[str], number: int) -> Path:
    names = [kind.format(f"_{number}" if number else "") for kind in kinds]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder} has no {' and no '.join(names)}")


class StateFiles(accelerate.Accelerator):
    """``accelerate.Accelerator`` with its files as its own DDP writes them, of wrapped models.

    Args:
        *args: as for the parent.
        settings: what was passed as ``fsshard=``.
        **arguments: as for the parent.
    """

    def __init__(self, *args: Any, settings: State, **arguments: Any) -> None:
        self._settings = settings
        # Id of a model -> its whole state while files are written.
        self._held: dict[int, State] = {}
        super().__init__(*args, **arguments)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> State:
        """Return whole tensors under the model's own names, on every rank, in host memory. Collective.

        Raises:
            CheckpointError: a rank did not call this; it is named, and so in the methods below.
        """
        held = self._held.get(id(model))
        if held is not None:
            return held
        if isinstance(model, ShardedModule):
            meet("get_state_dict")
            return model.state_dict(offload_to_cpu=True)
        found: State = super().get_state_dict(model, unwrap)
        return found

    def _to_write(self, model: ShardedModule) -> State:
        """Return the whole state where a rank writes it, else nothing. Collective."""
        everywhere = self.project_configuration.save_on_each_node or self._settings.get("device_mesh") is not None
        # Accelerate leaves out further names of a weight where it gets the kind of dict that modules give.
        return OrderedDict(model.state_dict(rank0_only=not everywhere, offload_to_cpu=True))

    def save_model(
        self,
        model: Any,
        save_directory: Any,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save whole weights. Collective; an error of a rank that writes is raised on all."""
        write = super().save_model
        if not isinstance(model, ShardedModule):
            write(model, save_directory, max_shard_size, safe_serialization)
            return
        meet("save_model")
        # The parent looks for parameters that are elsewhere.
        stand_in = nn.Module()
        self._held[id(stand_in)] = self._to_write(model)
        try:
            agree(world(), lambda: write(stand_in, save_directory, max_shard_size, safe_serialization))
        finally:
            self._held.clear()

    def save_state(
        self,
        output_dir: Any = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Any:
        """Save the state in the files that Accelerate's DDP writes. Collective; an error of a rank is raised on all.

        Models and optimizers are assembled in the host memory of the ranks that write.
        """
        meet("save_state")
        each_node = self.project_configuration.save_on_each_node
        writes = self.is_local_main_process if each_node else self.is_main_process
        write = functools.partial(super().save_state, output_dir, safe_serialization, **save_model_func_kwargs)
        if any(isinstance(model, ShardedModule) and controller_of(model).step.local for model in self._models):
            log.warning("save_state within an accumulation: the gradients accumulated so far are not saved")
        try:
            for model in self._models:
                if isinstance(model, ShardedModule):
                    self._held[id(model)] = self._to_write(model)
            for prepared in self._optimizers:
                prepared.held = by_number(prepared.optimizer, keep=writes)
            return agree(world(), write)
        finally:
            self._held.clear()
            for prepared in self._optimizers:
                prepared.held = None

    def load_state(
        self,
        input_dir: Any = None,
        load_kwargs: State | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load the state from the files of any engine, and of Accelerate's DDP. Collective.

        Raises:
            CheckpointError: a file is not there.
            StateDictError: models or optimizers of other shapes; before anything has changed but an earlier model.
        """
        meet("load_state")
        given = {"map_location": "cpu", **load_model_func_kwargs}
        strict = given.pop("strict", True)
        if set(given) > {"map_location"}:
            raise ConfigurationError(f"load_state({sorted(given)}): takes strict= and map_location=")
        first = self.register_load_state_pre_hook(functools.partial(self._load_models, strict))
        try:
            super().load_state(input_dir, {"mmap": True, **(load_kwargs or {})}, **given)
        finally:
            first.remove()

    def _load_models(self, strict: bool, models: list[Any], folder: str) -> None:
        """Load the models before the parent would."""
        # This is the last of its hooks. It gets the parent's own list of models, which is empty afterwards.
        check_optimizers(Path(folder), self._optimizers)
        load_models(Path(folder), models, strict=strict)
        models.clear()
        numbers = Path(folder) / f"{RNG_STATE_NAME}_{self.process_index}.pkl"
        if not numbers.is_file():
            log.warning(
                "%s: it has neither random number states nor the place in the accumulation for this rank", numbers
            )
