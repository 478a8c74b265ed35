"""The C library in the process of the tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from c_library import Library


@pytest.fixture(scope="session")
def loaded(prefix: Path) -> Library:
    return Library(prefix)


@pytest.fixture
def acl(loaded: Library) -> Iterator[Library]:
    loaded.ok("aclInit", None)
    loaded.ok("aclrtSetDevice", 0)
    yield loaded
    loaded.ok("aclFinalize")
