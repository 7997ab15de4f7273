"""A recipe's model on one process, besides the one that is trained: random state, hooks, a copy, other rounding."""

from __future__ import annotations

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsshard.complex_params.slots import public_name
from fsshard.model.activation_checkpointing import checkpoint_blocks
from fsshard.model.unit_inputs import mark_unit_inputs
from fsshard.nested import tensors
from fsshard.parity.sketch import digest, real_view
from fsshard.parity.trace import NamedTensors, TensorItems
from fsshard.planning.plan import plan
from fsshard.recipes.recipe import Recipe, check_loss, seed_all
from fsshard.torch_private.dispatch import TorchDispatchMode, schema_of


def random_state() -> str:
    """Return a digest of the state of every global generator that a training on this rank could draw from."""
    python = repr(random.getstate())
    numpy = np.random.get_state(legacy=True)
    return digest([torch.get_rng_state(), *cuda_states(), python, numpy])


@contextlib.contextmanager
def kept_random_numbers() -> Iterator[None]:
    """Put every global generator back afterwards."""
    devices = []
    if torch.cuda.is_initialized():
        devices.append(torch.cuda.current_device())
    python = random.getstate()
    numpy = np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def cuda_states() -> list[Tensor]:
    """Return the state of the current device's generator, if CUDA is in use."""
    if torch.cuda.is_initialized():
        return [torch.cuda.get_rng_state()]
    return []


# ----------------------------------------------------------------------------------------------------- module outputs


# Module and digest of its output, in order of execution.
Outputs = list[tuple[str, str]]


class ForwardWatch:
    """Hooks that note each module's output; they stay with the modules when an engine takes them.

    Without ``outputs`` only which modules ran is recorded.
    """

    def __init__(self, model: nn.Module, *, outputs: bool = True) -> None:
        self._outputs = outputs
        self._on = False
        self._forwards: list[Outputs] = []
        for name, module in model.named_modules():
            module.register_forward_hook(self._recorder(public_name(name)))

    def _recorder(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        # A function, since copy.deepcopy of a module leaves it as it is: a method would be copied with the watch.
        def record(module: nn.Module, arguments: Any, output: Any) -> None:
            # A hook inside of a compiled unit becomes a part of its graph: the graph would break at each module, and
            # dynamo cannot follow the bytes of a tensor ("setStorage ... out of bounds", torch 2.13). So a compiled
            # unit is one module here. And no recomputation is recorded, which runs in the backward pass.
            if not torch.compiler.is_compiling() and self._on:
                text = digest(output, strict=False) if self._outputs else ""
                self._forwards[-1].append((name, text))

        return record

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Record outputs, within."""
        self._on = True
        self._forwards.append([])
        try:
            yield
        finally:
            self._on = False

    def take(self) -> Outputs:
        """Return the outputs since the last call."""
        outputs = []
        for forward in self._forwards:
            outputs += forward
        self._forwards = []
        return outputs

    def repeated(self) -> set[str]:
        """Return the modules that ran more than once in one forward, since the last :meth:`take`."""
        repeated = set()
        for forward in self._forwards:
            counts = Counter(name for name, _ in forward)
            for name, count in counts.items():
                if count > 1:
                    repeated.add(name)
        return repeated


def first_difference(expected: Sequence[Sequence[str]], got: Sequence[Sequence[str]]) -> str:
    """Return in words the first module of a forward that did otherwise; "" if none."""
    for (name, output), (other_name, other_output) in zip(expected, got, strict=False):
        if name != other_name:
            return f"module {other_name!r} ran where {name!r} does under the reference"
        if output != other_output:
            return f"the first module with a different output is {name!r}"
    if len(expected) == len(got):
        return ""
    # One is the beginning of the other, which goes on with this module.
    longer = max(expected, got, key=len)
    name = longer[min(len(expected), len(got))][0]
    runs = sum(module == name for module, _ in got)
    expected_runs = sum(module == name for module, _ in expected)
    return f"module {name!r} ran {runs} times, under the reference {expected_runs} times"


# ------------------------------------------------------------------------------------------------------- a bare copy


def built(recipe: Recipe, device: str, *, outputs: bool = True) -> tuple[nn.Module, ForwardWatch]:
    """Return the recipe's model from its seed, and a watch on its modules, with their outputs or without."""
    seed_all(recipe.seed)
    module = recipe.build()
    watch = ForwardWatch(module, outputs=outputs)
    return module.to(device), watch


@dataclass
class Draw:
    """Loss and gradients of one evaluation; ``drew``: whether it took random numbers."""

    loss: float
    gradients: NamedTensors
    drew: bool


class Shadow:
    """A second, bare copy of the model, with sums in the engines' order at the inputs of units."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        with kept_random_numbers():
            self.module, self.watch = built(recipe, device, outputs=False)
        self._recipe = recipe
        modules = {public_name(name): module for name, module in self.module.named_modules()}
        policy = recipe.settings.get("auto_wrap_policy", "auto")
        checkpoint_blocks(self.module, recipe.activation_checkpointing, auto_wrap_policy=policy)
        for name in plan(self.module, auto_wrap_policy=policy).unit_names:
            mark_unit_inputs(modules[public_name(name)])
        self._buffers: list[tuple[str, Tensor]] = []

    def load(
        self,
        weights: TensorItems,
        buffers: TensorItems,
    ) -> None:
        """Take over weights and buffers."""
        parameters = {public_name(name): parameter for name, parameter in self.module.named_parameters()}
        with torch.no_grad():
            for name, value in weights:
                parameters[name].copy_(value)
        self._buffers = [(name, buffer.detach().clone()) for name, buffer in buffers]

    def evaluate(
        self,
        batches: Callable[[], Sequence[Any]],
        after_each: Callable[[], None] = lambda: None,
    ) -> Draw:
        """Return loss and gradients of one step from the loaded weights and buffers; put random numbers back.

        ``batches`` makes them, anew for each evaluation, since a loss may change its batch in place.
        """
        modules = {public_name(name): module for name, module in self.module.named_modules()}
        for name, value in self._buffers:
            path, _, own = name.rpartition(".")
            # A module may be missing that is made in a forward still to come.
            if path in modules:
                # by assignment: a forward may have replaced a buffer by one of another shape
                modules[path]._buffers[own] = value.clone()
        self.module.zero_grad(set_to_none=True)
        self.watch.take()
        before = random_state()
        total = 0.0
        with kept_random_numbers():
            parts = batches()
            for batch in parts:
                with self.watch.forward():
                    loss = check_loss(self._recipe.loss(self.module, batch)) / len(parts)
                loss.backward()
                total += float(loss.detach())
                after_each()
            drew = random_state() != before
        return Draw(total, self._gradients(), drew)

    def moduli(self, batches: Callable[[], Sequence[Any]]) -> NamedTensors:
        """Return the sum over the batches of a step of |gradient|, element by element of the real view."""
        sums: NamedTensors = {}

        def collect() -> None:
            for name, gradient in self._gradients().items():
                sums[name] = sums.get(name, 0) + real_view(gradient).abs()
            self.module.zero_grad(set_to_none=True)

        self.evaluate(batches, collect)
        return sums

    def _gradients(self) -> NamedTensors:
        gradients = {}
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                gradients[public_name(name)] = parameter.grad.clone()
        return gradients


# -------------------------------------------------------------------------------------------------- other rounding


class perturbed(TorchDispatchMode):
    """Moves results of differentiated operations, within, by one unit in the last place, up or down at random."""

    # Each run of this kind is one draw of the rounding errors that other kernels may make (Monte Carlo arithmetic:
    # Parker, UCLA report CSD-970002, 1997; Denis, de Oliveira Castro and Petit, Verificarlo, ARITH 2016). Inputs of
    # sums are moved one by one, so the errors of adding in other orders are drawn with them.

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if _makes_new(func) and _differentiated((*args, *kwargs.values())):
            for tensor in tensors(out):
                if tensor.is_floating_point() or tensor.is_complex():
                    self._move(tensor)
        return out

    def _move(self, value: Tensor) -> None:
        real = real_view(value)
        step = torch.finfo(real.dtype).eps
        up = torch.empty(real.shape, dtype=real.dtype)
        up = up.bernoulli_(0.5, generator=self._generator).to(real.device)
        real.mul_(up.mul_(2 * step).add_(1 - step))


@functools.cache
def _makes_new(func: Any) -> bool:
    """Return whether an operation of torch's own returns memory that is none of its arguments'."""
    schema = schema_of(func)
    if func.namespace != "aten" or schema.is_mutable:
        return False
    return all(value.alias_info is None for value in schema.returns)


def _differentiated(arguments: Iterable[Any]) -> bool:
    """Return whether training differentiates an operation with these arguments."""
    # Others (positions, masks, indices computed in float) are left alone: rounding them otherwise may move an index,
    # which no kernel does that rounds correctly.
    # In forward a tensor requires a gradient; in backward nothing does, and nothing is recorded.
    backward = not torch.is_grad_enabled()
    for value in arguments:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, Tensor) and (backward or each.requires_grad):
                return True
    return False
