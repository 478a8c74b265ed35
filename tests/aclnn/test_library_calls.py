"""The C library's calls one by one, in this process: what they do and what they refuse."""

import ctypes
import os
import signal
import threading
from ctypes import byref, c_double, c_int64, c_uint32, c_uint64, c_void_p

import numpy as np

from c_library import Library, Permutation


def test_runtime_refusals(acl: Library) -> None:
    acl.fails(100002, "another call", "aclInit", None)
    acl.fails(107001, "deviceId must be 0, the one device; got 3", "aclrtSetDevice", 3)
    acl.fails(100000, "deviceId must not be null", "aclrtGetDevice", None)
    acl.fails(100000, "count must not be null", "aclrtGetDeviceCount", None)
    acl.fails(100000, "stream must not be null", "aclrtCreateStream", None)
    acl.fails(100000, "stream must not be null", "aclrtDestroyStream", None)
    acl.fails(107003, "stream must be a live aclrtStream; got 0x7, destroyed", "aclrtSynchronizeStream", 7)
    acl.fails(107000, "opt must be", "aclrtCtxSetSysParamOpt", 9, 1)
    acl.ok("aclrtCtxSetSysParamOpt", 0, 1)
    acl.ok("aclrtSynchronizeDevice")
    acl.ok("aclrtSynchronizeStream", None)
    count = c_uint32()
    acl.ok("aclrtGetDeviceCount", byref(count))
    assert count.value == 1
    stream, context = c_void_p(), c_void_p()
    acl.ok("aclrtCreateStream", byref(stream))
    acl.ok("aclrtDestroyStream", stream)
    acl.fails(107000, "destroyed", "aclrtDestroyStream", stream)
    acl.ok("aclrtCreateContext", byref(context), 0)
    acl.ok("aclrtSetCurrentContext", context)
    acl.fails(107000, "got an aclrtContext", "aclrtDestroyStream", context)
    acl.ok("aclrtDestroyContext", context)
    acl.fails(107000, "destroyed", "aclrtSetCurrentContext", context)
    acl.fails(107000, "destroyed", "aclrtDestroyContext", context)


def test_memory_refusals(acl: Library) -> None:
    address = c_void_p()
    acl.fails(100000, "size must be at least 1", "aclrtMalloc", byref(address), 0, 0)
    acl.fails(100000, "devPtr must not be null", "aclrtMalloc", None, 8, 0)
    for size in (1 << 60, (1 << 64) - 1):
        acl.fails(207001, "size must be what the machine has", "aclrtMalloc", byref(address), size, 0)
    data = np.arange(16, dtype=np.float32)
    block, host = acl.memory(data), data.ctypes.data
    acl.fails(107000, "count must be at most destMax = 64; got 65", "aclrtMemcpy", block, 64, host, 65, 1)
    acl.fails(107000, "dst must be 128 bytes of device memory", "aclrtMemcpy", block, 128, host, 128, 1)
    acl.fails(107000, "with 60 bytes behind it", "aclrtMemcpy", host, 64, block + 4, 64, 2)
    acl.fails(107000, "freed or never allocated", "aclrtMemcpy", host, 64, host, 64, 1)
    acl.fails(100000, "src must not be null", "aclrtMemcpy", block, 64, None, 64, 1)
    acl.fails(100000, "dst must not be null", "aclrtMemcpyAsync", None, 64, host, 64, 1, None)
    acl.fails(107003, "stream must be", "aclrtMemcpyAsync", block, 64, host, 64, 1, 5)
    acl.fails(107000, "kind must be", "aclrtMemcpy", block, 64, host, 64, 9)
    acl.fails(107000, "count must be at most maxCount = 3; got 4", "aclrtMemset", block, 3, 0, 4)
    acl.fails(107000, "devPtr must be 80 bytes", "aclrtMemset", block, 80, 0, 80)
    acl.ok("aclrtMemset", block + 4, 60, 0, 8)
    data[1:3] = 0
    np.testing.assert_array_equal(acl.read(block, data), data)
    acl.fails(107000, "start of an allocation", "aclrtFree", block + 4)
    acl.ok("aclrtFree", block)
    acl.fails(107000, "freed or never allocated", "aclrtFree", block)
    acl.fails(100000, "devPtr must not be null", "aclrtFree", None)
    acl.fails(107000, "src must be", "aclrtMemcpy", host, 64, block, 64, 2)


def test_descriptions_and_their_refusals(acl: Library) -> None:
    block = acl.memory(np.arange(16, dtype=np.float32))
    assert acl.tensor((4, 4), block, 99) is None
    assert "dataType must be one" in acl.message()
    assert acl.tensor((4, -4), block) is None
    assert "viewDims must not be negative" in acl.message()
    assert acl.tensor((4, 4), block, strides=(-4, 1)) is None
    assert "stride must not be negative" in acl.message()
    assert acl.tensor((4, 4), block, offset=1) is None
    assert "inside storageDims = [4, 4]; got its last element at 16" in acl.message()
    assert acl.tensor((1,) * 26, block) is None
    assert "at most 25" in acl.message()
    assert acl.tensor((1 << 40, 1 << 40), None) is None
    assert "must fit into memory" in acl.message()
    assert acl.call("aclCreateTensor", None, 2, 0, None, 0, 2, None, 2, block) is None
    assert "viewDims must not be null" in acl.message()
    assert acl.call("aclCreateIntArray", None, 2) is None
    assert acl.call("aclCreateScalar", None, 0) is None
    tensor = acl.tensor((4, 4), block)
    array = acl.call("aclCreateIntArray", (c_int64 * 2)(1, 2), 2)
    flags = acl.call("aclCreateBoolArray", (ctypes.c_bool * 2)(True, False), 2)
    scalar = acl.call("aclCreateScalar", byref(c_double(2.0)), 11)
    acl.fails(161002, "array must be a live aclIntArray; got an aclBoolArray", "aclDestroyIntArray", flags)
    acl.fails(161002, "got an aclTensor", "aclDestroyScalar", tensor)
    acl.fails(161002, "never created", "aclDestroyTensor", block)
    for name, handle in (("Tensor", tensor), ("IntArray", array), ("BoolArray", flags), ("Scalar", scalar)):
        acl.ok(f"aclDestroy{name}", handle)
        acl.fails(161002, "destroyed", f"aclDestroy{name}", handle)
        acl.ok(f"aclDestroy{name}", None)
    acl.fails(561103, "executor must not be null", "aclDestroyAclOpExecutor", None)
    acl.fails(561103, "executor must not be null", "aclSetAclOpExecutorRepeatable", None)
    acl.fails(561000, "never created", "aclSetAclOpExecutorRepeatable", 12)


SUMS = [6.0, 8.0, 10.0, 12.0]


def test_both_phases(acl: Library) -> None:
    case = Permutation(acl)
    status, executor = case.first()
    assert status == 0
    assert case.result() == [-1.0] * 4, "the first phase writes nothing"
    acl.ok(case.name, None, 0, executor, None)
    assert case.result() == SUMS
    acl.fails(161002, "executor must be a live aclOpExecutor", case.name, None, 0, executor, None)
    acl.fails(161001, "executor must not be null", case.name, None, 0, None, None)
    acl.fails(561000, "destroyed", "aclDestroyAclOpExecutor", executor)
    acl.fails(
        161001, "workspaceSize", f"{case.name}GetWorkspaceSize", case.grad, case.sorted, 2, False, case.out, None, None
    )


def test_an_executor_that_repeats(acl: Library) -> None:
    case = Permutation(acl)
    executor = case.first()[1]
    acl.ok("aclSetAclOpExecutorRepeatable", executor)
    for _ in range(3):
        acl.ok("aclrtMemset", case.sums, 16, 0, 16)
        acl.ok(case.name, None, 0, executor, None)
        assert case.result() == SUMS
    acl.ok("aclDestroyAclOpExecutor", executor)
    acl.fails(161002, "destroyed", case.name, None, 0, executor, None)


def test_refusals_of_an_operator(acl: Library) -> None:
    case = Permutation(acl)
    assert case.first(grad=None)[0] == 161001
    assert "permutedOutputGrad" in acl.message()
    for wrong in (12345, case.rows, case.sorted):
        assert case.first(grad=wrong)[0] == 161002
    assert case.first(grad=acl.tensor((4, 2), case.rows, form=29))[0] == 161002
    assert "format" in acl.message()
    assert case.first(grad=acl.tensor((4, 2), None))[0] == 161001
    assert "null pointer" in acl.message()
    assert case.first(grad=acl.tensor((4, 2), case.sums))[0] == 161002
    assert "must be 32 bytes of memory from aclrtMalloc" in acl.message()
    assert case.first(grad=acl.tensor((4, 2), case.rows + 2))[0] == 161002
    assert case.first(grad=acl.tensor((4, 2), case.rows, 3))[0] == 161002, "the dtype comes before the memory"
    assert case.first(topk=0)[0] == 161002
    array = acl.call("aclCreateIntArray", (c_int64 * 1)(1), 1)
    assert case.first(grad=array)[0] == 161002
    assert "permutedOutputGrad must be a live aclTensor; got an aclIntArray" in acl.message()
    executor = case.first()[1]
    acl.fails(161002, "", "aclnnMoeTokenPermute", None, 0, executor, None)
    acl.fails(361001, "stream must be", case.name, None, 0, executor, 3)
    assert case.result() == [-1.0] * 4


def test_memory_freed_between_the_phases(acl: Library) -> None:
    case = Permutation(acl)
    executor = case.first()[1]
    acl.ok("aclDestroyTensor", case.grad)  # a description may go
    acl.ok("aclrtFree", case.rows)
    acl.fails(161002, "must live until the operator has run", case.name, None, 0, executor, None)
    assert case.first()[0] == 161002
    assert "destroyed" in acl.message()


def test_workspace(acl: Library) -> None:
    """aclnnMoeGatingTopKBackward asks for 16 MiB."""
    name = "aclnnMoeGatingTopKBackward"
    scores = acl.tensor((1, 2), acl.memory(np.array([0.5, 0.5], np.float32)))
    grad = acl.tensor((1, 1), acl.memory(np.ones(1, np.float32)))
    ids = acl.tensor((1, 1), acl.memory(np.zeros(1, np.int32)), 3)
    result = acl.memory(np.full(2, -1, np.float32))
    out = acl.tensor((1, 2), result)
    size, executor, workspace = c_uint64(), c_void_p(), c_void_p()
    acl.ok(f"{name}GetWorkspaceSize", scores, grad, ids, 0, 1, 1.0, 1e-20, out, byref(size), byref(executor))
    assert size.value == 16 << 20
    acl.ok("aclrtMalloc", byref(workspace), size, 0)
    acl.fails(161001, "workspace must", name, None, size.value, executor, None)
    acl.fails(161002, "workspaceSize must", name, workspace, 5, executor, None)
    acl.fails(161002, "workspace must be", name, result, size.value, executor, None)
    assert acl.read(result, np.empty(2, np.float32)).tolist() == [-1, -1]
    acl.ok(name, workspace, size.value, executor, None)
    assert acl.read(result, np.empty(2, np.float32)).tolist() == [0, 0]
    acl.ok("aclrtMemset", result, 8, 1, 8)
    acl.ok(f"{name}GetWorkspaceSize", scores, grad, ids, 0, 1, 1.0, 1e-20, out, byref(size), byref(executor))
    acl.ok(name, None, 0, executor, None)  # none at all
    assert acl.read(result, np.empty(2, np.float32)).tolist() == [0, 0]


def test_strides_and_offset(acl: Library) -> None:
    """Every second column of a wider matrix, from its second row on, in and out; the rest stays."""
    case = Permutation(acl)
    wide = np.arange(40, dtype=np.float32).reshape(5, 8)
    target = np.full((3, 6), -1, np.float32)
    source, sink = acl.memory(wide), acl.memory(target)
    grad = acl.tensor((4, 2), source, strides=(8, 2), offset=9, storage=(5, 8))
    out = acl.tensor((2, 2), sink, strides=(6, 3), offset=7, storage=(3, 6))
    status, executor = case.first(grad, out)
    assert status == 0, acl.message()
    acl.ok(case.name, None, 0, executor, None)
    rows = wide[1:, 1:4:2]
    target[1:, 1:5:3] = [rows[2] + rows[0], rows[1] + rows[3]]
    np.testing.assert_array_equal(acl.read(sink, target), target)
    np.testing.assert_array_equal(acl.read(source, wide), wide)


def test_operators_work_in_the_memory_that_c_gave(acl: Library) -> None:
    from moeroute.aclnn.library import handles

    seen: list[int] = []
    case = Permutation(acl)
    for number in (case.grad, case.sorted, case.out):
        tensor, problem = handles.state.objects[number].look()  # type: ignore[index]
        assert problem is None
        seen.append(tensor.data_ptr())
    assert seen == [case.rows, case.indices, case.sums]


def test_threads_of_python(acl: Library) -> None:
    """Messages belong to the thread; calls from many at once get right sums."""
    wrong: list[str] = []

    def work() -> None:
        case = Permutation(acl)
        for _ in range(50):
            status, executor = case.first()
            if status or acl.call(case.name, None, 0, executor, None) or case.result() != SUMS:
                wrong.append(acl.message())
            acl.call("aclrtFree", None)
            if "devPtr" not in acl.message():
                wrong.append("a message lost")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_nothing_survives_the_end(loaded: Library) -> None:
    loaded.fails(100001, "aclInit must come first", "aclrtSetDevice", 0)
    for _ in range(2):
        loaded.ok("aclInit", None)
        loaded.ok("aclrtSetDevice", 0)
        case = Permutation(loaded)
        executor = case.first()[1]
        loaded.ok("aclrtResetDevice", 0)
        loaded.fails(107002, "aclrtSetDevice must come first", "aclrtFree", case.rows)
        loaded.fails(161002, "must live", case.name, None, 0, executor, None)
        loaded.ok("aclFinalize")
        assert case.first()[0] == 361001
        assert "after aclFinalize" in loaded.message()
        assert loaded.tensor((2,), None) is None
        loaded.fails(361001, "after aclFinalize", "aclDestroyTensor", case.grad)
        loaded.fails(100037, "without it", "aclFinalize")


def test_a_python_process_forks(acl: Library) -> None:
    """Python runs its own hooks; ours find that out and leave them alone."""
    case = Permutation(acl)
    for _ in range(3):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            status, executor = case.first()
            status = status or acl.call(case.name, None, 0, executor, None)
            os._exit(0 if status == 0 and case.result() == SUMS else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert case.result() == [-1.0] * 4, "the child's memory is its own"
    assert case.first()[0] == 0
