"""Root-mean-square norm with the residual addition fused in (Zhang and Sennrich, arXiv:1910.07467, equation 4).

    total = x + output                        the residual stream x after attention or the MLP, which has this `output`
    normed = total * rstd * weight            rstd = 1 / sqrt(mean(total^2) + epsilon), stored in `inv_rms`
    dtotal += rstd * (weight * dnormed - total * rstd^2 * mean(total * weight * dnormed))
    dweight += sum over rows of dnormed * total * rstd

Forward is one program per row, the row in registers between its sum of squares and its scaling, so that it is read
once. Backward's second sum is over rows, in two launches (`partial_sums.py`):

    for row = part, part + parts, ... < N
      dtotal[row] += ...                         in bf16, the loads of the next row are in flight meanwhile
      dweight += dnormed * total * rstd
    partials[part] = dweight

Legend: N rows of D columns. Arithmetic and statistics are f32. In bf16 `total` is rounded before its norm is taken, so
that `normalize` (which recomputes `normed` during backward) and the gradient start from the values that forward used.

Bytes per row, in units of D elements: forward 2, forward_add 4, normalize 2, backward 4; the weight and the partial
sums of its gradient stay in the L2 cache.
"""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def reciprocal_rms(row_D, width, epsilon):
    """Return `1 / sqrt(mean(row^2) + epsilon)`, rounded as on the CPU; columns past `width` are 0 and add nothing."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(row_D * row_D, 0) / width + epsilon))


@triton.jit
def add_rms_norm_forward(x, weight, normed, inv_rms, width, epsilon, BLOCK: tl.constexpr):
    """Compute the norm of a row, without an addition. Grid: (N)."""
    row = tl.program_id(0).to(tl.int64)  # N * D elements may exceed 2^31
    column = tl.arange(0, BLOCK)
    inside = column < width
    x_D = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    rstd = reciprocal_rms(x_D, width, epsilon)
    tl.store(inv_rms + row, rstd)
    weight_D = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed_D = x_D * rstd * weight_D
    tl.store(normed + row * width + column, normed_D.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_forward_add(x, output, weight, total, normed, inv_rms, width, epsilon, BLOCK: tl.constexpr):
    """Compute `total = x + output` of a row, and its norm. Grid: (N)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    offset = row * width + column
    x_D = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    output_D = tl.load(output + offset, mask=inside, other=0.0).to(tl.float32)
    rounded_D = (x_D + output_D).to(total.dtype.element_ty)
    tl.store(total + offset, rounded_D, mask=inside)
    total_D = rounded_D.to(tl.float32)  # the norm is that of the stored values
    rstd = reciprocal_rms(total_D, width, epsilon)
    tl.store(inv_rms + row, rstd)
    weight_D = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed_D = total_D * rstd * weight_D
    tl.store(normed + offset, normed_D.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_normalize(total, weight, inv_rms, normed, width, BLOCK: tl.constexpr):
    """Recompute `normed` from the stored statistics, a block of columns of a row. Grid: (N, D / BLOCK).

    Multiplies in the order of forward, and so gives the same bits.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total_D = tl.load(total + row * width + column, mask=inside, other=0.0).to(tl.float32)
    weight_D = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed_D = total_D * tl.load(inv_rms + row) * weight_D
    tl.store(normed + row * width + column, normed_D.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_backward(
    total, weight, inv_rms, dnormed, dtotal, partials, rows, width, BLOCK: tl.constexpr, PREFETCH: tl.constexpr
):
    """Add to `dtotal`, and write the program's sum of the weight's gradient to its row of `partials`. Grid: (parts).

    Many rows per program, so that `partials` is small. They are `parts` apart: at any time the programs work on
    neighbouring rows, and their numbers of rows differ by one at most.

    With PREFETCH, `total` and `dnormed` of the next row are loaded before the sum over the current row: the loads are
    in flight while all warps wait at the sum's barrier. `dtotal` is needed after the sum only, so its loads overlap the
    sum anyway.
    """
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight_D = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dweight_D = tl.zeros([BLOCK], tl.float32)
    if PREFETCH:
        offset = tl.cast(tl.program_id(0), tl.int64) * width + column
        next_total_D = tl.load(total + offset, mask=inside, other=0.0)
        next_dnormed_D = tl.load(dnormed + offset, mask=inside, other=0.0)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        offset = tl.cast(row, tl.int64) * width + column
        if PREFETCH:
            total_D, dnormed_D = next_total_D.to(tl.float32), next_dnormed_D.to(tl.float32)
        else:
            total_D = tl.load(total + offset, mask=inside, other=0.0).to(tl.float32)
            dnormed_D = tl.load(dnormed + offset, mask=inside, other=0.0).to(tl.float32)
        dtotal_D = tl.load(dtotal + offset, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(inv_rms + row)
        if PREFETCH:
            # After a program's last row the last row of all, which is not used.
            next_row = tl.minimum(row + tl.num_programs(0), rows - 1)
            offset_of_next = tl.cast(next_row, tl.int64) * width + column
            next_total_D = tl.load(total + offset_of_next, mask=inside, other=0.0)
            next_dnormed_D = tl.load(dnormed + offset_of_next, mask=inside, other=0.0)
        # The derivative through rstd: the part of the gradient along `total`, which the norm removes.
        along_total = rstd * rstd * (tl.sum(total_D * (dnormed_D * weight_D), 0) / width)
        dtotal_D = dtotal_D + rstd * (dnormed_D * weight_D - total_D * along_total)
        tl.store(dtotal + offset, dtotal_D.to(dtotal.dtype.element_ty), mask=inside)
        dweight_D += dnormed_D * total_D * rstd
    tl.store(partials + tl.program_id(0).to(tl.int64) * width + column, dweight_D, mask=inside)


# All but normalize hold a row in registers, so BLOCK is the width rounded up to a power of two; wider rows take more
# warps, so that a thread has 8 to 16 columns. In bf16 the next row is 16 registers more per thread, and with at most
# 128 as many blocks share a multiprocessor as without; in f32 it would not fit.
KERNELS = []
ROW_STATISTIC, SIZES = {"inv_rms": "*fp32"}, {"width": "i32:16"}
for dtype, pointer in (("bf16", "*bf16:16"), ("f32", "*fp32:16")):
    KERNELS.append(
        Kernel(
            f"add_rms_norm_normalize.{dtype}",
            add_rms_norm_normalize,
            arguments=dict.fromkeys(("total", "weight"), pointer) | ROW_STATISTIC | {"normed": pointer} | SIZES,
            constants={"BLOCK": 1024},
        )
    )
    forward = ROW_STATISTIC | SIZES | {"epsilon": "fp32"}
    by_width = {
        "forward": (add_rms_norm_forward, dict.fromkeys(("x", "weight", "normed"), pointer) | forward),
        "forward_add": (
            add_rms_norm_forward_add,
            dict.fromkeys(("x", "output", "weight", "total", "normed"), pointer) | forward,
        ),
        "backward": (
            add_rms_norm_backward,
            dict.fromkeys(("total", "weight"), pointer)
            | ROW_STATISTIC
            | dict.fromkeys(("dnormed", "dtotal"), pointer)
            | {"partials": "*fp32:16", "rows": "i32"}
            | SIZES,
        ),
    }
    for name, (function, arguments) in by_width.items():
        prefetches = name == "backward" and dtype == "bf16"
        constants = {"PREFETCH": prefetches} if name == "backward" else {}
        KERNELS += [
            Kernel(
                f"add_rms_norm_{name}.{dtype}.h{block}",
                function,
                arguments,
                {"BLOCK": block} | constants,
                num_warps=warps,
                max_registers=128 if prefetches else None,
            )
            for block, warps in ((1024, 4), (2048, 4), (4096, 8), (8192, 16))
        ]
