"""The documentation: every Python block runs and prints what its page says, links lead somewhere, nothing is left out."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import documentation
import moeroute
from documentation import DOCS
from moeroute import conformance, expert_parallel, nn
from moeroute.aclnn.signatures import SIGNATURES
from moeroute.interop import torch_npu

ROOT = DOCS.parent
PAGES = documentation.pages()


@pytest.fixture(autouse=True)
def as_in_a_fresh_process() -> Iterator[None]:
    """Settings of torch that a page may change, and those of the suite that a reader does not have."""
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    pool, threads = moeroute.set_memory_pool(), torch.get_num_threads()
    yield
    if hasattr(torch_npu, "uninstall"):
        torch_npu.uninstall()
    moeroute.set_memory_pool(**pool)
    torch.set_num_threads(threads)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(DOCS)) for page in PAGES])
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    passed = documentation.run(page)
    everything = [block for block in documentation.blocks(page.read_text()) if block.shown is None]
    if passed and len(passed) == len(everything):
        pytest.skip("; ".join(passed))


def test_the_runner_sees_what_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match=r"line 6, prints\n1\nnot\n2"):
        documentation.run(page)
    page.write_text("<!-- needs: no_such_package -->\n```python\n1 / 0\n```\n")
    assert documentation.run(page) == ["line 3 needs no_such_package"]
    page.write_text("<!-- shown: a part -->\n\n```python\n1 / 0\n```\n")
    assert documentation.run(page) == []
    page.write_text("```python\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError):
        documentation.run(page)


def test_every_block_is_found() -> None:
    for page in PAGES:
        text = page.read_text()
        assert len(documentation.blocks(text)) == text.count("\n```python\n"), page.name


def headings(page: Path) -> set[str]:
    """The anchors of a page, as the site makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    found = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}
    return found | set(re.findall(r"^::: ([\w.]+)", text, re.MULTILINE))


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in headings(file), target


def navigation(name: str) -> set[str]:
    return set(re.findall(r"[\s\"-]([\w/]+\.md)$", (ROOT / name).read_text(), re.MULTILINE))


def test_every_page_is_in_the_navigation() -> None:
    named = navigation("mkdocs.yml")
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert there <= named, f"not in mkdocs.yml: {sorted(there - named)}"
    assert named <= there, f"no such page: {sorted(named - there)}"


def test_the_reference_has_every_public_function() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    named = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    wanted = {f"moeroute.{name}" for name in moeroute.__all__}
    for module in (nn, expert_parallel):
        own = {name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__}
        wanted |= {f"{module.__name__}.{name}" for name in own if not name.startswith("_")}
    wanted |= {f"moeroute.conformance.{name}" for name in conformance.__all__}
    assert wanted <= named, sorted(wanted - named)


def test_the_aclnn_page_has_every_operator() -> None:
    text = (DOCS / "reference" / "aclnn.md").read_text()
    for name, signature in SIGNATURES.items():
        assert f"| `aclnn{name}` | {', '.join(f'`{p}`' for p in signature.names)} |\n" in text, name


def test_every_environment_variable_is_in_the_table() -> None:
    table = (DOCS / "questions.md").read_text().partition("## Environment variables")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(MOEROUTE_\w+)`", table))
    trees = [ROOT / name for name in ("src", "tools", "tests", "examples", "benchmarks")]
    files = [file for tree in trees for file in tree.rglob("*") if file.suffix in (".py", ".c", ".h", ".hpp", ".cpp")]
    read = re.compile(r"(?:environ(?:\.get|\.setdefault)?[\[(]|getenv\(|secure_getenv\()\s*\"(MOEROUTE_\w+)\"")
    used = {name for file in files for name in read.findall(file.read_text())}
    assert len(used) >= 4
    assert used <= listed, f"not in docs/questions.md: {sorted(used - listed)}"


SCRIPTS = sorted(set((DOCS / "pictures").glob("*.py")) - {DOCS / "pictures" / "drawing.py"})
TRAINED = {"load"}  # by products of torch, whose bits are a machine's own


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_pictures_are_what_their_scripts_draw(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    environment = {**os.environ, "MPLCONFIGDIR": str(tmp_path)}
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True, env=environment)
    drawn = list(tmp_path.glob("*.svg"))
    assert drawn
    pinned = re.search(r"^matplotlib==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    for picture in drawn:
        committed = DOCS / "pictures" / picture.name
        assert committed.exists(), committed.name
        if script.stem in TRAINED:
            assert picture.read_text().count("<path") == committed.read_text().count("<path")
        elif importlib.metadata.version("matplotlib") == pinned[1]:  # another version may write other numbers
            assert picture.read_text() == committed.read_text(), f"{script.name} draws another {picture.name}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs is not installed: pip install '.[docs]', or make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "reference" / "permutation" / "index.html").read_text()
    assert "permute_backward" in page
    assert not re.search(r"https?://fonts\.", page), "a request to another host"
