"""The C library in C++ programs, how it is built, and the headers."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aclnn_calls import GOOD, workspace_of
from aclnn_calls import run as run_operator
from moeroute import cli, dispatch
from moeroute.aclnn.library import build, prototypes
from moeroute.aclnn.signatures import SIGNATURES

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "aclnn").glob("*.cpp"))
Run = Callable[..., subprocess.CompletedProcess[str]]
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
def programs(compiled: Callable[[str, str], Path]) -> dict[str, Path]:
    """Every example and every program above."""
    sources = {**{file.stem: file.read_text() for file in EXAMPLES}, **PROGRAMS}
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(sources, pool.map(compiled, sources, sources.values()), strict=True))


# ---------------------------------------------------------------------------- programs


@pytest.fixture(scope="module")
def results(programs: dict[str, Path], run: Run) -> dict[str, tuple[subprocess.CompletedProcess[str], float]]:
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


def test_a_program_written_for_a_device(prefix: Path, run: Run) -> None:
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


def test_five_commands(prefix: Path, tmp_path: Path) -> None:
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


def test_calls_before_and_after(programs: dict[str, Path], run: Run) -> None:
    done = run(programs["life"])
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
    assert run(programs["life"], "stop").returncode == 0, "a program without aclFinalize"


def test_two_threads_with_a_stream_each(programs: dict[str, Path], run: Run) -> None:
    done = run(programs["threads"])
    assert (done.returncode, done.stdout) == (0, "0 wrong\n"), done.stderr


def test_a_library_loaded_privately(programs: dict[str, Path], prefix: Path, run: Run) -> None:
    done = run(programs["privately"], prefix / "lib" / "libascendcl.so")
    assert done.stdout == "0 \n", done.stderr


def test_the_environment_can_be_chosen(programs: dict[str, Path], prefix: Path, run: Run) -> None:
    library = prefix / "lib" / "libascendcl.so"
    assert run(programs["privately"], library, MOEROUTE_PYTHON=sys.executable).stdout == "0 \n"
    done = run(programs["privately"], library, MOEROUTE_PYTHON="/nowhere/python")
    assert done.stdout.startswith("500000 moeroute.aclnn: the Python /nowhere/python cannot be run")
    bare = Path(sys.base_prefix, "bin", f"python{sysconfig.get_python_version()}")
    if bare.exists() and subprocess.run([bare, "-c", "import moeroute"], capture_output=True, check=False).returncode:
        done = run(programs["privately"], library, MOEROUTE_PYTHON=str(bare))
        assert done.stdout.startswith(f"500000 moeroute.aclnn: {bare} must be a Python "), done.stdout
        assert "moeroute" in done.stderr


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


# ---------------------------------------------------------------------------- aclnn build --warm


def test_every_kernel_is_warmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the valid calls of all operators need, and no room of kernels that none of them enters."""
    if (reason := dispatch.unavailable("cpu")) is not None:
        pytest.skip(reason)
    from moeroute.ops.numba_kit.launch import Kernel

    warmed: list[Kernel] = []
    monkeypatch.setattr(Kernel, "warm", lambda kernel: warmed.append(kernel))
    assert cli.main(["aclnn", "build", "--prefix", str(tmp_path), "--warm"]) == 0
    printed = capsys.readouterr().out
    assert f"\nwarm: {len(warmed)} kernels compiled or loaded in " in printed
    assert "\nkernel cache: " in printed
    assert (tmp_path / "lib" / "libopapi.so").exists()

    needed: set[Kernel] = set()
    compile_anew = Kernel._compile

    def noted(kernel: Kernel, key: object) -> None:
        needed.add(kernel)
        compile_anew(kernel, key)

    monkeypatch.setattr(Kernel, "_compile", noted)
    for kernel in Kernel.every:  # as in a new process
        for key in list(kernel.serial):
            monkeypatch.delitem(kernel.serial, key)
    for name, arguments in GOOD.items():
        run_operator(name, *arguments().values(), workspace=workspace_of(name))
    assert needed <= set(warmed)
    assert {kernel.room for kernel in needed} == {kernel.room for kernel in warmed}


def test_warm_without_cpu_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "unavailable", {"cpu": "the package numba is not installed"}.get)
    monkeypatch.setattr(build, "build", lambda prefix: [])
    with pytest.raises(SystemExit, match=r"--warm: there are no CPU kernels \(the package numba is not installed\)"):
        cli.main(["aclnn", "build", "--prefix", str(tmp_path), "--warm"])
