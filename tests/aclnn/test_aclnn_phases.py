"""Executors, workspaces, messages, and arguments that no C program could give."""

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aclnn_calls import GOOD, INNER, INVALID, NULL, call_refused, i32, ones, prepare, run, same
from moeroute import aclnn, check
from moeroute.aclnn import core

# ---------------------------------------------------------------------------- executors


def test_an_executor_runs_once() -> None:
    arguments = GOOD["MoeTokenPermuteGrad"]()
    status, size, executor = prepare("MoeTokenPermuteGrad", *arguments.values())
    assert (status, size) == (0, 0)
    assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor, None) == 0
    arguments["out"].fill_(math.nan)
    assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor, None) == INVALID
    assert "executor" in aclnn.aclGetRecentErrMsg()
    assert arguments["out"].isnan().all()


def test_a_repeatable_executor_runs_again_on_new_data() -> None:
    arguments = GOOD["MoeTokenPermuteGrad"]()
    executor = prepare("MoeTokenPermuteGrad", *arguments.values())[2]
    executor.repeatable = True
    for value in (1.0, 3.0):
        arguments["permutedOutputGrad"].fill_(value)
        assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor, None) == 0
        same(arguments["out"], torch.full((3, 2), 2 * value))


def test_the_second_phase_refuses_what_is_not_its_own(subtests: pytest.Subtests) -> None:
    executor = prepare("MoeGatingTopKBackward", *GOOD["MoeGatingTopKBackward"]().values())[2]
    for workspace, size, given_executor, code in (
        (None, 0, None, NULL),
        (None, 16 * 2**20, executor, NULL),
        (1234, 16 * 2**20 - 1, executor, INVALID),
        (1234, -1, executor, INVALID),
    ):
        with subtests.test(workspace=workspace, size=size, executor=given_executor is not None):
            assert aclnn.aclnnMoeGatingTopKBackward(workspace, size, given_executor, None) == code
            assert aclnn.aclGetRecentErrMsg().startswith("aclnnMoeGatingTopKBackward: ")
    assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor, None) == INVALID
    assert aclnn.aclnnMoeGatingTopKBackward(1234, 16 * 2**20, executor, None) == 0


def test_what_fails_later_is_a_status_too() -> None:
    arguments = GOOD["MoeTokenPermuteGrad"]()
    executor = prepare("MoeTokenPermuteGrad", *arguments.values())[2]
    arguments["out"].resize_(1, 2)
    assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor, None) == INNER
    assert "out" in aclnn.aclGetRecentErrMsg()


def test_a_resized_parameter_is_refused() -> None:
    arguments = GOOD["MoeTokenPermuteGrad"]() | {
        "permutedOutputGrad": torch.nn.Parameter(ones(6, 2), requires_grad=False)
    }
    executor = prepare("MoeTokenPermuteGrad", *arguments.values())[2]
    arguments["permutedOutputGrad"].resize_(3, 2)
    assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor, None) == INNER
    assert arguments["out"].isnan().all()


@pytest.mark.parametrize(
    "error",
    (IndexError("index 7"), OverflowError("too large"), KeyError("x"), MemoryError()),
    ids=lambda error: type(error).__name__,
)
def test_every_failure_of_the_work_is_a_status(error: Exception) -> None:
    def fail() -> None:
        raise error

    executor = core.Executor("MoeTokenPermuteGrad", 0, fail, {})
    assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor, None) == INNER
    assert aclnn.aclGetRecentErrMsg() == "aclnnMoeTokenPermuteGrad: " + (str(error) or type(error).__name__)


@pytest.mark.parametrize("size", (None, "0", 1.0))
def test_a_workspace_size_that_is_no_int(size: Any) -> None:
    arguments = GOOD["MoeTokenPermuteGrad"]()
    executor = prepare("MoeTokenPermuteGrad", *arguments.values())[2]
    assert aclnn.aclnnMoeTokenPermuteGrad(None, size, executor, None) == INVALID
    assert "workspaceSize must be an int" in aclnn.aclGetRecentErrMsg()
    assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor, None) == 0


def test_messages_belong_to_their_thread() -> None:
    call_refused("MoeTokenPermuteGrad", {"numTopk": 0}, INVALID)
    assert prepare("MoeTokenPermuteGrad", *(GOOD["MoeTokenPermuteGrad"]() | {"numTopk": 0}).values())[0] == INVALID
    found = []

    def other() -> None:
        found.append(aclnn.aclGetRecentErrMsg())
        prepare("MoeTokenPermuteGrad", *(GOOD["MoeTokenPermuteGrad"]() | {"numTopk": 600}).values())
        found.append(aclnn.aclGetRecentErrMsg())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == ["", "aclnnMoeTokenPermuteGrad: numTopk must be in 1..512; got 600"]
    assert aclnn.aclGetRecentErrMsg() == "aclnnMoeTokenPermuteGrad: numTopk must be in 1..512; got 0"


# ---------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("digits", (400, 5000))
def test_numbers_beyond_every_type(digits: int) -> None:
    assert "eps" in call_refused("MoeGatingTopKBackward", {"eps": 10**digits}, INVALID)
    assert "numTopk" in call_refused("MoeTokenPermuteGrad", {"numTopk": 10**digits}, INVALID)


def test_columns_of_one_buffer_are_apart() -> None:
    """Inputs and outputs may interleave in one allocation; where columns meet they may not."""
    table = torch.zeros(6, 8)
    table[:, :2] = 1
    run("MoeTokenPermuteGrad", table[:, :2], i32(range(6)), 2, False, table[:3, 2:4])
    same(table[:3, 2:4], torch.full((3, 2), 2.0))
    same(table[:, :2], ones(6, 2))
    numbers = i32([0, -77, 0, -77, 1, -77])
    run("MoeComputeExpertTokens", numbers[::2], 3, numbers[1::2])
    same(numbers, [0, 2, 0, 3, 1, 3])
    assert prepare("MoeTokenPermuteGrad", table[:, :2], i32(range(6)), 2, False, table[:3, 1:3])[0] == INVALID


TABLE = torch.zeros(6, 8)
PAIRS = (
    ("columns and the others", TABLE[:, :2], TABLE[:, 2:8], False),
    ("a column and those before it", TABLE[:, 3], TABLE[:, :3], False),
    ("a column and integers beside it", TABLE[:, 3:4], TABLE[:, 4:].view(torch.int32), False),
    ("the last columns and the first", TABLE[:, 3:], TABLE[:, :3], False),
    ("the first rows and the last", TABLE[:3], TABLE[3:], False),
    ("columns that meet", TABLE[:, :3], TABLE[:, 2:], True),
    ("a column among others", TABLE[:, 6], TABLE[:, 4:], True),
    ("columns that meet, a row less", TABLE[1:, :3], TABLE[:, 2:], True),
    ("other row strides", TABLE[:, :4], TABLE.view(12, 4), True),
    ("a repeated row and itself", TABLE[:1].expand(6, 8), TABLE[0], True),
    ("everything and nothing", TABLE, TABLE[2:2], False),
)


@pytest.mark.parametrize("a, b, shared", [pytest.param(*pair, id=what) for what, *pair in PAIRS])
def test_memory_is_shared_where_elements_are(a: Tensor, b: Tensor, shared: bool) -> None:
    assert check.overlap(a, b) is check.overlap(b, a) is shared


def test_the_format_of_a_parameter_is_read() -> None:
    grad = torch.nn.Parameter(ones(6, 2))
    grad.acl_format = 29  # type: ignore[attr-defined]
    assert "aclFormat 29" in call_refused("MoeTokenPermuteGrad", {"permutedOutputGrad": grad}, INVALID)
    grad.acl_format = 2  # type: ignore[attr-defined]
    run("MoeTokenPermuteGrad", *(GOOD["MoeTokenPermuteGrad"]() | {"permutedOutputGrad": grad}).values())


@pytest.mark.parametrize("changes", (
    {"numTopk": 2.0}, {"numTopk": "2"}, {"numTopk": 2**63}, {"paddedMode": 2}, {"paddedMode": None},
    {"permutedOutputGrad": [[1.0, 2.0]]}, {"sortedIndices": np.arange(6)[::-1]}, {"sortedIndices": np.arange(6).astype(">i4")},
    {"permutedOutputGrad": ones(6, 2).to_sparse()}, {"permutedOutputGrad": np.array(["a"])},
), ids=lambda changes: f"{next(iter(changes))}={next(iter(changes.values()))!r:.30}")  # fmt: skip
def test_arguments_that_no_c_program_can_give(changes: dict[str, Any]) -> None:
    arguments = GOOD["MoeTokenPermuteGrad"]() | changes
    assert prepare("MoeTokenPermuteGrad", *arguments.values())[0] == INVALID
    assert next(iter(changes)) in aclnn.aclGetRecentErrMsg()


def test_arguments_by_name_and_missing_ones() -> None:
    arguments = GOOD["MoeTokenPermuteGrad"]()
    status, _, executor = aclnn.aclnnMoeTokenPermuteGradGetWorkspaceSize(**arguments)
    assert status == 0
    assert aclnn.aclnnMoeTokenPermuteGrad(None, 0, executor) == 0
    with pytest.raises(TypeError):
        aclnn.aclnnMoeTokenPermuteGradGetWorkspaceSize(arguments["out"])


def test_numpy_arrays() -> None:
    grad = np.arange(24, dtype=np.float16).reshape(6, 4)[:, ::2]
    grad.flags.writeable = False
    indices = np.array([5, 4, 3, 2, 1, 0], dtype=np.int32)
    out = np.full((3, 4), np.nan, dtype=np.float16)[:, ::2]
    run("MoeTokenPermuteGrad", grad, indices, np.int64(2), np.bool_(False), out)
    np.testing.assert_array_equal(out, grad[::-1].reshape(3, 2, 2).sum(1))
    out.flags.writeable = False
    assert prepare("MoeTokenPermuteGrad", grad, indices, 2, False, out)[0] == INVALID
    assert "writable" in aclnn.aclGetRecentErrMsg()


def test_tensors_that_record_gradients() -> None:
    grad = torch.ones(6, 2, requires_grad=True)
    out = torch.zeros(3, 2, requires_grad=True)
    run("MoeTokenPermuteGrad", grad, i32(range(6)), 2, False, out)
    same(out.detach(), torch.full((3, 2), 2.0))
    run("MoeTokenPermuteGrad", torch.nn.Parameter(torch.ones(6, 2)), i32(range(6)), 2, False, out)
