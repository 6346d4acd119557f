/* Copies and fills. */
#define _GNU_SOURCE
#include "emulator.h"

#include <stdlib.h>
#include <string.h>

#define BYTES_PER_NANOSECOND 25.0
#define SET_UP_NANOSECONDS 1500.0

struct copying {
    struct operation operation;
    /* One of the two sides may be host memory; NULL host means that both are the GPU's. */
    CUdeviceptr source, target;
    const char *host_source;
    char *host_target;
    uint64_t bytes;
    /* What pageable memory held when the program asked: the driver stages it before it returns. */
    char staged[];
};

static CUresult run_copy(struct operation *operation) {
    struct copying *copying = (struct copying *)operation;
    const void *from = copying->host_source ? copying->host_source : memory_at(copying->source, copying->bytes);
    void *to = copying->host_target ? copying->host_target : memory_at(copying->target, copying->bytes);
    if (!from || !to)
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    memmove(to, from, copying->bytes);
    return CUDA_SUCCESS;
}

static struct copying *new_copy(const char *name, uint64_t bytes, uint64_t staged) {
    double time = SET_UP_NANOSECONDS + (double)bytes / BYTES_PER_NANOSECOND;
    struct copying *copying = operation_new(sizeof *copying + staged, name, run_copy, time);
    copying->bytes = bytes;
    return copying;
}

/* A copy from or to pageable memory waits, so that it cannot be recorded. */
static CUresult pageable(CUstream stream) {
    counters.pageable_copies++;
    struct stream *target = stream_of(stream);
    return capture_of(target) ? capture_invalidate(target) : CUDA_SUCCESS;
}

EXPORTED CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t bytes, CUstream stream) {
    LOCKED;
    if (!bytes)
        return gpu_failure;
    if (!memory_at(target, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    bool pinned = memory_is_pinned(source, bytes);
    CUresult forbidden = pinned ? CUDA_SUCCESS : pageable(stream);
    if (forbidden)
        return forbidden;
    counters.copies_to_gpu++;
    struct copying *copying = new_copy("copy to GPU", bytes, pinned ? 0 : bytes);
    copying->target = target;
    copying->host_source = pinned ? source : memcpy(copying->staged, source, bytes);
    return stream_submit(stream, copying);
}

EXPORTED CUresult cuStreamSynchronize(CUstream stream);

EXPORTED CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t bytes, CUstream stream) {
    LOCKED;
    if (!bytes)
        return gpu_failure;
    if (!memory_at(source, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    bool pinned = memory_is_pinned(target, bytes);
    CUresult forbidden = pinned ? CUDA_SUCCESS : pageable(stream);
    if (forbidden)
        return forbidden;
    counters.copies_to_host++;
    struct copying *copying = new_copy("copy to host", bytes, 0);
    copying->source = source;
    copying->host_target = target;
    CUresult result = stream_submit(stream, copying);
    return result || pinned ? result : cuStreamSynchronize(stream);
}

EXPORTED CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream) {
    LOCKED;
    if (!bytes)
        return gpu_failure;
    if (!memory_at(source, bytes) || !memory_at(target, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    if (source < target + bytes && target < source + bytes)
        emulator_abort("a copy of %zu bytes onto memory that overlaps its source", bytes);
    counters.copies_on_gpu++;
    struct copying *copying = new_copy("copy on GPU", bytes, 0);
    copying->source = source;
    copying->target = target;
    return stream_submit(stream, copying);
}

EXPORTED CUresult cuCtxSynchronize(void);

/* The calls without a stream wait for everything. */
static CUresult alone(CUresult submitted) {
    CUresult forbidden = capture_forbids();
    if (submitted || forbidden)
        return submitted ? submitted : forbidden;
    return cuCtxSynchronize();
}

EXPORTED CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t bytes) {
    LOCKED;
    return alone(cuMemcpyHtoDAsync_v2(target, source, bytes, NULL));
}

EXPORTED CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t bytes) {
    LOCKED;
    return alone(cuMemcpyDtoHAsync_v2(target, source, bytes, NULL));
}

EXPORTED CUresult cuMemcpyDtoD_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes) {
    LOCKED;
    return alone(cuMemcpyDtoDAsync_v2(target, source, bytes, NULL));
}

struct filling {
    struct operation operation;
    CUdeviceptr target;
    uint64_t count;
    uint32_t value, width;
};

static CUresult run_fill(struct operation *operation) {
    struct filling *filling = (struct filling *)operation;
    char *to = memory_at(filling->target, filling->count * filling->width);
    if (!to)
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (!filling->value)
        memory_clear(filling->target, filling->count * filling->width);
    else if (filling->width == 1)
        memset(to, (int)filling->value, filling->count);
    else
        for (uint64_t index = 0; index < filling->count; index++)
            memcpy(to + index * filling->width, &filling->value, filling->width);
    return CUDA_SUCCESS;
}

static CUresult fill(CUdeviceptr target, uint32_t value, uint32_t width, uint64_t count, CUstream stream) {
    if (!count)
        return gpu_failure;
    if (target % width || !memory_at(target, count * width))
        return CUDA_ERROR_INVALID_VALUE;
    counters.fills++;
    double time = SET_UP_NANOSECONDS + (double)(count * width) / BYTES_PER_NANOSECOND;
    struct filling *filling = operation_new(sizeof *filling, "fill", run_fill, time);
    filling->target = target;
    filling->count = count;
    filling->value = value;
    filling->width = width;
    return stream_submit(stream, filling);
}

EXPORTED CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t count, CUstream stream) {
    LOCKED;
    return fill(target, value, 1, count, stream);
}

EXPORTED CUresult cuMemsetD16Async(CUdeviceptr target, unsigned short value, size_t count, CUstream stream) {
    LOCKED;
    return fill(target, value, 2, count, stream);
}

EXPORTED CUresult cuMemsetD32Async(CUdeviceptr target, unsigned value, size_t count, CUstream stream) {
    LOCKED;
    return fill(target, value, 4, count, stream);
}

EXPORTED CUresult cuMemsetD8_v2(CUdeviceptr target, unsigned char value, size_t count) {
    LOCKED;
    return alone(fill(target, value, 1, count, NULL));
}
