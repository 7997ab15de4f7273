"""The engine of FullyShardedDataParallel: torch's FSDP1, one per wrapper, adapted to FairScale's behaviour.

Imported with the first wrapper only: torch.distributed.fsdp takes longer to import than all else of FairScale's names.
"""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from fsshard.model.outputs import forward_begins, hook_bases
from fsshard.torch_private import fsdp1
from fsshard.torch_private.autograd import queue_callback
from fsshard.torch_private.modules import (
    load_state_dict_post_hooks,
    load_state_dict_pre_hooks,
    state_dict_hooks,
    state_dict_pre_hooks,
)

from ._fsdp_state import UnsupportedHere, clean

# A module, and the name of a parameter in it.
Place = tuple[nn.Module, str]


@dataclass(frozen=True, eq=False)
class Own:
    """A parameter that a wrapper shards; inner wrappers have theirs."""

    name: str  # within the wrapper
    shape: torch.Size  # of the whole
    places: tuple[Place, ...]  # modules that hold it, with the name there; several where it is tied


class InnerFSDP(TorchFSDP):
    """FSDP1 around one module. Its flat parameter is cut as FairScale's is: ``torch.chunk``, the last parts padded."""

    def __init__(self, module: nn.Module, wrapper: Any, buffer_dtype: torch.dtype | None) -> None:
        offloads = wrapper.move_params_to_cpu and wrapper.compute_device.type != "cpu"
        if wrapper.mixed_precision:
            reduces = torch.float32 if wrapper.fp32_reduce_scatter else wrapper.compute_dtype
            precision = MixedPrecision(wrapper.compute_dtype, reduces, wrapper.buffer_dtype)
        else:
            precision = MixedPrecision(buffer_dtype=buffer_dtype, cast_root_forward_inputs=False)
        with warnings.catch_warnings():
            # That one rank means NO_SHARD, which is meant; that FSDP1 is in maintenance; that lists have no forward.
            warnings.filterwarnings("ignore", message=".*(NO_SHARD|will not all-gather).*")
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.fsdp")
            super().__init__(
                module,
                process_group=wrapper.process_group,
                sharding_strategy=ShardingStrategy["FULL_SHARD" if wrapper.reshard_after_forward else "SHARD_GRAD_OP"],
                cpu_offload=CPUOffload(offload_params=True) if offloads else None,
                mixed_precision=precision if wrapper.mixed_precision or buffer_dtype else None,
                # Without it torch 2.13 raises "FSDP needs a non-CPU accelerator device" on the CPU.
                device_id=wrapper.compute_device,
                use_orig_params=not wrapper.flatten_parameters,
            )
        # "Expects one homogeneous value for _use_orig_params" (torch 2.13), where FairScale's users put BatchNorm
        # unflattened into a flattened model. What runs asks the handle, which keeps the true value; this attribute is
        # asked when parameters are shown whole, below, and gets the true value for that long.
        fsdp1.claim_orig_params(self, False)
        self._flattens: bool = wrapper.flatten_parameters
        self._wrapper = weakref.ref(wrapper)
        # The node where the flat parameter's gradient arrives.
        self._accumulator: Any = None
        self._hook: Any = None
        # FSDP1's hooks know its own names only, and after an exception leave the module whole (torch 2.13).
        for hooks in (
            state_dict_hooks(self),
            state_dict_pre_hooks(self),
            load_state_dict_pre_hooks(self),
            load_state_dict_post_hooks(self),
        ):
            hooks.clear()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return FairScale's ``wrapper.module.state_dict()``: the module's names; parts of an unflattened wrapper."""
        wrapper = self._wrapper()
        # The wrapper asks, and will take its levels out of the names.
        if wrapper is None or wrapper.is_exporting:
            return super().state_dict(*args, **kwargs)
        if fsdp1.is_summoned(self) or wrapper.world_size == 1:
            return wrapper.state_dict(*args, **kwargs)
        if self._flattens and self.flat is not None:
            # FairScale 0.4.13 raises "Incorrect numel of supplied data".
            raise UnsupportedHere(
                "state_dict() of a flattened wrapper's module outside of summon_full_params()",
                "use state_dict() of the wrapper (whole), or local_state_dict() (this rank's part)",
            )
        return wrapper.local_state_dict(*args, **kwargs)

    # As of any module: the wrapper around shows parameters whole, and cleans names.
    apply = nn.Module.apply
    named_parameters = nn.Module.named_parameters
    named_buffers = nn.Module.named_buffers

    # ---------------------------------------------------------------------------------------- what is in it

    @property
    def wrapped(self) -> nn.Module:
        """Return the user's module; ``module`` would skip torch's activation wrappers."""
        return fsdp1.wrapped_by(self)

    @property
    def flat(self) -> Any:
        """Return the flat parameter, or None where inner wrappers have all."""
        handle = fsdp1.handle_of(self)
        return handle.flat_param if handle else None

    def own(self) -> list[Own]:
        """Return the parameters in the flat one, in its order."""
        flat = self.flat
        if flat is None:
            return []
        tied = defaultdict(list)
        for info in fsdp1.shared_infos_of(flat):
            tied[info.prim_module, info.prim_param_name].append((info.module, info.param_name))
        return [
            Own(_name(path, name), shape, ((module, name), *tied.get((module, name), ())))
            for (name, module, path), shape in zip(fsdp1.infos_of(flat), fsdp1.shapes_of(flat), strict=True)
        ]

    def ties(self) -> list[tuple[str, str]]:
        """Return the names of tied parameters: the one it is kept under, and another."""
        infos = fsdp1.shared_infos_of(self.flat) if self.flat is not None else []
        return [(_name(i.prim_module_name, i.prim_param_name), _name(i.module_name, i.param_name)) for i in infos]

    @property
    def broken_off(self) -> bool:
        """Return whether an exception has ended a forward or a backward; asked between them."""
        return self._post_backward_callback_queued or not fsdp1.is_idle(self)

    def abandon(self) -> None:
        """Be idle again after an exception: FSDP1 stays whole and in the middle of what it did (torch 2.13)."""
        # A broken backward's gradients go, and those that it was to be added to: FSDP1 has put them aside, where no
        # zero_grad finds them, and would add them to the next.
        self._post_backward_callback_queued = False
        fsdp1.abandon(self)

    # ---------------------------------------------------------------------------------------- several backwards

    @property
    def _post_backward_callback_queued(self) -> bool:
        return bool(self.__dict__.get("_queued", False))

    @_post_backward_callback_queued.setter
    def _post_backward_callback_queued(self, queued: bool) -> None:
        # FSDP1 sets this False last thing at the end of a backward. By then it has taken its hooks away, and a second
        # forward's backward would find "storage of size 0", or leave its gradient unreduced (torch 2.13). FairScale
        # does two forwards and then two backwards.
        self.__dict__["_queued"] = queued
        if queued:
            queue_callback(self._reduce_the_rest)
        else:
            for state in TorchFSDP.fsdp_modules(self) if fsdp1.is_root(self) else ():
                state.be_ready_again()

    def _reduce_the_rest(self) -> None:
        for state in TorchFSDP.fsdp_modules(self):
            fsdp1.reduce_unheard(state)

    def be_ready_again(self) -> None:
        """Gather parameters and reduce gradients in a backward that comes without another forward, too."""
        flat = self.flat
        if flat is None or hasattr(flat, fsdp1.HOOK_STATE):
            return
        fsdp1.needs_pre_backward_unshard(fsdp1.handle_of(self))
        self._forget_hook()
        if self._accumulator is None:
            return
        # Through the graph the engine would hold itself, where no collector sees it.
        here = weakref.ref(self)

        def reduce(*_: Any) -> None:
            engine = here()
            if engine is not None:
                fsdp1.post_backward_hook(engine)

        self._hook = self._accumulator.register_hook(reduce)

    def _forget_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its whole parameters."""
        self._forget_hook()
        self._accumulator = None
        since = forward_begins()
        output = super().forward(*args, **kwargs)
        hook_bases(self, output, since)
        self._accumulator = fsdp1.accumulator_of(self.flat) if self.flat is not None else None
        return output

    # ---------------------------------------------------------------------------------------- whole and shard

    def lazy_init(self) -> None:
        """Find out whether this is the root, and if so tell those inside."""
        if fsdp1.is_root(self) is None:
            for inner in TorchFSDP.fsdp_modules(self):
                # "Non-root FSDP instance's `_is_root` should not have been set yet": torch 2.13 refuses a unit that was
                # used by itself before the whole was; FairScale does not.
                if inner is not self and fsdp1.is_root(inner):
                    fsdp1.reset_lazy_init(inner)
            fsdp1.lazy_init(self)

    def drop_whole(self) -> None:
        """Free the whole parameters that a forward left."""
        handle = fsdp1.handle_of(self)
        if handle is not None:
            fsdp1.drop_whole(self, handle)

    @contextmanager
    def whole(self) -> Iterator[Callable[[], None]]:
        """Show the own parameters whole, in full precision; yields what writes them to the shards."""
        self.lazy_init()
        self.drop_whole()
        owners = self.own()
        fsdp1.claim_orig_params(self, not self._flattens)
        try:
            with TorchFSDP.summon_full_params(self, recurse=False, writeback=False):
                views = {}
                for each in owners:
                    for owner, name in each.places:
                        parameter = owner._parameters[name]
                        views[owner, name] = None if parameter is None else parameter.data
                yield lambda: self._keep(views)
        finally:
            fsdp1.claim_orig_params(self, False)

    @torch.no_grad()
    def _keep(self, views: dict[Place, Tensor | None]) -> None:
        if fsdp1.handle_of(self) is None:
            return
        # What was replaced, be it the parameter or its data, is no view any more.
        for (module, name), view in views.items():
            now = module._parameters.get(name)
            if now is not None and view is not None and now.data_ptr() != view.data_ptr():
                view.copy_(now.reshape(view.shape))
        fsdp1.write_back(fsdp1.handle_of(self))

    def gather(self, local: Tensor) -> Tensor:
        """Return the whole of something that is cut as the flat parameter is, without padding. Collective."""
        handle = fsdp1.handle_of(self)
        assert handle is not None
        local = local.detach().contiguous()
        if not handle.uses_sharded_strategy:
            return local.clone()
        parts = local.new_empty(handle.world_size * local.numel())
        dist.all_gather_single(parts, local, group=handle.process_group)
        # The last place counts padding between parameters, too.
        return parts[: fsdp1.offsets_of(handle)[-1][1] + 1]

    def split(self, whole: Tensor) -> list[Tensor]:
        """Return the own parameters' parts of something as long as the whole flat parameter, in their shapes."""
        flat = self.flat
        pieces = [whole[start : stop + 1] for start, stop in fsdp1.offsets_of(fsdp1.handle_of(self))]
        kept = [piece for piece, padding in zip(pieces, fsdp1.is_padding(flat), strict=True) if not padding]
        return [piece.view(shape) for piece, shape in zip(kept, fsdp1.shapes_of(flat), strict=True)]


def _name(module: str, parameter: str) -> str:
    return clean(f"{module}.{parameter}" if module else parameter)
