"""The conda recipe and the citation say what setup.cfg says."""

from __future__ import annotations

import configparser

import yaml

import fsshard
from tests.documents import ROOT


def packages(text: str) -> set[str]:
    """Return the requirements of a field of setup.cfg, as conda writes them."""
    return {line.replace("torch>=", "pytorch>=").replace(">=", " >=") for line in text.split()}


def test_recipe_and_citation() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    recipe = yaml.safe_load((ROOT / "recipe/meta.yaml").read_text("utf-8"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    metadata, options, extras = setup["metadata"], setup["options"], setup["options.extras_require"]

    assert recipe["package"] == {"name": "fsshard", "version": fsshard.__version__}
    assert citation["version"] == fsshard.__version__
    assert citation["license"] == recipe["about"]["license"] == metadata["license"]
    assert citation["repository-code"] == recipe["about"]["dev_url"] == metadata["url"]

    python = f"python {options['python_requires']}"
    # conda has no extras, and the command needs some packages.
    needed = packages(options["install_requires"] + extras["cli"])
    assert {*recipe["requirements"]["run"]} == {"__linux", python, *needed}
    assert python in recipe["requirements"]["host"]
    optional = packages(extras["accelerate"] + extras["lightning"] + extras["transformers"])
    assert {*recipe["requirements"]["run_constrained"]} <= optional
    assert recipe["build"]["entry_points"] == [setup["options.entry_points"]["console_scripts"].strip()]
