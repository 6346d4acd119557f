/* libcublasLt.so.13: descriptions, layouts, preferences, GEMM algorithms, and what the library refuses. */
#include "blas_lt.h"
#include "version.h"

#include <stdlib.h>
#include <string.h>

CUresult cuDeviceGetAttribute(int *value, int attribute, int device);

#define MARK 0x454d554c41544544ull

struct preference {
    uint64_t workspace_bytes;
    uint32_t reduction_schemes;
    uint32_t alignment[4]; /* of A, B, C, D */
};

/* cublasLtMatmulAlgo_t: 64 bytes that a program may keep and give back to the same library. */
struct algorithm {
    uint64_t mark, version;
    int32_t id, tile, stages, split_k, reduction_scheme, unused[7];
};

/* cublasLtMatmulHeuristicResult_t */
struct proposal {
    struct algorithm algorithm;
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

_Static_assert(sizeof(struct algorithm) == 64 && sizeof(struct proposal) == 96, "the library's own sizes");

static const struct gemm_kernel GEMM_KERNELS[] = {
    {66, 20, 12, 2, 1, TWO_HALVES_IN_ANY_ORDER, 16},
    {67, 24, 15, 1, 0, EVEN_AND_ODD, 16},
    {66, 18, 12, 2, 2, TWO_HALVES, 16},
    {0, 5, 0, 1, 0, ALL_AT_ONCE, 4},
};
#define GEMM_KERNEL_COUNT (sizeof GEMM_KERNELS / sizeof *GEMM_KERNELS)

EXPORTED size_t cublasLtGetVersion(void) {
    return (size_t)cublas_version();
}

EXPORTED int cublasLtGetProperty(int property, int *out) {
    if (property < 0 || property > 2)
        return INVALID_VALUE;
    *out = version_part(cublas_version(), property);
    return SUCCESS;
}

EXPORTED int cublasLtCreate(void **handle) {
    *handle = calloc(1, 1);
    return SUCCESS;
}

EXPORTED int cublasLtDestroy(void *handle) {
    if (!context_is_current())
        emulator_abort("cublasLtDestroy behind its context");
    free(handle);
    return SUCCESS;
}

static int set(void *field, size_t bytes, const void *value, size_t given) {
    if (bytes != given)
        return INVALID_VALUE;
    memcpy(field, value, bytes);
    return SUCCESS;
}

EXPORTED int cublasLtMatrixLayoutCreate(struct layout **layout, int type, uint64_t rows, uint64_t columns, int64_t leading_dimension) {
    *layout = malloc(sizeof **layout);
    **layout = (struct layout){type, rows, columns, leading_dimension, 1, 0};
    return SUCCESS;
}

EXPORTED int cublasLtMatrixLayoutDestroy(struct layout *layout) {
    free(layout);
    return SUCCESS;
}

EXPORTED int cublasLtMatmulDescCreate(struct description **description, int compute_type, int scale_type) {
    *description = malloc(sizeof **description);
    **description = (struct description){.compute_type = compute_type, .scale_type = scale_type, .transposed_a = N, .transposed_b = N};
    return SUCCESS;
}

EXPORTED int cublasLtMatmulDescDestroy(struct description *description) {
    free(description);
    return SUCCESS;
}

EXPORTED int cublasLtMatrixLayoutSetAttribute(struct layout *layout, int attribute, const void *value, size_t bytes) {
    switch (attribute) {
    case 5: return set(&layout->batch, 4, value, bytes);
    case 6: return set(&layout->batch_stride, 8, value, bytes);
    default: return NOT_SUPPORTED;
    }
}

EXPORTED int cublasLtMatmulDescSetAttribute(struct description *description, int attribute, const void *value, size_t bytes) {
    /* Scale modes came with cuBLAS 12.8. */
    if ((attribute == 31 || attribute == 32) && cublas_version() < 120800)
        return NOT_SUPPORTED;
    switch (attribute) {
    case 3: return set(&description->transposed_a, 4, value, bytes);
    case 4: return set(&description->transposed_b, 4, value, bytes);
    case 17: return set(&description->scales_a.address, 8, value, bytes);
    case 18: return set(&description->scales_b.address, 8, value, bytes);
    case 25: return set(&description->fast_accumulation, 1, value, bytes);
    case 31: return set(&description->scales_a.mode, 4, value, bytes);
    case 32: return set(&description->scales_b.mode, 4, value, bytes);
    default: return NOT_SUPPORTED;
    }
}

EXPORTED int cublasLtMatmulPreferenceCreate(struct preference **preference) {
    *preference = malloc(sizeof **preference);
    **preference = (struct preference){0, 7, {256, 256, 256, 256}};
    return SUCCESS;
}

EXPORTED int cublasLtMatmulPreferenceDestroy(struct preference *preference) {
    free(preference);
    return SUCCESS;
}

EXPORTED int cublasLtMatmulPreferenceSetAttribute(struct preference *preference, int attribute, const void *value, size_t bytes) {
    switch (attribute) {
    case 1: return set(&preference->workspace_bytes, 8, value, bytes);
    case 3: return set(&preference->reduction_schemes, 4, value, bytes);
    case 5: case 6: case 7: case 8: return set(&preference->alignment[attribute - 5], 4, value, bytes);
    default: return NOT_SUPPORTED;
    }
}

/* Whether a GEMM with scales of these modes exists on this GPU and in this version of the library. */
static bool has_scale_modes(int a, int b) {
    int major, minor;
    cuDeviceGetAttribute(&major, 75, 0);
    cuDeviceGetAttribute(&minor, 76, 0);
    int capability = 10 * major + minor;
    if (a == SCALAR_32F || b == SCALAR_32F)
        return a == b && capability >= 89;
    if (a == VEC32_UE8M0 || b == VEC32_UE8M0)
        return a == b && capability >= 100 && cublas_version() >= 120800;
    bool vectors_a = a == VEC128_32F, vectors_b = b == VEC128_32F;
    bool blocks = (vectors_a && vectors_b) || (vectors_a && b == BLK128x128_32F) || (a == BLK128x128_32F && vectors_b);
    return blocks && capability == 90 && cublas_version() >= 120900;
}

/* Tensor cores read both fp8 operands along k. */
static bool multiplies_fp8(const struct gemm *gemm) {
    const struct description *description = &gemm->description;
    return description->transposed_a == T && description->transposed_b == N && gemm->batch == 1 && gemm->m % 16 == 0 &&
           gemm->n % 16 == 0 && gemm->k % 16 == 0 && has_scale_modes(description->scales_a.mode, description->scales_b.mode);
}

static bool has_scales(const struct scales *scales) {
    return scales->address || scales->mode != SCALAR_32F;
}

/* Fills in sizes and layouts, or says what is wrong with them. */
static int check(struct gemm *gemm, const struct description *description, const struct layout *a, const struct layout *b,
                 const struct layout *c, const struct layout *d) {
    bool known = (unsigned)description->transposed_a <= T && (unsigned)description->transposed_b <= T;
    const struct layout *all[] = {a, b, c, d};
    for (size_t index = 0; index < 4; index++) {
        const struct layout *one = all[index];
        bool batched = one->batch == a->batch && one->batch > 0;
        if ((uint64_t)one->leading_dimension < one->rows || !one->rows || !one->columns || !batched)
            return INVALID_VALUE;
    }
    gemm->batch = (uint64_t)a->batch;
    gemm->m = description->transposed_a ? a->columns : a->rows;
    gemm->k = description->transposed_a ? a->rows : a->columns;
    gemm->n = description->transposed_b ? b->rows : b->columns;
    uint64_t inner = description->transposed_b ? b->columns : b->rows;
    if (!known || inner != gemm->k || d->rows != gemm->m || d->columns != gemm->n || c->rows != d->rows || c->columns != d->columns)
        return INVALID_VALUE;
    bool narrow = a->type == R_16BF && b->type == R_16BF && (d->type == R_16BF || d->type == R_32F);
    bool wide = a->type == R_32F && b->type == R_32F && d->type == R_32F;
    bool fp8 = a->type == R_8F_E4M3 && b->type == R_8F_E4M3 && (d->type == R_16BF || d->type == R_32F);
    bool typed = description->compute_type == COMPUTE_32F && description->scale_type == R_32F && c->type == d->type;
    if (!typed || !(narrow || wide || fp8))
        return NOT_SUPPORTED;
    gemm->description = *description;
    gemm->layout_a = *a;
    gemm->layout_b = *b;
    gemm->layout_c = *d;
    bool scaled = has_scales(&description->scales_a) || has_scales(&description->scales_b);
    return (fp8 ? multiplies_fp8(gemm) : !scaled) ? SUCCESS : NOT_SUPPORTED;
}

/* Bytes that the address of a matrix, its columns and its batch stride must be multiples of. */
static uint32_t alignment_of(const struct gemm_kernel *kernel, const struct gemm *gemm, const struct layout *layout) {
    if (gemm->layout_a.type == R_8F_E4M3)
        return 16;
    /* A kernel for any alignment needs no more than that of its elements. */
    return kernel->alignment > 4 ? kernel->alignment : (uint32_t)size_of(layout->type);
}

static bool serves(const struct gemm_kernel *kernel, const struct gemm *gemm) {
    const struct layout *all[] = {&gemm->layout_a, &gemm->layout_b, &gemm->layout_c};
    bool served = kernel->split_k == 1 || gemm->k >= 2;
    for (size_t index = 0; index < 3; index++) {
        uint64_t column_bytes = (uint64_t)all[index]->leading_dimension * size_of(all[index]->type);
        served = served && column_bytes % alignment_of(kernel, gemm, all[index]) == 0;
    }
    return served;
}

EXPORTED int cublasLtMatmulAlgoGetHeuristic(void *handle, const struct description *description, const struct layout *a,
                                            const struct layout *b, const struct layout *c, const struct layout *d,
                                            const struct preference *preference, int requested, struct proposal *proposals, int *returned) {
    struct gemm gemm = {0};
    int result = check(&gemm, description, a, b, c, d);
    *returned = 0;
    if (!handle || result)
        return result ? result : INVALID_VALUE;
    for (size_t index = 0; index < GEMM_KERNEL_COUNT && *returned < requested; index++) {
        const struct gemm_kernel *kernel = &GEMM_KERNELS[index];
        uint64_t workspace = gemm_workspace(kernel, &gemm);
        bool wanted = (kernel->reduction_scheme & ~(int)preference->reduction_schemes) == 0 && workspace <= preference->workspace_bytes;
        const struct layout *all[] = {a, b, c, d};
        for (size_t operand = 0; operand < 4; operand++)
            wanted = wanted && preference->alignment[operand] >= alignment_of(kernel, &gemm, all[operand]);
        if (!wanted || !serves(kernel, &gemm))
            continue;
        struct algorithm algorithm = {MARK, cublasLtGetVersion(), kernel->id, kernel->tile, kernel->stages, kernel->split_k, kernel->reduction_scheme, {0}};
        proposals[(*returned)++] = (struct proposal){algorithm, workspace, SUCCESS, 1, {0}};
    }
    return *returned ? SUCCESS : NOT_SUPPORTED;
}

static const struct gemm_kernel *kernel_of(const struct algorithm *algorithm) {
    if (algorithm->mark != MARK || algorithm->version != cublasLtGetVersion())
        return NULL;
    for (size_t index = 0; index < GEMM_KERNEL_COUNT; index++) {
        const struct gemm_kernel *kernel = &GEMM_KERNELS[index];
        if (kernel->id == algorithm->id && kernel->tile == algorithm->tile && kernel->stages == algorithm->stages &&
            kernel->split_k == algorithm->split_k && kernel->reduction_scheme == algorithm->reduction_scheme)
            return kernel;
    }
    return NULL;
}

EXPORTED int cublasLtMatmulAlgoCheck(void *handle, const struct description *description, const struct layout *a, const struct layout *b,
                                     const struct layout *c, const struct layout *d, const struct algorithm *algorithm,
                                     struct proposal *proposal) {
    struct gemm gemm = {0};
    int result = check(&gemm, description, a, b, c, d);
    const struct gemm_kernel *kernel = kernel_of(algorithm);
    if (!handle || !kernel || result)
        return result ? result : INVALID_VALUE;
    if (!serves(kernel, &gemm))
        return NOT_SUPPORTED;
    *proposal = (struct proposal){*algorithm, gemm_workspace(kernel, &gemm), SUCCESS, 1, {0}};
    return SUCCESS;
}

EXPORTED int cublasLtMatmul(void *handle, const struct description *description, const float *alpha, CUdeviceptr a,
                            const struct layout *layout_a, CUdeviceptr b, const struct layout *layout_b, const float *beta, CUdeviceptr c,
                            const struct layout *layout_c, CUdeviceptr d, const struct layout *layout_d, const struct algorithm *algorithm,
                            CUdeviceptr workspace, size_t workspace_bytes, CUstream stream) {
    struct gemm gemm = {0};
    int result = check(&gemm, description, layout_a, layout_b, layout_c, layout_d);
    if (!handle || result)
        return result ? result : INVALID_VALUE;
    /* The library would choose by itself; that this program always says what to take is what makes it repeatable. */
    gemm.kernel = algorithm ? kernel_of(algorithm) : NULL;
    if (!gemm.kernel || (*beta != 0 && c != d) || layout_c->leading_dimension != layout_d->leading_dimension)
        return INVALID_VALUE;
    const struct scales *scales_a = &description->scales_a, *scales_b = &description->scales_b;
    if (layout_a->type == R_8F_E4M3 && (!scales_a->address || !scales_b->address))
        return INVALID_VALUE;
    const struct layout *all[] = {layout_a, layout_b, layout_d};
    CUdeviceptr addresses[] = {a, b, d};
    bool aligned = scales_a->address % 16 == 0 && scales_b->address % 16 == 0;
    for (size_t index = 0; index < 3; index++) {
        uint32_t alignment = alignment_of(gemm.kernel, &gemm, all[index]);
        uint64_t stride = (uint64_t)all[index]->batch_stride * size_of(all[index]->type);
        aligned = aligned && addresses[index] % alignment == 0 && stride % alignment == 0;
    }
    uint64_t needed = gemm_workspace(gemm.kernel, &gemm);
    if (!serves(gemm.kernel, &gemm) || !aligned)
        return NOT_SUPPORTED;
    if (workspace_bytes < needed || workspace % 256)
        return INVALID_VALUE;
    gemm.alpha = *alpha;
    gemm.beta = *beta;
    gemm.a = a;
    gemm.b = b;
    gemm.c = d;
    gemm.workspace = workspace;
    gemm.workspace_bytes = workspace_bytes;
    return gemm_submit(&gemm, stream);
}
