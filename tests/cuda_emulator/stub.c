/* stubs/libcuda.so: what a CUDA toolkit has for linking programs on machines without a driver. Answers, and does nothing. */
#include "emulator.h"

EXPORTED CUresult cuInit(unsigned flags) {
    (void)flags;
    return CUDA_ERROR_STUB_LIBRARY;
}

EXPORTED CUresult cuDriverGetVersion(int *version) {
    (void)version;
    return CUDA_ERROR_STUB_LIBRARY;
}
