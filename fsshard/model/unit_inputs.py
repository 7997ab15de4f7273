"""Makes every backend add up the gradients of unit inputs in the same order, that of FSDP2.

FSDP2 passes the differentiable inputs of a unit through one autograd node, to learn when the unit's backward is done.
A tensor that enters several units (T5: the encoder's output, read by every decoder block) then collects its gradient
unit by unit, where plain autograd adds the contributions one after the other: the same terms, associated otherwise, and
other last bits (torch 2.13; a tiny T5 differs by 2e-8 in its first gradients). The other backends put the same kind of
node at the same places, so that every engine adds in FSDP2's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fsshard.nested import map_containers
from fsshard.torch_private.autograd import functorch_transforms_active

Tensors = tuple[Tensor, ...]


class _UnitInputs(torch.autograd.Function):
    """The identity on several tensors, as one node: gradients pass when all of them have arrived."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensors:
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensors:
        return gradients


class _TransformedUnitInputs(_UnitInputs):
    """Does what :class:`_UnitInputs` does, for torch.func and forward_ad."""

    # Apart, since torch binds its arguments slowly. Without it: "it must override the setup_context staticmethod", "You
    # must implement the jvp function" (torch 2.13).

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Tensor) -> Tensors:
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        views = []
        for tangent in tangents:
            views.append(None if tangent is None else tangent.view_as(tangent))
        return tuple(views)


def _passed(tensors: Sequence[Tensor]) -> Tensors:
    """Pass ``tensors`` through one node."""
    node = _UnitInputs
    if any(_is_dual(tensor) for tensor in tensors) or functorch_transforms_active():
        node = _TransformedUnitInputs
    outputs: Tensors = node.apply(*tensors)
    return outputs


def _is_dual(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _takes_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def is_write_to_unit_input(message: str) -> bool:
    """Return whether torch says in ``message`` that what has entered a unit is changed in place."""
    return "_UnitInputs" in message


def _aliased(tensor: Tensor) -> Tensor:
    """Return what ``_UnitInputs`` makes of one tensor, by a node of torch's own, in less than half of the time."""
    if torch.compiler.is_compiling():
        return _UnitInputs.apply(tensor)[0]  # type: ignore[no-any-return]
    return tensor[...]


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def without_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the arguments with aliases in place of leaves of autograd that take a gradient."""

    def alias(value: Any) -> Any:
        if _takes_gradient(value) and value.is_leaf:
            return _aliased(value)
        return value

    aliases: Arguments = map_containers(alias, (args, kwargs), "fsdp2")
    return aliases


def mark_unit_inputs(unit: nn.Module) -> None:
    """Send the differentiable inputs of ``unit`` through one autograd node from now on."""
    unit.register_forward_pre_hook(_through_node, prepend=True, with_kwargs=True)


_NUMBERS = frozenset({type(None), bool, int, float, str})
_LEAVES = _NUMBERS | {Tensor, nn.Parameter}


def _through_node_flat(args: Any, kwargs: Any) -> Any:
    """Do the same for what most units are called with, without a traversal, which would take longer than the node."""
    tensors = [value for value in (*args, *kwargs.values()) if _takes_gradient(value)]
    if not tensors:
        return None
    passed = iter(_passed(tensors))
    new_args = []
    for value in args:
        new_args.append(next(passed) if _takes_gradient(value) else value)
    new_kwargs = {}
    for name, value in kwargs.items():
        new_kwargs[name] = next(passed) if _takes_gradient(value) else value
    return tuple(new_args), new_kwargs


def _through_node(module: nn.Module, args: Any, kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return None
    has_numbers_only = _NUMBERS.issuperset(map(type, kwargs.values()))
    if len(args) == 1 and type(args[0]) is Tensor and has_numbers_only:
        if not args[0].requires_grad:
            return None
        # As _aliased() does, in a third of the calls: this is for each unit and forward.
        alias = _aliased(args[0]) if torch.compiler.is_dynamo_compiling() else args[0][...]
        return ((alias,), kwargs)
    if _LEAVES.issuperset(map(type, args)) and _LEAVES.issuperset(map(type, kwargs.values())):
        return _through_node_flat(args, kwargs)
    # FSDP2's containers, so that the same ones are kept and the same ones are rebuilt under every backend.
    tensors = []

    def take(leaf: Any) -> Any:
        if _takes_gradient(leaf):
            tensors.append(leaf)
        return leaf

    def replace(leaf: Any) -> Any:
        return next(passed) if _takes_gradient(leaf) else leaf

    map_containers(take, (args, kwargs), "fsdp2")
    if not tensors:
        return None
    passed = iter(_passed(tensors))
    return map_containers(replace, (args, kwargs), "fsdp2")
