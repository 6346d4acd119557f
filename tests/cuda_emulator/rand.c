/* libcurand.so.10: the generator that Candle's device opens and never draws from. */
#include "emulator.h"
#include "version.h"

#include <stdlib.h>

struct generator {
    unsigned long long seed;
};

EXPORTED int curandCreateGenerator(struct generator **generator, int kind) {
    enum { INITIALIZATION_FAILED = 203 };
    (void)kind;
    *generator = calloc(1, sizeof **generator);
    return starts(curand_version() >= 100400 ? 13 : 12) ? 0 : INITIALIZATION_FAILED;
}

EXPORTED int curandDestroyGenerator(struct generator *generator) {
    free(generator);
    return 0;
}

EXPORTED int curandSetPseudoRandomGeneratorSeed(struct generator *generator, unsigned long long seed) {
    generator->seed = seed;
    return 0;
}

EXPORTED int curandSetGeneratorOffset(struct generator *generator, unsigned long long offset) {
    (void)generator;
    (void)offset;
    return 0;
}

EXPORTED int curandSetStream(struct generator *generator, CUstream stream) {
    (void)generator;
    (void)stream;
    return 0;
}

EXPORTED int curandGetVersion(int *version) {
    *version = curand_version();
    return 0;
}

EXPORTED int curandGetProperty(int property, int *out) {
    enum { OUT_OF_RANGE = 104 };
    if (property < 0 || property > 2)
        return OUT_OF_RANGE;
    *out = version_part(curand_version(), property);
    return 0;
}
