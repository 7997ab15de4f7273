"""What is noted of a gradient goes with it, and is forgotten with its numbers."""

from __future__ import annotations

import pytest
import torch

from fsshard.errors import GradientError
from fsshard.oss.gradient_marks import carried, carry, forget, has_note, is_common, is_sent, mark_common, mark_sent


def test_notes_lie_on_the_tensor_itself() -> None:
    common, sent, none = torch.ones(2), torch.ones(2), torch.ones(2)
    mark_common(common)
    mark_sent(sent)
    assert is_common(common) and is_sent(sent) and has_note(common) and has_note(sent)
    assert not (is_common(sent) or is_sent(common) or has_note(none) or is_sent(None))
    assert not has_note(common.clone()), "another tensor is another gradient"
    forget(common)
    assert not has_note(common)


def test_the_mean_that_a_part_is_added_to() -> None:
    part, mean = torch.ones(2), torch.full((2,), 3.0)
    assert carried(part) is None
    carry(part, mean)
    assert carried(part) is mean and has_note(part)


def test_a_part_that_was_set_to_zero_has_no_mean_and_one_that_was_changed_is_refused() -> None:
    part, mean = torch.ones(2), torch.ones(2)
    carry(part, mean)
    part.zero_()
    assert carried(part) is None and not has_note(part)
    part.fill_(1.0)
    carry(part, mean)
    part.mul_(0.5)
    with pytest.raises(GradientError, match="changed in place"):
        carried(part)
