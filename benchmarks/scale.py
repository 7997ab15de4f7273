"""Counts what a checkpoint needs on many ranks, without starting them.

    python benchmarks/scale.py [--ranks 8 64 512 1024] [--tensors 1024] [--dcp]

Ranks and tensors are made up: each of ``--tensors`` parameters of 1,024 x 1,024 numbers is divided by rows, as FSDP2
does, and Adam has two moments of it. Per number of ranks the table has, for fsshard:

* ``told``: bytes of JSON that the busiest rank sends when a save is arranged for the first time;
* ``plan``: seconds of one core in which rank 0 divides the work, and in which a rank finds its part of it;
* ``index``: bytes of ``index.json``, and seconds of one core to write and to read it;
* ``memory``: MiB that the process needs for all of this above what it needs to begin with;
* ``files``: files that a rank of the same number opens to load its part, and of other ranks' headers to check;
* ``store``: keys that a rank asks the store for in a meeting of all ranks (the last one to come reads all notes).

With ``--dcp`` the same division goes through ``torch.distributed.checkpoint``: the default planner's global plan on
rank 0, and the pickled metadata. Each cell is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import resource
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from fsshard.checkpoint import dividing, parts
from fsshard.checkpoint.format.division import Layout, cover, pieces_in, rank_file
from fsshard.checkpoint.format.index import FileEntry, Index, ModelInfo, Origin, TensorInfo, share_of
from fsshard.comm import watchdog
from fsshard.comm.stores import PatientStore

ROWS = 1024
COLUMNS = 1024
STATES = ("", "/exp_avg", "/exp_avg_sq")


def held(rank: int, ranks: int, tensors: int) -> parts.Parts:
    """What a rank has of the parameters and their moments."""
    layout = Layout(ranks, 1, -(-ROWS // ranks) * COLUMNS, 0)
    span = layout.held(rank, ROWS * COLUMNS)
    nothing = torch.empty(0)
    found = {}
    for number in range(tensors):
        for state in STATES:
            part = parts.Part(torch.float32, (ROWS, COLUMNS), span, nothing, layout=layout)
            found[f"optimizer/optimizer/layers.{number}.weight{state}"] = part
    return found


class CountingStore:
    """A store that counts the keys that it is asked for."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.keys = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.keys += len(arguments[0]) if isinstance(arguments[0], list) else 1
            return method(*arguments)

        return counted


def keys_of_a_meeting(ranks: int) -> int:
    """Keys that the last rank but one asks for where all others have come before it."""
    store = dist.HashStore()
    counts = []

    class Group:
        group_name = "0"

        def __init__(self, rank: int) -> None:
            self.rank = lambda: rank
            self.size = lambda: ranks

    def comes(rank: int) -> None:
        dog = object.__new__(watchdog.Watchdog)
        counting = CountingStore(store)
        vars(dog).update(rank=rank, _size=ranks, waits=None, _lost_at=None, _names=Counter())
        dog.store = PatientStore(counting)  # type: ignore[arg-type]
        dog._meetings = weakref.WeakKeyDictionary()
        group: Any = Group(rank)
        dog.meet(group, "fsshard.save", "here", 600.0)
        counts.append(counting.keys)

    # Those that have come: their notes, and the count.
    for rank in range(ranks - 2):
        store.set(f"meet/0.1/0/{rank}", "here")
    store.add("meet/0.1/0/count", ranks - 2)
    with mock.patch.object(watchdog, "_ranks_of", return_value=tuple(range(ranks))):
        first = threading.Thread(target=comes, args=(ranks - 2,))
        first.start()
        comes(ranks - 1)
        first.join()
    return min(counts)


def of_fsshard(ranks: int, tensors: int) -> dict[str, float]:
    """One row of the table."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = [dividing.announced_by(held(0, ranks, tensors), 0, by_rule=True)]
    nbytes = len(json.dumps(told[0]))
    told += [{}] * (ranks - 1)
    begun = time.process_time()
    infos = dividing.divide(told, "save")
    described = json.dumps({name: info.described() for name, info in infos.items()})
    mine = {name: TensorInfo.of(name, value) for name, value in json.loads(described).items()}
    written = dividing.written_by(ranks - 1, ranks, mine)
    planned = time.process_time() - begun
    assert len(written) == len(infos)
    files = {rank_file(rank, ranks): FileEntry(2**40, rank) for rank in range(ranks)}
    keys: dict[str, str | None] = {name: name for name in infos}
    index = Index("ab", 1, "", Origin("0", "0", "fsdp2", ranks), files, infos, ModelInfo(keys, {}, {}))
    begun = time.process_time()
    text = index.to_json()
    again = Index.from_json(text, "index.json")
    indexed = time.process_time() - begun
    opened = set(share_of(again, 1, ranks))
    wanted = held(1, ranks, 1)
    for name, part in wanted.items():
        opened.update(piece.file for piece, _, _ in cover(again.tensors[name].pieces, part.range))
    assert all(len(pieces_in(info.pieces, rank_file(1, ranks))) == 1 for info in again.tensors.values())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "told": nbytes,
        "plan": planned,
        "index": len(text),
        "index s": indexed,
        "memory": memory / 1024,
        "files": len(opened),
        "store": keys_of_a_meeting(ranks),
    }


def of_dcp(ranks: int, tensors: int) -> dict[str, float]:
    """The same division by torch's planner."""
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = -(-ROWS // ranks)
    plans = []
    for rank in range(ranks):
        items = []
        for number in range(tensors):
            for state in STATES:
                offsets = torch.Size([rank * rows, 0])
                chunk = ChunkStorageMetadata(offsets, torch.Size([rows, COLUMNS]))
                size = torch.Size([ROWS, COLUMNS])
                data = TensorWriteData(chunk, TensorProperties(torch.float32), size)
                name = f"layers.{number}.weight{state}"
                items.append(WriteItem(MetadataIndex(name, offsets, rank), WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items))
    nbytes = len(pickle.dumps(plans[0]))
    begun = time.process_time()
    _, metadata = create_default_global_save_plan(plans)
    planned = time.process_time() - begun
    begun = time.process_time()
    text = pickle.dumps(metadata)
    pickle.loads(text)
    indexed = time.process_time() - begun
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"told": nbytes, "plan": planned, "index": len(text), "index s": indexed, "memory": memory / 1024}


COLUMNS_OF_THE_TABLE: dict[str, Callable[[float], str]] = {
    "told": lambda value: f"{value:,.0f} B",
    "plan": lambda value: f"{value:.2f} s",
    "index": lambda value: f"{value:,.0f} B",
    "index s": lambda value: f"{value:.2f} s",
    "memory": lambda value: f"{value:,.0f} MiB",
    "files": lambda value: f"{value:.0f}",
    "store": lambda value: f"{value:.0f}",
}


def cell(count: Callable[[int, int], dict[str, float]], ranks: int, tensors: int) -> dict[str, float]:
    """Count in a process of its own, whose memory nothing else has used."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(count, (ranks, tensors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 1024])
    parser.add_argument("--tensors", type=int, default=1024)
    parser.add_argument("--dcp", action="store_true", help="torch.distributed.checkpoint beside it")
    arguments = parser.parse_args()
    print(f"| ranks | of | {' | '.join(COLUMNS_OF_THE_TABLE)} |")
    print(f"| --- | --- | {' | '.join('---' for _ in COLUMNS_OF_THE_TABLE)} |")
    for ranks in arguments.ranks:
        sides = {"fsshard": of_fsshard}
        if arguments.dcp:
            sides["DCP"] = of_dcp
        for name, count in sides.items():
            row = cell(count, ranks, arguments.tensors)
            texts = [text(row[key]) if key in row else "" for key, text in COLUMNS_OF_THE_TABLE.items()]
            print(f"| {ranks:,} | {name} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
