"""``make wheel`` asks of a wheel what it should, without building one."""

from __future__ import annotations

import configparser
import re
import runpy
import tarfile
import zipfile
from pathlib import Path

from tests import wheel
from tests.documents import ROOT


def test_a_file_that_a_wheel_lacks_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "empty.whl", "w"):
        pass
    everything = wheel.missing(tmp_path / "empty.whl")
    assert {"fsshard/py.typed", "fsshard/compat/__main__.py", "fsshard_pytest.py"} <= {*everything}
    with zipfile.ZipFile(tmp_path / "most.whl", "w") as packed:
        for name in everything:
            if not name.endswith("py.typed"):
                packed.writestr(name, "")
    assert wheel.missing(tmp_path / "most.whl") == ["fsshard/py.typed"]


def test_readmes_code_is_run_as_a_user_has_it(tmp_path: Path) -> None:
    """Its training, its three lines for CI, its commands; no file of this checkout but the examples."""
    wheel.write(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for file in ("train.py", "proof/test_train.py"):
        assert (tmp_path / file).read_text() in readme
    commands = [step for step in wheel.steps() if step.startswith("fsshard ")]
    assert {command.split()[1] for command in commands} == {"demo", "doctor", "parity", "tune"}
    assert all(command in readme for command in commands)
    assert {path.name for path in tmp_path.iterdir()} == {"examples", "load.py", "proof", "train.py"}


def test_a_source_distribution_has_all_that_git_knows(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "fsshard-1.tar.gz", "w:gz"):
        pass
    assert {"Makefile", "tests/zoo.py", "docs/proof.md", ".ci/run"} <= {*wheel.missing(tmp_path / "fsshard-1.tar.gz")}


def test_the_long_description_has_no_relative_link() -> None:
    described = runpy.run_path(str(ROOT / "setup.py"))["with_absolute_links"]((ROOT / "README.md").read_text("utf-8"))
    links = re.findall(r"\]\(([^)]+)\)", described)
    assert len(links) > 20 and all(link.startswith(("https://", "#")) for link in links)
    assert "![" in described and "/raw/main/docs/darcy.png)" in described


def test_the_extra_all_has_what_users_of_other_libraries_need() -> None:
    extras = configparser.ConfigParser()
    extras.read(ROOT / "setup.cfg", encoding="utf-8")
    told = extras["options.extras_require"]["all"]
    fronts = {path.parent.name for path in (ROOT / "compat").glob("*/__init__.py")} - {"children", "neuralop"}
    assert [front for front in fronts if front not in told] == []
