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
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn

from fsshard.errors import PrivateTorchMissing
from fsshard.torch_private.patching import replaced

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
        return self.name.replace(":", ".").rpartition(".")[2]

    @functools.cached_property
    def present(self) -> bool:
        """Return whether this torch has it. Imports the module of torch that should."""
        if self.is_attribute:
            return _mentioned(self.name)
        return _found(self.name) is not _NOTHING

    @functools.cached_property
    def value(self) -> Any:
        """The object, for names that are not looked up with their area, since torch takes seconds to import them.

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
        module, _, path = self.name.partition(":")
        owner, _, last = path.rpartition(".")
        return replaced(_found(f"{module}:{owner}"), last, value)

    def missing(self) -> NoReturn:
        """Say what is lost."""
        raise PrivateTorchMissing(self.name, self.source, self.otherwise)


_known: dict[tuple[str, str], Private] = {}


class Area:
    """One file of this room: what it takes is remembered under its name.

    Args:
        name: of the file.
        cpp: the file of torch that has those of its names that are written in C++, unless ``source`` names another.
        otherwise: what is lost without any of its names, unless one says something else.
    """

    def __init__(self, name: str, *, cpp: str = "", otherwise: str = "") -> None:
        self.name = name
        self._cpp = cpp
        self._otherwise = otherwise

    def take(
        self,
        name: str,
        *,
        use: str,
        otherwise: str = "",
        source: str = "",
        fallback: Any = _NOTHING,
    ) -> Any:
        """Return what is at ``"module:qualified.name"``, or what stands for it.

        Args:
            name: where it is.
            use: what it is for.
            otherwise: what happens where it is missing: what is lost, or what the fallback does.
            source: the file of torch 2.13 that has it, where that is not the module's own.
            fallback: in its place; without one, a stand-in that raises when it is used.
        """
        entry = self._note(name, use, otherwise, source, fallback=fallback is not _NOTHING)
        found = _found(name)
        if found is not _NOTHING:
            return found
        if fallback is _NOTHING:
            return _Missing(entry)
        return fallback

    def later(self, name: str, *, use: str, otherwise: str = "", source: str = "") -> Private:
        """Note what is looked up when it is first used, as ``.value``; else like :meth:`take`."""
        return self._note(name, use, otherwise, source)

    def attribute(self, name: str, *, use: str, otherwise: str = "", source: str = "") -> str:
        """Return the last part of ``"module:Class.name"`` or ``"module:name"``, which torch gives to objects.

        It is for getattr, setattr and hasattr. What reads such an attribute with a default goes on without it; what
        reads it without one raises AttributeError. Either is what ``otherwise`` is to say.
        """
        return self._note(name, use, otherwise, source, is_attribute=True).attribute

    def reader(self, name: str, *, use: str, otherwise: str = "", source: str = "") -> Callable[[Any], Any]:
        """Return what reads ``"module:Class.name"`` off an object, as fast as code that names it."""
        entry = self._note(name, use, otherwise, source, is_attribute=True)
        here = name.partition(":")[0] in sys.modules  # what is not imported yet stays so: torch takes seconds for some
        if here and not entry.present:
            return _Missing(entry)
        return attrgetter(entry.attribute)

    def _note(
        self,
        name: str,
        use: str,
        otherwise: str,
        source: str,
        **kind: bool,
    ) -> Private:
        module = name.partition(":")[0]
        in_cpp = module in ("torch", "torch.distributed") or module.startswith("torch._C")
        source = source or (self._cpp if in_cpp else f"{module.replace('.', '/')}.py")
        otherwise = otherwise or self._otherwise
        entry = Private(area=self.name, name=name, source=source, use=use, otherwise=otherwise, **kind)
        _known[self.name, name] = entry
        return entry


class _Missing:
    """Placeholder for a name that this torch lacks; raises when it is used."""

    def __init__(self, entry: Private) -> None:
        self.__dict__["_entry"] = entry

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        vars(self)["_entry"].missing()
        raise AssertionError

    def __getattr__(self, name: str) -> NoReturn:
        self()

    def __mro_entries__(self, bases: Any) -> NoReturn:
        self()

    def __instancecheck__(self, instance: object) -> bool:
        return False  # nothing is of a class that does not exist


def everything() -> tuple[Private, ...]:
    """Return every private name that is used, by area. Imports all areas."""
    room = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(room.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
    return tuple(entry for _, entry in sorted(_known.items()))


def _found(name: str) -> Any:
    """Return what is at ``"module:qualified.name"``, or at ``"module:"`` the module; ``_NOTHING`` where it is not."""
    module, _, path = name.partition(":")
    try:
        value = importlib.import_module(module)
    except (ImportError, AttributeError):  # AttributeError: of a module of a torch that is built without distributed
        return _NOTHING
    for part in path.split(".") if path else ():
        value = getattr(value, part, _NOTHING)
        if value is _NOTHING:
            return _NOTHING
    return value


def _mentioned(name: str) -> bool:
    """Return whether a class, or a module, has an attribute, or its source mentions it.

    An object has it no sooner than it exists; but a name that no line of torch's mentions is not set by any.
    """
    module, _, path = name.partition(":")
    owner, _, attribute = path.rpartition(".")  # no owner: of objects that a module's functions make
    found = _found(f"{module}:{owner}")
    if found is _NOTHING or hasattr(found, attribute):
        return found is not _NOTHING
    modules = [kind.__module__ for kind in found.__mro__] if isinstance(found, type) else [module]
    return any(attribute in _words(module) for module in modules)


@functools.cache
def _words(module: str) -> frozenset[str]:
    """Return the names in a module's source; none where it has no such."""
    try:
        return frozenset(re.findall(r"\w+", inspect.getsource(sys.modules[module])))
    except (OSError, TypeError):
        return frozenset()
