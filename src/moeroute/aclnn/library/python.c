/* libmoeroute_acl.so, before what cffi generates: starts Python once, and takes it through a fork. */

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static char failed[4096];
static int started, ours; /* under `starting`; ours: the program had no Python before */
static pthread_mutex_t starting = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

static void say_exception(const char *python)
{
    PyObject *type, *value, *trace, *text;
    const char *words;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    text = value ? PyObject_Str(value) : NULL;
    words = text ? PyUnicode_AsUTF8(text) : NULL;
    snprintf(failed, sizeof(failed),
             "moeroute.aclnn: %s must be a Python " PYTHON_VERSION " with moeroute and cffi; got %s: %s",
             python, type ? ((PyTypeObject *)type)->tp_name : "no reason", words ? words : "");
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    PyErr_Clear();
}

static int start_interpreter(const char *python)
{
    Dl_info place;
    PyPreConfig first;
    PyConfig config;
    PyStatus status;
    if (access(python, X_OK) != 0) {
        snprintf(failed, sizeof(failed),
                 "moeroute.aclnn: the Python %s cannot be run; set MOEROUTE_PYTHON or build the library again", python);
        return 0;
    }
    /* Extension modules look for Python's symbols globally; a program may have loaded us privately. */
    if (dladdr((void *)&Py_InitializeFromConfig, &place) && place.dli_fname)
        dlopen(place.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
    /* Locale and signals are the program's, and PYTHONHOME and its like mean a Python of the program's. */
    PyPreConfig_InitPythonConfig(&first);
    first.configure_locale = 0;
    first.coerce_c_locale = 0;
    first.utf8_mode = 1;
    first.use_environment = 0;
    status = Py_PreInitialize(&first);
    if (!PyStatus_Exception(status)) {
        PyConfig_InitPythonConfig(&config);
        config.install_signal_handlers = 0;
        config.parse_argv = 0;
        config.use_environment = 0;
        status = PyConfig_SetBytesString(&config, &config.program_name, python);
        if (!PyStatus_Exception(status))
            status = Py_InitializeFromConfig(&config);
        PyConfig_Clear(&config);
    }
    if (PyStatus_Exception(status)) {
        snprintf(failed, sizeof(failed), "moeroute.aclnn: Python does not start from %s: %s", python,
                 status.err_msg ? status.err_msg : "no reason given");
        return 0;
    }
    return 1;
}

/* What SIGINT's default does. Python takes SIGINT over wherever it finds the default itself, whatever it is told. */
static void end_by_signal(int number)
{
    raise(number); /* SA_RESETHAND: the default acts now */
}

static void hold_interrupt(void)
{
    struct sigaction found, stand_in;
    if (sigaction(SIGINT, NULL, &found) != 0 || (found.sa_flags & SA_SIGINFO) || found.sa_handler != SIG_DFL)
        return;
    memset(&stand_in, 0, sizeof(stand_in));
    stand_in.sa_handler = end_by_signal;
    stand_in.sa_flags = SA_RESETHAND | SA_NODEFER;
    sigaction(SIGINT, &stand_in, NULL);
}

static void release_interrupt(void)
{
    struct sigaction found;
    if (sigaction(SIGINT, NULL, &found) == 0 && !(found.sa_flags & SA_SIGINFO) && found.sa_handler == end_by_signal)
        signal(SIGINT, SIG_DFL);
}

static void freeze(void)
{
    PyObject *type, *value, *trace, *gc, *done = NULL;
    PyErr_Fetch(&type, &value, &trace);
    gc = PyImport_ImportModule("gc");
    if (gc != NULL)
        done = PyObject_CallMethod(gc, "freeze", NULL);
    Py_XDECREF(done);
    Py_XDECREF(gc);
    PyErr_Restore(type, value, trace);
    PyGC_Enable();
}

/* start.py, of which no Python is the library's but one that it starts itself. */
static int import_torch(void)
{
    PyObject *names = PyDict_New(), *done = NULL, *function;
    if (names != NULL && PyDict_SetItemString(names, "__builtins__", PyEval_GetBuiltins()) == 0)
        done = PyRun_String(START, Py_file_input, names, names);
    function = done ? PyDict_GetItemString(names, "import_torch") : NULL;
    Py_XDECREF(done);
    done = function ? PyObject_CallFunction(function, "s", TRIED_TORCH) : NULL;
    Py_XDECREF(done);
    Py_XDECREF(names);
    return done != NULL;
}

static void start_python(void)
{
    PyGILState_STATE state = PyGILState_UNLOCKED;
    PyObject *glue;
    const char *python = secure_getenv("MOEROUTE_PYTHON");
    if (python == NULL || *python == 0)
        python = PYTHON_EXECUTABLE;
    ours = !Py_IsInitialized();
    if (ours) {
        if (!start_interpreter(python)) {
            ours = 0;
            return;
        }
    } else {
        python = "this process";
        state = PyGILState_Ensure();
    }
    /* What is imported stays, and looking through it for garbage, now and later, would cost a tenth of the start. */
    if (ours)
        PyGC_Disable();
    glue = !ours || import_torch() ? PyImport_ImportModule("moeroute.aclnn.library.glue") : NULL;
    if (ours)
        freeze();
    if (glue == NULL)
        say_exception(python);
    /* cffi's own start spins for ever once anything has looked up an attribute of a capsule, as torch does. */
    else if (_cffi_initialize_python() == 0)
        _cffi_call_python = (_cffi_call_python_fnptr)_cffi_call_python_org;
    else
        snprintf(failed, sizeof(failed),
                 "moeroute.aclnn: the library must belong to the moeroute of %s; build it again, stderr says more", python);
    Py_XDECREF(glue);
    if (ours)
        PyEval_SaveThread();
    else
        PyGILState_Release(state);
}

/* 0 where Python answers. Never waits while it holds the interpreter's lock, which the first caller needs. */
EXPORT int moeroute_python_start(void)
{
    PyThreadState *state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : NULL;
    pthread_mutex_lock(&starting);
    if (!started) {
        hold_interrupt();
        start_python();
        release_interrupt();
        if (failed[0])
            fprintf(stderr, "%s\n", failed);
        started = 1;
    }
    pthread_mutex_unlock(&starting);
    if (state != NULL)
        PyEval_RestoreThread(state);
    return failed[0] != 0;
}

EXPORT const char *moeroute_python_failure(void)
{
    return failed[0] ? failed : "moeroute.aclnn: Python did not answer; stderr says why";
}

/* A program forks without Python's knowledge. The child must find the locks free and Python's hooks run. */

static __thread int forking; /* this thread holds `starting` until the fork is done */
static int took_python;      /* under `starting` */
static PyGILState_STATE at_fork;

EXPORT void moeroute_python_fork_comes(void)
{
    if (Py_IsInitialized() && PyGILState_Check())
        return; /* Python forks, and knows it */
    pthread_mutex_lock(&starting);
    forking = 1;
    took_python = ours;
    if (took_python) {
        at_fork = PyGILState_Ensure();
        PyOS_BeforeFork();
    }
}

EXPORT void moeroute_python_parent_goes_on(void)
{
    if (!forking)
        return;
    if (took_python) {
        PyOS_AfterFork_Parent();
        PyGILState_Release(at_fork);
    }
    forking = 0;
    pthread_mutex_unlock(&starting);
}

EXPORT void moeroute_python_child_goes_on(void)
{
    static const pthread_mutex_t fresh = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    if (!forking)
        return;
    if (took_python) {
        PyObject *torch, *done = NULL;
        PyOS_AfterFork_Child();
        /* The threads of the parent's pools are not here, and OpenMP would wait for them. */
        torch = PyImport_ImportModule("torch");
        if (torch != NULL)
            done = PyObject_CallMethod(torch, "set_num_threads", "i", 1);
        PyErr_Clear();
        Py_XDECREF(done);
        Py_XDECREF(torch);
        PyEval_SaveThread(); /* without an end: Python 3.11 dies where its last thread state goes and another comes */
    }
    forking = 0;
    starting = fresh; /* unlocking it is the right of the parent's thread */
}

static int moeroute_python_is_ours(void)
{
    return ours;
}

static void moeroute_move(uintptr_t to, uintptr_t from, size_t count)
{
    memmove((void *)to, (const void *)from, count);
}

static void moeroute_fill(uintptr_t to, int value, size_t count)
{
    memset((void *)to, value, count);
}

/* What `delete[]` takes back, of this program's own kind where it has one. */
static uintptr_t moeroute_new_array(size_t size)
{
    void *(*make)(size_t);
    *(void **)&make = dlsym(RTLD_DEFAULT, "_Znam"); /* operator new[] */
    return (uintptr_t)(make ? make(size) : malloc(size ? size : 1));
}
