"""Residual add and root-mean-square norm, forward and backward.

Legend: N rows of D columns. Statistics are F32. In bf16 the sum is rounded before its norm is taken, so that
`normalize` and the backward pass see what forward saw.

Bytes moved a row, in units of D elements: forward 2, forward_add 4, normalize 2, backward 4; the weight and the partial
sums of its gradient stay in the L2 cache.
"""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def inverse_rms(value, width, epsilon):
    """`1 / sqrt(mean(value^2) + epsilon)` of a row whose missing columns are zero."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(value * value, 0) / width + epsilon))


@triton.jit
def add_rms_norm_forward(x, weight, normed, inv_rms, width, epsilon, BLOCK: tl.constexpr):
    """A row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = inverse_rms(value, width, epsilon)
    tl.store(inv_rms + row, scale)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    result = value * scale * factor
    tl.store(normed + row * width + column, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_forward_add(x, branch, weight, total, normed, inv_rms, width, epsilon, BLOCK: tl.constexpr):
    """A row a program: `total = x + branch`, and its norm."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    left = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
    rounded = (left + right).to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=inside)
    value = rounded.to(tl.float32)
    scale = inverse_rms(value, width, epsilon)
    tl.store(inv_rms + row, scale)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    result = value * scale * factor
    tl.store(normed + at, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_normalize(total, weight, inv_rms, normed, width, BLOCK: tl.constexpr):
    """A block of a row a program: the products of forward in the same order, so the same bits."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(total + row * width + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    result = value * tl.load(inv_rms + row) * factor
    tl.store(normed + row * width + column, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_backward(total, weight, inv_rms, dnormed, dtotal, partials, rows, width, BLOCK: tl.constexpr):
    """Adds to `dtotal`, and leaves the weight's gradient in rows of `partials`, one a program.

    Every program takes rows as far apart as there are programs.
    """
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width + column
        value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        dvalue = tl.load(dnormed + at, mask=inside, other=0.0).to(tl.float32)
        before = tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(inv_rms + row)
        share = scale * scale * (tl.sum(value * (dvalue * factor), 0) / width)
        after = before + scale * (dvalue * factor - value * share)
        tl.store(dtotal + at, after.to(dtotal.dtype.element_ty), mask=inside)
        dweight += dvalue * value * scale
    tl.store(partials + tl.program_id(0).to(tl.int64) * width + column, dweight, mask=inside)


@triton.jit
def add_rms_norm_weight(partials, dweight, parts, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the rows of `partials` to `dweight`, a block of columns a program, always in the same order."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, parts, ROWS):
        row = start + tl.arange(0, ROWS)
        at = row[:, None] * width + column[None, :]
        total += tl.sum(tl.load(partials + at, mask=(row < parts)[:, None] & inside[None, :], other=0.0), 0)
    tl.store(dweight + column, tl.load(dweight + column, mask=inside, other=0.0) + total, mask=inside)


KERNELS = [
    Kernel(
        "add_rms_norm_weight.f32",
        add_rms_norm_weight,
        arguments={"partials": "*fp32:16", "dweight": "*fp32:16", "parts": "i32", "width": "i32:16"},
        constants={"ROWS": 128, "BLOCK": 32},
    )
]
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
            dict.fromkeys(("x", "branch", "weight", "total", "normed"), pointer) | forward,
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
    KERNELS += [
        Kernel(f"add_rms_norm_{name}.{dtype}.h{block}", function, arguments, {"BLOCK": block}, num_warps=warps)
        for name, (function, arguments) in by_width.items()
        for block, warps in ((1024, 4), (2048, 4), (4096, 8), (8192, 16))
    ]
