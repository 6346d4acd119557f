/* Which versions the libraries say they are of: what the environment sets, else what they were compiled as. None starts on a
 * driver of an earlier CUDA. */
#ifndef VERSION_H
#define VERSION_H

#include "emulator.h"

#include <stdlib.h>

#ifndef CUBLAS
#define CUBLAS 130100
#endif
#ifndef CURAND
#define CURAND 100400
#endif

static inline int version_or(const char *setting, int compiled) {
    const char *value = getenv(setting);
    return value && *value ? atoi(value) : compiled;
}

static inline int cublas_version(void) {
    return version_or("CUDA_EMULATOR_CUBLAS", CUBLAS);
}

static inline int curand_version(void) {
    return version_or("CUDA_EMULATOR_CURAND", CURAND);
}

/* Major, minor or patch, as the functions called GetProperty answer. */
static inline int version_part(int version, int part) {
    int parts[] = {version / 10000, version / 100 % 100, version % 100};
    return parts[part];
}

CUresult cuDriverGetVersion(int *version);

static inline bool starts(int cuda) {
    int driver;
    return cuDriverGetVersion(&driver) == CUDA_SUCCESS && cuda <= driver / 1000;
}

#endif
