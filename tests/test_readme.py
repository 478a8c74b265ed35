"""The README's example prints what the README says."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_example_prints_what_it_says() -> None:
    code, printed = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README.read_text(), re.DOTALL).groups()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == printed


def test_named_tests_and_files_exist() -> None:
    text = README.read_text()
    root = README.parent
    everything = "\n".join(path.read_text() for path in (root / "tests").glob("test_*.py"))
    for name in set(re.findall(r"`(test_\w+)`", text)):
        assert f"def {name}(" in everything, name
    for name in set(re.findall(r"`((?:tests|docs)/[\w.]+)`", text)):
        assert (root / name).exists(), name
