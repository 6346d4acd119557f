/* Loaded into a trainer with LD_PRELOAD, holds it back as a machine in trouble does, by what is in its environment:
 * SWAPPED_KIB: what /proc/self/status says is swapped out. FSYNC_SECONDS: how long a file takes to reach the disk.
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
#include <unistd.h>

enum { MIB = 1 << 20 };

/* The same text with another line for VmSwap, in a file without a name. */
static int with_swap(int status, const char *kibibytes) {
    char line[256];
    FILE *from = fdopen(status, "r");
    int swapped = memfd_create("status", 0);
    while (from && fgets(line, sizeof line, from))
        if (strncmp(line, "VmSwap:", 7))
            dprintf(swapped, "%s", line);
    dprintf(swapped, "VmSwap:\t%s kB\n", kibibytes);
    fclose(from);
    lseek(swapped, 0, SEEK_SET);
    return swapped;
}

int open64(const char *path, int flags, ...) {
    static int (*next)(const char *, int, ...);
    next = next ? next : (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
    va_list rest;
    va_start(rest, flags);
    int file = next(path, flags, va_arg(rest, mode_t));
    va_end(rest);
    const char *kibibytes = getenv("SWAPPED_KIB");
    return kibibytes && file >= 0 && !strcmp(path, "/proc/self/status") ? with_swap(file, kibibytes) : file;
}

int fsync(int file) {
    static int (*next)(int);
    next = next ? next : (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    const char *seconds = getenv("FSYNC_SECONDS");
    if (seconds)
        usleep((useconds_t)(atof(seconds) * 1e6));
    return next(file);
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
