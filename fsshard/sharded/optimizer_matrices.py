"""Weights of three or more dims as matrices, for optimizers of whole parameters (``see=`` of ``build_optimizer``).

:class:`Matrices` cuts a weight and puts it together; :func:`matrices_of` decides how each is shown. The checks are
:func:`check_see` and :func:`check_equivariant`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from fsshard.errors import OptimizerError
from fsshard.nested import map_leaves

See = Literal["matrix", "modes"]
BOUND = 1e-5
"""Largest difference between the step of U G and U times the step of G, of the largest number of the step. In
complex128 Newton-Schulz, roots and eigenbases differ by 1e-9 at most; ``.T`` in place of ``.mH`` by 1."""
SQUARE = ((16, 16),)
"""Shapes of the matrices that decide: their factors G G^H and G^H G have eigenbases, which others have but in part."""
TALL_AND_WIDE = ((24, 16), (16, 24))
"""Shapes of those tried besides: algorithms turn what is taller than wide."""
STEPS = 12
"""Steps of the trial: some algorithms begin late, and renew bases each 10 steps."""
OF_STACK = (6, 4)
"""Shape of the matrices in a stack that is tried: of a few, then of as many as the weight has modes."""


class Request(Protocol):
    """The part of :class:`~fsshard.sharded.optimizer_checks.OptimizerRequest` that is needed here."""

    @property
    def optimizer_class(self) -> type: ...
    @property
    def groups(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def parameters(self) -> Mapping[str, tuple[torch.Size, bool]]: ...
    @property
    def see_complex(self) -> bool: ...
    @property
    def whole(self) -> bool: ...
    @property
    def see(self) -> Mapping[str, See]: ...
    def trained(self, samples: Sequence[tuple[int, Tensor]]) -> list[Tensor]: ...


@dataclass(frozen=True)
class Matrices:
    """The way in which a weight of three or more dims is shown to an optimizer.

    Attributes:
        how: "matrix": the first dim by all others; "modes": a matrix of the first two dims for each place along the
            others.
        stacked: all modes in one tensor (modes, first, second), for classes that take that as so many matrices.
    """

    how: See
    stacked: bool = False

    @property
    def dims(self) -> int:
        """Return how many dims the optimizer sees."""
        return 3 if self.stacked else 2

    def cut(self, weight: Tensor) -> list[Tensor]:
        """Return what is shown of a tensor shaped as the user's weight: a view if it can be, modes as copies."""
        if self.how == "matrix":
            return [weight.flatten(1)]
        stack = weight.flatten(2).permute(2, 0, 1)
        # Memory of their own, which torch aligns to 64 bytes: matrix products round by the address.
        pieces = [stack] if self.stacked else stack.unbind()
        return [piece.clone(memory_format=torch.contiguous_format) for piece in pieces]

    def put_together(self, pieces: Sequence[Tensor], shape: torch.Size) -> Tensor:
        """Return the inverse of :meth:`cut`; ``shape`` is the user's."""
        if self.how == "matrix":
            return pieces[0].view(shape)
        stack = pieces[0] if self.stacked else torch.stack(list(pieces))
        weight: Tensor = stack.permute(1, 2, 0).unflatten(2, shape[2:])
        return weight

    def state_at_rest(self, values: Sequence[Any]) -> Any:
        """Return as one value what an optimizer keeps for each mode: tensors stacked, numbers that are equal once.

        Raises:
            OptimizerError: values that are no tensors differ.
        """
        return values[0] if len(values) == 1 else map_leaves(_stacked, *values)

    def state_of_pieces(self, value: Any, count: int) -> list[Any]:
        """Return the inverse of :meth:`state_at_rest`, for ``count`` pieces."""
        if count == 1:
            return [value]
        pieces = [map_leaves(partial(_at, at), value) for at in range(count)]
        return pieces


def _stacked(first: Any, *others: Any) -> Any:
    if isinstance(first, Tensor):
        together = torch.stack([first, *others])
        if not first.dim() and bool((together == first).all()):
            # A step counter, which stays one: its state dict is that of a class that sees all modes at once.
            return first
        return together
    if any(other != first for other in others):
        raise OptimizerError(
            f"the optimizer keeps {first!r} for one mode of a weight, and something else for another; keep tensors, "
            "which are stacked, or let the class take a stack of matrices"
        )
    return first


def _at(at: int, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.dim():
        leaf = leaf[at]
    return leaf.clone()


# ------------------------------------------------------------------------------------------------ what is asked for


def take_see(groups: Iterable[Mapping[str, Any]], see: Any) -> tuple[list[dict[str, Any]], dict[str, See]]:
    """Return groups of names without ``"see"``, and what it is by name; ``see`` where a group does not say.

    Raises:
        OptimizerError: it is something else than None, "matrix" or "modes".
    """
    see_of_names: dict[str, See] = {}
    rest = []
    for group in groups:
        how = group.get("see", see)
        if how is not None:
            if how not in get_args(See):
                raise OptimizerError(f"see: expected 'matrix', 'modes' or None, got {how!r}")
            see_of_names |= dict.fromkeys(group["params"], how)
        settings = dict(group)
        settings.pop("see", None)
        rest.append(settings)
    return rest, see_of_names


def check_see(request: Request) -> None:
    """Raise OptimizerError for settings that do not go with ``see``. Local."""
    if request.see and not request.whole:
        raise OptimizerError("see= shows whole weights as matrices, also where ranks have shards: pass whole=True, too")
    if request.see and not request.see_complex:
        raise OptimizerError("see= shows complex weights as complex matrices: leave out see_complex=False")


def is_bias(shape: torch.Size) -> bool:
    """Return whether a weight of three or more dims has one number for each place along its first, as (32, 1, 1)."""
    return len(shape) > 2 and shape[1:].numel() == 1


def matrices_of(request: Request) -> dict[str, Matrices]:
    """Return, by name, how weights are shown that are to be seen as matrices and have more dims than two. Local."""
    matrices = {}
    for number, group in enumerate(request.groups):
        names = []
        # Whether those that are seen by modes are complex.
        kinds = set()
        most = 0
        for name in group["params"]:
            shape, is_complex = request.parameters[name]
            if name not in request.see or len(shape) <= 2 or is_bias(shape):
                continue
            names.append(name)
            if request.see[name] == "modes":
                kinds.add(is_complex)
                most = max(most, shape[2:].numel())
        stacked = bool(kinds) and _takes_stacks(request, number, kinds, most)
        for name in names:
            how = request.see[name]
            matrices[name] = Matrices(how, stacked and how == "modes")
    return matrices


# ------------------------------------------------------------------------------------------------ trying a class


def _takes_stacks(request: Request, number: int, kinds: set[bool], modes: int) -> bool:
    """Return whether a step of a stack is that of each of its matrices, with the settings of a group.

    Args:
        request: whose class is tried.
        number: of the group.
        kinds: whether weights are complex: both may be.
        modes: how many matrices the largest weight has, since a class may look at the first dim.
    """
    if type(torch.empty(0)) is not Tensor:
        # Tensors of an estimate have no values.
        return False
    generator = torch.Generator().manual_seed(1)
    try:
        # A few first: a class that flattens a stack by its first dim has factors of all modes by all modes.
        counts = dict.fromkeys((min(3, modes), modes))
        for count, is_complex in itertools.product(counts, sorted(kinds)):
            dtype = torch.complex128 if is_complex else torch.float64
            some = sorted({0, count // 2, count - 1})
            sample = torch.randn(3, count, *OF_STACK, dtype=dtype, generator=generator)
            (stack,) = request.trained([(number, sample)])
            matrices = [(number, sample[:, at].clone()) for at in some]
            alone = torch.stack(request.trained(matrices))
            if not _distance(stack[some], alone, sample[0, some]) <= BOUND:
                return False
    except Exception:
        # It takes matrices alone, as torch's Muon does.
        return False
    return True


def check_equivariant(request: Request) -> None:
    """Raise unless groups treat the complex matrices that they see as such: step(U G) = U step(G), U unitary. Local.

    Raises:
        OptimizerError: tells by how much the steps differ; or the class raised.
    """
    if type(torch.empty(0)) is not Tensor:
        # Tensors of an estimate have no values.
        return
    name = request.optimizer_class.__name__
    for number, group in enumerate(request.groups):
        if not _sees_complex_matrices(request, group):
            continue
        difference = _turned_difference(request, number, SQUARE)
        if difference <= BOUND and _turns_real(request, number):
            difference = _turned_difference(request, number, TALL_AND_WIDE)
        if not difference <= BOUND:
            raise OptimizerError(
                f"{name} is not an algorithm for complex matrices: for gradients U G its step is not U times the step "
                f"for G (U unitary), but differs by {difference:.1e} of its largest number; at most {BOUND:.0e} is "
                "allowed. Write .mH where it has .T, and abs() ** 2 where it squares; or build another optimizer for "
                "the complex weights; or leave out see=, and the class is shown them as they are"
            )


def _sees_complex_matrices(request: Request, group: Mapping[str, Any]) -> bool:
    for weight in group["params"]:
        shape, is_complex = request.parameters[weight]
        if weight in request.see and is_complex and len(shape) > 1 and not is_bias(shape):
            return True
    return False


def _turns_real(request: Request, number: int) -> bool:
    """Return whether tall and wide matrices are no trouble if they are real, as where an eigenbasis is arbitrary."""
    try:
        return _turned_difference(request, number, TALL_AND_WIDE, (torch.float64,)) <= BOUND
    except OptimizerError:
        # It takes complex ones alone.
        return True


def _turned_difference(
    request: Request,
    number: int,
    shapes: Sequence[tuple[int, int]],
    # A class may have kernels for one of them only.
    dtypes: Sequence[torch.dtype] = (torch.complex128, torch.complex64),
) -> float:
    """Return the largest difference between the steps of U G and U times those of G, of the largest number of these."""
    raised = None
    for dtype in dtypes:
        generator = torch.Generator().manual_seed(1)
        samples = []
        for shape in shapes:
            sample = torch.randn(1 + STEPS, *shape, dtype=dtype, generator=generator)
            samples.append((number, sample))
        turns = []
        turned_samples = []
        for _, sample in samples:
            rows = sample.shape[1]
            square = torch.randn(rows, rows, dtype=dtype, generator=generator)
            turn = torch.linalg.qr(square)[0]
            turns.append(turn)
            turned_samples.append((number, turn @ sample))
        try:
            plain = request.trained(samples)
            turned = request.trained(turned_samples)
        except Exception as error:
            raised = raised or error
            continue
        distances = []
        for (_, sample), turn, of_plain, of_turned in zip(samples, turns, plain, turned, strict=True):
            distances.append(_distance(of_turned, turn @ of_plain, turn @ sample[0]))
        return max(distances)
    raise OptimizerError(
        f"{request.optimizer_class.__name__} takes no complex matrices, which see= shows it: tried on small ones, it "
        f"raised {type(raised).__name__}: {raised}. Build another optimizer for the complex weights"
    ) from raised


def _distance(result: Tensor, wanted: Tensor, start: Tensor) -> float:
    """Return the largest difference between two results, of the largest number of the step."""
    difference = (result - wanted).abs().max()
    step = (wanted - start).abs().max()
    return float(difference / step.clamp_min(1e-9))
