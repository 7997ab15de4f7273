"""What setup.cfg cannot say: README's links to other files of this repository lead there from anywhere."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

HOME = "https://github.com/fsshard/fsshard"
LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?://|#|mailto:)([^)\s]+)(\))")


def with_absolute_links(text: str, home: str = HOME) -> str:
    """Markdown whose relative links lead to the repository: pictures to the files, all else to their pages."""

    def absolute(match: re.Match[str]) -> str:
        before, path, after = match.groups()
        return f"{before}{home}/{'raw' if before.startswith('!') else 'blob'}/main/{path}{after}"

    return LINK.sub(absolute, text)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=with_absolute_links(readme), long_description_content_type="text/markdown")
