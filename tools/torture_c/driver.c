/* A program that calls the C interface with what it draws, with and without AddressSanitizer and UBSan.
 *
 * Memory that the library may read or write is a heap block of just that size, so that one byte more is reported.
 * What no library can check is never drawn: a pointer to an output, or to host memory, is null or right.
 * tools/torture_library.py writes the second half: functions without a `try_` of their own here, valid calls of the
 * operators, and the table of all functions. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "acl/acl.h"
#include "aclnnop/aclnn_ops_transformer.h"
#include "securec.h"

#define SHARED 256
#define SCRATCH 64
#define MOST 32 /* parameters of an operator */

static __thread uint64_t generator = 88172645463325252u;
static uint64_t shared[SHARED]; /* handles and addresses that some call returned, alive or not */
static uint64_t calls, refused, first_refused, ran;
static __thread void *scratch[SCRATCH]; /* freed after each call */
static __thread int held;
static int alone = 1; /* no other thread can free what this one was given */

static uint64_t draw(void)
{
    generator ^= generator << 13;
    generator ^= generator >> 7;
    generator ^= generator << 17;
    return generator;
}

static uint64_t below(uint64_t most)
{
    return draw() % most;
}

static uint64_t number(void)
{
    static const uint64_t some[] = {0, 1, 2, 3, 4, 8, 16, 24, 64, (uint64_t)-1, (uint64_t)1 << 62, (uint64_t)1 << 63};
    uint64_t place = below(sizeof(some) / sizeof(*some) + 1);
    return place < sizeof(some) / sizeof(*some) ? some[place] : draw();
}

static double real(void)
{
    static const double some[] = {0.0, 1.0, -1.0, 0.5, 1e-20, 1e30, -1e30};
    uint64_t place = below(9);
    return place < 7 ? some[place] : place == 7 ? __builtin_nan("") : __builtin_inf();
}

static void *handle(void)
{
    switch (below(10)) {
    case 0:
        return NULL;
    case 1:
        return (void *)(uintptr_t)draw();
    case 2:
        return (void *)(uintptr_t)(__atomic_load_n(&shared[below(SHARED)], __ATOMIC_RELAXED) + below(16));
    default:
        return (void *)(uintptr_t)__atomic_load_n(&shared[below(SHARED)], __ATOMIC_RELAXED);
    }
}

static void remember(const void *value)
{
    __atomic_store_n(&shared[below(SHARED)], (uint64_t)(uintptr_t)value, __ATOMIC_RELAXED);
}

/* A block of just this size, with other bytes each time; freed by `finish`. */
static void *block(size_t size)
{
    unsigned char *made = malloc(size);
    for (size_t i = 0; i < size; i++)
        made[i] = (unsigned char)draw();
    scratch[held++] = made;
    return made;
}

/* Where a call writes: now and then null. */
static void *output(size_t size)
{
    return below(12) ? block(size) : NULL;
}

static void finish(int status)
{
    __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
    if (status != 0)
        __atomic_fetch_add(&refused, 1, __ATOMIC_RELAXED);
    while (held > 0)
        free(scratch[--held]);
}

static void die(const char *what)
{
    fprintf(stderr, "driver: %s\n", what);
    exit(3);
}

static const int64_t *dims(uint64_t count)
{
    static const int64_t some[] = {0, 1, 2, 3, 4, 6, 8, 12};
    int64_t *made = block(8 * count);
    for (uint64_t i = 0; i < count; i++)
        made[i] = below(12) ? some[below(8)] : (int64_t)number();
    return below(12) ? made : NULL;
}

/* A number of entries: of an array that is there, or too large to be looked at. */
static uint64_t entries(uint64_t most, uint64_t *claimed)
{
    uint64_t count = below(8) ? below(5) : below(most + 1);
    *claimed = below(12) ? count : (uint64_t)1 << (21 + below(43));
    return count;
}

/* ------------------------------------------------------------------------- functions whose arguments belong together */

static void try_aclInit(void)
{
    char *path = below(2) ? block(1) : NULL;
    if (path != NULL)
        *path = 0;
    finish(aclInit(path));
}

static void try_aclFinalize(void)
{
    finish(below(50) ? 0 : aclFinalize());
}

static void try_aclrtResetDevice(void)
{
    finish(below(50) ? 0 : aclrtResetDevice((int32_t)number()));
}

static void try_aclGetRecentErrMsg(void)
{
    const char *text = aclGetRecentErrMsg();
    if (text == NULL || strlen(text) > 100000)
        die("a message without an end");
    finish(0);
}

static void try_aclrtGetSocName(void)
{
    const char *text = aclrtGetSocName();
    if (text == NULL || strncmp(text, "Ascend", 6) != 0)
        die("no name of a chip");
    finish(0);
}

static void try_aclrtMalloc(void)
{
    void **place = output(sizeof(void *));
    size_t size = below(4) ? 1 + below(5000) : number();
    int status = aclrtMalloc(place, size, (aclrtMemMallocPolicy)number());
    if (status == 0) {
        if (alone && size < (1 << 20))
            memset(*place, 0x5A, size);
        remember(*place);
    }
    finish(status);
}

static void try_aclCreateTensor(void)
{
    uint64_t claimed, stored, rank = entries(25, &claimed), storage_rank = below(4) ? rank : below(26);
    const int64_t *view = dims(rank), *strides = below(2) ? dims(rank) : NULL;
    const int64_t *storage = storage_rank == rank && below(2) ? view : dims(storage_rank);
    stored = claimed == rank ? storage_rank : claimed;
    remember(aclCreateTensor(view, claimed, (aclDataType)(below(8) ? (int)below(30) - 1 : (int)number()), strides,
                             below(4) ? 0 : (int64_t)number(), (aclFormat)(below(3) ? 2 : (int)number()), storage, stored,
                             handle()));
    finish(0);
}

static void try_aclCreateTensorList(void)
{
    uint64_t claimed, count = entries(40, &claimed);
    const aclTensor **made = block(sizeof(*made) * count);
    for (uint64_t i = 0; i < count; i++)
        made[i] = handle();
    remember(aclCreateTensorList(below(12) ? made : NULL, claimed));
    finish(0);
}

static void try_aclCreateIntArray(void)
{
    uint64_t claimed, count = entries(1000, &claimed);
    remember(aclCreateIntArray(dims(count), claimed));
    finish(0);
}

static void try_aclCreateFloatArray(void)
{
    uint64_t claimed, count = entries(1000, &claimed);
    remember(aclCreateFloatArray(below(12) ? block(sizeof(float) * count) : NULL, claimed));
    finish(0);
}

static void try_aclCreateBoolArray(void)
{
    uint64_t claimed, count = entries(1000, &claimed);
    bool *made = block(count);
    for (uint64_t i = 0; i < count; i++)
        made[i] = below(2);
    remember(aclCreateBoolArray(below(12) ? made : NULL, claimed));
    finish(0);
}

static void try_aclCreateScalar(void)
{
    static const unsigned char sizes[28] = {4, 2, 1, 4, 1, 0, 2, 2, 4, 8, 8, 8, 1, 0, 0, 0, 8, 16, [27] = 2};
    int kind = below(8) ? (int)below(28) : (int)number();
    size_t size = kind >= 0 && kind < 28 ? sizes[kind] : 0;
    remember(aclCreateScalar(below(12) ? block(size) : NULL, (aclDataType)kind));
    finish(0);
}

extern void _ZdaPv(void *); /* operator delete[], with which the copies go back */

static void try_copies(aclnnStatus (*function)(const aclTensor *, int64_t **, uint64_t *))
{
    int64_t **values = output(sizeof(*values));
    uint64_t *count = output(sizeof(*count));
    volatile int64_t sum = 0;
    int status = function(handle(), values, count);
    if (status == 0) {
        for (uint64_t i = 0; i < *count; i++)
            sum = (*values)[i];
        _ZdaPv(*values);
    }
    (void)sum;
    finish(status);
}

static void try_aclGetViewShape(void)
{
    try_copies(aclGetViewShape);
}

static void try_aclGetViewStrides(void)
{
    try_copies(aclGetViewStrides);
}

static void try_aclGetStorageShape(void)
{
    try_copies(aclGetStorageShape);
}

/* Host memory is there with `count` bytes; a count above the room is refused before anything is read. */
static void copy(int asynchronous)
{
    size_t size = below(300), room = below(4) ? size : below(300), count = below(4) ? size : number();
    int kind = (int)below(6);
    void *host, *to, *from;
    if (count > size && count <= room)
        count = size;
    host = block(size);
    to = kind == 2 || kind == 0 ? host : handle();
    from = kind == 1 ? host : kind == 0 ? block(size) : handle();
    if (kind == 4) { /* an address of no device memory counts as the host's */
        to = block(size);
        from = host;
    }
    if ((kind == 2 || kind == 0 || kind == 4) && room > size)
        room = size;
    if (asynchronous)
        finish(aclrtMemcpyAsync(to, room, from, count, (aclrtMemcpyKind)kind, below(2) ? NULL : handle()));
    else
        finish(aclrtMemcpy(to, room, from, count, (aclrtMemcpyKind)kind));
}

static void try_aclrtMemcpy(void)
{
    copy(0);
}

static void try_aclrtMemcpyAsync(void)
{
    copy(1);
}

/* ------------------------------------------------------------------------- libc_sec.so */

struct target {
    char *start;
    size_t room, most; /* most: what the call is told, the room or a number that is refused */
};

static struct target target(void)
{
    struct target made;
    made.room = below(40);
    made.start = block(made.room);
    if (made.room > 0 && below(8))
        made.start[below(made.room)] = 0;
    made.most = below(10) ? made.room : below(2) ? 0 : (size_t)0x80000000u + below(1000);
    if (below(20) == 0)
        made.start = NULL;
    return made;
}

/* A source with a zero at its end, or a part of the target. */
static const char *text(struct target target)
{
    size_t length = below(50);
    char *made = block(length + 1);
    for (size_t i = 0; i < length; i++)
        made[i] = (char)('a' + below(26));
    made[length] = 0;
    if (target.start != NULL && target.room > 0 && below(6) == 0) {
        target.start[target.room - 1] = 0;
        return target.start + below(target.room);
    }
    return below(20) ? made : NULL;
}

static void ends(struct target target, int status)
{
    if (target.start != NULL && target.most == target.room && target.room > 0 &&
        strnlen(target.start, target.room) == target.room)
        die("a string without an end");
    finish(status);
}

static void memory(errno_t (*function)(void *, size_t, const void *, size_t))
{
    struct target to = target();
    size_t size = below(50), count = below(4) ? below(size + 1) : to.most + 1 + below(100);
    const char *from = block(size);
    if (to.start != NULL && to.room > 0 && below(4) == 0) {
        size_t first = below(to.room);
        from = to.start + first;
        count = below(to.room - first + 1);
    }
    finish(function(to.start, to.most, below(20) ? from : NULL, count));
}

static void try_memcpy_s(void)
{
    memory(memcpy_s);
}

static void try_memmove_s(void)
{
    memory(memmove_s);
}

static void try_memset_s(void)
{
    struct target to = target();
    finish(memset_s(to.start, to.most, (int)draw(), below(4) ? below(50) : number()));
}

static void try_strcpy_s(void)
{
    struct target to = target();
    ends(to, strcpy_s(to.start, to.most, text(to)));
}

static void try_strcat_s(void)
{
    struct target to = target();
    ends(to, strcat_s(to.start, to.most, text(to)));
}

static void try_strncpy_s(void)
{
    struct target to = target();
    ends(to, strncpy_s(to.start, to.most, text(to), below(4) ? below(60) : number()));
}

static void try_strncat_s(void)
{
    struct target to = target();
    ends(to, strncat_s(to.start, to.most, text(to), below(4) ? below(60) : number()));
}

/* The arguments of a format are no part of the target here: C forbids that. */
static const char *word(void)
{
    struct target none = {NULL, 0, 0};
    const char *made = text(none);
    return made ? made : "";
}

static void try_sprintf_s(void)
{
    struct target to = target();
    int length = sprintf_s(to.start, to.most, "%s-%d", word(), (int)number());
    ends(to, length < 0);
}

static void try_snprintf_s(void)
{
    struct target to = target();
    int length = snprintf_s(to.start, to.most, below(4) ? below(60) : number(), "%s+%s", word(), word());
    ends(to, length < 0);
}

static void try_snprintf_truncated_s(void)
{
    struct target to = target();
    int length = snprintf_truncated_s(to.start, to.most, "%s %g", word(), real());
    ends(to, length < 0);
}

static int through_list(int which, struct target to, size_t count, const char *format, ...)
{
    va_list list;
    int length;
    va_start(list, format);
    if (which == 0)
        length = vsprintf_s(to.start, to.most, format, list);
    else if (which == 1)
        length = vsnprintf_s(to.start, to.most, count, format, list);
    else
        length = vsnprintf_truncated_s(to.start, to.most, format, list);
    va_end(list);
    return length;
}

static void by_list(int which)
{
    struct target to = target();
    int length = through_list(which, to, below(4) ? below(60) : number(), "%s%d", word(), (int)draw());
    ends(to, length < 0);
}

static void try_vsprintf_s(void)
{
    by_list(0);
}

static void try_vsnprintf_s(void)
{
    by_list(1);
}

static void try_vsnprintf_truncated_s(void)
{
    by_list(2);
}

static void try_strtok_s(void)
{
    struct target none = {NULL, 0, 0};
    char *state = NULL, *given = (char *)text(none);
    char *part = strtok_s(given, below(20) ? "aeiou" : NULL, below(20) ? &state : NULL);
    for (int i = 0; part != NULL && i < 60; i++)
        part = strtok_s(NULL, "aeiou", &state);
    finish(0);
}

/* ------------------------------------------------------------------------- operators */

enum kind { TENSOR, INTEGER, REAL, INTEGERS, NOTHING };

struct given { /* an argument of a valid call */
    enum kind kind;
    int dtype, rank;
    int64_t dims[6];
    const void *data;
    size_t bytes;
    int64_t integer;
    double real;
};

struct call {
    const struct given *given; /* null: every argument is drawn */
    int changed;               /* the place of one that is drawn; -1 for none */
    const void *tensors[MOST], *arrays[MOST];
    void *blocks[MOST];
    int made;
    uint64_t *size;
    aclOpExecutor **executor;
};

static int is_drawn(const struct call *call, int place)
{
    return call->given == NULL || call->changed == place;
}

static void *as_handle(struct call *call, int place)
{
    const struct given *given = call->given ? &call->given[place] : NULL;
    void *found = NULL;
    if (is_drawn(call, place))
        return handle();
    if (given->kind == INTEGERS) {
        found = aclCreateIntArray(given->data, given->bytes / 8);
        call->arrays[call->made++] = found;
    } else if (given->kind == TENSOR) {
        void *data = NULL;
        int64_t *shape = block(8 * (size_t)given->rank);
        memcpy(shape, given->dims, 8 * (size_t)given->rank);
        if (given->bytes > 0 && aclrtMalloc(&data, given->bytes, ACL_MEM_MALLOC_HUGE_FIRST) == 0)
            aclrtMemcpy(data, given->bytes, given->data, given->bytes, ACL_MEMCPY_HOST_TO_DEVICE);
        found = aclCreateTensor(shape, (uint64_t)given->rank, (aclDataType)given->dtype, NULL, 0, ACL_FORMAT_ND, shape,
                                (uint64_t)given->rank, data);
        call->blocks[call->made] = data;
        call->tensors[call->made++] = found;
    }
    return found;
}

static int64_t as_integer(struct call *call, int place)
{
    return is_drawn(call, place) ? (int64_t)number() : call->given[place].integer;
}

static double as_real(struct call *call, int place)
{
    return is_drawn(call, place) ? real() : call->given[place].real;
}

static bool as_bool(struct call *call, int place)
{
    return is_drawn(call, place) ? (bool)below(2) : call->given[place].integer != 0;
}

static struct call begin(const struct given *given, int count)
{
    struct call call = {.given = below(4) ? given : NULL, .changed = count && below(2) ? (int)below((uint64_t)count) : -1};
    call.size = output(sizeof(*call.size));
    call.executor = output(sizeof(*call.executor));
    return call;
}

typedef aclnnStatus (*second_phase)(void *, uint64_t, aclOpExecutor *, aclrtStream);

static void second(struct call *call, int status, second_phase run, uint64_t *good)
{
    aclOpExecutor *executor = status == 0 && below(8) ? *call->executor : handle();
    int own = status == 0 && executor == *call->executor, times = below(8) ? 1 : 2;
    if (status == 0)
        remember(*call->executor);
    else
        __atomic_fetch_add(&first_refused, 1, __ATOMIC_RELAXED);
    if (own && below(8) == 0) /* memory that goes away between the phases */
        for (int i = 0; i < call->made; i++)
            aclrtFree(call->blocks[i]);
    if (own && below(8) == 0)
        aclSetAclOpExecutorRepeatable(executor);
    while (times-- > 0) {
        void *workspace = NULL;
        uint64_t size = status == 0 ? *call->size : number();
        if (size > 0 && size <= (1 << 24) && below(8))
            aclrtMalloc(&workspace, size, ACL_MEM_MALLOC_HUGE_FIRST);
        else if (below(2))
            workspace = handle();
        if (run(workspace, below(8) ? size : number(), executor, below(8) ? NULL : handle()) == 0) {
            __atomic_fetch_add(&ran, 1, __ATOMIC_RELAXED);
            if (own)
                __atomic_fetch_add(good, 1, __ATOMIC_RELAXED);
        }
        if (workspace != NULL)
            aclrtFree(workspace);
        __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
    }
    for (int i = 0; i < call->made; i++) {
        if (call->arrays[i] != NULL)
            below(8) ? (void)aclDestroyIntArray(call->arrays[i]) : remember(call->arrays[i]);
        if (call->tensors[i] != NULL)
            below(8) ? (void)aclDestroyTensor(call->tensors[i]) : remember(call->tensors[i]);
        if (call->blocks[i] != NULL)
            below(8) ? (void)aclrtFree(call->blocks[i]) : remember(call->blocks[i]);
    }
    finish(status);
}
