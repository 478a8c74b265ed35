"""Doctests inside the text of a docstring become code blocks; Markdown would read their arrows as quotations."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^>>> .*\n?(?:^(?!>>> )\S.*\n?|^>>> .*\n?)*)", re.MULTILINE)


def fenced(text: str) -> str:
    """The text with each run of doctest lines as a block of its own.

    >>> print(fenced("One:\\n\\n>>> 1 + 1\\n2\\n\\nTwo."))
    One:
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    <BLANKLINE>
    Two.
    """
    return DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)


class Doctests(griffe.Extension):
    """Changes the docstrings of all objects before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
