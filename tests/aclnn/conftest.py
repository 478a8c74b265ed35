"""The backends behind the layer, and the C library in the process of the tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from c_library import Library
from moeroute import dispatch
from moeroute.dispatch import Backend


@pytest.fixture(params=dispatch.NAMES)
def layer_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Each backend in turn answers where the default one would: the layer's calls name none."""
    name: Backend = request.param
    if (reason := dispatch.unavailable(name)) is not None:
        pytest.skip(reason)
    chosen: set[Backend] = set()
    default = dispatch._choose

    def choose(operator: str, backend: Backend | None, device: torch.device, dtype: torch.dtype | None) -> Backend:
        found = default(operator, name if backend is None and dtype is not torch.float64 else backend, device, dtype)
        chosen.add(found)
        return found

    monkeypatch.setattr(dispatch, "_choose", choose)
    monkeypatch.setattr(dispatch, "_chosen", {})
    monkeypatch.setattr(dispatch, "_implementations", {})
    yield name
    assert chosen <= {name}, f"{chosen - {name}} computed too"


@pytest.fixture(scope="session")
def loaded(prefix: Path) -> Library:
    return Library(prefix)


@pytest.fixture
def acl(loaded: Library) -> Iterator[Library]:
    loaded.ok("aclInit", None)
    loaded.ok("aclrtSetDevice", 0)
    yield loaded
    loaded.ok("aclFinalize")
