"""The blocks of docs/judge.md print what the page says, its sentences are the judge's own, its commands exist."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from moeroute import cli
from moeroute.conformance import cases

PAGE = (Path(__file__).parents[2] / "docs" / "judge.md").read_text()
SOURCES = "\n".join(path.read_text() for path in (Path(__file__).parents[2] / "src/moeroute/conformance").glob("*.py"))
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_prints_what_the_page_says(number: int) -> None:
    code, printed = BLOCKS[number]
    said = io.StringIO()
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(said):
        exec(code, names)
    assert said.getvalue() == printed


def test_every_block_is_run() -> None:
    assert PAGE.count("```python") == len(BLOCKS) == 4
    assert f"{len(cases()):,}\ncases" in PAGE or f"{len(cases()):,} cases" in PAGE.replace("\n", " ")


def test_sentences_are_those_of_the_judge() -> None:
    rows = re.findall(
        r"^\| [^|]+ \| ([^|]+) \|$", PAGE.partition("### What it says")[2].partition("## Judge a module")[0], re.M
    )
    assert len(rows) == 16
    text = " ".join(SOURCES.split()).replace('" f"', "").replace('" "', "")
    for sentence in rows[2:]:
        for part in re.split(r"[;:(]|\d+|`\w+`|'s\b", sentence):
            for piece in re.findall(r"[a-z -]{12,}", part):
                piece = piece.strip()
                words = [word for word in piece.split() if len(word) > 3]
                assert all(word in text for word in words), piece


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"moeroute (verify|cases export|cases compare)\b([^\n`]*)", PAGE)))
)
def test_commands_have_these_options(command: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command[0].split(), "--help"])
    known = capsys.readouterr().out
    for option in re.findall(r"--\w+", command[1].partition("#")[0]):
        assert option in known
