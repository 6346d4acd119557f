/* The GPU's memory.
 *
 * One file without a name holds it. The program sees its addresses but cannot touch them: what the driver copies, it copies
 * through a second mapping elsewhere. The worker has it mapped at these addresses. Every allocation ends close to the end of a
 * page, far from the next one, so that touching what lies behind it is a fault; no address is given out twice, so that touching
 * freed memory is one too; and fresh memory is full of NaN. */
#define _GNU_SOURCE
#include "emulator.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Where no program and no library is loaded on Linux. */
#define BASE 0x200000000000ull
#define SPAN (8ull << 40)
#define PAGE 4096ull
#define GAP (16ull << 20)
/* What the driver promises of any allocation; more would hide that somebody relies on more. */
#define ALIGNMENT 256ull
#define POOL_STEP (32ull << 20)
#define PLAIN_STEP (2ull << 20)
/* Poison touches pages of this machine; beyond so many bytes only the ends are poisoned. */
#define POISONED_AT_MOST (256ull << 20)
#define POISON 0xff
/* From this size on, zeros are holes in the file, which take no memory of this machine. */
#define CLEARED_BY_HOLES (16ull << 20)

#define ROUND_UP(value, step) (((value) + (step) - 1) / (step) * (step))

struct allocation {
    CUdeviceptr start;
    uint64_t bytes;
    bool pooled;
};

struct pinned {
    struct pinned *next;
    char *start;
    uint64_t bytes;
};

static struct allocation *allocations; /* by address */
static size_t living, room;
static struct pinned *pinned;
static int file = -1;
static char *mirror;
static CUdeviceptr next_page = BASE;
static uint64_t pool_used, pool_used_high, pool_reserved, pool_reserved_high, pool_threshold, plain_used;

int memory_file(void) {
    if (file < 0) {
        /* Not 3 or 4, which the worker finds its socket and this file at. */
        file = fcntl(memfd_create("card", MFD_CLOEXEC), F_DUPFD_CLOEXEC, 5);
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void *reserved = mmap((void *)BASE, SPAN, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
        mirror = mmap(NULL, SPAN, PROT_NONE, flags, -1, 0);
        if (file < 0 || ftruncate(file, SPAN) || reserved != (void *)BASE || mirror == MAP_FAILED)
            emulator_abort("cannot reserve addresses for the GPU's memory");
    }
    return file;
}

static CUdeviceptr first_page_of(const struct allocation *allocation) {
    return allocation->start / PAGE * PAGE;
}

static uint64_t pages_of(const struct allocation *allocation) {
    return ROUND_UP(allocation->start + allocation->bytes, PAGE) - first_page_of(allocation);
}

static struct allocation *find(CUdeviceptr address) {
    size_t low = 0, high = living;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (allocations[middle].start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low && address - allocations[low - 1].start < allocations[low - 1].bytes ? &allocations[low - 1] : NULL;
}

void *memory_at(CUdeviceptr address, uint64_t bytes) {
    const struct allocation *allocation = find(address);
    if (!allocation || bytes > allocation->bytes - (address - allocation->start))
        return NULL;
    return mirror + (address - BASE);
}

void memory_visit(void (*visit)(CUdeviceptr, uint64_t)) {
    for (size_t index = 0; index < living; index++)
        visit(first_page_of(&allocations[index]), pages_of(&allocations[index]));
}

static uint64_t free_bytes(void) {
    uint64_t used = gpu.used_by_others + gpu.context + pool_reserved + plain_used;
    return used < gpu.memory ? gpu.memory - used : 0;
}

/* Takes `bytes` from what is left of the GPU. */
static bool reserve(uint64_t bytes, bool pooled) {
    if (!pooled) {
        uint64_t taken = ROUND_UP(bytes, PLAIN_STEP);
        if (taken > free_bytes())
            return false;
        plain_used += taken;
        return true;
    }
    uint64_t wanted = pool_used + ROUND_UP(bytes, 512);
    if (wanted > pool_reserved) {
        uint64_t more = ROUND_UP(wanted - pool_reserved, POOL_STEP);
        if (more > free_bytes())
            more = ROUND_UP(wanted - pool_reserved, PLAIN_STEP);
        if (more > free_bytes())
            return false;
        pool_reserved += more;
    }
    pool_used = wanted;
    if (pool_used > pool_used_high)
        pool_used_high = pool_used;
    if (pool_reserved > pool_reserved_high)
        pool_reserved_high = pool_reserved;
    return true;
}

static void fill_with_poison(const struct allocation *allocation) {
    char *start = mirror + (allocation->start - BASE);
    uint64_t bytes = allocation->bytes;
    if (bytes <= POISONED_AT_MOST) {
        memset(start, POISON, bytes);
    } else {
        memset(start, POISON, POISONED_AT_MOST / 2);
        memset(start + bytes - POISONED_AT_MOST / 2, POISON, POISONED_AT_MOST / 2);
    }
}

static CUresult allocate(CUdeviceptr *address, uint64_t bytes, bool pooled) {
    CUresult forbidden = capture_forbids();
    if (forbidden || gpu_failure)
        return forbidden ? forbidden : gpu_failure;
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    memory_file();
    if (!reserve(bytes, pooled)) {
        /* What was freed on a stream comes back when the stream gets there. */
        CUresult result = streams_drain();
        if (result || !reserve(bytes, pooled))
            return result ? result : CUDA_ERROR_OUT_OF_MEMORY;
    }
    uint64_t pages = ROUND_UP(bytes, PAGE);
    struct allocation made = {next_page + pages - ROUND_UP(bytes, ALIGNMENT), bytes, pooled};
    next_page += pages + GAP;
    if (next_page > BASE + SPAN)
        emulator_abort("the addresses are used up");
    if (living == room) {
        room = room ? 2 * room : 64;
        allocations = realloc(allocations, room * sizeof *allocations);
    }
    allocations[living++] = made;
    CUdeviceptr first = first_page_of(&made);
    if (mmap(mirror + (first - BASE), pages_of(&made), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, (off_t)(first - BASE)) ==
        MAP_FAILED)
        emulator_abort("cannot map %llu bytes", (unsigned long long)bytes);
    worker_map(first, pages_of(&made), true);
    fill_with_poison(&made);
    counters.allocations++;
    if (pool_used + plain_used > counters.allocated_high)
        counters.allocated_high = pool_used + plain_used;
    *address = made.start;
    return CUDA_SUCCESS;
}

void memory_clear(CUdeviceptr address, uint64_t bytes) {
    char *start = mirror + (address - BASE);
    CUdeviceptr first = ROUND_UP(address, PAGE), end = (address + bytes) / PAGE * PAGE;
    if (bytes < CLEARED_BY_HOLES || fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(first - BASE), (off_t)(end - first))) {
        memset(start, 0, bytes);
        return;
    }
    memset(start, 0, first - address);
    memset(start + (end - address), 0, address + bytes - end);
}

/* The bytes between an allocation and the end of its page are zero for ever. */
static void check_end(const struct allocation *allocation) {
    const char *end = mirror + (allocation->start + allocation->bytes - BASE);
    for (uint64_t behind = 0; (allocation->start + allocation->bytes + behind) % PAGE; behind++)
        if (end[behind])
            emulator_abort("something was written %llu bytes behind an allocation of %llu bytes", (unsigned long long)behind,
                           (unsigned long long)allocation->bytes);
}

void memory_check(void) {
    for (size_t index = 0; index < living; index++)
        check_end(&allocations[index]);
}

CUresult memory_free(CUdeviceptr address) {
    struct allocation *allocation = find(address);
    if (!allocation || allocation->start != address)
        return CUDA_ERROR_INVALID_VALUE;
    CUdeviceptr first = first_page_of(allocation);
    uint64_t pages = pages_of(allocation);
    check_end(allocation);
    worker_map(first, pages, false);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    mmap(mirror + (first - BASE), pages, PROT_NONE, flags, -1, 0);
    fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(first - BASE), (off_t)pages);
    if (allocation->pooled) {
        pool_used -= ROUND_UP(allocation->bytes, 512);
        uint64_t needed = ROUND_UP(pool_used, POOL_STEP), kept = needed > pool_threshold ? needed : pool_threshold;
        if (pool_reserved > kept)
            pool_reserved = kept;
    } else {
        plain_used -= ROUND_UP(allocation->bytes, PLAIN_STEP);
    }
    size_t index = (size_t)(allocation - allocations);
    memmove(allocation, allocation + 1, (--living - index) * sizeof *allocation);
    counters.frees++;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    LOCKED;
    return allocate(address, bytes, false);
}

EXPORTED CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream) {
    LOCKED;
    struct stream *target = stream_of(stream);
    /* The driver would record an allocation; every buffer of the program is there before it records anything. */
    return capture_of(target) ? capture_invalidate(target) : allocate(address, bytes, true);
}

struct freeing {
    struct operation operation;
    CUdeviceptr address;
};

static CUresult run_free(struct operation *operation) {
    return memory_free(((struct freeing *)operation)->address);
}

EXPORTED CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    LOCKED;
    struct allocation *allocation = find(address);
    if (!allocation || allocation->start != address)
        return CUDA_ERROR_INVALID_VALUE;
    if (capture_of(stream_of(stream)))
        return capture_invalidate(stream_of(stream));
    struct freeing *freeing = operation_new(sizeof *freeing, "free", run_free, 1000);
    freeing->address = address;
    return stream_submit(stream, freeing);
}

EXPORTED CUresult cuCtxSynchronize(void);

EXPORTED CUresult cuMemFree_v2(CUdeviceptr address) {
    LOCKED;
    CUresult forbidden = capture_forbids();
    if (forbidden)
        return forbidden;
    CUresult result = cuCtxSynchronize();
    return result ? result : memory_free(address);
}

EXPORTED CUresult cuMemGetInfo_v2(size_t *available, size_t *total) {
    LOCKED;
    *available = free_bytes();
    *total = gpu.memory;
    gpu.used_by_others += gpu.drift;
    return gpu_failure;
}

/* The GPU has one pool, the default one; its handle is the address of what it reserved. */
EXPORTED CUresult cuDeviceGetDefaultMemPool(void **pool, int device) {
    (void)device;
    *pool = &pool_reserved;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetMemPool(void **pool, int device) {
    return cuDeviceGetDefaultMemPool(pool, device);
}

EXPORTED CUresult cuMemPoolSetAttribute(void *pool, int attribute, void *value) {
    LOCKED;
    if (pool != &pool_reserved)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case 1: case 2: case 3: break; /* REUSE_*: no address is used twice here */
    case 4: pool_threshold = *(uint64_t *)value; break;
    case 6: pool_reserved_high = pool_reserved; break;
    case 8: pool_used_high = pool_used; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemPoolGetAttribute(void *pool, int attribute, void *value) {
    LOCKED;
    if (pool != &pool_reserved)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case 1: case 2: case 3: *(int *)value = 1; break;
    case 4: *(uint64_t *)value = pool_threshold; break;
    case 5: *(uint64_t *)value = pool_reserved; break;
    case 6: *(uint64_t *)value = pool_reserved_high; break;
    case 7: *(uint64_t *)value = pool_used; break;
    case 8: *(uint64_t *)value = pool_used_high; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemPoolTrimTo(void *pool, size_t keep) {
    LOCKED;
    (void)pool;
    CUresult result = streams_drain();
    uint64_t needed = ROUND_UP(pool_used, POOL_STEP), kept = needed > keep ? needed : keep;
    if (pool_reserved > kept)
        pool_reserved = kept;
    return result;
}

EXPORTED CUresult cuMemHostAlloc(void **host, size_t bytes, unsigned flags) {
    LOCKED;
    (void)flags;
    CUresult forbidden = capture_forbids();
    if (forbidden || gpu_failure)
        return forbidden ? forbidden : gpu_failure;
    struct pinned *made = malloc(sizeof *made);
    *made = (struct pinned){pinned, aligned_alloc(PAGE, ROUND_UP(bytes, PAGE)), bytes};
    memset(made->start, POISON, bytes);
    pinned = made;
    counters.pinned_allocations++;
    *host = made->start;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemAllocHost_v2(void **host, size_t bytes) {
    return cuMemHostAlloc(host, bytes, 0);
}

EXPORTED CUresult cuMemFreeHost(void *host) {
    LOCKED;
    for (struct pinned **at = &pinned; *at; at = &(*at)->next)
        if ((*at)->start == host) {
            CUresult result = streams_drain();
            struct pinned *gone = *at;
            *at = gone->next;
            free(gone->start);
            free(gone);
            return result;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

bool memory_is_pinned(const void *host, uint64_t bytes) {
    for (const struct pinned *at = pinned; at; at = at->next)
        if ((char *)host >= at->start && (char *)host + bytes <= at->start + at->bytes)
            return true;
    return false;
}
