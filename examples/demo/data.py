"""Text to learn: the standard library's sources, pydoc's topics, the Zen of Python and the licence where installed."""

from __future__ import annotations

import codecs
import contextlib
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_CORPUS = 12_000_000  # bytes
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "ensurepip"}


class Corpus(NamedTuple):
    train: Tensor  # uint8
    held_out: Tensor  # uint8: every twentieth document


def load_corpus() -> Corpus:
    """The same bytes in the same order whenever the same Python is asked."""
    library = Path(sysconfig.get_path("stdlib"))
    documents = list(_prose(library))
    size = sum(map(len, documents))
    for path in sorted(library.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(library).parts):
            with contextlib.suppress(OSError):
                documents.append(path.read_bytes())
                size += len(documents[-1])
        if size > LARGEST_CORPUS:
            break
    if size < 100_000:
        raise RuntimeError(f"demo: found only {size} bytes of the standard library's text in {library}")
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for index, document in enumerate(documents):
        parts[index % 20 == 19].append(document)
    train, held_out = (torch.frombuffer(bytearray(b"\n\n".join(part)), dtype=torch.uint8) for part in parts)
    return Corpus(train, held_out)


def _prose(library: Path) -> Iterator[bytes]:
    with contextlib.suppress(ImportError):  # some distributions package it apart
        from pydoc_data.topics import topics

        for name in sorted(topics):
            yield topics[name].encode()
    zen = library / "this.py"
    if zen.is_file():
        found = re.search(r'"""(.*?)"""', zen.read_text(encoding="utf-8"), re.DOTALL)
        if found:
            yield codecs.decode(found[1], "rot13").encode()
    for licence in (library / "LICENSE.txt", library.parent.parent / "LICENSE.txt"):
        if licence.is_file():
            yield licence.read_bytes()


def draw_batch(text: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(bytes, next bytes), both [batch, context] int64."""
    starts = torch.randint(text.shape[0] - context, (batch,), generator=generator)
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
