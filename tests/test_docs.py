"""What the documentation prints is what its code prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

DOCS = Path(__file__).parent.parent / "docs"


def job_train(code: str) -> str:
    names: dict[str, Any] = {"__name__": "docs"}
    exec(compile(code, "docs/estimate.md", "exec"), names)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names["train"](SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size()))
    return printed.getvalue()


def test_estimate(ranks: Any) -> None:
    text = (DOCS / "estimate.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def train" in block)
    printed = ranks.run(job_train, 2, code)[0]
    explained, _, tracked = printed.partition("memory under")
    assert f"```\n{explained}```" in text
    head, *rows = (re.split(" {2,}", line) for line in tracked.splitlines())
    shown = text.partition("memory under")[2].splitlines()
    assert head[0] == shown[0] and rows[0] == re.split(" {2,}", shown[1])
    assert rows[-1][-1] == re.split(" {2,}", shown[6])[-1], "where the peak is"
