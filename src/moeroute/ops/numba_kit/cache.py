"""Compiled kernels on disk: Numba's cache, in which a damaged file costs one compilation and nothing else.

Numba itself raises whatever unpickling raises, and runs object code that only looks whole. So each file ends with
a checksum. A file without the right one is as good as none, and the compilation that follows writes it anew.
"""

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.runtime import rtsys

SUM_BYTES = 32

# What `moeroute info` says of this process.
damaged: set[str] = set()  # files that had to be compiled anew
unwritten: str | None = None  # why a kernel could not be kept


def _sum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _read(path: str, parse: Callable[[], Any]) -> Any:
    """What Numba reads from the file; None where the file is missing or damaged."""
    try:
        content = Path(path).read_bytes()
        if content[-SUM_BYTES:] == _sum(content[:-SUM_BYTES]):
            return parse()
    except FileNotFoundError:
        return None
    except Exception:  # no permission, a folder of that name, a pickle that this version cannot read
        pass
    damaged.add(path)
    return None


class _Files(IndexDataCacheFile):
    """The index of one function and the data files that it names."""

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[io.BytesIO]:
        content = io.BytesIO()
        yield content
        with super()._open_for_write(filepath) as file:  # beside it, then moved into place
            file.write(content.getvalue() + _sum(content.getvalue()))

    def _load_index(self) -> Any:
        return _read(self._index_path, super()._load_index) or {}

    def _load_data(self, name: str) -> Any:
        parse = super()._load_data
        return _read(self._data_path(name), lambda: parse(name))


class Cache(FunctionCache):
    """What a dispatcher keeps its compiled functions in. Raises RuntimeError where no folder can be written."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = _Files(self.cache_path, f"{self._impl.filename_base}-sha256", stamp)
        self.on_miss: Callable[[], None] = lambda: None  # called before a compilation

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # Numba imports here all that a compilation may need: 0.1 s in the first kernel of a process. Compiled code
        # needs the addresses of Numba's runtime, no more, and a compilation imports the rest itself.
        rtsys.initialize(target_context)
        found = self._load_overload(sig, target_context)
        if found is None:
            self.on_miss()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        global unwritten
        try:
            super().save_overload(sig, data)
        except OSError as error:  # a full disk, say: the next process compiles again
            unwritten = str(error)


def remarks() -> str:
    """What happened to the files in this process, as an end of the line that names their folder."""
    found = f"; {len(damaged)} damaged files, compiled anew" if damaged else ""
    return found if unwritten is None else f"{found}; not all could be written: {unwritten}"
