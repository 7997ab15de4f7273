"""Is it the same training? One recipe under several engines, compared with a reference to the last bit."""

from fsshard.parity.engine import Engine
from fsshard.parity.render import ParityReport
from fsshard.parity.report import Cell, Difference, Divergence, StepReport
from fsshard.parity.runs import compare, record
from fsshard.parity.trace import Trace
from fsshard.recipes.recipe import Recipe, Split, resolve

__all__ = [
    "Cell",
    "Difference",
    "Divergence",
    "Engine",
    "ParityReport",
    "Recipe",
    "Split",
    "StepReport",
    "Trace",
    "compare",
    "record",
    "resolve",
]
