"""Compile every specialisation of the Triton kernels for every target, without a GPU, and write docs/kernels.md.

    make kernels

Takes some minutes on two cores; the suite (--check) takes fewer specialisations, or all with MOEROUTE_LARGE=1.
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import launch_cases
import machine_code
import specialisations
from launch_cases import matrix, plan_tensors, vector
from machine_code import Compiled
from specialisations import TARGETS, Specialisation

PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
BANDWIDTH = 4.8e12  # of an H200

# ---------------------------------------------------------------------------- what the suite compiles


def suite(launches: dict[str, list[Specialisation]]) -> list[tuple[str, Specialisation]]:
    """For one target every choice of every argument, one of each kernel for the others."""
    work = []
    for target, found in launches.items():
        one_each = {one.kernel: one for one in reversed(found)}.values()
        work += [(target, one) for one in (specialisations.cover(found) if target == "sm_90" else one_each)]
    return work


def all_launches() -> dict[str, list[Specialisation]]:
    """Every specialisation that the launchers choose, for each target."""
    recorded: dict[str, list[Specialisation]] = {}
    by_kind: dict[str, list[Specialisation]] = {}
    for target, (kind, _, _) in TARGETS.items():
        if kind not in by_kind:
            by_kind[kind] = specialisations.distinct(specialisations.record(target, launch_cases.cases()))
        recorded[target] = by_kind[kind]
    return recorded


# ---------------------------------------------------------------------------- typical cases


@dataclass(frozen=True)
class Typical:
    name: str
    counted: int  # bytes that must be read and written
    formula: str
    call: Callable[[], Any]


def typical() -> Iterator[Typical]:
    """The cases of the roofline table."""
    from moeroute.ops.gating import on_triton as gating
    from moeroute.ops.planning import on_triton as planning
    from moeroute.ops.rows import on_triton as rows

    bfloat16, float32 = torch.bfloat16, torch.float32
    for tokens, topk, hidden in ((8192, 8, 7168), (16384, 2, 4096)):
        shape, slots, row = f"({tokens}, {topk}, {hidden})", tokens * topk, 2 * hidden

        def combine(tokens: int = tokens, slots: int = slots, hidden: int = hidden) -> None:
            rows.combine(matrix(slots, hidden, bfloat16), vector(slots, float32), plan_tensors(slots, tokens=tokens))

        def spread(tokens: int = tokens, slots: int = slots, hidden: int = hidden) -> None:
            rows.spread(matrix(tokens, hidden, bfloat16), None, plan_tensors(slots, tokens=tokens))

        def fused(tokens: int = tokens, slots: int = slots, hidden: int = hidden) -> None:
            rows.spread_dots(
                matrix(tokens, hidden, bfloat16), matrix(slots, hidden, bfloat16), vector(slots, float32),
                plan_tensors(slots, tokens=tokens),
            )  # fmt: skip

        yield Typical(f"combine, weighted, {shape}", (slots + tokens) * row + 8 * slots, "(TK + T)·2H + 8TK", combine)
        yield Typical(f"spread {shape}", (slots + tokens) * row + 12 * slots, "(TK + T)·2H + 12TK", spread)
        yield Typical(f"fused backward {shape}", (2 * slots + tokens) * row + 20 * slots, "(2TK + T)·2H + 20TK", fused)

    tokens, topk, experts = 8192, 8, 256
    slots = tokens * topk

    def gate() -> None:
        gating.gating_topk(
            matrix(tokens, experts, float32), vector(experts, float32), None, topk, "sigmoid", 1, 1, 1, True, 1.0,
            1e-20, float32,
        )  # fmt: skip

    def gate_backward() -> None:
        gating.gating_topk_backward(
            matrix(tokens, experts, float32), matrix(tokens, topk, float32), matrix(tokens, topk, torch.int32), None,
            "sigmoid", True, 1.0, 1e-20, float32,
        )  # fmt: skip

    def plan() -> None:
        ids = matrix(tokens, topk, torch.int32)
        planning.plan_expert_ids(ids, None, 0, experts, None, None, 1, slots)

    yield Typical("gating, sigmoid with bias, (8192, 256), K = 8", 8 * tokens * experts + 8 * slots, "8TE + 8TK", gate)
    yield Typical("its backward", 8 * tokens * experts + 8 * slots, "8TE + 8TK", gate_backward)
    yield Typical("plan from 65,536 expert ids, 256 experts", 12 * slots + 16 * experts, "12TK + 16E", plan)


# ---------------------------------------------------------------------------- bytes in flight


def asked_for_nvidia(assembly: str) -> int:
    """Most bytes of global loads that a thread has asked for before it waits for one of them.

    A line begins with the barriers that the instruction waits for, and the one that its own result will set.
    """
    waiting: dict[str, int] = defaultdict(int)
    most = 0
    for line in assembly.splitlines():
        control = re.match(r"(\w\w|--):.:(.):.:.\s+(.*)", line)
        if control is None:
            continue
        barriers, own, instruction = control.groups()
        if barriers != "--":
            for barrier in range(6):
                if int(barriers, 16) >> barrier & 1:
                    waiting.pop(str(barrier), None)
        if load := re.search(r"\bLDG\.E(\S*)", instruction):
            bits = re.search(r"\.(128|64|U16|S16|U8|S8)\b", load[1])
            waiting[own] += {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}[bits[1]] if bits else 4
            most = max(most, sum(waiting.values()))
    return most


def asked_for_amd(assembly: str) -> int:
    """The same by `s_waitcnt vmcnt(n)`: all but the last n memory instructions are done."""
    waiting: list[int] = []
    most = 0
    for line in assembly.splitlines():
        if wait := re.search(r"s_waitcnt.*vmcnt\((\d+)\)", line):
            waiting = waiting[max(len(waiting) - int(wait[1]), 0) :]
        if access := re.search(r"\b(?:global|buffer|flat)_(load|store)_[us]?(byte|short|dwordx[234]|dword)", line):
            waiting.append(machine_code.AMD_BYTES[access[2]] if access[1] == "load" else 0)
            most = max(most, sum(waiting))
    return most


# Of a multiprocessor (compute unit): registers for 32 (64) lanes, threads, bytes of shared memory, programs.
LIMITS = {
    "sm_80": (2048, 2048, 164, 32),
    "sm_90": (2048, 2048, 228, 32),
    "sm_100": (2048, 2048, 228, 32),
    "gfx942": (2048, 2048, 64, 32),
    "gfx950": (2048, 2048, 160, 32),
}


def resident(one: Compiled) -> int:
    """Programs that a multiprocessor holds at once."""
    registers, threads, shared, most = LIMITS[one.target]
    warps = one.threads // TARGETS[one.target][2]
    each = -(-one.registers // 8) * 8
    if TARGETS[one.target][0] == "hip":
        by_registers = 4 * (512 // each) // warps
    else:
        by_registers = registers // each // warps
    return min(by_registers, threads // one.threads, shared * 1024 // (one.shared + 1024), most)


# ---------------------------------------------------------------------------- the page


def amount(value: float) -> str:
    """Megabytes, as the page writes them."""
    return f"{value / 1e6:,.0f} MB" if value >= 1e7 else f"{value / 1e6:,.1f} MB"


def page(done: list[Compiled], cases: list[Typical]) -> str:
    """The text of docs/kernels.md."""
    import triton

    lines = [
        "# Kernels, as compiled",
        "",
        f"Written by `make kernels`, with Triton {triton.__version__}. **Nothing here was measured, and no GPU was "
        "there**: registers, memory",
        "and instructions are the compilers' (ptxas, LLVM); times and bytes in flight are calculated from them.",
        "",
        "## Roofline on an H200",
        "",
        "Estimates. *Bytes* are those that must move: a row or an index that another program has left in the",
        "second-level cache counts once. *Goal*: 0.85 of the bandwidth of a copy, taken to be 0.9 of 4.8 TB/s.",
        "Each launch takes some 2 to 4 µs of the device besides, which is most of what the last three cost. bfloat16",
        "rows, float32 weights and logits.",
        "",
        "| case (T, K, H) | bytes | | at 4.8 TB/s | goal | launches |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    recorded = {case.name: specialisations.record("sm_90", [(case.name, case.call)]) for case in cases}
    for case in cases:
        time = case.counted / BANDWIDTH * 1e6
        lines.append(
            f"| {case.name} | {case.formula} | {amount(case.counted)} | {time:,.1f} µs | {time / 0.9 / 0.85:,.1f} µs "
            f"| {len(recorded[case.name])} |"
        )
    lines += [
        "",
        "## Bytes in flight",
        "",
        "An H200 needs bandwidth × latency = 4.8 TB/s × 0.7 µs = 3.4 MB on the way, 26 KB in each of 132",
        "multiprocessors. *Asked for*: the most bytes of global loads that a thread has on the way before it waits",
        "for one, read from the machine code (without following branches). *Programs*: how many a multiprocessor or",
        "compute unit holds, by registers, threads and shared memory. *In flight* is the product, if all threads are",
        "there at once.",
        "",
        "| case and kernel | target | registers | shared | threads | asked for | programs | in flight |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        for target, (kind, _, _) in TARGETS.items():
            for one in specialisations.distinct(specialisations.record(target, [(case.name, case.call)])):
                built, _ = machine_code.build(target, one)
                asked = asked_for_nvidia(built.asm["sass"]) if kind == "cuda" else asked_for_amd(built.asm["amdgcn"])
                compiled = machine_code.compile_for(target, one)
                programs = resident(compiled)
                lines.append(
                    f"| {case.name}: `{one.name}` | {target} | {compiled.registers} | {compiled.shared} "
                    f"| {compiled.threads} | {asked} B | {programs} "
                    f"| {asked * compiled.threads * programs / 1024:,.1f} KB |"
                )
    lines += [
        "",
        "## All specialisations",
        "",
        "What the launchers choose over a table of inputs in which each choice of an argument meets each choice of",
        "every other one (`tools/launch_cases.py`). Largest values over all of them; on AMD vector registers.",
        "",
        "| kernel | target | specialisations | registers | shared | spilled | local | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups: dict[tuple[str, str], list[Compiled]] = defaultdict(list)
    for compiled in done:
        groups[compiled.specialisation.kernel, compiled.target].append(compiled)
    for (kernel, target), found in groups.items():
        largest = (max(getattr(one, what) for one in found) for what in ("registers", "shared", "spilled", "local"))
        faults = sum(bool(one.faults) for one in found)
        room, name = kernel.removeprefix("moeroute.ops.").replace(".on_triton", "").split(":")
        values = " | ".join(map(str, largest))
        lines.append(
            f"| {room}: `{name}` | {target} | {len(found)} | {values} | {f'{faults} at fault' if faults else ''} |"
        )
    return "\n".join([*lines, ""])


def main() -> int:
    """Write the page, or with --check what became of each; returns the exit status."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", metavar="FILE", help="write what became of them as JSON, and no page")
    options.add_argument("--all", action="store_true", help="with --check: more than the suite has time for")
    chosen = options.parse_args()
    launches = all_launches()
    everything = [(target, one) for target, found in launches.items() for one in found]
    if chosen.check:
        done = machine_code.compile_all(everything if chosen.all else suite(launches))
        found = [
            {"target": one.target, "kernel": one.specialisation.name, "words": str(one.specialisation),
             "case": one.specialisation.case, "faults": one.faults}
            for one in done
        ]  # fmt: skip
        Path(chosen.check).write_text(json.dumps(found))
        return 0
    done = machine_code.compile_all(everything)
    PAGE.write_text(page(done, list(typical())))
    faulty = [one for one in done if one.faults]
    for one in faulty:
        print(one.target, one.specialisation.name, one.specialisation, *one.faults, sep="\n    ")
    print(f"{len(done)} compiled, {len(faulty)} at fault; {PAGE.name} written")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
