"""A site in a headless Chromium: what of its pages is cut, what the console says, what the search finds.

    python -m tests.browser build/site build/pictures    # a picture of each page, as wide as a desk and a phone

The browser is driven by a page of ours: it shows one page after the other in a frame, which may be narrower than any
window, measures it, and posts what it found to the server that it came from. Needs Python alone, and ``chromium``,
``google-chrome`` or the like among the programs.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["DESK", "PHONE", "Looked", "find", "look", "picture"]

DESK, PHONE = 1280, 390
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
LIMIT = 240
"""Seconds for all pages at one width, so that a browser that hangs ends."""

PAGE = """<!doctype html><meta charset="utf-8"><title>looks at pages</title>
<body style="margin:0"><iframe id="frame" style="border:0;width:WIDTHpx;height:900px"></iframe><script>
const frame = document.getElementById("frame"), found = {pages: {}, search: []}
const load = address => new Promise(done => { frame.onload = () => done(frame.contentDocument); frame.src = address })
const until = async test => { for (let i = 0; i < 200 && !test(); i++) await new Promise(r => setTimeout(r, 50)) }
function scrolls(node, view) {
  for (let up = node; up; up = up.parentElement)
    if (["auto", "scroll"].includes(view.getComputedStyle(up).overflowX)) return true
  return false
}
function measure(page) {
  const view = frame.contentWindow, told = []
  const wide = page.documentElement.scrollWidth
  if (wide > WIDTH) told.push(`the page is ${wide} wide`)
  for (const image of page.querySelectorAll("article img"))
    if (!image.naturalWidth) told.push(`no picture ${image.src}`)
  for (const node of page.querySelectorAll("article *")) {
    if (node.closest(".md-nav, .highlight nav, svg")) continue
    const box = node.getBoundingClientRect()
    if (box.width && box.right > WIDTH + 1 && !scrolls(node, view))
      told.push(`cut: ${node.tagName} ${node.textContent.trim().slice(0, 60)}`)
  }
  for (const table of page.querySelectorAll("article table"))
    if (!scrolls(table, view)) told.push(`a table that does not scroll: ${table.textContent.trim().slice(0, 60)}`)
  return told
}
async function main() {
  for (const address of PAGES) {
    const page = await load(address)
    await until(() => page.querySelector(".md-typeset__scrollwrap") || !page.querySelector("article table"))
    await Promise.all([...page.images].map(image => image.decode().catch(() => 0)))
    found.pages[address] = measure(page)
  }
  const page = await load("/?q=wrap")
  const hits = () => [...page.querySelectorAll(".md-search-result__link")].map(link => link.getAttribute("href"))
  await until(() => hits().length)
  found.search = hits()
  await fetch("/found", {method: "POST", body: JSON.stringify(found)})
}
main().catch(error => fetch("/found", {method: "POST", body: JSON.stringify({error: String(error)})}))
</script>
"""


@dataclass
class Looked:
    """What was seen.

    Attributes:
        pages: address of a page -> what is wrong with it.
        search: the addresses that a search for ``wrap`` gives, the best first.
        console: lines of the browser's console that are errors.
    """

    pages: dict[str, list[str]]
    search: list[str]
    console: list[str]


def find() -> str | None:
    """The browser's program."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Handler(SimpleHTTPRequestHandler):
    """Files of the site, and of our own the page that looks, and what it posts."""

    def __init__(self, *args: Any, looking: dict[str, Any], **named: Any) -> None:
        self.looking = looking
        super().__init__(*args, **named)

    def do_GET(self) -> None:
        if self.path != "/look":
            super().do_GET()
            return
        body = self.looking["page"].encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.looking["found"] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.looking["done"].set()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def served(site: Path, page: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The address of a server of the site, and what becomes known."""
    looking: dict[str, Any] = {"page": page, "done": threading.Event()}
    handler = functools.partial(Handler, directory=str(site), looking=looking)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", looking
        server.shutdown()


def command(program: str, profile: str, *words: str) -> list[str]:
    """Of a browser that has a profile of its own and asks nobody for anything."""
    quiet = ["--disable-background-networking", "--disable-component-update", "--no-first-run", "--disable-gpu"]
    return [program, "--headless=new", "--no-sandbox", *quiet, f"--user-data-dir={profile}", *words]


def addresses(site: Path) -> list[str]:
    """Of all pages."""
    return sorted(f"/{path.parent.relative_to(site)}/".replace("/./", "/") for path in site.rglob("index.html"))


def look(site: Path, width: int, program: str) -> Looked:
    """Show each page ``width`` wide.

    Raises:
        TimeoutError: the browser has not come to the end of the pages.
    """
    page = PAGE.replace("WIDTH", str(width)).replace("PAGES", json.dumps(addresses(site)))
    with tempfile.TemporaryDirectory() as profile, served(site, page) as (home, looking):
        log = Path(profile) / "log"
        with log.open("w") as lines:
            words = ["--enable-logging=stderr", "--window-size=1400,1000", f"{home}/look"]
            browser = subprocess.Popen(command(program, profile, *words), stdout=lines, stderr=lines)
            try:
                in_time = looking["done"].wait(LIMIT)
            finally:
                browser.terminate()
                browser.wait()
        console = re.findall(r"CONSOLE.*?\] (.*)", log.read_text(errors="replace"))
    if not in_time or "error" in looking["found"]:
        raise TimeoutError(f"{program} at width {width}: {looking.get('found', 'no answer')}; {console[:5]}")
    return Looked(looking["found"]["pages"], looking["found"]["search"], console)


def picture(site: Path, address: str, width: int, path: Path, program: str) -> None:
    """A picture of the top of a page, four screens high."""
    frame = (
        f'<!doctype html><body style="margin:0"><iframe src="{address}" style="border:0;width:{width}px;height:3600px">'
    )
    with tempfile.TemporaryDirectory() as profile, served(site, frame) as (home, _):
        words = [f"--window-size={max(width, 500)},3600", f"--screenshot={path}", "--hide-scrollbars", f"{home}/look"]
        subprocess.run(command(program, profile, *words), capture_output=True, check=True, timeout=LIMIT)


if __name__ == "__main__":
    folder, where = Path(sys.argv[1]), Path(sys.argv[2])
    where.mkdir(parents=True, exist_ok=True)
    for one in addresses(folder):
        for wide in (DESK, PHONE):
            name = one.strip("/").replace("/", "-") or "index"
            picture(folder, one, wide, where / f"{name}-{wide}.png", find() or "chromium")
