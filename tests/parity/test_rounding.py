"""One batch out of the ranks' batches: its samples, and their order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fsshard.parity.rounding import NotComparable, reordered, samples_of


def test_samples_lie_along_the_first_dimension_of_all_that_has_one() -> None:
    assert samples_of({"x": torch.zeros(3, 2), "y": [np.zeros(3), "a name"], "scale": 2.0}) == 3
    with pytest.raises(NotComparable, match=r"tensors of the batch have \[2, 3\] rows"):
        samples_of([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(NotComparable, match=r"tensors of the batch have \[\] rows"):
        samples_of({"only": "words"})


def test_all_are_put_in_the_same_order() -> None:
    found = reordered({"x": torch.arange(6).reshape(3, 2), "y": np.arange(3), "kept": "word"}, [2, 0, 1])
    assert found["x"].tolist() == [[4, 5], [0, 1], [2, 3]] and found["y"].tolist() == [2, 0, 1]
    assert found["kept"] == "word"
