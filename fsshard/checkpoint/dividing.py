"""Divides the writing of a checkpoint among the ranks, and makes the index of what they wrote."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from fsshard.checkpoint.format.division import (
    Division,
    Layout,
    Piece,
    Pieces,
    Range,
    Spread,
    piece_key,
    pieces_in,
    rank_file,
)
from fsshard.checkpoint.format.index import (
    Index,
    OptimizerInfo,
    Origin,
    TensorInfo,
    Tree,
    Values,
    some,
)
from fsshard.checkpoint.format.tensors_file import dtype_name
from fsshard.checkpoint.format.version import __version__
from fsshard.checkpoint.models import Models
from fsshard.checkpoint.parts import Collected, Parts, as_table
from fsshard.errors import CheckpointError


def announced_by(parts: Parts, rank: int, *, by_rule: bool) -> dict[str, list[Any]]:
    """Return the rows of :func:`as_table` that a rank tells the others.

    Where all have a part ``by_rule``, the rank with the first element speaks for them.
    """
    told = {}
    for name, row in as_table(parts).items():
        layout = row.pop()
        if layout is None or not by_rule:
            told[name] = row
        elif rank == layout.rank(layout.shard_of(0), 0):
            told[name] = [*row, layout]
    return told


def divide(tables: Sequence[Values], call: str) -> dict[str, TensorInfo]:
    """Decide which rank writes which elements of which tensor: each once, by a rank that has them.

    Engines differ only in this: a rank holds a range of each flattened tensor. Where that is by a rule, ranks may hold
    the same range (all of DDP, the replicas of HYBRID_SHARD, FairScale's parameters): the bytes of such copies are
    spread evenly over them. What is held by no rule is written by the first that has it, also where ranges overlap.

    Args:
        tables: what each rank announces (:func:`announced_by`): a tensor with a layout one rank, others all that have
            some of it.
        call: in messages.

    Returns:
        The tensors with their pieces: a rule, or a table where ranks hold them by none.

    Raises:
        CheckpointError: ranks have a tensor in another dtype or shape.
    """
    infos: dict[str, TensorInfo] = {}
    layouts: dict[str, Layout] = {}
    pieces: dict[str, Pieces] = {}
    listed: dict[str, dict[Range, int]] = {}
    for rank, table in enumerate(tables):
        for name, (dtype, shape, start, stop, *layout) in table.items():
            here = TensorInfo(dtype, tuple(shape), ())
            info = infos.setdefault(name, here)
            _check_alike(call, name, rank, here, info)
            if layout:
                layouts[name] = Layout(*layout[0])
            elif stop > start:
                # The first rank that has a range writes it.
                listed.setdefault(name, {}).setdefault((start, stop), rank)
    for name, ranges in listed.items():
        own = []
        end = 0
        for (start, stop), rank in sorted(ranges.items()):
            # What is before ``end`` another rank writes.
            start = max(start, end)
            if start < stop:
                key = piece_key(name, infos[name].numel, (start, stop))
                own.append(Piece(rank_file(rank, len(tables)), key, start, stop))
                end = stop
        pieces[name] = tuple(own)
    pieces |= _divisions(layouts, infos, len(tables))
    return {name: info._replace(pieces=pieces.get(name, ())) for name, info in infos.items()}


def _check_alike(
    call: str,
    name: str,
    rank: int,
    here: TensorInfo,
    there: TensorInfo,
) -> None:
    """Raise CheckpointError where two ranks have a tensor in other dtypes or shapes."""
    if (here.dtype, here.shape) != (there.dtype, there.shape):
        raise CheckpointError(
            f"{call}: the ranks disagree on {name}: rank {rank} has {here.dtype} {here.shape}, another "
            f"{there.dtype} {there.shape}"
        )


def _divisions(
    layouts: Mapping[str, Layout],
    infos: Mapping[str, TensorInfo],
    ranks: int,
) -> Iterator[tuple[str, Division]]:
    """Yield the rules of tensors that all ranks hold by one."""
    totals: dict[tuple[int, int], int] = {}
    for name, layout in layouts.items():
        grid = (layout.shards, layout.inner)
        totals[grid] = totals.get(grid, 0) + infos[name].nbytes
    before = dict.fromkeys(totals, 0)
    for name, layout in layouts.items():
        info = infos[name]
        grid = (layout.shards, layout.inner)
        spread = Spread(before[grid], totals[grid])
        before[grid] += info.nbytes
        division = Division(name, info.numel, info.kind.itemsize, ranks, layout, spread)
        yield name, division


def written_by(rank: int, ranks: int, tensors: Mapping[str, TensorInfo]) -> dict[str, Range]:
    """Return the elements that a rank writes of each tensor of which it writes some."""
    file = rank_file(rank, ranks)
    written = {}
    for name, info in tensors.items():
        for piece in pieces_in(info.pieces, file):
            written[name] = (piece.start, piece.stop)
    return written


def check_plan(
    collected: Collected,
    rank: int,
    tensors: Mapping[str, TensorInfo],
    call: str,
) -> None:
    """Raise a CheckpointError unless a rank has of each tensor what the plan of all ranks expects of it. Local."""
    parts = collected.parts
    lacking = []
    for needed in collected.model.keys.values():
        if needed is not None and needed not in tensors:
            lacking.append(needed)
    for name, info in tensors.items():
        part = parts.get(name)
        if part is not None:
            _check_alike(call, name, rank, TensorInfo(dtype_name(part.dtype), part.shape, ()), info)
        if not isinstance(info.pieces, Division):
            if not info.is_whole:
                lacking.append(name)
            continue
        layout = info.pieces.layout
        shard, _ = layout.place(rank)
        start, stop = layout.held(shard, info.numel)
        if start == stop:
            continue
        if part is None or part.range != (start, stop):
            lacking.append(name)
    # Parts that are in no table: the rank that should have announced them did not.
    for name in parts:
        if name not in tensors:
            lacking.append(name)
    if lacking:
        raise CheckpointError(f"{call}: the ranks do not hold all of {some(lacking)}; nothing was saved")


def origin_of(models: Models) -> Origin:
    """Return what writes a checkpoint of models."""
    backends = [model.backend for model in models.values()]
    shape: dict[str, int] = {}
    for backend in backends:
        if backend.settings.model_mesh is not None:
            shape |= backend.settings.model_mesh.shape()
    names = dict.fromkeys(backend.name for backend in backends)
    return Origin(__version__, str(torch.__version__), ", ".join(names), backends[0].settings.all_ranks, shape)


def make_index(
    origin: Origin,
    collected: Collected,
    tensors: dict[str, TensorInfo],
    trees: Sequence[Values],
    alike: Collection[str] = (),
) -> Index:
    """Return the index of what all ranks hold, but for the save's number and files.

    Takes rank 0's ``collected``, what :meth:`Collected.trees` gives on each rank, and the names of the objects that all
    ranks have ``alike``.
    """
    optimizers = {}
    for name, (kind, groups) in collected.groups.items():
        states = [of_rank["state"][name] for of_rank in trees]
        optimizers[name] = OptimizerInfo(kind, groups, _first_of(states))
    objects = {}
    for name, tree in collected.objects.items():
        if name in alike:
            objects[name] = {"all": tree}
        else:
            objects[name] = _per_rank([of_rank["objects"][name] for of_rank in trees])
    rng = None
    if collected.rng is not None:
        rng = _per_rank([of_rank["rng"] for of_rank in trees])
    return Index(
        id="",
        ordinal=0,
        saved_at="",
        origin=origin,
        files={},
        tensors=tensors,
        model=collected.model,
        tied=collected.tied,
        models=collected.models,
        optimizers=optimizers,
        objects=objects,
        rng=rng,
    )


def _first_of(states: Sequence[Mapping[str, Tree]]) -> dict[str, Tree]:
    """Merge ranks' ``{parameter: {key: value}}``: each value is that of the first rank that has it."""
    merged: dict[str, Tree] = {}
    # What comes later counts, so the first rank comes last.
    for state in reversed(states):
        for parameter, values in state.items():
            merged.setdefault(parameter, {}).update(values)
    return merged


def _per_rank(trees: list[Any]) -> dict[str, list[Any]]:
    """Return trees that differ, each with its own rank's tensors."""
    renamed = [_renamed(tree, f"@rank{rank}") for rank, tree in enumerate(trees)]
    return {"per_rank": renamed}


def _renamed(node: Any, suffix: str) -> Any:
    """Append a suffix to the names of a tree's tensors."""
    if isinstance(node, list):
        return [_renamed(item, suffix) for item in node]
    if not isinstance(node, dict):
        return node
    # Nodes of these kinds have the name of a tensor.
    if node.get("$") in ("tensor", "ndarray"):
        return {**node, "v": node["v"] + suffix}
    return {key: _renamed(item, suffix) for key, item in node.items()}
