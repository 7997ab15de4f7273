"""A recipe: what is trained, in the user's own functions, without any engine."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from fsshard.errors import RecipeError
from fsshard.parity.description import Recipe, Split, check_loss, join_batches
from fsshard.parity.lightning_modules import from_lightning

__all__ = ["Recipe", "Split", "check_loss", "from_lightning", "join_batches", "resolve"]


UNLIKE_ANY = ("join", "name", "seed", "split")
"""Words that occur in names of anything."""
WITH_FSSHARD = "fsshard.recipes"
"""Those are known by their names alone."""
RecipeLike = Any
"""A :class:`Recipe`, an object like one, a function that returns one, ``"module:attribute"`` naming either, or the name
of one that comes with fsshard (:mod:`fsshard.recipes`), such as ``"tfno"``."""


def resolve(source: RecipeLike) -> Recipe:
    """The recipe that ``source`` means.

    Raises:
        RecipeError: it means none.
    """
    name = source if isinstance(source, str) else type(source).__name__
    found = _imported(source) if isinstance(source, str) else source
    if not _like_recipe(found) and callable(found) and not isinstance(found, Recipe):
        name = _title(found) if not isinstance(source, str) else name
        found = _called(found)
    if isinstance(found, Recipe):
        return found if found.name else _renamed(found, name)
    if not _like_recipe(found):
        raise RecipeError(
            f"{name!r} is not a recipe: expected build(), batches(rank, world_size, number) and loss(model, batch), "
            f"or a function without arguments that returns an object with them; got {type(found).__name__}"
        )
    given = {f.name: getattr(found, f.name) for f in fields(Recipe) if hasattr(found, f.name)}
    _check_spelling(found, [f.name for f in fields(Recipe) if f.name not in (*given, *UNLIKE_ANY)])
    return Recipe(**{"name": name, **given})


def _check_spelling(found: Any, defaults: Sequence[str]) -> None:
    """An object may hold what it likes, but a default must not stand in for an attribute that is misspelt."""
    for name in dir(found):
        within = [default for default in defaults if default in name]
        meant = within or difflib.get_close_matches(name, defaults, n=1, cutoff=0.75)
        if meant and not name.startswith("_"):
            raise RecipeError(
                f"{type(found).__name__}.{name} is not an attribute of a recipe; does it mean {meant[0]}? If so, "
                f"rename it; if not, set {meant[0]} too"
            )


def _imported(spec: str) -> Any:
    module_name, colon, attribute = spec.partition(":")
    if not colon:
        module_name, attribute = WITH_FSSHARD, _known_name(spec)
    elif not module_name or not attribute:
        raise RecipeError(f"{spec!r}: expected 'module:attribute', for example train:recipe")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the module is there, something that it imports is not
        raise RecipeError(f"{spec!r}: there is no module {error.name!r} (looked in {os.getcwd()} too)") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise RecipeError(f"{spec!r}: {module_name} has no {part!r}; {_offered(module, part)}")
        found = getattr(found, part)
    return found


def _known_name(name: str) -> str:
    """One of the recipes that come with fsshard."""
    names: list[str] = importlib.import_module(WITH_FSSHARD).__all__
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    meant = f"; does it mean {near[0]}?" if near else ""
    raise RecipeError(
        f"{name!r}: expected 'module:attribute' of yours, for example train:recipe, or a recipe that comes with "
        f"fsshard: {', '.join(names)}{meant}"
    )


def _offered(module: Any, wanted: str) -> str:
    """Return what can be asked for in place of a name that is not there."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    recipes = [name for name, value in public.items() if _looks_like_recipe(value, module)]
    near = difflib.get_close_matches(wanted, recipes, n=1)
    meant = f"; does it mean {near[0]}?" if near else ""
    if recipes:
        return f"it has {', '.join(recipes)}{meant}"
    callables = [name for name, value in public.items() if _is_own_function(value, module) and not _needed(value)]
    if callables:
        return f"nothing in it is marked as a recipe; these can be called without arguments: {', '.join(callables)}"
    return "it has no recipe"


def _looks_like_recipe(value: Any, module: Any) -> bool:
    """Return whether it is sure to be one. Nothing is called, and of what is not the module's own nothing is asked."""
    if isinstance(value, Recipe):
        return True
    if _is_own_function(value, module):
        return not _needed(value) and _returns_recipe(value)
    return type(value).__module__ == module.__name__ and _like_recipe(value)


def _is_own_function(value: Any, module: Any) -> bool:
    """A function of the module, or a partial that it made: of a function from anywhere."""
    return isinstance(value, functools.partial) or (inspect.isfunction(value) and value.__module__ == module.__name__)


def _returns_recipe(value: Any) -> bool:
    """By its annotation, or because it is a partial of a function here that has none but is sure to return one."""
    while isinstance(value, functools.partial):
        value = value.func
    returns = getattr(value, "__annotations__", {}).get("return") if inspect.isfunction(value) else value
    return returns is Recipe or (isinstance(returns, str) and returns.rpartition(".")[2].strip("'\"") == "Recipe")


def _needed(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that have no default."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    return [p.name for p in found if p.default is p.empty and p.kind not in kinds]


def _like_recipe(value: Any) -> bool:
    return not isinstance(value, type) and all(callable(getattr(value, n, None)) for n in ("build", "batches", "loss"))


def _called(function: Callable[..., Any]) -> Any:
    needed = _needed(function)
    if needed:
        raise RecipeError(f"{_title(function)}() needs {', '.join(needed)}; a recipe function takes no arguments")
    return function()


def _title(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", "") or type(function).__name__


def _renamed(recipe: Recipe, name: str) -> Recipe:
    return Recipe(**{**{f.name: getattr(recipe, f.name) for f in fields(Recipe)}, "name": name})
