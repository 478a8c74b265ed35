"""What `make torture` is made of: it calls every public function, and its sanitizers report what is wrong."""

import random
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aclnn_calls import GOOD
from moeroute import dispatch
from moeroute.aclnn.library import build, prototypes
from test_bad_input import CALLS

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import torture
import torture_calls as calls
import torture_kinds
import torture_library

needs_kernels = pytest.mark.skipif(dispatch.unavailable("cpu") is not None, reason="no CPU kernels here")


@pytest.fixture(autouse=True)
def drawn_alike() -> Iterator[None]:
    random.seed(0)
    calls.called.clear()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(0)
        warnings.simplefilter("ignore")  # nested, CSR and quantized tensors are announced as unfinished
        yield


def test_the_kinds() -> None:
    assert list(torture.KINDS) == list(torture_kinds.EVERY)
    assert sum(share for share, _ in torture.KINDS.values()) == 60


@needs_kernels
def test_every_function_is_drawn() -> None:
    drawn = calls.Inputs()
    while drawn.tokens == 0:
        drawn = calls.Inputs()
    for name in calls.DRAWN:
        calls.compare(name, drawn)
    calls.need_all([name for name in calls.public() if "." not in name or name.startswith("nn.")])


def test_every_function_is_lied_to() -> None:
    for name in CALLS:
        calls.lie(name)
    for name in GOOD:
        calls.lie_to_aclnn(name)
    for name, function in calls.hosts_functions().items():
        calls.lie_as_a_host(name, function)
    calls.need_all([name for name in calls.public() if name.split(".")[0] in calls.MODULES and name[:3] != "nn."])


def test_a_function_that_is_left_out_is_named() -> None:
    with pytest.raises(AssertionError, match="never called: permute, spread"):
        calls.need_all(["permute", "spread"])


def test_the_program_calls_every_function_of_the_c_interface() -> None:
    tried = set(re.findall(r'^    \{"(\w+)", try_\1, 0\},$', torture_library.program_text(), re.MULTILINE))
    secure = re.findall(r"\b(\w+_s)\(", (build.HERE / "securec.h").read_text())
    assert len(secure) > 10
    assert tried >= set(secure)
    for group in prototypes.libraries().values():
        for prototype in group:
            assert prototype.name.removesuffix("GetWorkspaceSize") in tried


@pytest.mark.skipif(torture_library.compiler() is None, reason="no C compiler with AddressSanitizer")
def test_the_sanitizers_report_what_is_wrong(tmp_path: Path) -> None:
    assert torture_library.check_the_sanitizers(tmp_path) == len(torture_library.WRONG) + 1


def test_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torture_library, "compiler", lambda flags=(): None)
    assert torture_library.handles(1, 0) == torture_library.sanitizers(1, 0) == (0, "not run: no compiler")
