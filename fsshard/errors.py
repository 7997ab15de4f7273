"""Every error fsshard raises on purpose.

One root, :class:`FsshardError`, so that ``except FsshardError`` is enough. Each kind also derives from
the built-in that a caller would expect (``ValueError`` for a bad argument, ``ImportError`` for a missing
extra), and each message tells what was expected, what was got, and what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "AlreadyWrapped",
    "CheckpointError",
    "ConfigurationError",
    "CorruptCheckpoint",
    "DoesNotFit",
    "FsshardError",
    "GradientError",
    "LaunchError",
    "MissingExtra",
    "MisuseError",
    "ModelError",
    "NotConsolidated",
    "NotCopyable",
    "NotTogether",
    "OptimizerError",
    "OptimizerStateMismatch",
    "ParityError",
    "PrecisionError",
    "PrivateTorchMissing",
    "RankFailed",
    "RankHung",
    "RankMismatch",
    "RecipeError",
    "StaleParameter",
    "StateDictError",
    "TraceError",
    "UnknownBackend",
    "UnsupportedByBackend",
]


class FsshardError(Exception):
    """Root of all errors that fsshard raises on purpose."""

    def __reduce__(self) -> Any:
        # The constructors take other arguments than ``args``; errors travel between ranks by pickle.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[FsshardError], args: tuple[Any, ...], state: dict[str, Any]) -> FsshardError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigurationError(FsshardError, ValueError):
    """An argument, or a combination of arguments, is not valid."""


class UnknownBackend(ConfigurationError):
    """``backend=`` names no backend."""

    def __init__(self, name: object, known: Sequence[str]) -> None:
        super().__init__(f"backend: expected {', '.join(known)} or 'auto', got {name!r}")


class UnsupportedByBackend(ConfigurationError):
    """The backend cannot honour a setting; the message names the nearest alternative."""

    def __init__(self, setting: str, backend: str, alternative: str) -> None:
        super().__init__(f"backend {backend!r} cannot honour {setting}; {alternative}")
        self.setting, self.backend, self.alternative = setting, backend, alternative


class DoesNotFit(ConfigurationError):
    """No plan that was found fits the memory that a rank may need.

    Attributes:
        least: the least peak that was found, in bytes.
    """

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least


class MissingExtra(FsshardError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed; run: pip install 'fsshard[{extra}]' "
            f"(in a clone of the repository: pip install '.[{extra}]')"
        )


class PrivateTorchMissing(FsshardError, RuntimeError):
    """This torch lacks a private name that something stands on; what does without it works.

    Attributes:
        name: ``"module:qualified.name"``.
    """

    def __init__(self, name: str, source: str, lost: str) -> None:
        self.name = name
        super().__init__(
            f"this torch has no {name.replace(':', '.')}, which torch 2.13 has in {source}; {lost}; 'fsshard doctor' "
            "lists all that is missing"
        )


class ModelError(FsshardError, ValueError):
    """The model cannot be sharded as it is."""


class AlreadyWrapped(ModelError):
    """The model, or a part of it, is under an engine already."""


class PrecisionError(ConfigurationError):
    """A dtype was asked for that would lose information (an imaginary part, a unit that needs float32)."""


class OptimizerError(FsshardError, ValueError):
    """The optimizer is not, or cannot become, this model's optimizer."""


class StaleParameter(FsshardError, RuntimeError):
    """A parameter captured before wrapping was used where its replacement is meant."""


class StateDictError(FsshardError, RuntimeError):
    """Keys are missing, unexpected or of another shape. Nothing has been loaded."""

    def __init__(
        self,
        what: str,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        mismatched: Mapping[str, tuple[object, object]] | None = None,
    ) -> None:
        self.what = what
        self.missing, self.unexpected = sorted(missing), sorted(unexpected)
        self.mismatched = dict(mismatched or {})
        lines = [f"{what} does not fit; nothing was loaded"]
        lines += [f"  missing: {_printable_name(key)}" for key in self.missing]
        lines += [f"  unexpected: {_printable_name(key)}" for key in self.unexpected]
        lines += [
            f"  {_printable_name(key)}: expected {want}, got {got}" for key, (want, got) in self.mismatched.items()
        ]
        super().__init__("\n".join(lines))


def _printable_name(key: object) -> str:
    """A name that may come out of a file: what a terminal would obey is spelled out."""
    text = str(key)
    return text if text.isprintable() else repr(text)


class CheckpointError(FsshardError, RuntimeError):
    """A checkpoint could not be written or read; earlier ones are unchanged.

    Attributes:
        failures: rank -> what went wrong there, where it is known by rank.
    """

    def __init__(self, message: str, failures: Mapping[int, str] | None = None) -> None:
        self.failures = dict(sorted((failures or {}).items()))
        lines = [f"  rank {rank}: {text}" for rank, text in self.failures.items()]
        super().__init__("\n".join([message, *lines]))


class CorruptCheckpoint(CheckpointError, ValueError):
    """A file of a checkpoint is missing, truncated, changed or of another kind; nothing was loaded."""


class RankMismatch(FsshardError, RuntimeError):
    """Ranks disagree, or one of them failed; raised on every rank with the rank's name."""


class LaunchError(ConfigurationError):
    """The launch was asked for something that this machine or environment does not have."""


class RankFailed(FsshardError, RuntimeError):
    """A rank raised, was killed or left early.

    Attributes:
        rank: the rank that failed first.
        traceback: that rank's traceback as text, empty when the process died without one.
        cause_type: the name of the exception's class, or of the signal.
        others: rank -> what became of it, in one line, where that is known.
        cause: that rank's exception, where it can be pickled. (As ``__cause__`` it would be printed a second time.)
    """

    cause: BaseException | None = None

    def __init__(
        self, rank: int, cause_type: str, message: str, traceback: str = "", others: Mapping[int, str] | None = None
    ) -> None:
        self.rank, self.cause_type, self.traceback = rank, cause_type, traceback
        self.others = dict(sorted((others or {}).items()))
        lines = [self._headline(message)]
        same = f"raised {cause_type}: {message}"
        for other, text in self.others.items():
            lines.append(f"  rank {other} {'raised the same' if text == same else text}")
        lines += ["", traceback] if traceback else []
        super().__init__("\n".join(lines))

    def _headline(self, message: str) -> str:
        return f"rank {self.rank} failed with {self.cause_type}: {message}"


class RankHung(RankFailed):
    """Ranks waited in vain, or did not answer in time; ``message`` names those that never came, then who waited.

    Attributes:
        rank: the rank that waited, or did not answer.
        collective: the collective that it waits in, such as ``"all_reduce"``, or "" if it is elsewhere.
    """

    def __init__(
        self,
        rank: int,
        collective: str,
        message: str,
        traceback: str = "",
        others: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(rank, "TimeoutError", message, traceback, others)
        self.collective = collective

    def _headline(self, message: str) -> str:
        return message


class RecipeError(ConfigurationError):
    """A recipe is incomplete or not deterministic, so nothing can be compared."""


class TraceError(ConfigurationError):
    """A file is not a recorded training, or is cut off, changed or of another version; nothing was compared.

    Attributes:
        file: which.
        field: the place in it, such as ``"ranks[1].steps[3].loss"``; "" where the whole is meant.
    """

    def __init__(self, file: object, field: str, problem: str) -> None:
        self.file, self.field = str(file), field
        super().__init__(f"{self.file}: {f'field {field}: ' if field else ''}{problem}")


class ParityError(FsshardError, AssertionError):
    """Engines do not agree; the text is the report."""


# ------------------------------------------------------------------------------------------------ OSS, ShardedDDP


class MisuseError(ConfigurationError, AssertionError):
    """An invalid argument or call; FairScale 0.4.13 answers it with an ``assert``."""


class GradientError(FsshardError, RuntimeError):
    """Gradients are in a state from which they cannot be reduced."""


class NotConsolidated(FsshardError, RuntimeError):
    """The whole state was asked for on a rank that has only its own part of it."""


class NotCopyable(FsshardError, TypeError):
    """A sharded optimizer was to be copied or pickled, and it belongs to its process group."""


class NotTogether(RankMismatch):
    """Some ranks are in a collective of OSS and others are elsewhere; raised on all of them."""


class OptimizerStateMismatch(StateDictError, ValueError):
    """A state dict has other groups, parameters or shapes. Nothing has been loaded."""
