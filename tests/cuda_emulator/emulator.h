/* An NVIDIA driver without a GPU: what its parts know of each other. README.md says what it is for.
 *
 * Handles and prototypes are written out here instead of taken from cuda.h, which a machine without the toolkit lacks. Only
 * what the program calls exists; anything else is a missing symbol that the program's loader names. */
#ifndef EMULATOR_H
#define EMULATOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct module *CUmodule;
typedef struct function *CUfunction;
typedef struct graph *CUgraph;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_STUB_LIBRARY = 34,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_INVALID_PTX = 218,
    CUDA_ERROR_JIT_COMPILER_NOT_FOUND = 221,
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
    CUDA_ERROR_CAPTURED_EVENT = 907,
};

#define EXPORTED __attribute__((visibility("default")))

/* One thread at a time is inside of the driver: `LOCKED;` opens every function that touches its state. */
EXPORTED int emulator_lock(void);
EXPORTED void emulator_unlock(int *);
#define LOCKED __attribute__((cleanup(emulator_unlock), unused)) int locked = emulator_lock()

/* Prints a sentence about a misuse that the real driver would not notice or would answer with undefined behaviour, and aborts. */
EXPORTED _Noreturn void emulator_abort(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Prints a sentence for whoever reads the test's output. */
void emulator_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* driver.c: the GPU that is emulated, from the environment. */
struct gpu {
    const char *name;
    int count;
    int major, minor;
    int driver_version;
    uint64_t memory;
    uint64_t used_by_others;
    /* What others take more each time that somebody asks how much is free. */
    uint64_t drift;
    uint64_t context;
};
extern struct gpu gpu;
EXPORTED uint64_t emulator_setting(const char *name, uint64_t otherwise);
/* Set by the first operation that failed on the GPU; every later call answers with it, as a lost context does. */
extern CUresult gpu_failure;
/* Whether the calling thread has a context that is still open. */
EXPORTED bool context_is_current(void);

/* report.c: what a test can count. */
#define COUNTERS(X)                                                                                                        \
    /* GEMMs with a matrix of zeros, which a GPU computes faster: nothing is to be timed on one. */                      \
    X(gemms_of_zeros)                                                                                                   \
    X(launches) X(launches_in_graphs) X(gemms) X(gemms_in_graphs) X(graph_launches) X(captures) X(synchronizations)  \
    /* Waits that found work to do and left none: the GPU then idles until the program has asked for more. */              \
    X(drains)                                                                                                              \
    /* Waits for unfinished work during which the thread polls: all but those for an event made with CU_EVENT_BLOCKING_SYNC. */ \
    X(spins)                                                                                                               \
    X(contexts) X(allocations) X(frees) X(pinned_allocations) X(copies_to_gpu) X(copies_to_host) X(copies_on_gpu) X(pageable_copies) \
    X(fills) X(event_queries) X(modules) X(allocated_high)
struct counters {
#define X(name) uint64_t name;
    COUNTERS(X)
#undef X
};
EXPORTED extern struct counters counters;
void report_kernel(const char *entry);

/* memory.c: the GPU's memory: a file without a name, mapped here where the program does not look, and in the worker at the
 * addresses that the program knows. */
int memory_file(void);
/* Where `bytes` of the GPU's memory can be touched from here; NULL unless they lie within one living allocation. */
EXPORTED void *memory_at(CUdeviceptr address, uint64_t bytes);
/* Frees what cuMemAllocAsync gave. */
CUresult memory_free(CUdeviceptr address);
/* Zeros within a living allocation. */
void memory_clear(CUdeviceptr address, uint64_t bytes);
bool memory_is_pinned(const void *host, uint64_t bytes);
/* Aborts if something was written behind an allocation. */
void memory_check(void);
/* Calls `visit` with the pages of every living allocation. */
void memory_visit(void (*visit)(CUdeviceptr first_page, uint64_t bytes));

/* stream.c: what was asked of the GPU and has not been done. */
struct operation {
    struct operation *next;
    const char *name;
    CUresult (*run)(struct operation *);
    /* False while another stream has to get further first; NULL is always ready. */
    bool (*ready)(struct operation *);
    /* Kernels, GEMMs and graphs; not copies, fills and events. */
    bool computes;
    /* How long it takes on the GPU's clock, which knows nothing of this machine's. */
    double nanoseconds;
};
EXPORTED void *operation_new(size_t bytes, const char *name, CUresult (*run)(struct operation *), double nanoseconds);
/* Appends to the stream's queue, or to the graph that it captures. Takes the operation over. */
EXPORTED CUresult stream_submit(CUstream handle, void *operation);
/* Runs everything that was submitted to any stream. */
CUresult streams_drain(void);
CUresult operation_run(struct operation *operation);
/* The stream behind a handle; the null and the per-thread stream are streams like any other. */
struct stream *stream_of(CUstream handle);
EXPORTED bool operation_is_replayed(void);

/* graph.c */
struct graph {
    struct operation *first, **last;
    uint64_t handles;
};
/* The graph that a stream captures, or NULL. */
struct graph *capture_of(struct stream *stream);
/* CUDA_SUCCESS, or the answer to a call that may not be made now because this thread, or another in global mode, records:
 * what it does would not be captured. The capture is then lost. */
CUresult capture_forbids(void);
CUresult capture_invalidate(struct stream *stream);
void replay_begin(void);
void replay_end(void);

/* worker.c: the process that runs kernels. */
void worker_map(CUdeviceptr first_page, uint64_t bytes, bool mapped);
/* Makes a kernel known; `text` is the PTX it comes from. */
void worker_learn(uint32_t kernel, const char *entry, const char *text);
struct launch {
    uint32_t kernel;
    uint32_t grid[3], block[3], shared_bytes, count;
    uint64_t values[];
};
CUresult worker_launch(const struct launch *launch, const char *entry);

#endif
