"""Counts how much code there is, and how dense it is: nodes of Python's syntax tree, and nodes per line of code.

    python -m tools.density fsshard compat          # a row of Markdown for each folder
    python -m tools.density --files 20 fsshard      # and its densest files
    python -m tools.density torch=.venv/lib/python3.11/site-packages/torch/distributed/fsdp/_fully_shard

A line of code is neither blank, nor a comment, nor a part of a docstring.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
HEAD = "| code | lines | lines of code | nodes | nodes per line | comprehensions | conditional expressions | comments |"


@dataclass
class Density:
    """Counts over some files.

    Attributes:
        lines: all of them.
        code: lines of code.
        comments: lines that hold a comment alone.
        nodes: of the syntax trees.
        comprehensions: and generator expressions.
        conditionals: expressions ``a if b else c``.
    """

    lines: int = 0
    code: int = 0
    comments: int = 0
    nodes: int = 0
    comprehensions: int = 0
    conditionals: int = 0

    @property
    def nodes_per_line(self) -> float:
        """Nodes per line of code."""
        return self.nodes / max(1, self.code)

    def per_hundred(self, count: int) -> float:
        """Return ``count`` per 100 lines of code."""
        return 100 * count / max(1, self.code)

    def row(self, name: str) -> str:
        """Return a row of Markdown."""
        return (
            f"| {name} | {self.lines:,} | {self.code:,} | {self.nodes:,} | {self.nodes_per_line:.1f} "
            f"| {self.per_hundred(self.comprehensions):.1f} | {self.per_hundred(self.conditionals):.1f} "
            f"| {self.per_hundred(self.comments):.1f} % |"
        )


def density_of(files: Iterable[Path]) -> Density:
    """Count over Python files."""
    total = Density()
    for file in files:
        text = file.read_text("utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        documented = _lines_of_docstrings(nodes)
        for number, line in enumerate(text.splitlines(), start=1):
            total.lines += 1
            if not line.strip() or number in documented:
                continue
            if line.lstrip().startswith("#"):
                total.comments += 1
            else:
                total.code += 1
        total.nodes += len(nodes)
        total.comprehensions += sum(isinstance(node, COMPREHENSIONS) for node in nodes)
        total.conditionals += sum(isinstance(node, ast.IfExp) for node in nodes)
    return total


def _lines_of_docstrings(nodes: Iterable[ast.AST]) -> set[int]:
    """Return the lines of texts that stand alone."""
    lines: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="folders, each with a name in front of it (name=folder) or without")
    parser.add_argument("--files", type=int, default=0, help="list that many of the densest files, too")
    asked = parser.parse_args()
    print(f"{HEAD}\n|{'---|' * HEAD.count(' | ')}---|")
    everything: list[Path] = []
    for folder in asked.folders:
        name, _, place = folder.rpartition("=")
        files = sorted(Path(place).rglob("*.py"))
        everything += files
        print(density_of(files).row(name or place))
    densest = sorted(everything, key=lambda file: density_of([file]).nodes_per_line, reverse=True)
    for file in densest[: asked.files]:
        print(density_of([file]).row(str(file)))


if __name__ == "__main__":
    main()
