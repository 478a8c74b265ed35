"""The C library's runtime: events, timeouts, memory of either kind, what it says of machine and chip."""

import ctypes
from ctypes import byref, c_float, c_int32, c_uint64, c_void_p

import numpy as np

from c_library import Library


def event_of(acl: Library) -> c_void_p:
    event = c_void_p()
    acl.ok("aclrtCreateEvent", byref(event))
    return event


def test_events(acl: Library) -> None:
    first, last, stream = event_of(acl), event_of(acl), c_void_p()
    acl.ok("aclrtCreateStream", byref(stream))
    status, between = c_int32(9), c_float(-1)
    acl.ok("aclrtQueryEvent", first, byref(status))
    assert status.value == 1, "not ready"
    acl.ok("aclrtQueryEventStatus", first, byref(status))
    assert status.value == 0, "not ready"
    acl.fails(107006, "startEvent must have been recorded", "aclrtEventElapsedTime", byref(between), first, last)
    acl.ok("aclrtRecordEvent", first, stream)
    acl.fails(107006, "endEvent must have been recorded", "aclrtEventElapsedTime", byref(between), first, last)
    acl.ok("aclrtRecordEvent", last, None)
    acl.ok("aclrtQueryEvent", last, byref(status))
    assert status.value == 0, "complete"
    acl.ok("aclrtQueryEventStatus", last, byref(status))
    assert status.value == 1, "complete"
    acl.ok("aclrtSynchronizeEvent", last)
    acl.ok("aclrtSynchronizeEventWithTimeout", last, 0)
    acl.ok("aclrtStreamWaitEvent", stream, last)
    acl.ok("aclrtEventElapsedTime", byref(between), first, last)
    assert between.value > 0
    acl.ok("aclrtEventElapsedTime", byref(between), first, first)
    assert between.value == 0
    acl.fails(107007, "endEvent must be recorded after", "aclrtEventElapsedTime", byref(between), last, first)
    acl.ok("aclrtRecordEvent", first, stream)  # anew
    acl.ok("aclrtEventElapsedTime", byref(between), last, first)
    for event in (first, last):
        acl.ok("aclrtDestroyEvent", event)
        acl.fails(107000, "destroyed", "aclrtDestroyEvent", event)
    acl.fails(107000, "destroyed", "aclrtSynchronizeEvent", first)


def test_event_refusals(acl: Library) -> None:
    event, status, between = event_of(acl), c_int32(), c_float()
    for flag in (0x01, 0x02, 0x08, 0x20, 0x40, 0x09):
        for name in ("aclrtCreateEventWithFlag", "aclrtCreateEventExWithFlag"):
            acl.ok(name, byref(event), flag)
    acl.fails(107000, "flag must be", "aclrtCreateEventWithFlag", byref(event), 4)
    acl.fails(100000, "event must not be null", "aclrtCreateEvent", None)
    acl.fails(100000, "event must not be null", "aclrtDestroyEvent", None)
    acl.fails(100000, "event must not be null", "aclrtRecordEvent", None, None)
    acl.fails(107003, "stream must be", "aclrtRecordEvent", event, 5)
    acl.fails(107003, "stream must be", "aclrtStreamWaitEvent", 5, event)
    acl.fails(107000, "timeout must be -1", "aclrtSynchronizeEventWithTimeout", event, -2)
    acl.fails(100000, "status must not be null", "aclrtQueryEvent", event, None)
    acl.fails(100000, "status must not be null", "aclrtQueryEventStatus", event, None)
    acl.fails(100000, "ms must not be null", "aclrtEventElapsedTime", None, event, event)
    acl.fails(100000, "endEvent must not be null", "aclrtEventElapsedTime", byref(between), event, None)
    acl.fails(107000, "startEvent must be a live", "aclrtEventElapsedTime", byref(between), 7, event)
    acl.fails(107000, "got an aclrtEvent", "aclrtDestroyStream", event)
    acl.ok("aclrtResetDevice", 0)
    acl.fails(107002, "aclrtSetDevice", "aclrtQueryEvent", event, byref(status))
    acl.ok("aclrtSetDevice", 0)
    acl.fails(107000, "destroyed", "aclrtQueryEvent", event, byref(status))


def test_streams(acl: Library) -> None:
    stream, status = c_void_p(), c_int32(9)
    acl.ok("aclrtCreateStreamWithConfig", byref(stream), 3, 0x01 | 0x02)
    acl.ok("aclrtStreamQuery", stream, byref(status))
    assert status.value == 0
    for timeout in (-1, 0, 1000):
        acl.ok("aclrtSynchronizeStreamWithTimeout", stream, timeout)
        acl.ok("aclrtSynchronizeStreamWithTimeout", None, timeout)
    acl.fails(107000, "timeout must be -1", "aclrtSynchronizeStreamWithTimeout", stream, -2)
    acl.fails(107003, "stream must be", "aclrtSynchronizeStreamWithTimeout", 4, 0)
    acl.fails(100000, "status must not be null", "aclrtStreamQuery", stream, None)
    acl.fails(100000, "stream must not be null", "aclrtCreateStreamWithConfig", None, 0, 0)
    acl.ok("aclrtDestroyStream", stream)
    acl.fails(107003, "destroyed", "aclrtStreamQuery", stream, byref(status))


def test_copies_whose_direction_the_addresses_say(acl: Library) -> None:
    data = np.arange(16, dtype=np.float32)
    one, other = acl.memory(data), acl.memory(0 * data)
    found = np.empty_like(data)
    acl.ok("aclrtMemcpy", other, 64, one, 64, 4)
    acl.ok("aclrtMemcpyAsync", found.ctypes.data, 64, other, 64, 4, None)
    np.testing.assert_array_equal(found, data)
    acl.ok("aclrtMemcpy", one, 64, (2 * data).ctypes.data, 64, 4)
    np.testing.assert_array_equal(acl.read(one, data), 2 * data)
    acl.fails(107000, "dst must be 64 bytes of device memory", "aclrtMemcpy", one + 4, 64, found.ctypes.data, 64, 4)
    acl.fails(107000, "src must be 64 bytes of device memory", "aclrtMemcpy", found.ctypes.data, 64, one + 4, 64, 4)


def test_filling_on_a_stream(acl: Library) -> None:
    block = acl.memory(np.zeros(8, np.uint8))
    acl.ok("aclrtMemsetAsync", block, 8, 0x1FF, 3, None)
    assert acl.read(block, np.empty(8, np.uint8)).tolist() == [255] * 3 + [0] * 5
    acl.fails(107003, "stream must be", "aclrtMemsetAsync", block, 8, 0, 8, 9)
    acl.fails(107000, "count must be at most maxCount = 3", "aclrtMemsetAsync", block, 3, 0, 4, None)
    acl.fails(100000, "devPtr must not be null", "aclrtMemsetAsync", None, 8, 0, 8, None)


def test_memory_information(acl: Library) -> None:
    free, total = c_uint64(), c_uint64()
    for attribute in range(12):
        acl.ok("aclrtGetMemInfo", attribute, byref(free), byref(total))
        assert 0 < free.value < total.value
    pages = ctypes.CDLL(None)
    pages.sysconf.restype = ctypes.c_long
    assert total.value <= pages.sysconf(85) * pages.sysconf(30), "_SC_PHYS_PAGES, _SC_PAGESIZE"
    acl.fails(107000, "attr must be", "aclrtGetMemInfo", 12, byref(free), byref(total))
    acl.fails(100000, "free must not be null", "aclrtGetMemInfo", 0, None, byref(total))
    acl.fails(100000, "total must not be null", "aclrtGetMemInfo", 0, byref(free), None)


def test_run_mode(acl: Library) -> None:
    mode = c_int32(9)
    acl.ok("aclrtGetRunMode", byref(mode))
    assert mode.value == 1, "a host"
    acl.fails(100000, "runMode must not be null", "aclrtGetRunMode", None)


def test_the_name_of_the_chip(acl: Library) -> None:
    first = acl.call("aclrtGetSocName")
    assert ctypes.string_at(first) == b"Ascend910B2"
    assert acl.call("aclrtGetSocName") == first
