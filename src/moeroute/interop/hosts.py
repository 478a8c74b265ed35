"""The host that a module of this folder stands in for: found, and of a version that the tests know."""

import importlib
from types import ModuleType

from moeroute import check


def require(operator: str, package: str, series: tuple[str, ...]) -> ModuleType:
    """The package, imported; ImportError where it is absent or its version is not of these series ("5.24")."""
    wanted = " or ".join(f"{known}.x" for known in series)
    module = load(operator, package, wanted)
    version: str = module.__version__
    if not version.startswith(tuple(f"{known}." for known in series)):
        raise check.wrong_host(operator, package, wanted, version)
    return module


def load(operator: str, package: str, wanted: str) -> ModuleType:
    """The package, imported; ImportError, which says what is wanted, where it is absent."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise  # the host is there, something that it needs is not
        raise check.wrong_host(operator, package, wanted, "none that is installed") from error
