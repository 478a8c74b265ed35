"""Beside Block: 64 integers and 64 bits of a mask; comparisons, choices and searches."""

import operator

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from moeroute.ops.numba_kit.pointers import (
    BLOCK,
    I8,
    I16,
    I32,
    I64,
    LANES,
    STORAGE,
    block_type,
    first_lanes,
    in_every_lane,
    int32_ptr,
    masked_load,
    narrowed_to,
    uint8_ptr,
    vector_address,
    vector_of,
    widened,
)

# ---------------------------------------------------------------------------- integer lanes, comparisons, choices
#
# Beside Block: 64 integers and 64 bits of a mask.

TILE = 8  # of `transpose`: TILE rows fill LANES


class LanesType(types.Type):
    def __init__(self, element: ir.Type) -> None:
        self.vector = vector_of(element)
        super().__init__(name=f"Lanes({element})")


_BIT = ir.IntType(1)
int_block_type, mask_type = LanesType(I32), LanesType(_BIT)


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
    first = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count))


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
    """0, 1, ... 63."""
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
    """True in the first `count` lanes."""
    return mask_type(types.int64), lambda context, builder, sig, args: first_lanes(builder, args[0])


@intrinsic
def lane_bits(typingctx, mask):
    """The mask of 64 lanes as a uint64: lane i is bit i."""
    return types.uint64(mask_type), lambda context, builder, sig, args: builder.bitcast(args[0], I64)


@intrinsic
def lowest_bit(typingctx, word):
    """The position of the lowest set bit of a uint64 that is not 0."""

    def codegen(context, builder, sig, args):
        return builder.cttz(args[0], ir.Constant(_BIT, 1))

    return types.int64(types.uint64), codegen


@intrinsic
def load_ints(typingctx, pointer, offset):
    """64 int32 from any address."""

    def codegen(context, builder, sig, args):
        return builder.load(vector_address(builder, *args, I32), align=1)

    return int_block_type(int32_ptr, types.int64), codegen


@intrinsic
def store_ints(typingctx, pointer, offset, value):
    """64 int32 to any address."""

    def codegen(context, builder, sig, args):
        builder.store(args[2], vector_address(builder, args[0], args[1], I32), align=1)
        return context.get_dummy_value()

    return types.void(int32_ptr, types.int64, int_block_type), codegen


@intrinsic
def store_low_bytes(typingctx, pointer, offset, value):
    """The low byte of each of 64 integers."""

    def codegen(context, builder, sig, args):
        builder.store(builder.trunc(args[2], vector_of(I8)), vector_address(builder, args[0], args[1], I8), align=1)
        return context.get_dummy_value()

    return types.void(uint8_ptr, types.int64, int_block_type), codegen


@intrinsic
def store_zeros(typingctx, pointer, offset, value):
    """`store` of a block of nothing but zeros of either sign, infinities and quiet NaNs: no rounding to do."""

    def codegen(context, builder, sig, args):
        kind = sig.args[0].kind
        if kind == "bfloat16":
            high = builder.lshr(
                builder.bitcast(args[2], int_block_type.vector), in_every_lane(int_block_type.vector, 16)
            )
            narrowed = builder.trunc(high, vector_of(I16))
        else:
            narrowed = narrowed_to(builder, kind, args[2])
        builder.store(narrowed, vector_address(builder, args[0], args[1], STORAGE[kind]), align=1)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, block_type), codegen


@intrinsic
def square_root(typingctx, block):
    """Correctly rounded."""

    def codegen(context, builder, sig, args):
        return builder.call(_function(builder, f"llvm.sqrt.v{LANES}f32", BLOCK, BLOCK), args)

    return block_type(block_type), codegen


def _shuffled(builder, value, other, lanes):
    other = ir.Constant(value.type, ir.Undefined) if other is None else other
    return builder.shuffle_vector(value, other, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


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
        return builder.extract_element(value, ir.Constant(I32, 0))

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
        zero = ir.Constant(I32, 0)
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
        element = I16 if kind in ("bfloat16", "float16") else STORAGE[kind]  # half has no masked load everywhere
        inside = first_lanes(builder, columns, TILE)
        nothing = ir.Constant(inside.type, None)
        parts = []
        for r in range(TILE):
            row = ir.Constant(I64, r)
            mask = builder.select(builder.icmp_signed("<", row, rows), inside, nothing)
            address = vector_address(builder, source, builder.mul(stride, row), element, TILE)
            parts.append(masked_load(builder, address, mask, ir.VectorType(element, TILE)))
        while len(parts) > 1:
            both = list(range(2 * parts[0].type.count))
            parts = [_shuffled(builder, *pair, both) for pair in zip(parts[::2], parts[1::2], strict=True)]
        turned = _shuffled(builder, *parts, None, [r * TILE + c for c in range(TILE) for r in range(TILE)])
        value = widened(builder, kind, builder.bitcast(turned, vector_of(STORAGE[kind])))
        for c in range(TILE):
            column = _shuffled(builder, value, None, list(range(c * TILE, (c + 1) * TILE)))
            place = builder.add(offset, ir.Constant(I64, c * LANES))
            builder.store(column, vector_address(builder, target, place, value.type.element, TILE), align=1)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, *[types.int64] * 3), codegen
