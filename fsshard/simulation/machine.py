"""Predict the time of a training step from what a device and its links can do: five terms.

A group of ranks that spans nodes sends at the speed of the links between these; a collective's latency grows with its
ranks. The formulas are those of NCCL (src/graph/tuning.cc): a ring, or for all_reduce a tree where that is faster.
``fsshard doctor --measure`` writes the constants of this machine; :mod:`fsshard.simulation.measuring` measures them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fsshard.errors import ConfigurationError
from fsshard.planning.text import duration
from fsshard.simulation.collectives import Ranks, Traffic
from fsshard.simulation.work import Amounts, Work

# Collective -> how often gloo sends what has to be sent: its reduce_scatter is an all_reduce inside (torch 2.13).
OVER_GLOO = {"reduce_scatter": 2}
TERMS = ("flops", "written", "operators", "sent", "collectives")
# Collectives in which a rank sends to each of the others what is meant for it, so that nothing is passed on.
DIRECT = ("all_to_all", "gather", "receive", "scatter", "send")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The constants of a device, one rank of it, by which :func:`fsshard.estimate` predicts seconds.

    Attributes:
        name: how it is called.
        device: ``"cpu"`` or ``"cuda"``.
        flops: floating-point operations per second of a matrix product, by the dtype's name; of a dtype that is not
            named those of ``"float32"`` count.
        written: bytes per second that an operator writes which reads two tensors as large as its result.
        operator: seconds per operator until its kernel runs, autograd and Python included.
        sent: bytes per second that a rank sends in collectives, to ranks of its own node.
        host: bytes per second that are copied to host memory, or back.
        collective: seconds per collective, whatever it sends, with what an engine does around it.
        source: where the numbers come from.
        per_node: ranks of a node, which are numbered one after the other; 0: all ranks are on one node.
        between: bytes per second that a rank sends to other nodes while all others of its node do so, too; 0: as
            ``sent``.
        hop: seconds that each further rank of a node adds to a collective.
        hop_between: seconds that each further node adds to a collective.
    """

    name: str
    device: str
    flops: Mapping[str, float]
    written: float
    operator: float
    sent: float
    collective: float
    host: float
    source: str
    per_node: int = 0
    between: float = 0.0
    hop: float = 0.0
    hop_between: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.flops, Mapping) or "float32" not in self.flops:
            raise ConfigurationError(f"Machine(flops={self.flops!r}): expected a dict in which 'float32' is")
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        for dtype, speed in self.flops.items():
            numbers[f"flops[{dtype!r}]"] = speed
        for name, number in numbers.items():
            if not isinstance(number, (int, float)) or not number > 0:
                raise ConfigurationError(f"Machine({name}={number!r}): expected a number above zero")
        for name in _OF_NODES:
            number = getattr(self, name)
            if not isinstance(number, (int, float)) or not number >= 0:
                raise ConfigurationError(f"Machine({name}={number!r}): expected a number, 0 for none")

    def __str__(self) -> str:
        fastest = ", ".join(f"{dtype} {speed / 1e9:.3g}" for dtype, speed in self.flops.items())
        nodes = ""
        if self.per_node:
            nodes = f", and {self.between / 1e9:.3g} GB/s to other nodes, of {self.per_node} ranks each"
        return (
            f"{self.device}: Gflop/s {fastest}; an operator writes {self.written / 1e9:.3g} GB/s and costs "
            f"{duration(self.operator)}; a rank sends {self.sent / 1e9:.3g} GB/s{nodes}; a collective costs "
            f"{duration(self.collective)} ({self.source})"
        )

    def terms(self, work: Work, traffic: Iterable[Traffic]) -> dict[str, float]:
        """Return the seconds of a step by term.

        Args:
            work: what a rank computes.
            traffic: the collectives that it takes part in, by kind.
        """
        sending = 0.0
        waiting = 0.0
        for one in traffic:
            times = OVER_GLOO.get(one.kind, 1) if self.device == "cpu" else 1
            for members, share in one.by_group.items():
                sending += times * share.sent / self.bandwidth(one.kind, members)
                waiting += share.calls * self.latency(one.kind, members)
        seconds = {
            "flops": self.best_seconds(work.flops),
            "written": work.written / self.written,
            "operators": work.operators * self.operator,
            "sent": sending,
            "collectives": waiting,
        }
        if work.offloaded or work.shards:
            # Copies go there and come back.
            seconds["offloaded"] = 2 * (work.offloaded + work.shards) / self.host
        return seconds

    def bandwidth(self, kind: str, members: Ranks) -> float:
        """Return the bytes per second that each of these ranks sends in a collective."""
        nodes = self._nodes(members)
        if nodes < 2:
            return self.sent
        between = self.between or self.sent
        on_a_node = len(members) / nodes
        outside = 0.0
        if kind in DIRECT:
            outside = (len(members) - on_a_node) / (len(members) - 1)
        elif kind == "broadcast" and self.device == "cpu":
            outside = _outside_of_tree(len(members), on_a_node)
        if outside:
            return 1 / (outside / between + (1 - outside) / self.sent)
        # As many rings as a node has members, each over another of its links: what a rank sends leaves over all.
        return min(self.sent, on_a_node * between)

    def latency(self, kind: str, members: Ranks) -> float:
        """Return the seconds that a collective of these ranks takes, whatever it sends."""
        if len(members) < 2:
            return self.collective
        nodes = self._nodes(members)
        if kind in DIRECT:
            return self.collective + (self.hop_between if nodes > 1 else self.hop)
        ring = (len(members) - nodes) * self.hop + (nodes - 1) * self.hop_between
        if kind != "all_reduce":
            return self.collective + ring
        # A chain of a node's members, and a tree of the nodes, up and down.
        on_a_node = len(members) / nodes
        tree = (on_a_node - 1) * self.hop + math.ceil(math.log2(nodes)) * self.hop_between
        return self.collective + 2 * min(ring, tree)

    def _nodes(self, members: Ranks) -> int:
        if not self.per_node:
            return 1
        return len({rank // self.per_node for rank in members})

    def best_seconds(self, flops: Amounts) -> float:
        """Return the seconds of these floating-point operations, by dtype, at the peak rate."""
        return sum(count / self.flops.get(dtype, self.flops["float32"]) for dtype, count in flops.items())


def _outside_of_tree(ranks: int, on_a_node: float) -> float:
    """Return the share of the messages of gloo's broadcast that leave a node, on average over the ranks that begin it.

    In round i every rank that has the tensor sends it to the one 2**i places on, whatever node that is on (torch 2.13).
    """
    leaving = 0.0
    distance = 1
    while distance < ranks:
        messages = min(distance, ranks - distance)
        leaving += messages * min(1.0, distance / on_a_node)
        distance *= 2
    return leaving / (ranks - 1)


def _gpu(
    name: str,
    flops: Mapping[str, float],
    memory: float,
    link: float,
    host: float,
    network: float,
    source: str,
) -> Machine:
    """Return a GPU by its data sheet, eight of them a node.

    ``flops`` are peaks of dense products, ``memory``, ``link`` and ``network`` bytes a second: of memory, of NVLink one
    way, and of a GPU's share of its node's network.
    """
    return Machine(
        name=name,
        device="cuda",
        flops=flops,
        # Two tensors are read for one that is written.
        written=memory / 3,
        # 10 us of the host in eager mode, assumed.
        operator=10e-6,
        sent=link,
        # A ring with the protocol Simple: 8.4 us, 3.4 us more for each hop over NVLink, 14 us over a network.
        collective=8.4e-6,
        hop=3.4e-6,
        hop_between=14e-6,
        per_node=8,
        between=network,
        host=host,
        source=f"{source}; NCCL's tuning.cc; 10 us assumed",
    )


def _tensor_cores(plain: float, double: float, half: float) -> dict[str, float]:
    return {"float32": plain, "float64": double, "bfloat16": half, "float16": half}


_OF_NODES = ("per_node", "between", "hop", "hop_between")
_NUMBERS = [field.name for field in fields(Machine) if field.type == "float" and field.name not in _OF_NODES]
# Machines that are known by name. Peaks of data sheets: seconds are those of perfect kernels, the order of plans is
# what they are for.
MACHINES = {
    one.name: one
    for one in (
        Machine(
            name="cpu",
            device="cpu",
            flops={"float32": 140e9, "float64": 65e9},
            written=10e9,
            operator=7e-6,
            sent=1.2e9,
            collective=500e-6,
            host=10e9,
            source="fsshard doctor --measure on 2 ranks of a virtual x86-64 server, a thread each, gloo, torch 2.13",
        ),
        _gpu(
            "a100",
            _tensor_cores(19.5e12, 9.7e12, 312e12),
            2.039e12,
            300e9,
            32e9,
            25e9,
            "NVIDIA A100 80GB and DGX A100 data sheets, 2021",
        ),
        _gpu(
            "h100",
            _tensor_cores(67e12, 34e12, 989e12),
            3.35e12,
            450e9,
            64e9,
            50e9,
            "NVIDIA H100 SXM and DGX H100 data sheets, 2023",
        ),
        _gpu(
            "h200",
            _tensor_cores(67e12, 34e12, 989e12),
            4.8e12,
            450e9,
            64e9,
            50e9,
            "NVIDIA H200 SXM and DGX H200 data sheets, 2024",
        ),
    )
}
# Device -> the machine that is meant where none is named.
USUAL = {"cpu": "cpu", "cuda": "h100"}


def check_device(device: Any) -> None:
    """Raise ConfigurationError unless ``device`` is a device type that can be simulated."""
    if device not in USUAL:
        raise ConfigurationError(f"device={device!r}: expected 'cpu' or 'cuda'")


def machine_of(machine: Any, device: str) -> Machine:
    """Return the machine that ``machine=`` means for ``device``.

    Args:
        machine: a :class:`Machine`, a name in :data:`MACHINES`, the path of a file that ``fsshard doctor --measure``
            has written, or None: the device's usual one.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigurationError: there is none such, or it is of another device.
    """
    check_device(device)
    if machine is None:
        return MACHINES[USUAL[device]]
    if isinstance(machine, Machine):
        machines = [machine]
    elif not isinstance(machine, (str, Path)):
        raise ConfigurationError(f"machine={machine!r}: expected a name, a file or a Machine; {_ADVICE}")
    elif str(machine) in MACHINES:
        machines = [MACHINES[str(machine)]]
    else:
        machines = read_machines(Path(machine))
    for one in machines:
        if one.device == device:
            return one
    devices = " and ".join(one.device for one in machines)
    raise ConfigurationError(
        f"machine={str(machine)!r} is for {devices}, not for device={device!r}; pass "
        f"device={machines[0].device!r}, or another machine: {_ADVICE}"
    )


_ADVICE = f"known are {', '.join(MACHINES)}; `fsshard doctor --measure machine.json` writes a file of this machine"


def to_json(machines: Iterable[Machine]) -> str:
    """Return machines as :func:`read_machines` reads them."""
    return json.dumps({"machines": list(map(asdict, machines))}, indent=1)


def read_machines(path: Path) -> list[Machine]:
    """Return the machines in a file, one for each device; raise ConfigurationError if it is none of ours."""
    try:
        content = json.loads(path.read_text("utf-8"))
        machines = [Machine(**one) for one in content["machines"]]
        if not machines:
            raise ValueError("it holds no machine")
    except OSError as error:
        raise ConfigurationError(f"machine={str(path)!r}: {error.strerror or error}; {_ADVICE}") from None
    except (ConfigurationError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(f"machine={str(path)!r} is not a file of constants: {error}; {_ADVICE}") from None
    return machines
