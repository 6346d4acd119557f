/* Modules and launches: what the driver reads in PTX, and what it refuses. */
#define _GNU_SOURCE
#include "emulator.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PARAMETERS_AT_MOST 64
#define SHARED_BY_DEFAULT (48 << 10)

struct function {
    struct function *next;
    struct module *module;
    char *entry;
    uint32_t id;
    uint32_t count;
    unsigned char bytes[PARAMETERS_AT_MOST];
    uint32_t required_threads, maximum_threads;
    int shared_allowed;
    bool known;
};

struct module {
    char *text;
    struct function *functions;
    int target;
    bool unloaded;
};

static uint32_t functions_made;

/* The newest PTX a driver of this CUDA version translates, times ten. */
static int newest_ptx(int driver_version) {
    static const int KNOWN[][2] = {{13010, 91}, {13000, 90}, {12090, 88}, {12080, 87}, {12060, 85}, {12040, 84},
                                   {12030, 83}, {12020, 82}, {12010, 81}, {12000, 80}, {11080, 78}};
    for (size_t index = 0; index < sizeof KNOWN / sizeof *KNOWN; index++)
        if (driver_version >= KNOWN[index][0])
            return KNOWN[index][1];
    return 70;
}

/* Where the program wants to read what the compiler has against a text; nowhere if `text` is NULL. */
struct log {
    char *text;
    size_t bytes;
};

static CUresult refuse(struct log log, CUresult result, const char *words) {
    if (log.text && log.bytes)
        snprintf(log.text, log.bytes, "ptxas application ptx input, line 9; fatal   : %s\nptxas fatal   : Ptx assembly aborted\n", words);
    return result;
}

static CUresult check_target(const char *text, int *target, struct log log) {
    const char *version = strstr(text, "\n.version "), *line = strstr(text, "\n.target sm_");
    const char *compiler = getenv("CUDA_EMULATOR_JIT");
    int major, minor;
    if (compiler && strcmp(compiler, "missing") == 0)
        return CUDA_ERROR_JIT_COMPILER_NOT_FOUND;
    if (compiler && strcmp(compiler, "refuses") == 0)
        return refuse(log, CUDA_ERROR_INVALID_PTX, "Parsing error near 'refused'");
    if (!version || !line || sscanf(version, "\n.version %d.%d", &major, &minor) != 2)
        return refuse(log, CUDA_ERROR_INVALID_PTX, "Missing .version directive");
    if (major * 10 + minor > newest_ptx(gpu.driver_version))
        return refuse(log, CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "Unsupported .version");
    char *end;
    int own = gpu.major * 10 + gpu.minor;
    *target = (int)strtol(line + strlen("\n.target sm_"), &end, 10);
    bool fits = *end == 'a' ? *target == own : *end == 'f' ? *target / 10 == gpu.major && *target <= own : *target <= own;
    return fits ? CUDA_SUCCESS : CUDA_ERROR_NO_BINARY_FOR_GPU;
}

static unsigned char bytes_of(const char *type) {
    int bits = atoi(type + 2); /* ".u64" */
    if (bits != 8 && bits != 16 && bits != 32 && bits != 64)
        emulator_abort("a parameter of type %.8s is not emulated", type);
    return (unsigned char)(bits / 8);
}

static uint32_t threads(const char *from, const char *to, const char *directive) {
    const char *found = memmem(from, (size_t)(to - from), directive, strlen(directive));
    unsigned sizes[3] = {0, 1, 1};
    if (found)
        sscanf(found + strlen(directive), "%u , %u , %u", &sizes[0], &sizes[1], &sizes[2]);
    return sizes[0] * sizes[1] * sizes[2];
}

/* `.visible .entry NAME( .param .u64 ..., .param .u32 ... ) .reqntid 128 {` */
static void read_entry(struct module *module, const char *at) {
    struct function *function = calloc(1, sizeof *function);
    size_t length = strcspn(at, "( \t\n");
    const char *open = strchr(at, '('), *close = strchr(at, ')'), *body = strchr(at, '{');
    if (!open || !close || !body)
        emulator_abort("cannot read an entry of the PTX");
    function->module = module;
    function->entry = strndup(at, length);
    function->id = functions_made++;
    function->shared_allowed = SHARED_BY_DEFAULT;
    for (const char *from = open; (from = strstr(from, ".param")) && from < close;) {
        from += strlen(".param");
        from += strspn(from, " \t");
        if (function->count == PARAMETERS_AT_MOST)
            emulator_abort("%s has too many parameters", function->entry);
        function->bytes[function->count++] = bytes_of(from);
    }
    function->required_threads = threads(close, body, ".reqntid");
    function->maximum_threads = threads(close, body, ".maxntid");
    function->next = module->functions;
    module->functions = function;
}

static CUresult load(CUmodule *handle, const char *text, struct log log) {
    CUresult forbidden = capture_forbids();
    if (forbidden || gpu_failure)
        return forbidden ? forbidden : gpu_failure;
    struct module *module = calloc(1, sizeof *module);
    CUresult result = check_target(text, &module->target, log);
    if (result) {
        free(module);
        return result;
    }
    module->text = strdup(text);
    const char *mark = ".visible .entry ";
    for (const char *at = module->text; (at = strstr(at, mark));)
        read_entry(module, at += strlen(mark));
    counters.modules++;
    *handle = module;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuModuleLoadDataEx(CUmodule *handle, const void *image, unsigned count, int *options, void **values) {
    LOCKED;
    struct log log = {0};
    void **size = NULL;
    for (unsigned index = 0; index < count; index++) {
        if (options[index] == 5) /* CU_JIT_ERROR_LOG_BUFFER */
            log.text = values[index];
        else if (options[index] == 6) /* CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, a number in a pointer's place */
            log.bytes = (size_t)*(size = &values[index]);
        else
            emulator_abort("the option %d of a module is not emulated", options[index]);
    }
    if (log.text && log.bytes)
        *log.text = 0;
    CUresult result = load(handle, image, log);
    if (size)
        *size = (void *)(log.text ? strlen(log.text) : 0);
    return result;
}

EXPORTED CUresult cuModuleLoadData(CUmodule *handle, const void *image) {
    return cuModuleLoadDataEx(handle, image, 0, NULL, NULL);
}

EXPORTED CUresult cuModuleUnload(CUmodule module) {
    LOCKED;
    module->unloaded = true;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuModuleGetFunction(CUfunction *handle, CUmodule module, const char *name) {
    LOCKED;
    for (struct function *function = module->functions; function; function = function->next)
        if (strcmp(function->entry, name) == 0)
            return *handle = function, CUDA_SUCCESS;
    return CUDA_ERROR_NOT_FOUND;
}

static int shared_at_most(void) {
    int bytes;
    extern CUresult cuDeviceGetAttribute(int *, int, int);
    cuDeviceGetAttribute(&bytes, 97, 0);
    return bytes;
}

EXPORTED CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
    LOCKED;
    if (attribute == 9) /* PREFERRED_SHARED_MEMORY_CARVEOUT */
        return CUDA_SUCCESS;
    if (attribute != 8) /* MAX_DYNAMIC_SHARED_SIZE_BYTES */
        emulator_abort("function attribute %d is not emulated", attribute);
    if (value < 0 || value > shared_at_most())
        return CUDA_ERROR_INVALID_VALUE;
    function->shared_allowed = value;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction function) {
    LOCKED;
    switch (attribute) {
    case 0: *value = function->required_threads ? (int)function->required_threads : 1024; break; /* MAX_THREADS_PER_BLOCK */
    case 1: case 2: case 3: *value = 0; break; /* static shared, constant and local bytes: ptxas knows, this does not */
    case 5: *value = 80; break;                /* PTX_VERSION */
    case 8: *value = function->shared_allowed; break;
    default: emulator_abort("function attribute %d is not emulated", attribute);
    }
    return CUDA_SUCCESS;
}

struct launching {
    struct operation operation;
    struct function *function;
    struct launch launch;
};

static CUresult run_launch(struct operation *operation) {
    struct launching *launching = (struct launching *)operation;
    struct function *function = launching->function;
    if (!function->known) {
        worker_learn(function->id, function->entry, function->module->text);
        function->known = true;
    }
    if (operation_is_replayed())
        counters.launches_in_graphs++;
    report_kernel(function->entry);
    return worker_launch(&launching->launch, function->entry);
}

static bool refused(const struct function *function, const unsigned *grid, const unsigned *block, unsigned shared_bytes) {
    uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
    const char *why = NULL;
    if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7fffffff || grid[1] > 65535 || grid[2] > 65535)
        why = "its grid";
    else if (!threads || threads > 1024)
        why = "its block";
    else if (function->required_threads && threads != function->required_threads)
        why = "a block that differs from .reqntid";
    else if (function->maximum_threads && threads > function->maximum_threads)
        why = "a block above .maxntid";
    else if ((int)shared_bytes > function->shared_allowed)
        why = "more dynamic shared memory than was allowed";
    if (why)
        emulator_say("a launch of %s is refused for %s: grid %u x %u x %u, block %u x %u x %u, %u bytes", function->entry, why,
                     grid[0], grid[1], grid[2], block[0], block[1], block[2], shared_bytes);
    return why;
}

EXPORTED CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                 unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **parameters,
                                 void **extra) {
    LOCKED;
    unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
    if (extra)
        emulator_abort("arguments of %s in a buffer are not emulated", function->entry);
    if (function->module->unloaded)
        return CUDA_ERROR_INVALID_HANDLE;
    if (refused(function, grid, block, shared_bytes))
        return CUDA_ERROR_INVALID_VALUE;
    double programs = (double)grid_x * grid_y * grid_z;
    size_t bytes = sizeof(struct launching) + function->count * sizeof(uint64_t);
    struct launching *launching = operation_new(bytes, function->entry, run_launch, 3e5 + 5e4 * programs);
    struct launch *launch = &launching->launch;
    launching->operation.computes = true;
    launching->function = function;
    launch->kernel = function->id;
    memcpy(launch->grid, grid, sizeof grid);
    memcpy(launch->block, block, sizeof block);
    launch->shared_bytes = shared_bytes;
    launch->count = function->count;
    for (uint32_t index = 0; index < function->count; index++)
        memcpy(&launch->values[index], parameters[index], function->bytes[index]);
    counters.launches++;
    return stream_submit(stream, launching);
}
