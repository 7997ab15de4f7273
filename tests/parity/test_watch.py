"""What each module put out, and which ran several times."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from fsshard.parity.watch import ForwardWatch, first_difference


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.cell(self.cell(x)))
        return out


def test_the_first_module_with_another_output_is_named() -> None:
    model = Twice()
    watch = ForwardWatch(model)
    x = torch.ones(2, 3)
    with watch.forward():
        model(x)
    before = [list(item) for item in watch.take()]
    assert [name for name, _ in before] == ["cell", "cell", "out", ""]
    with torch.no_grad():
        model.out.weight += 1
    model(x)  # outside, so not recorded
    with watch.forward():
        model(x)
    after = [list(item) for item in watch.take()]
    assert "another output is 'out'" in first_difference(before, after)
    assert first_difference(before, before) == ""
    assert first_difference(before, before[:2]) == "module 'out' ran 0 times, under the reference 1 times"
    assert (
        first_difference(before, [before[0], *before[2:]]) == "module 'out' ran where 'cell' does under the reference"
    )
    assert watch.take() == []


def test_repeated_counts_within_one_forward() -> None:
    model = Twice()
    watch = ForwardWatch(model)
    for _ in range(2):
        with watch.forward():
            model(torch.ones(2, 3))
    assert watch.repeated() == {"cell"}
    watch.take()
    assert watch.repeated() == set()


def test_who_ran_without_what_came_out() -> None:
    model = Twice()
    watch = ForwardWatch(model, outputs=False)
    with watch.forward():
        model(torch.ones(2, 3))
    assert watch.repeated() == {"cell"}
    assert watch.take() == [("cell", ""), ("cell", ""), ("out", ""), ("", "")]


def test_what_is_compiled_is_not_looked_into() -> None:
    model, counter = Twice(), CompileCounter()
    watch = ForwardWatch(model)
    with watch.forward():
        torch.compile(model.forward, backend=counter)(torch.ones(2, 3)).sum().backward()
    assert counter.frame_count == 1 and watch.take() == []
