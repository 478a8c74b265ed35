"""The Numba vocabulary of the CPU kernels: a block of 64 float32 lanes.

Kernels work on `Block` values, each one LLVM vector of 64 floats. Loading widens to float32, storing narrows
once, to nearest even, with NaN kept. Nothing here is fast-math: every operator is one rounded
IEEE operation, so the bits match the reference.

    acc = zeros()
    acc = acc + splat(weight) * load(rows, offset)
    stream(out, offset, acc)              # past the caches; `store` where unaligned

`load_tail`, `store_tail` and `copy_tail` touch the first n elements only; the missing lanes of a
loaded tail are +0. A pointer is also indexed like an array: `row_of_slot[s]`, `out[i] = value`.
Kernels compute offsets in int64 and check every index that comes from memory themselves.
"""

import operator

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin

from moeroute.ops.numba_kit.pointers import (
    ALIGNMENT,
    BLOCK,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    STORAGE,
    block_type,
    constant_block,
    element_address,
    first_lanes,
    masked_load,
    masked_store,
    narrowed_to,
    uint8_ptr,
    vector_address,
    vector_of,
    widened,
)

COPY_BYTES = 256  # bytes of one `copy`

# ---------------------------------------------------------------------------- blocks


@intrinsic
def zeros(typingctx):
    """A block of +0."""
    return block_type(), lambda context, builder, sig, args: constant_block(F32, 0.0)


@intrinsic
def splat(typingctx, value):
    """The same float32 in every lane."""

    def codegen(context, builder, sig, args):
        undefined = ir.Constant(BLOCK, ir.Undefined)
        first = builder.insert_element(undefined, args[0], ir.Constant(I32, 0))
        return builder.shuffle_vector(first, undefined, constant_block(I32, 0))

    return block_type(types.float32), codegen


@intrinsic
def load(typingctx, pointer, offset):
    """64 elements from any address, widened to float32."""

    def codegen(context, builder, sig, args):
        kind = sig.args[0].kind
        return widened(builder, kind, builder.load(vector_address(builder, *args, STORAGE[kind]), align=1))

    return block_type(pointer, types.int64), codegen


@intrinsic
def load_tail(typingctx, pointer, offset, count):
    """The first `count` < 64 elements; the other lanes are +0 and their memory is not read."""

    def codegen(context, builder, sig, args):
        kind = sig.args[0].kind
        element = STORAGE[kind]
        integer = {16: I16, 32: F32}[context.get_abi_sizeof(element) * 8]  # half has no masked load everywhere
        address = vector_address(builder, args[0], args[1], integer)
        value = masked_load(builder, address, first_lanes(builder, args[2]), vector_of(integer))
        return widened(builder, kind, builder.bitcast(value, vector_of(element)))

    return block_type(pointer, types.int64, types.int64), codegen


def _storing(align, streaming):
    def codegen(context, builder, sig, args):
        kind = sig.args[0].kind
        address = vector_address(builder, args[0], args[1], STORAGE[kind])
        instruction = builder.store(narrowed_to(builder, kind, args[2]), address, align=align)
        if streaming:
            instruction.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))
        return context.get_dummy_value()

    return codegen


@intrinsic
def store(typingctx, pointer, offset, value):
    """64 elements to any address, rounded to what the pointer points to."""
    return types.void(pointer, types.int64, block_type), _storing(1, streaming=False)


@intrinsic
def stream(typingctx, pointer, offset, value):
    """A store past the caches. The address must be a multiple of ALIGNMENT: else a fault."""
    return types.void(pointer, types.int64, block_type), _storing(ALIGNMENT, streaming=True)


@intrinsic
def store_tail(typingctx, pointer, offset, value, count):
    """The first `count` < 64 lanes; memory behind them is not touched. For 16- and 32-bit floats only."""

    def codegen(context, builder, sig, args):
        kind = sig.args[0].kind
        narrowed = narrowed_to(builder, kind, args[2])
        integer = {16: I16, 32: F32}[context.get_abi_sizeof(STORAGE[kind]) * 8]
        address = vector_address(builder, args[0], args[1], integer)
        masked_store(builder, address, first_lanes(builder, args[3]), builder.bitcast(narrowed, vector_of(integer)))
        return context.get_dummy_value()

    return types.void(pointer, types.int64, block_type, types.int64), codegen


def _copying(streaming):
    def codegen(context, builder, sig, args):
        source = vector_address(builder, args[2], args[3], I8, COPY_BYTES)
        target = vector_address(builder, args[0], args[1], I8, COPY_BYTES)
        instruction = builder.store(builder.load(source, align=1), target, align=ALIGNMENT if streaming else 1)
        if streaming:
            instruction.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))
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
        mask = first_lanes(builder, args[4])
        value = masked_load(builder, vector_address(builder, args[2], args[3], I8), mask, vector_of(I8))
        masked_store(builder, vector_address(builder, args[0], args[1], I8), mask, value)
        return context.get_dummy_value()

    return types.void(uint8_ptr, types.int64, uint8_ptr, types.int64, types.int64), codegen


@intrinsic
def prefetch(typingctx, pointer, offset):
    """Ask for the cache lines of the block at `offset`; any address is allowed."""

    def codegen(context, builder, sig, args):
        element = STORAGE[sig.args[0].kind]
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32]),
            "llvm.prefetch.p0",
        )
        first = builder.bitcast(element_address(builder, *args, element), I8.as_pointer())
        for line in range(0, LANES * context.get_abi_sizeof(element), ALIGNMENT):
            address = builder.gep(first, [ir.Constant(I64, line)])
            builder.call(function, [address, *(ir.Constant(I32, n) for n in (0, 3, 1))])
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
            half = ir.VectorType(I32, count // 2)
            even = builder.shuffle_vector(value, undefined, ir.Constant(half, list(range(0, count, 2))))
            odd = builder.shuffle_vector(value, undefined, ir.Constant(half, list(range(1, count, 2))))
            value = builder.fadd(even, odd)
            count //= 2
        return builder.extract_element(value, ir.Constant(I32, 0))

    return types.float32(block_type), codegen
