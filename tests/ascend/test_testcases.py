"""torch_npu.testing: comparisons, data and decorators, and a test file for torch_npu that runs with them."""

import os
import subprocess
import sys
import unittest
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeroute.interop.torch_npu import testcases
from moeroute.interop.torch_npu.install import install, uninstall

SRC = Path(__file__).parents[2] / "src"


class Case(testcases.TestCase):
    """A case to compare with."""

    __test__ = False


case = Case("assertRtolEqual")
alike = case.assertEqual

# ---------------------------------------------------------------------------- comparisons


@pytest.mark.parametrize(
    "x, y",
    [
        (torch.ones(3), torch.ones(3) + 5e-5),
        (torch.full((3,), 1e6), torch.full((3,), 1e6 + 50)),
        (np.ones(3, np.float16), np.ones(3, np.float16) * np.float16(1.0009)),
        (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
        (torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, torch.inf])),
        ([torch.ones(2), torch.zeros(0)], [np.ones(2, np.float32), np.zeros(0, np.float32)]),
        (torch.tensor([True]), torch.tensor([True])),
        (torch.tensor([3, 4]), [3, 4]),
        (2.0, 2.00001),
    ],
)
def test_results_that_agree(x: Any, y: Any) -> None:
    case.assertRtolEqual(x, y)


@pytest.mark.parametrize(
    "x, y, phrase",
    [
        (torch.ones(3), torch.ones(3) + 5e-4, r"3 of 3 differ, the first at \(0,\): 1.0 and 1.0004"),
        (torch.ones(3), torch.ones(2), "shape must be the same"),
        (torch.ones(3), torch.ones(3).double(), "dtype must be the same"),
        (torch.tensor([torch.nan, 1]), torch.tensor([1, torch.nan]), "NaNs must be in the same places"),
        (torch.tensor([torch.inf]), torch.tensor([-torch.inf]), "1 of 1 differ"),
        (torch.tensor([127], dtype=torch.int8), torch.tensor([-128], dtype=torch.int8), "1 of 1 differ"),
        (torch.tensor([True, False]), torch.tensor([True, True]), "1 of 2 differ"),
        (torch.ones(2, dtype=torch.bfloat16), torch.full((2,), 1.01, dtype=torch.bfloat16), "2 of 2 differ"),
        ([torch.ones(2)], [torch.zeros(2)], "2 of 2 differ"),
    ],
)
def test_results_that_differ(x: Any, y: Any, phrase: str) -> None:
    with pytest.raises(AssertionError, match=phrase):
        case.assertRtolEqual(x, y)


def test_a_share_of_the_elements_may_be_off() -> None:
    x, y = torch.ones(2, 20_000)
    y[:2] = 5
    case.assertRtolEqual(x, y)
    y[2] = 5
    with pytest.raises(AssertionError, match="3 of 20000 differ"):
        case.assertRtolEqual(x, y)
    case.assertRtolEqual(x.double(), x, auto_trans_dtype=True)


@pytest.mark.parametrize(
    "x, y",
    [
        (torch.ones(2), torch.ones(2).double() + 5e-6),
        ([torch.ones(2), {"a": 1.0}], [torch.ones(2), {"a": 1.000001}]),
        (torch.ones(2), 1),
        (torch.float32, torch.float32),
        ("a", "a"),
        (torch.Size([2]), (2,)),
    ],
)
def test_equal(x: Any, y: Any) -> None:
    alike(x, y)


@pytest.mark.parametrize(
    "x, y",
    [
        (torch.ones(2), torch.zeros(2)),
        (torch.ones(2), torch.ones(1)),
        ({"a": 1}, {"b": 1}),
        ([1], [1, 2]),
        (1, 2),
        (torch.float32, torch.float16),
        (None, torch.tensor),
    ],
)
def test_not_equal(x: Any, y: Any) -> None:
    with pytest.raises(AssertionError, match="why"):
        alike(x, y, "why")
    with pytest.raises(AssertionError, match="why"):
        alike(x, y, message="why")


def test_equal_with_a_precision() -> None:
    alike(torch.tensor([3, 5]), torch.tensor([4, 4]), 1)
    case.assertTensorsSlowEqual(torch.tensor([3, 5]), torch.tensor([4, 4]), 1)
    with pytest.raises(AssertionError, match="dtype"):
        case.assertTensorsSlowEqual(torch.tensor([3]), torch.tensor([3.0]))


def test_warnings() -> None:
    case.assertNotWarn(lambda: None)
    with pytest.raises(AssertionError, match="careful"):
        case.assertNotWarn(lambda: warnings.warn("careful", stacklevel=1))


# ---------------------------------------------------------------------------- data and decorators


def test_data_comes_twice() -> None:
    one, other = testcases.create_common_tensor([np.float32, -1, (2, 3)], -1, 1)
    assert torch.equal(one, other)
    other.zero_()
    assert one.abs().sum() > 0
    for dtype, found in ((torch.bool, torch.bool), (torch.float16, torch.float16), (torch.int64, torch.int32)):
        one, other = testcases.create_dtype_tensor((40,), dtype, no_zero=dtype is not torch.bool)
        assert one.dtype is found
        assert torch.equal(one, other)
        assert dtype is torch.bool or (one != 0).all()
    assert list(testcases.iter_indices(torch.ones(2, 1))) == [(0, 0), (1, 0)]
    assert list(testcases.iter_indices(torch.ones(2))) == [0, 1]
    assert not list(testcases.iter_indices(torch.tensor(1)))
    assert testcases.is_iterable([])
    assert not testcases.is_iterable(1)
    state = torch.get_rng_state()
    with testcases.freeze_rng_state():
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_tests_for_each_type_and_format() -> None:
    seen = []

    @testcases.instantiate_tests
    class Tests(testcases.TestCase):
        __test__ = False

        @testcases.Dtypes(torch.float16, torch.float32)
        @testcases.Formats(0, 2)
        def test_it(self, device: str, dtype: torch.dtype, npu_format: int) -> None:
            seen.append((device, dtype, npu_format))

    names = [name for name in dir(Tests) if name.startswith("test_")]
    assert names == ["test_it_float16_0", "test_it_float16_2", "test_it_float32_0", "test_it_float32_2"]
    for name in names:
        getattr(Tests(name), name)()
    assert seen == [("npu", dtype, number) for dtype in (torch.float16, torch.float32) for number in (0, 2)]


# ---------------------------------------------------------------------------- as torch_npu's

FILE = """
import torch
import torch_npu
from torch_npu.testing.common_distributed import skipIfUnsupportMultiNPU
from torch_npu.testing.common_utils import SupportedDevices, create_common_tensor, get_npu_device
from torch_npu.testing.testcase import TestCase, run_tests


class TestSwiglu(TestCase):
    @skipIfUnsupportMultiNPU(8)
    @SupportedDevices(["Ascend910B"])
    def test_right(self, device="npu"):
        x, on_device = create_common_tensor(["float32", 2, (3, 4)], -1, 1, device=get_npu_device())
        gate, linear = x.chunk(2, -1)
        self.assertRtolEqual(torch.nn.functional.silu(gate) * linear, torch_npu.npu_swiglu(on_device))

    def test_wrong(self):
        self.assertRtolEqual(torch.ones(2), torch_npu.npu_swiglu(torch.ones(4).npu()))


if __name__ == "__main__":
    run_tests()
"""


def test_a_file_runs_as_a_script_and_under_pytest(tmp_path: Path) -> None:
    file = tmp_path / "test_swiglu.py"
    file.write_text(FILE)
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    start = [sys.executable, "-m", "moeroute.interop.torch_npu"]
    for arguments in ([str(file)], ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]):
        done = subprocess.run(
            [*start, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        said = done.stdout + done.stderr
        assert done.returncode == 1, said
        assert "Ran 2 tests" in said or "1 failed, 1 passed" in said, said
        assert "2 of 2 differ, the first at (0,): 1.0 and 0.7310585975646973" in said


def test_the_modules_have_it() -> None:
    install()
    try:
        from torch_npu.testing import testcase
        from torch_npu.testing.common_utils import SupportedDevices

        assert testcase.TestCase is testcases.TestCase
        assert issubclass(testcase.TestCase, unittest.TestCase)
        assert SupportedDevices is testcases.SupportedDevices
    finally:
        uninstall()
