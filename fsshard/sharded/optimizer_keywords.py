"""Parameters that an optimizer's constructor takes by keyword, as neuraloperator's ``AdamW(galore_params=...)``.

Engines divide groups, and a constructor of such a class makes a group of them by itself. So the class is built once of
stand-ins without memory, which shows its groups, and from then on these are given to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.errors import OptimizerError
from fsshard.planning.entries import Entry
from fsshard.sharded.optimizer_checks import rank_independent_text

Groups = list[dict[str, Any]]
Keywords = Mapping[str, Any]
Entries = Mapping[str, Entry]
"""The model's parameters by name."""


def parameters_by_keyword(
    defaults: Keywords,
    entries: Entries,
    find: Callable[[Any], Entry],
) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Return the names of the parameters that stand in settings, by keyword, and the settings without them.

    Args:
        defaults: settings by keyword. A list, or a generator, of parameters or of their names stands for parameters.
        find: gives the entry of a parameter or a name; raises for what is not the model's.
    """
    named = {}
    settings = {}
    for key, value in defaults.items():
        if inspect.isgenerator(value):
            value = list(value)
        if _are_parameters(value, entries):
            named[key] = [find(member).name for member in value]
        else:
            settings[key] = value
    return named, settings


def _are_parameters(value: Any, entries: Entries) -> bool:
    """Return whether a setting is a list of parameters or of names of some."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    if any(isinstance(member, nn.Parameter) for member in value):
        return True
    return all(isinstance(member, str) and member in entries for member in value)


def groups_with_keywords(
    optimizer_class: type[Optimizer],
    groups: Sequence[Keywords],
    named: Mapping[str, Sequence[str]],
    settings: Keywords,
    entries: Entries,
) -> Groups:
    """Return the groups, by names, that the class makes of those that are given and of what is named by keyword.

    Raises:
        OptimizerError: the class cannot be built of stand-ins, or uses such parameters otherwise than as groups.
    """
    key = next(iter(named))
    advice = (
        "give them as a group of their own, with the settings that the class reads there: "
        "[{'params': others}, {'params': these, ...}]"
    )
    stand_ins = _StandIns(entries)
    by_keyword = {keyword: stand_ins.of(names) for keyword, names in named.items()}
    try:
        first = stand_ins.built(optimizer_class, groups, {**settings, **by_keyword})
        made = stand_ins.groups_of(first)
        second = stand_ins.built(optimizer_class, made, settings)
    except Exception as error:
        raise OptimizerError(
            f"{key}=[...]: {optimizer_class.__name__} could not be built of parameters without values, which shows "
            f"what it does with these ({type(error).__name__}: {error}); {advice}"
        ) from error
    if stand_ins.facts(first) != stand_ins.facts(second):
        raise OptimizerError(
            f"{key}=[...]: expected {optimizer_class.__name__} to make groups of these parameters and no more, and it "
            f"keeps them elsewhere, too; {advice}"
        )
    return made


class _StandIns:
    """Parameters without memory, one for each of the model's."""

    def __init__(self, entries: Entries) -> None:
        self._by_name: dict[str, nn.Parameter] = {}
        for name, entry in entries.items():
            empty = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            self._by_name[name] = nn.Parameter(empty, entry.parameter.requires_grad)
        self._names = {id(parameter): name for name, parameter in self._by_name.items()}

    def of(self, names: Iterable[str]) -> list[nn.Parameter]:
        return [self._by_name[name] for name in names]

    def built(
        self,
        optimizer_class: type[Optimizer],
        groups: Sequence[Keywords],
        settings: Keywords,
    ) -> Optimizer:
        own_groups = [{**group, "params": self.of(group["params"])} for group in groups]
        return optimizer_class(own_groups, **settings)

    def groups_of(self, optimizer: Optimizer) -> Groups:
        groups = []
        for group in optimizer.param_groups:
            names = [self._names[id(parameter)] for parameter in group["params"]]
            groups.append({**group, "params": names})
        return groups

    def facts(self, optimizer: Optimizer) -> list[Any]:
        """Return all that an optimizer is, with names in place of parameters."""
        members = dict(vars(optimizer))
        tables = [*members.pop("param_groups")]
        for parameter, state in members.pop("state").items():
            tables.append({self._text(parameter): dict(state)})
        tables.append(members)
        # Texts, since two optimizers have different objects.
        facts = []
        for table in tables:
            facts += [(key, self._text(table[key])) for key in sorted(table)]
        return facts

    def _text(self, value: Any) -> str:
        if isinstance(value, Tensor) and id(value) in self._names:
            return self._names[id(value)]
        if isinstance(value, (list, tuple)):
            return ", ".join(map(self._text, value))
        return rank_independent_text(value)
