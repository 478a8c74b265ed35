"""The Numba vocabulary of the CPU kernels: typed pointers and a block of 64 float32 lanes.

A kernel takes `Pointer` arguments (Python passes `tensor.data_ptr()` integers) and works on
`Block` values, each one LLVM vector of 64 floats. Loading widens to float32, storing narrows
once, to nearest even, with NaN kept. Nothing here is fast-math: every operator is one rounded
IEEE operation, so the bits match the reference.

    acc = zeros()
    acc = acc + splat(weight) * load(rows, offset)
    stream(out, offset, acc)              # past the caches; `store` where unaligned

`load_tail`, `store_tail` and `copy_tail` touch the first n elements only; the missing lanes of a
loaded tail are +0. A pointer is also indexed like an array: `row_of_slot[s]`, `out[i] = value`.
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
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import NativeValue, intrinsic, lower_builtin, models, overload, register_model, unbox

LANES = 64
ALIGNMENT = 64  # bytes a streaming store needs: a cache line, one AVX-512 register
COPY_BYTES = 256  # bytes of one `copy`

# Numba's on-disk cache notices a change in the kernel's own file only. The pointer types carry this
# fingerprint in their names, so a change in what kernels are made of changes every kernel's signature.
FINGERPRINT = hashlib.sha256(
    Path(__file__).read_bytes()
    + Path(__file__).with_name("rows.py").read_bytes()
    + numba.__version__.encode()
    + llvmlite.__version__.encode()
).hexdigest()[:12]

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_STORAGE = {
    "float32": _F32,
    "bfloat16": _I16,
    "float16": ir.HalfType(),
    "uint8": _I8,
    "uint16": _I16,
    "int16": _I16,
    "int32": _I32,
    "int64": _I64,
}


def _vector(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, LANES)


def _constant(element: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(_vector(element), [value] * LANES)


_BLOCK = _vector(_F32)


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
        super().__init__(dmm, fe_type, _I64)


@register_model(BlockType)
class BlockModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _BLOCK)


@unbox(Pointer)
def unbox_pointer(typ, obj, c):
    address = c.pyapi.long_as_ulonglong(obj)
    return NativeValue(address, is_error=cgutils.is_not_null(c.builder, c.pyapi.err_occurred()))


# ---------------------------------------------------------------------------- addresses and lanes


def _address(builder, pointer, offset, element):
    return builder.gep(builder.inttoptr(pointer, element.as_pointer()), [offset])


def _vector_address(builder, pointer, offset, element, lanes=LANES):
    address = _address(builder, pointer, offset, element)
    return builder.bitcast(address, ir.VectorType(element, lanes).as_pointer())


def _first_lanes(builder, count, lanes=LANES):
    """The mask of the lanes below `count`."""
    position = ir.Constant(ir.VectorType(_I32, lanes), list(range(lanes)))
    count = builder.trunc(count, _I32)
    undefined = ir.Constant(ir.VectorType(_I32, lanes), ir.Undefined)
    first = builder.insert_element(undefined, count, ir.Constant(_I32, 0))
    spread = builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))
    return builder.icmp_unsigned("<", position, spread)


def _masked_load(builder, address, mask, vector):
    name = f"llvm.masked.load.v{vector.count}{vector.element.intrinsic_name}.p0"
    mask_type = ir.VectorType(ir.IntType(1), vector.count)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector.as_pointer(), _I32, mask_type, vector]), name
    )
    return builder.call(function, [address, ir.Constant(_I32, 1), mask, ir.Constant(vector, None)])


def _masked_store(builder, address, mask, value):
    vector = value.type
    name = f"llvm.masked.store.v{vector.count}{vector.element.intrinsic_name}.p0"
    mask_type = ir.VectorType(ir.IntType(1), vector.count)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [vector, vector.as_pointer(), _I32, mask_type]), name
    )
    builder.call(function, [value, address, ir.Constant(_I32, 1), mask])


def _like(value, element):
    """The type of as many `element`s as the value has lanes."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def _number(type_, number):
    """A number in every lane."""
    return ir.Constant(type_, [number] * type_.count if isinstance(type_, ir.VectorType) else number)


@functools.cache
def _converts_halves() -> bool:
    """Whether the processor has instructions for it: elsewhere LLVM calls functions that nobody provides."""
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features)
    text = "define float @widen(half %x) { %y = fpext half %x to float ret float %y }"
    return re.search("hfsf2|h2f", machine.emit_assembly(binding.parse_assembly(text))) is None


def _half_to_float(builder, value):
    """In integers and one exact multiplication."""
    i32, f32 = _like(value, _I32), _like(value, _F32)
    bits = builder.zext(builder.bitcast(value, _like(value, _I16)), i32)
    magnitude = builder.and_(bits, _number(i32, 0x7FFF))
    exponents = _number(i32, (127 - 15) << 23)  # from the middle of a half's exponents to that of a float's
    normal = builder.add(builder.shl(magnitude, _number(i32, 13)), exponents)
    special = builder.add(normal, exponents)
    quiet = builder.or_(special, _number(i32, 0x400000))
    special = builder.select(builder.icmp_unsigned(">", magnitude, _number(i32, 0x7C00)), quiet, special)
    subnormal = builder.fmul(builder.uitofp(magnitude, f32), _number(f32, 2.0**-24))
    found = builder.select(builder.icmp_unsigned("<", magnitude, _number(i32, 0x7C00)), normal, special)
    small = builder.icmp_unsigned("<", magnitude, _number(i32, 0x400))
    found = builder.select(small, builder.bitcast(subnormal, i32), found)
    sign = builder.shl(builder.and_(bits, _number(i32, 0x8000)), _number(i32, 16))
    return builder.bitcast(builder.or_(found, sign), f32)


def _float_to_half(builder, value):
    """To nearest even, in integers; one addition rounds what becomes a subnormal half."""
    i32, f32 = _like(value, _I32), _like(value, _F32)
    bits = builder.bitcast(value, i32)
    magnitude = builder.and_(bits, _number(i32, 0x7FFFFFFF))
    high = builder.lshr(magnitude, _number(i32, 13))
    rebiased = builder.sub(magnitude, _number(i32, ((127 - 15) << 23) - 0xFFF))
    found = builder.lshr(builder.add(rebiased, builder.and_(high, _number(i32, 1))), _number(i32, 13))
    # The last bit of 0.5 is the last one of a subnormal half.
    sum_ = builder.bitcast(builder.fadd(builder.bitcast(magnitude, f32), _number(f32, 0.5)), i32)
    subnormal = builder.sub(sum_, _number(i32, 0x3F000000))
    found = builder.select(builder.icmp_unsigned("<", magnitude, _number(i32, 0x38800000)), subnormal, found)
    large = builder.icmp_unsigned(">=", magnitude, _number(i32, 0x47800000))
    found = builder.select(large, _number(i32, 0x7C00), found)
    nan = builder.icmp_unsigned(">", magnitude, _number(i32, 0x7F800000))
    quiet = builder.or_(builder.and_(high, _number(i32, 0x3FF)), _number(i32, 0x7E00))
    found = builder.select(nan, quiet, found)
    sign = builder.and_(builder.lshr(bits, _number(i32, 16)), _number(i32, 0x8000))
    return builder.bitcast(builder.trunc(builder.or_(found, sign), _like(value, _I16)), _like(value, ir.HalfType()))


def _widen(builder, kind, value):
    """Storage lanes (or one element) to float32."""
    if kind == "bfloat16":
        i32 = _like(value, _I32)
        return builder.bitcast(builder.shl(builder.zext(value, i32), _number(i32, 16)), _like(value, _F32))
    if kind == "float16":
        if _converts_halves():
            return builder.fpext(value, _like(value, _F32))
        return _half_to_float(builder, value)
    return value


def _narrow(builder, kind, value):
    """Float32 lanes (or one element) to storage, to nearest even."""
    if kind == "bfloat16":
        i32 = _like(value, _I32)
        bits = builder.bitcast(value, i32)
        high = builder.lshr(bits, _number(i32, 16))
        odd = builder.and_(high, _number(i32, 1))
        rounded = builder.lshr(builder.add(builder.add(bits, _number(i32, 0x7FFF)), odd), _number(i32, 16))
        nan = builder.fcmp_unordered("uno", value, value)
        quiet = builder.or_(high, _number(i32, 0x40))
        return builder.trunc(builder.select(nan, quiet, rounded), _like(value, _I16))
    if kind == "float16":
        if _converts_halves():
            return builder.fptrunc(value, _like(value, ir.HalfType()))
        return _float_to_half(builder, value)
    return value


# ---------------------------------------------------------------------------- one element


def _element_type(pointer: Pointer) -> types.Type:
    if pointer.kind in ("float32", "bfloat16", "float16"):
        return types.float32
    return getattr(types, pointer.kind)


@intrinsic
def _get(typingctx, pointer, index):
    def codegen(context, builder, sig, args):
        kind = sig.args[0].kind
        return _widen(builder, kind, builder.load(_address(builder, *args, _STORAGE[kind])))

    return _element_type(pointer)(pointer, types.int64), codegen


@intrinsic
def _set(typingctx, pointer, index, value):
    def codegen(context, builder, sig, args):
        kind = sig.args[0].kind
        address = _address(builder, args[0], args[1], _STORAGE[kind])
        builder.store(_narrow(builder, kind, args[2]), address)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, _element_type(pointer)), codegen


@overload(operator.getitem)
def pointer_getitem(pointer, index):
    if isinstance(pointer, Pointer):
        return lambda pointer, index: _get(pointer, index)


@overload(operator.setitem)
def pointer_setitem(pointer, index, value):
    if isinstance(pointer, Pointer):
        return lambda pointer, index, value: _set(pointer, index, value)


@intrinsic
def advance(typingctx, pointer, elements):
    """The pointer `elements` further on."""

    def codegen(context, builder, sig, args):
        size = context.get_abi_sizeof(_STORAGE[sig.args[0].kind])
        return builder.add(args[0], builder.mul(args[1], ir.Constant(_I64, size)))

    return pointer(pointer, types.int64), codegen


@intrinsic
def is_null(typingctx, pointer):
    def codegen(context, builder, sig, args):
        return builder.icmp_unsigned("==", args[0], ir.Constant(_I64, 0))

    return types.boolean(pointer), codegen


# ---------------------------------------------------------------------------- blocks


@intrinsic
def zeros(typingctx):
    return block_type(), lambda context, builder, sig, args: _constant(_F32, 0.0)


@intrinsic
def splat(typingctx, value):
    def codegen(context, builder, sig, args):
        undefined = ir.Constant(_BLOCK, ir.Undefined)
        first = builder.insert_element(undefined, args[0], ir.Constant(_I32, 0))
        return builder.shuffle_vector(first, undefined, _constant(_I32, 0))

    return block_type(types.float32), codegen


@intrinsic
def load(typingctx, pointer, offset):
    def codegen(context, builder, sig, args):
        kind = sig.args[0].kind
        return _widen(builder, kind, builder.load(_vector_address(builder, *args, _STORAGE[kind]), align=1))

    return block_type(pointer, types.int64), codegen


@intrinsic
def load_tail(typingctx, pointer, offset, count):
    """The first `count` < 64 elements; the other lanes are +0 and their memory is not read."""

    def codegen(context, builder, sig, args):
        kind = sig.args[0].kind
        element = _STORAGE[kind]
        integer = {16: _I16, 32: _F32}[context.get_abi_sizeof(element) * 8]  # half has no masked load everywhere
        address = _vector_address(builder, args[0], args[1], integer)
        value = _masked_load(builder, address, _first_lanes(builder, args[2]), _vector(integer))
        return _widen(builder, kind, builder.bitcast(value, _vector(element)))

    return block_type(pointer, types.int64, types.int64), codegen


def _storing(align, streaming):
    def codegen(context, builder, sig, args):
        kind = sig.args[0].kind
        address = _vector_address(builder, args[0], args[1], _STORAGE[kind])
        instruction = builder.store(_narrow(builder, kind, args[2]), address, align=align)
        if streaming:
            instruction.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))
        return context.get_dummy_value()

    return codegen


@intrinsic
def store(typingctx, pointer, offset, value):
    return types.void(pointer, types.int64, block_type), _storing(1, streaming=False)


@intrinsic
def stream(typingctx, pointer, offset, value):
    """A store past the caches. The address must be a multiple of ALIGNMENT: else a fault."""
    return types.void(pointer, types.int64, block_type), _storing(ALIGNMENT, streaming=True)


@intrinsic
def store_tail(typingctx, pointer, offset, value, count):
    def codegen(context, builder, sig, args):
        kind = sig.args[0].kind
        narrowed = _narrow(builder, kind, args[2])
        integer = {16: _I16, 32: _F32}[context.get_abi_sizeof(_STORAGE[kind]) * 8]
        address = _vector_address(builder, args[0], args[1], integer)
        _masked_store(builder, address, _first_lanes(builder, args[3]), builder.bitcast(narrowed, _vector(integer)))
        return context.get_dummy_value()

    return types.void(pointer, types.int64, block_type, types.int64), codegen


def _copying(streaming):
    def codegen(context, builder, sig, args):
        source = _vector_address(builder, args[2], args[3], _I8, COPY_BYTES)
        target = _vector_address(builder, args[0], args[1], _I8, COPY_BYTES)
        instruction = builder.store(builder.load(source, align=1), target, align=ALIGNMENT if streaming else 1)
        if streaming:
            instruction.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))
        return context.get_dummy_value()

    return codegen


@intrinsic
def copy(typingctx, target, target_offset, source, source_offset):
    """COPY_BYTES bytes as they are; both pointers are uint8."""
    return types.void(uint8_ptr, types.int64, uint8_ptr, types.int64), _copying(streaming=False)


@intrinsic
def copy_stream(typingctx, target, target_offset, source, source_offset):
    """`copy` past the caches; the target must be a multiple of ALIGNMENT."""
    return types.void(uint8_ptr, types.int64, uint8_ptr, types.int64), _copying(streaming=True)


@intrinsic
def copy_tail(typingctx, target, target_offset, source, source_offset, count):
    """The first `count` <= 64 bytes."""

    def codegen(context, builder, sig, args):
        mask = _first_lanes(builder, args[4])
        value = _masked_load(builder, _vector_address(builder, args[2], args[3], _I8), mask, _vector(_I8))
        _masked_store(builder, _vector_address(builder, args[0], args[1], _I8), mask, value)
        return context.get_dummy_value()

    return types.void(uint8_ptr, types.int64, uint8_ptr, types.int64, types.int64), codegen


@intrinsic
def prefetch(typingctx, pointer, offset):
    """Ask for the cache lines of the block at `offset`; any address is allowed."""

    def codegen(context, builder, sig, args):
        element = _STORAGE[sig.args[0].kind]
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32]),
            "llvm.prefetch.p0",
        )
        first = builder.bitcast(_address(builder, *args, element), _I8.as_pointer())
        for line in range(0, LANES * context.get_abi_sizeof(element), ALIGNMENT):
            address = builder.gep(first, [ir.Constant(_I64, line)])
            builder.call(function, [address, *(ir.Constant(_I32, n) for n in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(pointer, types.int64), codegen


@intrinsic
def fence(typingctx):
    """Order streaming stores before whatever tells other threads that they are done."""

    def codegen(context, builder, sig, args):
        if "86" in str(builder.module.triple):
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse.sfence"
            )
            builder.call(function, [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


binding.initialize_native_asmparser()  # Numba does not: LLVM would end the process at the first line of assembly
# (to read the mode, to set it, the default: nearest even, subnormal numbers, no traps)
_MODES = {"x86_64": ("stmxcsr ($0)", "ldmxcsr ($0)", 0x1F80), "aarch64": ("mrs $0, fpcr", "msr fpcr, $0", 0)}
_MODES |= {"amd64": _MODES["x86_64"], "arm64": _MODES["aarch64"]}


def _mode_of(builder):
    return _MODES.get(str(builder.module.triple).split("-")[0], (None, None, 0))


def _set_mode(builder, mode):
    # Memory is named as changed, so that loads and stores, and what is computed between them, stay on their side.
    _, setting, _ = _mode_of(builder)
    if setting and "mxcsr" in setting:
        slot = cgutils.alloca_once_value(builder, builder.trunc(mode, _I32))
        builder.asm(ir.FunctionType(ir.VoidType(), [slot.type]), setting, "r,~{memory}", [slot], True)
    elif setting:
        builder.asm(ir.FunctionType(ir.VoidType(), [_I64]), setting, "r,~{memory}", [mode], True)


@intrinsic
def exact_floats(typingctx):
    """From here on this thread rounds to nearest even and keeps subnormal numbers; returns how it was before.

    Somebody may have set another mode in it, `torch.set_flush_denormal(True)` say.
    """

    def codegen(context, builder, sig, args):
        getting, _, default = _mode_of(builder)
        mode = ir.Constant(_I64, 0)
        if getting and "mxcsr" in getting:
            slot = cgutils.alloca_once(builder, _I32)
            builder.asm(ir.FunctionType(ir.VoidType(), [slot.type]), getting, "r,~{memory}", [slot], True)
            mode = builder.zext(builder.load(slot), _I64)
        elif getting:
            mode = builder.asm(ir.FunctionType(_I64, []), getting, "=r,~{memory}", [], True)
        _set_mode(builder, ir.Constant(_I64, default))
        return mode

    return types.int64(), codegen


@intrinsic
def restore_floats(typingctx, mode):
    def codegen(context, builder, sig, args):
        _set_mode(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _define_block_operator(python_operator, instruction):
    @infer_global(python_operator)
    class BlockOperator(ConcreteTemplate):
        cases = (signature(block_type, block_type, block_type),)

    @lower_builtin(python_operator, block_type, block_type)
    def lower(context, builder, sig, args):
        return getattr(builder, instruction)(*args)


_define_block_operator(operator.add, "fadd")
_define_block_operator(operator.sub, "fsub")
_define_block_operator(operator.mul, "fmul")
_define_block_operator(operator.truediv, "fdiv")


@intrinsic
def pairwise(typingctx, block):
    """The sum of the 64 lanes: neighbours are added to each other, 64 to 32 to … to 1."""

    def codegen(context, builder, sig, args):
        (value,) = args
        count = LANES
        while count > 1:
            undefined = ir.Constant(value.type, ir.Undefined)
            half = ir.VectorType(_I32, count // 2)
            even = builder.shuffle_vector(value, undefined, ir.Constant(half, list(range(0, count, 2))))
            odd = builder.shuffle_vector(value, undefined, ir.Constant(half, list(range(1, count, 2))))
            value = builder.fadd(even, odd)
            count //= 2
        return builder.extract_element(value, ir.Constant(_I32, 0))

    return types.float32(block_type), codegen


# ---------------------------------------------------------------------------- integer lanes, comparisons, choices
#
# Beside Block: 64 integers and 64 bits of a mask.

TILE = 8  # of `transpose`: TILE rows fill LANES


class LanesType(types.Type):
    def __init__(self, element: ir.Type) -> None:
        self.vector = _vector(element)
        super().__init__(name=f"Lanes({element})")


_BIT = ir.IntType(1)
int_block_type, mask_type = LanesType(_I32), LanesType(_BIT)


@register_model(LanesType)
class LanesModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.vector)


def _define_operator(python_operator, instruction, operand, result):
    @infer_global(python_operator)
    class Operator(ConcreteTemplate):
        cases = (signature(result, operand, operand),)

    @lower_builtin(python_operator, operand, operand)
    def lower(context, builder, sig, args):
        return instruction(builder, *args)


for _python_operator, _name in (
    (operator.add, "add"),
    (operator.sub, "sub"),
    (operator.and_, "and_"),
    (operator.xor, "xor"),
    (operator.lshift, "shl"),
    (operator.rshift, "ashr"),
):
    _define_operator(_python_operator, getattr(ir.IRBuilder, _name), int_block_type, int_block_type)
_define_operator(operator.and_, ir.IRBuilder.and_, mask_type, mask_type)
_define_operator(operator.eq, lambda b, x, y: b.icmp_signed("==", x, y), int_block_type, mask_type)
_define_operator(operator.gt, lambda b, x, y: b.icmp_signed(">", x, y), int_block_type, mask_type)
_define_operator(operator.gt, lambda b, x, y: b.fcmp_ordered(">", x, y), block_type, mask_type)


def _spread(builder, value, vector):
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count))


def _function(builder, name, result, *parameters):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, list(parameters)), name)


@intrinsic
def ints(typingctx, value):
    """One int32 in 64 lanes."""
    return int_block_type(types.int32), lambda context, builder, sig, args: _spread(
        builder, args[0], int_block_type.vector
    )


@intrinsic
def lane_numbers(typingctx):
    return int_block_type(), lambda context, builder, sig, args: ir.Constant(int_block_type.vector, list(range(LANES)))


@intrinsic
def bits(typingctx, value):
    """The bits of floats (or of one float32) as int32."""
    result = int_block_type if value == block_type else types.int32

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], context.get_value_type(sig.return_type))

    return result(value), codegen


@intrinsic
def floats(typingctx, value):
    """The inverse of `bits`."""
    result = block_type if value == int_block_type else types.float32

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], context.get_value_type(sig.return_type))

    return result(value), codegen


@intrinsic
def choose(typingctx, mask, yes, no):
    """Lane by lane: `yes` where the mask is set, else `no`."""
    return yes(mask, yes, yes), lambda context, builder, sig, args: builder.select(*args)


@intrinsic
def lanes_below(typingctx, count):
    return mask_type(types.int64), lambda context, builder, sig, args: _first_lanes(builder, args[0])


@intrinsic
def lane_bits(typingctx, mask):
    """The mask of 64 lanes as a uint64: lane i is bit i."""
    return types.uint64(mask_type), lambda context, builder, sig, args: builder.bitcast(args[0], _I64)


@intrinsic
def lowest_bit(typingctx, word):
    """The position of the lowest set bit of a uint64 that is not 0."""

    def codegen(context, builder, sig, args):
        return builder.cttz(args[0], ir.Constant(_BIT, 1))

    return types.int64(types.uint64), codegen


@intrinsic
def load_ints(typingctx, pointer, offset):
    def codegen(context, builder, sig, args):
        return builder.load(_vector_address(builder, *args, _I32), align=1)

    return int_block_type(int32_ptr, types.int64), codegen


@intrinsic
def store_ints(typingctx, pointer, offset, value):
    def codegen(context, builder, sig, args):
        builder.store(args[2], _vector_address(builder, args[0], args[1], _I32), align=1)
        return context.get_dummy_value()

    return types.void(int32_ptr, types.int64, int_block_type), codegen


@intrinsic
def store_zeros(typingctx, pointer, offset, value):
    """`store` of a block of nothing but zeros of either sign, infinities and quiet NaNs: no rounding to do."""

    def codegen(context, builder, sig, args):
        kind = sig.args[0].kind
        if kind == "bfloat16":
            high = builder.lshr(builder.bitcast(args[2], int_block_type.vector), _number(int_block_type.vector, 16))
            narrowed = builder.trunc(high, _vector(_I16))
        else:
            narrowed = _narrow(builder, kind, args[2])
        builder.store(narrowed, _vector_address(builder, args[0], args[1], _STORAGE[kind]), align=1)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, block_type), codegen


@intrinsic
def square_root(typingctx, block):
    """Correctly rounded."""

    def codegen(context, builder, sig, args):
        return builder.call(_function(builder, f"llvm.sqrt.v{LANES}f32", _BLOCK, _BLOCK), args)

    return block_type(block_type), codegen


def _shuffled(builder, value, other, lanes):
    other = ir.Constant(value.type, ir.Undefined) if other is None else other
    return builder.shuffle_vector(value, other, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _halves(builder, value):
    count = value.type.count // 2
    first, second = list(range(count)), list(range(count, 2 * count))
    return _shuffled(builder, value, None, first), _shuffled(builder, value, None, second)


@intrinsic
def largest(typingctx, block):
    """The largest lane; floats without NaN."""
    many = isinstance(block, LanesType)

    def codegen(context, builder, sig, args):
        (value,) = args
        while value.type.count > 1:
            low, high = _halves(builder, value)
            greater = builder.icmp_signed(">", high, low) if many else builder.fcmp_ordered(">", high, low)
            value = builder.select(greater, high, low)
        return builder.extract_element(value, ir.Constant(_I32, 0))

    return (types.int32(int_block_type) if many else types.float32(block_type)), codegen


@intrinsic
def two_largest(typingctx, block):
    """The largest and the second largest of 64 integers (equal ones count twice)."""

    def codegen(context, builder, sig, args):
        def larger(a, b):
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        def smaller(a, b):
            return builder.select(builder.icmp_signed(">", a, b), b, a)

        a, b = _halves(builder, args[0])
        first, second = larger(a, b), smaller(a, b)
        while first.type.count > 1:
            a, b = _halves(builder, first)
            first, second = larger(a, b), larger(smaller(a, b), larger(*_halves(builder, second)))
        zero = ir.Constant(_I32, 0)
        pair = [builder.extract_element(first, zero), builder.extract_element(second, zero)]
        return context.make_tuple(builder, sig.return_type, pair)

    return types.UniTuple(types.int32, 2)(int_block_type), codegen


@intrinsic
def transpose(typingctx, target, offset, source, stride, rows, columns):
    """TILE rows of TILE elements, `stride` apart: column c goes, widened, to `offset` + c blocks.

    With fewer rows or columns the missing elements are zeros and are not read.
    """

    def codegen(context, builder, sig, args):
        target, offset, source, stride, rows, columns = args
        kind = sig.args[2].kind
        element = _I16 if kind in ("bfloat16", "float16") else _STORAGE[kind]  # half has no masked load everywhere
        inside = _first_lanes(builder, columns, TILE)
        nothing = ir.Constant(inside.type, None)
        parts = []
        for r in range(TILE):
            row = ir.Constant(_I64, r)
            mask = builder.select(builder.icmp_signed("<", row, rows), inside, nothing)
            address = _vector_address(builder, source, builder.mul(stride, row), element, TILE)
            parts.append(_masked_load(builder, address, mask, ir.VectorType(element, TILE)))
        while len(parts) > 1:
            both = list(range(2 * parts[0].type.count))
            parts = [_shuffled(builder, *pair, both) for pair in zip(parts[::2], parts[1::2], strict=True)]
        turned = _shuffled(builder, *parts, None, [r * TILE + c for c in range(TILE) for r in range(TILE)])
        value = _widen(builder, kind, builder.bitcast(turned, _vector(_STORAGE[kind])))
        for c in range(TILE):
            column = _shuffled(builder, value, None, list(range(c * TILE, (c + 1) * TILE)))
            place = builder.add(offset, ir.Constant(_I64, c * LANES))
            builder.store(column, _vector_address(builder, target, place, value.type.element, TILE), align=1)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, *[types.int64] * 3), codegen


@intrinsic(prefer_literal=True)
def retyped(typingctx, pointer, kind):
    """The same address with elements of another storage kind, given as a literal string."""
    return Pointer(kind.literal_value)(pointer, kind), lambda context, builder, sig, args: args[0]


@intrinsic
def pointer_to(typingctx, array):
    """The address of a float32 array made in a kernel, which must use the array again after the pointer's last use."""

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, _I64)

    return float32_ptr(array), codegen
