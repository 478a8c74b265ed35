"""The release: one version everywhere, workflows that call targets that exist, licences that are told."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import moeroute

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))  # a source distribution has none


def test_the_version_comes_from_one_place() -> None:
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "moeroute.__version__"}
    assert f"\nversion: {moeroute.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == moeroute.__version__


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_call_targets_that_exist(workflow: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"- run: (.*)", workflow.read_text())
    assert commands
    for command in commands:
        name = re.match(r"make ([\w-]+)", command)
        assert name, f"{command}: the same commands as on a desk"
        assert name[1] in targets, command


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_have_a_few_things_right(workflow: Path) -> None:
    """What a mistake in would show only there; actionlint sees more, where it is installed."""
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(workflow.read_text())
    assert set(found) <= {"name", True, "permissions", "concurrency", "env", "jobs"}  # YAML reads `on` as true
    assert found["permissions"] == {"contents": "read"}
    for name, job in found["jobs"].items():
        assert set(job) <= {
            "runs-on", "timeout-minutes", "steps", "needs", "if", "permissions", "environment", "strategy"
        }, name  # fmt: skip
        assert all(("run" in step) != ("uses" in step) for step in job["steps"]), name
        assert all(re.fullmatch(r"[\w./-]+@(v\d+|release/v\d+)", step.get("uses", "a@v1")) for step in job["steps"])
        assert job.get("needs", name) in found["jobs"]


def test_the_matrix_of_the_workflow_is_the_tools() -> None:
    if not WORKFLOWS:
        pytest.skip("a source distribution has no workflows")
    rows = re.findall(r'^    Row\("([\w.-]+)"', (ROOT / "tools" / "matrix.py").read_text(), re.MULTILINE)
    nightly = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    assert f"row: [{', '.join(rows)}]" in nightly


def test_licences_name_every_dependency() -> None:
    listed = set(re.findall(r"^\| ([\w.-]+) \| ", (ROOT / "docs" / "licences.md").read_text(), re.MULTILINE))
    for line in PROJECT["project"]["dependencies"]:
        name = re.match(r"[\w-]+", line)
        assert name
        assert name[0] in listed


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.stem)
def test_actionlint(workflow: Path) -> None:
    linter = shutil.which("actionlint")
    if linter is None:
        pytest.skip("actionlint is not installed")
    done = subprocess.run([linter, str(workflow)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
