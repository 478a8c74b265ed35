"""What C programs hold: handles, and host memory as device memory.

C holds no pointer of ours. A handle is a number that is never used twice and that no address can be, so a
destroyed, mistaken or invented one is found out by looking it up, and device addresses are looked up among the
live blocks. A block's memory lives as long as a tensor over it: what C frees too early is still there.
"""

import itertools
import os
import threading
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moeroute import memory
from moeroute.aclnn import core

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
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
ND = 2
MAX_RANK = 25
MAX_ARRAY = 1 << 20  # entries of an array: nobody means more, and reading past the end would be a crash
LARGEST = (1 << 63) - 1

INVALID_PARAM, UNINITIALIZE, REPEAT_INITIALIZE, REPEAT_FINALIZE = 100000, 100001, 100002, 100037
RT_PARAM_INVALID, RT_INVALID_DEVICEID, RT_CONTEXT_NULL, RT_STREAM_CONTEXT = 107000, 107001, 107002, 107003
RT_EVENT_TIMESTAMP_INVALID, RT_EVENT_TIMESTAMP_REVERSAL, RT_MEMORY_ALLOCATION = 107006, 107007, 207001
NULLPTR, INVALID, RUNTIME_ERROR, INNER, INNER_NULLPTR = 161001, 161002, 361001, 561000, 561103


class C:
    """The library that we are the inside of: its ffi, and the functions that it lends us."""

    ffi: Any = None
    lib: Any = None
    python_is_ours = False  # the program had none before


c = C()


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
    storage: tuple[int, ...]
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

    def forget_view(self) -> None:
        with lock:
            if self.block is not None and self in self.block.tensors:
                self.block.tensors.remove(self)
            self.view = self.block = None

    def move(self, address: int) -> None:
        """Other memory for the same description. What was prepared keeps the former."""
        self.forget_view()
        self.address = address

    def _place(self) -> tuple[Block | None, Failure | None]:
        """The block under the elements; without elements none is needed."""
        if 0 in self.shape:
            return None, None
        if self.address == 0:
            return None, Failure(NULLPTR, "data must be device memory; got a null pointer")
        size = self.dtype.itemsize
        last = self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        block = block_of(self.address, (last + 1) * size)
        if block is None:
            what = f"data must be {(last + 1) * size} bytes of memory from aclrtMalloc"
            return None, Failure(INVALID, f"{what}; got {describe(self.address)}")
        if (self.address - block.address) % size:
            return None, Failure(INVALID, f"data must be aligned to {size} bytes; got {self.address:#x}")
        return block, None


@dataclass(eq=False, slots=True)
class TensorList:
    tensors: list[int]  # their handles; 0 for none


@dataclass(eq=False, slots=True)
class IntArray:
    values: list[int]


@dataclass(eq=False, slots=True)
class FloatArray:
    values: list[float]


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
class Event:
    recorded: float | None = None  # when, in seconds


@dataclass(eq=False, slots=True)
class Context:
    pass


@dataclass(eq=False, slots=True)
class Operator:
    """An operator of `moeroute.aclnn`, and which of its parameters C gives as handles: place, name, kind."""

    name: str
    prepare: core.FirstPhase
    handles: tuple[tuple[int, str, type], ...]
    inputs: tuple[int, ...]  # places of tensors
    outputs: tuple[int, ...]


@dataclass(eq=False, slots=True)
class ExecutorHandle:
    operator: Operator
    given: list[Any]  # the first phase's arguments: handles, numbers, None
    executor: core.Executor
    blocks: tuple[Block, ...]
    moved: bool = False  # a tensor has other memory than the first phase saw


C_NAMES = {
    TensorHandle: "aclTensor",
    TensorList: "aclTensorList",
    IntArray: "aclIntArray",
    FloatArray: "aclFloatArray",
    BoolArray: "aclBoolArray",
    Scalar: "aclScalar",
    Stream: "aclrtStream",
    Event: "aclrtEvent",
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


state = State()
lock = threading.RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
_numbers = itertools.count(0x6D6F_0000_0000_0010, 16)  # no address on any machine of today


class _Thread(threading.local):
    shown: Any = None  # the text that C was given
    context = 0


thread = _Thread()


def new(thing: Any) -> int:
    """Register the object; returns its number, which C holds as the pointer."""
    number = next(_numbers)
    state.objects[number] = thing
    return number


def find(kind: type, number: int, status: int, argument: str) -> Any:
    """The live object; a Failure names what the number is instead."""
    thing = state.objects.get(number)
    if type(thing) is not kind:
        got = f"an {C_NAMES[type(thing)]}" if thing is not None else f"{number:#x}, destroyed or never created"
        raise Failure(status, f"{argument} must be a live {C_NAMES[kind]}; got {got}")
    return thing


def destroy(kind: type, number: int, argument: str, null: int = NULLPTR, invalid: int = INVALID) -> Any:
    """Forget the live object of this kind, and return it."""
    if number == 0:
        raise Failure(null, f"{argument} must not be null")
    find(kind, number, invalid, argument)
    return state.objects.pop(number, None)


def block_of(address: int, size: int) -> Block | None:
    """The live block that holds [address, address + size)."""
    with lock:
        place = bisect_right(state.addresses, address) - 1
        if place < 0:
            return None
        block = state.blocks[state.addresses[place]]
    return block if address + size <= block.address + block.size else None


def describe(address: int) -> str:
    """What the address is, for an error."""
    with lock:
        place = bisect_right(state.addresses, address) - 1
        block = state.blocks[state.addresses[place]] if place >= 0 else None
    if block is not None and address < block.address + block.size:
        return f"{address:#x}, with {block.address + block.size - address} bytes behind it"
    return f"{address:#x}, freed or never allocated"


def device_memory(address: int, size: int, argument: str) -> Block:
    """The live block with all these bytes; the caller keeps it while it uses the address."""
    block = block_of(address, size)
    if block is None:
        what = f"{argument} must be {size} bytes of device memory"
        raise Failure(RT_PARAM_INVALID, f"{what}; got {describe(address)}")
    return block


def need_init(status: int = UNINITIALIZE) -> None:
    """Refuse calls before aclInit and after aclFinalize."""
    if not state.initialized:
        when = "after aclFinalize" if state.finalized else "before aclInit"
        raise Failure(status, f"aclInit must come first; got a call {when}")


def need_device() -> None:
    """Refuse calls before aclrtSetDevice."""
    need_init()
    if state.devices_set == 0:
        raise Failure(RT_CONTEXT_NULL, "aclrtSetDevice must come first; got a call without a device")


def need_pointer(pointer: Any, argument: str, status: int = INVALID_PARAM) -> None:
    """Refuse a null pointer of C."""
    if pointer == c.ffi.NULL:
        raise Failure(status, f"{argument} must not be null")


def need_stream(number: int, status: int = RT_STREAM_CONTEXT) -> None:
    """Refuse what is no live stream; 0 is the default one."""
    if number != 0:  # the default stream
        find(Stream, number, status, "stream")
