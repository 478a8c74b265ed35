"""The program that the C library lives in keeps what is its own: forks, signals, environment, its very life."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moeroute.aclnn.library import build, prototypes

Compiled = Callable[[str, str], Path]
Run = Callable[..., subprocess.CompletedProcess[str]]

# Rows that several threads move: token i is a row of i, and its two slots are i and 4096 + i.
LARGE = r"""
#include <csignal>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include "aclnnop/aclnn_moe_token_permute.h"
#include "kit.hpp"
static const int64_t tokens = 4096, width = 512;
static bool right(aclrtStream stream)
{
    struct { aclrtStream stream; } device = {stream};
    std::vector<float> values;
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < tokens; i++) {
        values.insert(values.end(), width, float(i));
        ids.insert(ids.end(), {0, 1});
    }
    Tensor<float> x({tokens, width}, values), rows({2 * tokens, width});
    Tensor<int32_t> experts({tokens, 2}, ids), sorted({2 * tokens});
    RUN(MoeTokenPermute, x, experts, 2 * tokens, false, rows, sorted);
    auto found = rows.values();
    for (int64_t i = 0; i < 2 * tokens; i++)
        if (found[i * width] != float(i % tokens) || found[(i + 1) * width - 1] != float(i % tokens)) return false;
    return true;
}
// What the child answers; 99 where it died, and 98 where it hangs.
template <typename Child>
static int forked(Child child)
{
    pid_t number = fork();
    if (number == 0) {
        alarm(60);
        _exit(child());
    }
    int status = 0;
    waitpid(number, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status) == SIGALRM ? 98 : 99;
}
"""

FORK = (
    LARGE
    + r"""
int main()
{
    if (forked([] { Device device; return right(device.stream) ? 0 : 1; })) return 1;  // it starts Python itself
    Device device;
    if (!right(device.stream)) return 2;
    int answer = forked([&] {
        if (!right(device.stream) || !right(device.stream)) return 1;
        bool other = false;
        std::thread([&] { other = right(device.stream); }).join();
        if (!other) return 2;
        return forked([&] { return right(device.stream) ? 0 : 3; });
    });
    if (answer) { std::printf("the child: %d\n", answer); return 3; }
    if (!right(device.stream)) return 4;
    puts("fine");
    return 0;
}
"""
)

# Children of a process whose other threads are inside the library, which some of them are starting.
FORK_AMONG_THREADS = (
    LARGE
    + r"""
#include <atomic>
int main()
{
    std::atomic<int> wrong{0}, stop{0};
    std::thread starting([] { aclInit(nullptr); });
    int early = forked([] { return aclInit(nullptr) == 0 || aclInit(nullptr) == 100002 ? 0 : 1; });
    starting.join();
    if (early) { std::printf("the early child: %d\n", early); return 1; }
    struct { aclrtStream stream = nullptr; } device;
    OK(aclrtSetDevice(0));
    std::vector<std::thread> busy;
    for (int i = 0; i < 2; i++) busy.emplace_back([&] { while (!stop) wrong += !right(device.stream); });
    for (int i = 0; i < 5; i++) {
        int answer = forked([&] { return right(device.stream) ? 0 : 1; });
        if (answer) { std::printf("child %d: %d\n", i, answer); wrong++; }
    }
    stop = 1;
    for (auto &thread : busy) thread.join();
    if (wrong) return 2;
    puts("fine");
    return 0;
}
"""
)

# `own`: the program has a handler of its own from the start; `late`: it sets one after the first operator.
INTERRUPT = (
    LARGE
    + r"""
static volatile sig_atomic_t seen = 0;
static void handler(int) { seen = seen + 1; }
int main(int, char **arguments)
{
    std::string mode = arguments[1];
    struct sigaction before[32], action;  // a shell's nohup leaves signal 1 ignored
    for (int number = 1; number < 32; number++) sigaction(number, nullptr, &before[number]);
    if (mode == "own") std::signal(SIGINT, handler);
    if (mode == "ignored") std::signal(SIGINT, SIG_IGN);
    if (mode == "starting") { puts("ready"); std::fflush(stdout); }
    Device device;
    if (!right(device.stream)) return 1;
    for (int number = 1; number < 32; number++) {
        if (sigaction(number, nullptr, &action) || number == SIGINT) continue;
        if (action.sa_handler != before[number].sa_handler) { std::printf("a handler of signal %d\n", number); return 2; }
    }
    if (mode == "late") std::signal(SIGINT, handler);
    puts("ready");
    std::fflush(stdout);
    for (int i = 0; i < 100 && !seen && mode != "ignored"; i++) usleep(100000);
    if (mode == "ignored") sleep(1);
    if (!right(device.stream) || !right(device.stream)) return 3;
    std::printf("seen %d\n", int(seen));
    return 0;
}
"""
)

# As a plugin would: nothing of ours in the program's global names.
PRIVATELY = r"""
#include <dlfcn.h>
#include <cstdio>
#include <sys/auxv.h>
#include <unistd.h>
int main(int count, char **arguments)
{
    void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) { puts(dlerror()); return 1; }
    auto start = (int (*)(const char *))dlsym(library, "aclInit");
    auto say = (const char *(*)())dlsym(library, "aclGetRecentErrMsg");
    if (count > 2 && chdir("/")) return 2;
    int status = start(nullptr);
    printf("%lu %d %s\n", getauxval(AT_SECURE), status, say());
    status = start(nullptr);
    printf("%d %s\n", status, say());
    return 0;
}
"""


@pytest.fixture(scope="module")
def privately(compiled: Compiled) -> Path:
    return compiled("privately", PRIVATELY)


@pytest.fixture(scope="module")
def interrupt(compiled: Compiled) -> Path:
    return compiled("interrupt", INTERRUPT)


def test_a_forked_child_computes(compiled: Compiled, run: Run) -> None:
    done = run(compiled("fork", FORK), OMP_NUM_THREADS="4")
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_a_fork_beside_busy_threads(compiled: Compiled, run: Run) -> None:
    done = run(compiled("fork_among_threads", FORK_AMONG_THREADS), OMP_NUM_THREADS="2")
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def heeding() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    "mode, status, output",
    [
        ("default", -signal.SIGINT, ""),
        ("starting", -signal.SIGINT, ""),
        ("own", 0, "seen 1\n"),
        ("late", 0, "seen 1\n"),
        ("ignored", 0, "seen 0\n"),
    ],
)
def test_ctrl_c_is_the_programs(interrupt: Path, mode: str, status: int, output: str) -> None:
    # A shell's background jobs, and with them this process, may ignore the signal: a program inherits that.
    with subprocess.Popen([interrupt, mode], stdout=subprocess.PIPE, text=True, preexec_fn=heeding) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGINT)
        found = running.stdout.read()
    assert (running.returncode, found) == (status, output)


def test_the_environment_of_the_program_is_not_ours(privately: Path, prefix: Path, run: Run, tmp_path: Path) -> None:
    """What is meant for another Python: a home that is none, a path with a foreign numpy, a start-up file."""
    (tmp_path / "numpy.py").write_text("raise ImportError('a foreign numpy')")
    (tmp_path / "sitecustomize.py").write_text("print('a foreign start-up file')")
    environment = {"PYTHONHOME": "/nowhere", "PYTHONPATH": str(tmp_path), "PYTHONSTARTUP": "/nowhere"}
    environment |= {"PYTHONPLATLIBDIR": "nowhere", "PYTHONVERBOSE": "1", "PYTHONWARNINGS": "error"}
    done = run(privately, prefix / "lib" / "libascendcl.so", **environment)
    assert done.stdout.startswith("0 0 \n100002 "), done.stdout + done.stderr
    assert done.stderr == ""


def test_a_privileged_program_takes_no_python_from_outside(privately: Path, prefix: Path, run: Run) -> None:
    """A program with rights that its user has not ignores MOEROUTE_PYTHON, as the loader ignores LD_PRELOAD."""
    library = prefix / "lib" / "libascendcl.so"
    assert "0 500000 moeroute.aclnn: the Python /nowhere" in run(privately, library, MOEROUTE_PYTHON="/nowhere").stdout
    program = shutil.copy(privately, prefix / "privileged")
    groups = [group for group in (65534, *os.getgroups()) if group != os.getgid()]
    for group in groups:
        try:
            os.chown(program, -1, group)
            os.chmod(program, 0o2755)
        except PermissionError:
            continue
        done = run(program, library, MOEROUTE_PYTHON="/nowhere")
        if done.stdout.startswith("1 "):
            assert done.stdout.startswith("1 0 \n"), done.stdout + done.stderr
            return
    pytest.skip("no program can be given a group's rights here")


def test_without_libpython_every_call_fails(privately: Path, run: Run, tmp_path: Path) -> None:
    """Linked to a libpython that is gone when the program runs, as after an upgrade."""
    gone, source = tmp_path / "libpython_gone.so.1", tmp_path / "gone.c"
    source.write_text("void Py_InitializeFromConfig(void) {}")
    command = [*build._compiler(), "-shared", "-fPIC", str(source), f"-Wl,-soname,{gone.name}", "-o", str(gone)]
    subprocess.run(command, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_libpython", lambda: gone)
        build.build(tmp_path / "prefix")
    gone.unlink()
    done = run(privately, tmp_path / "prefix" / "lib" / "libascendcl.so")
    said = "500000 moeroute.aclnn: Python does not load, build the library again: libpython_gone.so.1: cannot open"
    assert done.returncode == 0
    assert done.stdout.startswith(f"0 {said}"), done.stdout + done.stderr
    assert f"\n{said}" in done.stdout
    assert done.stderr.count("Python does not load") == 1


def test_a_library_of_an_older_moeroute(privately: Path, run: Run, tmp_path: Path) -> None:
    every = prototypes.libraries()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prototypes, "libraries", lambda: {**every, "libopapi.so": every["libopapi.so"][2:]})
        build.build(tmp_path)
    done = run(privately, tmp_path / "lib" / "libascendcl.so")
    assert done.stdout.startswith("0 500000 moeroute.aclnn: the library must belong to the moeroute of "), done.stderr
    assert every["libopapi.so"][0].name in done.stderr


def test_a_program_that_goes_elsewhere(privately: Path, prefix: Path, run: Run) -> None:
    """Loaded by a relative path; the rest of the library is found from another folder, too."""
    done = subprocess.run(
        [privately, "lib/libascendcl.so", "away"], cwd=prefix, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.startswith("0 0 \n"), done.stdout + done.stderr


def test_no_library_but_one_needs_python(prefix: Path) -> None:
    tool = shutil.which("readelf")
    if tool is None:
        pytest.skip("no readelf")
    for name in (*prototypes.libraries(), build.PYTHON_LIBRARY):
        needed = subprocess.run([tool, "-d", prefix / "lib" / name], capture_output=True, text=True, check=True).stdout
        assert ("libpython" in needed) == (name == build.PYTHON_LIBRARY)
