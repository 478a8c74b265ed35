"""Wheel and source distribution into dist; each is installed into an empty environment and tried there.

    python tools/dist.py              build, install, try
    python tools/dist.py --linked     the environments see this one's torch and numba instead of installing them

An environment has nothing but pip before. Tried there: py.typed, the version, a layer's gradient, and `moeroute verify`
of a part of the operators. The source distribution's own tests run in tests/test_packaging.py.
"""

import argparse
import importlib.metadata
import os
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
FOLDER = ROOT / "build" / "dist"
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # the backend changes sys.argv
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""
TRY = """
import pathlib, torch, moeroute, moeroute.nn
assert (pathlib.Path(moeroute.__file__).parent / "py.typed").exists()
layer = moeroute.nn.MoE(16, 32, num_experts=4, k=2)
layer(torch.randn(5, 16)).sum().backward()
assert all(p.grad is not None for p in layer.parameters())
print(moeroute.__version__, pathlib.Path(moeroute.__file__).parent)
"""


def main() -> int:
    """Build and try both; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--linked", action="store_true", help="torch and the rest from the environment that runs this")
    chosen = parser.parse_args()
    for folder in (DIST, FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    copy = FOLDER / "project"
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "out")
    shutil.copytree(ROOT, copy, ignore=unwanted)  # setuptools writes into the tree that it builds from
    subprocess.run([sys.executable, "-c", BUILD, str(DIST)], cwd=copy, check=True, stdout=subprocess.DEVNULL)
    (wheel,), (source,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        assert "moeroute/py.typed" in archive.namelist()
    for kind, file in (("wheel", wheel), ("sdist", source)):
        print(f"{kind}: {attempt(kind, file, chosen.linked)}", flush=True)
    return 0


def attempt(kind: str, file: Path, linked: bool) -> str:
    """Install the file into an empty environment; what it says there."""
    environment = FOLDER / kind
    own = ["--without-pip"] if linked else []  # pip and the build backend are linked too
    subprocess.run([sys.executable, "-m", "venv", *own, str(environment)], check=True)
    python = str(environment / "bin" / "python")
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    options = ["--quiet", "--disable-pip-version-check", "--constraint", str(ROOT / "constraints.txt")]
    if linked:
        (library,) = (environment / "lib").glob("python*/site-packages")
        (library / "linked.pth").write_text("\n".join(site.getsitepackages()) + "\n")
        options += ["--no-deps", "--no-build-isolation", "--no-index", "--force-reinstall"]
    subprocess.run([python, "-m", "pip", "install", *options, str(file)], check=True, env=bare)
    said = subprocess.run([python, "-c", TRY], cwd=FOLDER, check=True, env=bare, capture_output=True, text=True).stdout
    version, place = said.split()
    assert Path(place).is_relative_to(environment), f"another moeroute was imported: {place}"
    assert version == importlib.metadata.version("moeroute"), version
    command = [
        str(environment / "bin" / "moeroute"),
        "verify",
        "--backend",
        "cpu",
        "--device",
        "cpu",
        "--only",
        "permute",
    ]
    bits = subprocess.run(command, cwd=FOLDER, check=True, env=bare, capture_output=True, text=True).stdout
    return f"{version}, {bits.strip().splitlines()[-1]}"


if __name__ == "__main__":
    sys.exit(main())
