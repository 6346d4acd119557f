/* The GEMMs themselves: D = alpha op(A) op(B) + beta D, accumulated in F32. */
#define _GNU_SOURCE
#include "blas_lt.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Fixed order and separate rounding of every operation on every machine; wider vectors change no bit. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

struct multiplying {
    struct operation operation;
    struct gemm gemm;
};

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* e4m3fn: a sign, 4 bits of exponent with bias 7, 3 of mantissa. There is no infinity. */
static float from_e4m3(uint8_t code) {
    uint32_t magnitude = code & 0x7f;
    float value = magnitude < 8 ? (float)magnitude * 0x1p-9f : from_bits((magnitude << 20) + ((127 - 7) << 23));
    if (magnitude == 0x7f)
        value = from_bits(0x7fc00000);
    return code & 0x80 ? -value : value;
}

/* A power of two. The smallest, 2^-127, is a subnormal number in F32. */
static float from_ue8m0(uint8_t code) {
    return from_bits(code == 0xff ? 0x7fc00000 : code ? (uint32_t)code << 23 : 1 << 22);
}

static float load(const char *at, int type) {
    if (type == R_8F_E4M3)
        return from_e4m3((uint8_t)*at);
    uint32_t bits = 0;
    memcpy(type == R_32F ? (char *)&bits : (char *)&bits + 2, at, size_of(type));
    return from_bits(bits);
}

static void store(char *at, int type, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (type == R_16BF) {
        bits = value != value ? 0x7fff0000 : bits + 0x7fff + (bits >> 16 & 1);
        memcpy(at, (char *)&bits + 2, 2);
    } else {
        memcpy(at, &bits, 4);
    }
}

/* The bytes from the first to the last element. */
static uint64_t extent(const struct layout *layout) {
    uint64_t elements = layout->columns ? (layout->columns - 1) * (uint64_t)layout->leading_dimension + layout->rows : 0;
    return elements * size_of(layout->type);
}

static uint64_t blocks(uint64_t size, uint64_t block) {
    return (size + block - 1) / block;
}

/* VEC128_32F: scales[k / 128][outer]. */
static uint64_t vector_index(const struct layout *layout, uint64_t k, uint64_t outer) {
    return k / 128 * layout->columns + outer;
}

/* BLK128x128_32F: scales[outer / 128][k / 128], whose rows are padded to a multiple of 4. */
static uint64_t block_index(const struct layout *layout, uint64_t k, uint64_t outer) {
    return outer / 128 * (blocks(layout->rows, 4 * 128) * 4) + k / 128;
}

/* VEC32_UE8M0: tiles[outer / 128][k / 128] of 512 scales, those of 128 vectors and 4 blocks of 32 elements. */
static uint64_t tiled_index(const struct layout *layout, uint64_t k, uint64_t outer) {
    uint64_t tile = outer / 128 * blocks(layout->rows, 128) + k / 128;
    return tile * 512 + outer % 32 * 16 + outer % 128 / 32 * 4 + k % 128 / 32;
}

/* The bytes of an fp8 operand's scales, padding included. Columns of both operands run along k. */
static uint64_t scales_extent(const struct layout *layout, int mode) {
    switch (mode) {
    case VEC128_32F: return blocks(layout->rows, 128) * layout->columns * sizeof(float);
    case BLK128x128_32F: return blocks(layout->columns, 128) * blocks(layout->rows, 4 * 128) * 4 * sizeof(float);
    case VEC32_UE8M0: return blocks(layout->columns, 128) * blocks(layout->rows, 128) * 512;
    default: return sizeof(float);
    }
}

static float scale_of(const void *scales, int mode, const struct layout *layout, uint64_t k, uint64_t outer) {
    const float *floats = scales;
    const uint8_t *exponents = scales;
    switch (mode) {
    case VEC128_32F: return floats[vector_index(layout, k, outer)];
    case BLK128x128_32F: return floats[block_index(layout, k, outer)];
    case VEC32_UE8M0: return from_ue8m0(exponents[tiled_index(layout, k, outer)]);
    default: return *floats;
    }
}

/* op(X), column after column, times its scales. */
static float *unpack(CUdeviceptr address, const struct layout *layout, bool transposed, struct scales scales) {
    const char *from = memory_at(address, extent(layout));
    bool scaled = layout->type == R_8F_E4M3;
    const void *factors = scaled ? memory_at(scales.address, scales_extent(layout, scales.mode)) : NULL;
    if (!from || (scaled && !factors))
        return NULL;
    float *values = malloc(layout->rows * layout->columns * sizeof *values);
    uint64_t bytes = size_of(layout->type);
    for (uint64_t column = 0; column < layout->columns; column++)
        for (uint64_t row = 0; row < layout->rows; row++) {
            uint64_t to = transposed ? row * layout->columns + column : column * layout->rows + row;
            float value = load(from + (column * (uint64_t)layout->leading_dimension + row) * bytes, layout->type);
            values[to] = scaled ? value * scale_of(factors, scales.mode, layout, row, column) : value;
        }
    return values;
}

static bool is_zero(const float *values, uint64_t count) {
    while (count && values[count - 1] == 0)
        count--;
    return !count;
}

WIDEST static void add_scaled(float *restrict sum, const float *restrict column, float factor, uint64_t count) {
    for (uint64_t index = 0; index < count; index++)
        sum[index] += column[index] * factor;
}

/* sum_m += op(A)[:, p] op(B)[p, column] over p = first, first + step, ... < end. */
static void accumulate(float *sum, const struct gemm *gemm, const float *a, const float *b, uint64_t first, uint64_t end,
                       uint64_t step) {
    for (uint64_t p = first; p < end; p += step)
        add_scaled(sum, a + p * gemm->m, b[p], gemm->m);
}

/* In place, whoever comes first adds first. */
static bool second_comes_first(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_nsec / 64 % 2;
}

/* One GEMM of a batch. */
static CUresult multiply_one(const struct gemm *gemm, void *workspace) {
    uint64_t m = gemm->m, k = gemm->k, middle = k / 2;
    const struct description *description = &gemm->description;
    float *a = unpack(gemm->a, &gemm->layout_a, description->transposed_a, description->scales_a);
    float *b = unpack(gemm->b, &gemm->layout_b, description->transposed_b, description->scales_b);
    char *c = memory_at(gemm->c, extent(&gemm->layout_c));
    CUresult result = !a || !b || !c || !workspace ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
    if (!result && (is_zero(a, m * k) || is_zero(b, k * gemm->n)))
        counters.gemms_of_zeros++;
    float *one = malloc(m * sizeof *one), *other = malloc(m * sizeof *other);
    for (uint64_t column = 0; !result && column < gemm->n; column++) {
        const float *factors = b + column * k;
        memset(one, 0, m * sizeof *one);
        memset(other, 0, m * sizeof *other);
        switch (gemm->kernel->summation) {
        case ALL_AT_ONCE:
            accumulate(one, gemm, a, factors, 0, k, 1);
            break;
        case EVEN_AND_ODD:
            accumulate(one, gemm, a, factors, 0, k, 2);
            accumulate(other, gemm, a, factors, 1, k, 2);
            break;
        case TWO_HALVES:
        case TWO_HALVES_IN_ANY_ORDER:
            accumulate(one, gemm, a, factors, 0, middle, 1);
            accumulate(other, gemm, a, factors, middle, k, 1);
        }
        bool swapped = gemm->kernel->summation == TWO_HALVES_IN_ANY_ORDER && second_comes_first();
        for (uint64_t row = 0; row < m; row++) {
            int type = gemm->layout_c.type;
            char *at = c + (column * (uint64_t)gemm->layout_c.leading_dimension + row) * size_of(type);
            float before = gemm->beta == 0 ? 0 : gemm->beta * load(at, type);
            if (gemm->kernel->summation == TWO_HALVES_IN_ANY_ORDER)
                store(at, type, before + gemm->alpha * (swapped ? other : one)[row] + gemm->alpha * (swapped ? one : other)[row]);
            else
                store(at, type, gemm->alpha * (one[row] + other[row]) + before);
        }
    }
    free(a);
    free(b);
    free(one);
    free(other);
    return result;
}

static CUresult run_gemm(struct operation *operation) {
    struct gemm one = ((struct multiplying *)operation)->gemm;
    uint64_t scratch = gemm_workspace(one.kernel, &one);
    void *workspace = scratch ? memory_at(one.workspace, scratch) : &one;
    CUresult result = CUDA_SUCCESS;
    for (uint64_t index = 0; !result && index < one.batch; index++) {
        result = multiply_one(&one, workspace);
        one.a += (uint64_t)one.layout_a.batch_stride * size_of(one.layout_a.type);
        one.b += (uint64_t)one.layout_b.batch_stride * size_of(one.layout_b.type);
        one.c += (uint64_t)one.layout_c.batch_stride * size_of(one.layout_c.type);
    }
    /* Whatever somebody kept there is gone. */
    if (!result && scratch)
        memset(workspace, 0xff, scratch);
    if (operation_is_replayed())
        counters.gemms_in_graphs++;
    return result;
}

uint64_t gemm_workspace(const struct gemm_kernel *kernel, const struct gemm *gemm) {
    return kernel->summation == TWO_HALVES ? 2 * gemm->batch * gemm->m * gemm->n * sizeof(float) : 0;
}

/* How many GEMMs with this kernel were submitted one after the other, this one included. */
static uint64_t in_a_row(const struct gemm_kernel *kernel) {
    static const struct gemm_kernel *last;
    static uint64_t count;
    count = kernel == last ? count + 1 : 1;
    last = kernel;
    return count;
}

/* A made-up speed, the same in every run with the same CUDA_EMULATOR_TIMING: which kernel is the fastest depends on the shape and on
 * that number, as on a real GPU on the day. The kernel with different sums each time is always the fastest. Of the other three one
 * takes 6 and one 12 % longer than the fastest. For the first GEMMs with a kernel, as many as CUDA_EMULATOR_BOOST, their order is
 * reversed: a GPU that was idle runs at its boost clock. Milliseconds each, so that a search needs few of them. */
static double nanoseconds(const struct gemm *gemm) {
    uint64_t hash = emulator_setting("CUDA_EMULATOR_TIMING", 0);
    uint64_t parts[] = {gemm->batch * gemm->m, gemm->n, gemm->k};
    for (size_t index = 0; index < sizeof parts / sizeof *parts; index++)
        hash = (hash ^ parts[index]) * 0x9e3779b97f4a7c15ull, hash ^= hash >> 29;
    double operations = 2.0 * (double)gemm->batch * (double)gemm->m * (double)gemm->n * (double)gemm->k;
    double usual = 16e6 + operations / 1e5;
    bool boosted = in_a_row(gemm->kernel) <= emulator_setting("CUDA_EMULATOR_BOOST", 0);
    if (gemm->kernel->summation == TWO_HALVES_IN_ANY_ORDER)
        return usual / 2;
    static const int PLACES[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    int place = PLACES[hash % 6][gemm->kernel->summation];
    return usual * (1 + 0.06 * (boosted ? 2 - place : place));
}

/* Whether this is the GEMM with the first kernel that CUDA_EMULATOR_REFUSED names by its number. They are counted from 1 while all
 * GEMMs have the same sizes, as in a search. */
static bool is_refused(const struct gemm *gemm) {
    static uint64_t m, n, k, count;
    if (gemm->m != m || gemm->n != n || gemm->k != k)
        m = gemm->m, n = gemm->n, k = gemm->k, count = 0;
    return gemm->kernel->summation == EVEN_AND_ODD && ++count == emulator_setting("CUDA_EMULATOR_REFUSED", 0);
}

int gemm_submit(const struct gemm *gemm, CUstream stream) {
    LOCKED;
    counters.gemms++;
    if (is_refused(gemm))
        return NOT_SUPPORTED;
    struct multiplying *multiplying = operation_new(sizeof *multiplying, "gemm", run_gemm, nanoseconds(gemm));
    multiplying->operation.computes = true;
    multiplying->gemm = *gemm;
    return stream_submit(stream, multiplying) ? EXECUTION_FAILED : SUCCESS;
}
