"""`moeroute aclnn build`: headers and shared libraries for C and C++ programs, with Python behind them.

libmoeroute_acl.so holds the interpreter (cffi's embedding) and every function that Python answers (python.c);
libascendcl.so loads it at the first call, so that a missing Python is an error and not a program that does not
start (loader.c). libnnopbase.so and libopapi.so ask libascendcl.so: a process has one interpreter whatever it links.
"""

import contextlib
import io
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NoReturn

from moeroute.aclnn.library import prototypes

MODULE = "_moeroute_acl"
PYTHON_LIBRARY = "libmoeroute_acl.so"

HERE = Path(__file__).parent

_WRAPPERS = """\
#include "acl/acl.h"
#include "aclnn/acl_meta.h"
#define EXPORT __attribute__((visibility("default")))
extern void *moeroute_acl_find(const char *name);
extern const char *moeroute_acl_failure(void);
"""


def build(prefix: Path) -> list[Path]:
    """Write include/ and lib/ under `prefix`; returns the files. SystemExit says what is missing."""
    if sys.platform != "linux":
        _missing(f"Linux; got {sys.platform}")
    cffi, compiler, python = _cffi(), _compiler(), _libpython()
    prefix = prefix.resolve()
    include, lib = prefix / "include", prefix / "lib"
    files = []
    for path, text in prototypes.headers().items():
        file = include / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        files.append(file)
    lib.mkdir(parents=True, exist_ok=True)
    first, *others = prototypes.libraries()
    with tempfile.TemporaryDirectory(dir=prefix) as work:
        place = Path(work)
        names = [PYTHON_LIBRARY, first, *others]
        for name in names:
            source = place / f"{name}.c"
            if name == PYTHON_LIBRARY:
                _write_python_side(cffi, source)
                flags = [f"-I{sysconfig.get_path('include')}", f"-I{sysconfig.get_path('platinclude')}"]
                flags += [f"-L{python.parent}", f"-l:{python.name}", f"-Wl,-rpath,{python.parent}"]
            elif name == first:
                source.write_text((HERE / "loader.c").read_text() + _wrappers(name))
                flags = []
            else:
                source.write_text(_wrappers(name))
                flags = [f"-L{place}", f"-l:{first}", "-Wl,-rpath,$ORIGIN"]
            _compile(compiler, place, name, [f"-I{include}", str(source), *flags, "-ldl", "-lpthread"])
        for name in names:
            os.replace(place / name, lib / name)
            files.append(lib / name)
    return files


def _missing(what: str) -> NoReturn:
    raise SystemExit(f"moeroute aclnn build needs {what}")


def _cffi() -> type:
    try:
        import cffi
    except ImportError:
        _missing("cffi: pip install 'moeroute[aclnn]'")
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
    ffi.embedding_init_code(
        f"from {MODULE} import ffi, lib\nfrom moeroute.aclnn.library import glue\nglue.attach(ffi, lib)\n"
    )
    # Not sys.executable resolved: the link in a virtual environment's bin/ is what makes it one.
    strings = {
        "PYTHON_EXECUTABLE": os.path.abspath(sys.executable),
        "PYTHON_VERSION": sysconfig.get_python_version(),
    }
    defines = "".join(f"#define {name} {_c_string(value)}\n" for name, value in strings.items())
    ffi.set_source(MODULE, defines + (HERE / "python.c").read_text())
    with contextlib.redirect_stdout(io.StringIO()):  # it says what it writes
        ffi.emit_c_code(str(source))


def _wrappers(library: str) -> str:
    return "\n".join([_WRAPPERS, *(prototype.wrapper for prototype in prototypes.libraries()[library])])


def _c_string(text: str) -> str:
    """Octal escapes: no byte of a path can end the literal."""
    return '"' + "".join(f"\\{byte:03o}" for byte in text.encode()) + '"'


def _compile(compiler: list[str], place: Path, name: str, flags: list[str]) -> None:
    command = [*compiler, "-O1", "-fPIC", "-shared", "-fvisibility=hidden", f"-Wl,-soname,{name}"]
    command += ["-o", str(place / name), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"moeroute aclnn build: {shlex.join(command)}\n{done.stderr.strip()}")
