"""Is it the same training? One recipe under several engines, compared with a reference to the last bit."""

from fsshard.parity.against import record
from fsshard.parity.comparison import compare
from fsshard.parity.engine import Engine
from fsshard.parity.findings import Cell, Difference, Divergence, StepReport
from fsshard.parity.recipe import Recipe, Split, resolve
from fsshard.parity.recorded import Trace
from fsshard.parity.report import ParityReport

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
