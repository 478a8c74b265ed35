"""Layers are tested in one thread."""

import pytest


@pytest.fixture(autouse=True)
def in_one_thread(one_thread: None) -> None:
    """In every test of this folder."""
