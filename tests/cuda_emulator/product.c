/* The products themselves: D = alpha op(A) op(B) + beta D, accumulated in F32. */
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
    struct product product;
};

static uint64_t size_of(int type) {
    return type == R_32F ? 4 : 2;
}

static float load(const char *at, int type) {
    uint32_t bits = 0;
    memcpy(type == R_32F ? (char *)&bits : (char *)&bits + 2, at, size_of(type));
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
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

/* op(X), column after column. */
static float *unpack(CUdeviceptr address, const struct layout *layout, bool transposed) {
    const char *from = memory_at(address, extent(layout));
    if (!from)
        return NULL;
    float *values = malloc(layout->rows * layout->columns * sizeof *values);
    uint64_t bytes = size_of(layout->type);
    for (uint64_t column = 0; column < layout->columns; column++)
        for (uint64_t row = 0; row < layout->rows; row++) {
            uint64_t to = transposed ? row * layout->columns + column : column * layout->rows + row;
            values[to] = load(from + (column * (uint64_t)layout->leading_dimension + row) * bytes, layout->type);
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
static void accumulate(float *sum, const struct product *product, const float *a, const float *b, uint64_t first, uint64_t end,
                       uint64_t step) {
    for (uint64_t p = first; p < end; p += step)
        add_scaled(sum, a + p * product->m, b[p], product->m);
}

/* In place, whoever comes first adds first. */
static bool second_comes_first(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_nsec / 64 % 2;
}

/* One GEMM of a batch. */
static CUresult multiply_one(const struct product *product, void *workspace) {
    uint64_t m = product->m, k = product->k, middle = k / 2;
    float *a = unpack(product->a, &product->layout_a, product->description.transposed_a);
    float *b = unpack(product->b, &product->layout_b, product->description.transposed_b);
    char *c = memory_at(product->c, extent(&product->layout_c));
    CUresult result = !a || !b || !c || !workspace ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
    if (!result && (is_zero(a, m * k) || is_zero(b, k * product->n)))
        counters.products_of_zeros++;
    float *one = malloc(m * sizeof *one), *other = malloc(m * sizeof *other);
    for (uint64_t column = 0; !result && column < product->n; column++) {
        const float *factors = b + column * k;
        memset(one, 0, m * sizeof *one);
        memset(other, 0, m * sizeof *other);
        switch (product->way->summation) {
        case ALL_AT_ONCE:
            accumulate(one, product, a, factors, 0, k, 1);
            break;
        case EVEN_AND_ODD:
            accumulate(one, product, a, factors, 0, k, 2);
            accumulate(other, product, a, factors, 1, k, 2);
            break;
        case TWO_HALVES:
        case TWO_HALVES_IN_ANY_ORDER:
            accumulate(one, product, a, factors, 0, middle, 1);
            accumulate(other, product, a, factors, middle, k, 1);
        }
        bool swapped = product->way->summation == TWO_HALVES_IN_ANY_ORDER && second_comes_first();
        for (uint64_t row = 0; row < m; row++) {
            int type = product->layout_c.type;
            char *at = c + (column * (uint64_t)product->layout_c.leading_dimension + row) * size_of(type);
            float before = product->beta == 0 ? 0 : product->beta * load(at, type);
            if (product->way->summation == TWO_HALVES_IN_ANY_ORDER)
                store(at, type, before + product->alpha * (swapped ? other : one)[row] + product->alpha * (swapped ? one : other)[row]);
            else
                store(at, type, product->alpha * (one[row] + other[row]) + before);
        }
    }
    free(a);
    free(b);
    free(one);
    free(other);
    return result;
}

static CUresult run_product(struct operation *operation) {
    struct product one = ((struct multiplying *)operation)->product;
    uint64_t scratch = product_workspace(one.way, &one);
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
        counters.products_in_graphs++;
    return result;
}

uint64_t product_workspace(const struct way *way, const struct product *product) {
    return way->summation == TWO_HALVES ? 2 * product->batch * product->m * product->n * sizeof(float) : 0;
}

/* A made-up speed, the same in every run with the same CUDA_EMULATOR_TIMING: which way is the fastest depends on the shape and on
 * that number, as on a real GPU on the day. The way that gives different sums each time is always the fastest. */
static double nanoseconds(const struct product *product) {
    const char *seed = getenv("CUDA_EMULATOR_TIMING");
    uint64_t hash = seed ? strtoull(seed, NULL, 0) : 0;
    uint64_t parts[] = {product->batch * product->m, product->n, product->k, (uint64_t)product->way->id};
    for (size_t index = 0; index < sizeof parts / sizeof *parts; index++)
        hash = (hash ^ parts[index]) * 0x9e3779b97f4a7c15ull, hash ^= hash >> 29;
    double operations = 2.0 * (double)product->batch * (double)product->m * (double)product->n * (double)product->k;
    double slower = product->way->summation == TWO_HALVES_IN_ANY_ORDER ? 0.5 : 1 + (double)(hash % 1000) / 1000;
    return (4000 + operations / 1e5) * slower;
}

int product_submit(const struct product *product, CUstream stream) {
    LOCKED;
    counters.products++;
    struct multiplying *multiplying = operation_new(sizeof *multiplying, "product", run_product, nanoseconds(product));
    multiplying->operation.computes = true;
    multiplying->product = *product;
    return stream_submit(stream, multiplying) ? EXECUTION_FAILED : SUCCESS;
}
