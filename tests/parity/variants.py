"""What the rows of the parity matrix do to recipes: other losses, batches and builds, by functions that ranks find."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import fsshard
from fsshard import recipes
from fsshard.model import host_copies
from fsshard.model.host_copies import offloading_to
from fsshard.nested import leaves
from fsshard.parity.one_process import kept_random_numbers
from fsshard.parity.sketch import real_view
from fsshard.recipes import models
from fsshard.recipes.recipe import Recipe
from tests.models import Spectral

# ------------------------------------------------------------------------------------------------ models


def burgers() -> Recipe:
    """A network with a complex layer solves Burgers' equation: its loss holds first and second derivatives."""
    return Recipe(build=burgers_model, batches=points_in_time, loss=burgers_error, hyper={"lr": 1e-2})


def burgers_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), Spectral(6), nn.Tanh(), nn.Linear(6, 2))


def points_in_time(rank: int, world_size: int, number: int) -> Tensor:
    """Points (4, 2): place from -1 to 1, and time."""
    generator = torch.Generator().manual_seed(1_000_003 * (rank + 1) + number)
    return 2 * torch.rand(4, 2, generator=generator) - 1


def burgers_error(model: Any, points: Tensor) -> Tensor:
    """Mean square of u_t + u u_x - 0.01 u_xx, and of the distance to -sin(pi x), from where it begins."""
    derivative = functools.partial(torch.autograd.grad, create_graph=True)
    with torch.enable_grad():  # in an evaluation, too
        x = points.detach().requires_grad_()
        u = model(x).sum(1)
        (first,) = derivative(u.sum(), x)
        (second,) = derivative(first[:, 0].sum(), x)
        residual = first[:, 1] + u * first[:, 0] - 0.01 * second[:, 0]
        return residual.square().mean() + (u + (torch.pi * points[:, 0]).sin()).square().mean()


def distilled() -> Recipe:
    """Two models: a perceptron learns what another one, frozen and wrapped as it is, makes of its samples."""
    return replace(recipes.mlp(), loss=taught_error)


def taught_error(model: Any, batch: Any) -> Tensor:
    """Mean squared distance to the teacher."""
    with torch.no_grad():
        taught = teacher_of(model)(batch["x"])
    return nn.functional.mse_loss(model(batch["x"]), taught)


def teacher_of(model: Any) -> Any:
    """Return the teacher, made before the first step; on each rank and for each student with the same weights."""
    if "teacher" not in vars(model):
        with kept_random_numbers():
            torch.manual_seed(7)
            teacher = models.ComplexMLP().requires_grad_(False)
        shards = isinstance(model, fsshard.ShardedModule)
        vars(model)["teacher"] = fsshard.wrap(teacher, backend=model.backend.name) if shards else teacher
    return vars(model)["teacher"]


def t5() -> Recipe:
    """The recipe's T5, which writes a word for each sample before it is trained on it."""
    recipe = recipes.t5()
    return replace(recipe, loss=functools.partial(written_loss, recipe.loss))


def written_loss(loss: Callable[[Any, Any], Tensor], model: Any, batch: Any) -> Tensor:
    """Tell in the loss what ``generate`` wrote: its letters are the digits of a number, which has no gradient."""
    words = model.generate(batch["input_ids"], do_sample=False, min_new_tokens=5, max_new_tokens=5)
    digits = 32.0 ** -torch.arange(words.shape[1], dtype=torch.float64)
    return loss(model, batch) + (words.double() @ digits).mean()


# ------------------------------------------------------------------------------------------------ variants


def two_groups(lr: float, names: list[str]) -> list[dict[str, Any]]:
    """Every second parameter with another learning rate and another weight decay."""
    return [{"params": names[::2]}, {"params": names[1::2], "lr": lr / 3, "weight_decay": 0.05}]


def build_frozen(build: Callable[[], nn.Module]) -> nn.Module:
    """The model with its first third of parameters frozen."""
    model = build()
    parameters = list(model.parameters())
    for parameter in parameters[: max(1, len(parameters) // 3)]:
        parameter.requires_grad_(False)
    return model


def build_adapted(build: Callable[[], nn.Module]) -> nn.Module:
    """The model with adapters; all else is frozen.

    Left out: T5's embeddings, which are shared, and those of ViT, whose dtype the forward of another unit asks for.
    """
    return fsshard.lora(build(), rank=2, target="^(?!.*(shared|embed|lm_head))")


def build_offloaded(build: Callable[[], nn.Module], blocks: object) -> nn.Module:
    """The model with blocks whose activations leave; ``wrap`` would refuse to offload on a CPU device."""
    model = build()
    fsshard.checkpoint_blocks(model, fsshard.Checkpointing(blocks, offload_to_cpu=True, recompute=False))
    return model


def offloaded_loss(loss: Callable[[Any, Any], Tensor], model: Any, batch: Any) -> Tensor:
    """Let the CPU stand for a device from which activations leave, of whatever size."""
    with offloading_to("cpu:0"), mock.patch.object(host_copies, "LEAST", 1):
        return loss(model, batch)


class OwnBatch(NamedTuple):
    """A rank's batch in a training within ``fsshard.join``.

    Attributes:
        counts: False where the rank's batches have ended, and this is its last one again.
        share: what its loss counts for in the mean over all ranks, since only those that go on count.
    """

    samples: Any
    counts: bool
    share: float


def batches_that_end(batches: Callable[[int, int, int], Any], rank: int, world_size: int, number: int) -> OwnBatch:
    """Give every second rank, from the first on, one batch only.

    Then half of the ranks go on, and the weight of their gradients is 2, which rounds nothing.
    """
    ended = world_size > 1 and rank % 2 == 0 and number > 0
    share = 1.0 if world_size == 1 or number == 0 else 0.0 if ended else 2.0
    return OwnBatch(batches(rank, world_size, 0 if ended else number), not ended, share)


def join_those_that_count(recipe: Recipe, batches: Sequence[OwnBatch]) -> OwnBatch:
    """Make one batch of the ranks that go on, for one process."""
    return OwnBatch(recipe.joined([batch.samples for batch in batches if batch.counts]), True, 1.0)


def joined_loss(loss: Callable[[Any, Any], Tensor], model: Any, batch: OwnBatch) -> Tensor:
    """Train within ``fsshard.join`` where the model is wrapped: that weighs the gradients. Else by the share."""
    if not isinstance(model, fsshard.ShardedModule):
        return loss(model, batch.samples) * batch.share
    if "rounds" not in vars(model):  # the loop is recipe's, so its rounds are begun one by one
        joined = fsshard.join(model).__enter__()
        mine = 1 if dist.get_world_size() > 1 and dist.get_rank() % 2 == 0 else 99
        vars(model)["rounds"] = joined(range(mine))
    next(vars(model)["rounds"])
    own = loss(model, batch.samples)
    return own + own.detach() * (batch.share - 1.0)  # what is told is the mean over those that go on


def checkpointed(recipe: Recipe) -> object:
    """Which blocks are recomputed: the plan's units, or, in models that have none, the blocks that they are made of."""
    blocks = {"convnet": models.ConvBlock, "dropout": models.DropoutBlock}
    block = blocks.get(recipe.name.partition("-")[0])
    return True if block is None else {block}


def averaged_loss(loss: Callable[[Any, Any], Tensor], model: Any, batch: Any) -> Tensor:
    """Let an average follow the weights, evaluate the model with it, and tell both in the loss, without a gradient."""
    shards = isinstance(model, fsshard.ShardedModule)
    kind = fsshard.EMA if shards else BareAverage
    if "ema" not in vars(model):
        vars(model)["ema"] = kind(model, decay=0.75)
    ema = vars(model)["ema"]
    # Once a step: a process that takes the batches of several ranks one by one asks for several losses.
    weights = float(checksum(model.state_dict()))
    if vars(model).get("averaged") != weights:
        vars(model)["averaged"] = weights
        ema.update()
    # Not without gradients where a model has no engine: bounds are measured by rounding what is differentiated
    # otherwise, and all that runs without gradients, as a backward does: also distances that select neighbours.
    with ema.swapped(), torch.set_grad_enabled(not shards):
        model.eval()
        told = loss(model, batch).detach() + checksum(model.state_dict())
        model.train()
    return loss(model, batch) + told


def checksum(tensors: Mapping[str, Any]) -> Tensor:
    """Return a number that shows the last bit of any element: a weighted mean, in float64."""
    found = torch.zeros((), dtype=torch.float64)
    for place, value in enumerate(value for value in tensors.values() if isinstance(value, Tensor)):
        flat = real_view(value.detach()).double().flatten()
        found += (flat * (torch.arange(len(flat), dtype=torch.float64) + place).cos()).mean() / len(tensors)
    return found


class BareAverage:
    """torch's average of a model without an engine.

    A copy that takes over the weights of each step is evaluated several times in it: weights count once.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.weights = [parameter.data for parameter in model.parameters()]
        self.model, self.average = model, get_ema_multi_avg_fn(decay)
        self.averages = self.latest = [weight.clone() for weight in self.weights]

    def update(self) -> None:
        """Let the weights have their part, if they are others than those of the last update."""
        if all(map(torch.equal, self.weights, self.latest)):
            return
        self.averages, self.latest = [each.clone() for each in self.averages], [each.clone() for each in self.weights]
        self.average(self.averages, self.latest, 1)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Context in which the model has the average as its weights."""
        for parameter, average in zip(self.model.parameters(), self.averages, strict=True):
            parameter.data = average
        yield
        for parameter, weight in zip(self.model.parameters(), self.weights, strict=True):
            parameter.data = weight


def loss_over_tokens(loss: Callable[[Any, Any], Tensor], model: Any, batch: Any) -> Tensor:
    """Let each rank have as many tokens as its number says, and train on the mean over all of them."""
    tokens = dist.get_rank() + 1
    ranks = dist.get_world_size()
    factor = ranks / sum(range(1, ranks + 1))
    if isinstance(model, fsshard.ShardedModule):
        factor = model.mean_factor(tokens)
    return loss(model, batch) * tokens * factor


def balanced_loss(loss: Callable[[Any, Any], Tensor], model: Any, batch: Any) -> Tensor:
    """Add the mean square of the outputs, weighted so that its gradient, averaged over the ranks, is as long."""
    outputs = []
    hook = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    first = loss(model, batch)
    hook.remove()
    found = [leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    second = torch.stack([leaf.square().mean() for leaf in found]).sum()
    terms, shards = [first, second], isinstance(model, fsshard.ShardedModule)
    norms = model.term_gradients(terms).norms if shards else torch.stack([norm_by_hand(model, term) for term in terms])
    return first + second * (norms[0] / norms[1])


def norm_by_hand(model: nn.Module, term: Tensor) -> Tensor:
    """Return the norm of a term's gradient, averaged over the ranks. Collective."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(term, trained, retain_graph=True, materialize_grads=True)
    whole = torch.cat([real_view(gradient).flatten() for gradient in found])
    dist.all_reduce(whole)
    return (whole / dist.get_world_size()).norm()
