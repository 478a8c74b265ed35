"""A pytest plugin: torch_npu is there for the whole session, with numbers that are right.

    pytest -p moeroute.interop.torch_npu.plugin

It is there before any test module is imported, and takes the place of a mock.
"""

import pytest

from moeroute.interop.torch_npu.install import install, uninstall


def pytest_addoption(parser: pytest.Parser) -> None:
    """Devices named "npu" are asked for."""
    parser.getgroup("moeroute").addoption(
        "--npu-devices", action="store_true", help='devices named "npu" are the CPU (install(device_strings=True))'
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before collection."""
    install(device_strings=config.getoption("npu_devices"))


def pytest_unconfigure() -> None:
    """Behind the last test."""
    uninstall()
