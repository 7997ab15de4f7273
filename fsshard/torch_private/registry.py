"""The list of all private names that are used, and how each is looked up.

A name is probed for, when its area is imported: a version says nothing of builds from source, and torch moves private
names in patch releases. Where one is missing, its fallback is taken; where there is none, a stand-in is, which raises
:class:`fsshard.errors.PrivateTorchMissing` as soon as anything is asked of it, so that all that does without it works.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

from fsshard.errors import PrivateTorchMissing
from fsshard.torch_private.patching import replaced

__all__ = ["Area", "Private", "StoodOn", "everything", "stood_on"]

_NOTHING: Any = object()


@dataclass(frozen=True, kw_only=True)
class Private:
    """One private name of torch.

    Attributes:
        area: the file of this room that takes it.
        name: ``"module:qualified.name"``; of an attribute that torch gives to objects, ``"module:Class.name"``.
        source: the file of torch 2.13 that has it.
        use: what it is for.
        otherwise: what happens where it is missing.
        is_attribute: whether objects have it, and not their class.
        fallback: whether there is one.
    """

    area: str
    name: str
    source: str
    use: str
    otherwise: str
    is_attribute: bool = False
    fallback: bool = False

    @property
    def attribute(self) -> str:
        """The last part of its name."""
        return _last(self.name)

    @functools.cached_property
    def present(self) -> bool:
        """Return whether this torch has it. Imports the module of torch that should."""
        return _mentioned(self.name) if self.is_attribute else _found(self.name) is not _NOTHING

    @functools.cached_property
    def value(self) -> Any:
        """It, for those that are not looked up with their area, since torch takes seconds to import them.

        Raises:
            PrivateTorchMissing: this torch does not have it.
        """
        found = _found(self.name)
        if found is _NOTHING:
            self.missing()
        return found

    def replaced_by(self, value: Any) -> AbstractContextManager[None]:
        """Put ``value`` in its place, within; who has imported it by name before does not see that.

        Raises:
            PrivateTorchMissing: this torch does not have it.
        """
        self.value  # noqa: B018  # raises
        owner, name = self.name.rpartition(".")[::2] if "." in self.name.partition(":")[2] else self.name.split(":")
        return replaced(_module(owner) if ":" not in owner else _found(owner), name, value)

    def missing(self) -> NoReturn:
        """Say what is lost."""
        raise PrivateTorchMissing(self.name, self.source, self.otherwise)


class StoodOn(NamedTuple):
    """Something of torch's that nothing here names, and whose behaviour an area counts on all the same.

    Attributes:
        area: the file of this room.
        name: ``"module:function"``, ``"module:Class"`` with its methods, or ``"module"`` with all that it defines.
        why: what of its behaviour is counted on.
    """

    area: str
    name: str
    why: str


_known: dict[tuple[str, str], Private] = {}
_stood_on: list[StoodOn] = []


class Area:
    """One file of this room: what it takes is remembered under its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def take(self, name: str, *, source: str, use: str, otherwise: str, fallback: Any = _NOTHING) -> Any:
        """Return what is at ``"module:qualified.name"``, or what stands for it.

        Args:
            name: where it is.
            source: the file of torch 2.13 that has it.
            use: what it is for.
            otherwise: what happens where it is missing: what is lost, or what the fallback does.
            fallback: in its place; without one, a stand-in that raises when it is used.
        """
        entry = self._note(name, source, use, otherwise, fallback=fallback is not _NOTHING)
        found = _found(name)
        if found is not _NOTHING:
            return found
        return _Missing(entry) if fallback is _NOTHING else fallback

    def later(self, name: str, *, source: str, use: str, otherwise: str) -> Private:
        """Note what is looked up when it is first used, as ``.value``; else like :meth:`take`."""
        return self._note(name, source, use, otherwise)

    def attribute(self, name: str, *, source: str, use: str, otherwise: str) -> str:
        """The last part of ``"module:Class.name"`` or ``"module:name"``, which torch gives to objects.

        It is for getattr, setattr and hasattr.

        What reads such an attribute with a default goes on without it; what reads it without one raises
        AttributeError. Either is what ``otherwise`` is to say.
        """
        self._note(name, source, use, otherwise, is_attribute=True)
        return _last(name)

    def reader(self, name: str, *, source: str, use: str, otherwise: str) -> Callable[[Any], Any]:
        """Return what reads ``"module:Class.name"`` off an object, as fast as code that names it."""
        entry = self._note(name, source, use, otherwise, is_attribute=True)
        here = name.partition(":")[0] in sys.modules  # what is not imported yet stays so: torch takes seconds for some
        return _Missing(entry) if here and not entry.present else attrgetter(_last(name))

    def stands_on(self, whys: Mapping[str, str]) -> None:
        """Note what is not used by name, and what behaviour of it is counted on; see :class:`StoodOn`.

        It is not looked up: tools/torch_digests.py reads its source to see whether it has changed.
        """
        _stood_on.extend(StoodOn(self.name, name, why) for name, why in whys.items())

    def _note(
        self, name: str, source: str, use: str, otherwise: str, *, is_attribute: bool = False, fallback: bool = False
    ) -> Private:
        entry = Private(
            area=self.name,
            name=name,
            source=source,
            use=use,
            otherwise=otherwise,
            is_attribute=is_attribute,
            fallback=fallback,
        )
        _known[self.name, name] = entry
        return entry


def _raise(stand_in: _Missing) -> NoReturn:
    entry: Private = vars(stand_in)["_entry"]
    entry.missing()


class _Missing:
    """Stands for what this torch does not have."""

    def __init__(self, entry: Private) -> None:
        self.__dict__["_entry"] = entry

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _raise(self)

    def __getattr__(self, name: str) -> NoReturn:
        _raise(self)

    def __mro_entries__(self, bases: Any) -> NoReturn:
        _raise(self)

    def __instancecheck__(self, instance: object) -> bool:
        return False  # nothing is of a class that does not exist


def everything() -> tuple[Private, ...]:
    """Every private name that is used, by area. Imports all areas."""
    _import_areas()
    return tuple(entry for _, entry in sorted(_known.items()))


def stood_on() -> tuple[StoodOn, ...]:
    """All that is counted on without being used by name, by area. Imports all areas."""
    _import_areas()
    return tuple(sorted(_stood_on))


def _import_areas() -> None:
    room = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(room.__path__):
        importlib.import_module(f"{__package__}.{module.name}")


def _last(name: str) -> str:
    return name.replace(":", ".").rpartition(".")[2]


def _found(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except (ImportError, AttributeError):  # AttributeError: of a module of a torch that is built without distributed
        return _NOTHING
    for part in path.split("."):
        found = getattr(found, part, _NOTHING)
        if found is _NOTHING:
            return _NOTHING
    return found


def _mentioned(name: str) -> bool:
    """Return whether a class, or a module, has an attribute, or its source mentions it.

    An object has it no sooner than it exists; but a name that no line of torch's mentions is not set by any.
    """
    owner, _, attribute = name.rpartition(".")
    if ":" not in owner:  # of objects that a module's functions make
        owner, _, attribute = name.partition(":")
    found = _found(owner) if ":" in owner else _module(owner)
    if found is _NOTHING or hasattr(found, attribute):
        return found is not _NOTHING
    modules = [kind.__module__ for kind in found.__mro__] if isinstance(found, type) else [owner]
    return any(attribute in _words(module) for module in modules)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError):
        return _NOTHING


@functools.cache
def _words(module: str) -> frozenset[str]:
    """The names in a module's source; none where it has no such."""
    try:
        return frozenset(re.findall(r"\w+", inspect.getsource(sys.modules[module])))
    except (OSError, TypeError):
        return frozenset()
