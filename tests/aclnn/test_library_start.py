"""What a C program's start leaves out of torch, and that whatever else runs in its Python gets all of it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moeroute.aclnn.library import build, start

Run = Callable[..., subprocess.CompletedProcess[str]]

LATE = "torch._meta_registrations"
# Every operator that has a kernel for meta tensors, and the result of one whose kernel is Python's.
EVERYTHING = """
import sys, torch
kernels = torch._C._dispatch_get_registrations_for_dispatch_key("Meta")
cube, grid = torch.empty(1, 2, 4, 4, device="meta"), torch.empty(1, 3, 5, 2, device="meta")
shape = tuple(torch.nn.functional.grid_sample(cube, grid, align_corners=False).shape)
print(len(kernels), shape, sorted(name for name in sys.modules if name.startswith("torch._decomp")))
print({name: sys.modules[name].__spec__.loader.__class__.__name__ for name in ("torch._decomp", LATE)})
""".replace("LATE", repr(LATE))

# A program in whose Python, which our library has started, other code runs: the lines of its argument.
GUEST = r"""
#include "aclnnop/aclnn_moe_token_permute_grad.h"
#include "kit.hpp"
#include <dlfcn.h>
int main(int, char **arguments)
{
    Device device;
    Tensor<float> grad({4, 2}, {1, 2, 3, 4, 5, 6, 7, 8});
    Tensor<int32_t> sorted_indices({4}, {2, 0, 1, 3});
    Tensor<float> out({2, 2});
    RUN(MoeTokenPermuteGrad, grad, sorted_indices, 2, false, out);
    expect("tokens grad", out, {6, 8, 10, 12});
    auto ensure = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    auto run = (int (*)(const char *))dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
    auto release = (void (*)(int))dlsym(RTLD_DEFAULT, "PyGILState_Release");
    if (!ensure || !run || !release) return 2;
    std::fflush(stdout);
    int state = ensure();
    int failed = run(arguments[1]);
    release(state);
    return failed != 0;
}
"""


def python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def everything() -> str:
    """What an ordinary process prints."""
    found = python("-c", EVERYTHING)
    assert "(1, 2, 3, 5)" in found
    assert found.count("SourceFileLoader") == 2
    return found


def started(version: str, program: str) -> str:
    """What the program prints after a start."""
    return python("-c", f"{Path(start.__file__).read_text()}\nimport_torch({version!r})\n{program}")


VERSION = str(torch.__version__)
IMPORTED = f"print({LATE!r} in sys.modules, 'torch._decomp' in sys.modules)\n"


def test_the_operators_do_without() -> None:
    if build._tried_torch() == "":
        pytest.skip(f"torch {VERSION} imports what start.py would leave out")
    operators = "import moeroute.aclnn, moeroute.ops.rows.reference, moeroute.aclnn.library.runtime\n"
    assert started(VERSION, operators + IMPORTED) == "False False\n"


@pytest.mark.parametrize(
    "first",
    [
        "import torch._decomp",
        "from torch import _meta_registrations",
        "import torch._dynamo",
        "import pluggy",  # code of somebody else
    ],
)
def test_whatever_else_is_imported_brings_it_back(first: str) -> None:
    assert started(VERSION, f"{first}\n{EVERYTHING}") == python("-c", f"{first}\n{EVERYTHING}")


def test_another_torch_is_imported_whole(everything: str) -> None:
    assert started(f"{VERSION}.1", IMPORTED + EVERYTHING) == "True True\n" + everything
    assert started("", IMPORTED) == "True True\n"


def test_no_torch_is_no_error_yet() -> None:
    program = f"import sys\nsys.modules['torch'] = None\n{Path(start.__file__).read_text()}\nimport_torch('2')\n"
    assert python("-c", program + "print(any(isinstance(finder, Late) for finder in sys.meta_path))") == "False\n"


def test_other_code_in_the_programs_python(compiled: Callable[[str, str], Path], run: Run, everything: str) -> None:
    guest = compiled("guest", GUEST)
    done = run(guest, f"import sys\n{IMPORTED}sys.stdout.flush()")
    left_out = build._tried_torch() != ""
    assert done.stdout == f"tokens grad: as expected\n{not left_out} {not left_out}\n", done.stderr
    done = run(guest, f"import pluggy\n{EVERYTHING}sys.stdout.flush()")
    numbers = done.stdout.split("\n", 1)[1]
    assert numbers.split(" ", 1)[1] == everything.split(" ", 1)[1], done.stderr
    assert int(numbers.split()[0]) >= int(everything.split()[0])  # beside torch's those of the package


def test_a_trial_that_fails_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text("def import_torch(version):\n    raise ImportError\n")
    monkeypatch.setattr(build, "HERE", tmp_path)
    assert build._tried_torch() == ""
