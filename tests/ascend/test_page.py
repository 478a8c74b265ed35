"""docs/interop_ascend.md: its example runs, its table is whole."""

import contextlib
import io
import re
from pathlib import Path

from moeroute.interop.torch_npu import uninstall
from moeroute.interop.torch_npu.arguments import FUNCTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "interop_ascend.md").read_text()


def test_the_example_prints_what_it_says() -> None:
    (program, output) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)[0]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(program, {})
    finally:
        uninstall()
    assert printed.getvalue() == output


def test_the_table_has_every_function() -> None:
    table = PAGE.partition("## Functions")[2].partition("\n## ")[0]
    listed = [name for line in table.splitlines() for name in re.findall(r"`(\w*npu_\w+)`", line.split(" | ")[0])]
    assert sorted(listed) == sorted(FUNCTIONS)
