"""The C library: built here, used from C++ programs and, in this process, through ctypes."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeroute.aclnn.library import build, prototypes
from moeroute.aclnn.signatures import SIGNATURES

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples" / "aclnn").glob("*.cpp"))
SEEDS = ROOT.parent / "shared" / "seeds"
COMPILER = shutil.which("g++") or shutil.which("c++")

LIFE = r"""
#include "acl/acl.h"
#include "aclnn/acl_meta.h"
#include <cstdio>
#include <cstring>
int main(int count, char **)
{
    int32_t device = 7;
    void *memory = nullptr;
    if (aclrtSetDevice(0) != 100001 || !strstr(aclGetRecentErrMsg(), "before aclInit")) return 1;
    for (int round = 0; round < 2; round++) {
        if (aclInit(nullptr) || aclInit(nullptr) != 100002) return 2;
        if (aclrtMalloc(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST) != 107002) return 3;
        if (aclrtSetDevice(0) || aclrtGetDevice(&device) || device != 0) return 4;
        if (aclrtMalloc(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST)) return 5;
        if (count > 1) return 0;  // without aclFinalize
        if (aclFinalize() || aclrtFree(memory) != 100001) return 6;
        if (!strstr(aclGetRecentErrMsg(), "after aclFinalize") || *aclGetRecentErrMsg()) return 7;
        if (aclFinalize() != 100037) return 8;
    }
    puts("fine");
    return 0;
}
"""

# The first call of the process comes from several threads at once; then each has a stream and works.
THREADS = r"""
#include <atomic>
#include <thread>
#include "aclnnop/aclnn_moe_token_permute_grad.h"
#include "kit.hpp"
std::atomic<int> wrong{0};
static void work(int number)
{
    struct { aclrtStream stream; } device;
    OK(aclrtSetDevice(0));
    OK(aclrtCreateStream(&device.stream));
    for (int i = 0; i < 40; i++) {
        float base = float(number * 1000 + i);
        Tensor<float> grad({4, 2}, {base, 2, 3, 4, 5, 6, 7, 8});
        Tensor<int32_t> indices({4}, {2, 0, 1, 3});
        Tensor<float> out({2, 2});
        RUN(MoeTokenPermuteGrad, grad, indices, 2, false, out);
        auto found = out.values();
        if (found[0] != base + 5 || found[3] != 12) wrong++;
        if (aclrtFree(nullptr) != 100000 || !std::strstr(aclGetRecentErrMsg(), "devPtr")) wrong++;
    }
    OK(aclrtDestroyStream(device.stream));
    OK(aclrtResetDevice(0));
}
int main()
{
    std::vector<std::thread> threads;
    std::atomic<int> first{0};
    for (int i = 0; i < 4; i++) threads.emplace_back([&] { first += aclInit(nullptr) == 0; });
    for (auto &thread : threads) thread.join();
    threads.clear();
    if (first != 1) return 2;
    for (int i = 0; i < 2; i++) threads.emplace_back(work, i);
    for (auto &thread : threads) thread.join();
    OK(aclFinalize());
    std::printf("%d wrong\n", wrong.load());
    return wrong != 0;
}
"""

# As a plugin would: nothing of ours, nor of Python, in the program's global names.
PRIVATELY = r"""
#include <dlfcn.h>
#include <cstdio>
int main(int, char **arguments)
{
    void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) { puts(dlerror()); return 1; }
    auto start = (int (*)(const char *))dlsym(library, "aclInit");
    auto say = (const char *(*)())dlsym(library, "aclGetRecentErrMsg");
    int status = start(nullptr);
    printf("%d %s\n", status, say());
    return 0;
}
"""

# Compiled once, beside the examples.
PROGRAMS = {"life": LIFE, "threads": THREADS, "privately": PRIVATELY}


@pytest.fixture(scope="module")
def toolchain() -> None:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    try:
        build._libpython()
    except SystemExit as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def prefix(toolchain: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("aclnn")
    build.build(folder)
    return folder


@pytest.fixture(scope="module")
def programs(prefix: Path) -> dict[str, Path]:
    """Every example and every program above, compiled as a user would."""
    sources = {file.stem: file for file in EXAMPLES}
    for name, text in PROGRAMS.items():
        sources[name] = prefix / f"{name}.cpp"
        sources[name].write_text(text)

    def compiled(name: str) -> Path:
        program = prefix / name
        command = [str(COMPILER), "-std=c++11", "-Wall", "-Wextra", "-Werror", str(sources[name]), "-o", str(program)]
        command += [f"-I{prefix}/include", f"-I{ROOT}/examples/aclnn", f"-L{prefix}/lib", f"-Wl,-rpath,{prefix}/lib"]
        subprocess.run([*command, "-lascendcl", "-lnnopbase", "-lopapi", "-pthread", "-ldl"], check=True)
        return program

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(sources, pool.map(compiled, sources), strict=True))


def run(program: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


# ---------------------------------------------------------------------------- programs


@pytest.fixture(scope="module")
def results(programs: dict[str, Path]) -> dict[str, tuple[subprocess.CompletedProcess[str], float]]:
    """Every example, run; each with the seconds of processor time that it took."""

    def ran(file: Path) -> tuple[subprocess.CompletedProcess[str], float]:
        script = "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:]); "
        script += "use = resource.getrusage(resource.RUSAGE_CHILDREN); "
        script += "print(use.ru_utime + use.ru_stime); sys.exit(done.returncode)"
        for _ in range(2):  # the second time its kernels are warm
            done = run(Path(sys.executable), "-c", script, programs[file.stem])
            seconds = float(done.stdout.splitlines()[-1])
            if seconds < 5:
                break
        return done, seconds

    with ThreadPoolExecutor(2) as pool:
        return dict(zip((file.stem for file in EXAMPLES), pool.map(ran, EXAMPLES), strict=True))


def test_every_operator_has_an_example() -> None:
    assert {signature.header.removeprefix("aclnn_")[:-2] for signature in SIGNATURES.values()} <= {
        file.stem for file in EXAMPLES
    }


@pytest.mark.parametrize("name", [file.stem for file in EXAMPLES])
def test_example(results: dict[str, tuple[subprocess.CompletedProcess[str], float]], name: str) -> None:
    done, seconds = results[name]
    assert done.returncode == 0, done.stdout + done.stderr
    assert "expected" in done.stdout or "gradX" in done.stdout
    assert seconds < 5


def test_a_program_written_for_a_device(prefix: Path) -> None:
    """The example of the documents, unmodified, linked as they say."""
    documents = list(SEEDS.glob("002_*.txt"))
    if not documents:
        pytest.skip("the document is not here")
    text = documents[0].read_text()
    source = prefix / "document.cpp"
    source.write_text(text[text.index("#include <iostream>") :])
    command = [str(COMPILER), str(source), f"-I{prefix}/include", f"-L{prefix}/lib", "-o", str(prefix / "document")]
    subprocess.run([*command, "-lascendcl", "-lnnopbase", "-lopapi"], check=True)
    done = run(prefix / "document", LD_LIBRARY_PATH=f"{prefix}/lib")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {int(i): float(x) for i, x in re.findall(r"gradX\[(\d+)\] is: (\S+)", done.stdout)}
    wanted = dict.fromkeys(range(32), 0.0)
    wanted |= {3: 0.06228372, 6: -0.03114188, 10: 0.06228374, 15: -0.03114187}
    wanted |= {17: -0.01868512, 20: 0.03737024, 24: -0.03737023, 31: 0.01868513}
    assert found == pytest.approx(wanted, abs=1e-6)


def test_five_commands(toolchain: None, tmp_path: Path) -> None:
    """The page's own words, in a copy of the project; only what is installed already is not fetched again."""
    page = (ROOT / "docs" / "porting_from_ascend.md").read_text()
    commands = re.search(r"```sh\n(.*?)```", page, re.S).group(1).splitlines()  # type: ignore[union-attr]
    expected = re.search(r"```text\n(.*?)```", page, re.S).group(1)  # type: ignore[union-attr]
    assert len(commands) == 5
    for name in ("src", "examples", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "false"}
    done = None
    for command in commands:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        for folder in (tmp_path / ".venv" / "lib").glob("python*/site-packages"):
            outer = sysconfig.get_path("purelib")  # first: the setuptools of a new environment may be old
            (folder / "outer.pth").write_text(f"import sys; sys.path.insert(0, {outer!r})\n")
    assert done is not None
    assert done.stdout == expected
    assert "site-packages" in str(next((tmp_path / ".venv" / "lib").glob("python*/site-packages/moeroute/__init__.py")))


def test_calls_before_and_after(programs: dict[str, Path]) -> None:
    done = run(programs["life"])
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
    assert run(programs["life"], "stop").returncode == 0, "a program without aclFinalize"


def test_two_threads_with_a_stream_each(programs: dict[str, Path]) -> None:
    done = run(programs["threads"])
    assert (done.returncode, done.stdout) == (0, "0 wrong\n"), done.stderr


def test_a_library_loaded_privately(programs: dict[str, Path], prefix: Path) -> None:
    done = run(programs["privately"], prefix / "lib" / "libascendcl.so")
    assert done.stdout == "0 \n", done.stderr


def test_the_environment_can_be_chosen(programs: dict[str, Path], prefix: Path) -> None:
    library = prefix / "lib" / "libascendcl.so"
    assert run(programs["privately"], library, MOEROUTE_PYTHON=sys.executable).stdout == "0 \n"
    done = run(programs["privately"], library, MOEROUTE_PYTHON="/nowhere/python")
    assert done.stdout.startswith("500000 moeroute.aclnn: the Python /nowhere/python cannot be run")
    bare = Path(sys.base_prefix, "bin", f"python{sysconfig.get_python_version()}")
    if bare.exists() and subprocess.run([bare, "-c", "import moeroute"], capture_output=True, check=False).returncode:
        done = run(programs["privately"], library, MOEROUTE_PYTHON=str(bare))
        assert done.stdout.startswith(f"500000 moeroute.aclnn: {bare} must be a Python "), done.stdout
        assert "moeroute" in done.stderr


# ---------------------------------------------------------------------------- through ctypes


class Library:
    """The three libraries in this process; `call` returns the status, `fails` looks at the message too."""

    def __init__(self, prefix: Path) -> None:
        self.functions: dict[str, Any] = {}
        for file, group in prototypes.libraries().items():
            loaded = ctypes.CDLL(str(prefix / "lib" / file))
            for prototype in group:
                function = getattr(loaded, prototype.name)
                if prototype.name == "aclGetRecentErrMsg":
                    function.restype = ctypes.c_char_p
                elif not prototype.returns_status:
                    function.restype = c_void_p
                kinds = {"int64_t": c_int64, "double": c_double, "uint64_t": c_uint64, "size_t": c_uint64}
                function.argtypes = [
                    c_void_p
                    if kind.endswith("*") or kind in ("aclrtStream", "aclrtContext")
                    else ctypes.c_bool
                    if kind == "bool"
                    else kinds.get(kind, c_int32)
                    for kind, _ in prototype.parameters
                ]
                self.functions[prototype.name] = function

    def call(self, name: str, *arguments: Any) -> Any:
        return self.functions[name](*arguments)

    def ok(self, name: str, *arguments: Any) -> None:
        status = self.call(name, *arguments)
        assert status == 0, f"{name}: {status}: {self.message()}"

    def fails(self, status: int, words: str, name: str, *arguments: Any) -> None:
        assert self.call(name, *arguments) == status, self.message()
        message = self.message()
        assert message.startswith(f"{name}: ")
        assert words in message
        assert self.message() == ""

    def message(self) -> str:
        return str(self.call("aclGetRecentErrMsg").decode())

    def memory(self, data: np.ndarray[Any, Any]) -> int:
        address = c_void_p()
        self.ok("aclrtMalloc", byref(address), data.nbytes, 0)
        self.ok("aclrtMemcpy", address, data.nbytes, data.ctypes.data, data.nbytes, 1)
        assert address.value is not None
        return address.value

    def read(self, address: int, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        found = np.empty_like(like)
        self.ok("aclrtMemcpy", found.ctypes.data, found.nbytes, address, found.nbytes, 2)
        return found

    def tensor(
        self,
        shape: tuple[int, ...],
        address: int | None,
        dtype: int = 0,
        *,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        form: int = 2,
        storage: tuple[int, ...] | None = None,
    ) -> int | None:
        def dims(values: tuple[int, ...]) -> Any:
            return (c_int64 * max(1, len(values)))(*values)

        storage = shape if storage is None else storage
        given = None if strides is None else dims(strides)
        made = self.call(
            "aclCreateTensor",
            dims(shape),
            len(shape),
            dtype,
            given,
            offset,
            form,
            dims(storage),
            len(storage),
            address,
        )
        return made


@pytest.fixture(scope="module")
def loaded(prefix: Path) -> Library:
    return Library(prefix)


@pytest.fixture
def acl(loaded: Library) -> Iterator[Library]:
    loaded.ok("aclInit", None)
    loaded.ok("aclrtSetDevice", 0)
    yield loaded
    loaded.ok("aclFinalize")


def test_runtime_refusals(acl: Library) -> None:
    acl.fails(100002, "another call", "aclInit", None)
    acl.fails(107001, "deviceId must be 0, the one device; got 3", "aclrtSetDevice", 3)
    acl.fails(100000, "deviceId must not be null", "aclrtGetDevice", None)
    acl.fails(100000, "count must not be null", "aclrtGetDeviceCount", None)
    acl.fails(100000, "stream must not be null", "aclrtCreateStream", None)
    acl.fails(100000, "stream must not be null", "aclrtDestroyStream", None)
    acl.fails(107003, "stream must be a live aclrtStream; got 0x7, destroyed", "aclrtSynchronizeStream", 7)
    acl.fails(107000, "opt must be", "aclrtCtxSetSysParamOpt", 9, 1)
    acl.ok("aclrtCtxSetSysParamOpt", 0, 1)
    acl.ok("aclrtSynchronizeDevice")
    acl.ok("aclrtSynchronizeStream", None)
    count = c_uint32()
    acl.ok("aclrtGetDeviceCount", byref(count))
    assert count.value == 1
    stream, context = c_void_p(), c_void_p()
    acl.ok("aclrtCreateStream", byref(stream))
    acl.ok("aclrtDestroyStream", stream)
    acl.fails(107000, "destroyed", "aclrtDestroyStream", stream)
    acl.ok("aclrtCreateContext", byref(context), 0)
    acl.ok("aclrtSetCurrentContext", context)
    acl.fails(107000, "got an aclrtContext", "aclrtDestroyStream", context)
    acl.ok("aclrtDestroyContext", context)
    acl.fails(107000, "destroyed", "aclrtSetCurrentContext", context)
    acl.fails(107000, "destroyed", "aclrtDestroyContext", context)


def test_memory_refusals(acl: Library) -> None:
    address = c_void_p()
    acl.fails(100000, "size must be at least 1", "aclrtMalloc", byref(address), 0, 0)
    acl.fails(100000, "devPtr must not be null", "aclrtMalloc", None, 8, 0)
    for size in (1 << 60, (1 << 64) - 1):
        acl.fails(207001, "size must be what the machine has", "aclrtMalloc", byref(address), size, 0)
    data = np.arange(16, dtype=np.float32)
    block, host = acl.memory(data), data.ctypes.data
    acl.fails(107000, "count must be at most destMax = 64; got 65", "aclrtMemcpy", block, 64, host, 65, 1)
    acl.fails(107000, "dst must be 128 bytes of device memory", "aclrtMemcpy", block, 128, host, 128, 1)
    acl.fails(107000, "with 60 bytes behind it", "aclrtMemcpy", host, 64, block + 4, 64, 2)
    acl.fails(107000, "freed or never allocated", "aclrtMemcpy", host, 64, host, 64, 1)
    acl.fails(100000, "src must not be null", "aclrtMemcpy", block, 64, None, 64, 1)
    acl.fails(100000, "dst must not be null", "aclrtMemcpyAsync", None, 64, host, 64, 1, None)
    acl.fails(107003, "stream must be", "aclrtMemcpyAsync", block, 64, host, 64, 1, 5)
    acl.fails(107000, "kind must be", "aclrtMemcpy", block, 64, host, 64, 9)
    acl.fails(107000, "count must be at most maxCount = 3; got 4", "aclrtMemset", block, 3, 0, 4)
    acl.fails(107000, "devPtr must be 80 bytes", "aclrtMemset", block, 80, 0, 80)
    acl.ok("aclrtMemset", block + 4, 60, 0, 8)
    data[1:3] = 0
    np.testing.assert_array_equal(acl.read(block, data), data)
    acl.fails(107000, "start of an allocation", "aclrtFree", block + 4)
    acl.ok("aclrtFree", block)
    acl.fails(107000, "freed or never allocated", "aclrtFree", block)
    acl.fails(100000, "devPtr must not be null", "aclrtFree", None)
    acl.fails(107000, "src must be", "aclrtMemcpy", host, 64, block, 64, 2)


def test_descriptions_and_their_refusals(acl: Library) -> None:
    block = acl.memory(np.arange(16, dtype=np.float32))
    assert acl.tensor((4, 4), block, 99) is None
    assert "dataType must be one" in acl.message()
    assert acl.tensor((4, -4), block) is None
    assert "viewDims must not be negative" in acl.message()
    assert acl.tensor((4, 4), block, strides=(-4, 1)) is None
    assert "stride must not be negative" in acl.message()
    assert acl.tensor((4, 4), block, offset=1) is None
    assert "inside storageDims = [4, 4]; got its last element at 16" in acl.message()
    assert acl.tensor((1,) * 26, block) is None
    assert "at most 25" in acl.message()
    assert acl.tensor((1 << 40, 1 << 40), None) is None
    assert "must fit into memory" in acl.message()
    assert acl.call("aclCreateTensor", None, 2, 0, None, 0, 2, None, 2, block) is None
    assert "viewDims must not be null" in acl.message()
    assert acl.call("aclCreateIntArray", None, 2) is None
    assert acl.call("aclCreateScalar", None, 0) is None
    tensor = acl.tensor((4, 4), block)
    array = acl.call("aclCreateIntArray", (c_int64 * 2)(1, 2), 2)
    flags = acl.call("aclCreateBoolArray", (ctypes.c_bool * 2)(True, False), 2)
    scalar = acl.call("aclCreateScalar", byref(c_double(2.0)), 11)
    acl.fails(161002, "array must be a live aclIntArray; got an aclBoolArray", "aclDestroyIntArray", flags)
    acl.fails(161002, "got an aclTensor", "aclDestroyScalar", tensor)
    acl.fails(161002, "never created", "aclDestroyTensor", block)
    for name, handle in (("Tensor", tensor), ("IntArray", array), ("BoolArray", flags), ("Scalar", scalar)):
        acl.ok(f"aclDestroy{name}", handle)
        acl.fails(161002, "destroyed", f"aclDestroy{name}", handle)
        acl.fails(161001, "must not be null", f"aclDestroy{name}", None)
    acl.fails(161001, "executor must not be null", "aclDestroyAclOpExecutor", None)
    acl.fails(161001, "executor must not be null", "aclSetAclOpExecutorRepeatable", None)
    acl.fails(161002, "never created", "aclSetAclOpExecutorRepeatable", 12)


class Permutation:
    """aclnnMoeTokenPermuteGrad on small tensors: rows 2 + 0 and 1 + 3."""

    name = "aclnnMoeTokenPermuteGrad"

    def __init__(self, acl: Library) -> None:
        self.acl = acl
        self.rows = acl.memory(np.arange(1, 9, dtype=np.float32))
        self.indices = acl.memory(np.array([2, 0, 1, 3], dtype=np.int32))
        self.sums = acl.memory(np.full(4, -1, dtype=np.float32))
        self.grad, self.out = acl.tensor((4, 2), self.rows), acl.tensor((2, 2), self.sums)
        self.sorted = acl.tensor((4,), self.indices, 3)

    def first(self, grad: Any = ..., out: Any = ..., topk: int = 2) -> tuple[int, c_void_p]:
        size, executor = c_uint64(77), c_void_p()
        grad = self.grad if grad is ... else grad
        out = self.out if out is ... else out
        status = self.acl.call(
            f"{self.name}GetWorkspaceSize", grad, self.sorted, topk, False, out, byref(size), byref(executor)
        )
        assert status != 0 or size.value == 0
        return status, executor

    def result(self) -> list[float]:
        return self.acl.read(self.sums, np.empty(4, np.float32)).tolist()


SUMS = [6.0, 8.0, 10.0, 12.0]


def test_both_phases(acl: Library) -> None:
    case = Permutation(acl)
    status, executor = case.first()
    assert status == 0
    assert case.result() == [-1.0] * 4, "the first phase writes nothing"
    acl.ok(case.name, None, 0, executor, None)
    assert case.result() == SUMS
    acl.fails(161002, "executor must be a live aclOpExecutor", case.name, None, 0, executor, None)
    acl.fails(161001, "executor must not be null", case.name, None, 0, None, None)
    acl.fails(161002, "destroyed", "aclDestroyAclOpExecutor", executor)
    acl.fails(
        161001, "workspaceSize", f"{case.name}GetWorkspaceSize", case.grad, case.sorted, 2, False, case.out, None, None
    )


def test_an_executor_that_repeats(acl: Library) -> None:
    case = Permutation(acl)
    executor = case.first()[1]
    acl.ok("aclSetAclOpExecutorRepeatable", executor)
    for _ in range(3):
        acl.ok("aclrtMemset", case.sums, 16, 0, 16)
        acl.ok(case.name, None, 0, executor, None)
        assert case.result() == SUMS
    acl.ok("aclDestroyAclOpExecutor", executor)
    acl.fails(161002, "destroyed", case.name, None, 0, executor, None)


def test_refusals_of_an_operator(acl: Library) -> None:
    case = Permutation(acl)
    assert case.first(grad=None)[0] == 161001
    assert "permutedOutputGrad" in acl.message()
    for wrong in (12345, case.rows, case.sorted):
        assert case.first(grad=wrong)[0] == 161002
    assert case.first(grad=acl.tensor((4, 2), case.rows, form=29))[0] == 161002
    assert "format" in acl.message()
    assert case.first(grad=acl.tensor((4, 2), None))[0] == 161001
    assert "null pointer" in acl.message()
    assert case.first(grad=acl.tensor((4, 2), case.sums))[0] == 161002
    assert "must be 32 bytes of memory from aclrtMalloc" in acl.message()
    assert case.first(grad=acl.tensor((4, 2), case.rows + 2))[0] == 161002
    assert case.first(grad=acl.tensor((4, 2), case.rows, 3))[0] == 161002, "the dtype comes before the memory"
    assert case.first(topk=0)[0] == 161002
    array = acl.call("aclCreateIntArray", (c_int64 * 1)(1), 1)
    assert case.first(grad=array)[0] == 161002
    assert "permutedOutputGrad must be a live aclTensor; got an aclIntArray" in acl.message()
    executor = case.first()[1]
    acl.fails(161002, "", "aclnnMoeTokenPermute", None, 0, executor, None)
    acl.fails(361001, "stream must be", case.name, None, 0, executor, 3)
    assert case.result() == [-1.0] * 4


def test_memory_freed_between_the_phases(acl: Library) -> None:
    case = Permutation(acl)
    executor = case.first()[1]
    acl.ok("aclDestroyTensor", case.grad)  # a description may go
    acl.ok("aclrtFree", case.rows)
    acl.fails(161002, "must live until the operator has run", case.name, None, 0, executor, None)
    assert case.first()[0] == 161002
    assert "destroyed" in acl.message()


def test_workspace(acl: Library) -> None:
    """aclnnMoeGatingTopKBackward asks for 16 MiB."""
    name = "aclnnMoeGatingTopKBackward"
    scores = acl.tensor((1, 2), acl.memory(np.array([0.5, 0.5], np.float32)))
    grad = acl.tensor((1, 1), acl.memory(np.ones(1, np.float32)))
    ids = acl.tensor((1, 1), acl.memory(np.zeros(1, np.int32)), 3)
    result = acl.memory(np.full(2, -1, np.float32))
    out = acl.tensor((1, 2), result)
    size, executor, workspace = c_uint64(), c_void_p(), c_void_p()
    acl.ok(f"{name}GetWorkspaceSize", scores, grad, ids, 0, 1, 1.0, 1e-20, out, byref(size), byref(executor))
    assert size.value == 16 << 20
    acl.ok("aclrtMalloc", byref(workspace), size, 0)
    acl.fails(161001, "workspace must", name, None, size.value, executor, None)
    acl.fails(161002, "workspaceSize must", name, workspace, 5, executor, None)
    acl.fails(161002, "workspace must be", name, result, size.value, executor, None)
    assert acl.read(result, np.empty(2, np.float32)).tolist() == [-1, -1]
    acl.ok(name, workspace, size.value, executor, None)
    assert acl.read(result, np.empty(2, np.float32)).tolist() == [0, 0]
    acl.ok("aclrtMemset", result, 8, 1, 8)
    acl.ok(f"{name}GetWorkspaceSize", scores, grad, ids, 0, 1, 1.0, 1e-20, out, byref(size), byref(executor))
    acl.ok(name, None, 0, executor, None)  # none at all
    assert acl.read(result, np.empty(2, np.float32)).tolist() == [0, 0]


def test_strides_and_offset(acl: Library) -> None:
    """Every second column of a wider matrix, from its second row on, in and out; the rest stays."""
    case = Permutation(acl)
    wide = np.arange(40, dtype=np.float32).reshape(5, 8)
    target = np.full((3, 6), -1, np.float32)
    source, sink = acl.memory(wide), acl.memory(target)
    grad = acl.tensor((4, 2), source, strides=(8, 2), offset=9, storage=(5, 8))
    out = acl.tensor((2, 2), sink, strides=(6, 3), offset=7, storage=(3, 6))
    status, executor = case.first(grad, out)
    assert status == 0, acl.message()
    acl.ok(case.name, None, 0, executor, None)
    rows = wide[1:, 1:4:2]
    target[1:, 1:5:3] = [rows[2] + rows[0], rows[1] + rows[3]]
    np.testing.assert_array_equal(acl.read(sink, target), target)
    np.testing.assert_array_equal(acl.read(source, wide), wide)


def test_operators_work_in_the_memory_that_c_gave(acl: Library) -> None:
    from moeroute.aclnn.library import glue

    seen: list[int] = []
    case = Permutation(acl)
    for handle in (case.grad, case.sorted, case.out):
        tensor, problem = glue._state.objects[handle].look()  # type: ignore[index]
        assert problem is None
        seen.append(tensor.data_ptr())
    assert seen == [case.rows, case.indices, case.sums]


def test_threads_of_python(acl: Library) -> None:
    """Messages belong to the thread; calls from many at once get right sums."""
    wrong: list[str] = []

    def work() -> None:
        case = Permutation(acl)
        for _ in range(50):
            status, executor = case.first()
            if status or acl.call(case.name, None, 0, executor, None) or case.result() != SUMS:
                wrong.append(acl.message())
            acl.call("aclrtFree", None)
            if "devPtr" not in acl.message():
                wrong.append("a message lost")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_nothing_survives_the_end(loaded: Library) -> None:
    loaded.fails(100001, "aclInit must come first", "aclrtSetDevice", 0)
    for _ in range(2):
        loaded.ok("aclInit", None)
        loaded.ok("aclrtSetDevice", 0)
        case = Permutation(loaded)
        executor = case.first()[1]
        loaded.ok("aclrtResetDevice", 0)
        loaded.fails(107002, "aclrtSetDevice must come first", "aclrtFree", case.rows)
        loaded.fails(161002, "must live", case.name, None, 0, executor, None)
        loaded.ok("aclFinalize")
        assert case.first()[0] == 361001
        assert "after aclFinalize" in loaded.message()
        assert loaded.tensor((2,), None) is None
        loaded.fails(361001, "after aclFinalize", "aclDestroyTensor", case.grad)
        loaded.fails(100037, "without it", "aclFinalize")


# ---------------------------------------------------------------------------- building


def test_headers_are_c_and_cpp(prefix: Path, tmp_path: Path) -> None:
    """Each alone, in either language, without a warning; the enum values are CANN's."""
    values = "ACL_FLOAT 0 ACL_FLOAT16 1 ACL_INT8 2 ACL_INT32 3 ACL_UINT8 4 ACL_INT64 9 ACL_BOOL 12 ACL_BF16 27 "
    values += "ACL_FORMAT_NCHW 0 ACL_FORMAT_ND 2 ACL_FORMAT_FRACTAL_NZ 29 ACL_MEM_MALLOC_HUGE_FIRST 0 "
    values += "ACL_MEMCPY_HOST_TO_HOST 0 ACL_MEMCPY_HOST_TO_DEVICE 1 ACL_MEMCPY_DEVICE_TO_HOST 2 "
    values += "ACL_MEMCPY_DEVICE_TO_DEVICE 3"
    words = values.split()
    checks = "".join(
        f"char is_{name}[{name} == {value} ? 1 : -1];\n" for name, value in zip(words[::2], words[1::2], strict=True)
    )
    names = list(prototypes.headers())
    assert "aclnnop/aclnn_moe_gating_top_kbackward.h" in names
    for suffix, standard in ((".c", "c99"), (".cpp", "c++11")):
        source = tmp_path / f"all{suffix}"
        source.write_text("".join(f'#include "{name}"\n' for name in reversed(names)) + checks)
        command = [str(COMPILER), "-x", "c" if suffix == ".c" else "c++", f"-std={standard}", "-fsyntax-only"]
        subprocess.run(
            [*command, "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{prefix}/include", str(source)], check=True
        )


def test_prototypes_are_read() -> None:
    (found,) = prototypes.parse("aclError aclrtMemcpy(void *dst, size_t destMax,\n const void *src);")
    assert found.parameters == (("void *", "dst"), ("size_t", "destMax"), ("const void *", "src"))
    assert found.in_c == "aclError aclrtMemcpy(void *dst, size_t destMax, const void *src)"
    assert found.in_python == "int moeroute_aclrtMemcpy(uintptr_t dst, size_t destMax, uintptr_t src)"
    text = prototypes.operator_text("MoeGatingTopKBackward")
    assert "const aclTensor *out,\n    uint64_t *workspaceSize,\n    aclOpExecutor **executor);" in text


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(SystemExit, match="needs a C compiler; CC names /nowhere/cc"):
        build.build(tmp_path)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match="needs a C compiler"):
        build.build(tmp_path)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cffi", None)
    with pytest.raises(SystemExit, match=r"needs cffi: pip install '\.\[aclnn\]' in a clone"):
        build.build(tmp_path)
    monkeypatch.undo()
    monkeypatch.setenv("CC", sys.executable)  # never called
    monkeypatch.setattr(sys, "base_prefix", "/nowhere")
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "/nowhere/lib" if name == "LIBDIR" else None)
    with pytest.raises(SystemExit, match="needs a Python with a shared library: libpython3"):
        build.build(tmp_path)
    assert list(tmp_path.iterdir()) == []
