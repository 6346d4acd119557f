/* libcublasLt.so.13: what its two parts know of each other. */
#ifndef BLAS_LT_H
#define BLAS_LT_H

#include "emulator.h"

enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15, EXECUTION_FAILED = 13 };
enum { R_32F = 0, R_16BF = 14, R_8F_E4M3 = 28, COMPUTE_32F = 68, N = 0, T = 1 };
enum { SCALAR_32F = 0, VEC32_UE8M0 = 2, VEC128_32F = 4, BLK128x128_32F = 5 };

static inline uint64_t size_of(int type) {
    return type == R_32F ? 4 : type == R_16BF ? 2 : 1;
}

/* Column-major: element (row, column) is at row + column * leading_dimension. */
struct layout {
    int type;
    uint64_t rows, columns;
    int64_t leading_dimension;
    /* Matrices of a batch, and elements from the first of one to the first of the next. */
    int32_t batch;
    int64_t batch_stride;
};

/* What the elements of an fp8 operand are multiplied by: where that lies on the GPU, and for which elements each scale is. */
struct scales {
    CUdeviceptr address;
    int32_t mode;
};

struct description {
    int compute_type, scale_type, transposed_a, transposed_b;
    struct scales scales_a, scales_b;
    /* Changes nothing here: sums are in F32. */
    int8_t fast_accumulation;
};

/* A GEMM kernel. Kernels differ in the order of additions, so that results show which one was used. */
enum summation { ALL_AT_ONCE, EVEN_AND_ODD, TWO_HALVES, TWO_HALVES_IN_ANY_ORDER };
struct gemm_kernel {
    int id, tile, stages, split_k, reduction_scheme;
    enum summation summation;
    /* Bytes that operands, result and their columns must be aligned to. */
    uint32_t alignment;
};

struct gemm {
    uint64_t m, n, k, batch;
    float alpha, beta;
    struct description description;
    struct layout layout_a, layout_b, layout_c;
    CUdeviceptr a, b, c, workspace;
    uint64_t workspace_bytes;
    const struct gemm_kernel *kernel;
};

uint64_t gemm_workspace(const struct gemm_kernel *kernel, const struct gemm *gemm);
int gemm_submit(const struct gemm *gemm, CUstream stream);

#endif
