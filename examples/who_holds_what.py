"""Draws what each rank holds under each engine: a bar per engine, divided by kind.

    python examples/who_holds_what.py --picture docs/who-holds-what.svg

Nothing is trained: ``fsshard.estimate`` runs a step of the real engines on tensors without memory, as one rank of four.
"""

import argparse

import torch
from torch import nn

import fsshard
from fsshard.pictures import COLOURS, draw_picture

RANKS, LAYERS, WIDTH = 4, 12, 1024
ENGINES = ("ddp", "fairscale", "fsdp", "fsdp2")
KINDS = ("parameters", "gradients", "optimizer state", "gathered units")
MIB = 2**20


def estimates():
    """Return the forecast of each engine for a network of equal layers, under Adam."""
    found = {}
    for engine in ENGINES:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        found[engine] = fsshard.estimate(
            model,
            batch=torch.empty(1, WIDTH),
            backend=engine,
            world_size=RANKS,
            optimizer=torch.optim.Adam,
            auto_wrap_policy={nn.Linear},
        )
    return found


def paint(figure, found):
    """Fill a figure with a bar per engine; each part is the most that a rank holds of its kind."""
    axes = figure.subplots()
    names = [*found][::-1]
    lefts = dict.fromkeys(names, 0.0)
    for kind, colour in zip(KINDS, COLOURS, strict=False):
        widths = [found[name].highest[kind] / MIB for name in names]
        axes.barh(names, widths, left=[lefts[name] for name in names], color=colour, label=kind, height=0.6)
        for name, width in zip(names, widths, strict=True):
            if width > 9:
                axes.text(lefts[name] + width / 2, name, f"{width:.0f}", ha="center", va="center", color="white")
            lefts[name] += width
    for name in names:
        axes.text(lefts[name] + 2, name, f"{lefts[name]:.0f} MiB", va="center", weight="bold")
    axes.set(xlim=(0, 1.13 * max(lefts.values())), xlabel=f"MiB on each of {RANKS} ranks")
    axes.legend(ncols=len(KINDS), loc="lower left", bbox_to_anchor=(-0.02, 1.0), columnspacing=1.2)


def main():
    """Read the command line, estimate and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", default="who-holds-what.svg", metavar="FILE", help=".svg, .png or .pdf")
    asked = parser.parse_args()
    found = estimates()
    for name, forecast in found.items():
        held = ", ".join(f"{kind} {forecast.highest[kind] / MIB:.1f}" for kind in KINDS)
        print(f"{name}: {held} MiB")
    draw_picture(asked.picture, (9, 2.9), lambda figure: paint(figure, found))


if __name__ == "__main__":
    main()
