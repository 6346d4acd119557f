/* libcublas.so.13: the handle that Candle's device opens and never multiplies with. */
#include "emulator.h"
#include "version.h"

#include <stdlib.h>

enum { SUCCESS = 0, INVALID_VALUE = 7 };

struct handle {
    CUstream stream;
};

static int version(void) {
    return version_or("CUDA_EMULATOR_CUBLAS", CUBLAS);
}

EXPORTED int cublasCreate_v2(struct handle **handle) {
    *handle = calloc(1, sizeof **handle);
    return SUCCESS;
}

EXPORTED int cublasDestroy_v2(struct handle *handle) {
    free(handle);
    return SUCCESS;
}

EXPORTED int cublasSetStream_v2(struct handle *handle, CUstream stream) {
    handle->stream = stream;
    return SUCCESS;
}

EXPORTED int cublasGetVersion_v2(struct handle *handle, int *out) {
    (void)handle;
    *out = version();
    return SUCCESS;
}

EXPORTED int cublasGetProperty(int property, int *out) {
    if (property < 0 || property > 2)
        return INVALID_VALUE;
    *out = version_part(version(), property);
    return SUCCESS;
}
