"""Checks that what is replaced is put back."""

from __future__ import annotations

import contextlib
import types

from fsshard.torch_private.patching import replaced


def test_what_was_there_is_put_back_after_an_error_too() -> None:
    owner = types.SimpleNamespace(here=1)
    with contextlib.suppress(ValueError), replaced(owner, "here", 2), replaced(owner, "new", 3):
        assert (owner.here, owner.new) == (2, 3)
        raise ValueError("inside")
    assert vars(owner) == {"here": 1}


def test_what_a_class_inherits_is_not_made_its_own() -> None:
    class Parent:
        name = "parent"

    class Child(Parent):
        pass

    with replaced(Child, "name", "child"):
        assert (Parent.name, Child.name) == ("parent", "child")
    assert Child.name == "parent" and "name" not in vars(Child)
