"""A training on record, kept as one JSON file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsshard.parity.observations import Observations
from fsshard.parity.trace_file import read, write

__all__ = ["Trace"]


@dataclass(kw_only=True)
class Trace(Observations):
    """A recorded training: :func:`fsshard.parity.record` makes it, ``compare(recipe, against=trace)`` compares with it.

    Its attributes are those of :class:`~fsshard.parity.observations.Observations`.
    """

    def save(self, path: str | Path) -> None:
        """Write it to a JSON file, whole or not at all, and its tensors to a safetensors file beside it.

        The tensors' file has a part of their digest in its name, so that a trace and the tensors of another never meet.

        Raises:
            ConfigurationError: no file can be written there.
        """
        write(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """The trace that :meth:`save` wrote.

        Raises:
            TraceError: the file is missing, cut off, changed, of another version or something else; says which field.
        """
        return read(Path(path), cls)
