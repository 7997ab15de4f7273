"""The state of the random number generators of a rank (torch, CUDA, numpy, Python) as plain values."""

from __future__ import annotations

import random
import zlib

import numpy
import torch

from fsshard.checkpoint.format.index import Tree, Values
from fsshard.errors import CheckpointError, CorruptCheckpoint


def capture(device: torch.device) -> Tree:
    """Return the state of every generator of this process, as tensors and numbers."""
    version, numbers, gauss = random.getstate()
    legacy = numpy.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    if legacy["bit_generator"] != "MT19937":
        raise CheckpointError(
            f"numpy.random has the bit generator {legacy['bit_generator']}; fsshard.save keeps MT19937, numpy's own "
            "choice: save what you need of it as state, and pass rng=False"
        )
    numbers = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    state = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "numbers": numbers, "gauss": gauss},
        "numpy": {
            "bit_generator": str(legacy["bit_generator"]),
            "key": torch.from_numpy(legacy["state"]["key"].astype(numpy.int64)),
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
        state["device_type"] = device.type
    return state


def restore(state: Values, device: torch.device) -> list[str]:
    """Put the generators back, the inverse of :func:`capture`; return what could not be, of another kind of device."""
    try:
        torch.set_rng_state(state["torch"])
        python = state["python"]
        saved = state["numpy"]
        random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
        numpy.random.set_state(
            {
                "bit_generator": saved["bit_generator"],
                "state": {"key": saved["key"].numpy().astype(numpy.uint32), "pos": saved["pos"]},
                "has_gauss": saved["has_gauss"],
                "gauss": saved["gauss"],
            }
        )
    except Exception as error:
        # An altered number can make any of the three raise anything.
        raise CorruptCheckpoint(f"the state of the random number generators is invalid: {error}") from error
    if device.type == "cpu":
        return []
    if state.get("device_type") != device.type:
        return [f"the generator of {device} (saved on {state.get('device_type', 'a CPU')})"]
    torch.get_device_module(device).set_rng_state(state["device"], device)
    return []


def derive(state: Values, rank: int, device: torch.device) -> None:
    """Seed the generators of a rank that the saving run did not have, always alike: from a saved state and the rank."""
    seed = zlib.crc32(state["torch"].numpy().tobytes(), rank)
    torch.manual_seed(seed)  # seeds every device's too
    random.seed(seed)
    numpy.random.seed(seed)
