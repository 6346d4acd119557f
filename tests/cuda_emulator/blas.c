/* libcublas.so.13: the handle that Candle's device opens and never multiplies with. */
#include "emulator.h"
#include "version.h"

#include <stdlib.h>

enum { SUCCESS = 0, NOT_INITIALIZED = 1 };

struct handle {
    CUstream stream;
};

EXPORTED int cublasCreate_v2(struct handle **handle) {
    *handle = calloc(1, sizeof **handle);
    return starts(cublas_version() / 10000) ? SUCCESS : NOT_INITIALIZED;
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
    *out = cublas_version();
    return SUCCESS;
}

extern int cublasLtGetProperty(int property, int *out);

/* As NVIDIA's own does, it passes on what libcublasLt answers: whichever is loaded. */
EXPORTED int cublasGetProperty(int property, int *out) {
    return cublasLtGetProperty(property, out);
}
