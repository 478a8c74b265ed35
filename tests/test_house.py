"""The house rules that a reader relies on: who imports whom, rooms with the same rungs, no double in a float32 kernel.

Read with `ast` where the text is enough.
"""

import ast
import inspect
import platform
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import moeroute
from moeroute import backend as backends
from moeroute import nn

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "moeroute"
ROOMS = ("gating", "planning", "permutation")  # along the data path


def name_of(file: Path) -> str:
    """The module without `moeroute.`; empty for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {name_of(file): ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}

# ---------------------------------------------------------------------------- arrows

# A module imports from the floors below it only.
FLOORS = (
    ("check", "ops.cache", "ops.simd", "ops.tiles"),
    ("backend", "memory", "ops.launch"),
    ("ops.rows", "ops.registration"),
    ("ops.differentiation", "ops.balance", "ops.group_topk", "ops.quantization", "ops.replicas", "ops.special_experts"),
    ("ops.grouped", "ops.router_product", "ops.gating.reference", "ops.gating.numba_cpu", "ops.gating.triton_gpu"),
    ("ops.gating.op",),
    ("ops.planning.reference", "ops.planning.numba_cpu", "ops.planning.triton_gpu"),
    ("ops.planning.op",),
    ("ops.permutation.reference", "ops.permutation.numba_cpu", "ops.permutation.triton_gpu"),
    ("ops.permutation.op",),
    ("",),  # the package: its names for users
    ("nn", "testing"),
    ("bench", "verify"),
    ("report",),
    ("cli",),
    ("__main__",),
)
FLOOR = {name: number for number, floor in enumerate(FLOORS) for name in floor}
# The aclnn package stands where nn does, other hosts' names right above it; the files of each are among themselves.
ACLNN = [name for name in TREES if name.split(".")[0] == "aclnn"]
INTEROP = [name for name in TREES if name.split(".")[0] == "interop"]
FLOOR |= dict.fromkeys(ACLNN, FLOOR["nn"]) | dict.fromkeys(INTEROP, FLOOR["bench"])
EMPTY = ("ops", *(f"ops.{room}" for room in ROOMS))
# Of our own, an implementation needs these and no more: a reference shares no code with what it judges.
NEEDS = {
    "reference": {"check"},
    "numba_cpu": {"check", "memory", "ops.launch", "ops.rows", "ops.simd"},
    "triton_gpu": {"check", "ops.tiles"},
    "op": {"check", "backend", "ops.differentiation", "ops.registration", "ops.planning.op"},
}


def imports_of(name: str) -> set[str]:
    """The modules of the package that a module imports, anywhere in its text."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "moeroute":
                    found.add(alias.name.removeprefix("moeroute").removeprefix("."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            if node.module and node.module.split(".")[0] == "moeroute":
                base = node.module.removeprefix("moeroute").removeprefix(".")
                for alias in node.names:
                    deeper = f"{base}.{alias.name}".removeprefix(".")
                    found.add(deeper if deeper in TREES else base)
    return found


def test_every_module_has_its_floor() -> None:
    assert sorted([*FLOOR, *EMPTY]) == sorted(TREES)
    for name in EMPTY:
        assert not TREES[name].body, f"{name}/__init__.py is not empty"


@pytest.mark.parametrize("name", [name for name in TREES if name not in EMPTY], ids=lambda name: name or "moeroute")
def test_arrows_point_down(name: str) -> None:
    for imported in imports_of(name):
        if any(name in package and imported in package for package in (ACLNN, INTEROP)):
            continue
        assert FLOOR[imported] < FLOOR[name], f"moeroute.{name} imports moeroute.{imported}"
    last = name.split(".")[-1]
    if last in NEEDS:
        assert imports_of(name) <= NEEDS[last]
    elif name:
        assert not any(i.endswith((".reference", ".numba_cpu", ".triton_gpu")) for i in imports_of(name)), (
            "backend.py loads those"
        )


@pytest.mark.parametrize(
    "packages, own, file",
    [
        (("numba", "llvmlite"), {"ops.cache", "ops.simd", "ops.launch"}, "numba_cpu"),
        (("triton",), {"ops.tiles"}, "triton_gpu"),
    ],
)
def test_only_its_backend_knows_a_compiler(packages: tuple[str, ...], own: set[str], file: str) -> None:
    knows = {
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for package in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if package.split(".")[0] in packages
    }
    assert knows == {*own, *(f"ops.{room}.{file}" for room in ROOMS)}


# ---------------------------------------------------------------------------- rooms


def functions_of(name: str) -> dict[str, ast.FunctionDef]:
    """The public functions of a module, kernels left out (they are decorated)."""
    return {
        node.name: node
        for node in TREES[name].body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.decorator_list
    }


def signature_of(function: ast.FunctionDef) -> str:
    """Names, kinds and defaults of the parameters."""
    bare = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(bare, ast.FunctionDef)
    for argument in ast.walk(bare.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(bare.args)


@pytest.mark.parametrize("file", ["numba_cpu", "triton_gpu"])
@pytest.mark.parametrize("room", ROOMS)
def test_all_implementations_offer_the_same(room: str, file: str) -> None:
    reference, other = functions_of(f"ops.{room}.reference"), functions_of(f"ops.{room}.{file}")
    assert other
    for name, function in other.items():
        assert name in reference, f"{room}: the reference has no {name}"
        assert signature_of(function) == signature_of(reference[name]), f"{room}: {name}"
    assert functions_of(f"ops.{room}.numba_cpu").keys() == other.keys()


# ---------------------------------------------------------------------------- public names

FUNCTIONS = (
    "balance_statistics", "capacity_from_factor", "combine", "empty_cache", "gating_topk", "gating_topk_backward", "load_balancing_loss",
    "memory_stats", "permute", "permute_backward", "permute_weights", "permute_weights_backward",
    "plan_from_expert_ids", "plan_from_routing_map", "plan_from_row_of_slot", "plan_from_segments",
    "plan_from_token_ids", "router_z_loss", "row_dots", "set_memory_pool", "slot_weights", "spread", "unpermute",
    "unpermute_backward", "update_expert_bias",
)  # fmt: skip
CLASSES = ("BalanceStatistics", "Gating", "RoutingPlan")


def test_public_names() -> None:
    imported = [
        alias.name
        for node in TREES[""].body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moeroute")
        for alias in node.names
    ]
    assert sorted(imported) == sorted(moeroute.__all__) == sorted([*FUNCTIONS, *CLASSES])


def test_import_star_brings_the_public_names_only() -> None:
    names: dict[str, object] = {}
    exec("from moeroute import *", names)
    assert names.keys() - {"__builtins__"} == set(moeroute.__all__)


def test_help_shows_the_public_names() -> None:
    text = pydoc.plain(pydoc.render_doc(moeroute))
    for name in moeroute.__all__:
        assert re.search(rf"^ +(class )?{name}\(", text, re.MULTILINE), name


@pytest.mark.parametrize("name", [*FUNCTIONS, "RoutingPlan"])
def test_public_names_have_an_example(name: str) -> None:
    assert re.search(r"^\s*>>> ", inspect.getdoc(getattr(moeroute, name)) or "", re.MULTILINE)


def test_public_classes_and_the_layer_have_a_docstring() -> None:
    for thing in (
        moeroute.Gating,
        moeroute.BalanceStatistics,
        nn.MoE,
        nn.Router,
        nn.Experts,
        nn.SwiGLU,
        nn.Routing,
        nn.grouped_linear,
    ):
        assert thing.__doc__
        assert not thing.__doc__.startswith(f"{thing.__name__}("), "a docstring that Python made up"


# ---------------------------------------------------------------------------- text


def texts() -> Iterator[Path]:
    for pattern in (
        "src/**/*.py",
        "docs/**/*",
        "benchmarks/**/*",
        "tools/**/*",
        "tests/**/*.py",
        "*.md",
        "*.toml",
        "*.txt",
        "Makefile",
    ):
        yield from (file for file in ROOT.glob(pattern) if file.is_file() and file.suffix not in (".png", ".pyc"))


@pytest.mark.parametrize(("folder", "most"), [("tools", 600), ("tests", 900)])
def test_no_file_is_longer_than_a_reader_takes_in(folder: str, most: int) -> None:
    lengths = {file.name: len(file.read_text().splitlines()) for file in (ROOT / folder).rglob("*.py")}
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > most} == {}


def test_no_path_of_one_machine() -> None:
    paths = re.compile(r"(?<![\w.])/(work|tmp|home|root|Users|mnt|opt)/|\.\./shared")
    files = list(texts())
    assert len(files) > len(TREES)
    for file in files:
        if file != Path(__file__):
            assert not (found := paths.search(file.read_text())), f"{file.relative_to(ROOT)}: {found[0]}"


def test_no_comparison_is_dropped() -> None:
    """`torch.equal(a, b)` on a line of its own says nothing, whatever comes out."""
    verdicts = {"allclose", "array_equal", "equal", "isclose", "is_same_size", "all", "any"}

    def dropped(tree: ast.AST) -> list[int]:
        lines = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr):
                value = node.value
                call = ast.unparse(value.func).split(".")[-1] if isinstance(value, ast.Call) else ""
                if isinstance(value, ast.Compare) or call in verdicts:
                    lines.append(node.lineno)
        return lines

    example = "torch.equal(a, b)\nassert torch.equal(a, b)\na == b\n(a == b).all()\nnp.isclose(a, b)\nx.add_(1)"
    assert dropped(ast.parse(example)) == [1, 3, 4, 5]
    for file in (ROOT / "tests").rglob("*.py"):
        assert not (lines := dropped(ast.parse(file.read_text()))), f"{file.name}: lines {lines}"


# ---------------------------------------------------------------------------- the kernels' code

DOUBLE = re.compile(r"\bdouble\b")
# Fused multiplication and addition, sums in any order, and flags that allow either.
LOOSE = re.compile(
    r"\bllvm\.(fma|fmuladd|vector\.reduce\.f\w+)\b"
    r"|\b(fadd|fsub|fmul|fdiv|frem|fneg|fcmp|fptrunc|fpext|call|select|phi) (fast|nnan|ninf|nsz|arcp|contract|afn|reassoc)\b"
)

ARITHMETIC = re.compile(r"\b(fadd|fsub|fmul|fdiv)\b")
MODE = re.compile(r"asm sideeffect \"(ldmxcsr|msr fpcr)")


def code_of(function: object, types: tuple[object, ...]) -> str:
    """The optimised LLVM code of a function and all that it calls, without Numba's wrapper for Python.

    The wrapper turns Python's floats, which are doubles, into the float32 of the kernel's signature.
    Compiled anew: code that comes from Numba's cache cannot be looked at.
    """
    import numba

    body = numba.njit(nogil=True, error_model="numpy")(function)
    body.compile(types)
    (code,) = body.inspect_llvm().values()
    functions = re.findall(r"^define .*?^}", code, re.MULTILINE | re.DOTALL)
    assert functions
    wrapper = re.compile(r"^define [^\n]*@\"?(_ZN7cpython|cfunc\.)")
    return "\n".join(f for f in functions if not wrapper.match(f))


def kernels() -> Iterator[tuple[str, int, int]]:
    """Every kernel for its first dtype, which is float32 or int32, and two of them for all."""
    if backends.unavailable("cpu") is None:
        from moeroute.ops.launch import Kernel

        for room in ROOMS:
            backends.module(room, "cpu")
        for number, kernel in enumerate(Kernel.every):
            widths = len(kernel.keys) if kernel.name in ("combine_weighted_body", "spread_dots_body") else 1
            for key in range(widths):
                yield f"{kernel.name} {kernel.keys[key]}", number, key


KERNELS = list(kernels())


@pytest.mark.parametrize(("number", "key"), [k[1:] for k in KERNELS], ids=[k[0] for k in KERNELS])
def test_kernels_compute_in_float32_and_round_every_operation(number: int, key: int) -> None:
    from numba import int64

    from moeroute.ops.launch import Kernel

    kernel = Kernel.every[number]
    code = code_of(kernel._functions[0].py_func, (*kernel._signature(kernel.keys[key]), int64, int64))
    for forbidden in (DOUBLE, LOOSE):
        lines = [line.strip() for line in code.splitlines() if forbidden.search(line)]
        assert not lines, lines[:5]
    if ARITHMETIC.search(code) and platform.machine() in ("x86_64", "AMD64", "aarch64", "arm64"):
        assert MODE.search(code), "arithmetic in the mode of whoever calls: see exact_floats"


def test_the_look_at_the_code_finds_what_it_looks_for() -> None:
    numba = pytest.importorskip("numba")

    def careless(x):  # type: ignore[no-untyped-def]
        return x * 1.5

    assert DOUBLE.search(code_of(careless, (numba.float32,)))

    @numba.njit(fastmath=True)
    def fast(x):  # type: ignore[no-untyped-def]
        return x * x + x

    def calls_fast(x):  # type: ignore[no-untyped-def]
        return fast(x)

    assert {"gating_body", "plan_serial_body", "combine_body"} <= {name.split()[0] for name, _, _ in KERNELS}
    code = code_of(calls_fast, (numba.float32,))
    assert LOOSE.search(code)
    assert not DOUBLE.search(code)
