"""What answers behind the C functions: handles, host memory as device memory, and calls into `moeroute.aclnn`.

C holds no pointer of ours. A handle is a number that is never used twice and that no address can be, so a
destroyed, mistaken or invented one is found out by looking it up, and device addresses are looked up among the
live blocks. A block's memory lives as long as a tensor over it: what C frees too early is still there.

Imported inside the library only; `attach` is called once, with the library's own ffi.
"""

import itertools
import math
import os
import threading
import traceback
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moeroute import aclnn, memory
from moeroute.aclnn import core
from moeroute.aclnn.library import prototypes
from moeroute.aclnn.signatures import SIGNATURES, Parameter

DTYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    7: torch.uint16,
    8: torch.uint32,
    9: torch.int64,
    10: torch.uint64,
    11: torch.float64,
    12: torch.bool,
    16: torch.complex64,
    17: torch.complex128,
    27: torch.bfloat16,
}
ND = 2
MAX_RANK = 25
MAX_ARRAY = 1 << 20  # entries of an array: nobody means more, and reading past the end would be a crash
LARGEST = (1 << 63) - 1

INVALID_PARAM, UNINITIALIZE, REPEAT_INITIALIZE, REPEAT_FINALIZE = 100000, 100001, 100002, 100037
RT_PARAM_INVALID, RT_INVALID_DEVICEID, RT_CONTEXT_NULL, RT_STREAM_CONTEXT = 107000, 107001, 107002, 107003
RT_MEMORY_ALLOCATION = 207001
NULLPTR, INVALID, RUNTIME_ERROR = 161001, 161002, 361001

_ffi: Any = None
_lib: Any = None


class Failure(Exception):
    """A status and its message, on the way to the caller. Without a message: the operator left its own."""

    def __init__(self, status: int, message: str = "") -> None:
        super().__init__(message)
        self.status = status


# ---------------------------------------------------------------------------- what C holds


class Block:
    """A piece of device memory."""

    __slots__ = ("address", "alive", "size", "storage", "tensors")

    def __init__(self, size: int) -> None:
        self.storage = memory.empty((size,), torch.uint8).untyped_storage()
        self.address = self.storage.data_ptr()
        self.size = size
        self.alive = True
        self.tensors: list[TensorHandle] = []  # those that hold a view of it

    def release(self) -> None:
        self.alive = False
        for tensor in self.tensors:
            tensor.view = tensor.block = None
        self.tensors.clear()


@dataclass(eq=False, slots=True)
class TensorHandle:
    """A description of a tensor; `view` is made at its first use."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    format: int
    address: int
    view: Tensor | None = None
    block: Block | None = None

    def look(self) -> tuple[Tensor, Failure | None]:
        """A torch tensor over the memory. Where that is wrong, what is, and a tensor that only checks may look at:
        what the operator says of dtype and shape comes first."""
        if self.view is not None:
            return self.view, None
        block, problem = self._place()
        if block is None:
            try:
                view = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
            except RuntimeError as error:  # larger than the machine
                raise problem or Failure(INVALID, str(error)) from error
        else:
            start = (self.address - block.address) // self.dtype.itemsize + self.offset
            view = torch.empty(0, dtype=self.dtype).set_(block.storage, start, self.shape, self.strides)
        if self.format != ND:
            view.acl_format = self.format  # type: ignore[attr-defined]
        if problem is None:
            self.view, self.block = view, block
            if block is not None:
                block.tensors.append(self)
        return view, problem

    def _place(self) -> tuple[Block | None, Failure | None]:
        """The block under the elements; without elements none is needed."""
        if 0 in self.shape:
            return None, None
        if self.address == 0:
            return None, Failure(NULLPTR, "data must be device memory; got a null pointer")
        size = self.dtype.itemsize
        last = self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        block = _block_of(self.address, (last + 1) * size)
        if block is None:
            what = f"data must be {(last + 1) * size} bytes of memory from aclrtMalloc"
            return None, Failure(INVALID, f"{what}; got {_describe(self.address)}")
        if (self.address - block.address) % size:
            return None, Failure(INVALID, f"data must be aligned to {size} bytes; got {self.address:#x}")
        return block, None


@dataclass(eq=False, slots=True)
class IntArray:
    values: list[int]


@dataclass(eq=False, slots=True)
class BoolArray:
    values: list[bool]


@dataclass(eq=False, slots=True)
class Scalar:
    dtype: torch.dtype
    data: bytes


@dataclass(eq=False, slots=True)
class Stream:
    pass


@dataclass(eq=False, slots=True)
class Context:
    pass


@dataclass(eq=False, slots=True)
class ExecutorHandle:
    executor: core.Executor
    blocks: tuple[Block, ...]


C_NAMES = {
    TensorHandle: "aclTensor",
    IntArray: "aclIntArray",
    BoolArray: "aclBoolArray",
    Scalar: "aclScalar",
    Stream: "aclrtStream",
    Context: "aclrtContext",
    ExecutorHandle: "aclOpExecutor",
}


@dataclass
class State:
    """All that lives between aclInit and aclFinalize."""

    initialized: bool = False
    finalized: bool = False
    devices_set: int = 0
    objects: dict[int, Any] = field(default_factory=dict)
    addresses: list[int] = field(default_factory=list)  # of the live blocks, sorted
    blocks: dict[int, Block] = field(default_factory=dict)

    def clear(self) -> None:
        for block in list(self.blocks.values()):
            block.release()
        self.objects.clear()
        self.blocks.clear()
        self.addresses.clear()
        self.devices_set = 0


_state = State()
_lock = threading.RLock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_numbers = itertools.count(0x6D6F_0000_0000_0010, 16)  # no address on any machine of today


class _Thread(threading.local):
    shown: Any = None  # the text that C was given
    context = 0


_thread = _Thread()


def _new(thing: Any) -> int:
    number = next(_numbers)
    _state.objects[number] = thing
    return number


def _find(kind: type, number: int, status: int, argument: str) -> Any:
    """The live object; a Failure names what the number is instead."""
    thing = _state.objects.get(number)
    if type(thing) is not kind:
        got = f"an {C_NAMES[type(thing)]}" if thing is not None else f"{number:#x}, destroyed or never created"
        raise Failure(status, f"{argument} must be a live {C_NAMES[kind]}; got {got}")
    return thing


def _destroy(kind: type, number: int, argument: str, null: int = NULLPTR, invalid: int = INVALID) -> Any:
    if number == 0:
        raise Failure(null, f"{argument} must not be null")
    _find(kind, number, invalid, argument)
    return _state.objects.pop(number, None)


def _block_of(address: int, size: int) -> Block | None:
    """The live block that holds [address, address + size)."""
    with _lock:
        place = bisect_right(_state.addresses, address) - 1
        if place < 0:
            return None
        block = _state.blocks[_state.addresses[place]]
    return block if address + size <= block.address + block.size else None


def _describe(address: int) -> str:
    with _lock:
        place = bisect_right(_state.addresses, address) - 1
        block = _state.blocks[_state.addresses[place]] if place >= 0 else None
    if block is not None and address < block.address + block.size:
        return f"{address:#x}, with {block.address + block.size - address} bytes behind it"
    return f"{address:#x}, freed or never allocated"


def _device_memory(address: int, size: int, argument: str) -> Block:
    block = _block_of(address, size)
    if block is None:
        what = f"{argument} must be {size} bytes of device memory"
        raise Failure(RT_PARAM_INVALID, f"{what}; got {_describe(address)}")
    return block


def _need_init(status: int = UNINITIALIZE) -> None:
    if not _state.initialized:
        when = "after aclFinalize" if _state.finalized else "before aclInit"
        raise Failure(status, f"aclInit must come first; got a call {when}")


def _need_device() -> None:
    _need_init()
    if _state.devices_set == 0:
        raise Failure(RT_CONTEXT_NULL, "aclrtSetDevice must come first; got a call without a device")


def _need_pointer(pointer: Any, argument: str, status: int = INVALID_PARAM) -> None:
    if pointer == _ffi.NULL:
        raise Failure(status, f"{argument} must not be null")


def _need_stream(number: int, status: int = RT_STREAM_CONTEXT) -> None:
    if number != 0:  # the default stream
        _find(Stream, number, status, "stream")


# ---------------------------------------------------------------------------- acl.h


def aclInit(config_path: int) -> None:
    with _lock:
        if _state.initialized:
            raise Failure(REPEAT_INITIALIZE, "aclInit must be called once; got another call before aclFinalize")
        _state.initialized = True


def aclFinalize() -> None:
    with _lock:
        if not _state.initialized:
            status = REPEAT_FINALIZE if _state.finalized else UNINITIALIZE
            raise Failure(status, "aclFinalize must follow aclInit; got a call without it")
        _state.clear()
        _state.initialized, _state.finalized = False, True


def _need_device_id(device_id: int) -> None:
    if device_id != 0:
        raise Failure(RT_INVALID_DEVICEID, f"deviceId must be 0, the one device; got {device_id}")


def aclrtSetDevice(device_id: int) -> None:
    _need_init()
    _need_device_id(device_id)
    with _lock:
        _state.devices_set += 1


def aclrtGetDevice(device_id: Any) -> None:
    _need_device()
    _need_pointer(device_id, "deviceId")
    device_id[0] = 0


def aclrtResetDevice(device_id: int) -> None:
    """The last of as many resets as there were sets frees what the device holds."""
    _need_init()
    _need_device_id(device_id)
    with _lock:
        _need_device()
        _state.devices_set -= 1
        if _state.devices_set == 0:
            for block in _state.blocks.values():
                block.release()
            _state.blocks.clear()
            _state.addresses.clear()
            for number, thing in list(_state.objects.items()):
                if isinstance(thing, Stream | Context):
                    _state.objects.pop(number, None)


def aclrtGetDeviceCount(count: Any) -> None:
    _need_init()
    _need_pointer(count, "count")
    count[0] = 1


def aclrtCreateContext(context: Any, device_id: int) -> None:
    """It counts as a set device, as its destruction counts as a reset."""
    _need_init()
    _need_pointer(context, "context")
    _need_device_id(device_id)
    with _lock:
        _state.devices_set += 1
        _thread.context = context[0] = _new(Context())


def aclrtDestroyContext(context: int) -> None:
    _need_init()
    with _lock:
        _destroy(Context, context, "context", INVALID_PARAM, RT_PARAM_INVALID)
        aclrtResetDevice(0)


def aclrtSetCurrentContext(context: int) -> None:
    _need_init()
    _find(Context, context, RT_PARAM_INVALID, "context")
    _thread.context = context


def aclrtGetCurrentContext(context: Any) -> None:
    _need_device()
    _need_pointer(context, "context")
    with _lock:
        if _thread.context not in _state.objects:
            _thread.context = _new(Context())
    context[0] = _thread.context


def aclrtCtxSetSysParamOpt(option: int, value: int) -> None:
    """Every operator is deterministic whatever the switch says."""
    _need_device()
    if option not in (0, 1, 2):
        raise Failure(RT_PARAM_INVALID, f"opt must be an aclSysParamOpt; got {option}")


def aclrtCreateStream(stream: Any) -> None:
    _need_device()
    _need_pointer(stream, "stream")
    stream[0] = _new(Stream())


def aclrtDestroyStream(stream: int) -> None:
    _need_init()
    _destroy(Stream, stream, "stream", INVALID_PARAM, RT_PARAM_INVALID)


def aclrtSynchronizeStream(stream: int) -> None:
    """Nothing to wait for: every call is done when it returns."""
    _need_device()
    _need_stream(stream)


def aclrtSynchronizeDevice() -> None:
    _need_device()


def aclrtMalloc(pointer: Any, size: int, policy: int) -> None:
    _need_device()
    _allocate(pointer, "devPtr", size)


def aclrtMallocHost(pointer: Any, size: int) -> None:
    _need_device()
    _allocate(pointer, "hostPtr", size)


def _allocate(pointer: Any, argument: str, size: int) -> None:
    _need_pointer(pointer, argument)
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
    with _lock:
        _state.blocks[block.address] = block
        insort(_state.addresses, block.address)
    pointer[0] = block.address


def aclrtFree(address: int) -> None:
    _need_device()
    _free(address, "devPtr")


def aclrtFreeHost(address: int) -> None:
    _need_device()
    _free(address, "hostPtr")


def _free(address: int, argument: str) -> None:
    if address == 0:
        raise Failure(INVALID_PARAM, f"{argument} must not be null")
    with _lock:
        block = _state.blocks.pop(address, None)
        if block is None:
            what = f"{argument} must be the start of an allocation"
            raise Failure(RT_PARAM_INVALID, f"{what}; got {_describe(address)}")
        _state.addresses.remove(address)
        block.release()


def aclrtMemcpy(to: int, room: int, source: int, count: int, kind: int) -> None:
    _need_device()
    if kind not in (0, 1, 2, 3):
        raise Failure(RT_PARAM_INVALID, f"kind must be an aclrtMemcpyKind; got {kind}")
    if to == 0 or source == 0:
        raise Failure(INVALID_PARAM, f"{'src' if to else 'dst'} must not be null")
    if count > room:
        raise Failure(RT_PARAM_INVALID, f"count must be at most destMax = {room}; got {count}")
    held = []  # so that another thread's aclrtFree does not take the memory away meanwhile
    if kind in (1, 3):
        held.append(_device_memory(to, count, "dst"))
    if kind in (2, 3):
        held.append(_device_memory(source, count, "src"))
    _lib.moeroute_move(to, source, count)
    held.clear()


def aclrtMemcpyAsync(to: int, room: int, source: int, count: int, kind: int, stream: int) -> None:
    _need_device()
    _need_stream(stream)
    aclrtMemcpy(to, room, source, count, kind)


def aclrtMemset(to: int, room: int, value: int, count: int) -> None:
    _need_device()
    if to == 0:
        raise Failure(INVALID_PARAM, "devPtr must not be null")
    if count > room:
        raise Failure(RT_PARAM_INVALID, f"count must be at most maxCount = {room}; got {count}")
    block = _device_memory(to, count, "devPtr")
    _lib.moeroute_fill(to, value, count)
    del block


def aclGetRecentErrMsg() -> int:
    """The message of this thread's last failure, once; empty where there was none since."""
    _thread.shown = _ffi.new("char[]", core.aclGetRecentErrMsg().encode(errors="replace"))
    return int(_ffi.cast("uintptr_t", _thread.shown))


# ---------------------------------------------------------------------------- acl_meta.h


def _dims(pointer: Any, count: int, argument: str) -> tuple[int, ...]:
    if count > MAX_RANK:
        raise Failure(INVALID, f"{argument} must have at most {MAX_RANK} entries; got {count}")
    if count == 0:
        return ()
    _need_pointer(pointer, argument, NULLPTR)
    found = tuple(_ffi.unpack(pointer, count))
    if min(found) < 0:
        raise Failure(INVALID, f"{argument} must not be negative; got {list(found)}")
    return found


def aclCreateTensor(
    view_dims: Any,
    view_rank: int,
    data_type: int,
    stride: Any,
    offset: int,
    format_: int,
    storage_dims: Any,
    storage_rank: int,
    address: int,
) -> int:
    _need_init()
    shape = _dims(view_dims, view_rank, "viewDims")
    storage = _dims(storage_dims, storage_rank, "storageDims")
    if stride == _ffi.NULL:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    else:
        strides = _dims(stride, view_rank, "stride")
    dtype = DTYPES.get(data_type)
    if dtype is None:
        raise Failure(INVALID, f"dataType must be one that moeroute has; got {data_type}")
    if offset < 0:
        raise Failure(INVALID, f"offset must not be negative; got {offset}")
    room = math.prod(storage)
    if 0 not in shape:
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if last >= room:
            what = f"the view must lie inside storageDims = {list(storage)}"
            raise Failure(INVALID, f"{what}; got its last element at {last}")
    if max(room, math.prod(shape)) * dtype.itemsize > LARGEST:
        raise Failure(INVALID, f"the storage must fit into memory; got {room} elements")
    return _new(TensorHandle(dtype, shape, strides, offset, format_, address))


def aclDestroyTensor(tensor: int) -> None:
    _need_init(RUNTIME_ERROR)
    thing = _destroy(TensorHandle, tensor, "tensor")
    if thing is not None and (block := thing.block) is not None:
        with _lock:
            if thing in block.tensors:
                block.tensors.remove(thing)


def aclCreateScalar(value: int, data_type: int) -> int:
    _need_init()
    if value == 0:
        raise Failure(NULLPTR, "value must not be null")
    dtype = DTYPES.get(data_type)
    if dtype is None:
        raise Failure(INVALID, f"dataType must be one that moeroute has; got {data_type}")
    return _new(Scalar(dtype, bytes(_ffi.buffer(_ffi.cast("char *", value), dtype.itemsize))))


def aclDestroyScalar(scalar: int) -> None:
    _need_init(RUNTIME_ERROR)
    _destroy(Scalar, scalar, "scalar")


def _array(pointer: Any, size: int) -> list[Any]:
    if size > MAX_ARRAY:
        raise Failure(INVALID, f"size must be at most {MAX_ARRAY}; got {size}")
    if size == 0:
        return []
    _need_pointer(pointer, "value", NULLPTR)
    return list(_ffi.unpack(pointer, size))


def aclCreateIntArray(value: Any, size: int) -> int:
    _need_init()
    return _new(IntArray(_array(value, size)))


def aclDestroyIntArray(array: int) -> None:
    _need_init(RUNTIME_ERROR)
    _destroy(IntArray, array, "array")


def aclCreateBoolArray(value: Any, size: int) -> int:
    _need_init()
    return _new(BoolArray(_array(value, size)))


def aclDestroyBoolArray(array: int) -> None:
    _need_init(RUNTIME_ERROR)
    _destroy(BoolArray, array, "array")


def aclSetAclOpExecutorRepeatable(executor: int) -> None:
    _need_init(RUNTIME_ERROR)
    if executor == 0:
        raise Failure(NULLPTR, "executor must not be null")
    _find(ExecutorHandle, executor, INVALID, "executor").executor.repeatable = True


def aclDestroyAclOpExecutor(executor: int) -> None:
    _need_init(RUNTIME_ERROR)
    _destroy(ExecutorHandle, executor, "executor")


# ---------------------------------------------------------------------------- aclnnop


def _first_phase(operator: str, parameters: Sequence[Parameter]) -> Callable[..., None]:
    prepare = getattr(aclnn, f"aclnn{operator}GetWorkspaceSize")
    tensors = {"tensor", "optional_tensor", "out", "optional_out"}
    handles = [
        (place, parameter.name, TensorHandle if parameter.kind in tensors else IntArray)
        for place, parameter in enumerate(parameters)
        if parameter.kind in tensors or parameter.kind == "optional_int_array"
    ]

    def call(*given: Any) -> None:
        _need_init(RUNTIME_ERROR)
        *values, size_out, executor_out = given
        _need_pointer(size_out, "workspaceSize", NULLPTR)
        _need_pointer(executor_out, "executor", NULLPTR)
        trouble: Failure | None = None
        blocks = []
        for place, name, kind in handles:
            if values[place] == 0:
                values[place] = None
                continue
            handle = _find(kind, values[place], INVALID, name)
            if kind is IntArray:
                values[place] = handle.values
                continue
            values[place], problem = handle.look()
            if problem is not None and trouble is None:
                trouble = Failure(problem.status, f"{name}: {problem}")
            if handle.block is not None:
                blocks.append(handle.block)
        status, size, executor = prepare(*values)
        if status != 0:
            raise Failure(status)
        if trouble is not None:
            raise trouble
        size_out[0] = size
        executor_out[0] = _new(ExecutorHandle(executor, tuple(blocks)))

    return call


def _second_phase(operator: str) -> Callable[..., None]:
    run = getattr(aclnn, f"aclnn{operator}")

    def call(workspace: int, workspace_size: int, number: int, stream: int) -> None:
        _need_init(RUNTIME_ERROR)
        if number == 0:
            raise Failure(NULLPTR, "executor must not be null")
        handle = _find(ExecutorHandle, number, INVALID, "executor")
        executor = handle.executor
        _need_stream(stream, RUNTIME_ERROR)
        needed = executor.workspace_size
        if needed and workspace == 0 and workspace_size != 0:
            raise Failure(NULLPTR, f"workspace must be {needed} bytes of device memory; got a null pointer")
        if needed and workspace_size >= needed and _block_of(workspace, needed) is None:
            what = f"workspace must be {needed} bytes of device memory"
            raise Failure(INVALID, f"{what}; got {_describe(workspace)}")
        if not all(block.alive for block in handle.blocks):
            raise Failure(INVALID, "the tensors' memory must live until the operator has run; got a freed one")
        status = run(workspace or None, workspace_size, executor, None)
        if status in (0, core.INNER) and not executor.repeatable:  # it ran
            _state.objects.pop(number, None)
        if status != 0:
            raise Failure(status)

    return call


# ---------------------------------------------------------------------------- into C


def _answer(name: str, returns_status: bool, function: Callable[..., Any]) -> Callable[..., int]:
    """The function as C calls it: a status plus one, so that 0 is left for "nobody answered"."""

    def call(*arguments: Any) -> int:
        try:
            result = function(*arguments)
        except Failure as failure:
            if str(failure):
                core.remember(f"{name}: {failure}")
            return failure.status + 1 if returns_status else 0
        return 1 if returns_status else result

    return call


def attach(ffi: Any, lib: Any) -> None:
    """Give the library's functions their Python side."""
    global _ffi, _lib
    _ffi, _lib = ffi, lib
    operators: dict[str, Callable[..., Any]] = {}
    for operator, signature in SIGNATURES.items():
        operators[f"aclnn{operator}GetWorkspaceSize"] = _first_phase(operator, signature.parameters)
        operators[f"aclnn{operator}"] = _second_phase(operator)

    def unexpected(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        core.remember("".join(traceback.format_exception(kind, error, trace)))

    for group in prototypes.libraries().values():
        for prototype in group:
            function = operators.get(prototype.name) or globals()[prototype.name]
            ffi.def_extern(
                name=f"moeroute_{prototype.name}",
                error=prototype.failure + 1 if prototype.returns_status else 0,
                onerror=unexpected,
            )(_answer(prototype.name, prototype.returns_status, function))
