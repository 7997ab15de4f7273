"""fsshard.lora: low-rank adapters on any weights of a model, complex and factorised ones among them."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fsshard.complex_params.flattened import Flattened, class_in_front, factorised_classes
from fsshard.complex_params.slots import parameter_slots
from fsshard.errors import AlreadyWrapped, ConfigurationError, ModelError
from fsshard.planning.text import is_count

ModuleT = TypeVar("ModuleT", bound=nn.Module)
ADAPTER = "_lora"
"""Suffix of the submodule that keeps an adapted weight: ``w`` is kept as ``w_lora.base``."""


def lora(
    model: ModuleT,
    *,
    rank: int = 8,
    target: str,
    alpha: float | None = None,
) -> ModuleT:
    """Freeze a model and add to each weight that ``target`` names a trainable matrix of low rank. Before ``wrap``.

    A weight W of shape (n, ...) is seen as a matrix of its first dim by the rest: the module then computes with W +
    alpha / rank * B A, where ``lora_A`` is (rank, rest) and ``lora_B`` (n, rank), of W's dtype, complex where W is (Hu
    et al., https://arxiv.org/abs/2106.09685). B begins with zeros, so that the model computes what it did before. The
    factors of a factorised weight (tltorch: Tucker, CP, TT) are weights of their own, each with its matrix.

    ``w`` is kept as ``w_lora.base``: load values into the model first. PEFT's LoRA, which adds to the outputs of linear
    layers, does without the gradient of a whole W for the time that a layer takes; it is wrapped as it is.

    Args:
        model: what is not wrapped yet; changed in place.
        rank: of the matrices, 1 or more. Weights that have a smaller side, or one dim, are left out.
        target: a regular expression that is searched in the names of parameters: ``"convs"``, ``r"\\.weight$"``.
        alpha: the scale of the matrices, times the rank, as PEFT has it; None: ``rank``, which is a scale of 1.

    Returns:
        ``model``. :func:`fsshard.save` with ``only="trainable"`` writes the adapters, :func:`fsshard.export` with
        ``merged=True`` the weights W + alpha / rank * B A under their own names.

    Raises:
        ConfigurationError: ``rank``, ``target`` or ``alpha`` without meaning, or nothing has such a name.
        ModelError: a weight that is shared, without a shape yet (lazy layers), or that a recurrent layer reads past its
            name; there are adapters already.
        AlreadyWrapped: the model is wrapped.
    """
    names_of = _chosen(model, rank, target)
    if alpha is None:
        alpha = rank
    model.requires_grad_(False)
    for module, names in names_of.items():
        pairs = _keeps_pairs(module)
        for name in names:
            weight = module._parameters.pop(name)
            assert weight is not None
            adapter = LowRank(weight, rank, float(alpha), pairs)
            module.add_module(name + ADAPTER, adapter)
        kind: Any = type(module)
        module.__class__ = _adapted_class(kind, tuple(names))
    return model


def _chosen(model: nn.Module, rank: object, target: object) -> dict[nn.Module, list[str]]:
    """Return the names of the parameters to adapt in each module that holds some; raise for what cannot be."""
    if not is_count(rank):
        raise ConfigurationError(f"fsshard.lora: rank={rank!r}: expected a number, 1 or more")
    if not isinstance(target, str):
        raise ConfigurationError(f"fsshard.lora: target={target!r}: expected a regular expression for names")
    has_flattened = any(isinstance(module, Flattened) for module in model.modules())
    if has_flattened or hasattr(model, "_backend"):
        raise AlreadyWrapped("fsshard.lora: the model is wrapped or tensorfied; call lora(model), then wrap it")
    if adapters_of(model):
        raise ModelError("fsshard.lora: the model has adapters already; name all weights in one call, target='a|b'")
    slots = list(parameter_slots(model))
    uses = Counter(id(slot.parameter) for slot in slots)
    names = defaultdict(list)
    for slot in slots:
        parameter = slot.parameter
        if not re.search(target, slot.name):
            continue
        if nn.parameter.is_lazy(parameter):
            raise ModelError(f"fsshard.lora: {slot.name!r} has no shape yet; run a forward of the model before")
        if rank > _largest_rank(slot.owner, parameter):
            continue
        if uses[id(parameter)] > 1:
            raise ModelError(f"fsshard.lora: {slot.name!r} is shared between modules; leave it out of target=")
        # A recurrent layer computes with a list of its own of the parameters.
        if isinstance(slot.owner, nn.RNNBase):
            raise ModelError(f"fsshard.lora: {slot.name!r} is a recurrent layer's; leave it out of target=")
        names[slot.owner].append(slot.attribute)
    if not names:
        some = ", ".join(slot.name for slot in slots[:4])
        raise ConfigurationError(
            f"fsshard.lora: target={target!r}, rank={rank}: expected it to match the name of a matrix of at least "
            f"that rank, and none matches; names are {some}, ..."
        )
    return names


def _keeps_pairs(module: nn.Module) -> bool:
    """Return whether a class keeps complex numbers as pairs of reals itself (tltorch's complex tensors)."""
    classes = factorised_classes()
    return classes is not None and isinstance(module, classes)


def _largest_rank(module: nn.Module, parameter: Tensor) -> int:
    """Return the smaller side of what is seen as a matrix; 0 for what cannot be."""
    shape = parameter.shape
    if _keeps_pairs(module):
        shape = shape[:-1]
    is_number = parameter.is_floating_point() or parameter.is_complex()
    if not is_number or len(shape) < 2:
        return 0
    rows, *others = shape
    return min(rows, math.prod(others))


class LowRank(nn.ModuleList):  # a container to every policy: the module that computes with the weight is the unit
    """A weight that is kept as ``base`` and a matrix of low rank.

    Attributes:
        base: the frozen weight itself; pairs of reals where its module keeps complex numbers so.
        lora_A: (rank, elements of a row), normal with variance 1 / elements.
        lora_B: (rows, rank), zeros.
        alpha: the scale of the matrices times the rank; the extra state, so that a checkpoint can be merged without
            the model.
    """

    def __init__(
        self,
        base: nn.Parameter,
        rank: int,
        alpha: float,
        pairs: bool,
    ) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.alpha = alpha
        self.pairs = pairs
        whole = base.detach()
        if pairs:
            whole = torch.view_as_complex(whole)
        rows = whole.shape[0]
        columns = whole[0].numel()
        like: dict[str, Any] = {"dtype": whole.dtype, "device": whole.device}
        normal = torch.randn(rank, columns, **like)
        self.lora_A = nn.Parameter(normal / math.sqrt(columns))
        self.lora_B = nn.Parameter(torch.zeros(rows, rank, **like))

    def get_extra_state(self) -> Tensor:
        """Return ``alpha``, a tensor because some formats hold nothing else; no cast of the model rounds it."""
        return torch.tensor(self.alpha, dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Take ``alpha`` from a state dict."""
        self.alpha = float(state)

    def full(self) -> Tensor:
        """Return the weight with its adapter."""
        base = torch.view_as_complex(self.base) if self.pairs else self.base
        return merged(base, self.lora_A, self.lora_B, self.alpha)


def merged(
    base: Tensor,
    a: Tensor,
    b: Tensor,
    alpha: float,
) -> Tensor:
    """Return ``base + alpha / rank * b a``, in the shape of ``base``."""
    product = alpha / a.shape[0] * (b @ a)
    return base + product.view(base.shape)


class _Adapted(nn.Module):
    """First base of the classes of modules with adapted weights."""

    _lora_origin: type[nn.Module]
    _lora_names: tuple[str, ...]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Swallow it: tltorch demands ``name=`` here, and would register the subclass."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._lora_names:
            raise ModelError(
                f"fsshard.lora: {name!r} is computed of a frozen weight and its adapter, and cannot be assigned; under "
                f"torch.no_grad() call {name + ADAPTER}.base.copy_(), or load values before"
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        module: Any = self
        state = module.__getstate__() if hasattr(module, "__getstate__") else module.__dict__
        kind = type(self)
        return _rebuild, (kind._lora_origin, kind._lora_names), state


def _call_origin(cls: Any, *args: Any, **kwargs: Any) -> Any:
    # tltorch's slices make another tensor of their own class, of what was adapted already.
    return cls._lora_origin(*args, **kwargs)


@cache
def _adapted_class(origin: Any, names: tuple[str, ...]) -> Any:
    """Return a subclass that shows under each name the weight with its adapter."""
    members: dict[str, Any] = {"_lora_origin": origin, "_lora_names": names}
    for name in ("__module__", "__qualname__", "__doc__"):
        members[name] = getattr(origin, name)
    classes = factorised_classes()
    # Methods of tltorch's complex tensors make complex numbers of pairs.
    shows_pairs = classes is not None and issubclass(origin, classes[1])
    for name in names:
        members[name] = property(_getter(name + ADAPTER, shows_pairs))
    return class_in_front(_Adapted, origin, origin.__name__, members, _call_origin)


def _getter(adapter: str, shows_pairs: bool) -> Any:
    def get(self: Any) -> Tensor:
        low_rank: LowRank = self.__dict__["_modules"][adapter]
        full = low_rank.full()
        if shows_pairs:
            return torch.view_as_real(full)
        return full

    return get


def _rebuild(origin: Any, names: tuple[str, ...]) -> Any:
    return nn.Module.__new__(_adapted_class(origin, names))


def adapters_of(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the modules with adapted weights, and the attribute, by the name of the weight."""
    adapters = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for attribute in getattr(type(module), "_lora_names", ()):
            adapters[prefix + attribute] = (module, attribute)
    return adapters
