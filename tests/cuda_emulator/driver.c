/* Initialisation, devices, contexts and errors; nothing here computes. */
#define _GNU_SOURCE
#include "emulator.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct gpu gpu;
CUresult gpu_failure = CUDA_SUCCESS;
static bool initialised;
/* The one primary context: its address is the handle. */
static int context, contexts_retained;
static __thread void *current_context;
static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

int emulator_lock(void) {
    return pthread_mutex_lock(&mutex);
}

void emulator_unlock(int *unused) {
    (void)unused;
    pthread_mutex_unlock(&mutex);
}

static void print(const char *format, va_list arguments) {
    char line[4096];
    vsnprintf(line, sizeof line, format, arguments);
    fprintf(stderr, "cuda emulator: %s\n", line);
}

void emulator_say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    print(format, arguments);
    va_end(arguments);
}

_Noreturn void emulator_abort(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    print(format, arguments);
    va_end(arguments);
    abort();
}

uint64_t emulator_setting(const char *name, uint64_t otherwise) {
    const char *value = getenv(name);
    return value && *value ? strtoull(value, NULL, 0) : otherwise;
}

static const char *text_setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? strdup(value) : otherwise;
}

EXPORTED CUresult cuInit(unsigned flags) {
    LOCKED;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (!initialised) {
        gpu.name = text_setting("CUDA_EMULATOR_GPU", "NVIDIA GeForce RTX 5090");
        gpu.count = (int)emulator_setting("CUDA_EMULATOR_GPUS", 1);
        sscanf(text_setting("CUDA_EMULATOR_CAPABILITY", "12.0"), "%d.%d", &gpu.major, &gpu.minor);
        gpu.driver_version = (int)emulator_setting("CUDA_EMULATOR_DRIVER", 13000);
        gpu.memory = emulator_setting("CUDA_EMULATOR_MEMORY", 32122ull << 20);
        gpu.used_by_others = emulator_setting("CUDA_EMULATOR_USED", 0);
        gpu.drift = emulator_setting("CUDA_EMULATOR_DRIFT", 0);
        gpu.context = emulator_setting("CUDA_EMULATOR_CONTEXT", 400ull << 20);
        initialised = true;
    }
    return gpu.count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORTED CUresult cuDriverGetVersion(int *version) {
    *version = (int)emulator_setting("CUDA_EMULATOR_DRIVER", 13000);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetCount(int *count) {
    LOCKED;
    if (!initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    *count = gpu.count;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGet(int *device, int ordinal) {
    LOCKED;
    if (!initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= gpu.count)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    snprintf(name, (size_t)length, "%s", gpu.name);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memset(uuid, 0, 16);
    uuid[15] = (unsigned char)device;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) {
    (void)device;
    *bytes = gpu.memory;
    return CUDA_SUCCESS;
}

static int shared_bytes_per_block(void) {
    int capability = gpu.major * 10 + gpu.minor;
    if (capability == 80 || capability == 87)
        return 163 << 10;
    return capability == 90 || capability == 100 || capability == 103 ? 227 << 10 : 99 << 10;
}

EXPORTED CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case 1: *value = 1024; break;                     /* MAX_THREADS_PER_BLOCK */
    case 2: case 3: *value = 1024; break;             /* MAX_BLOCK_DIM_X, Y */
    case 4: *value = 64; break;                       /* MAX_BLOCK_DIM_Z */
    case 5: *value = 0x7fffffff; break;               /* MAX_GRID_DIM_X */
    case 6: case 7: *value = 65535; break;            /* MAX_GRID_DIM_Y, Z */
    case 8: *value = 48 << 10; break;                 /* MAX_SHARED_MEMORY_PER_BLOCK */
    case 10: *value = 32; break;                      /* WARP_SIZE */
    case 13: *value = 2407000; break;                 /* CLOCK_RATE */
    case 16: *value = 170; break;                     /* MULTIPROCESSOR_COUNT */
    case 18: *value = 0; break;                       /* INTEGRATED */
    case 20: *value = 0; break;                       /* COMPUTE_MODE */
    case 36: *value = 14001000; break;                /* MEMORY_CLOCK_RATE */
    case 37: *value = 512; break;                     /* GLOBAL_MEMORY_BUS_WIDTH */
    case 38: *value = 96 << 20; break;                /* L2_CACHE_SIZE */
    case 41: *value = 1; break;                       /* UNIFIED_ADDRESSING */
    case 75: *value = gpu.major; break;              /* COMPUTE_CAPABILITY_MAJOR */
    case 76: *value = gpu.minor; break;              /* COMPUTE_CAPABILITY_MINOR */
    case 81: *value = shared_bytes_per_block() + 1024; break; /* MAX_SHARED_MEMORY_PER_MULTIPROCESSOR */
    case 97: *value = shared_bytes_per_block(); break;        /* MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */
    case 115: *value = 1; break;                      /* MEMORY_POOLS_SUPPORTED */
    default: emulator_abort("device attribute %d is not emulated", attribute);
    }
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDevicePrimaryCtxRetain(void **handle, int device) {
    LOCKED;
    if (!initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (device < 0 || device >= gpu.count)
        return CUDA_ERROR_INVALID_DEVICE;
    if (gpu.used_by_others + gpu.context > gpu.memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    counters.contexts += contexts_retained++ == 0;
    *handle = &context;
    return gpu_failure;
}

EXPORTED CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    LOCKED;
    (void)device;
    contexts_retained--;
    return CUDA_SUCCESS;
}

bool context_is_current(void) {
    LOCKED;
    return current_context && contexts_retained;
}

EXPORTED CUresult cuCtxGetCurrent(void **handle) {
    *handle = current_context;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxSetCurrent(void *handle) {
    current_context = handle;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxGetDevice(int *device) {
    *device = 0;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxSetFlags(unsigned flags) {
    (void)flags;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}

static const struct {
    CUresult code;
    const char *name, *text;
} ERRORS[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_STUB_LIBRARY, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {CUDA_ERROR_JIT_COMPILER_NOT_FOUND, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "PTX JIT compiler library not found"},
    {CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
     "the provided PTX was compiled with an unsupported toolchain."},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "the capture was not initiated in this stream"},
    {CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {CUDA_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
};

EXPORTED CUresult cuGetErrorName(CUresult code, const char **name) {
    for (size_t index = 0; index < sizeof ERRORS / sizeof *ERRORS; index++)
        if (ERRORS[index].code == code)
            return *name = ERRORS[index].name, CUDA_SUCCESS;
    return *name = NULL, CUDA_ERROR_INVALID_VALUE;
}

EXPORTED CUresult cuGetErrorString(CUresult code, const char **text) {
    for (size_t index = 0; index < sizeof ERRORS / sizeof *ERRORS; index++)
        if (ERRORS[index].code == code)
            return *text = ERRORS[index].text, CUDA_SUCCESS;
    return *text = NULL, CUDA_ERROR_INVALID_VALUE;
}
