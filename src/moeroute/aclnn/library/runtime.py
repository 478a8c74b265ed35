"""acl/acl.h: the runtime. Every call is done when it returns, so that nothing is ever waited for."""

import time
from bisect import insort
from pathlib import Path
from typing import Any

from moeroute.aclnn import chips, core
from moeroute.aclnn.library.handles import (
    INVALID_PARAM,
    LARGEST,
    REPEAT_FINALIZE,
    REPEAT_INITIALIZE,
    RT_EVENT_TIMESTAMP_INVALID,
    RT_EVENT_TIMESTAMP_REVERSAL,
    RT_INVALID_DEVICEID,
    RT_MEMORY_ALLOCATION,
    RT_PARAM_INVALID,
    UNINITIALIZE,
    Block,
    Context,
    Event,
    Failure,
    Stream,
    block_of,
    c,
    describe,
    destroy,
    device_memory,
    find,
    lock,
    need_device,
    need_init,
    need_pointer,
    need_stream,
    new,
    state,
    thread,
)


def aclInit(config_path: int) -> None:
    """The configuration file is not read."""
    with lock:
        if state.initialized:
            raise Failure(REPEAT_INITIALIZE, "aclInit must be called once; got another call before aclFinalize")
        state.initialized = True


def aclFinalize() -> None:
    """Frees everything; handles and device memory of the process are gone."""
    with lock:
        if not state.initialized:
            status = REPEAT_FINALIZE if state.finalized else UNINITIALIZE
            raise Failure(status, "aclFinalize must follow aclInit; got a call without it")
        state.clear()
        state.initialized, state.finalized = False, True


def _need_device_id(device_id: int) -> None:
    if device_id != 0:
        raise Failure(RT_INVALID_DEVICEID, f"deviceId must be 0, the one device; got {device_id}")


def aclrtSetDevice(device_id: int) -> None:
    """Counted: as many resets free the device."""
    need_init()
    _need_device_id(device_id)
    with lock:
        state.devices_set += 1


def aclrtGetDevice(device_id: Any) -> None:
    """Always 0."""
    need_device()
    need_pointer(device_id, "deviceId")
    device_id[0] = 0


def aclrtResetDevice(device_id: int) -> None:
    """The last of as many resets as there were sets frees what the device holds."""
    need_init()
    _need_device_id(device_id)
    with lock:
        need_device()
        state.devices_set -= 1
        if state.devices_set == 0:
            for block in state.blocks.values():
                block.release()
            state.blocks.clear()
            state.addresses.clear()
            for number, thing in list(state.objects.items()):
                if isinstance(thing, Stream | Event | Context):
                    state.objects.pop(number, None)


def aclrtGetDeviceCount(count: Any) -> None:
    """Always 1."""
    need_init()
    need_pointer(count, "count")
    count[0] = 1


def aclrtCreateContext(context: Any, device_id: int) -> None:
    """It counts as a set device, as its destruction counts as a reset."""
    need_init()
    need_pointer(context, "context")
    _need_device_id(device_id)
    with lock:
        state.devices_set += 1
        thread.context = context[0] = new(Context())


def aclrtDestroyContext(context: int) -> None:
    """Counts as a reset of the device."""
    need_init()
    with lock:
        destroy(Context, context, "context", INVALID_PARAM, RT_PARAM_INVALID)
        aclrtResetDevice(0)


def aclrtSetCurrentContext(context: int) -> None:
    """Of this thread."""
    need_init()
    find(Context, context, RT_PARAM_INVALID, "context")
    thread.context = context


def aclrtGetCurrentContext(context: Any) -> None:
    """Of this thread; made where it has none."""
    need_device()
    need_pointer(context, "context")
    with lock:
        if thread.context not in state.objects:
            thread.context = new(Context())
    context[0] = thread.context


def aclrtCtxSetSysParamOpt(option: int, value: int) -> None:
    """Every operator is deterministic whatever the switch says."""
    need_device()
    if option not in (0, 1, 2):
        raise Failure(RT_PARAM_INVALID, f"opt must be an aclSysParamOpt; got {option}")


def aclrtCreateStream(stream: Any) -> None:
    """A handle alone: every call is done when it returns."""
    need_device()
    need_pointer(stream, "stream")
    stream[0] = new(Stream())


def aclrtDestroyStream(stream: int) -> None:
    """Nothing can be pending on it."""
    need_init()
    destroy(Stream, stream, "stream", INVALID_PARAM, RT_PARAM_INVALID)


def aclrtSynchronizeStream(stream: int) -> None:
    """Nothing to wait for: every call is done when it returns."""
    need_device()
    need_stream(stream)


def aclrtCreateStreamWithConfig(stream: Any, priority: int, flag: int) -> None:
    """Any priority and any flag: a stream here has neither."""
    aclrtCreateStream(stream)


def aclrtSynchronizeStreamWithTimeout(stream: int, timeout: int) -> None:
    """Nothing to wait for; the timeout is checked."""
    _need_timeout(timeout)
    aclrtSynchronizeStream(stream)


def aclrtStreamQuery(stream: int, status: Any) -> None:
    """Always complete."""
    aclrtSynchronizeStream(stream)
    need_pointer(status, "status")
    status[0] = 0  # complete


def _need_timeout(timeout: int) -> None:
    if timeout < -1:
        raise Failure(RT_PARAM_INVALID, f"timeout must be -1, for ever, or milliseconds; got {timeout}")


def aclrtSynchronizeDevice() -> None:
    """Nothing to wait for."""
    need_device()


EVENT_FLAGS = 0x01 | 0x02 | 0x08 | 0x20 | 0x40


def aclrtCreateEvent(event: Any) -> None:
    """An event that is not recorded yet."""
    need_device()
    need_pointer(event, "event")
    event[0] = new(Event())


def aclrtCreateEventWithFlag(event: Any, flag: int) -> None:
    """Any sum of flags; an event here has only a time."""
    if flag & ~EVENT_FLAGS:
        raise Failure(RT_PARAM_INVALID, f"flag must be a sum of ACL_EVENT_ values; got {flag:#x}")
    aclrtCreateEvent(event)


aclrtCreateEventExWithFlag = aclrtCreateEventWithFlag


def aclrtDestroyEvent(event: int) -> None:
    """Null is refused."""
    need_init()
    destroy(Event, event, "event", INVALID_PARAM, RT_PARAM_INVALID)


def _event(event: int, argument: str = "event") -> Event:
    need_device()
    if event == 0:
        raise Failure(INVALID_PARAM, f"{argument} must not be null")
    found: Event = find(Event, event, RT_PARAM_INVALID, argument)
    return found


def aclrtRecordEvent(event: int, stream: int) -> None:
    """The time of the call: everything before it is done."""
    found = _event(event)
    need_stream(stream)
    found.recorded = time.perf_counter()


def aclrtSynchronizeEvent(event: int) -> None:
    """Nothing to wait for, recorded or not."""
    _event(event)


def aclrtSynchronizeEventWithTimeout(event: int, timeout: int) -> None:
    """Nothing to wait for; the timeout is checked."""
    _need_timeout(timeout)
    _event(event)


def aclrtStreamWaitEvent(stream: int, event: int) -> None:
    """Nothing to wait for; both handles are checked."""
    _event(event)
    need_stream(stream)


def aclrtQueryEvent(event: int, status: Any) -> None:
    """0 complete, 1 not recorded yet. The newer query has them the other way round."""
    found = _event(event)
    need_pointer(status, "status")
    status[0] = 0 if found.recorded is not None else 1


def aclrtQueryEventStatus(event: int, status: Any) -> None:
    """1 complete, 0 not recorded yet."""
    found = _event(event)
    need_pointer(status, "status")
    status[0] = 1 if found.recorded is not None else 0


def aclrtEventElapsedTime(milliseconds: Any, start: int, end: int) -> None:
    """Milliseconds between two records, by the process's clock."""
    need_pointer(milliseconds, "ms")
    first, last = _event(start, "startEvent").recorded, _event(end, "endEvent").recorded
    if first is None or last is None:
        which = "startEvent" if first is None else "endEvent"
        raise Failure(RT_EVENT_TIMESTAMP_INVALID, f"{which} must have been recorded; got one that was not")
    if last < first:
        what = f"an earlier one, by {1e3 * (first - last):.3f} ms"
        raise Failure(RT_EVENT_TIMESTAMP_REVERSAL, f"endEvent must be recorded after startEvent; got {what}")
    milliseconds[0] = 1e3 * (last - first)


def aclrtMalloc(pointer: Any, size: int, policy: int) -> None:
    """Host memory that counts as the device's; every policy is the same."""
    need_device()
    _allocate(pointer, "devPtr", size)


def aclrtMallocHost(pointer: Any, size: int) -> None:
    """The same memory as aclrtMalloc gives; operators take it too."""
    need_device()
    _allocate(pointer, "hostPtr", size)


def _allocate(pointer: Any, argument: str, size: int) -> None:
    need_pointer(pointer, argument)
    if size == 0:
        raise Failure(INVALID_PARAM, "size must be at least 1; got 0")
    block = None
    if size <= LARGEST:
        try:
            block = Block(size)
        except (RuntimeError, MemoryError, OverflowError):
            block = None
    if block is None:
        raise Failure(RT_MEMORY_ALLOCATION, f"size must be what the machine has; got {size} bytes")
    with lock:
        state.blocks[block.address] = block
        insort(state.addresses, block.address)
    pointer[0] = block.address


def aclrtFree(address: int) -> None:
    """The start of an allocation of aclrtMalloc or aclrtMallocHost."""
    need_device()
    _free(address, "devPtr")


def aclrtFreeHost(address: int) -> None:
    """As aclrtFree."""
    need_device()
    _free(address, "hostPtr")


def _free(address: int, argument: str) -> None:
    if address == 0:
        raise Failure(INVALID_PARAM, f"{argument} must not be null")
    with lock:
        block = state.blocks.pop(address, None)
        if block is None:
            what = f"{argument} must be the start of an allocation"
            raise Failure(RT_PARAM_INVALID, f"{what}; got {describe(address)}")
        state.addresses.remove(address)
        block.release()


def aclrtMemcpy(to: int, room: int, source: int, count: int, kind: int) -> None:
    """Device addresses must lie in one allocation with all `count` bytes; host addresses are not checked."""
    need_device()
    if kind not in range(5):
        raise Failure(RT_PARAM_INVALID, f"kind must be an aclrtMemcpyKind; got {kind}")
    if to == 0 or source == 0:
        raise Failure(INVALID_PARAM, f"{'src' if to else 'dst'} must not be null")
    if count > room:
        raise Failure(RT_PARAM_INVALID, f"count must be at most destMax = {room}; got {count}")
    held = []  # so that another thread's aclrtFree does not take the memory away meanwhile
    if kind in (1, 3) or (kind == 4 and block_of(to, 0) is not None):
        held.append(device_memory(to, count, "dst"))
    if kind in (2, 3) or (kind == 4 and block_of(source, 0) is not None):
        held.append(device_memory(source, count, "src"))
    c.lib.moeroute_move(to, source, count)
    held.clear()


def aclrtMemcpyAsync(to: int, room: int, source: int, count: int, kind: int, stream: int) -> None:
    """Done when it returns."""
    need_device()
    need_stream(stream)
    aclrtMemcpy(to, room, source, count, kind)


def aclrtMemset(to: int, room: int, value: int, count: int) -> None:
    """All `count` bytes must lie in one allocation."""
    need_device()
    if to == 0:
        raise Failure(INVALID_PARAM, "devPtr must not be null")
    if count > room:
        raise Failure(RT_PARAM_INVALID, f"count must be at most maxCount = {room}; got {count}")
    block = device_memory(to, count, "devPtr")
    c.lib.moeroute_fill(to, value, count)
    del block


def aclrtMemsetAsync(to: int, room: int, value: int, count: int, stream: int) -> None:
    """Done when it returns."""
    need_device()
    need_stream(stream)
    aclrtMemset(to, room, value, count)


def aclrtGetMemInfo(attribute: int, free: Any, total: Any) -> None:
    """The machine's memory, whichever kind is asked for: device memory is host memory."""
    need_device()
    if attribute not in range(12):
        raise Failure(RT_PARAM_INVALID, f"attr must be an aclrtMemAttr; got {attribute}")
    need_pointer(free, "free")
    need_pointer(total, "total")
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kilobytes = {words[0]: int(words[1]) for words in lines}
    free[0], total[0] = 1024 * kilobytes["MemAvailable:"], 1024 * kilobytes["MemTotal:"]


def aclrtGetRunMode(mode: Any) -> None:
    """Always ACL_HOST."""
    need_init()
    need_pointer(mode, "runMode")
    mode[0] = 1  # ACL_HOST


_soc_names: dict[str, Any] = {}


def aclrtGetSocName() -> int:
    """A name that stays where it is."""
    name = chips.soc_name()
    if name not in _soc_names:
        _soc_names[name] = c.ffi.new("char[]", name.encode())
    return int(c.ffi.cast("uintptr_t", _soc_names[name]))


def aclGetRecentErrMsg() -> int:
    """The message of this thread's last failure, once; empty where there was none since."""
    thread.shown = c.ffi.new("char[]", core.aclGetRecentErrMsg().encode(errors="replace"))
    return int(c.ffi.cast("uintptr_t", thread.shown))
