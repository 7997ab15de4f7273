"""The backward pass that is running: its id, its current node, callbacks at its end; and nodes and views."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import methodcaller
from typing import Any

from torch import Tensor

from fsshard.torch_private.registry import Area

AREA = Area("autograd", cpp="torch/csrc/autograd/init.cpp")
MODULE = "torch/csrc/Module.cpp"

current_graph_task_id: Callable[[], int] = AREA.take(
    "torch._C:_current_graph_task_id",
    source=MODULE,
    use="the number of the backward that this thread is in, -1 outside of any",
    otherwise="gradients cannot be reduced once per backward",
)
current_node: Callable[[], Any] = AREA.take(
    "torch._C:_current_autograd_node",
    source=MODULE,
    use="the node that a backward runs now: names a simulation's module",
    otherwise="memory of a backward is counted for no module",
    fallback=lambda: None,
)
will_execute: Callable[[Any], bool] = AREA.take(
    "torch._C:_will_engine_execute_node",
    source=MODULE,
    use="whether this backward reaches a node, so that a rank knows which gradients will not come",
    otherwise="gradients of a part of the graph cannot be told from late ones",
)
queue_callback: Callable[[Callable[[], None]], None] = AREA.take(
    "torch.autograd:Variable._execution_engine.queue_callback",
    source="torch/csrc/autograd/python_engine.cpp",
    use="calls a function when the backward under way has come to its end, as DDP and FSDP do",
    otherwise="nothing can be finished at the end of a backward",
)
keeps_graph: Callable[[], bool] = AREA.take(
    "torch._C:_autograd._get_current_graph_task_keep_graph",
    use="whether this backward was asked to keep the graph (create_graph, retain_graph)",
    otherwise="graphs are taken for kept: units of second derivatives stay gathered until the optimizer's step",
    fallback=lambda: True,
)
next_sequence_number: Callable[[], int] = AREA.take(
    "torch._C:_autograd._get_sequence_nr",
    use="the number that the next node of this thread gets: what a forward made has a higher one",
    otherwise="all nodes are taken for new ones, also those that a cache was made with",
    fallback=lambda: 0,
)
sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
AREA.attribute(
    "torch.autograd.graph:Node._sequence_nr",
    source="torch/csrc/autograd/python_cpp_function.cpp",
    use="the number of a node, see next_sequence_number",
    otherwise="AttributeError in forward: it cannot be known which outputs a forward has made",
)
run_first: Callable[[Any], None] = methodcaller("_set_sequence_nr", 2**64 - 1)
"""Let the engine of autograd run a node before all others that are ready, as it does what adds to a leaf's gradient."""
AREA.attribute(
    "torch._C:_functions.AccumulateGrad._set_sequence_nr",
    source="torch/csrc/autograd/python_cpp_function.cpp",
    use="lets the views of parameters pass on gradients as soon as they are there",
    otherwise="AttributeError in forward: engines would miss gradients of complex parameters",
)
saved_tensors_hooks: Callable[[bool], tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None] = AREA.take(
    "torch._C:_autograd._top_saved_tensors_default_hooks",
    use="the hooks on saved tensors that checkpointing has just put in place, to name the block in its errors",
    otherwise="errors of a recomputation do not name the block",
    fallback=lambda ignore_is_tracing: None,
)
functorch_transforms_active: Callable[[], bool] = AREA.take(
    "torch._C:_are_functorch_transforms_active",
    source=MODULE,
    use="whether a transform of torch.func runs, in which hooks and custom functions must do without",
    otherwise="torch.func over a wrapped model ends in an error of torch's",
    fallback=lambda: False,
)
is_functorch_wrapped: Callable[[Tensor], bool] = AREA.take(
    "torch._C:_functorch.is_functorch_wrapped_tensor",
    source="torch/csrc/functorch/init.cpp",
    use="whether a tensor is one of torch.func's, of which there is no lazy copy",
    otherwise="every tensor is taken for one, and copied at once",
    fallback=lambda tensor: True,
)
disable_functorch: Callable[[], AbstractContextManager[Any]] = AREA.take(
    "torch._C:_DisableFuncTorch",
    use="leaves the transforms of torch.func for a while, to reach what they wrap",
    otherwise="DDP cannot be called within torch.func",
)
