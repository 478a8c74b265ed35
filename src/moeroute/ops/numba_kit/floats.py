"""The floating-point mode of the thread that a kernel runs in."""

from llvmlite import binding, ir
from numba.core import cgutils
from numba.extending import intrinsic

from moeroute.ops.numba_kit.pointers import I32, I64

binding.initialize_native_asmparser()  # Numba does not: LLVM would end the process at the first line of assembly
# (to read the mode, to set it, the default: nearest even, subnormal numbers, no traps)
_MODES = {"x86_64": ("stmxcsr ($0)", "ldmxcsr ($0)", 0x1F80), "aarch64": ("mrs $0, fpcr", "msr fpcr, $0", 0)}
_MODES |= {"amd64": _MODES["x86_64"], "arm64": _MODES["aarch64"]}


def _mode_of(builder):
    return _MODES.get(str(builder.module.triple).split("-")[0], (None, None, 0))


def set_mode(builder, mode):
    """Emit the instruction that sets the mode; none where the processor is unknown."""
    # Memory is named as changed, so that loads and stores, and what is computed between them, stay on their side.
    _, setting, _ = _mode_of(builder)
    if setting and "mxcsr" in setting:
        slot = cgutils.alloca_once_value(builder, builder.trunc(mode, I32))
        builder.asm(ir.FunctionType(ir.VoidType(), [slot.type]), setting, "r,~{memory}", [slot], True)
    elif setting:
        builder.asm(ir.FunctionType(ir.VoidType(), [I64]), setting, "r,~{memory}", [mode], True)


@intrinsic
def exactly(typingctx, function, arguments):
    """`function(*arguments)` where this thread rounds to nearest even and keeps subnormal numbers.

    The thread may have another mode, set by `torch.set_flush_denormal(True)` for example. It has it again
    afterwards, also when the function raises, as it does where a work space cannot be allocated. (Numba's
    `try` does the same and makes compilation two and a half times as long; its `finally` loses the exception.)
    """
    signature = function.get_call_type(typingctx, arguments.types, {})
    result = function.dispatcher.get_compile_result(signature)

    def codegen(context, builder, sig, args):
        getting, _, default = _mode_of(builder)
        mode = ir.Constant(I64, 0)
        if getting and "mxcsr" in getting:
            slot = cgutils.alloca_once(builder, I32)
            builder.asm(ir.FunctionType(ir.VoidType(), [slot.type]), getting, "r,~{memory}", [slot], True)
            mode = builder.zext(builder.load(slot), I64)
        elif getting:
            mode = builder.asm(ir.FunctionType(I64, []), getting, "=r,~{memory}", [], True)
        set_mode(builder, ir.Constant(I64, default))
        values = cgutils.unpack_tuple(builder, args[1], len(arguments.types))
        context.add_linking_libs([result.library])
        status, found = context.call_internal_no_propagate(builder, result.fndesc, signature, values)
        set_mode(builder, mode)
        with cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return found

    return signature.return_type(function, arguments), codegen
