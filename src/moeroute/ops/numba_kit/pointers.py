"""Typed pointers: what a kernel's address points to, and how storage becomes float32 and back.

A kernel takes `Pointer` arguments (Python passes `tensor.data_ptr()` integers). Loading widens to float32, storing
narrows once, to nearest even, with NaN kept. A pointer is indexed like an array: `row_of_slot[s]`, `out[i] = value`.
Kernels compute offsets in int64 and check every index that comes from memory themselves.
"""

import functools
import hashlib
import operator
import re
from pathlib import Path

import llvmlite
import numba
import torch
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import NativeValue, intrinsic, lower_builtin, models, register_model, unbox

LANES = 64
ALIGNMENT = 64  # bytes a streaming store needs: a cache line, one AVX-512 register
# Numba's on-disk cache notices a change in the kernel's own file only. The pointer types carry this
# fingerprint in their names, so a change in what kernels are made of changes every kernel's signature.
_OPS = Path(__file__).parents[1]
_SOURCES = sorted((*_OPS.glob("numba_kit/*.py"), *_OPS.glob("*/*numba*.py")))
FINGERPRINT = hashlib.sha256(
    b"".join(source.read_bytes() for source in _SOURCES) + f"{numba.__version__} {llvmlite.__version__}".encode()
).hexdigest()[:12]

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
STORAGE = {
    "float32": F32,
    "bfloat16": I16,
    "float16": ir.HalfType(),
    "uint8": I8,
    "uint16": I16,
    "int16": I16,
    "int32": I32,
    "int64": I64,
}


def vector_of(element: ir.Type) -> ir.VectorType:
    """LLVM's vector of 64 such elements."""
    return ir.VectorType(element, LANES)


def constant_block(element: ir.Type, value: float) -> ir.Constant:
    """The same constant in every lane."""
    return ir.Constant(vector_of(element), [value] * LANES)


BLOCK = vector_of(F32)


# ---------------------------------------------------------------------------- types


class Pointer(types.Type):
    """Address of elements of one storage kind; Python passes it as an integer."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(name=f"Pointer({kind},{FINGERPRINT})")


class BlockType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Block")


float32_ptr, bfloat16_ptr, float16_ptr, uint8_ptr, int16_ptr, int32_ptr, int64_ptr = map(
    Pointer, ("float32", "bfloat16", "float16", "uint8", "int16", "int32", "int64")
)
block_type = BlockType()

POINTER = {
    torch.float32: float32_ptr,
    torch.bfloat16: bfloat16_ptr,
    torch.float16: float16_ptr,
    torch.uint8: uint8_ptr,
    torch.int16: int16_ptr,
    torch.int32: int32_ptr,
    torch.int64: int64_ptr,
}


@register_model(Pointer)
class PointerModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, I64)


@register_model(BlockType)
class BlockModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, BLOCK)


@unbox(Pointer)
def unbox_pointer(typ, obj, c):
    """A pointer argument from a Python integer."""
    address = c.pyapi.long_as_ulonglong(obj)
    return NativeValue(address, is_error=cgutils.is_not_null(c.builder, c.pyapi.err_occurred()))


# ---------------------------------------------------------------------------- addresses and lanes


def element_address(builder, pointer, offset, element):
    """The address of an element; `pointer` is an integer in LLVM."""
    return builder.gep(builder.inttoptr(pointer, element.as_pointer()), [offset])


def vector_address(builder, pointer, offset, element, lanes=LANES):
    """The address of `lanes` elements from `offset` on."""
    address = element_address(builder, pointer, offset, element)
    return builder.bitcast(address, ir.VectorType(element, lanes).as_pointer())


def first_lanes(builder, count, lanes=LANES):
    """The mask of the lanes below `count`."""
    position = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
    count = builder.trunc(count, I32)
    undefined = ir.Constant(ir.VectorType(I32, lanes), ir.Undefined)
    first = builder.insert_element(undefined, count, ir.Constant(I32, 0))
    spread = builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))
    return builder.icmp_unsigned("<", position, spread)


def masked_load(builder, address, mask, vector):
    """The lanes of the mask from memory that need not exist elsewhere; +0 in the others."""
    name = f"llvm.masked.load.v{vector.count}{vector.element.intrinsic_name}.p0"
    mask_type = ir.VectorType(ir.IntType(1), vector.count)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector.as_pointer(), I32, mask_type, vector]), name
    )
    return builder.call(function, [address, ir.Constant(I32, 1), mask, ir.Constant(vector, None)])


def masked_store(builder, address, mask, value):
    """The lanes of the mask; memory under the others need not exist."""
    vector = value.type
    name = f"llvm.masked.store.v{vector.count}{vector.element.intrinsic_name}.p0"
    mask_type = ir.VectorType(ir.IntType(1), vector.count)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [vector, vector.as_pointer(), I32, mask_type]), name
    )
    builder.call(function, [value, address, ir.Constant(I32, 1), mask])


def lanes_like(value, element):
    """The type of as many `element`s as the value has lanes."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def in_every_lane(type_, number):
    """A number in every lane."""
    return ir.Constant(type_, [number] * type_.count if isinstance(type_, ir.VectorType) else number)


@functools.cache
def converts_halves() -> bool:
    """Whether the processor has instructions for it; elsewhere LLVM calls functions that do not exist."""
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features)
    text = "define float @widen(half %x) { %y = fpext half %x to float ret float %y }"
    return re.search("hfsf2|h2f", machine.emit_assembly(binding.parse_assembly(text))) is None


def _half_to_float(builder, value):
    """In integers and one exact multiplication."""
    i32, f32 = lanes_like(value, I32), lanes_like(value, F32)
    bits = builder.zext(builder.bitcast(value, lanes_like(value, I16)), i32)
    magnitude = builder.and_(bits, in_every_lane(i32, 0x7FFF))
    exponents = in_every_lane(i32, (127 - 15) << 23)  # from the middle of a half's exponents to that of a float's
    normal = builder.add(builder.shl(magnitude, in_every_lane(i32, 13)), exponents)
    special = builder.add(normal, exponents)
    quiet = builder.or_(special, in_every_lane(i32, 0x400000))
    special = builder.select(builder.icmp_unsigned(">", magnitude, in_every_lane(i32, 0x7C00)), quiet, special)
    subnormal = builder.fmul(builder.uitofp(magnitude, f32), in_every_lane(f32, 2.0**-24))
    found = builder.select(builder.icmp_unsigned("<", magnitude, in_every_lane(i32, 0x7C00)), normal, special)
    small = builder.icmp_unsigned("<", magnitude, in_every_lane(i32, 0x400))
    found = builder.select(small, builder.bitcast(subnormal, i32), found)
    sign = builder.shl(builder.and_(bits, in_every_lane(i32, 0x8000)), in_every_lane(i32, 16))
    return builder.bitcast(builder.or_(found, sign), f32)


def _float_to_half(builder, value):
    """To nearest even, in integers; one addition rounds what becomes a subnormal half."""
    i32, f32 = lanes_like(value, I32), lanes_like(value, F32)
    bits = builder.bitcast(value, i32)
    magnitude = builder.and_(bits, in_every_lane(i32, 0x7FFFFFFF))
    high = builder.lshr(magnitude, in_every_lane(i32, 13))
    rebiased = builder.sub(magnitude, in_every_lane(i32, ((127 - 15) << 23) - 0xFFF))
    found = builder.lshr(builder.add(rebiased, builder.and_(high, in_every_lane(i32, 1))), in_every_lane(i32, 13))
    # The last bit of 0.5 is the last one of a subnormal half.
    sum_ = builder.bitcast(builder.fadd(builder.bitcast(magnitude, f32), in_every_lane(f32, 0.5)), i32)
    subnormal = builder.sub(sum_, in_every_lane(i32, 0x3F000000))
    found = builder.select(builder.icmp_unsigned("<", magnitude, in_every_lane(i32, 0x38800000)), subnormal, found)
    large = builder.icmp_unsigned(">=", magnitude, in_every_lane(i32, 0x47800000))
    found = builder.select(large, in_every_lane(i32, 0x7C00), found)
    nan = builder.icmp_unsigned(">", magnitude, in_every_lane(i32, 0x7F800000))
    quiet = builder.or_(builder.and_(high, in_every_lane(i32, 0x3FF)), in_every_lane(i32, 0x7E00))
    found = builder.select(nan, quiet, found)
    sign = builder.and_(builder.lshr(bits, in_every_lane(i32, 16)), in_every_lane(i32, 0x8000))
    return builder.bitcast(
        builder.trunc(builder.or_(found, sign), lanes_like(value, I16)), lanes_like(value, ir.HalfType())
    )


def widened(builder, kind, value):
    """Storage lanes (or one element) to float32."""
    if kind == "bfloat16":
        i32 = lanes_like(value, I32)
        return builder.bitcast(builder.shl(builder.zext(value, i32), in_every_lane(i32, 16)), lanes_like(value, F32))
    if kind == "float16":
        if converts_halves():
            return builder.fpext(value, lanes_like(value, F32))
        return _half_to_float(builder, value)
    return value


def narrowed_to(builder, kind, value):
    """Float32 lanes (or one element) to storage, to nearest even."""
    if kind == "bfloat16":
        i32 = lanes_like(value, I32)
        bits = builder.bitcast(value, i32)
        high = builder.lshr(bits, in_every_lane(i32, 16))
        odd = builder.and_(high, in_every_lane(i32, 1))
        rounded = builder.lshr(builder.add(builder.add(bits, in_every_lane(i32, 0x7FFF)), odd), in_every_lane(i32, 16))
        nan = builder.fcmp_unordered("uno", value, value)
        quiet = builder.or_(high, in_every_lane(i32, 0x40))
        return builder.trunc(builder.select(nan, quiet, rounded), lanes_like(value, I16))
    if kind == "float16":
        if converts_halves():
            return builder.fptrunc(value, lanes_like(value, ir.HalfType()))
        return _float_to_half(builder, value)
    return value


# ---------------------------------------------------------------------------- one element


def _element_type(pointer: Pointer) -> types.Type:
    if pointer.kind in ("float32", "bfloat16", "float16"):
        return types.float32
    return getattr(types, pointer.kind)


# By templates and not by `overload`, for which Numba compiles a small function for each kind of pointer and index.


@infer_global(operator.getitem)
class PointerGetItem(AbstractTemplate):
    def generic(self, args, kws):
        pointer, index = args
        if isinstance(pointer, Pointer) and isinstance(index, types.Integer):
            return signature(_element_type(pointer), pointer, types.int64)
        return None


@lower_builtin(operator.getitem, Pointer, types.Integer)
def pointer_getitem(context, builder, sig, args):
    """`pointer[i]`, 16-bit floats as float32."""
    kind = sig.args[0].kind
    return widened(builder, kind, builder.load(element_address(builder, *args, STORAGE[kind])))


@infer_global(operator.setitem)
class PointerSetItem(AbstractTemplate):
    def generic(self, args, kws):
        pointer, index, value = args
        if isinstance(pointer, Pointer) and isinstance(index, types.Integer) and isinstance(value, types.Number):
            return signature(types.void, pointer, types.int64, _element_type(pointer))
        return None


@lower_builtin(operator.setitem, Pointer, types.Integer, types.Number)
def pointer_setitem(context, builder, sig, args):
    """`pointer[i] = value`, rounded to what the pointer points to."""
    kind = sig.args[0].kind
    builder.store(narrowed_to(builder, kind, args[2]), element_address(builder, args[0], args[1], STORAGE[kind]))
    return context.get_dummy_value()


@intrinsic
def advance(typingctx, pointer, elements):
    """The pointer `elements` further on."""

    def codegen(context, builder, sig, args):
        size = context.get_abi_sizeof(STORAGE[sig.args[0].kind])
        return builder.add(args[0], builder.mul(args[1], ir.Constant(I64, size)))

    return pointer(pointer, types.int64), codegen


@intrinsic
def is_null(typingctx, pointer):
    """Whether an absent tensor was passed: its address is 0."""

    def codegen(context, builder, sig, args):
        return builder.icmp_unsigned("==", args[0], ir.Constant(I64, 0))

    return types.boolean(pointer), codegen


@intrinsic(prefer_literal=True)
def retyped(typingctx, pointer, kind):
    """The same address with elements of another storage kind, given as a literal string."""
    return Pointer(kind.literal_value)(pointer, kind), lambda context, builder, sig, args: args[0]


@intrinsic
def pointer_to(typingctx, array):
    """The address of a float32 array made in a kernel, which must use the array again after the pointer's last use."""

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, I64)

    return float32_ptr(array), codegen
