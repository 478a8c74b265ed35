"""`moeroute aclnn build`: headers and shared libraries for C and C++ programs, with Python behind them.

One library, libascendcl.so, holds the interpreter (cffi's embedding) and every function that Python answers;
libnnopbase.so and libopapi.so are thin and link to it, so a process has one interpreter whatever it links.
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

_START = r"""
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static char moeroute_failed[4096];
static pthread_once_t moeroute_once = PTHREAD_ONCE_INIT;

static void moeroute_say_exception(const char *python)
{
    PyObject *type, *value, *trace, *text;
    const char *words;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    text = value ? PyObject_Str(value) : NULL;
    words = text ? PyUnicode_AsUTF8(text) : NULL;
    snprintf(moeroute_failed, sizeof(moeroute_failed),
             "moeroute.aclnn: %s must be a Python " PYTHON_VERSION " with moeroute and cffi; got %s: %s",
             python, type ? ((PyTypeObject *)type)->tp_name : "no reason", words ? words : "");
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    PyErr_Clear();
}

static int moeroute_start_python(const char *python)
{
    Dl_info place;
    PyPreConfig first;
    PyConfig config;
    PyStatus status;
    if (access(python, X_OK) != 0) {
        snprintf(moeroute_failed, sizeof(moeroute_failed),
                 "moeroute.aclnn: the Python %s cannot be run; set MOEROUTE_PYTHON or build the library again", python);
        return 0;
    }
    /* Extension modules look for Python's symbols globally; a program may have loaded us privately. */
    if (dladdr((void *)&Py_InitializeFromConfig, &place) && place.dli_fname)
        dlopen(place.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
    /* Locale and signals are the program's. */
    PyPreConfig_InitPythonConfig(&first);
    first.configure_locale = 0;
    first.coerce_c_locale = 0;
    first.utf8_mode = 1;
    status = Py_PreInitialize(&first);
    if (!PyStatus_Exception(status)) {
        PyConfig_InitPythonConfig(&config);
        config.install_signal_handlers = 0;
        config.parse_argv = 0;
        status = PyConfig_SetBytesString(&config, &config.program_name, python);
        if (!PyStatus_Exception(status))
            status = Py_InitializeFromConfig(&config);
        PyConfig_Clear(&config);
    }
    if (PyStatus_Exception(status)) {
        snprintf(moeroute_failed, sizeof(moeroute_failed), "moeroute.aclnn: Python does not start from %s: %s",
                 python, status.err_msg ? status.err_msg : "no reason given");
        return 0;
    }
    return 1;
}

static void moeroute_start_once(void)
{
    int ours = !Py_IsInitialized();
    PyGILState_STATE state = PyGILState_UNLOCKED;
    PyObject *glue;
    const char *python = getenv("MOEROUTE_PYTHON");
    if (python == NULL || *python == 0)
        python = PYTHON_EXECUTABLE;
    if (ours) {
        if (!moeroute_start_python(python))
            goto end;
    } else {
        python = "this process";
        state = PyGILState_Ensure();
    }
    glue = PyImport_ImportModule("moeroute.aclnn.library.glue");
    if (glue == NULL)
        moeroute_say_exception(python);
    /* cffi's own start spins for ever once anything has looked up an attribute of a capsule, as torch does. */
    else if (_cffi_initialize_python() == 0)
        _cffi_call_python = (_cffi_call_python_fnptr)_cffi_call_python_org;
    else
        snprintf(moeroute_failed, sizeof(moeroute_failed), "moeroute.aclnn: the library does not load into %s", python);
    Py_XDECREF(glue);
    if (ours)
        PyEval_SaveThread();
    else
        PyGILState_Release(state);
end:
    if (moeroute_failed[0])
        fprintf(stderr, "%s\n", moeroute_failed);
}

/* 0 where Python answers. Never waits while it holds the interpreter's lock, which the first caller needs. */
EXPORT int moeroute_acl_start(void)
{
    if (Py_IsInitialized() && PyGILState_Check()) {
        PyThreadState *state = PyEval_SaveThread();
        pthread_once(&moeroute_once, moeroute_start_once);
        PyEval_RestoreThread(state);
    } else {
        pthread_once(&moeroute_once, moeroute_start_once);
    }
    return moeroute_failed[0] != 0;
}

EXPORT const char *moeroute_acl_failure(void)
{
    return moeroute_failed[0] ? moeroute_failed : "moeroute.aclnn: Python did not answer; stderr says why";
}

static void moeroute_move(uintptr_t to, uintptr_t from, size_t count)
{
    memmove((void *)to, (const void *)from, count);
}

static void moeroute_fill(uintptr_t to, int value, size_t count)
{
    memset((void *)to, value, count);
}
"""

_THIN = """\
#include "acl/acl.h"
#include "aclnn/acl_meta.h"
#define EXPORT __attribute__((visibility("default")))
extern int moeroute_acl_start(void);
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
        source = place / "ascendcl.c"
        _write_core(cffi, source)
        flags = [f"-I{sysconfig.get_path('include')}", f"-I{sysconfig.get_path('platinclude')}"]
        flags += [str(source), f"-L{python.parent}", f"-l:{python.name}", f"-Wl,-rpath,{python.parent}", "-ldl"]
        _compile(compiler, place, include, first, flags)
        for name in others:
            source = place / f"{name}.c"
            source.write_text(_thin_source(name))
            _compile(compiler, place, include, name, [str(source), f"-L{place}", f"-l:{first}", "-Wl,-rpath,$ORIGIN"])
        for name in (first, *others):
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


def _write_core(cffi: type, source: Path) -> None:
    every = [prototype for group in prototypes.libraries().values() for prototype in group]
    own = next(iter(prototypes.libraries().values()))
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
    declared = "".join(f"CFFI_DLLEXPORT {prototype.in_python};\n" for prototype in own)
    wrappers = "\n".join(prototype.wrapper for prototype in own)
    ffi.set_source(MODULE, f'{defines}{_START}\n#include "acl/acl.h"\n{declared}\n{wrappers}')
    with contextlib.redirect_stdout(io.StringIO()):  # it says what it writes
        ffi.emit_c_code(str(source))


def _thin_source(library: str) -> str:
    group = prototypes.libraries()[library]
    return "\n".join([_THIN, *(f"extern {prototype.in_python};" for prototype in group), *(p.wrapper for p in group)])


def _c_string(text: str) -> str:
    """Octal escapes: no byte of a path can end the literal."""
    return '"' + "".join(f"\\{byte:03o}" for byte in text.encode()) + '"'


def _compile(compiler: list[str], place: Path, include: Path, name: str, flags: list[str]) -> None:
    command = [*compiler, "-O1", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{include}"]
    command += [f"-Wl,-soname,{name}", "-o", str(place / name), *flags]
    if "-ldl" in flags:
        command.append("-lpthread")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"moeroute aclnn build: {shlex.join(command)}\n{done.stderr.strip()}")
