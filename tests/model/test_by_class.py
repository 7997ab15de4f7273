"""What is found out about a class is found out once, and goes with the class."""

from __future__ import annotations

import gc
import weakref

from fsshard.model.by_class import once_per_class


def test_once_for_each_class() -> None:
    asked: list[type] = []

    @once_per_class
    def name_of(kind: type) -> str:
        """What it does."""
        asked.append(kind)
        return kind.__name__

    assert [name_of(kind) for kind in (int, str, int, str)] == ["int", "str", "int", "str"]
    assert asked == [int, str] and name_of.__doc__ == "What it does."


def test_a_class_is_not_kept() -> None:
    found = once_per_class(lambda kind: kind.__name__)
    kind = type("Kind", (), {})
    assert found(kind) == "Kind"
    left = weakref.ref(kind)
    del kind
    gc.collect()
    assert left() is None
