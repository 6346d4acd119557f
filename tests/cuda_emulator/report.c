/* Counts, written as JSON to the file that CUDA_EMULATOR_REPORT names when the program ends. */
#define _GNU_SOURCE
#include "emulator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct counters counters;

static struct kernel {
    struct kernel *next;
    const char *entry;
    uint64_t runs;
} *kernels;

void report_kernel(const char *entry) {
    struct kernel *kernel = kernels;
    while (kernel && strcmp(kernel->entry, entry) != 0)
        kernel = kernel->next;
    if (!kernel) {
        kernel = calloc(1, sizeof *kernel);
        kernel->entry = strdup(entry);
        kernel->next = kernels;
        kernels = kernel;
    }
    kernel->runs++;
}

/* The program ends here. */
__attribute__((destructor)) static void write_report(void) {
    memory_check();
    const char *path = getenv("CUDA_EMULATOR_REPORT");
    FILE *file = path && *path ? fopen(path, "w") : NULL;
    if (!file)
        return;
    fprintf(file, "{");
#define X(name) fprintf(file, "\"%s\": %llu, ", #name, (unsigned long long)counters.name);
    COUNTERS(X)
#undef X
    fprintf(file, "\"kernels\": {");
    for (struct kernel *kernel = kernels; kernel; kernel = kernel->next)
        fprintf(file, "%s\"%s\": %llu", kernel == kernels ? "" : ", ", kernel->entry, (unsigned long long)kernel->runs);
    fprintf(file, "}}\n");
    fclose(file);
}
