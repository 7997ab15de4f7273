"""Pages of the site that lie outside of ``docs``, and links that leave it. A hook of mkdocs.

The pages are those that GitHub shows: a link is written relative to its file, and may lead anywhere in the repository.
Here a link to another page stays within the site, and any other file is linked to in the repository.
"""

from __future__ import annotations

import logging
import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "build" / "docs-package"
"""Where mkdocs.yml has the docstrings looked for: ``compat`` is ``fsshard.compat`` there, as it is when installed."""

ELSEWHERE = {
    "index.md": "README.md",
    "examples.md": "examples/minimal/README.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
"""Page of the site -> the file of the repository that it shows."""

BOOST = {
    **dict.fromkeys((f"reference/{page}.md" for page in ("training", "planning", "checkpoints", "parity")), 2.0),
    **dict.fromkeys(("benchmarks.md", "changelog.md", "contributing.md", "troubleshooting.md"), 0.5),
}
"""How much more a word that is searched for weighs on a page: ``wrap`` finds the function, ``optimizer`` its guide."""

log = logging.getLogger("mkdocs.hooks.links")


def on_startup(**_: Any) -> None:
    """Lay the package out as ``pip install`` does."""
    shutil.rmtree(PACKAGE, ignore_errors=True)
    without = shutil.ignore_patterns("__pycache__", "*.json")
    shutil.copytree(ROOT / "fsshard", PACKAGE / "fsshard", ignore=without)
    shutil.copytree(ROOT / "compat", PACKAGE / "fsshard" / "compat", ignore=without)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from elsewhere."""
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn the repository's links into the site's, outside of code."""
    name = page.file.src_uri
    if name in BOOST:
        page.meta["search"] = {"boost": BOOST[name]}
    source = ELSEWHERE.get(name, f"docs/{name}")
    parts = re.split(r"(^ *```.*?^ *```$|`[^`\n]+`(?!\]))", markdown, flags=re.DOTALL | re.MULTILINE)
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(
            r"\]\(([^)\s]+)\)", lambda link: f"]({site_link(link[1], source, name, config.repo_url)})", parts[index]
        )
        parts[index] = re.sub(r"\[(\d+)\](?!\()", r"\\[\1\\]", parts[index])  # a note's number is no link
    return "".join(parts)


def site_link(link: str, source: str, page: str, repository: str) -> str:
    """Where a link of a file of the repository leads on the site."""
    path, _, anchor = link.partition("#")
    if "://" in link or link.startswith("mailto:") or not path:
        return link
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    anchor = f"#{anchor}" if anchor else ""
    own = {shown: name for name, shown in ELSEWHERE.items()}.get(target)
    if own is None and target.startswith("docs/") and not target.startswith("docs/maintainers"):
        own = target.removeprefix("docs/")
    if own is not None:
        return posixpath.relpath(own, posixpath.dirname(page) or ".") + anchor
    if not (ROOT / target).exists():
        log.warning("%s: the link to %s leads nowhere", source, link)
    kind = "tree" if (ROOT / target).is_dir() else "blob"
    return f"{repository.rstrip('/')}/{kind}/main/{target}{anchor}"
