/* The part of libascendcl.so that finds Python: a program that only links the library needs none. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define PYTHON_LIBRARY "libmoeroute_acl.so"

static char folder[4096]; /* where this library lies, with a slash at its end */
static char failed[4608];
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static void *python; /* the library, under `loading`, as are its functions */
static int (*start)(void);
static const char *(*reason)(void);
static void (*fork_comes)(void), (*parent_goes_on)(void), (*child_goes_on)(void);
static int ready;

static void *function(const char *name)
{
    void *found = dlsym(python, name);
    if (found == NULL)
        snprintf(failed, sizeof(failed), "moeroute.aclnn: another build's Python, build the library again: %s", dlerror());
    return found;
}

static void load(void)
{
    char path[sizeof(folder) + sizeof(PYTHON_LIBRARY)];
    if (python != NULL || failed[0])
        return;
    snprintf(path, sizeof(path), "%s" PYTHON_LIBRARY, folder);
    python = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (python != NULL) {
        *(void **)&reason = function("moeroute_python_failure");
        *(void **)&fork_comes = function("moeroute_python_fork_comes");
        *(void **)&parent_goes_on = function("moeroute_python_parent_goes_on");
        *(void **)&child_goes_on = function("moeroute_python_child_goes_on");
        *(void **)&start = function("moeroute_python_start");
    } else {
        snprintf(failed, sizeof(failed), "moeroute.aclnn: Python does not load, build the library again: %s", dlerror());
    }
    if (failed[0])
        fprintf(stderr, "%s\n", failed);
}

/* The function that Python answers; NULL where no Python does. */
EXPORT void *moeroute_acl_find(const char *name)
{
    if (!__atomic_load_n(&ready, __ATOMIC_ACQUIRE)) {
        pthread_mutex_lock(&loading);
        load();
        pthread_mutex_unlock(&loading);
        if (failed[0] || start() != 0)
            return NULL;
        __atomic_store_n(&ready, 1, __ATOMIC_RELEASE);
    }
    return dlsym(python, name);
}

/* A child is a copy of one thread: nothing must be half done by another one when the copy is made. */

static void before_fork(void)
{
    pthread_mutex_lock(&loading);
    if (python != NULL && !failed[0])
        fork_comes();
}

static void in_parent(void)
{
    if (python != NULL && !failed[0])
        parent_goes_on();
    pthread_mutex_unlock(&loading);
}

static void in_child(void)
{
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    if (python != NULL && !failed[0])
        child_goes_on();
    loading = fresh;
}

/* At once: the path may be relative and the program go elsewhere, or fork while another thread loads Python. */
__attribute__((constructor)) static void begin(void)
{
    Dl_info here;
    char *path = dladdr((void *)&ready, &here) && here.dli_fname ? realpath(here.dli_fname, NULL) : NULL;
    char *name = path ? strrchr(path, '/') : NULL;
    if (name && name - path < (long)sizeof(folder) - 1)
        memcpy(folder, path, (size_t)(name - path) + 1);
    free(path);
    pthread_atfork(before_fork, in_parent, in_child);
}

EXPORT const char *moeroute_acl_failure(void)
{
    return failed[0] || !reason ? failed : reason();
}
