"""The blocks of the documentation's pages, found and run."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from typing import NamedTuple

import torch

DOCS = Path(__file__).parents[1] / "docs"
# Their blocks take names that the page explains, and have tests of their own.
ELSEWHERE = {"models.md"}
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>needs|shown): ?(?P<what>[^\n]*?) -->\n+)?"
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """Python of a page, what it prints if the page says so, and the mark in front of it.

    `<!-- needs: transformers, cuda -->` names packages or devices without which the block is passed over.
    `<!-- shown: reason -->` is for a block that is not a program of this page.
    """

    code: str
    printed: str | None
    line: int
    needs: tuple[str, ...]
    shown: str | None


def pages() -> list[Path]:
    """Every page with Python in it, but for those with tests of their own."""
    found = sorted(DOCS.rglob("*.md"))
    return [page for page in found if page.name not in ELSEWHERE and "```python" in page.read_text()]


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page, in their order."""
    found = []
    for match in BLOCK.finditer(text):
        mark, what = match["mark"], match["what"] or ""
        needs = tuple(re.split(r",\s*", what)) if mark == "needs" else ()
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(match["code"], match["printed"], line, needs, what if mark == "shown" else None))
    return found


def missing(needs: tuple[str, ...]) -> list[str]:
    """The packages and devices that are not here."""
    here = {"cuda": torch.cuda.is_available}
    return [n for n in needs if not (here[n]() if n in here else importlib.util.find_spec(n) is not None)]


def run(page: Path) -> list[str]:
    """Runs a page's blocks in one namespace; what was passed over, and why. Raises where a block prints otherwise."""
    space: dict[str, object] = {"__name__": "page"}
    passed = []
    for block in blocks(page.read_text()):
        if block.shown is not None:
            continue
        if absent := missing(block.needs):
            passed.append(f"line {block.line} needs {', '.join(absent)}")
            continue
        printed = io.StringIO()
        code = compile("\n" * block.line + block.code, str(page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, space)
        if block.printed is not None and printed.getvalue() != block.printed:
            raise AssertionError(f"{page.name}, line {block.line}, prints\n{printed.getvalue()}not\n{block.printed}")
    return passed
