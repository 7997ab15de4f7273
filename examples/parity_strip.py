"""Draws a comparison of engines as a strip: a row per engine, a cell per step, and a planted fault.

    python examples/parity_strip.py --picture docs/parity.svg

A cell is green if every loss, gradient, weight and optimizer state of that step is bit-identical to DDP's. The last
row is a script of its own over DDP, which in one step forgets to average its gradients.
"""

import argparse

import torch
from torch import nn

import fsshard.parity
from fsshard.pictures import COLOURS, draw_picture

ENGINES = ("fairscale", "fsdp", "fsdp2", "ddp")
RANKS, STEPS, FAULT = (2, 4), 20, 12


class Forgetful(fsshard.parity.Engine):
    """A script over torch's DDP, one of whose steps has the gradients of each rank alone."""

    name = "a script with a bug"

    def __init__(self, recipe, module):
        super().__init__(recipe, module)
        self.module, self.model, self.steps = module, nn.parallel.DistributedDataParallel(module), 0
        self.optimizer = recipe.optimizer(module.parameters(), **recipe.hyper)

    def forward(self):
        """Return the context of a forward."""
        return self.model.no_sync() if self.steps == FAULT else super().forward()

    def step(self):
        """Update the weights, and count."""
        super().step()
        self.steps += 1


def recipe():
    """Return a small network, trained on numbers of each rank's own."""
    return fsshard.parity.Recipe(
        build=lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)),
        batches=lambda rank, world_size, number: torch.randn(
            16, 8, generator=torch.Generator().manual_seed(1000 * rank + number)
        ),
        loss=lambda model, batch: (model(batch) - batch.square().mean(1, keepdim=True)).square().mean(),
        optimizer=torch.optim.AdamW,
        hyper={"lr": 1e-2},
    )


def compared():
    """Return a list of rows: a name, and the verdict of each step."""
    report = fsshard.parity.compare(recipe, backends=[*ENGINES], world_sizes=[*RANKS], steps=STEPS)
    report.cells += fsshard.parity.compare(recipe, backends=[Forgetful], world_sizes=[2], steps=STEPS).cells
    rows = []
    for cell in report:
        verdicts = []
        for step in cell.steps:
            quantities = [each.verdict for named in step.differences.values() for each in named.values()]
            verdicts.append("exact" if {*quantities} == {"exact"} else "different")
        rows.append((f"{cell.backend}, {cell.world_size} ranks", verdicts))
    return rows


def paint(figure, rows):
    """Fill a figure with the cells."""
    axes = figure.subplots()
    for height, (_, verdicts) in enumerate(rows):
        for step, verdict in enumerate(verdicts):
            exact = verdict == "exact"
            axes.barh(height, 0.9, left=step - 0.45, height=0.8, color=COLOURS[2] if exact else COLOURS[1])
            if not exact:
                axes.text(step, height, "x", ha="center", va="center", color="white", weight="bold")
    axes.set(xlabel="step", xticks=range(0, STEPS, 4), xlim=(-0.6, STEPS - 0.4))
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for colour, label in ((COLOURS[2], "every number bit-identical to DDP"), (COLOURS[1], "different")):
        axes.bar([0], [0], color=colour, label=label)
    axes.legend(ncols=2, loc="lower left", bbox_to_anchor=(-0.02, 1.0))


def main():
    """Read the command line, compare and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", default="parity.svg", metavar="FILE", help=".svg, .png or .pdf")
    asked = parser.parse_args()
    rows = compared()
    for name, verdicts in rows:
        print(f"{name}: {verdicts.count('exact')} of {len(verdicts)} steps exact")
    draw_picture(asked.picture, (9, 0.4 * len(rows) + 1.1), lambda figure: paint(figure, rows))


if __name__ == "__main__":
    main()
