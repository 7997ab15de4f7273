"""neuraloperator's own Darcy files, out of its wheel of version 0.3.0 (4 MB, BSD licence), which pip fetches."""

from __future__ import annotations

import functools
import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from fsshard.demo.common import cache_dir, replace_file

__all__ = ["SHA256", "official_files"]

log = logging.getLogger(__name__)

REQUIREMENT = "neuraloperator==0.3.0"
WITHIN = "neuralop/datasets/data"
SHA256 = {
    "darcy_train_16.pt": "0be662acdb1dab7dfd1a1da0b140e97f75cc94f98a14edcf768abe6968b3b418",
    "darcy_test_16.pt": "d2b19af9d4a6ae04ba2de54b8ecccc8b89766472faf6ce7f506c0b2a60f69a4c",
    "darcy_test_32.pt": "bcbd10622373e94df84a17fcdb72ac4317d76e024c2499d21fd1fd34d0742cfd",
}
"""Of the files, as that wheel has them."""


def official_files() -> Path:
    """The folder with the files: the user's cache, filled by ``pip download`` the first time. pip shows a progress bar.

    Returns:
        ``~/.cache/fsshard/darcy-official``, for the ``data_dir`` of :func:`fsshard.demo.darcy.load`.

    Raises:
        FileNotFoundError: pip cannot fetch the wheel, or what it fetched is not what was published.
    """
    folder = cache_dir("darcy-official")
    if all(_whole(folder / name, digest) for name, digest in SHA256.items()):
        return folder
    with tempfile.TemporaryDirectory() as there:
        wheel = _fetched(Path(there))
        with zipfile.ZipFile(wheel) as packed:
            contents = {name: packed.read(f"{WITHIN}/{name}") for name in SHA256}
    damaged = [name for name, content in contents.items() if hashlib.sha256(content).hexdigest() != SHA256[name]]
    if damaged:
        raise FileNotFoundError(f"{wheel.name} has another {damaged[0]} than the wheel that was published")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        replace_file(folder / name, functools.partial(_written, content))
    log.info("kept neuraloperator's Darcy files in %s", folder)
    return folder


def _written(content: bytes, file: Path) -> None:
    file.write_bytes(content)


def _whole(file: Path, digest: str) -> bool:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest() == digest
    except OSError:
        return False


def _fetched(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    found = sorted(folder.glob("*.whl"))
    if done.returncode or not found:
        said = (done.stderr or "").strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise FileNotFoundError(
            f"pip cannot fetch {REQUIREMENT}, whose wheel has the Darcy files ({said}); on another machine, run "
            f"pip download --no-deps {REQUIREMENT}, unzip it, and pass --data-dir .../{WITHIN}; or leave out --data "
            "official: the data are solved here then"
        )
    return found[0]
