"""What `moeroute aclnn build` writes stands where a toolkit would: CMake projects, scripts, secure C functions, links."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moeroute.aclnn.library import build

Compiled = Callable[[str, str], Path]
Run = Callable[..., subprocess.CompletedProcess[str]]
EXAMPLES = Path(__file__).parents[2] / "examples" / "aclnn"

# The shape of the projects that come with CANN's operators: everything below one folder, lib64 named outright.
CMAKE = """
cmake_minimum_required(VERSION 3.14)
project(ACLNN_EXAMPLE)
add_compile_options(-std=c++11 -Wall -Werror)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "./bin")
add_executable(example example.cpp)
if(NOT "$ENV{ASCEND_HOME_PATH}" STREQUAL "")
    set(ASCEND_PATH $ENV{ASCEND_HOME_PATH})
else()
    message(FATAL_ERROR "no toolkit")
endif()
set(INCLUDE_BASE_DIR "${ASCEND_PATH}/include")
include_directories(${INCLUDE_BASE_DIR} ${INCLUDE_BASE_DIR}/aclnn KIT)
target_link_libraries(example PRIVATE
    ${ASCEND_PATH}/lib64/libascendcl.so
    ${ASCEND_PATH}/lib64/libnnopbase.so
    ${ASCEND_PATH}/lib64/libopapi_transformer.so
    ${ASCEND_PATH}/lib64/libopapi_math.so
    ${ASCEND_PATH}/lib64/libc_sec.so)
install(TARGETS example DESTINATION ${CMAKE_RUNTIME_OUTPUT_DIRECTORY})
""".replace("KIT", str(EXAMPLES))

SCRIPT = """
set -e
source "$TOOLKIT/SETTING"
mkdir build
cd build
cmake ../ -DCMAKE_CXX_COMPILER=g++ -DCMAKE_SKIP_RPATH=TRUE
cmake --build .
cd bin
./example
"""

EXAMPLE = r"""
#include "acl/acl.h"
#include "aclnnop/aclnn_ops_transformer.h"
#include "kit.hpp"
#include "securec.h"
int main()
{
    Device device;
    std::vector<float> values(4);
    const float given[] = {1, 2, 3, 4};
    if (memcpy_s(values.data(), 16, given, 16) != EOK) return 1;
    Tensor<float> grad({2, 2}, values), out({1, 2});
    Tensor<int32_t> indices({2}, {1, 0});
    RUN(MoeTokenPermuteGrad, grad, indices, 2, false, out);
    expect("sum", out, {4, 6});
    return 0;
}
"""


@pytest.mark.parametrize("setting", ["set_env.sh", "bin/setenv.bash"])
def test_a_cmake_project(prefix: Path, tmp_path: Path, setting: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if shutil.which("cmake", path=path) is None or shutil.which("bash") is None:
        pytest.skip("no cmake, or no bash")
    for name, text in (("CMakeLists.txt", CMAKE), ("run.sh", SCRIPT), ("example.cpp", EXAMPLE)):
        (tmp_path / name).write_text(text.replace("SETTING", setting))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ASCEND", "LD_"))}
    environment |= {"PATH": path, "TOOLKIT": str(prefix)}
    done = subprocess.run(
        ["bash", "run.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("sum: as expected\n")


def test_the_command_line_of_the_documents_examples(prefix: Path, tmp_path: Path) -> None:
    source = tmp_path / "example.cpp"
    source.write_text(EXAMPLE)
    include, lib = prefix / f"{platform.machine()}-linux" / "include", prefix / f"{platform.machine()}-linux" / "lib64"
    command = ["g++", "example.cpp", f"-I{include}", f"-I{include}/aclnn", f"-I{include}/aclnnop", f"-I{EXAMPLES}"]
    command += [f"-L{lib}", "-lopapi_math", "-lopapi_transformer", "-lascendcl", "-lnnopbase", "-lpthread"]
    subprocess.run([*command, "-lhccl", "-lhccl_fwk", "-lc_sec", "-o", "example"], cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "example"], env={**os.environ, "LD_LIBRARY_PATH": str(lib)}, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_the_environment_that_the_script_sets(prefix: Path, tmp_path: Path, shell: str) -> None:
    """Bash finds the folder wherever it was moved to; a plain shell cannot tell a script where it lies."""
    folder = prefix
    if shell == "bash":
        folder = tmp_path / "it's moved"
        shutil.copytree(prefix, folder, symlinks=True)
    show = 'echo "$ASCEND_HOME_PATH"; echo "$ASCEND_TOOLKIT_HOME"; echo "$LD_LIBRARY_PATH"'
    for former, after in (("", ""), ("/other/lib", ":/other/lib")):
        environment = {**os.environ, "LD_LIBRARY_PATH": former, "CDPATH": str(tmp_path)}
        script = f'set -eu; . "$1"; {show}; cd / ; env | grep -c ^ASCEND_'
        done = subprocess.run(
            [shell, "-c", script, shell, folder / "set_env.sh"],
            env={name: value for name, value in environment.items() if not name.startswith("ASCEND")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.splitlines() == [str(folder), str(folder), f"{folder}/lib64{after}", "2"], done.stderr


SECURE = r"""
#include "securec.h"
#include <stdio.h>
#include <string.h>
#define IS(value, wanted) \
    do { \
        long value_ = (long)(value); \
        if (value_ != (long)(wanted)) { printf("line %d: %s is %ld\n", __LINE__, #value, value_); return 1; } \
    } while (0)
#define TEXT(text) IS(strcmp(to, text), 0)
static int formatted(char *to, size_t room, size_t count, const char *format, ...)
{
    va_list list;
    int length;
    va_start(list, format);
    length = vsnprintf_s(to, room, count, format, list);
    va_end(list);
    return length;
}
int main(void)
{
    char to[8] = "1234567", *rest = NULL, line[] = "a,b;c", *volatile nowhere = NULL;
    IS(memset_s(to, 0, 1, 1), ERANGE);
    IS(memset_s(to, 0x80000000u, 1, 1), ERANGE);
    IS(memset_s(nowhere, 8, 1, 1), EINVAL);
    IS(memset_s(to, 4, 'x', 2), EOK);
    TEXT("xx34567");
    IS(memset_s(to, 4, 'y', 5), ERANGE_AND_RESET);
    TEXT("yyyy567");
    IS(memcpy_s(to, 8, "abc", 4), EOK);
    TEXT("abc");
    IS(memcpy_s(to, 3, "abcd", 4), ERANGE_AND_RESET);
    IS(to[0] | to[1] | to[2], 0);
    IS(memcpy_s(to, 8, "1234567", 8), EOK);
    IS(memcpy_s(to + 1, 3, to, 3), EOVERLAP_AND_RESET);
    IS(memcmp(to, "1\0\0\0" "567", 8), 0);
    IS(memcpy_s(to, 8, to, 8), EOK);
    IS(memcpy_s(to, 8, nowhere, 1), EINVAL_AND_RESET);
    IS(to[5], 0);
    IS(memcpy_s(nowhere, 8, to, 1), EINVAL);
    IS(memcpy_s(to, 0, to, 1), ERANGE);
    IS(memcpy_s(to, 8, "1234567", 8), EOK);
    IS(memmove_s(to + 1, 7, to, 6), EOK);
    TEXT("1123456");
    IS(strcpy_s(to, 8, "seven77"), EOK);
    TEXT("seven77");
    IS(strcpy_s(to, 8, "eight888"), ERANGE_AND_RESET);
    TEXT("");
    IS(strcpy_s(to, 8, nowhere), EINVAL_AND_RESET);
    IS(strcpy_s(nowhere, 8, ""), EINVAL);
    IS(strcpy_s(to, 0, ""), ERANGE);
    IS(strcpy_s(to, 8, "abc"), EOK);
    IS(strcpy_s(to + 1, 7, to), EOVERLAP_AND_RESET);
    TEXT("a");
    IS(strncpy_s(to, 8, "abcdefghij", 3), EOK);
    TEXT("abc");
    IS(strncpy_s(to, 8, "ab", 7), EOK);
    TEXT("ab");
    IS(strncpy_s(to, 4, "abcdef", 4), ERANGE_AND_RESET);
    TEXT("");
    IS(strcpy_s(to, 8, "abc"), EOK);
    IS(strcat_s(to, 8, "defg"), EOK);
    TEXT("abcdefg");
    IS(strcat_s(to, 8, "h"), ERANGE_AND_RESET);
    TEXT("");
    IS(strncat_s(to, 8, "abcdef", 2), EOK);
    IS(strncat_s(to, 8, "abcdef", 2), EOK);
    TEXT("abab");
    IS(memset_s(to, 8, 'x', 8), EOK);
    IS(strcat_s(to, 8, "y"), EINVAL_AND_RESET);
    IS(sprintf_s(to, 8, "%d-%s", 12, "abc"), 6);
    TEXT("12-abc");
    IS(sprintf_s(to, 6, "%d-%s", 12, "abc"), -1);
    TEXT("");
    IS(sprintf_s(nowhere, 8, "%d", 1), -1);
    IS(snprintf_s(to, 8, 7, "%s", "abcdefg"), 7);
    TEXT("abcdefg");
    IS(snprintf_s(to, 8, 3, "%s", "abcdefg"), -1);
    TEXT("abc");
    IS(formatted(to, 8, 8, "%s", "abcdefgh"), -1);
    TEXT("");
    IS(snprintf_truncated_s(to, 4, "%s", "abcdef"), 3);
    TEXT("abc");
    IS(snprintf_truncated_s(to, 8, "%s", "abcdef"), 6);
    IS(strtok_s(line, ",;", &rest) == line, 1);
    IS(strcmp(strtok_s(NULL, ",;", &rest), "b"), 0);
    IS(strcmp(strtok_s(NULL, ",;", &rest), "c"), 0);
    IS(strtok_s(NULL, ",;", &rest) == NULL, 1);
    IS(strtok_s(line, NULL, &rest) == NULL, 1);
    puts("fine");
    return 0;
}
"""


def test_secure_functions(prefix: Path, tmp_path: Path) -> None:
    """Each result, and what is left in the target, as the functions' documents have it; no Python is needed."""
    source, program = tmp_path / "secure.c", tmp_path / "secure"
    source.write_text(SECURE)
    command = [*build._compiler(), "-std=c99", "-Wall", "-Wextra", "-Werror", str(source), f"-I{prefix}/include"]
    command += ["-Wno-error=format-truncation", "-Wno-error=format-overflow"]
    subprocess.run([*command, f"-L{prefix}/lib", f"-Wl,-rpath,{prefix}/lib", "-lc_sec", "-o", program], check=True)
    assert subprocess.run([program], capture_output=True, text=True, check=False).stdout == "fine\n"


def written(folder: Path, files: dict[str, bytes], links: dict[str, str]) -> None:
    assert build._install(folder, files, links) == [folder / name for name in (*files, *links)]
    for name, content in files.items():
        assert (folder / name).read_bytes() == content
        assert not (folder / name).is_symlink()
    for name, target in links.items():
        assert os.readlink(folder / name) == target


FILES = {"include/acl/acl.h": b"one", "lib/libopapi.so": b"two"}
LINKS = {"lib64": "lib"}


def test_a_second_build_replaces_the_first(tmp_path: Path) -> None:
    written(tmp_path / "deep" / "prefix", FILES, LINKS)
    former = os.open(tmp_path / "deep" / "prefix" / "lib" / "libopapi.so", os.O_RDONLY)
    written(tmp_path / "deep" / "prefix", {**FILES, "lib/libopapi.so": b"three"}, LINKS)
    assert os.read(former, 9) == b"two", "a running program keeps the library it has"
    os.close(former)
    left = {str(path.relative_to(tmp_path / "deep" / "prefix")) for path in (tmp_path / "deep").rglob("*.*")}
    assert left == set(FILES), "nothing else is left"


@pytest.mark.parametrize("kind", ["symbolic", "dangling", "hard"])
def test_a_link_in_a_files_place_is_replaced(tmp_path: Path, kind: str) -> None:
    """What somebody planted in a shared folder before the build, to have another file overwritten."""
    victim, prefix = tmp_path / "victim", tmp_path / "prefix"
    if kind != "dangling":
        victim.write_text("mine")
    for name in (*FILES, *LINKS):
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        if kind == "hard":
            (prefix / name).hardlink_to(victim)
        else:
            (prefix / name).symlink_to(victim)
    written(prefix, FILES, LINKS)
    assert victim.read_text() == "mine" if kind != "dangling" else not victim.exists()


@pytest.mark.parametrize("name", ["include", "include/acl", "lib"])
def test_a_folder_that_is_a_link_is_refused(tmp_path: Path, name: str) -> None:
    victim, prefix = tmp_path / "victim", tmp_path / "prefix"
    (victim / "acl").mkdir(parents=True)
    (prefix / name).parent.mkdir(parents=True)
    (prefix / name).symlink_to(victim)
    with pytest.raises(SystemExit, match="must be folders and no links"):
        build._install(prefix, FILES, LINKS)
    assert [path.name for path in victim.rglob("*")] == ["acl"]


def test_a_folder_in_a_files_place_is_refused(tmp_path: Path) -> None:
    for name in (*FILES, *LINKS):
        (tmp_path / name / name).mkdir(parents=True)
        with pytest.raises(SystemExit, match=f"cannot write {tmp_path / name}: .* its place free or a file"):
            build._install(tmp_path, FILES, LINKS)
        shutil.rmtree(tmp_path / name)


def test_the_build_writes_through_no_link(prefix: Path) -> None:
    """Only the links that it makes itself are there, and they stay inside."""
    links = {str(path.relative_to(prefix)): os.readlink(path) for path in prefix.rglob("*") if path.is_symlink()}
    assert links == build._LINKS
    assert all((prefix / name).resolve().is_relative_to(prefix) and (prefix / name).exists() for name in links)
