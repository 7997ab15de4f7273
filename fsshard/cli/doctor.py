"""Tries out what this machine can do: :func:`examine`, which ``fsshard doctor`` prints.

Every engine is tried on its own, on ranks of a pool with a short timeout, so that one that fails or hangs says so and
the next is tried all the same.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import torch.distributed as dist
from torch import nn
from typer import Exit, Option

from fsshard.backends import backend_class, backend_names
from fsshard.cli.options import Json, check_files
from fsshard.cli.output import exit_code, held_output, text_stream, write_files
from fsshard.errors import ConfigurationError, FsshardError, MissingExtra, RankFailed
from fsshard.launching.context import cuda_devices
from fsshard.launching.pool import RankPool
from fsshard.model.precision import bf16_ready
from fsshard.pictures import check_file
from fsshard.planning.text import counted, size
from fsshard.simulation.machine import to_json
from fsshard.simulation.measuring import measured_machine
from fsshard.torch_private.registry import everything as private_torch

if TYPE_CHECKING:
    from packaging.requirements import Requirement

WORKS = "works"
MISSING = "missing"
FAILS = "fails"
NOTE = "note"
STYLES = {WORKS: "green", FAILS: "bold red", MISSING: "yellow", NOTE: "dim"}
RANKS = 2
TRYING = 20.0
"""Seconds that a trial may take; on an idle machine it takes a few."""
MEASURING = 600.0
"""Seconds that measuring a device may take, which takes a few, too."""


@dataclass(frozen=True)
class Finding:
    """One thing that was tried.

    Attributes:
        area: ``"software"``, ``"devices"``, ``"backends"`` or ``"extras"``.
        name: what was looked at.
        status: ``"works"``, ``"fails"``, ``"missing"`` (an extra is not installed) or ``"note"``.
        text: in one line.
        detail: a rank's traceback, where there is one.
        needed: whether training on the CPU needs it.
    """

    area: str
    name: str
    status: str
    text: str
    detail: str = ""
    needed: bool = False

    def __str__(self) -> str:
        return f"{self.area:<11}  {self.name:<26}  {self.status:<7}  {self.text}"


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order in which they were made."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Return whether nothing fails that training on the CPU needs."""
        return not self._failed

    @property
    def _failed(self) -> list[str]:
        return [finding.name for finding in self.findings if finding.needed and finding.status == FAILS]

    def to_json(self) -> str:
        """Return everything as JSON."""
        findings = list(map(asdict, self.findings))
        return json.dumps({"ok": self.ok, "findings": findings}, indent=1)

    def conclusion(self) -> list[str]:
        """Return the tracebacks, each under its finding's name, and whether training works."""
        lines = []
        for finding in self.findings:
            if finding.detail:
                lines.append(f"\n{finding.area}, {finding.name}:\n{finding.detail}")
        if self.ok:
            lines.append("training on the CPU works")
        else:
            lines.append(f"training on the CPU does not work: {', '.join(self._failed)}")
        return lines


def command(
    timeout: Annotated[
        float | None,
        Option(min=1.0, help="Time limit of each trial, in seconds: 20 by default, 600 with --measure."),
    ] = None,
    measure: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Measure this machine instead, and write its constants for --machine of estimate and tune.",
        ),
    ] = None,
    json_file: Json = None,
) -> None:
    """Test what works on this machine: torch, devices and backends; list what missing extras would install.

    Exit code: 0 if training on the CPU works, 1 if not, 2 for invalid input.
    """
    from rich.console import Console

    check_files(json_file)
    if measure is not None:
        if json_file is not None:
            raise ConfigurationError("--measure writes a file of its own; leave out --json")
        print(_measured(Path(measure), timeout or MEASURING))
        return
    with held_output(show=False):
        diagnosis = examine(timeout=timeout or TRYING)
    out = text_stream(json_file)
    console = Console(file=out, markup=False, highlight=False, soft_wrap=True)
    for finding in diagnosis.findings:
        console.print(str(finding), style=STYLES[finding.status])
    print("\n".join(diagnosis.conclusion()), file=out)
    write_files(diagnosis, json_file)
    raise Exit(exit_code(diagnosis.ok))


def _measured(file: Path, timeout: float) -> str:
    """Measure each device, write the constants, and return them as text."""
    check_file(file)
    with held_output(show=False):
        machines = []
        for device, ranks in _devices_of_ranks().items():
            with RankPool(device=device) as pool:
                results = pool.run(measured_machine, ranks, device, timeout=timeout)
                machines.append(results[0])
    file.write_text(to_json(machines) + "\n", "utf-8")
    return "\n".join(map(str, machines))


def _devices_of_ranks() -> dict[str, int]:
    """Return device -> the number of ranks that are tried on it."""
    ranks = {"cpu": RANKS}
    gpus = cuda_devices()
    if gpus:
        ranks["cuda"] = min(RANKS, gpus)
    return ranks


def examine(*, timeout: float = TRYING) -> Diagnosis:
    """Find out what this machine can do. Starts two processes, and as many more as there are GPUs, at most two.

    Args:
        timeout: seconds for each thing that is tried on ranks, once these have started.
    """
    findings = [*_software(), *_devices()]
    for device in _devices_of_ranks():
        with RankPool(device=device) as pool:
            findings += _on_ranks(pool, device, timeout)
    findings += _extras()
    return Diagnosis(tuple(findings))


# ------------------------------------------------------------------------------------------------ software, devices


def _software() -> Iterator[Finding]:
    yield Finding("software", "Python", NOTE, f"{platform.python_version()} on {sys.platform}")
    yield Finding("software", "fsshard", NOTE, _version("fsshard") or "not installed as a package")
    supported = "not known"
    status = WORKS
    for requirement in _requirements():
        if requirement.name == "torch":
            supported = str(requirement.specifier)
            status = _status(_fits(requirement, torch.__version__.partition("+")[0]))
            break
    yield Finding("software", "torch", status, f"{torch.__version__}; supported: {supported}")
    yield from _private_names()


def _status(works: object) -> str:
    return WORKS if works else FAILS


def _fits(requirement: Requirement, version: str) -> bool:
    return requirement.specifier.contains(version, prereleases=True)


def _private_names() -> Iterator[Finding]:
    """Find out what of torch's private names is missing, and what happens without."""
    names = private_torch()
    missing = [entry for entry in names if not entry.present]
    status = NOTE if missing else WORKS
    for entry in missing:
        consequence = "instead" if entry.fallback else "lost"
        if not entry.fallback:
            status = FAILS
        yield Finding("software", entry.name.replace(":", "."), MISSING, f"{consequence}: {entry.otherwise}")
    present = len(names) - len(missing)
    yield Finding("software", "torch's private names", status, f"{present} of {len(names)} are present")


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _requirements() -> list[Requirement]:
    """Return what the installed package says that it requires; nothing where it runs from a folder."""
    try:
        from packaging.requirements import Requirement
    except ImportError as error:
        raise MissingExtra("packaging", "cli", "fsshard doctor") from error
    try:
        return list(map(Requirement, metadata.requires("fsshard") or ()))
    except metadata.PackageNotFoundError:
        return []


def _devices() -> Iterator[Finding]:
    cpu = f"{torch.get_num_threads()} threads, {platform.machine()}"
    yield Finding("devices", "cpu", WORKS, cpu, needed=True)
    yield _bf16("cpu")
    if not torch.cuda.is_available():
        yield Finding("devices", "cuda", NOTE, "torch sees no GPU")
    for number in range(cuda_devices()):
        device = f"cuda:{number}"
        properties = torch.cuda.get_device_properties(number)
        yield Finding("devices", device, WORKS, f"{properties.name}, {size(properties.total_memory)}")
        yield _bf16(device)
    gloo = dist.is_available() and dist.is_gloo_available()
    yield Finding("devices", "gloo", _status(gloo), "collectives of the CPU", needed=True)
    if dist.is_available() and dist.is_nccl_available():
        yield Finding("devices", "nccl", WORKS, "collectives of GPUs")


def _bf16(device: str) -> Finding:
    ready = bf16_ready(device)
    return Finding("devices", f"{device}, bf16", _status(ready), ready.reason)


# ------------------------------------------------------------------------------------------------ ranks, engines


def _on_ranks(pool: RankPool, device: str, timeout: float) -> Iterator[Finding]:
    """Try a collective and each engine, every one in a job of its own."""
    ranks = _devices_of_ranks()[device]
    started = _tried(pool, "devices", f"{device}, ranks", device, ranks, timeout, _add_up, device)
    yield started
    # All the others would fail, too, each after the same wait.
    if started.status == FAILS:
        return
    for name in backend_names():
        try:
            count = 1 if backend_class(name).facts.one_process else ranks
        except ConfigurationError as error:
            # It is another package's backend, which is not as it should be.
            yield Finding("backends", name, FAILS, str(error))
        else:
            yield _tried(pool, "backends", name, device, count, timeout, _run_backend, name, device)


def _add_up(device: str) -> str:
    ranks = dist.get_world_size()
    value = torch.full((2,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(value)
    if value.tolist() != 2 * [ranks * (ranks + 1) / 2]:
        raise FsshardError(f"all_reduce on {device} gave wrong numbers")
    return "processes start, connect and reduce"


def _tried(
    pool: RankPool,
    area: str,
    name: str,
    device: str,
    ranks: int,
    timeout: float,
    job: Callable[..., str],
    *args: str,
) -> Finding:
    needed = device == "cpu"
    where = f"on {counted(ranks, 'rank')}, {device}"
    try:
        text = pool.run(job, ranks, *args, timeout=timeout)[0]
    except FsshardError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, MissingExtra):
            return Finding(area, name, MISSING, str(cause))
        line = str(error).strip().partition("\n")[0]
        detail = error.traceback if isinstance(error, RankFailed) else ""
        return Finding(area, name, FAILS, f"{where}: {line}", detail=detail, needed=needed)
    if text:
        where += f": {text}"
    return Finding(area, name, WORKS, where, needed=needed)


class _Probe(nn.Module):
    """A real and a complex layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.eye(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.first(x).to(torch.complex64) @ self.weight
        return product.real


def _run_backend(name: str, device: str) -> str:
    """Train a step of a model with real and complex weights."""
    from fsshard.sharded.optimizer import build_optimizer
    from fsshard.wrapping import wrap

    torch.manual_seed(0)
    model = wrap(_Probe().to(device), backend=name)
    optimizer = build_optimizer(model, torch.optim.Adam, lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(torch.ones(2, 4, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if not losses[1] < losses[0]:
        raise FsshardError(f"a step of Adam took the loss from {losses[0]} to {losses[1]}")
    text = "a step with real and complex weights"
    about = model.backend.settings.about
    return f"{text}, by {about}" if about else text


# ------------------------------------------------------------------------------------------------ extras


def _extras() -> Iterator[Finding]:
    """Find out which packages of each extra are there."""
    requirements = _requirements()
    try:
        names = metadata.metadata("fsshard").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        names = []
        yield Finding("extras", "all", NOTE, "not known: fsshard is not installed as a package")
    for name in names:
        present = []
        absent = []
        packages = {package.name: package for package in _packages(requirements, name)}
        for package in packages.values():
            version = _version(package.name)
            if version and _fits(package, version):
                present.append(f"{package.name} {version}")
            else:
                absent.append(f"{package.name}{package.specifier}")
        if absent:
            text = f"pip install 'fsshard[{name}]' would add {', '.join(absent)}"
            yield Finding("extras", name, MISSING, text)
        else:
            yield Finding("extras", name, WORKS, ", ".join(present))


def _packages(requirements: list[Requirement], extra: str) -> Iterator[Requirement]:
    """Return what an extra requires, through others of ours that it names."""
    for requirement in requirements:
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
            continue
        if requirement.name == "fsshard":
            for other in sorted(requirement.extras):
                yield from _packages(requirements, other)
        else:
            yield requirement
