"""What changes where a mesh has more than one dimension?

:mod:`~fsshard.parallel.meshes` and :mod:`~fsshard.parallel.data_rank` tell the dimensions of data, whose ranks see
different samples, from the others. Along these, tensor, context and domain parallelism have divided the model before
it is wrapped: :mod:`~fsshard.parallel.model_mesh` finds them and what each parameter is along each;
:mod:`~fsshard.parallel.shared_gradients` adds up what their ranks know of the gradient of a parameter that they share;
:mod:`~fsshard.parallel.replicas` finds out whether what should be the same on several ranks is.
:mod:`~fsshard.parallel.domain` splits the fields that neural operators work on.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsshard.parallel.domain.sharding import shard_domain

__all__ = ["shard_domain"]

# For a type checker any name would be there.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "shard_domain":
            return import_module("fsshard.parallel.domain.sharding").shard_domain
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
