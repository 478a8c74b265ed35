"""Every specialisation of a Triton kernel that our launchers choose: recorded, compiled, looked at. No GPU is needed.

Nothing is listed by hand: the launchers are called over a table of inputs (`cases`) with a driver that knows a
device's name and has no device. Triton gets as far as asking whether to compile, and is told not to. In the
table each choice of an argument meets each choice of every other argument of the same function. Then the compiler
runs for each target, and `Compiled.faults` says what its assembly should not hold.

TRITON_INTERPRET must be unset.
"""

import contextlib
import importlib
import io
import itertools
import json
import math
import multiprocessing
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Case = tuple[str, Callable[[], Any]]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}

# ---------------------------------------------------------------------------- recording


@dataclass(frozen=True)
class Specialisation:
    """What decides about the machine code of a kernel."""

    kernel: str  # module:name
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[int, Any], ...]  # by position; None where a tensor is absent
    attributes: tuple[tuple[int, tuple[tuple[str, int], ...]], ...]
    warps: int
    registers: int | None  # the most of a thread; None: ptxas weighs them against occupancy
    fused: bool  # may the compiler fuse a multiplication with an addition
    case: str = field(compare=False)  # who asked for it first

    @property
    def name(self) -> str:
        return self.kernel.partition(":")[2]

    @property
    def named_constants(self) -> dict[str, Any]:
        return {self.signature[at][0]: value for at, value in self.constants}

    @property
    def divisible(self) -> set[str]:
        """Pointers and integers known to be multiples of 16."""
        return {self.signature[at][0] for at, found in self.attributes if ("tt.divisibility", 16) in found}

    @property
    def limit(self) -> dict[str, int]:
        return {} if self.registers is None else {"maxnreg": self.registers}

    def __str__(self) -> str:
        """The types, absent tensors as `-`, then the constants."""
        constants = self.named_constants
        pointers = [
            "-" if constants.get(name, 0) is None else kind.removeprefix("*")
            for name, kind in self.signature
            if kind.startswith("*") or constants.get(name, 0) is None
        ]
        chosen = [f"{name}={value}" for name, value in constants.items() if name.isupper()]
        return " ".join([*pointers, *chosen, f"warps={self.warps}"])


class NothingUnwritten(TorchFunctionMode):
    """Fresh tensors are zero: a launcher may read a size from one that no kernel has filled."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.empty, torch.empty_like, Tensor.new_empty) and result.nbytes < 2**26:
            result.zero_()
        return result


class NoDevice:
    """As much of a driver as a launch needs until it compiles."""

    def __init__(self, target: str) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(*TARGETS[target])
        self.device = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        return self.device

    def get_current_stream(self, device: str) -> int:
        return 0


def record(target: str, cases: Iterable[Case]) -> list[Specialisation]:
    """The launches of the cases, in order, on a device of this kind."""
    import triton

    found: list[Specialisation] = []
    current = ""

    def refuse(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found.append(
            Specialisation(
                kernel=f"{fn.module}:{fn.name}",
                signature=tuple(compile["signature"].items()),
                constants=tuple((path[0], value) for path, value in compile["constants"].items()),
                attributes=tuple((path[0], tuple(map(tuple, a))) for path, a in compile["configs"][0].items() if a),
                warps=compile["num_warps"],
                registers=json.loads(compile["specialization_data"])["options"].get("maxnreg"),
                fused=compile["enable_fp_fusion"],
                case=current,
            )
        )
        return True

    triton.runtime.driver.set_active(NoDevice(target))
    triton.knobs.runtime.jit_cache_hook = refuse
    try:
        with NothingUnwritten():
            for current, call in cases:  # noqa: B007
                call()
    finally:
        triton.knobs.runtime.jit_cache_hook = None
    return found


def distinct(launches: Iterable[Specialisation]) -> list[Specialisation]:
    return list(dict.fromkeys(launches))


def cover(found: Iterable[Specialisation]) -> list[Specialisation]:
    """A few that have, of each kernel, each type, constant and alignment of each argument at least once."""
    kept, seen = [], set()
    for one in found:
        features = {
            (one.kernel, feature)
            for feature in (
                *one.signature,
                *((name, str(value)) for name, value in one.named_constants.items()),
                *((name, name in one.divisible) for name, _ in one.signature),
            )
        }
        if features - seen:
            kept.append(one)
            seen |= features
    return kept


# ---------------------------------------------------------------------------- the table of inputs


def pairs(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Few combinations in which each choice of an axis meets each choice of every other axis."""
    names = list(axes)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(axes[names[a]]))
        for j in range(len(axes[names[b]]))
    }
    found = []
    while missing:
        chosen = dict(min(missing))
        for axis, name in enumerate(names):
            if axis not in chosen:
                gain = [
                    sum(tuple(sorted(((axis, choice), other))) in missing for other in chosen.items())
                    for choice in range(len(axes[name]))
                ]
                chosen[axis] = gain.index(max(gain))
        missing -= set(itertools.combinations(sorted(chosen.items()), 2))
        found.append({name: axes[name][chosen[axis]] for axis, name in enumerate(names)})
    return found


def over(function: Callable[..., Any], **axes: Sequence[Any]) -> Iterator[Case]:
    for chosen in pairs(**axes):
        words = ", ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in chosen.items())
        yield f"{function.__name__}({words})", partial(function, **chosen)


LAYOUTS = ("side by side", "apart", "askew", "vast")


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str = "side by side") -> Tensor:
    """`apart`: rows at an odd distance. `askew`: not on a 16-byte boundary. `vast`: beyond 2 GiB, never touched."""
    if layout == "apart":
        return torch.empty((rows, columns + 1), dtype=dtype)[:, :columns]
    if layout == "askew":
        return torch.empty(rows * columns + 1, dtype=dtype)[1:].view(rows, columns)
    if layout == "vast":
        distance = (2**31 // dtype.itemsize // (rows - 1) // 16 + 1) * 16
        return torch.empty_strided((rows, columns), (distance, 1), dtype=dtype)
    return torch.empty((rows, columns), dtype=dtype)


def vector(size: int, dtype: torch.dtype, layout: str = "side by side") -> Tensor:
    return torch.zeros(size + 1, dtype=dtype)[1:] if layout == "askew" else torch.zeros(size, dtype=dtype)


TOKENS = 16
HIDDEN = (7168, 2049, 512, 144, 64, 1)
EXPERTS = 16
SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "topk_softmax")
integers = partial(vector, dtype=torch.int32)


def permutation_cases() -> Iterator[Case]:
    from moeroute.ops.permutation import triton_gpu

    def offsets(ragged: bool) -> Tensor | None:
        return integers(TOKENS + 1) if ragged else None

    def combine(
        dtype: torch.dtype, weights: torch.dtype | None, hidden: int, topk: int, starts: int, layout: str, bias: bool,
        ragged: bool, out: str | None,
    ) -> None:  # fmt: skip
        slots = TOKENS * topk
        triton_gpu.combine(
            matrix(slots, hidden, dtype, layout), None if weights is None else vector(slots, weights),
            integers(slots), offsets(ragged), TOKENS,
            init=matrix(TOKENS, hidden, dtype, layout) if starts else None,
            init_more=matrix(TOKENS, hidden, dtype, layout) if starts > 1 else None,
            bias=matrix(EXPERTS, hidden, dtype) if bias else None,
            expert_of_slot=integers(slots) if bias else None,
            out=None if out is None else matrix(TOKENS, hidden, dtype, out),
        )  # fmt: skip

    yield from over(
        combine, dtype=FLOATS, weights=(None, *FLOATS), hidden=HIDDEN, topk=(1, 2, 4, 8), starts=(0, 1, 2),
        layout=LAYOUTS, bias=(False, True), ragged=(False, True), out=(None, *LAYOUTS),
    )  # fmt: skip

    def spread(
        dtype: torch.dtype, weights: torch.dtype | None, hidden: int, topk: int, layout: str, ragged: bool,
        out: str | None,
    ) -> None:  # fmt: skip
        slots = TOKENS * topk
        triton_gpu.spread(
            matrix(TOKENS, hidden, dtype, layout), None if weights is None else vector(slots, weights),
            integers(slots), integers(slots), offsets(ragged),
            out=None if out is None else matrix(slots, hidden, dtype, out),
        )  # fmt: skip

    axes = {"hidden": HIDDEN, "topk": (1, 2, 4, 8), "layout": LAYOUTS, "ragged": (False, True), "out": (None, *LAYOUTS)}
    yield from over(spread, dtype=FLOATS, weights=(None, *FLOATS), **axes)
    yield from over(spread, dtype=(torch.uint8, torch.int64, torch.complex64), weights=(None,), **axes)

    def row_dots(
        dtype: torch.dtype, dots: torch.dtype, hidden: int, topk: int, layout: str, ragged: bool, bias: bool
    ) -> None:
        slots = TOKENS * topk
        triton_gpu.row_dots(
            matrix(slots, hidden, dtype, layout), matrix(TOKENS, hidden, dtype, layout), integers(slots),
            offsets(ragged), dots, bias=matrix(EXPERTS, hidden, dtype) if bias else None,
            expert_of_slot=integers(slots) if bias else None,
        )  # fmt: skip

    yield from over(
        row_dots, dtype=FLOATS, dots=FLOATS, hidden=HIDDEN, topk=(1, 8), layout=LAYOUTS, ragged=(False, True),
        bias=(False, True),
    )  # fmt: skip

    def spread_dots(
        dtype: torch.dtype, weights: torch.dtype, hidden: int, topk: int, layout: str, ragged: bool, out: str | None
    ) -> None:
        slots = TOKENS * topk
        triton_gpu.spread_dots(
            matrix(TOKENS, hidden, dtype, layout), matrix(slots, hidden, dtype, layout), vector(slots, weights),
            integers(slots), integers(slots), offsets(ragged),
            out=(None, None) if out is None else (matrix(slots, hidden, dtype, out), vector(slots, weights)),
        )  # fmt: skip

    yield from over(
        spread_dots, dtype=FLOATS, weights=FLOATS, hidden=HIDDEN, topk=(1, 8), layout=LAYOUTS, ragged=(False, True),
        out=(None, *LAYOUTS),
    )  # fmt: skip

    def take(dtype: torch.dtype, size: int, layout: str) -> None:
        triton_gpu.take(vector(size, dtype, layout), integers(size))

    yield from over(
        take, dtype=(*FLOATS, torch.uint8, torch.int64), size=(1, 16, 5000), layout=("side by side", "askew")
    )

    def slot_weights(dtype: torch.dtype, experts: int, topk: int, ragged: bool, layout: str) -> None:
        triton_gpu.slot_weights(
            matrix(TOKENS, experts, dtype, layout), integers(TOKENS * topk), offsets(ragged)
        )  # fmt: skip

    experts = (1, 8, 60, 256, 8192)
    yield from over(
        slot_weights, dtype=FLOATS, experts=experts, topk=(1, 8), ragged=(False, True), layout=("side by side", "askew")
    )

    def slot_weights_backward(
        dtype: torch.dtype, experts: int, topk: int, ragged: bool, accumulate: bool, out: str | None
    ) -> None:
        triton_gpu.slot_weights_backward(
            vector(TOKENS * topk, dtype), integers(TOKENS * topk), offsets(ragged), TOKENS, experts, accumulate,
            out=None if out is None else matrix(TOKENS, experts, dtype, out),
        )  # fmt: skip

    yield from over(
        slot_weights_backward, dtype=FLOATS, experts=experts, topk=(1, 8), ragged=(False, True),
        accumulate=(False, True), out=(None, "askew"),
    )  # fmt: skip


def gating_cases() -> Iterator[Case]:
    from moeroute.ops.gating import triton_gpu

    def gating_topk(
        experts: int, groups: int, k: int, score: str, dtype: torch.dtype, bias: torch.dtype | None,
        given: torch.dtype | None, weights: torch.dtype, group_score: str, renormalize: bool, layout: str, out: bool,
    ) -> None:  # fmt: skip
        groups = groups if experts % groups == 0 else 1
        kept = max(groups // 2, 1)
        if given is None:
            k = min(k, experts // groups * kept)
        triton_gpu.gating_topk(
            matrix(TOKENS, experts, dtype, layout), None if bias is None else vector(experts, bias),
            None if given is None else matrix(TOKENS, k, given, layout), k, score, groups, kept, group_score,
            renormalize, 1.0, 1e-20, weights,
            (matrix(TOKENS, k, weights, layout), matrix(TOKENS, k, torch.int32, layout),
             matrix(TOKENS, experts, torch.float32, layout)) if out else None,
        )  # fmt: skip

    many = (1, 8, 60, 128, 256, 384, 1024, 2048, 4096, 8192, 12288)
    layouts = ("side by side", "apart", "askew")
    yield from over(
        gating_topk, experts=many, groups=(1, 4, 8, 32), k=(1, 6, 8, 32, 40), score=SCORES, dtype=FLOATS,
        bias=(None, *FLOATS), given=(None, torch.int32, None, torch.int64, torch.uint8, torch.uint64), weights=FLOATS,
        group_score=("max", "top2_sum"), renormalize=(False, True), layout=layouts, out=(False, True),
    )  # fmt: skip

    def gating_topk_backward(
        experts: int, k: int, score: str, grad: torch.dtype, ids: torch.dtype, used: bool, renormalize: bool,
        dtype: torch.dtype, layout: str, out: bool,
    ) -> None:  # fmt: skip
        triton_gpu.gating_topk_backward(
            matrix(TOKENS, experts, torch.float32, layout), matrix(TOKENS, k, grad, layout),
            matrix(TOKENS, k, ids, layout), matrix(TOKENS, experts, torch.float32, layout) if used else None, score,
            renormalize, 1.0, 1e-20, dtype, matrix(TOKENS, experts, dtype, layout) if out else None,
        )  # fmt: skip

    yield from over(
        gating_topk_backward, experts=many, k=(1, 8, 40), score=SCORES, grad=FLOATS,
        ids=(torch.int32, torch.int64, torch.uint64), used=(False, True),
        renormalize=(False, True), dtype=FLOATS, layout=layouts, out=(False, True),
    )  # fmt: skip


def planning_cases() -> Iterator[Case]:
    from moeroute.ops.planning import triton_gpu

    ids_dtypes = (torch.int32, torch.int64, torch.int8, torch.uint8, torch.int16)
    straight = ("side by side", "askew")
    buffers = (None, *straight)

    def buffer(size: int, layout: str | None) -> Tensor | None:
        return None if layout is None else integers(size, layout=layout)

    def plan_expert_ids(
        ids: torch.dtype, slots: int, experts: int, weights: torch.dtype | None, capacity: int | None,
        segment: int | None, align: int, num_rows: int | None, layout: str, out: str | None,
    ) -> None:  # fmt: skip
        triton_gpu.plan_expert_ids(
            vector(slots, ids, layout), None if weights is None else vector(slots, weights, layout), 0, experts,
            capacity, segment, align, num_rows, buffer(slots, out),
        )  # fmt: skip

    yield from over(
        plan_expert_ids, ids=ids_dtypes, slots=(16, 40, 5000, 131072), experts=(1, 8, 256, 1000, 4096, 9000),
        weights=(None, *FLOATS), capacity=(8, None), segment=(None, 8), align=(1, 8), num_rows=(512, None, 100000),
        layout=straight, out=buffers,
    )  # fmt: skip

    def plan_any_ids(ids: torch.dtype, slots: int, num_rows: int | None, layout: str, out: str | None) -> None:
        triton_gpu.plan_any_ids(vector(slots, ids, layout), num_rows, buffer(slots, out))

    yield from over(plan_any_ids, ids=ids_dtypes, slots=(16, 5000), num_rows=(None, 512), layout=straight, out=buffers)

    def plan_routing_map(
        dtype: torch.dtype, experts: int, weights: torch.dtype | None, topk: int | None, fill: bool, capacity: int,
        segment: int | None, align: int, num_rows: int | None, layout: str,
    ) -> None:  # fmt: skip
        triton_gpu.plan_routing_map(
            matrix(TOKENS, experts, dtype, layout),
            None if weights is None else matrix(TOKENS, experts, weights, layout),
            0, experts, None if fill else topk, fill, capacity, segment, align, num_rows,
        )  # fmt: skip

    yield from over(
        plan_routing_map, dtype=(torch.bool, torch.int8, torch.uint8), experts=(8, 60, 256, 4096),
        weights=(None, *FLOATS), topk=(None, 1, 8), fill=(False, True), capacity=(8,), segment=(None, 8),
        align=(1, 8), num_rows=(512, None), layout=straight,
    )  # fmt: skip

    def plan_row_of_slot(
        ids: torch.dtype, experts: torch.dtype | None, slots: int, layout: str, out: str | None
    ) -> None:
        triton_gpu.plan_row_of_slot(
            vector(slots, ids, layout), None if experts is None else vector(slots, experts, layout), 512, 0,
            buffer(slots, out),
        )  # fmt: skip

    yield from over(
        plan_row_of_slot, ids=ids_dtypes, experts=(None, *ids_dtypes), slots=(16, 5000), layout=straight, out=buffers
    )

    def plan_token_ids(
        ids: torch.dtype, rows: torch.dtype | None, slots: int, experts: int | None, layout: str, out: str | None
    ) -> None:
        triton_gpu.plan_token_ids(
            vector(slots, ids, layout), None if rows is None else vector(slots, rows, layout), TOKENS, 512, experts,
            buffer(slots, out),
        )  # fmt: skip

    yield from over(
        plan_token_ids, ids=ids_dtypes, rows=(None, *ids_dtypes), slots=(16, 5000), experts=(None, 1, 8),
        layout=straight, out=buffers,
    )  # fmt: skip

    def plan_segments(lengths: torch.dtype, ranks: int, experts: int, layout: str, out: str | None) -> None:
        triton_gpu.plan_segments(matrix(ranks, experts, lengths, layout), 5000, buffer(5000, out))

    yield from over(
        plan_segments, lengths=(torch.int64, torch.int32), ranks=(1, 8), experts=(1, 32, 256), layout=straight,
        out=buffers,
    )  # fmt: skip


def cases() -> Iterator[Case]:
    yield from gating_cases()
    yield from planning_cases()
    yield from permutation_cases()


# ---------------------------------------------------------------------------- what the compiler made


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
