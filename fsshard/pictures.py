"""Files that commands write: in one piece, if they can be written, and pictures without date and random names."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsshard.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def check_file(path: str | Path) -> Path:
    """Return ``path``, or raise ConfigurationError if no file can be written there. Asked before the runs."""
    path = Path(path)
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigurationError(f"{str(path)!r} is a folder; give the name of a file in it")
    if not folder.is_dir():
        raise ConfigurationError(f"{str(path)!r}: there is no folder {str(folder)!r}; make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigurationError(f"{str(path)!r} cannot be written: permission denied; give another name or folder")
    return path


def replace_file(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that it appears in one piece or not at all."""
    temporary = file.with_name(f".{file.stem}-{uuid.uuid4().hex}{file.suffix}")  # mkstemp's would be private
    try:
        write(temporary)
        with temporary.open("r+b") as written:
            os.fsync(written.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def check_picture(path: str | Path) -> Path:
    """Return ``path``, if a picture can be written there.

    Raises:
        ConfigurationError: the suffix names no kind of picture, or no file can be written there.
        MissingExtra: matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        got = f"suffix {path.suffix!r}" if path.suffix else "no suffix"
        raise ConfigurationError(f"{str(path)!r}: expected a file name that ends in .png, .svg or .pdf, got {got}")
    check_file(path)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtra("matplotlib", "plot", "a picture") from error
    return path


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette: told apart under the usual kinds of colour blindness."""
GREY, FAINT = "#4D4D4D", "#BFBFBF"
STYLE = {
    "axes.prop_cycle": f"cycler('color', {[*COLOURS]})",
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 12,
    "font.size": 11,
    "legend.frameon": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
}
"""matplotlib's settings of all pictures in the documentation."""


def draw_picture(path: str | Path, inches: tuple[float, float], paint: Callable[[Figure], object]) -> None:
    """Have ``paint`` fill a figure in the one style of all pictures, and write it to ``path``.

    Raises:
        ConfigurationError: as :func:`check_picture`.
        MissingExtra: matplotlib is not installed.
    """
    path = check_picture(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        made = Figure(figsize=inches, layout="constrained")
        paint(made)
        save_picture(made, path)


def save_picture(made: Figure, path: Path) -> None:
    """Write a figure of matplotlib to ``path``, which :func:`check_picture` has seen."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(made)  # no display, whatever the environment says
    # Without date and random ids the same content gives the same file.
    kind = path.suffix.lower()[1:]
    dated: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with rc_context({"svg.hashsalt": "fsshard"}):
        made.savefig(path, dpi=150, metadata=dated.get(kind), format=kind)


def style_axes(axes: Axes, grid: Any = "y") -> None:
    """Draw a light grid behind, along one axis or ``"both"``, and no frame above and to the right."""
    axes.grid(True, axis=grid, color="#E6E6E6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
