"""The house rules that a reader relies on: who imports whom, rooms with the same rungs, no double in a float32 kernel.

Read with `ast` where the text is enough.
"""

import ast
import inspect
import operator
import platform
import pydoc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

import moeroute
from moeroute import dispatch, nn
from moeroute.dispatch import Backend
from moeroute.interop import megatron, transformer_engine
from moeroute.interop.conventions import ScoreFunction
from moeroute.nn.experts import Recompute
from moeroute.nn.huggingface import Family
from moeroute.nn.moe import WeightsOn
from moeroute.ops.activations.op import Activation
from moeroute.ops.gating.op import GroupScore, Score
from moeroute.ops.planning.common import Drop, DropOfIds

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "moeroute"
ROOMS = dispatch.ROOMS


def name_of(file: Path) -> str:
    """The module without `moeroute.`; empty for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {name_of(file): ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}

# ---------------------------------------------------------------------------- arrows

# A module imports from the floors below it only.
FLOORS = (
    ("dtypes", "ops.numba_kit.cache"),
    ("check", "ops.numba_kit.pointers", "ops.numba_kit.helpers", "ops.triton_kit"),
    ("dispatch", "memory", "plan", "ops.numba_kit.blocks", "ops.numba_kit.floats"),
    ("ops.numba_kit.lanes", "ops.numba_kit.launch"),
    ("ops.layout", "ops.register", "ops.numba_kit.row_sums", "ops.numba_kit.elementary", "ops.numba_kit.slots"),
    (
        "ops.exchange",
        "ops.experts",
        "ops.group_topk",
        "ops.half_quantization",
        "ops.normalize",
        "ops.replicas",
        "ops.router_product",
        "ops.sinkhorn",
        "ops.hash_routing",
    ),
    *((f"ops.{room}.*", f"ops.{room}.op") for room in ROOMS),
    ("permutation", "ops.balance", "ops.gradient_norm", "ops.init_routing", "ops.recomputed", "ops.special_experts"),
    ("",),  # the package: its names for users
    ("expert_parallel", "nn", "scale", "testing"),
    ("bench",),
    ("npu", "peers"),
    ("report",),
    ("scale_report",),
    ("cli",),
    ("__main__",),
)


def floors() -> dict[str, float]:
    """The floor of every module. In a room: kernels, then the backends' launchers, then op.py."""
    found: dict[str, float] = {}
    for number, floor in enumerate(FLOORS):
        for name in floor:
            if name.endswith(".*"):
                for module in TREES:
                    if module.startswith(name[:-1]):
                        file = module.split(".")[-1]
                        found[module] = number + (
                            0.5 if file in BACKENDS else 0.7 if file == "common" else 0.1 if "backward" in file else 0
                        )
            else:
                found[name] = number + (0.9 if name.endswith(".op") else 0)
    return found


BACKENDS = ("reference", "on_numba", "on_triton")
FLOOR = floors()
# Where nn stands, the cases above it, the names of hosts beside bench: the files of each package are among themselves.
ACLNN = [name for name in TREES if name.split(".")[0] == "aclnn"]
NN = [name for name in TREES if name.startswith("nn.")]
INTEROP = [name for name in TREES if name.split(".")[0] == "interop"]  # beside bench, likewise
CONFORMANCE = [name for name in TREES if name.split(".")[0] == "conformance"]
FLOOR |= dict.fromkeys(NN, FLOOR["nn"] - 0.5) | dict.fromkeys(ACLNN, FLOOR["nn"])
FLOOR |= dict.fromkeys(CONFORMANCE, FLOOR["nn"] + 0.5) | dict.fromkeys(INTEROP, FLOOR["bench"])
EMPTY = ("ops", "ops.numba_kit", *(f"ops.{room}" for room in ROOMS))  # of code
# Of our own, an implementation needs these and no more: a reference shares no code with what it judges.
NEEDS = {
    "reference": r"check|dtypes|plan|ops\.\w+\.reference",
    "on_numba": r"check|dtypes|memory|plan|ops\.layout|ops\.numba_kit\.\w+|ops\.\w+\.\w*numba\w*",
    "on_triton": r"check|dtypes|plan|ops\.layout|ops\.triton_kit|ops\.\w+\.\w*triton\w*",
}


# These put the name of a module together: dispatch loads the backends, the packages their lazy modules.
COMPOSES = ("dispatch", "", "interop")


def imports_of(name: str) -> set[str]:
    """The modules of the package that a module imports, anywhere in its text, by a string too."""
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
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and str(argument.value).startswith("moeroute."):
                found.add(str(argument.value).removeprefix("moeroute."))
            elif isinstance(argument, ast.JoinedStr):
                assert name in COMPOSES, f"{name} imports {ast.unparse(argument)}: write the module's name"
    return found


def test_every_module_has_its_floor() -> None:
    assert sorted([*FLOOR, *EMPTY]) == sorted(TREES)
    for name in EMPTY:
        assert len(TREES[name].body) == (ast.get_docstring(TREES[name]) is not None), f"{name}/__init__.py has code"


@pytest.mark.parametrize("name", [name for name in TREES if name not in EMPTY], ids=lambda name: name or "moeroute")
def test_arrows_point_down(name: str) -> None:
    for imported in imports_of(name):
        if any(name in package and imported in package for package in (ACLNN, CONFORMANCE, INTEROP, NN)):
            continue
        assert FLOOR[imported] < FLOOR[name], f"moeroute.{name} imports moeroute.{imported}"
    last = name.split(".")[-1]
    if last in NEEDS:
        for imported in imports_of(name):
            assert re.fullmatch(NEEDS[last], imported), f"moeroute.{name} imports moeroute.{imported}"
    elif name:
        assert not any(i.endswith(BACKENDS) for i in imports_of(name)), "dispatch.py loads those"


def imported_packages(name: str) -> set[str]:
    """The packages that a module imports, ours and others', imports by a string included."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {module.split(".")[0] for module in found}


@pytest.mark.parametrize("package, where", [("numba", "numba"), ("llvmlite", "numba"), ("triton", "triton")])
def test_only_its_backend_knows_a_compiler(package: str, where: str) -> None:
    knows = {name for name in TREES if package in imported_packages(name)}
    assert knows
    assert not (strangers := {name for name in knows if where not in name}), strangers


# ---------------------------------------------------------------------------- rooms


def functions_of(name: str, private: bool = False) -> dict[str, ast.FunctionDef]:
    """The public functions of a module, kernels left out (they are decorated)."""
    return {
        node.name: node
        for node in TREES[name].body
        if isinstance(node, ast.FunctionDef) and (private or not node.name.startswith("_")) and not node.decorator_list
    }


def module_path(name: str) -> Path:
    return PACKAGE / (name.replace(".", "/") + ".py")


KERNEL_FILES = [name for name in TREES if re.fullmatch(r"ops\.\w+\.\w*(numba|triton)\w*", name)]
GENERATED = {"numba_kit"}  # rooms that hold what kernels are made of, no kernels


def kernels_of(name: str) -> dict[str, ast.FunctionDef]:
    """The functions of a module with a decorator: kernels and their helpers."""
    return {n.name: n for n in TREES[name].body if isinstance(n, ast.FunctionDef) and n.decorator_list}


@pytest.mark.parametrize("name", KERNEL_FILES)
def test_kernels_are_launched_by_keyword(name: str) -> None:
    """A launch names every argument: two swapped pointers of one type would be silent memory corruption."""
    for function in functions_of(name, private=True).values():
        for call in (n for n in ast.walk(function) if isinstance(n, ast.Call)):
            called = ast.unparse(call.func)
            if called == "launch":  # Triton: the kernel and the number of programs, then names
                assert len(call.args) == 2, ast.unparse(call)
            elif called in kernels_of(name) or called in launched_elsewhere(name):
                assert len(call.args) == 1, ast.unparse(call)  # Numba: the key, then names


def launched_elsewhere(name: str) -> set[str]:
    """Kernels that a launcher file imports."""
    found = set()
    for node in TREES[name].body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moeroute.ops."):
            module = (node.module or "").removeprefix("moeroute.")
            if module in KERNEL_FILES and "numba" in module:
                for alias in node.names:
                    decorated = kernels_of(module).get(alias.name)
                    if decorated and "kernel" in ast.unparse(decorated.decorator_list[0]):
                        found.add(alias.name)
    return found


@pytest.mark.parametrize("name", KERNEL_FILES)
def test_kernel_files_raise_nothing(name: str) -> None:
    assert not [n.lineno for n in ast.walk(TREES[name]) if isinstance(n, ast.Raise)]


def test_one_loop_over_threads_serves_all_kernels() -> None:
    users = {name for name, tree in TREES.items() if any(getattr(n, "id", "") == "prange" for n in ast.walk(tree))}
    assert users == {"ops.numba_kit.launch"}


def test_one_module_registers_operators() -> None:
    registers = re.compile(r"\bLIBRARY\b|torch\.library\.(Library|custom_op|define|impl|register\w*)\b")
    found = {name for name, tree in TREES.items() if registers.search(ast.unparse(tree))}
    assert found == {"ops.register"}


def asked_of(room: str) -> set[str]:
    """The functions that a room's op.py, or a composition above it, asks a backend for."""
    return {
        node.attr
        for name in (f"ops.{room}.op", "permutation")
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call)
    }


@pytest.mark.parametrize("room", ROOMS)
def test_what_a_caller_may_write_into_is_keyword_only(room: str) -> None:
    for file in BACKENDS:
        for name in asked_of(room):
            function = functions_of(f"ops.{room}.{file}").get(name)
            assert function is None or "out" not in [a.arg for a in function.args.args], f"{room}.{file}.{name}"


def signature_of(function: ast.FunctionDef) -> str:
    """Names, kinds and defaults of the parameters."""
    bare = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(bare, ast.FunctionDef)
    for argument in ast.walk(bare.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(bare.args)


# Files that a reader of the room on the CPU opens, numba_kit as one. Of gating each direction is five; maps and indices
# share their last steps with planning, weights and quantization their reference with rows.
FILES_TO_READ = {
    "rows": 4,
    "planning": 5,
    "gating": 6,
    "weights": 6,
    "maps": 7,
    "indices": 7,
    "quantization": 6,
    "activations": 6,
}


@pytest.mark.parametrize("room", ROOMS)
def test_few_files_explain_an_operator_on_the_cpu(room: str) -> None:
    own = {name for name in TREES if re.fullmatch(rf"ops\.{room}\.(op|reference|\w*numba\w*)", name)}
    assert len(own) >= 3
    imported = {name for file in own for name in imports_of(file) if name.startswith("ops.") and name.count(".") == 2}
    read = own | {"ops.numba_kit" if name.startswith("ops.numba_kit.") else name for name in imported}
    assert len(read) <= FILES_TO_READ[room], sorted(read)


@pytest.mark.parametrize("file", ["on_numba", "on_triton"])
@pytest.mark.parametrize("room", ROOMS)
def test_all_implementations_offer_the_same(room: str, file: str) -> None:
    """What op.py asks a backend for: the same names and parameters in each."""
    reference, other = functions_of(f"ops.{room}.reference"), functions_of(f"ops.{room}.{file}")
    common = asked_of(room) & reference.keys()
    assert common
    for name in common:
        assert name in other, f"{room}: {file} has no {name}"
        assert signature_of(other[name]) == signature_of(reference[name]), f"{room}: {name}"


# ---------------------------------------------------------------------------- public names

FUNCTIONS = (
    "balance_statistics", "capacity_from_factor", "combine", "dense_weights", "dynamic_quantize", "empty_cache",
    "gating_topk", "gating_topk_backward", "load_balancing_loss", "load_balancing_loss_from_counts", "look_up_expert_ids", "memory_stats", "normalize_scores", "permute", "permute_backward",
    "permute_weights", "permute_weights_backward", "plan_from_chunks", "plan_from_expert_ids",
    "plan_from_routing_map", "plan_from_row_id_map", "plan_from_row_of_slot", "plan_from_segments",
    "plan_from_token_ids", "quantize",
    "router_z_loss", "routing_map_from_ids", "routing_map_of", "row_dots", "row_id_map", "set_memory_pool", "sinkhorn", "slot_weights",
    "spread", "spread_quantized", "unpermute",
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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_tell_arguments_and_result(name: str) -> None:
    function = getattr(moeroute, name)
    signature = inspect.signature(function)
    text = inspect.getdoc(function) or ""
    arguments = text.partition("Args:")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\w+): ", arguments, re.MULTILINE) == list(signature.parameters)
    assert ("\nReturns:\n" in text) == (signature.return_annotation is not None)
    assert not re.search(r"as often as you like|[Ss]omebody", text)


def kinds_of(annotation: Any) -> set[Any]:
    """The types and the values of literals that an annotation allows."""
    arguments = get_args(annotation)
    return set().union(*map(kinds_of, arguments)) if arguments else {annotation}


@pytest.mark.parametrize(
    "name", [*FUNCTIONS, "nn.MoE.__init__", "nn.Router.__init__", "nn.Experts.__init__", "nn.activate"]
)
def test_strings_are_literals(name: str) -> None:
    for argument, annotation in get_type_hints(operator.attrgetter(name)(moeroute)).items():
        if argument not in ("device", "return"):
            assert str not in kinds_of(annotation), f"{name}: {argument} is {annotation}"


IDS = torch.zeros(2, 1, dtype=torch.int32)
FLOAT = torch.zeros(2, 2)
# A call with a word that is none of the literal's.
WORDS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "gating_topk score": (Score, lambda word: moeroute.gating_topk(FLOAT, 1, score=word)),
    "gating_topk group_score": (GroupScore, lambda word: moeroute.gating_topk(FLOAT, 1, group_score=word)),
    "gating_topk_backward score": (
        Score, lambda word: moeroute.gating_topk_backward(FLOAT, FLOAT[:, :1], IDS, score=word, renormalize=None)
    ),
    "gating_topk backend": (Backend, lambda word: moeroute.gating_topk(FLOAT, 1, backend=word)),
    "nn.MoE backend": (Backend, lambda word: nn.MoE(4, 4, 2, 1, backend=word)),
    "plan_from_expert_ids drop": (DropOfIds, lambda word: moeroute.plan_from_expert_ids(IDS, 2, drop=word)),
    "plan_from_routing_map drop": (Drop, lambda word: moeroute.plan_from_routing_map(FLOAT > 0, drop=word)),
    "nn.MoE score": (Score, lambda word: nn.MoE(4, 4, 2, 1, score=word)),
    "nn.MoE group_score": (GroupScore, lambda word: nn.MoE(4, 4, 2, 1, group_score=word)),
    "nn.MoE drop": (DropOfIds, lambda word: nn.MoE(4, 4, 2, 1, drop=word)),
    "nn.MoE activation": (Activation, lambda word: nn.MoE(4, 4, 2, 1, activation=word)),
    "nn.MoE weights_on": (WeightsOn, lambda word: nn.MoE(4, 4, 2, 1, weights_on=word)),
    "nn.MoE recompute": (Recompute, lambda word: nn.MoE(4, 4, 2, 1, recompute=word)),
    "nn.activate activation": (Activation, lambda word: nn.activate(FLOAT, word)),
    "nn.MoE.huggingface_state_dict family": (Family, lambda word: nn.MoE(4, 4, 2, 1).huggingface_state_dict(word)),
    "megatron score_function": (
        ScoreFunction, lambda word: megatron.topk_routing_with_score_function(FLOAT, 1, score_function=word)
    ),
    "megatron drop_policy": (
        megatron.DropPolicy, lambda word: megatron.apply_router_token_dropping(FLOAT, FLOAT > 0, 1, 1.0, word)
    ),
    "megatron generation": (
        megatron.Generation, lambda word: megatron.permute(FLOAT, FLOAT > 0, generation=word)
    ),
    "transformer_engine score_function": (
        ScoreFunction,
        lambda word: transformer_engine.fused_topk_with_score_function(FLOAT, 1, False, None, None, None, word, None),
    ),
    "transformer_engine map_type": (
        transformer_engine.MapType, lambda word: transformer_engine.moe_permute(FLOAT, FLOAT > 0, map_type=word)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_a_literal_has_the_words_that_are_accepted(name: str) -> None:
    literal, call = WORDS[name]
    with pytest.raises(ValueError, match=f"{name.split()[1]} must be one of ") as refused:
        call("no such word")
    accepted = str(refused.value).partition(" must be one of ")[2].partition("; got ")[0]
    assert accepted == ", ".join(map(repr, get_args(literal)))


def test_public_classes_and_the_layer_have_a_docstring() -> None:
    for thing in (
        moeroute.Gating,
        moeroute.BalanceStatistics,
        nn.MoE,
        nn.Router,
        nn.Experts,
        nn.SwiGLU,
        nn.Routing,
        nn.RoutingRecord,
        nn.RoutingSummary,
        nn.activate,
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


@pytest.mark.parametrize(("folder", "most"), [("src", 600), ("tools", 600), ("tests", 900)])
def test_no_file_is_longer_than_a_reader_takes_in(folder: str, most: int) -> None:
    lengths = {file.name: len(file.read_text().splitlines()) for file in (ROOT / folder).rglob("*.py")}
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > most} == {}


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", *(f"docs/{f.name}" for f in (ROOT / "docs").glob("*.md"))]
)
def test_documents_name_files_that_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    for name in re.findall(r"`((?:[\w.]+/)*\w+\.(?:py|md))(?::\w+)?`", text):
        assert (
            any(list(folder.rglob(name)) for folder in (PACKAGE, ROOT / "docs", ROOT / "tests"))
            or (ROOT / name).exists()
        ), name
    for module, name in re.findall(r"`(dispatch|check|layout|triton_kit|testing|register)\.(\w+)", text):
        (path,) = PACKAGE.rglob(f"{module}.py")
        assert re.search(rf"\b{name}", path.read_text()), f"{module}.{name}"


def test_the_formatter_lays_out_the_code() -> None:
    """Twenty exceptions at most: signatures of Triton kernels, long tables."""
    assert sum(file.read_text().count("# fmt: skip") for file in PACKAGE.rglob("*.py")) <= 20


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

    body = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)
    body.compile(types)
    (code,) = body.inspect_llvm().values()
    functions = re.findall(r"^define .*?^}", code, re.MULTILINE | re.DOTALL)
    assert functions
    wrapper = re.compile(r"^define [^\n]*@\"?(_ZN7cpython|cfunc\.)")
    return "\n".join(f for f in functions if not wrapper.match(f))


def kernels() -> Iterator[tuple[str, int, int]]:
    """Every kernel for its first dtype, which is float32 or int32, and two of them for all."""
    if dispatch.unavailable("cpu") is None:
        from moeroute.ops.numba_kit.launch import Kernel

        for room in ROOMS:
            dispatch.module(room, "cpu")
        for number, kernel in enumerate(Kernel.every):
            widths = len(kernel.keys) if kernel.name in ("combine_weighted", "spread_dots_kernel") else 1
            for key in range(widths):
                yield f"{kernel.name} {kernel.keys[key]}", number, key


KERNELS = list(kernels())


@pytest.mark.parametrize(("number", "key"), [k[1:] for k in KERNELS], ids=[k[0] for k in KERNELS])
def test_kernels_compute_in_float32_and_round_every_operation(number: int, key: int) -> None:
    from numba import int64

    from moeroute.ops.numba_kit.launch import RECORD, Kernel

    kernel = Kernel.every[number]
    code = code_of(kernel.entry(kernel.keys[key]), (RECORD, int64, int64))
    for forbidden in (DOUBLE, LOOSE):
        lines = [line.strip() for line in code.splitlines() if forbidden.search(line)]
        assert not lines, lines[:5]
    if ARITHMETIC.search(code) and platform.machine() in ("x86_64", "AMD64", "aarch64", "arm64"):
        assert MODE.search(code), "arithmetic in the mode of whoever calls: see `exactly` in numba_kit/floats.py"


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

    assert {"gating_forward", "plan_serial", "combine_plain"} <= {name.split()[0] for name, _, _ in KERNELS}
    code = code_of(calls_fast, (numba.float32,))
    assert LOOSE.search(code)
    assert not DOUBLE.search(code)
