"""List the backends that there are: ours, those of other packages, and those that a script registers.

A backend has a name and a class. Ours are listed here by where they are, so that a job imports the engines that it uses
and no others. Others come by :func:`register_backend` in a module that the script imports, by the entry-point group
``fsshard.backends`` of an installed package, or unregistered, by ``backend="module:Class"``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from importlib import import_module, metadata
from typing import TypeVar

from fsshard.backends.base import Backend
from fsshard.backends.settings import HINTS, Settings
from fsshard.errors import ConfigurationError, UnknownBackend, UnsupportedByBackend
from fsshard.launching.supervisor import handed

log = logging.getLogger("fsshard")

# The entry-point group: name = module:Class. It is read when a name is asked for that is not known otherwise.
GROUP = "fsshard.backends"

# The backend with which others are compared by default.
REFERENCE = "ddp"

_OURS = {
    "none": "fsshard.backends.none:SingleBackend",
    "ddp": "fsshard.backends.ddp:DDPBackend",
    "fsdp": "fsshard.backends.fsdp1:FSDP1Backend",
    "fsdp2": "fsshard.backends.fsdp2:FSDP2Backend",
    "fairscale": "fsshard.backends.fairscale:FairScaleBackend",
}
_OUR_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "ShardedDataParallel"})
_paths: dict[str, str] = dict(_OURS)  # name -> "module:Class", imported or not
_classes: dict[str, type[Backend]] = {}  # name -> class, of those that are imported

B = TypeVar("B", bound=type[Backend])


def register_backend(cls: B) -> B:
    """Let ``backend=cls.name`` mean this class, wherever fsshard takes a backend's name: a class decorator.

    Processes that this one starts (:func:`fsshard.launch`, ranks of ``parity.compare``, the simulation of ``estimate``
    and ``tune``) are told the class's module, and import it when they are asked for the name.

    Args:
        cls: a subclass of :class:`~fsshard.backends.base.Backend` at the top level of a module, with a ``name``.

    Raises:
        ConfigurationError: it is not such a class, its name is not valid, or another class has that name.
    """
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise ConfigurationError(f"register_backend takes a subclass of fsshard.backends.Backend, got {cls!r}")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name.isidentifier() or name == "auto":
        raise ConfigurationError(
            f"{cls.__qualname__}.name = {name!r}: expected letters, digits and underscores, which users write in "
            "backend=, and not 'auto'"
        )
    path = f"{cls.__module__}:{cls.__qualname__}"
    earlier = _paths.get(name, path)
    # A spawned process imports the main script under another name.
    if earlier.replace("__mp_main__", "__main__") != path.replace("__mp_main__", "__main__"):
        raise ConfigurationError(f"backend {name!r} is {earlier} already; give {path} another name")
    _paths[name] = path
    _classes[name] = cls
    _hand_on()
    return cls


def _hand_on() -> None:
    """Tell processes that this one starts, or gives work to, which backends of others are registered here."""
    # A spawned process imports the main script by itself, under another name.
    by_themselves = ("__main__:", "__mp_main__:")
    paths = []
    for name, path in _paths.items():
        is_local = "<" in path
        if name not in _OURS and not is_local and not path.startswith(by_themselves):
            paths.append((name, path))
    handed["backends"] = _are_at, tuple(paths)


def _are_at(paths: tuple[tuple[str, str], ...]) -> None:
    """In such a process: what is registered there, to be imported when it is asked for; what is not any more goes."""
    names = {name for name, _ in paths}
    for name in _names_of_parent - names:
        _paths.pop(name, None)
        _classes.pop(name, None)
    _names_of_parent.clear()
    for name, path in paths:
        if _paths.setdefault(name, path) == path:
            _names_of_parent.add(name)
    _hand_on()


_names_of_parent: set[str] = set()  # names that the process knows which gives work to this one
_hand_on()  # that there are none, too


def backend_names() -> list[str]:
    """Return all names that ``backend=`` takes, ours first; nothing is imported."""
    return list(dict.fromkeys([*_paths, *_entry_points()]))


def backend_class(name: object, world_size: int = 2) -> type[Backend]:
    """Return the class that ``backend=name`` means in a job of ``world_size`` ranks.

    Args:
        name: a name, ``"auto"``, or ``"module:Class"``.
        world_size: how many ranks there are, which ``"auto"`` depends on.

    Raises:
        UnknownBackend: lists the known ones.
        ConfigurationError: it cannot be imported, or is not a backend.
    """
    if name == "auto":
        name = "none" if world_size == 1 else "fsdp2"
    if isinstance(name, str) and name in _classes:
        return _classes[name]
    path = _path_of(name) if isinstance(name, str) else None
    if path is None:
        raise UnknownBackend(name, backend_names())
    cls = _imported(path, f"backend={name!r}")
    if name not in (cls.name, path):
        raise ConfigurationError(f"backend {name!r} is {path}, whose name is {cls.name!r}; register it under that")
    return cls


def loaded_backends() -> Iterator[type[Backend]]:
    """Yield ours, each of which is imported, and those of others that this process has imported."""
    for name in _OURS:
        yield backend_class(name)
    yield from [cls for name, cls in _classes.items() if name not in _OURS]


def check_known(cls: type[Backend], settings: Settings) -> None:
    """Raise for an option or a strategy that a backend does not have, and name those that do. Local.

    Raises:
        ConfigurationError: an option is nobody's, or another's.
        UnsupportedByBackend: a sharding strategy is.
    """
    for name in sorted(set(settings.options) - set(cls.facts.option_names) - HINTS):
        others = [repr(each.name) for each in loaded_backends() if name in each.facts.option_names]
        known = ", ".join(cls.facts.option_names) or "none"
        whose = "neither"
        if others:
            whose = f"one of backend={' or '.join(others)}"
        raise ConfigurationError(
            f"{name}=: expected an argument of fsshard.wrap, or an option of backend {cls.name!r} ({known}), got "
            f"{whose}; leave it out"
        )
    strategy = settings.sharding_strategy
    if strategy in (None, *cls.facts.strategies):
        return
    names = []
    strategies = []
    for backend in loaded_backends():
        facts = backend.facts
        strategies.append(f"{backend.name} {', '.join(facts.strategies)}")
        if strategy in facts.strategies and not facts.one_process:
            names.append(repr(backend.name))
    advice = "the nearest is 'HYBRID_SHARD' of 'fsdp2' and 'fsdp'"
    if names:
        advice = f"use backend={' or '.join(reversed(names))}"
    raise UnsupportedByBackend(
        f"sharding_strategy={strategy!r}",
        cls.name,
        f"{advice}, or leave it out, and each backend takes its own. They have: {'; '.join(strategies)}",
    )


def wrapper_classes() -> frozenset[str]:
    """Return the names of the classes whose modules are under an engine already; no engine is imported for it."""
    return _OUR_WRAPPERS.union(*(cls.facts.wrapper_classes for cls in _classes.values()))


def _path_of(name: str) -> str | None:
    if name in _paths:
        return _paths[name]
    return name if ":" in name else _entry_points().get(name)


def _imported(path: str, asked: str) -> type[Backend]:
    module, _, attribute = path.partition(":")
    try:
        registered = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"{asked}: {path} cannot be imported here ({type(error).__name__}: {error}); the module must be importable "
            "by that name in every process of the job"
        ) from error
    cls: type[Backend] = register_backend(registered)
    return cls


@cache
def _entry_points() -> dict[str, str]:
    """Return name -> "module:Class" of those that installed packages bring."""
    paths: dict[str, str] = {}
    for point in metadata.entry_points(group=GROUP):
        name = point.name
        # Names of ours stay ours.
        first = _OURS.get(name) or paths.setdefault(name, point.value)
        if first != point.value:
            log.warning("two packages have a backend %r; %s is not used", name, point.value)
    return paths
