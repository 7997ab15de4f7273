"""Describe a backend in data, for rooms that must not know which backend it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fsshard.backends.step_state import TRANSITIONS, Transitions
from fsshard.planning.plan import Plan

# Methods by which models of neuraloperator and transformers read and write themselves, on one rank as a rule: on
# shards they write half of the numbers under FSDP1, without an error, and wait forever under FSDP2.
OWN_FILES = frozenset({"load_checkpoint", "push_to_hub", "save_checkpoint", "save_pretrained"})


@dataclass(frozen=True, kw_only=True)
class Joining:
    """The option by which small units travel together.

    Attributes:
        option: its name; of the value 0 nothing is joined.
        value: what is worth trying.
        travelling: (plan, value, ranks) -> names of the units that travel by themselves then.
    """

    option: str
    value: int
    travelling: Callable[[Plan, int, int], Collection[str]]


@dataclass(frozen=True, kw_only=True)
class Tunable:
    """The settings that ``tune`` may try under the backend, besides units and recomputation.

    Attributes:
        variants: name -> options that are always tried besides the defaults. Of backends that divide no parameters.
        kept_gathered: options with which units stay gathered from the forward to the backward; none: it has no such.
        root_stays: whether the root unit does so by itself, so that they say nothing where it is the only unit.
        joining: how small units travel together; None: it has no such option.
    """

    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    kept_gathered: Mapping[str, Any] = field(default_factory=dict)
    root_stays: bool = False
    joining: Joining | None = None


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """The facts that are known of an engine without running it.

    Attributes:
        divides: what ranks divide among them. ``"nothing"``: replicas. ``"elements"``: those of each parameter, its
            gradient and optimizer state; 0-dim parameters are stored as vectors ("fully_shard doesn't support scalar
            parameters"), gradients cannot be sparse ("reshape is not implemented for sparse tensors"), and a forward's
            graph has gathered tensors in it, not the parameters (torch 2.13). ``"owners"``: each parameter has one rank
            that keeps its gradient and optimizer state, with an optimizer of the engine's own.
        strategies: what ``sharding_strategy=`` may be.
        option_names: of ``wrap``'s further arguments those that are the engine's.
        one_process: a job of its own on one process; several ranks are trained as one.
        is_reference: it adds as torch itself does: parity may hold others against it.
        gathers_narrower: it can gather weights in another dtype than they compute in.
        stores_contiguous: it holds contiguous parameters only, or permutes others.
        marks_unit_inputs: it puts an autograd node at the inputs of each unit by itself.
        hooks_outputs: it learns of a backward by the outputs of the forward.
        adds_in_tree: gradients are added up over ranks in the order of :mod:`fsshard.comm.tree`.
        has_dtensors: parts are DTensors, which torch.distributed.checkpoint knows.
        shards_integers: it divides integer parameters, too.
        keeps_grad_dtype: gradients of real parameters have the dtype that ``Tensor.grad_dtype`` asks for.
        needs_whole: methods of users' models that cannot work on parts.
        transitions: the passes through a graph that it allows in each stage of a step.
        wrapper_classes: names of the classes of modules that it has wrapped already.
        tunable: what a search may try.
    """

    divides: Literal["nothing", "elements", "owners"] = "nothing"
    strategies: tuple[str, ...] = ()
    option_names: tuple[str, ...] = ()
    one_process: bool = False
    is_reference: bool = False
    gathers_narrower: bool = False
    stores_contiguous: bool = False
    marks_unit_inputs: bool = False
    hooks_outputs: bool = False
    adds_in_tree: bool = False
    has_dtensors: bool = False
    shards_integers: bool = False
    keeps_grad_dtype: bool = False
    needs_whole: frozenset[str] = frozenset()
    transitions: Transitions = field(default_factory=lambda: TRANSITIONS)
    wrapper_classes: frozenset[str] = frozenset()
    tunable: Tunable = Tunable()
