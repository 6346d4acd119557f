/* Loaded into a program with LD_PRELOAD, holds it back as a machine in trouble does, by what is in its environment:
 * PROCESSOR: the processor's name in /proc/cpuinfo. SWAPPED_KIB: what /proc/self/status says is swapped out. FSYNC_SECONDS: how long a file takes to reach the disk.
 * CLOCK_AHEAD: how many seconds the monotonic clock jumps ahead once the file `jump` is in the current folder.
 * AT_OPENING: the file that is opened, for the OPENING-th time, when the shell command MEANWHILE has run.
 * GROWTH_MIB: resident memory that it gains each second; mappings of the same pages, so that the machine loses none. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MIB = 1 << 20 };

/* The same text with another value in the lines that begin with a name, in a file without a name. */
static int with_value(int original, const char *name, const char *value) {
    char line[8192];
    FILE *from = fdopen(original, "r");
    int changed = memfd_create("changed", 0);
    while (from && fgets(line, sizeof line, from))
        if (strncmp(line, name, strlen(name)))
            dprintf(changed, "%s", line);
        else
            dprintf(changed, "%s:\t%s\n", name, value);
    fclose(from);
    lseek(changed, 0, SEEK_SET);
    return changed;
}

/* Runs the command of another process that is due before this file is opened. */
static void meanwhile(const char *path) {
    static int openings;
    const char *file = getenv("AT_OPENING"), *command = getenv("MEANWHILE"), *opening = getenv("OPENING");
    if (!file || !command || !opening || strcmp(path, file) || ++openings != atoi(opening))
        return;
    unsetenv("AT_OPENING");
    unsetenv("LD_PRELOAD");
    if (system(command))
        abort();
}

int open64(const char *path, int flags, ...) {
    static int (*next)(const char *, int, ...);
    next = next ? next : (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
    meanwhile(path);
    va_list rest;
    va_start(rest, flags);
    int file = next(path, flags, va_arg(rest, mode_t));
    va_end(rest);
    const char *kibibytes = getenv("SWAPPED_KIB"), *processor = getenv("PROCESSOR");
    if (kibibytes && file >= 0 && !strcmp(path, "/proc/self/status"))
        return with_value(file, "VmSwap", kibibytes);
    if (processor && file >= 0 && !strcmp(path, "/proc/cpuinfo"))
        return with_value(file, "model name", processor);
    return file;
}

int fsync(int file) {
    static int (*next)(int);
    next = next ? next : (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    const char *seconds = getenv("FSYNC_SECONDS");
    if (seconds)
        usleep((useconds_t)(atof(seconds) * 1e6));
    return next(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = (int)syscall(SYS_clock_gettime, clock, now);
    const char *ahead = getenv("CLOCK_AHEAD");
    if (ahead && clock == CLOCK_MONOTONIC && !access("jump", F_OK))
        now->tv_sec += atol(ahead);
    return status;
}

static void *grow(void *mib) {
    int pages = memfd_create("pages", 0);
    size_t size = (size_t)atoi(mib) * MIB;
    if (!ftruncate(pages, (off_t)size))
        for (;; sleep(1))
            mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, pages, 0);
    return NULL;
}

__attribute__((constructor)) static void start(void) {
    pthread_t thread;
    char *mib = getenv("GROWTH_MIB");
    if (mib)
        pthread_create(&thread, NULL, grow, mib);
}
