"""The place in the data where a training was: what a loader or sampler says of itself, for any number of ranks.

Samplers that divide an order among ranks as torch's ``DistributedSampler`` does give sample i to rank i modulo the
ranks. After k samples on each of N ranks the first k * N are used up, and M ranks go on at k * N / M each.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from fsshard.backends.settings import Settings
from fsshard.checkpoint.format.index import Tree, Values
from fsshard.errors import ConfigurationError

# Counts of one rank's samples, in torchdata's samplers (0.11).
SAMPLES = ("yielded", "samples_yielded")
# Counts of one rank's batches, in torchdata's StatefulDataLoader.
BATCHES = ("_num_yielded", "_sampler_iter_yielded", "_snapshot_step", "_steps_since_snapshot")
# Numbers that say the same on any number of ranks.
SAME = ("epoch", "step", "seed", "_num_workers", "_last_yielded_worker_id", "worker_id")
# Of a rank's workers: any will do.
SEEDS = ("_base_seed", "_shared_seed")


class DataPosition:
    """A loader or sampler as something with state that a checkpoint loads on another number of ranks."""

    def __init__(self, loader: Any, settings: Settings) -> None:
        if not hasattr(loader, "state_dict") or not hasattr(loader, "load_state_dict"):
            raise ConfigurationError(
                f"loader=: expected something with state_dict() and load_state_dict(), got a {type(loader).__name__}; "
                "use torchdata's StatefulDataLoader, or pass the sampler (docs/data.md)"
            )
        self.loader = loader
        self.ranks = settings.world_size
        batches = getattr(loader, "batch_sampler", None)
        self.batch_size = getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None)

    def state_dict(self) -> Tree:
        """Return the loader's state, and of how many ranks it is one."""
        return {
            "ranks": self.ranks,
            "batch_size": self.batch_size,
            "state": self.loader.state_dict(),
        }

    def load_state_dict(self, saved: Any) -> None:
        """Load what :meth:`state_dict` gave, or in a list that of all ranks, where there were more or fewer."""
        is_as_before = isinstance(saved, dict) and saved["ranks"] == self.ranks
        if is_as_before and saved["batch_size"] == self.batch_size:
            self.loader.load_state_dict(saved["state"])
            return
        states = saved if isinstance(saved, list) else [saved]
        first = states[0]
        inner = [state["state"] for state in states]
        redivide = getattr(self.loader, "redivide", None)
        if redivide is None:
            redivide = _Redivision(first, self.ranks, self.batch_size)
        self.loader.load_state_dict(redivide(inner))


class _Redivision:
    """Makes of the states of some ranks that of each of another number of ranks."""

    def __init__(self, saved: Values, ranks: int, batch_size: int | None) -> None:
        before = f"saved on {saved['ranks']} ranks with batch_size={saved['batch_size']}"
        self._told = f"{before}, loaded on {ranks} with batch_size={batch_size}"
        self._samples = Fraction(saved["ranks"], ranks)
        self._batches: Fraction | None = None
        if saved["batch_size"] and batch_size:
            self._batches = self._samples * Fraction(saved["batch_size"], batch_size)

    def __call__(self, states: Sequence[Any]) -> Any:
        return self._divided("state", states)

    def _divided(self, key: str, values: Sequence[Any]) -> Any:
        first = values[0]
        if key in SEEDS:
            return first
        if isinstance(first, dict):
            divided = {}
            for name in first:
                of_ranks = [value.get(name) for value in values]
                divided[name] = self._divided(name, of_ranks)
            return divided
        for value in values:
            if type(value) is not type(first) or value != first:
                raise self._refusal(f"{key!r} differs between the ranks")
        if key in SAMPLES:
            return self._scaled(key, first, self._samples)
        if key in BATCHES:
            return self._scaled(key, first, self._batches)
        if key == "_last_yielded_worker_id" and self._batches != 1:
            raise self._refusal("with workers, the batch of all ranks together has to stay as it was")
        if first is None or isinstance(first, (bool, str)) or key in SAME:
            return first
        raise self._refusal(f"{key}={first!r} may count samples of this rank or of all")

    def _scaled(self, key: str, count: int, factor: Fraction | None) -> int:
        if factor is None:
            raise self._refusal(f"{key}={count} are batches, of a size that the loader does not tell")
        scaled = count * factor
        if scaled.denominator > 1:
            raise self._refusal(f"{key}={count} of each rank cannot be divided anew; save after another step")
        return int(scaled)

    def _refusal(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self._told}: {why}; give the loader a method redivide(states), which returns the state to load from "
            "those of all ranks, or save it under another name than loader=, where it is loaded as it is"
        )
