"""What the distributions hold: a wheel with the package alone, a source distribution whose own tests run."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # the backend changes sys.argv
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""
MADE = (".*", "__pycache__", "*.pyc", "*.egg-info", "build", "dist", "out")  # by tools; not part of the project


class Distributions(NamedTuple):
    folder: Path  # the source distribution, unpacked
    sdist: set[str]
    wheel: set[str]
    metadata: Message


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Both distributions, made in a copy of the project by its build backend; nothing is downloaded."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "project", ignore=shutil.ignore_patterns(*MADE))
    command = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(command, cwd=folder / "project", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (sdist_file,), (wheel_file,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with tarfile.open(sdist_file) as archive:
        sdist = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
        archive.extractall(folder, filter="data")
    with zipfile.ZipFile(wheel_file) as archive:
        wheel = set(archive.namelist())
        (metadata,) = (name for name in wheel if name.endswith(".dist-info/METADATA"))
        message = Parser().parsestr(archive.read(metadata).decode())
    return Distributions(folder / sdist_file.name.removesuffix(".tar.gz"), sdist, wheel, message)


def files_under(folder: Path) -> set[str]:
    made = re.compile(r"(^|/)(__pycache__|\.|[^/]*\.egg-info/)")
    names = (path.relative_to(ROOT).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name for name in names if not made.search(name)}


def test_source_distribution_is_complete(built: Distributions) -> None:
    for folder in ("src", "tests", "docs", "examples", "benchmarks", "tools"):
        files = files_under(ROOT / folder)
        assert files
        assert files <= built.sdist, f"missing: {sorted(files - built.sdist)}"
    top = {"README.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "constraints.txt", "pyproject.toml", "mkdocs.yml"}
    top |= {"CHANGELOG.md", "SECURITY.md", "CITATION.cff"}
    assert top <= built.sdist, f"missing: {sorted(top - built.sdist)}"
    assert not [name for name in built.sdist if name.endswith(".pyc")]


def test_the_tests_of_the_source_distribution_can_run(built: Distributions) -> None:
    """All of them are found and imported, and those that read the project's files pass."""

    environment = {**os.environ, "PYTHONPATH": str(built.folder / "src")}
    # Without the rewriting of assertions, which takes a third of the time: nothing here is to fail.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--assert=plain", "tests"]
    command += ["-k", "test_named_tests_and_files_exist or test_no_path_of_one_machine or test_public_names"]
    done = subprocess.run(command, cwd=built.folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wheel_holds_the_package_alone(built: Distributions) -> None:
    package = {name.removeprefix("src/") for name in files_under(ROOT / "src")}
    assert {name for name in built.wheel if ".dist-info/" not in name} == package
    assert "moeroute/py.typed" in built.wheel


def test_metadata(built: Distributions) -> None:
    urls = dict(line.split(", ") for line in built.metadata.get_all("Project-URL", []))
    assert urls.keys() >= {"Repository", "Documentation", "Issues"}
    assert all(url.startswith("https://") for url in urls.values())
    classifiers = built.metadata.get_all("Classifier", [])
    for python in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {python}" in classifiers
    assert "Typing :: Typed" in classifiers
    assert built.metadata["Description-Content-Type"] == "text/markdown"


def test_readme_links_work_on_a_package_index(built: Distributions) -> None:
    """An index shows README without the files beside it: links and pictures name a whole address, or a heading."""
    readme = built.metadata.get_payload()
    assert isinstance(readme, str)
    targets = re.findall(r"\]\(([^)\s]+)\)", readme)
    assert targets
    for target in targets:
        assert target.startswith(("https://", "#")), target


@pytest.mark.parametrize("file", ["README.md", "docs/porting_from_ascend.md"])
def test_installation_warns_of_cuda(file: str) -> None:
    """A bare `pip install .` on Linux brings CUDA's libraries: the first such command avoids it, and the text says why."""
    text = (ROOT / file).read_text()
    first = re.search(r"pip install [^\n`]*\.(\[|\s)", text)
    assert first
    assert "https://download.pytorch.org/whl/cpu" in text[: first.end()]
    assert "several gigabytes of CUDA" in " ".join(text.split())
