"""Run a script or a module for Ascend on this machine: python -m moeroute.interop.torch_npu script.py [arguments]."""

import argparse
import runpy
import sys
from pathlib import Path

from moeroute.interop.torch_npu.install import install


def main() -> None:
    """Install torch_npu with its device names, then run what is asked for as Python itself would."""
    parser = argparse.ArgumentParser(
        prog="python -m moeroute.interop.torch_npu",
        description="Run a program that is written for torch_npu on this machine.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("-m", dest="module", metavar="MODULE", help="run a module instead of a script")
    what.add_argument("script", nargs="?", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program gets")
    given = sys.argv[1:]
    # What follows the program is its own, options too.
    count = 2 if given[:1] == ["-m"] else 1
    chosen = parser.parse_args(given[:count])
    rest = given[count:]
    install(device_strings=True)
    if chosen.module is not None:
        sys.argv = [chosen.module, *rest]
        sys.path[0] = ""
        runpy.run_module(chosen.module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [chosen.script, *rest]
        sys.path[0] = str(Path(chosen.script).resolve().parent)
        runpy.run_path(chosen.script, run_name="__main__")


if __name__ == "__main__":
    main()
