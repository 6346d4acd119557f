/* libcublasLt.so.13: what its two parts know of each other. */
#ifndef BLAS_LT_H
#define BLAS_LT_H

#include "emulator.h"

enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15, EXECUTION_FAILED = 13 };
enum { R_32F = 0, R_16BF = 14, COMPUTE_32F = 68, N = 0, T = 1 };

/* Column-major: element (row, column) is at row + column * leading_dimension. */
struct layout {
    int type;
    uint64_t rows, columns;
    int64_t leading_dimension;
    /* Matrices of a batch, and elements from the first of one to the first of the next. */
    int32_t batch;
    int64_t batch_stride;
};

struct description {
    int compute_type, scale_type, transposed_a, transposed_b;
};

/* A way to compute a product. The ways differ in the order of additions, so that results tell which one was taken. */
enum summation { ALL_AT_ONCE, EVEN_AND_ODD, TWO_HALVES, TWO_HALVES_IN_ANY_ORDER };
struct way {
    int id, tile, stages, split_k, reduction_scheme;
    enum summation summation;
    /* What operands, result and their columns have to begin at a multiple of. */
    uint32_t alignment;
};

struct product {
    uint64_t m, n, k, batch;
    float alpha, beta;
    struct description description;
    struct layout layout_a, layout_b, layout_c;
    CUdeviceptr a, b, c, workspace;
    uint64_t workspace_bytes;
    const struct way *way;
};

uint64_t product_workspace(const struct way *way, const struct product *product);
int product_submit(const struct product *product, CUstream stream);

#endif
