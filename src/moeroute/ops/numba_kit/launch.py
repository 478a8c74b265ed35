"""From a Python call to compiled code: compilation, argument packing, threads, the threading layer.

A kernel is a Python function over the items [lo, hi) with annotated parameters:

    @kernel(keys=FLOATS)
    def scale(out: element_ptr, x: element_ptr, factor: float32, lo: int64, hi: int64): ...

    scale(torch.bfloat16, items=num_rows, work=bytes_moved, out=out.data_ptr(), x=x.data_ptr(), factor=2.0)

The name then stands for its launch. The key (mostly a dtype) says what `element_ptr` points to. Arguments are given by
keyword and travel in one packed record; a parameter annotated with a NamedTuple class takes a tuple of that class.
For every key one function is compiled, `entry(record, lo, hi)`: a small call runs it over all items, a large one
splits the items over threads. Splitting never changes a bit: no item depends on another.
"""

import functools
import inspect
import os
import struct
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numba
import torch
from llvmlite import ir
from llvmlite.binding import ffi
from numba import int64, prange
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import NativeValue, intrinsic, models, register_model, unbox

from moeroute.ops.numba_kit import cache
from moeroute.ops.numba_kit.floats import exactly
from moeroute.ops.numba_kit.helpers import helper
from moeroute.ops.numba_kit.pointers import FINGERPRINT, POINTER, Pointer

# Below this many bytes moved (or comparable work) two threads cost more than they bring: waking
# them takes some 5 µs, in which one thread moves about 64 KiB.
SERIAL_WORK = 1 << 17

# A compilation that takes longer than this is announced.
PATIENCE_SECONDS = 2.0

_lock = threading.Lock()
_layer: str | None = None
_forked = False
cache_refusal: str | None = None


# LLVM's, of each call into it: code is also emitted, and freed, without the compiler's lock.
_llvm_lock: Any = getattr(ffi.lib, "_lock", None) or threading.RLock()


def _before_fork() -> None:
    """A fork waits for a kernel that another thread compiles or loads: the child could never compile one."""
    global_compiler_lock.acquire()
    _llvm_lock.__enter__()


def _after_fork() -> None:
    _llvm_lock.__exit__(None, None, None)
    global_compiler_lock.release()


def _after_fork_in_child() -> None:
    # An OpenMP pool does not survive a fork; the child stays serial for good.
    global _forked, _lock
    _forked = True
    _lock = threading.Lock()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


# ---------------------------------------------------------------------------- arguments


class Keyed:
    """The type of a parameter that depends on the kernel's key."""

    def __init__(self, type_of: Callable[[Any], Any]) -> None:
        self.type_of = type_of


element_ptr = Keyed(POINTER.__getitem__)


class _Record(numba.types.Type):
    """The packed arguments: a bytes object in Python, its address in compiled code."""

    def __init__(self) -> None:
        super().__init__(name=f"Record({FINGERPRINT})")


RECORD = _Record()
_WORD = ir.IntType(64)


@register_model(_Record)
class _RecordModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _WORD)


@unbox(_Record)
def _unbox_record(typ: Any, obj: Any, c: Any) -> NativeValue:
    return NativeValue(c.builder.ptrtoint(c.pyapi.bytes_as_string(obj), _WORD))


@intrinsic(prefer_literal=True)
def _pointer_argument(typingctx: Any, record: Any, index: Any, kind: Any) -> Any:
    """Word `index` of the record as an address of elements of this kind."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _word(builder, args[0], args[1])

    return Pointer(kind.literal_value)(record, index, kind), codegen


@intrinsic
def _integer_argument(typingctx: Any, record: Any, index: Any) -> Any:
    return int64(record, index), lambda context, builder, sig, args: _word(builder, *args)


@intrinsic
def _float_argument(typingctx: Any, record: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(_word(builder, *args), ir.IntType(32)), ir.FloatType())

    return numba.float32(record, index), codegen


def _word(builder: Any, record: Any, index: Any) -> Any:
    return builder.load(builder.gep(builder.inttoptr(record, _WORD.as_pointer()), [index]))


# A type in the record: the letter for struct, and the source that reads word {0} of it.
def _field(kind: Any) -> tuple[str, str]:
    if isinstance(kind, Pointer):
        return "Q", f"pointer_argument(record, {{0}}, {kind.kind!r})"
    if kind is numba.float32:
        return "f4x", "float_argument(record, {0})"
    if kind is int64:
        return "q", "integer_argument(record, {0})"
    raise TypeError(f"a kernel's parameter cannot be of type {kind}")


# ---------------------------------------------------------------------------- threads


@intrinsic
def _call(typingctx: Any, entry: Any, record: Any, lo: Any, hi: Any) -> Any:
    """Call a compiled entry by its address, in Numba's convention; 1 where it raised, else 0."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        error = ir.IntType(8).as_pointer().as_pointer()
        type_ = ir.FunctionType(ir.IntType(32), [_WORD.as_pointer(), error, _WORD, _WORD, _WORD])
        result = builder.alloca(_WORD)
        raised = builder.alloca(ir.IntType(8).as_pointer())
        status = builder.call(builder.inttoptr(args[0], type_.as_pointer()), [result, raised, *args[1:]])
        return builder.zext(builder.icmp_signed("!=", status, ir.Constant(ir.IntType(32), 0)), _WORD)

    return int64(int64, record, int64, int64), codegen


def _split(entry, record, items, chunks):  # type: ignore[no-untyped-def]  # Numba's types
    """Run the entry over the items in so many chunks; the number of chunks that raised."""
    raised = 0
    for c in prange(chunks):
        raised += _call(entry, record, c * items // chunks, (c + 1) * items // chunks)
    return raised


_parallel: Any = None


def _run_parallel(entry: int, record: bytes, items: int, threads: int) -> int:
    global _layer, _parallel
    if _parallel is None:
        _parallel = _compiled(_split, (int64, RECORD, int64, int64), parallel=True).entry_point
    users = numba.get_num_threads()
    if users != threads:
        numba.set_num_threads(threads)
    try:
        if _layer is None or _layer == "workqueue":
            # The workqueue layer aborts the process when two Python threads enter it.
            with _lock:
                raised = _parallel(entry, record, items, threads)
            _layer = numba.threading_layer()
        else:
            raised = _parallel(entry, record, items, threads)
    finally:
        if users != threads:
            numba.set_num_threads(users)
    return raised


def thread_count() -> int:
    """Threads that a large call may use: torch's setting, at most Numba's; 1 in a forked child."""
    if _forked:
        return 1
    wanted = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    return wanted if wanted == 1 or threads_refusal() is None else 1


@functools.cache
def threads_refusal() -> str | None:
    """Why Numba has no threads, None where it has: the threading layer that the user wants may not be installed."""
    try:
        numba.get_num_threads()  # starts them
    except ValueError as error:
        reason = f"NUMBA_THREADING_LAYER={numba.config.THREADING_LAYER}: {str(error).splitlines()[0].rstrip('.')}"
        warnings.warn(f"moeroute runs in one thread, with the same bits ({reason})", stacklevel=2)
        return reason
    return None


def threading_layer() -> str | None:
    """Numba's threading layer, None before the first parallel call."""
    return _layer


# ---------------------------------------------------------------------------- compilation


def dispatcher(function: Callable[..., Any], parallel: bool = False) -> Any:
    """Numba's compiler of the function, with our cache."""
    global cache_refusal
    compiler = numba.njit(nogil=True, error_model="numpy", parallel=parallel, no_cfunc_wrapper=True)(function)
    try:
        compiler._cache = cache.Cache(function)
    except RuntimeError as error:  # no writable cache folder: every process compiles anew
        cache_refusal = str(error)
    return compiler


def _compiled(function: Callable[..., Any], signature: tuple[Any, ...], parallel: bool = False) -> Any:
    """Compile for these types, or load from the cache; Numba's compile result."""
    compiler = dispatcher(function, parallel)
    announcement = threading.Timer(PATIENCE_SECONDS, _announce, (function.__name__,))
    announcement.daemon = True
    if os.environ.get("MOEROUTE_QUIET", "") in ("", "0"):
        if isinstance(compiler._cache, cache.Cache):  # what is loaded needs no thread
            compiler._cache.on_miss = announcement.start
        else:
            announcement.start()
    try:
        compiler.compile(signature)
    finally:
        announcement.cancel()
    return compiler.overloads[signature]


def _announce(name: str) -> None:
    kept = "every process anew, as no cache folder is writable" if cache_refusal else "once"
    print(
        f"moeroute: compiling {name} for the CPU ({kept}); `moeroute info --warm` compiles all kernels ahead, "
        "MOEROUTE_QUIET=1 silences this",
        file=sys.stderr,
    )


class Kernel:
    """A function over items, compiled on first use for each key. `launch` is what its name stands for."""

    every: ClassVar[list["Kernel"]] = []

    def __init__(self, body: Any, keys: Iterable[Any], parallel: bool) -> None:
        self.name = body.__name__
        self.room = body.__module__.removeprefix("moeroute.ops.").split(".")[0]
        self.keys = tuple(keys)
        self._body = body
        self._parallel = parallel
        self.serial: dict[Any, Any] = {}  # the entry of each key, as Python calls it
        self._addresses: dict[Any, int] = {}  # and as the loop over threads does
        self._parameters = _parameters(body)
        self.launch: Any = _launch(self, self._parameters)
        self.launch.inline = helper(body)
        Kernel.every.append(self)

    def run(self, key: Any, items: int, work: int, record: bytes) -> int:
        """Compile where that is due, then run, large work over the threads."""
        if key not in self.serial:
            self._compile(key)
        if work >= SERIAL_WORK and self._parallel and items > 1 and (threads := min(thread_count(), items)) > 1:
            if _run_parallel(self._addresses[key], record, items, threads):
                raise MemoryError(f"moeroute: no memory for the work space of {self.name}")
            return 0
        return self.serial[key](record, 0, items)

    def warm(self) -> None:
        """Compile (or load from the cache) for every key."""
        for key in self.keys:
            if key not in self.serial:
                self._compile(key)

    def _compile(self, key: Any) -> None:
        result = _compiled(self.entry(key), (RECORD, int64, int64))
        self._addresses[key] = result.library.get_pointer_to_function(result.fndesc.llvm_func_name)
        self.serial[key] = result.entry_point

    def entry(self, key: Any) -> Callable[..., Any]:
        """`entry(record, lo, hi)`: reads the arguments from the record and calls the body."""
        names = {"exactly": exactly, "body": self.launch.inline, "pointer_argument": _pointer_argument}
        names |= {"integer_argument": _integer_argument, "float_argument": _float_argument}
        index, arguments = 0, []
        for parameter, annotation in self._parameters:
            fields = _fields(annotation)
            read = [
                _field(kind.type_of(key) if isinstance(kind, Keyed) else kind)[1].format(index + i)
                for i, kind in enumerate(fields)
            ]
            index += len(fields)
            if isinstance(annotation, type):
                names[f"{parameter}_type"] = annotation
                arguments.append(f"{parameter}_type({', '.join(read)})")
            else:
                arguments += read
        call = f"exactly(body, ({', '.join((*arguments, 'lo', 'hi'))}))"
        returns = inspect.get_annotations(self._body).get("return") is not None
        source = f"def entry(record, lo, hi):\n    {f'return {call}' if returns else call}\n"
        exec(source, names)
        return _placed(names["entry"], self._body, _spoken(self.name, key))


def _spoken(name: str, key: Any) -> str:
    return name if key is None else f"{name}_{str(key).removeprefix('torch.')}"


def _placed(function: Any, body: Any, name: str) -> Any:
    """The function as one written where the body is: Numba's cache asks for the file and the line."""
    code = function.__code__.replace(
        co_filename=body.__code__.co_filename,
        co_firstlineno=body.__code__.co_firstlineno,
        co_name=name,
        co_qualname=name,
    )
    placed = types.FunctionType(code, function.__globals__, name)
    placed.__module__ = body.__module__
    placed.__qualname__ = name
    return placed


def _parameters(body: Any) -> list[tuple[str, Any]]:
    annotations = inspect.get_annotations(body)
    *parameters, lo, hi = inspect.signature(body).parameters
    if (lo, hi) != ("lo", "hi"):
        raise TypeError(f"the last parameters of {body.__name__} must be lo and hi")
    return [(name, annotations[name]) for name in parameters]


def _fields(annotation: Any) -> list[Any]:
    """The types of a NamedTuple's fields, or the one type."""
    return list(inspect.get_annotations(annotation).values()) if isinstance(annotation, type) else [annotation]


def _launch(kernel: "Kernel", parameters: list[tuple[str, Any]]) -> Callable[..., int]:
    """The function by which a kernel is launched: all arguments by keyword, none forgotten, none unknown.

    It is made as source, so that each call packs its record without a dictionary, and a small one is a single call
    more: 1 µs for twelve arguments.
    """
    fields = [kind for _, annotation in parameters for kind in _fields(annotation)]
    letters = "".join("Q" if isinstance(kind, Keyed) else _field(kind)[0] for kind in fields)
    values = {
        name: [f"{name}_{i}" for i in range(len(_fields(annotation)))] if isinstance(annotation, type) else [name]
        for name, annotation in parameters
    }
    taken = "".join(f"        {', '.join(found)}, = {name}\n" for name, found in values.items() if found != [name])
    packed = f"pack({', '.join(value for found in values.values() for value in found)})"
    source = f"""
def make(pack, serial, run):
    def launch(key, *, items, work, {", ".join(values)}):
{taken}
        if work < SERIAL_WORK and key in serial:
            return serial[key]({packed}, 0, items)
        return run(key, items, work, {packed})
    return launch
"""
    made: dict[str, Any] = {}
    exec(source, globals(), made)
    launch: Callable[..., int] = made["make"](struct.Struct("<" + letters).pack, kernel.serial, kernel.run)
    return launch


def kernel(*, keys: Iterable[Any] = (None,), parallel: bool = True) -> Callable[[Any], Callable[..., int]]:
    """Decorator of a kernel; `parallel=False` where its items cannot be split, and then it may return an int64.

    The name then stands for its launch, and `name.inline` for the function that other kernels call.
    """
    return lambda body: Kernel(body, keys, parallel).launch


def cache_folder() -> str | None:
    """Where compiled kernels are kept between processes; None where nothing is writable."""
    if cache_refusal is not None:
        return None
    return str(cache.Cache(Kernel.every[0]._body).cache_path)


FLOATS = tuple(dtype for dtype in POINTER if dtype.is_floating_point)
