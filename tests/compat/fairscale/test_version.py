"""The release of FairScale whose names are served: the one that the extra installs and the tests compare with."""

from __future__ import annotations

import configparser
from pathlib import Path

from fsshard.compat import fairscale
from fsshard.compat.fairscale.version import __version_tuple__

ROOT = Path(__file__).resolve().parents[3]


def test_it_is_the_one_that_the_extra_names() -> None:
    assert fairscale.__version__ == ".".join(map(str, __version_tuple__))
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = setup["options.extras_require"]["fairscale"].split()
    assert wanted == [f"fairscale=={fairscale.__version__}"]
