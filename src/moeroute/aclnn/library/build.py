"""`moeroute aclnn build`: headers and shared libraries for C and C++ programs, with Python behind them.

libmoeroute_acl.so holds the interpreter (cffi's embedding) and every function that Python answers (python.c);
libascendcl.so loads it at the first call, so that a missing Python is an error and not a program that does not
start (loader.c). libnnopbase.so and libopapi.so ask libascendcl.so: a process has one interpreter whatever it links.
"""

import contextlib
import io
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NoReturn

import torch

from moeroute.aclnn.library import prototypes

MODULE = "_moeroute_acl"
PYTHON_LIBRARY = "libmoeroute_acl.so"
SECURE_LIBRARY = "libc_sec.so"

HERE = Path(__file__).parent

_WRAPPERS = """\
#include "acl/acl.h"
#include "aclnn/acl_meta.h"
#define EXPORT __attribute__((visibility("default")))
extern void *moeroute_acl_find(const char *name);
extern const char *moeroute_acl_failure(void);
"""


# Names that programs for CANN link, source or look below; for most of them our libraries have all there is.
_LINKS = {
    "lib64": "lib",
    **{f"lib/libopapi_{part}.so": "libopapi.so" for part in ("transformer", "math", "nn", "cv")},
    **{f"lib/lib{name}.so": "libascendcl.so" for name in ("hccl", "hccl_fwk")},
    f"{platform.machine()}-linux/include": "../include",
    f"{platform.machine()}-linux/lib64": "../lib",
}

_SET_ENV = """\
# moeroute: source this file, and programs for CANN are built with this folder and find its libraries.
if [ -n "${BASH_SOURCE:-}" ]; then
    ASCEND_HOME_PATH=$(cd -- "$(dirname -- "$BASH_SOURCE")" >/dev/null && pwd)
else
    ASCEND_HOME_PATH=%s
fi
ASCEND_TOOLKIT_HOME=$ASCEND_HOME_PATH
LD_LIBRARY_PATH=$ASCEND_HOME_PATH/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export ASCEND_HOME_PATH ASCEND_TOOLKIT_HOME LD_LIBRARY_PATH
"""
_SETENV_BASH = """\
# moeroute: the same as set_env.sh, where older toolkits have it.
. "$(dirname -- "${BASH_SOURCE[0]}")/../set_env.sh"
"""


def build(prefix: Path) -> list[Path]:
    """Write headers, libraries and what a toolkit has beside them under `prefix`; returns the files.

    SystemExit says what is missing.
    """
    if sys.platform != "linux":
        _missing(f"Linux; got {sys.platform}")
    cffi, compiler, python = _cffi(), _compiler(), _libpython()
    prefix = prefix.resolve()
    headers = {**prototypes.headers(), "securec.h": (HERE / "securec.h").read_text()}
    contents = {f"include/{path}": text.encode() for path, text in headers.items()}
    contents["set_env.sh"] = (_SET_ENV % shlex.quote(str(prefix))).encode()
    contents["bin/setenv.bash"] = _SETENV_BASH.encode()
    with tempfile.TemporaryDirectory() as work:
        place = Path(work)
        for path, text in headers.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_text(text)
        for name, flags in _libraries(cffi, python, place).items():
            _compile(compiler, place, name, flags)
            contents[f"lib/{name}"] = (place / name).read_bytes()
    return _install(prefix, contents, _LINKS)


def _libraries(cffi: type, python: Path, place: Path) -> dict[str, list[str]]:
    """Each library with what the compiler needs for it, in the order in which they link; writes their sources."""
    first, *others = prototypes.libraries()
    found = {}
    for name in (PYTHON_LIBRARY, SECURE_LIBRARY, first, *others):
        source = place / f"{name}.c"
        flags = found[name] = [str(source)]
        if name == PYTHON_LIBRARY:
            _write_python_side(cffi, source)
            flags += [f"-I{sysconfig.get_path('include')}", f"-I{sysconfig.get_path('platinclude')}"]
            flags += [f"-L{python.parent}", f"-l:{python.name}", f"-Wl,-rpath,{python.parent}"]
        elif name == SECURE_LIBRARY:
            source.write_text((HERE / "securec.c").read_text())
        elif name == first:
            source.write_text((HERE / "loader.c").read_text() + _wrappers(name))
        else:
            source.write_text(_wrappers(name))
            flags += [f"-L{place}", f"-l:{first}", "-Wl,-rpath,$ORIGIN"]
    return found


def _install(prefix: Path, contents: dict[str, bytes], links: dict[str, str]) -> list[Path]:
    """Each file and link is made beside its place and moved there, in folders that are reached through no link:
    nothing that another user may have put into `prefix` is followed or written through."""
    prefix.mkdir(parents=True, exist_ok=True)
    everything: dict[str, bytes | str] = {**contents, **links}
    for path, made in everything.items():
        folder = os.open(prefix, os.O_RDONLY | os.O_DIRECTORY)
        *folders, name = path.split("/")
        try:
            for step in folders:
                outer, folder = folder, _folder(folder, step)
                os.close(outer)
            _place(folder, name, made)
        except OSError as error:
            what = f"the folders above it must be folders and no links, its place free or a file; got {error.strerror}"
            raise SystemExit(f"moeroute aclnn build cannot write {prefix / path}: {what}") from None
        finally:
            os.close(folder)
    return [prefix / path for path in everything]


def _folder(outer: int, name: str) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=outer)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=outer)


def _place(folder: int, name: str, made: bytes | str) -> None:
    """A file with these bytes, or a link to this name; programs that have the former file open keep it."""
    beside = f".{name}.{secrets.token_hex(8)}"
    if isinstance(made, str):
        os.symlink(made, beside, dir_fd=folder)
    else:
        mode = 0o755 if ".so" in name else 0o644
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=folder)
        with open(file, "wb") as stream:
            stream.write(made)
    try:
        os.rename(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(beside, dir_fd=folder)
        raise


def _missing(what: str) -> NoReturn:
    raise SystemExit(f"moeroute aclnn build needs {what}")


def _cffi() -> type:
    try:
        import cffi
    except ImportError:
        _missing("cffi: pip install '.[aclnn]' in a clone")
    return cffi.FFI  # type: ignore[no-any-return, unused-ignore]


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            _missing(f"a C compiler; CC names {chosen[0]}, which is not there")
        return chosen
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    return _missing("a C compiler (cc, gcc or clang on PATH, or CC): apt-get install gcc, say")


def _libpython() -> Path:
    """The shared library of this Python, wherever its installation keeps it."""
    version = sysconfig.get_config_var("LDVERSION") or sysconfig.get_python_version()
    folders = [sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix, "lib")]
    if multiarch := sysconfig.get_config_var("MULTIARCH"):
        folders += [Path(folder, multiarch) for folder in folders if folder]
    for folder in filter(None, folders):
        for name in (f"libpython{version}.so.1.0", f"libpython{version}.so"):
            if (file := Path(folder, name)).exists():
                if not Path(sysconfig.get_path("include"), "Python.h").exists():
                    _missing("Python.h: apt-get install python3-dev, say")
                return file
    return _missing(
        f"a Python with a shared library: libpython{version}.so belongs to {sys.executable} but is in none of "
        f"{', '.join(str(folder) for folder in folders if folder)} (Debian: apt-get install libpython3-dev; "
        "pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared)"
    )


def _write_python_side(cffi: type, source: Path) -> None:
    every = [prototype for group in prototypes.libraries().values() for prototype in group]
    ffi = cffi()
    ffi.embedding_api("".join(f"{prototype.in_python};\n" for prototype in every))
    ffi.cdef("void moeroute_move(uintptr_t, uintptr_t, size_t); void moeroute_fill(uintptr_t, int, size_t);")
    ffi.cdef("uintptr_t moeroute_new_array(size_t); int moeroute_python_is_ours(void);")
    ffi.embedding_init_code(
        f"from {MODULE} import ffi, lib\nfrom moeroute.aclnn.library import glue\nglue.attach(ffi, lib)\n"
    )
    # Not sys.executable resolved: the link in a virtual environment's bin/ is what makes it one.
    strings = {
        "PYTHON_EXECUTABLE": os.path.abspath(sys.executable),
        "PYTHON_VERSION": sysconfig.get_python_version(),
        "START": (HERE / "start.py").read_text(),
        "TRIED_TORCH": _tried_torch(),
    }
    defines = "".join(f"#define {name} {_c_string(value)}\n" for name, value in strings.items())
    ffi.set_source(MODULE, defines + (HERE / "python.c").read_text())
    with contextlib.redirect_stdout(io.StringIO()):  # it says what it writes
        ffi.emit_c_code(str(source))


def _tried_torch() -> str:
    """This torch's version, where the operators' import leaves out what start.py says, and an import brings it back."""
    version = str(torch.__version__)
    trial = f"""{(HERE / "start.py").read_text()}
import_torch({version!r})
import moeroute.aclnn
assert LATE not in sys.modules
import torch._meta_registrations, torch._decomp
assert torch._decomp.meta_table
"""
    done = subprocess.run([sys.executable, "-P", "-c", trial], capture_output=True, check=False)
    return version if done.returncode == 0 else ""


def _wrappers(library: str) -> str:
    return "\n".join([_WRAPPERS, *(prototype.wrapper for prototype in prototypes.libraries()[library])])


def _c_string(text: str) -> str:
    """Octal escapes: no byte of a path can end the literal."""
    return '"' + "".join(f"\\{byte:03o}" for byte in text.encode()) + '"'


def _compile(compiler: list[str], place: Path, name: str, flags: list[str]) -> None:
    command = [*compiler, "-O1", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{place}", f"-Wl,-soname,{name}"]
    command += ["-o", str(place / name), *flags, "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"moeroute aclnn build: {shlex.join(command)}\n{done.stderr.strip()}")
