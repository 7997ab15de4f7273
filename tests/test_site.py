"""The site that `make docs` builds: it has every page and every public name, and no dead link."""

from __future__ import annotations

import html.parser
import importlib
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.documents import ROOT

DOCS = ROOT / "docs"
SHOWS_ALL = {"fsshard.errors", "fsshard.recipes", "fsshard.compat.fairscale_checkpoints"}
"""Modules that a page of the reference shows whole."""

PUBLIC = (
    "fsshard",
    "fsshard.backends",
    "fsshard.compat",
    "fsshard.compat.accelerate",
    "fsshard.compat.fairscale_checkpoints",
    "fsshard.compat.lightning",
    "fsshard.compat.neuralop",
    "fsshard.compat.transformers",
    "fsshard.errors",
    "fsshard.parallel",
    "fsshard.parity",
    "fsshard.recipes",
)
"""Packages whose names are for users."""


SEARCHED = {
    "slurm": "launching/",
    "multi-node": "launching/",
    "two nodes": "launching/",
    "ray train": "launching/",
    "optimizer": "optimizers/",
    "resume on fewer gpus": "checkpoints/",
    "resume": "ten-minutes/",
    "torchrun": "launching/",
    "gradient accumulation": "ten-minutes/",
    "dataloader": "launching/",
    "muon": "optimizers/",
    "out of memory": "troubleshooting/",
}
"""What newcomers search for -> the page that has it in a heading, which the search ranks first."""


def in_nav() -> list[str]:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    return re.findall(r"([\w/-]+\.md)$", nav, re.MULTILINE)


def test_every_page_is_in_the_navigation_once() -> None:
    elsewhere = re.findall(r'^    "([\w-]+\.md)": "(\S+)",$', (ROOT / "website" / "links.py").read_text(), re.MULTILINE)
    assert [source for _, source in elsewhere if not (ROOT / source).is_file()] == []
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | {page for page, _ in elsewhere}
    assert sorted(in_nav()) == sorted(page for page in pages if not page.startswith("maintainers/"))


def test_the_site_has_the_addresses_of_the_package() -> None:
    setup, site = (ROOT / "setup.cfg").read_text(), (ROOT / "mkdocs.yml").read_text()
    for key, said in (("repo_url", r"^url = (\S+)$"), ("site_url", r"Documentation = (\S+)$")):
        (address,) = re.findall(said, setup, re.MULTILINE)
        assert re.search(rf"^{key}: {re.escape(address)}/?$", site, re.MULTILINE), key


def test_every_public_name_is_in_the_reference() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md")]
    shown = re.findall(r"^::: (\S+)$", "\n".join(texts), re.MULTILINE)
    assert len(shown) == len(set(shown)) and set(shown) >= SHOWS_ALL
    whole = {f"fsshard.{name}" for name in importlib.import_module("fsshard.errors").__all__}
    for package in PUBLIC:
        if package not in SHOWS_ALL:
            needed = package.removeprefix("fsshard.compat.").replace("neuralop", "neuralop.models")
            if not package.startswith("fsshard.compat.") or find_spec(needed.partition(".")[0]):
                names = {f"{package}.{name}" for name in importlib.import_module(package).__all__}
                assert names - whole - set(shown) == set(), package


def test_the_reference_shows_what_users_call() -> None:
    """Of classes that other rooms call too: a list, whose names are there, and not what only these rooms call."""
    text = (DOCS / "reference" / "training.md").read_text(encoding="utf-8")
    lists = re.findall(
        r"^::: fsshard\.(\w+)\n    options:\n      heading_level: 3\n      members: \[(.*?)\]", text, re.M | re.S
    )
    members = {name: re.findall(r"\w+", listed) for name, listed in lists}
    assert {"ShardedModule", "ShardedOptimizer"} <= set(members)
    for name, listed in members.items():
        kind = getattr(importlib.import_module("fsshard"), name)
        assert [member for member in listed if member not in vars(kind)] == []
        assert not {"check_filled", "finish_gradients", "simulate", "norm_of", "find_entry"} & {*listed}


def test_messages_that_are_explained_are_those_that_are_raised() -> None:
    """The text between the dots of a heading is in the source; messages of torch's come first."""
    sources = [path.read_text(encoding="utf-8") for top in ("fsshard", "compat") for path in (ROOT / top).rglob("*.py")]
    source = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))
    ours = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").partition("\n## When wrapping\n")[2]
    messages = re.findall(r"^### `(.*)`$", ours, re.MULTILINE)
    assert len(messages) > 25
    parts = [part.strip(" ,;:") for message in messages for part in message.split("...")]
    assert [part for part in parts if part not in source] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly, where mkdocs is installed."""
    own = ROOT / ".venv-docs" / "bin" / "python"
    python = str(own) if own.is_file() else sys.executable
    if not own.is_file() and not all(map(find_spec, ("mkdocs", "mkdocstrings_handlers"))):
        pytest.skip("mkdocs is not installed: make docs makes an environment that has it")
    folder = tmp_path_factory.mktemp("site")
    command = [python, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


class Seen(html.parser.HTMLParser):
    """The parts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.heads, self.ids, self.links, self.loads = 0, {""}, list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.heads += tag == "h1"
        self.ids.add(given.get("id") or "")
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        loaded = tag == "link" and given.get("rel") in ("icon", "stylesheet")
        source = given.get("src") or (given.get("href") if loaded else None)
        self.loads += [source] if source else []


def test_pages_are_whole(site: Path) -> None:
    """One title; links and anchors lead somewhere; nothing is loaded from elsewhere."""
    pages = {path: Seen(path.read_text(encoding="utf-8")) for path in site.rglob("index.html")}
    assert len(pages) == len(in_nav())
    for path, page in pages.items():
        assert page.heads == 1, path
        assert [source for source in page.loads if re.match("(https?:)?//", source)] == [], path
        for link in (*page.links, *page.loads):
            name, _, anchor = link.partition("#")
            if not re.match(r"(\w+:)?//|\w+:", link):
                target = (path.parent / name).resolve() if name else path
                target = target / "index.html" if target.is_dir() else target
                assert target.is_file(), (path, link)
                assert target not in pages or anchor in pages[target].ids, (path, link)


def test_the_search_finds_pages_by_their_headings(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    for words, page in SEARCHED.items():
        found = {entry["location"].partition("#")[0] for entry in entries if words in entry["title"].lower()}
        assert page in found, (words, found)


def test_torchs_names_lead_to_its_documentation(site: Path) -> None:
    text = (site / "reference" / "training" / "index.html").read_text(encoding="utf-8")
    for name in ("torch.nn.Module", "torch.optim.Optimizer", "torch.device"):
        assert re.search(rf'href="https://docs\.pytorch\.org/[^"]*{re.escape(name)}', text), name
