"""Fields to train on: shallow water that is solved here, or ERA5 in the layout of NERSC's files; and how they are fed.

    weather = shallow_water_weather(leads=4)          # or era5_weather(Path("era5"), leads=4)
    weather.train[0]                                     # (2, channels, rows, columns): now and one step later
    weather.validation[0]                                # (5, channels, rows, columns): now and four steps later

Fields are normalised: every channel has mean 0 and standard deviation 1 over the training set.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from examples import shallow_water
from fsshard import ConfigurationError, MissingExtra

__all__ = ["Prefetcher", "Weather", "era5_weather", "latitude_weights", "make_loader", "shallow_water_weather"]


@dataclass(frozen=True, kw_only=True)
class Weather:
    """A training and a validation set.

    Attributes:
        name: for titles.
        train: windows of two snapshots, ``(2, channels, rows, columns)``, normalised float32.
        validation: windows of ``1 + leads`` snapshots.
        channels: their names.
        shape: rows and columns.
        row_weights: ``(rows, 1)``, how much a row counts in a mean over the grid; their mean is 1.
    """

    name: str
    train: Any
    validation: Any
    channels: tuple[str, ...]
    shape: tuple[int, int]
    row_weights: Tensor


def latitude_weights(latitudes: Tensor) -> Tensor:
    """``cos(latitude)`` as weights with mean 1, ``(rows, 1)``: rows near the poles stand for less of the sphere.

    Args:
        latitudes: of the rows, in degrees, ``(rows,)``.
    """
    weights = torch.cos(torch.deg2rad(latitudes.double()))
    return (weights / weights.mean()).float()[:, None]


# Shallow water ----------------------------------------------------------------------------------------------------


class Runs(Dataset[Tensor]):
    """All windows of some snapshots that follow each other within one run.

    Args:
        runs: ``(runs, time, channels, rows, columns)``.
        length: snapshots per window.
    """

    def __init__(self, runs: Tensor, length: int) -> None:
        self.runs, self.length = runs, length
        self.per_run = runs.shape[1] - length + 1

    def __len__(self) -> int:
        return len(self.runs) * self.per_run

    def __getitem__(self, number: int) -> Tensor:
        run, start = divmod(number, self.per_run)
        return self.runs[run, start : start + self.length]


def shallow_water_weather(
    *,
    leads: int = 4,
    n_train: int = 40,
    n_validation: int = 4,
    n_steps: int = 64,
    shape: tuple[int, int] = (32, 64),
    seed: int = 0,
    progress: bool = True,
) -> Weather:
    """Solved once and kept in the user's cache. Training and validation are other runs, from other random starts.

    Args:
        leads: steps that a validation window looks ahead.
        n_train: runs to train on.
        n_validation: runs to judge by. They do not change with ``n_train``.
        n_steps: snapshots of a run.
        shape: rows and columns.
        seed: of the random starts.
        progress: show a bar while solving.

    Raises:
        ConfigurationError: an argument is out of its range.
    """
    if n_steps <= leads:
        raise ConfigurationError(f"runs of {n_steps} snapshots have no window of 1 + {leads}; make them longer")
    try:
        solved = shallow_water.load(n_validation + n_train, n_steps, shape, seed=seed, progress=progress)
    except ValueError as error:
        raise ConfigurationError(f"shallow water: {error}") from error
    runs = torch.from_numpy(solved)
    std, mean = torch.std_mean(runs[n_validation:], dim=(0, 1, 3, 4), keepdim=True)
    runs = (runs - mean[0]) / std[0]
    return Weather(
        name=f"shallow water {shape[0]} x {shape[1]}",
        train=Runs(runs[n_validation:], 2),
        validation=Runs(runs[:n_validation], 1 + leads),
        channels=shallow_water.CHANNELS,
        shape=shape,
        row_weights=torch.ones(shape[0], 1),  # a plane: all rows are equally long
    )


# ERA5 -------------------------------------------------------------------------------------------------------------


class Years(Dataset[Tensor]):
    """All windows of some snapshots that follow each other within one file; files are years.

    A file is opened where it is first read, so that every worker of a DataLoader has handles of its own.

    Args:
        files: each with a dataset ``fields``, ``(time, channels, rows, columns)``.
        length: snapshots per window.
        mean: of each channel.
        std: of each channel.
        rows: how many of the rows are used, from the north.
    """

    def __init__(self, files: list[Path], length: int, mean: Tensor, std: Tensor, rows: int) -> None:
        self.files, self.length, self.rows = files, length, rows
        self.mean, self.std = mean.reshape(1, -1, 1, 1), std.reshape(1, -1, 1, 1)
        counts = [max(0, _fields(file).shape[0] - length + 1) for file in files]
        self.ends = list(itertools.accumulate(counts))
        self.open: dict[int, Any] = {}

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, number: int) -> Tensor:
        file = bisect.bisect_right(self.ends, number)
        start = number - (self.ends[file - 1] if file else 0)
        if file not in self.open:
            self.open[file] = _fields(self.files[file])
        raw = self.open[file][start : start + self.length, :, : self.rows]
        return (torch.from_numpy(np.asarray(raw, dtype=np.float32)) - self.mean) / self.std

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "open": {}}  # an open file cannot be sent to another process


def _fields(file: Path) -> Any:
    try:
        import h5py
    except ImportError as error:
        raise MissingExtra("h5py", "weather", f"reading {file}") from error
    try:
        fields = h5py.File(file, "r")["fields"]
    except (OSError, KeyError) as error:
        raise ConfigurationError(f"{file}: expected an HDF5 file with a dataset 'fields': {error}") from error
    if fields.ndim != 4:
        raise ConfigurationError(f"{file}: 'fields' must be (time, channel, lat, lon), got shape {fields.shape}")
    return fields


def era5_weather(folder: Path, *, leads: int = 4, patch: int = 1) -> Weather:
    """Read NERSC's layout: a file a year in ``train`` and in ``valid``, means and deviations in ``stats``.

    Rows go from the north to the south pole. Those that would begin an incomplete patch in the south are left out, as
    is usual with ERA5's 721.

    Args:
        folder: with ``train``, ``valid``, ``stats/global_means.npy`` and ``stats/global_stds.npy``.
        leads: steps that a validation window looks ahead.
        patch: rows and columns of a patch.

    Raises:
        ConfigurationError: a file is missing, or does not hold what it should.
        MissingExtra: h5py is not installed.
    """
    files = {part: sorted((folder / part).glob("*.h5")) for part in ("train", "valid")}
    for part, found in files.items():
        if not found:
            raise ConfigurationError(f"{folder / part} has no *.h5; --data-dir must hold train/, valid/ and stats/")
    channels, rows, columns = _fields(files["train"][0]).shape[1:]
    for file in (*files["train"], *files["valid"]):
        if _fields(file).shape[1:] != (channels, rows, columns):
            raise ConfigurationError(
                f"{file}: expected {channels} channels of {rows} x {columns} as in {files['train'][0].name}, got "
                f"{_fields(file).shape[1:]}"
            )
    if rows < patch or columns % patch:
        raise ConfigurationError(f"{folder}: fields of {rows} x {columns} cannot be cut into patches of {patch}")
    mean, std = (_statistics(folder / "stats" / f"global_{kind}.npy", channels) for kind in ("means", "stds"))
    used = rows - rows % patch
    return Weather(
        name=f"ERA5 {used} x {columns}",
        train=Years(files["train"], 2, mean, std, used),
        validation=Years(files["valid"], 1 + leads, mean, std, used),
        channels=tuple(f"channel {number}" for number in range(channels)),
        shape=(used, columns),
        row_weights=latitude_weights(torch.linspace(90, -90, rows)[:used]),
    )


def _statistics(file: Path, channels: int) -> Tensor:
    """One number per channel; files may have more channels than the fields."""
    if not file.is_file():
        raise ConfigurationError(f"{file} does not exist; --data-dir must hold train/, valid/ and stats/")
    values = torch.from_numpy(np.load(file).astype(np.float32)).flatten()
    if len(values) < channels:
        raise ConfigurationError(f"{file}: expected a number for each of {channels} channels, got {len(values)}")
    return values[:channels]


# Feeding ----------------------------------------------------------------------------------------------------------


def make_loader(
    dataset: Any, *, batch: int, place: tuple[int, int], workers: int, prefetch: int, pin: bool, shuffle: int | None
) -> DataLoader[Tensor]:
    """Batches of this rank's windows.

    Whatever the number of data ranks, step ``k`` of an epoch has the same windows on all of them together.

    Args:
        dataset: of windows.
        batch: windows per step on this rank.
        place: this data rank and their number. Ranks that share a model by tensor or context parallelism are one data
            rank: they see the same windows.
        workers: processes that read beside the training; 0 reads in between.
        prefetch: batches that each of them reads ahead.
        pin: put batches into page-locked memory, from which a GPU copies while it computes.
        shuffle: seed of the order, which is another in every epoch; None: as they are.
    """
    sampler: Any = DistributedSampler(
        dataset, num_replicas=place[1], rank=place[0], shuffle=shuffle is not None, seed=shuffle or 0, drop_last=True
    )
    ahead: dict[str, Any] = {"prefetch_factor": prefetch, "persistent_workers": True} if workers else {}
    return DataLoader(
        dataset, batch, sampler=sampler, num_workers=workers, pin_memory=pin, drop_last=shuffle is not None, **ahead
    )


class Prefetcher:
    """Batches on the device; on a GPU the next one is copied on a stream of its own while this one is computed on.

    Args:
        batches: on the host; from pinned memory the copy runs beside the computation.
        device: where they go.
    """

    def __init__(self, batches: Iterable[Tensor], device: torch.device) -> None:
        self.batches, self.device = batches, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __iter__(self) -> Iterator[Tensor]:
        ahead: tuple[Tensor, Any] | None = None
        for batch in self.batches:
            following = self._copied(batch)
            if ahead is not None:
                yield self._ready(*ahead)
            ahead = following
        if ahead is not None:
            yield self._ready(*ahead)

    def _copied(self, batch: Tensor) -> tuple[Tensor, Any]:
        if self.stream is None:
            return batch.to(self.device), None
        with torch.cuda.stream(self.stream):
            return batch.to(self.device, non_blocking=True), self.stream.record_event()

    def _ready(self, batch: Tensor, copied: Any) -> Tensor:
        """Let the computation wait for the copy, and whoever gets the copy's memory next for the computation."""
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            batch.record_stream(current)
        return batch
