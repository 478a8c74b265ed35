"""The short suite on other versions of Python and torch, and the page that says which passed.

    python tools/matrix.py                                  all rows
    python tools/matrix.py --only oldest --python 3.11=python3.11

Each row gets a virtual environment under build/matrix, in which the package is installed as a user does it, with the
row's versions. Results are kept in build/matrix/results.json; docs/versions.md is written from them. The status is 1
where a row failed, or where all were run and the metadata admits lower or higher versions than those that passed.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "matrix"
PAGE = ROOT / "docs" / "versions.md"
PACKAGES = ("torch", "numpy", "numba", "triton")
# What a failure on another version would show in: torch's tools around operators and layer. The bits: moeroute verify.
TESTS = (
    "tests/gating/test_gating_torch.py",
    "tests/planning/test_plan_examples.py",
    "tests/layers/test_layer_torch.py",
    "tests/test_torch.py",
)


class Row(NamedTuple):
    """A Python and the versions that differ from constraints.txt; None is whatever pip takes."""

    name: str
    python: str
    versions: dict[str, str | None]


OLDEST = {"torch": "2.10.0", "numpy": "1.26.0", "numba": "0.63.0", "triton": "3.6.0", "llvmlite": None}
NEWEST = {"torch": "2.14.1", "numpy": None, "numba": None, "triton": None, "llvmlite": None}
ROWS = (
    Row("oldest", "3.11", OLDEST),
    Row("pinned", "3.11", {}),
    Row("newest", "3.11", NEWEST),
    Row("python-3.12", "3.12", {}),
    Row("python-3.13", "3.13", {}),
)


def main() -> int:
    """Run the rows that are asked for, write the page; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--python", action="append", default=[], metavar="3.12=PATH", help="an interpreter")
    parser.add_argument("--page", action="store_true", help="only write the page from the results that are there")
    chosen = parser.parse_args()
    pythons = dict(text.split("=", 1) for text in chosen.python)
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for row in ROWS if not chosen.page else ():
        if chosen.only in row.name:
            print(f"{row.name} ...", flush=True)
            result = run(row, pythons.get(row.python))
            results = json.loads(file.read_text()) if file.exists() else {}  # another run may have written meanwhile
            results[row.name] = result
            print(f"{row.name}: {result['verdict']}", flush=True)
            file.write_text(json.dumps(results, indent=1))
    PAGE.write_text(page(results))
    beyond = untried(results) if all(row.name in results for row in ROWS) else []
    print("\n".join(beyond))
    return 1 if beyond or any(result.get("passed") is False for result in results.values()) else 0


def run(row: Row, python: str | None) -> dict[str, Any]:
    """Install and test one row."""
    interpreter = python or shutil.which(f"python{row.python}")
    if interpreter is None:
        return {"verdict": f"not tried: no Python {row.python} here"}
    environment = FOLDER / row.name
    wanted = constraints(row)
    own = FOLDER / f"{environment.name}.txt"
    own.write_text("\n".join(wanted) + "\n")
    if not environment.exists():
        subprocess.run([interpreter, "-m", "venv", str(environment)], check=True)
    source = FOLDER / f"{row.name}-source"  # setuptools writes into the tree that it builds from
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "out"))
    installed = pip(environment, "install", "--quiet", "--constraint", str(own), *TOOLS, f"{source}[triton]")
    if installed.returncode != 0:
        why = [line for line in installed.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        return {"verdict": f"not tried: could not be installed ({why[0].removeprefix('ERROR: ')[:120]})"}
    version = {p: v for p in ("python", *PACKAGES) if (v := version_of(environment, p)) is not None}
    start = time.monotonic()
    command = [str(environment / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    # Another torch deprecates other things: its warnings are no failures here, as they are in make test.
    command += ["--override-ini", "addopts=", "--override-ini", "testpaths=tests", "-W", "default"]
    tested = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=bare())
    (FOLDER / f"{environment.name}.log").write_text(tested.stdout + tested.stderr)
    said = re.findall(
        r"^(?:\x1b\[\d+m)*=*\s*([\d].*?(?:passed|failed|error).*?) in [\d.]+s", tested.stdout, re.MULTILINE
    )
    command = [str(environment / "bin" / "moeroute"), "verify", "--backend", "cpu", "--device", "cpu"]
    verified = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False, env=bare())
    passed = tested.returncode == 0 and verified.returncode == 0
    bits = verified.stdout.strip().splitlines()[-1] if verified.stdout else "moeroute verify failed"
    return {
        "passed": passed,
        "verdict": "passed" if passed else "failed",
        "versions": version,
        "tests": said[-1] if said else f"pytest ended with status {tested.returncode}",
        "bits": bits,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.system()} {platform.machine()}",
    }


TOOLS = ("pytest", "pytest-xdist", "hypothesis", "expecttest", "cffi", "rich", "setuptools")


def bare() -> dict[str, str]:
    """The environment without what would bring in another moeroute."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def constraints(row: Row) -> list[str]:
    """The lines of constraints.txt, with the row's own versions."""
    lines = []
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name = line.split("==")[0]
        if "==" in line and not line.startswith("#"):
            version = row.versions.get(name, line.split("==")[1])
            if version is not None:
                lines.append(f"{name}=={version}")
    return lines


def pip(environment: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs the environment's pip."""
    command = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=bare())


def version_of(environment: Path, package: str) -> str | None:
    """The version of a package there, without what follows a plus; of Python itself for "python"."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    if package == "python":
        code = "import platform; print(platform.python_version())"
    done = subprocess.run(
        [str(environment / "bin" / "python"), "-c", code], capture_output=True, text=True, check=False
    )
    return done.stdout.strip().partition("+")[0] or None


# ---------------------------------------------------------------------------- the page

HEAD = """# Versions tried

Written by `make matrix` (`python tools/matrix.py`). A row is a virtual environment in which the package was installed
with these versions and the short suite ran: gating, plans, operators and the layer under torch's tools (compile,
export, func, autocast, forks, threads); then `moeroute verify --backend cpu`, which has every operator, dtype and mode.

{admits}

| row | Python | torch | numpy | numba | triton | result | tests | bits | when |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def requirements() -> dict[str, str]:
    """What pyproject.toml admits: a specifier for "python" and each package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {"python": project["requires-python"]}
    for line in (*project["dependencies"], *project["optional-dependencies"]["triton"]):
        name, _, bounds = line.partition(">=")
        found[name] = f">={bounds}"
    return found


def untried(results: dict[str, Any]) -> list[str]:
    """For each specifier that admits a minor version lower or higher than those that passed, what is wrong with it."""
    wrong = []
    for package, specifier in requirements().items():
        versions = [r["versions"][package] for r in results.values() if r.get("passed") and package in r["versions"]]
        minors = sorted(tuple(map(int, version.split(".")[:2])) for version in versions)
        if not minors:
            wrong.append(f"{package}{specifier}: no version has passed")
            continue
        (least, below), (most, above) = minors[0], minors[-1]
        proved = f">={least}.{below},<{most}.{above + 1}"
        if specifier != proved:
            wrong.append(f"{package}{specifier}: what has passed is {proved}")
    return wrong


def admits(results: dict[str, Any]) -> str:
    """The paragraph about the metadata."""
    names = {"python": "Python", "triton": "Triton"}
    ranges = ", ".join(f"{names.get(name, name)} {specifier}" for name, specifier in requirements().items())
    told = f"The metadata of the package admits {ranges}. "
    if wrong := untried(results):
        told += f"That is not what has passed here ({'; '.join(wrong)})."
    else:
        told += (
            "The lowest and the highest minor version of each has passed here, and none beyond them is admitted; not "
            "every version between them was tried, nor every patch release."
        )
    return textwrap.fill(told, 120)


def page(results: dict[str, Any]) -> str:
    """docs/versions.md."""
    lines = []
    for row in ROWS:
        result = results.get(row.name, {"verdict": "not tried"})
        version = result.get("versions", {})
        wanted = [version.get("python", row.python), *(version.get(p, row.versions.get(p) or "–") for p in PACKAGES)]
        told = [result["verdict"], result.get("tests", "–"), result.get("bits", "–"), result.get("date", "–")]
        lines.append("| " + " | ".join([row.name, *wanted, *told]) + " |")
    return HEAD.format(admits=admits(results)) + "\n".join(lines) + TAIL


TAIL = """

Triton's kernels run in its interpreter in these tests. constraints.txt pins a numpy below 2.4, which dynamic ranges in
the interpreter need.
"""


if __name__ == "__main__":
    sys.exit(main())
