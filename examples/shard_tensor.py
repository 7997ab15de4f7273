"""PhysicsNeMo's ShardTensor under every engine: a field divided over ranks, its model by fsshard.wrap over the others.

    pip install nvidia-physicsnemo
    python examples/shard_tensor.py                          # 2 x 2 ranks, four engines, losses beside one process's

PhysicsNeMo divides the *input*: each pair of ranks has the two halves of the same pictures, and its operations exchange
borders and sum what they reduce. The model's parameters stay plain, or become DTensors by ``distribute_module``, as in
PhysicsNeMo's tutorial on ShardTensor and FSDP, whose network this is. ``wrap`` gets the other mesh dimension, "data".

PhysicsNeMo 2.2 is written for GPUs. Where there is none, :func:`prepare` mends what stops it or is silently wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a script from anywhere

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsshard

ENGINES = ("fsdp2", "fsdp", "ddp", "fairscale")
BATCH, HEIGHT, WIDTH, CLASSES = 4, 16, 32, 10


class SimpleCNN(nn.Module):
    """The tutorial's: a convolution, whose borders are exchanged, and a mean over space, which is summed over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, kernel_size=3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(torch.relu(self.conv(x))), 1))


def prepare() -> None:
    """Import PhysicsNeMo; without a GPU, mend what in version 2.2.2 needs one. Once per process."""
    if not torch.cuda.is_available():
        _declare_torchvision()
    import physicsnemo.domain_parallel as domain_parallel
    from physicsnemo.domain_parallel import shard_tensor

    if not torch.cuda.is_available():
        # Without it a convolution of a ShardTensor has the wrong shape, and says nothing.
        domain_parallel.register_custom_ops()
    shard_tensor.dataclasses = _Dataclasses()


def _declare_torchvision() -> None:
    """PyPI's torchvision is built for CUDA: "operator torchvision::nms does not exist" beside a torch for the CPU."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return
    source = (Path(found.origin).parent / "_meta_registrations.py").read_text()
    names = {*re.findall(r'register_fake\("torchvision::(\w+)"\)', source)}
    names |= {*re.findall(r'register_meta\("(\w+)"', source)}
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in sorted(names):
        library.define(f"{name}(Tensor a) -> Tensor")
    _kept.append(library)


_kept: list[Any] = []
"""Keeps the declarations alive: they are forgotten with their library."""


class _Dataclasses:
    """torch 2.13 compares shard_order with the placements: "placement[0] doesn't have a matching shard in shard_order"
    in the backward of AdaptiveAvgPool2d, since PhysicsNeMo 2.2.2 replaces one and keeps the other."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dataclasses, name)

    @staticmethod
    def replace(value: Any, **changes: Any) -> Any:
        if "placements" in changes and hasattr(value, "shard_order"):
            changes.setdefault("shard_order", None)
        return dataclasses.replace(value, **changes)


def divided(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Pictures whose rows are divided over the ranks of ``mesh``, as a ShardTensor."""
    from physicsnemo.domain_parallel import ShardTensor
    from torch.distributed.tensor import Shard

    part = whole.chunk(mesh.size(), dim=2)[mesh.get_local_rank()].contiguous()
    return ShardTensor.from_local(
        part, device_mesh=mesh, placements=(Shard(2),), sharding_shapes="chunk", global_shape=whole.shape
    )


def everywhere(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return what all ranks of ``mesh`` have whole, as a ShardTensor."""
    from physicsnemo.domain_parallel import ShardTensor
    from torch.distributed.tensor import Replicate

    return ShardTensor.from_local(
        whole, device_mesh=mesh, placements=(Replicate(),), sharding_shapes="chunk", global_shape=whole.shape
    )


def samples(groups: int, steps: int) -> tuple[Tensor, Tensor]:
    """Pictures (steps, groups x BATCH, 3, HEIGHT, WIDTH) and their classes, the same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    pictures = torch.randn(steps, groups * BATCH, 3, HEIGHT, WIDTH, generator=generator)
    return pictures, torch.randint(0, CLASSES, (steps, groups * BATCH), generator=generator)


def serial(groups: int, steps: int) -> list[float]:
    """Losses of one process with the whole batch: torch alone."""
    torch.manual_seed(0)
    model = SimpleCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for pictures, classes in zip(*samples(groups, steps), strict=True):
        loss = nn.functional.cross_entropy(model(pictures), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(mesh: DeviceMesh, device: torch.device, backend: str, steps: int, distribute: bool) -> list[float]:
    """The same training on a mesh ("data", "spatial"): its losses, those of the whole batch."""
    from torch.distributed.tensor import distribute_module

    torch.manual_seed(0)
    model: nn.Module = SimpleCNN().to(device)
    if distribute:
        model = distribute_module(model, mesh["spatial"])  # DTensors speak for themselves
        model = fsshard.wrap(model, backend=backend, device_mesh=mesh["data"])
    else:  # no parameter has a part of its gradient only: ShardTensor sums what its ranks have
        model = fsshard.wrap(model, backend=backend, device_mesh=mesh["data"], replicated={(): mesh["spatial"]})
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    data = fsshard.data_rank(mesh)
    losses = []
    for pictures, classes in zip(*samples(data.size, steps), strict=True):
        x = divided(pictures.chunk(data.size)[data.rank].to(device), mesh["spatial"])
        y = everywhere(classes.chunk(data.size)[data.rank].to(device), mesh["spatial"])
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        whole = loss.detach().full_tensor().double().clone()  # type: ignore[operator]
        dist.all_reduce(whole, group=mesh["data"].get_group())
        losses.append(whole.item() / data.size)
    return losses


def compare(ctx: fsshard.Context, args: argparse.Namespace) -> None:
    """Compare on one rank; every rank calls it."""
    prepare()
    sizes = (ctx.world_size // args.spatial, args.spatial)
    mesh = init_device_mesh(ctx.device.type, sizes, mesh_dim_names=("data", "spatial"))
    alone = serial(sizes[0], args.steps)
    if not ctx.rank:
        print(f"one process: {', '.join(f'{loss:.6f}' for loss in alone)}")
    for backend in args.backend:
        for distribute in (False, True):
            losses = train(mesh, ctx.device, backend, args.steps, distribute)
            worst = max(abs(one - other) for one, other in zip(losses, alone, strict=True))
            how = "distribute_module" if distribute else "plain parameters"
            if not ctx.rank:
                print(f"{backend:10} {how:18} largest difference from one process {worst:.1e}", flush=True)
            if worst > args.bound:
                raise SystemExit(f"{backend}, {how}: {losses} and one process {alone}")


def main() -> None:
    """Read the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--nprocs", type=int, default=4)
    parser.add_argument("--spatial", type=int, default=2, help="ranks that share a picture")
    parser.add_argument("--steps", type=int, default=3)
    # Eight times the spacing of float32 numbers between 2 and 4, where the losses are.
    parser.add_argument("--bound", type=float, default=2e-6, help="the largest difference of a loss that is no failure")
    args = parser.parse_args()
    if importlib.util.find_spec("physicsnemo") is None:
        raise SystemExit("this example needs PhysicsNeMo: pip install nvidia-physicsnemo")
    fsshard.launch(compare, nprocs=args.nprocs, args=(args,))


if __name__ == "__main__":
    main()
