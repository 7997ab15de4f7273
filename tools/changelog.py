"""Refuses a release whose section of CHANGELOG.md is longer than a page.

python -m tools.changelog
"""

from __future__ import annotations

from pathlib import Path

LONGEST = 60


def newest(text: str) -> tuple[str, int]:
    """Return the first section's heading, and how many lines it has that are not empty."""
    _, _, sections = text.partition("\n## ")
    section, _, _ = sections.partition("\n## ")
    heading, *lines = section.splitlines() or [""]
    return heading, sum(bool(line.strip()) for line in lines)


def main(file: Path = Path("CHANGELOG.md")) -> None:
    """Exit with a message if the newest section is missing or too long."""
    heading, count = newest(file.read_text(encoding="utf-8"))
    if not 0 < count <= LONGEST:
        raise SystemExit(
            f"{file}: expected 1 to {LONGEST} lines for a release, got {count} under {heading!r}: name what a user "
            "notices, and leave the rest to git"
        )


if __name__ == "__main__":
    main()
