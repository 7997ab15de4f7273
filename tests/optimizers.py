"""Optimizers as users write them, and training without fsshard that judges them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import fsshard
from tests.parity.bare import average as average
from tests.training_runs import differences


def steps(loss_of: Callable[[Any, int], Tensor], model: Any, optimizer: Any, numbers: range, bare: bool = False) -> Any:
    """Train by losses with these numbers, and return them; ``bare``: a replica, whose gradients are averaged here."""
    losses = []
    for number in numbers:
        model.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        if bare:
            average(model)
        optimizer.step()
        if getattr(optimizer, "beside", None) is not None:
            optimizer.beside.step()
        losses.append(loss.item())
    return losses


def saved_state(model: Any, optimizer: Any) -> list[Any]:
    """Of the model and of the optimizer. Tensors are loaded before the rest: keys have another order then."""
    whole = optimizer.state_dict()
    state = {name: dict(sorted(each.items())) for name, each in whole["state"].items()}
    return copy.deepcopy([dict(model.state_dict()), {**whole, "state": state}])


def load_each_way(build: Callable[[], tuple[Any, Any]], train: Any, folder: str, saved: Any) -> tuple[list[str], Any]:
    """Return what differs after loading by each way, and what training from there on tells."""
    wrong, after = list[str](), []
    for way in ("file", "dict"):
        model, optimizer = build()
        if way == "file":
            fsshard.load(folder, model, optimizer)
        else:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        wrong += differences(saved, saved_state(model, optimizer), way)
        after.append(train(model, optimizer))
    return wrong + list(differences(*after)), after[0]


class Written(Optimizer):
    """``p -= lr * direction(p)`` for every parameter with a gradient."""

    def __init__(self, params: Any, lr: float = 0.05, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, parameter in self.graded():
            parameter.add_(self.direction(group, parameter), alpha=-group["lr"])
        return loss

    def graded(self) -> Iterator[tuple[dict[str, Any], Any]]:
        return ((g, p) for g in self.param_groups for p in g["params"] if p.grad is not None)

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        raise NotImplementedError


class MyMuon(Written):
    """Orthogonalises matrices; vectors as SGD does."""

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        momentum.mul_(0.9).add_(parameter.grad)
        if parameter.dim() != 2:
            return momentum
        u, _, v = torch.linalg.svd(momentum, full_matrices=False)
        return u @ v


class Shampoo(Written):
    """Shampoo of order 2 (arXiv 1802.09568), for real and complex matrices: roots of sums of G G^H and G^H G.

    Filters are matrices of the first dim by the others; vectors, and groups without ``matrices``, are stepped as SGD
    with momentum steps them.
    """

    def __init__(
        self, params: Any, lr: float = 0.05, momentum: float = 0.9, every: int = 2, matrices: bool = True
    ) -> None:
        super().__init__(params, lr, momentum=momentum, every=every, matrices=matrices)

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        if not state:
            state["step"], state["momentum"] = 0, torch.zeros_like(gradient)
        state["momentum"].mul_(group["momentum"]).add_(gradient)
        if parameter.dim() < 2 or not group["matrices"]:
            return state["momentum"]
        matrix, smoothed = (each.reshape(len(gradient), -1) for each in (gradient, state["momentum"]))
        for side, product in (("left", matrix @ matrix.mH), ("right", matrix.mH @ matrix)):
            state[side] = state.get(side, 1e-2 * torch.eye(len(product), dtype=matrix.dtype)) + product
            if state["step"] % group["every"] == 0:
                values, vectors = torch.linalg.eigh(state[side])
                state[side + "_root"] = (vectors * values.clamp(min=1e-6) ** -0.25) @ vectors.mH
        state["step"] += 1
        return (state["left_root"] @ smoothed @ state["right_root"]).reshape(gradient.shape)


class SOAP(Written):
    """Adam in the eigenbasis of Shampoo's factors (arXiv 2409.11321), for real and complex matrices."""

    def __init__(self, params: Any, lr: float = 0.01, betas: Any = (0.9, 0.95), every: int = 2) -> None:
        super().__init__(params, lr, betas=betas, every=every)

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        state, gradient, (first, second) = self.state[parameter], parameter.grad, group["betas"]
        matrix = gradient.reshape(len(gradient), -1) if gradient.dim() > 1 else gradient.reshape(1, -1)
        if not state:
            state["step"], state["mean"] = 0, torch.zeros_like(matrix)
            state["square"] = torch.zeros_like(matrix.abs())
        if parameter.dim() > 1:
            self.learn_bases(state, matrix, second, state["step"] % group["every"] == 0)
        state["step"] += 1
        state["mean"].lerp_(matrix, 1 - first)
        state["square"].lerp_(self.turned(state, matrix).abs().square(), 1 - second)
        mean = self.turned(state, state["mean"]) / (1 - first ** state["step"])
        size = (state["square"] / (1 - second ** state["step"])).sqrt() + 1e-8
        found = mean / size
        if parameter.dim() > 1:
            found = state["left_basis"] @ found @ state["right_basis"].mH
        return found.reshape(gradient.shape)

    def learn_bases(self, state: dict[str, Any], matrix: Tensor, beta: float, renew: bool) -> None:
        """The bases begin with eigenvectors, and follow by a step of orthogonal iteration."""
        for side, product in (("left", matrix @ matrix.mH), ("right", matrix.mH @ matrix)):
            began = side in state
            state[side] = state[side].lerp(product, 1 - beta) if began else product
            if not began:
                state[side + "_basis"] = torch.linalg.eigh(state[side])[1]
            elif renew:
                state[side + "_basis"] = torch.linalg.qr(state[side] @ state[side + "_basis"])[0]

    def turned(self, state: dict[str, Any], matrix: Tensor) -> Tensor:
        return state["left_basis"].mH @ matrix @ state["right_basis"] if "left" in state else matrix


class MyLars(Written):
    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        return parameter.grad * (parameter.norm() / parameter.grad.norm() * 0.1)


class Rowwise(Written):
    """Divides by a mean over each row, as row-factored algorithms do."""

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        if parameter.dim() < 2:
            return parameter.grad
        return parameter.grad / (parameter.grad.abs().square().mean(-1, keepdim=True).sqrt() + 1e-9)


class LargeOnly(Written):
    """Factors large matrices only, as transformers' and others' do."""

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        large = parameter.dim() >= 2 and min(parameter.shape[-2:]) >= 128
        return parameter.grad / parameter.grad.abs().mean() if large else parameter.grad


class ClipsInside(Written):
    """Divides by the norm over all gradients where that is large."""

    def step(self, closure: Any = None) -> Any:
        norms = [p.grad.norm() for _, p in self.graded()]
        self.factor = min(1.0, 0.5 / float(torch.stack(norms).norm())) if norms else 1.0
        return super().step(closure)

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        return parameter.grad * self.factor


class Noisy(Written):
    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        return parameter.grad + torch.randn_like(parameter)


class MyLion(Written):
    """Number by number, with momentum and weight decay."""

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        momentum.mul_(0.9).add_(parameter.grad, alpha=0.1)
        return momentum.sgn() + 0.1 * parameter.detach()


class InSingle(Written):
    """Number by number, in float32 whatever comes, by functions that kernels round in several ways."""

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        size = parameter.grad.abs().float().pow(0.7).clamp(max=50).exp().log1p().sin()
        return size.to(parameter.dtype)


class InBlocks(Written):
    """A momentum in 8 bits, with one scale for each block of numbers, as 8-bit Adam keeps it."""

    def __init__(self, params: Any, lr: float = 0.05, block: int = 256) -> None:
        super().__init__(params, lr, block=block)

    def direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        state = self.state[parameter]
        momentum = torch.zeros_like(parameter)
        if state:
            momentum = (state["bits"] * state["scales"]).view(-1)[: momentum.numel() * (1 + parameter.is_complex())]
            momentum = torch.view_as_complex(momentum.view(-1, 2)) if parameter.is_complex() else momentum
            momentum = momentum.view_as(parameter)
        momentum.mul_(0.9).add_(parameter.grad)
        numbers = (torch.view_as_real(momentum) if parameter.is_complex() else momentum).flatten()
        blocks = nn.functional.pad(numbers, (0, -len(numbers) % group["block"])).view(-1, group["block"])
        state["scales"] = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        state["bits"] = (blocks / state["scales"]).round().to(torch.int8)
        return momentum


class NeedsGpu(Written):
    def step(self, closure: Any = None) -> Any:
        if not any(p.is_cuda for _, p in self.graded()):
            raise RuntimeError("no kernel for CPU tensors")


class SignAscent(Optimizer):
    """SAM with the sign of the gradient: number by number, and calls the closure twice.

    ``how``: "copy" writes the old weights back in place, "data" by ``p.data = ...``, as the best-known SAM does.
    """

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.05, how: str = "copy") -> None:
        super().__init__(params, {"lr": lr, "rho": rho, "how": how})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        graded = [(g, p, p.clone()) for g in self.param_groups for p in g["params"] if p.grad is not None]
        for group, parameter, _ in graded:
            parameter.add_(parameter.grad.sgn(), alpha=group["rho"])
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for group, parameter, before in graded:
            if group["how"] == "data":
                parameter.data = before
            else:
                parameter.copy_(before)
            parameter.add_(parameter.grad, alpha=-group["lr"])
        return loss


class AscentFirst(SignAscent):
    """The same over the gradients that are there, with one call of the closure, and with an optimizer inside."""

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, lr, rho)
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        graded = [(g, p, p.clone()) for g in self.param_groups for p in g["params"] if p.grad is not None]
        for group, parameter, _ in graded:
            parameter.add_(parameter.grad.sgn(), alpha=group["rho"])
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for _, parameter, before in graded:
            parameter.data = before
        self.base.step()
        return loss


class Sam(Optimizer):
    """Ascends along the gradient divided by its norm over all parameters."""

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        graded = [(g, p, p.clone()) for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for _, p, _ in graded]).norm()
        for group, parameter, _ in graded:
            parameter.add_(parameter.grad * (group["rho"] / norm))
        with torch.enable_grad():
            closure()
        for group, parameter, before in graded:
            parameter.copy_(before)
            parameter.add_(parameter.grad, alpha=-group["lr"])
        return loss


class Blocked(Optimizer):
    """Keeps views from its constructor, as DistributedShampoo does: blocks of parameters, and of their momentum."""

    def __init__(self, params: Any, lr: float = 0.05, size: int = 8) -> None:
        super().__init__(params, {"lr": lr})
        self.blocks: dict[Any, Any] = {}
        for parameter in (p for group in self.param_groups for p in group["params"]):
            momentum = self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            length = max(size, parameter.numel() // 16)  # what is large would be stepped in thousands of blocks
            pairs = zip(parameter.detach().view(-1).split(length), momentum.view(-1).split(length), strict=True)
            self.blocks[parameter] = list(pairs)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter, blocks in self.blocks.items():
            if parameter.grad is None:
                continue
            gradient, start = parameter.grad.reshape(-1), 0
            for block, momentum in blocks:
                momentum.mul_(0.9).add_(gradient[start : start + block.numel()])
                block.add_(momentum, alpha=-self.param_groups[0]["lr"])
                start += block.numel()


def by_hand(module: nn.Module, optimizer: Any, loss: Callable[[Any, int], Tensor], steps: int) -> dict[str, Tensor]:
    """Train bare replicas by ``optimizer.step(closure)``; nothing of fsshard's."""
    for number in range(steps):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            value = loss(module, number)
            value.backward()
            average(module)
            return value

        closure()
        optimizer.step(closure)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
