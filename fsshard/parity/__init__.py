"""Is it the same training? One recipe under many engines, held against a reference, to the last bit."""

from fsshard.parity.comparison import compare
from fsshard.parity.engine import Engine
from fsshard.parity.recipe import Recipe, resolve
from fsshard.parity.report import Cell, Difference, Divergence, ParityReport, StepReport

__all__ = ["Cell", "Difference", "Divergence", "Engine", "ParityReport", "Recipe", "StepReport", "compare", "resolve"]
