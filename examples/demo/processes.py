"""Processes of the demo: where they find their code, how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moeroute


class Ended(Exception):
    """A process of the demo ended early."""


def ended(what: str, status: int) -> Ended:
    if status < 0:
        return Ended(f"{what} was killed by {signal.Signals(-status).name} (out of memory?)")
    return Ended(f"{what} failed with status {status}; its message stands above")


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """`python -m ARGUMENTS`, which speaks through pipes and does not see Ctrl-C: that goes to the parent alone."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment() | variables,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )


def stop(process: subprocess.Popen[str]) -> None:
    """SIGKILL, whatever it is doing; nothing if it has ended."""
    process.kill()
    process.communicate()


def reports(what: str, *arguments: str, **variables: str) -> Iterator[Any]:
    """The JSON values that `python -m ARGUMENTS` prints, one a line."""
    process = start(*arguments, **variables)
    assert process.stdout is not None  # a pipe was asked for
    try:
        for line in process.stdout:
            yield json.loads(line)
        status = process.wait()
    finally:
        stop(process)
    if status:
        raise ended(what, status)


def _environment() -> dict[str, str]:
    variables = dict(os.environ)
    folders = [str(Path(module).absolute().parent.parent) for module in (__file__, str(moeroute.__file__))]
    variables["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [variables.get("PYTHONPATH")])])
    if "OMP_WAIT_POLICY" not in variables:
        # GNU OpenMP's idle threads spin for milliseconds and starve the others where anything else runs: steps of
        # 1 to 8 s instead of 0.1 (measured). Without spinning they take 0.16, always; with a short spin 0.1 on an
        # idle machine.
        busy = hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.7
        variables.setdefault("GOMP_SPINCOUNT", "0" if busy else "10000")
    return variables
