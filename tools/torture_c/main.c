/* driver.c's end: a third of the time in one thread, then in four.
 *
 * driver SECONDS SEED [beside]: with the third argument the process forks while its four threads call, else while there
 * is one. Beside threads a child waits for ever for a lock of AddressSanitizer's allocator, if one held it. */

static double end_of_part;
static uint64_t forks;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void some(void)
{
    int32_t device;
    uint64_t place = below(2) ? below(OPERATORS) : below(FUNCTIONS);
    if (below(32) == 0 && aclrtGetDevice(&device) != 0) {
        aclInit(NULL);
        aclrtSetDevice(0);
    }
    every[place].function();
    __atomic_fetch_add(&every[place].calls, 1, __ATOMIC_RELAXED);
}

static void *work(void *seed)
{
    generator += (uint64_t)(uintptr_t)seed * 0x9E3779B97F4A7C15u;
    while (now() < end_of_part)
        some();
    return NULL;
}

static void fork_one(void)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        alarm(60); /* a child that hangs fails */
        generator += forks;
        for (int i = 0; i < 40; i++)
            some();
        _exit(0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child)
        die("no fork");
    if (status != 0) {
        fprintf(stderr, "driver: a forked child ended with wait status %d\n", status);
        exit(3);
    }
    forks++;
}

/* Until each function was called and each operator ran with what it was given. */
static uint64_t leave_none_out(void)
{
    uint64_t silent = 0;
    for (size_t i = 0; i < FUNCTIONS; i++) {
        for (int tries = 0; tries < 500 && (every[i].calls == 0 || (i < OPERATORS && good[i] == 0)); tries++) {
            every[i].function();
            every[i].calls++;
        }
        if (i < OPERATORS && good[i] == 0) {
            fprintf(stderr, "driver: never ran: %s: %s\n", every[i].name, aclGetRecentErrMsg());
            silent++;
        }
    }
    return silent;
}

int main(int count, char **arguments)
{
    pthread_t threads[4];
    int beside = count > 3;
    uint64_t silent;
    double seconds = count > 2 ? atof(arguments[1]) : 10, start;
    generator += count > 2 ? (uint64_t)atoi(arguments[2]) * 0xD1342543DE82EF95u : 0;
    if (aclInit(NULL) != 0 || aclrtSetDevice(0) != 0)
        die(aclGetRecentErrMsg());
    silent = leave_none_out(); /* which also compiles */
    start = now();
    end_of_part = start + seconds / 3;
    while (now() < end_of_part) {
        for (int i = 0; i < 400; i++)
            some();
        if (!beside)
            fork_one();
    }
    alone = 0;
    end_of_part = start + seconds;
    for (uintptr_t i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, work, (void *)(i + 1));
    while (beside && now() < end_of_part)
        fork_one();
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    printf("{\"calls\": %lu, \"functions\": %lu, \"first_refused\": %lu, \"ran\": %lu, \"forks\": %lu, \"silent\": %lu}\n",
           calls, (unsigned long)FUNCTIONS, first_refused, ran, forks, silent);
    return 0;
}
