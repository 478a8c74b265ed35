"""Compile recorded specialisations for a target, and find what their assembly should not hold: `Compiled.faults`."""

import contextlib
import importlib
import io
import math
import multiprocessing
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from specialisations import TARGETS, Specialisation


@dataclass(frozen=True)
class Compiled:
    specialisation: Specialisation
    target: str
    registers: int = 0
    shared: int = 0
    spilled: int = 0  # bytes, or registers on AMD
    local: int = 0  # bytes of memory private to a thread
    faults: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        return self.specialisation.warps * TARGETS[self.target][2]


PATIENCE = 60  # seconds for a kernel; on an idle processor the slowest takes a few


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"not within {PATIENCE} s")


def build(target: str, chosen: Specialisation) -> tuple[Any, str]:
    """Triton's compiled kernel and what ptxas said."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = chosen.kernel.partition(":")
    source = ASTSource(
        getattr(sys.modules["__main__"] if module == "__main__" else importlib.import_module(module), name),
        dict(chosen.signature),
        {(at,): value for at, value in chosen.constants},
        {(at,): [list(one) for one in found] for at, found in chosen.attributes},
    )
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True  # what comes from the cache has no log
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        done = triton.compile(
            source,
            target=GPUTarget(*TARGETS[target]),
            options={"num_warps": chosen.warps, "enable_fp_fusion": chosen.fused, **chosen.limit},
        )
    return done, log.getvalue()


def compile_for(target: str, chosen: Specialisation) -> Compiled:
    """Compile a specialisation for a target, and look at its machine code."""
    from triton.compiler import CompilationError

    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(PATIENCE)
    try:
        done, log = build(target, chosen)
    except (CompilationError, RuntimeError, TimeoutError) as error:
        return Compiled(chosen, target, faults=(f"does not compile: {error}",))
    finally:
        signal.alarm(0)
    if TARGETS[target][0] == "cuda":
        registers, spilled, local = _nvidia_resources(log)
        accesses, faults = _nvidia_accesses(done.asm["ptx"]), _nvidia_arithmetic(done.asm["ptx"])
    else:
        registers, spilled, local = _amd_resources(done.asm["amdgcn"])
        accesses, faults = _amd_accesses(done.asm["amdgcn"]), _amd_arithmetic(done.asm["llir"], done.asm["amdgcn"])
    if chosen.fused:
        faults.append("launched with fused multiply-add allowed")
    if local or spilled:
        faults.append(f"{spilled} spilled, {local} bytes of local memory")
    faults += narrow_rows(chosen, chosen.warps * TARGETS[target][2], done.asm["ttir"], accesses)
    if (
        target == "sm_90"
        and re.search(r"arith\.truncf .*bf16>", done.asm["ttir"])
        and not _BFLOAT16.search(done.asm["ptx"])
    ):
        faults.append("bfloat16 is not rounded by cvt.rn.bf16")
    return Compiled(chosen, target, registers, done.metadata.shared, spilled, local, tuple(faults))


def compile_all(work: Iterable[tuple[str, Specialisation]], processes: int = 2) -> list[Compiled]:
    """`compile_for` of all, in processes; the results in the order of the work."""
    targets, chosen = zip(*work, strict=True)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(compile_for, targets, chosen, chunksize=8))


# ---------------------------------------------------------------------------- NVIDIA: PTX and ptxas


def _nvidia_resources(log: str) -> tuple[int, int, int]:
    """Registers, bytes spilled, bytes of stack."""
    numbers = [
        re.search(rf"(\d+) {words}", log) for words in ("bytes spill stores", "bytes spill loads", "bytes stack frame")
    ]
    stores, loads, stack = (int(number[1]) for number in numbers if number)
    used = re.search(r"Used (\d+) registers", log)
    assert used is not None, log
    return int(used[1]), stores + loads, stack


def _nvidia_accesses(ptx: str) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for kind, many, bits in re.findall(r"\b(ld|st)\.global(?:\.(?!v\d|[a-z]\d)[\w:]+)*(?:\.v(\d))?\.[a-z](\d+)", ptx):
        found["load" if kind == "ld" else "store", int(many or 1) * int(bits) // 8] += 1
    return found


_NVIDIA_FORBIDDEN = {
    "a fused multiply-add": r"\b(?:fma|mad)\.r[nzmp]\S*",
    "an approximation": r"\S+\.approx\S*|div\.full\S*",
    "a flush to zero": r"\S+\.ftz\S*",
    "arithmetic in bfloat16": r"\b(?:add|sub|mul|fma)\.\S*bf16\S*",
    "double precision": r"\b(?:add|sub|mul|div|fma|sqrt|cvt)\.\S*f64\S*",
    "an atomic operation on floats": r"\b(?:atom|red)\.\S*f(?:16|32|64)\S*",
}

_BFLOAT16 = re.compile(r"\bcvt\.rn\.bf16")


def _nvidia_arithmetic(ptx: str) -> list[str]:
    found = [
        f"{words}: {instruction[0]}"
        for words, pattern in _NVIDIA_FORBIDDEN.items()
        if (instruction := re.search(pattern, ptx))
    ]
    if ".local" in ptx:
        found.append("local memory in the PTX")
    return found


# ---------------------------------------------------------------------------- AMD: LLVM IR and assembly


def _amd_resources(assembly: str) -> tuple[int, int, int]:
    """Vector registers, those spilled, bytes of scratch memory.

    Scalar registers that are kept in the lanes of a vector register do not count: no memory is touched, and the
    mask of each masked access takes two of them.
    """
    vector, spilled, scratch = (
        int(re.findall(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)[0])
        for name in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
    )
    return vector, spilled, scratch


AMD_BYTES = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


def _amd_accesses(assembly: str) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    pattern = r"\b(?:global|buffer|flat)_(load|store)_[us]?(byte|short|dwordx[234]|dword)"
    for kind, width in re.findall(pattern, assembly):
        found[kind, AMD_BYTES[width]] += 1
    return found


_AMD_FORBIDDEN = {
    "a fused multiply-add": r"@llvm\.(?:fma|fmuladd)\S*",
    "a licence to approximate": r"\bf(?:add|sub|mul|div|cmp) (?:fast|contract|reassoc|arcp|afn|nsz|nnan|ninf)\b",
    "an inaccurate division or root": r"!fpmath",
    "an approximation": r"@llvm\.(?:amdgcn\.(?:rcp|rsq|exp2|log|sqrt)|exp2?|log2?)\b\S*",
    "arithmetic in bfloat16": r"\bf(?:add|sub|mul|div) (?:<\d+ x )?bfloat",
    "double precision": r"\bf(?:add|sub|mul|div) (?:<\d+ x )?double",
    "an atomic operation on floats": r"atomicrmw f\w+|\batomic\.f\w+",
}
# The assembly of an exact division has five of these, that of an exact root two and that of a division of
# integers up to four; nothing else may have one.
_AMD_FUSED = r"\bv_(?:pk_)?(?:fma|fmac|mac|mad)_f(?:16|32)\S*"
_AMD_DIVISION, _AMD_ROOT = r"\bv_div_fixup_f32", r"\bv_sqrt_f32"


def _amd_arithmetic(llvm_ir: str, assembly: str) -> list[str]:
    found = [
        f"{words}: {instruction[0]}"
        for words, pattern in _AMD_FORBIDDEN.items()
        if (instruction := re.search(pattern, llvm_ir))
    ]
    fused = re.findall(_AMD_FUSED, assembly)
    divisions, roots = len(re.findall(_AMD_DIVISION, assembly)), len(re.findall(_AMD_ROOT, assembly))
    if len(fused) > 5 * divisions + 2 * roots + 4 * len(re.findall(r"\b[us](?:div|rem) ", llvm_ir)):
        found.append(f"a fused multiply-add: {fused[0]}")
    if '"denormal-fp-math-f32"="ieee"' not in llvm_ir:
        found.append("a flush to zero: denormal-fp-math-f32 is not ieee")
    return found


# ---------------------------------------------------------------------------- wide accesses on the row paths

ROW_MATRICES = {
    "combine_kernel": ("out", "rows", "init", "init_more", "bias"),
    "spread_kernel": ("out", "x"),
    "dots_kernel": ("out", "y", "x", "bias"),
}
WIDE = 16
# In Triton's own IR, before the tile is split over threads.
_TILE = r"tt\.(load|store) .*tensor<((?:\d+x){2,})!tt\.ptr<\D+(\d+)>>"


def aligned_rows(chosen: Specialisation) -> bool:
    """Whether the kernel moves rows and all of them are known to begin at a multiple of 16 bytes."""
    if chosen.name not in ROW_MATRICES:
        return False
    constants = chosen.named_constants
    present = [name for name in ROW_MATRICES[chosen.name] if constants.get(name, 0) is not None]
    strides = [name for name, _ in chosen.signature if name.endswith("_stride")]
    return {"hidden", *present, *strides} <= chosen.divisible


def narrow_rows(chosen: Specialisation, threads: int, ir: str, accesses: Counter[tuple[str, int]]) -> list[str]:
    """What is not read and written 16 bytes at a time though its alignment is known and the row is long enough."""
    if not aligned_rows(chosen):
        return []
    wanted: Counter[str] = Counter()
    small = set()
    for kind, shape, bits in re.findall(_TILE, ir):
        sizes, size = [int(n) for n in shape.rstrip("x").split("x")], int(bits) // 8
        if sizes[-1] * size >= 32 * WIDE:
            wanted[kind] += math.prod(sizes) * size // (threads * WIDE)
        elif sizes[-1] > 8:
            small.add(kind)
    found = []
    for kind, needed in wanted.items():
        if needed == 0:
            continue
        wide = sum(count for (what, width), count in accesses.items() if what == kind and width >= WIDE)
        if wide < needed:
            found.append(f"{wide} {kind}s of 16 bytes where a thread has {needed} to do")
        if kind not in small and (
            odd := sorted(width for what, width in accesses if what == kind and 4 < width < WIDE)
        ):
            found.append(f"{kind}s of {odd} bytes")
    return found
