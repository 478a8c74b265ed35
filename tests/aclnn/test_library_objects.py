"""The C library's tensors, lists, arrays and executors: what they say of themselves, and memory that changes."""

import ctypes
import gc
import subprocess
import weakref
from collections.abc import Callable
from ctypes import byref, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from c_library import Library, Permutation
from moeroute.aclnn.library import handles

SUMS = [6.0, 8.0, 10.0, 12.0]
Compiled = Callable[[str, str], Path]
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_what_a_tensor_says_of_itself(acl: Library) -> None:
    block = acl.memory(np.arange(40, dtype=np.int32))
    tensor = acl.tensor((2, 3), block, 3, strides=(8, 2), offset=9, form=0, storage=(5, 8))
    count, dims = c_uint64(), c_void_p()
    for name, wanted in (("ViewShape", [2, 3]), ("ViewStrides", [8, 2]), ("StorageShape", [5, 8])):
        acl.ok(f"aclGet{name}", tensor, byref(dims), byref(count))
        assert count.value == 2
        assert ctypes.cast(dims, ctypes.POINTER(c_int64))[0:2] == wanted
        ctypes.CDLL(None).free(dims)
        acl.fails(161001, "tensor must not be null", f"aclGet{name}", None, byref(dims), byref(count))
        acl.fails(161001, "must not be null", f"aclGet{name}", tensor, None, byref(count))
        acl.fails(161001, "Num must not be null", f"aclGet{name}", tensor, byref(dims), None)
        acl.fails(161002, "never created", f"aclGet{name}", 5, byref(dims), byref(count))
    offset, number, address = c_int64(), c_int32(), c_void_p()
    for name, out, value in (
        ("ViewOffset", offset, 9),
        ("Format", number, 0),
        ("DataType", number, 3),
        ("RawTensorAddr", address, block),
    ):
        acl.ok(f"aclGet{name}", tensor, byref(out))
        assert out.value == value
        acl.fails(161001, "tensor must not be null", f"aclGet{name}", None, byref(out))
        acl.fails(161001, "must not be null", f"aclGet{name}", tensor, None)


@pytest.mark.parametrize("dtype", sorted(handles.DTYPES))
def test_every_dtype_comes_back(acl: Library, dtype: int) -> None:
    found = c_int32()
    acl.ok("aclGetDataType", acl.tensor((2,), None, dtype), byref(found))
    assert found.value == dtype


def test_a_scalar_tensor_has_an_empty_shape(acl: Library) -> None:
    count, dims = c_uint64(9), c_void_p()
    acl.ok("aclGetViewShape", acl.tensor((), None, storage=(1,)), byref(dims), byref(count))
    assert count.value == 0
    assert dims.value is not None, "an array of no entries, to be freed"
    ctypes.CDLL(None).free(dims)


def test_a_tensor_with_other_memory(acl: Library) -> None:
    """aclSetRawTensorAddr: the next first phase reads there."""
    case = Permutation(acl)
    other = acl.memory(np.array([8, 7, 6, 5, 4, 3, 2, 1], dtype=np.float32))
    assert case.first()[0] == 0
    acl.ok("aclSetRawTensorAddr", case.grad, other)
    acl.ok("aclrtFree", case.rows)
    status, executor = case.first()
    assert status == 0, acl.message()
    acl.ok(case.name, None, 0, executor, None)
    assert case.result() == [12.0, 10.0, 8.0, 6.0]
    acl.ok("aclSetRawTensorAddr", case.grad, None)
    assert case.first()[0] == 161001
    acl.message()
    acl.fails(161001, "tensor must not be null", "aclSetRawTensorAddr", None, other)


def test_lists(acl: Library) -> None:
    tensors = [acl.tensor((2,), None) for _ in range(3)]
    size = c_uint64()
    made = acl.call("aclCreateTensorList", (c_void_p * 3)(*tensors), 3)
    acl.ok("aclGetTensorListSize", made, byref(size))
    assert size.value == 3
    acl.ok("aclDestroyTensor", tensors[1])
    acl.fails(161001, "tensorList must not be null", "aclGetTensorListSize", None, byref(size))
    acl.fails(161001, "size must not be null", "aclGetTensorListSize", made, None)
    acl.fails(161002, "got an aclTensorList", "aclDestroyTensor", made)
    acl.ok("aclDestroyTensorList", made)
    acl.ok("aclDestroyTensorList", None)
    acl.fails(161002, "destroyed", "aclDestroyTensorList", made)
    for tensor in tensors:
        acl.fails(161002, "destroyed", "aclDestroyTensor", tensor)
    acl.ok("aclGetTensorListSize", acl.call("aclCreateTensorList", None, 0), byref(size))
    assert size.value == 0
    assert acl.call("aclCreateTensorList", None, 2) is None
    assert "value must not be null" in acl.message()
    assert acl.call("aclCreateTensorList", (c_void_p * 2)(None, tensors[0]), 2) is None
    assert "value[1] must be a live aclTensor; got " in acl.message()


def test_arrays(acl: Library) -> None:
    given: dict[str, Any] = {
        "Int": (c_int64 * 3)(1, -2, 1 << 40),
        "Float": (c_float * 3)(0.5, -2.0, 1e30),
        "Bool": (ctypes.c_bool * 3)(True, False, True),
    }
    size = c_uint64()
    for kind, values in given.items():
        made = acl.call(f"aclCreate{kind}Array", values, 3)
        wanted = list(values)
        values[0] = 0
        assert handles.state.objects[made].values == wanted, "a copy"
        acl.ok(f"aclGet{kind}ArraySize", made, byref(size))
        assert size.value == 3
        acl.fails(161001, "array must not be null", f"aclGet{kind}ArraySize", None, byref(size))
        acl.fails(161001, "size must not be null", f"aclGet{kind}ArraySize", made, None)
        acl.fails(161002, "never created", f"aclGet{kind}ArraySize", 3, byref(size))
        acl.ok(f"aclDestroy{kind}Array", made)
        acl.ok(f"aclDestroy{kind}Array", None)
        acl.fails(161002, "destroyed", f"aclDestroy{kind}Array", made)
        assert acl.call(f"aclCreate{kind}Array", None, 1) is None
        assert acl.message() != ""


# ---------------------------------------------------------------------------- executors


def test_an_executor_that_never_runs_is_freed(acl: Library) -> None:
    case = Permutation(acl)
    executor = case.first()[1]
    held = weakref.ref(handles.state.objects[executor.value or 0].executor._work[0])
    before = len(handles.state.objects)
    acl.ok("aclDestroyAclOpExecutor", executor)
    gc.collect()
    assert len(handles.state.objects) == before - 1
    assert held() is None
    acl.fails(561000, "destroyed", "aclDestroyAclOpExecutor", executor)


def repeatable(case: Permutation) -> c_void_p:
    status, executor = case.first()
    assert status == 0
    case.acl.ok("aclSetAclOpExecutorRepeatable", executor)
    case.acl.ok(case.name, None, 0, executor, None)
    assert case.result() == SUMS
    return executor


@pytest.mark.parametrize("function, index", [("aclSetInputTensorAddr", 0), ("aclSetTensorAddr", 0)])
def test_an_input_elsewhere(acl: Library, function: str, index: int) -> None:
    case = Permutation(acl)
    executor = repeatable(case)
    for scale in (10, 100):
        other = acl.memory(scale * np.arange(1, 9, dtype=np.float32))
        acl.ok(function, executor, index, case.grad, other)
        for _ in range(2):
            acl.ok("aclrtMemset", case.sums, 16, 0, 16)
            acl.ok(case.name, None, 0, executor, None)
            assert case.result() == [scale * x for x in SUMS]
        acl.ok("aclrtFree", case.rows)
        case.rows = other
    acl.ok("aclDestroyAclOpExecutor", executor)


@pytest.mark.parametrize("function, index", [("aclSetOutputTensorAddr", 0), ("aclSetTensorAddr", 2)])
def test_an_output_elsewhere(acl: Library, function: str, index: int) -> None:
    """The view's offset stays: the second row of three."""
    case = Permutation(acl)
    case.out = acl.tensor((2, 2), acl.memory(np.full(6, -1, np.float32)), offset=2, storage=(3, 2))
    status, executor = case.first()
    assert status == 0, acl.message()
    acl.ok("aclSetAclOpExecutorRepeatable", executor)
    acl.ok(case.name, None, 0, executor, None)
    other = acl.memory(np.full(6, -2, np.float32))
    acl.ok(function, executor, index, case.out, other)
    acl.ok(case.name, None, 0, executor, None)
    assert acl.read(other, np.empty(6, np.float32)).tolist() == [-2, -2, *SUMS]
    address = c_void_p()
    acl.ok("aclGetRawTensorAddr", case.out, byref(address))
    assert address.value == other


def test_addresses_that_are_refused(acl: Library) -> None:
    case = Permutation(acl)
    executor = repeatable(case)
    other = acl.memory(np.zeros(8, np.float32))
    for kind, count in (("Input", 2), ("Output", 1), ("", 3)):
        name = f"aclSet{kind}TensorAddr"
        acl.fails(561103, "tensor must not be null", name, executor, 0, None, other)
        acl.fails(561103, "executor must not be null", name, None, 0, case.grad, other)
        acl.fails(561000, "executor must be a live aclOpExecutor", name, 9, 0, case.grad, other)
        acl.fails(161002, "tensor must be a live aclTensor", name, executor, 0, executor, other)
        acl.fails(161002, f"index must be below {count}", name, executor, count, case.grad, other)
    acl.fails(
        161002, "tensor must be input 1 of the first phase", "aclSetInputTensorAddr", executor, 1, case.grad, other
    )
    acl.ok(case.name, None, 0, executor, None)
    assert case.result() == SUMS, "nothing was changed"
    acl.ok("aclSetInputTensorAddr", executor, 0, case.grad, other + 2)
    acl.fails(161002, "permutedOutputGrad: data must be", case.name, None, 0, executor, None)
    acl.ok("aclSetInputTensorAddr", executor, 0, case.grad, 4096)
    acl.fails(161002, "memory from aclrtMalloc", case.name, None, 0, executor, None)
    acl.ok("aclSetInputTensorAddr", executor, 0, case.grad, case.rows)
    acl.ok("aclSetOutputTensorAddr", executor, 0, case.out, case.rows)
    acl.fails(161002, "out must be memory of its own", case.name, None, 0, executor, None)
    acl.ok("aclSetOutputTensorAddr", executor, 0, case.out, case.sums)
    acl.ok(case.name, None, 0, executor, None)
    assert case.result() == SUMS, "a refusal leaves the executor usable"


def test_a_tensor_that_the_first_phase_did_not_get(acl: Library) -> None:
    """An optional parameter keeps its number."""
    name = "aclnnMoeTokenUnpermute"
    rows, out = acl.memory(np.arange(8, dtype=np.float32)), acl.memory(np.zeros(8, np.float32))
    indices = acl.tensor((4,), acl.memory(np.array([3, 2, 1, 0], np.int32)), 3)
    tokens, probs, result = acl.tensor((4, 2), rows), acl.tensor((4, 1), rows), acl.tensor((4, 2), out)
    size, executor = c_uint64(), c_void_p()
    arguments = (tokens, indices, None, False, None, result, byref(size), byref(executor))
    acl.ok(f"{name}GetWorkspaceSize", *arguments)
    acl.fails(161002, "input 2 of the first phase", "aclSetInputTensorAddr", executor, 2, probs, rows)
    acl.fails(161002, "index must be below 3", "aclSetInputTensorAddr", executor, 3, probs, rows)


def test_lists_of_an_executor(acl: Library) -> None:
    case = Permutation(acl)
    executor = repeatable(case)
    tensors = acl.call("aclCreateTensorList", (c_void_p * 1)(acl.tensor((2,), None)), 1)
    for kind in ("Input", "Output", ""):
        name = f"aclSetDynamic{kind}TensorAddr"
        acl.fails(561103, "tensors must not be null", name, executor, 0, 0, None, case.rows)
        acl.fails(161002, "relativeIndex must be below 1; got 1", name, executor, 0, 1, tensors, case.rows)
        acl.fails(561103, "executor must not be null", name, None, 0, 0, tensors, case.rows)
        acl.fails(161002, "and it has none", name, executor, 0, 0, tensors, case.rows)


# The caller frees what the getters give, with delete[].
GETTERS = r"""
#include <cstdio>
#include "aclnn/acl_meta.h"
int main()
{
    if (aclInit(nullptr)) return 1;
    int64_t shape[] = {2, 3}, *found = nullptr;
    uint64_t count = 0;
    aclTensor *tensor = aclCreateTensor(shape, 2, ACL_BF16, nullptr, 0, ACL_FORMAT_ND, shape, 2, nullptr);
    for (int i = 0; i < 100; i++) {
        if (aclGetViewShape(tensor, &found, &count) || count != 2 || found[0] != 2 || found[1] != 3) return 2;
        delete[] found;
        if (aclGetViewStrides(tensor, &found, &count) || count != 2 || found[0] != 3 || found[1] != 1) return 3;
        delete[] found;
    }
    const aclTensor *both[] = {tensor, tensor};
    aclTensorList *list = aclCreateTensorList(both, 2);
    if (list == nullptr || aclGetTensorListSize(list, &count) || count != 2) return 4;
    if (aclDestroyTensorList(list) || aclDestroyTensor(tensor) != ACLNN_ERR_PARAM_INVALID) return 5;
    std::puts("fine");
    return aclFinalize();
}
"""


def test_a_program_frees_what_it_was_given(compiled: Compiled, run: Run) -> None:
    done = run(compiled("getters", GETTERS), MALLOC_CHECK_="3", MALLOC_PERTURB_="85")
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
