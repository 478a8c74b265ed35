"""The C interface, called by a program that draws: as it is built, and under AddressSanitizer and UBSan.

With the sanitizers the library and the program are both compiled with them, and the first report ends the program.
Python and torch inside of the library are as installed: of them only the memory that they allocate is watched. Leaks
are not looked for, since an interpreter that ends leaves its own behind; `leaks` of torture_kinds.py looks at the
resident memory.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aclnn_calls import GOOD
from moeroute.aclnn.library import build, prototypes
from moeroute.aclnn.library.handles import NUMBERS
from moeroute.aclnn.signatures import SIGNATURES

HERE = Path(__file__).parent / "torture_c"
FLAGS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
PLAIN = ("-O1",)
OPTIONS = {
    # A size that no machine has is refused with null, as without the sanitizer.
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
REPORT = re.compile(r"ERROR: \w+Sanitizer|runtime error:|SUMMARY: \w+Sanitizer")
NO_COMPILER = "not run: no compiler"

# What must be reported, else the run would say nothing: one function each, called with 8.
WRONG = {
    "a write behind the end": "void wrong(int n) { char *p = malloc(n); p[n] = 1; sink = p[0]; free(p); }",
    "a read of freed memory": "void wrong(int n) { char *p = malloc(n); free(p); sink = p[0]; }",
    "a copy that is too long": "void wrong(int n) { char *p = malloc(n); memset(p, 1, n + 1); sink = p[0]; free(p); }",
    "an overflow": "void wrong(int n) { sink = 2147483640 + n; }",
    "a shift too far": "void wrong(int n) { sink = 1 << (n * 4); }",
}
_RIGHT = "void wrong(int n) { char *p = malloc(n); p[n - 1] = 1; sink = p[n - 1] + n; free(p); }"


@cache
def compiler(flags: tuple[str, ...] = FLAGS) -> str | None:
    """The C compiler that takes these flags and has their libraries; None where there is none."""
    for name in ("gcc", "clang"):
        if found := shutil.which(name):
            command = [found, *flags, "-x", "c", "-", "-o", os.devnull]
            if (
                subprocess.run(command, input="int main(void) { return 0; }", text=True, capture_output=True).returncode
                == 0
            ):
                return found
    return None


def reports(code: str, place: Path) -> bool:
    """Whether the sanitizers say something of this function, in a library as ours are."""
    head = "#include <stdlib.h>\n#include <string.h>\n"
    (place / "wrong.c").write_text(f"{head}volatile int sink;\n{code}\n")
    (place / "calls_wrong.c").write_text("void wrong(int);\nint main(void) { wrong(8); return 0; }\n")
    _compile([str(place / "wrong.c"), "-fPIC", "-shared", "-o", str(place / "libwrong.so")])
    program = str(place / "calls_wrong")
    _compile([str(place / "calls_wrong.c"), "-o", program, f"-L{place}", "-lwrong", f"-Wl,-rpath,{place}"])
    done = _run([program], 60)
    if done.returncode == 0:
        return False
    if not REPORT.search(done.stderr):
        raise AssertionError(f"no report but status {done.returncode}: {done.stderr[-300:]}")
    return True


def check_the_sanitizers(place: Path) -> int:
    """Every wrong function is reported, the right one is not; how many were tried."""
    for what, code in WRONG.items():
        if not reports(code, place):
            raise AssertionError(f"the sanitizers do not report {what}")
    if reports(_RIGHT, place):
        raise AssertionError("the sanitizers report what is right")
    return len(WRONG) + 1


def make(place: Path, flags: tuple[str, ...] = FLAGS) -> Path:
    """The libraries and the program, all with these flags; returns the program."""
    former = os.environ.get("CC")
    os.environ["CC"] = " ".join([compiler(flags) or "", *flags])
    try:
        build.build(place)
    finally:
        del os.environ["CC"]
        if former is not None:
            os.environ["CC"] = former
    source = place / "driver.c"
    source.write_text(program_text())
    libraries = [f"-l:{name}" for name in (*prototypes.libraries(), build.SECURE_LIBRARY)]
    searched = [f"-I{place}/include", f"-L{place}/lib", f"-Wl,-rpath,{place}/lib"]
    # The C++ library has the operator delete[] that takes back what some calls return.
    _compile([str(source), *searched, *libraries, "-lpthread", "-lstdc++", "-o", str(place / "driver")], flags)
    return place / "driver"


def drive(program: Path, seconds: float, seed: int, *beside: str) -> dict[str, int]:
    """Let the program call for so long; what it counted. A report, or another end than a good one, is an error."""
    done = _run([str(program), str(seconds), str(seed), *beside], 3 * seconds + 300)
    found = REPORT.search(done.stderr)
    if found or done.returncode != 0:
        start = done.stderr.rfind("\n", 0, found.start()) + 1 if found else max(0, len(done.stderr) - 2000)
        print(done.stderr[start : start + 6000], file=sys.stderr)
        summary = re.findall(r"(?:SUMMARY|ERROR|driver): .*|.*runtime error: .*", done.stderr)
        raise AssertionError(f"status {done.returncode}, seed {seed}: {summary[-1] if summary else done.stderr[-200:]}")
    counted: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    if counted["silent"]:
        raise AssertionError(re.sub(r"(?m)^(?!driver: ).*\n", "", done.stderr))
    return counted


def handles(seconds: float, seed: int) -> tuple[int, str]:
    """As a program for CANN links it, with forks beside its threads."""
    if compiler(PLAIN) is None:
        return 0, NO_COMPILER
    with tempfile.TemporaryDirectory() as folder:
        counted = drive(make(Path(folder), PLAIN), seconds, seed, "beside")
    return counted["calls"], _told(counted) + f", {counted['forks']:,} forks beside 4 threads that call"


def sanitizers(seconds: float, seed: int) -> tuple[int, str]:
    """In three processes one after the other. First the sanitizers themselves are tried on what is wrong."""
    if compiler() is None:
        return 0, NO_COMPILER + ("" if compiler(PLAIN) is None else " with AddressSanitizer")
    total: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        check_the_sanitizers(Path(folder))
        program = make(Path(folder))
        for part in range(3):
            counted = drive(program, seconds / 3, seed + 1000 * part)
            total = {key: total.get(key, 0) + value for key, value in counted.items()}
            total["functions"] = counted["functions"]
    known = f"{len(WRONG)} faults planted elsewhere were all reported"
    return total["calls"], f"{_told(total)}, {total['forks']:,} forks; no report ({known})"


def _told(counted: dict[str, int]) -> str:
    refused, ran = f"{counted['first_refused']:,} first phases refused", f"{counted['ran']:,} operators ran"
    return f"calls of {counted['functions']} functions, each of them; {refused}, {ran}"


def _run(command: list[str], timeout: float) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, **OPTIONS}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def _compile(arguments: list[str], flags: tuple[str, ...] = FLAGS) -> None:
    done = subprocess.run([compiler(flags) or "", *flags, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(done.stderr[-3000:])


# ---------------------------------------------------------------------------- the program


def program_text() -> str:
    """driver.c, the rest of its functions, the table of all, and its end."""
    text = (HERE / "driver.c").read_text()
    own = set(re.findall(r"^static void try_(\w+)\(void\)$", text, re.MULTILINE))
    parts, operators, others = [text], [], sorted(name for name in own if name.endswith("_s"))
    for group in prototypes.libraries().values():
        for prototype in group:
            name = prototype.name.removeprefix("aclnn")
            if name in SIGNATURES:
                operators.append(name)
            elif name.removesuffix("GetWorkspaceSize") not in SIGNATURES:
                others.append(prototype.name)
                if prototype.name not in own:
                    parts.append(_plain(prototype))
    parts.append(f"static uint64_t good[{len(operators)}];\n")
    parts += [_operator(name, place) for place, name in enumerate(operators)]
    rows = [f'    {{"aclnn{name}", try_aclnn{name}, 0}},\n' for name in operators]
    rows += [f'    {{"{name}", try_{name}, 0}},\n' for name in others]
    table = "static struct {\n    const char *name;\n    void (*function)(void);\n    uint64_t calls;\n} every[] = {\n"
    parts.append(f"{table}{''.join(rows)}}};\n\n#define OPERATORS {len(operators)}\n#define FUNCTIONS {len(rows)}\n")
    parts.append((HERE / "main.c").read_text())
    return "\n".join(parts)


_HANDLES = ("aclrtStream", "aclrtContext", "aclrtEvent")


def _plain(prototype: prototypes.Prototype) -> str:
    """A function each of whose arguments is drawn for itself."""
    lines, arguments, kept = [], [], []
    for kind, name in prototype.parameters:
        bare = kind.removeprefix("const ").removesuffix("*").strip()
        if kind in _HANDLES or kind in ("void *", "const void *") or (kind.endswith("*") and bare in _OPAQUE):
            arguments.append(f"({kind})handle()")
        elif kind.endswith("*") and not kind.startswith("const"):
            lines.append(f"    {kind}{name} = output(sizeof(*{name}));\n")
            arguments.append(name)
            if kind == "void **" or bare in _HANDLES:
                kept.append(name)
        elif kind in ("float", "double"):
            arguments.append(f"({kind})real()")
        elif not kind.endswith("*"):
            arguments.append(f"({kind})number()")
        else:
            raise ValueError(f"{prototype.name}: {kind} {name} must be drawn in driver.c")
    kept_lines = "".join(f"    if (answer == 0)\n        remember(*{name});\n" for name in kept)
    call = f"    int answer = {prototype.name}({', '.join(arguments)});\n"
    return f"static void try_{prototype.name}(void)\n{{\n{''.join(lines)}{call}{kept_lines}    finish(answer);\n}}\n"


_OPAQUE = (
    "aclTensor",
    "aclTensorList",
    "aclScalar",
    "aclIntArray",
    "aclFloatArray",
    "aclBoolArray",
    "aclOpExecutor",
)


def _operator(name: str, place: int) -> str:
    """Both phases, from a valid call."""
    parameters, values = SIGNATURES[name].parameters, list(GOOD[name]().values())
    data, given, arguments = [], [], []
    for at, (parameter, value) in enumerate(zip(parameters, values, strict=True)):
        words, text = _given(value, f"{name}_{at}")
        data.append(text)
        given.append(f"    {words},\n")
        match parameter.kind:
            case "int" | "uint32":
                kind = "int64_t" if parameter.kind == "int" else "uint32_t"
                arguments.append(f"({kind})as_integer(&call, {at})")
            case "bool":
                arguments.append(f"as_bool(&call, {at})")
            case "float" | "double":
                arguments.append(f"({parameter.kind})as_real(&call, {at})")
            case _:
                arguments.append(f"as_handle(&call, {at})")
    return (
        f"{''.join(data)}static const struct given good_{name}[] = {{\n{''.join(given)}}};\n\n"
        f"static void try_aclnn{name}(void)\n{{\n    struct call call = begin(good_{name}, {len(values)});\n"
        f"    int status = aclnn{name}GetWorkspaceSize({', '.join(arguments)}, call.size, call.executor);\n"
        f"    second(&call, status, aclnn{name}, &good[{place}]);\n}}\n"
    )


def _given(value: Any, name: str) -> tuple[str, str]:
    """A `struct given`, and the array that it points to."""
    if isinstance(value, Tensor):
        held = value.contiguous().reshape(-1).view(torch.uint8) if value.numel() else torch.empty(0, dtype=torch.uint8)
        dims = ", ".join(map(str, value.shape)) or "0"
        words = f"{{TENSOR, {NUMBERS[value.dtype]}, {value.dim()}, {{{dims}}}, {name}, {held.numel()}, 0, 0}}"
        return words, f"static const unsigned char {name}[] = {{{', '.join(map(str, held.tolist())) or 0}}};\n"
    if isinstance(value, list | tuple):
        words = f"{{INTEGERS, 0, 0, {{0}}, {name}, {8 * len(value)}, 0, 0}}"
        return words, f"static const int64_t {name}[] = {{{', '.join(map(str, value)) or 0}}};\n"
    if value is None:
        return "{NOTHING, 0, 0, {0}, NULL, 0, 0, 0}", ""
    integer = int(value) if not isinstance(value, float) else 0
    return (
        f"{{{'REAL' if isinstance(value, float) else 'INTEGER'}, 0, 0, {{0}}, NULL, 0, {integer}, {float(value)}}}",
        "",
    )
