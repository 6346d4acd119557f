"""AdamW over flat buffers in one pass (Loshchilov and Hutter, arXiv:1711.05101, Algorithm 2).

    g = clip_scale * grad                              m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
    w = (1 - rate decay) w - rate / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)

Equal inputs give equal bits on GPU and CPU: every operation is rounded as the CPU version rounds it. Hence no fused
multiply-add (`fused_multiply_add=False` below), square roots and divisions rounded to nearest (`sqrt_rn`, `div_rn`;
Triton's defaults are approximate), and constants of the step computed in f64 and rounded once.

bf16 weights have f32 master weights in two halves (`cast.py`): the bf16 weight itself and 16 `low_bits`. Bytes per
element: 28, of which 16 are read (gradient 4, moments 8, master weight 4) and 12 written.
"""

import triton
import triton.language as tl
from cast import call_on_block, join_master, split_master
from declaration import Kernel

# Indices into `scalars`, the five numbers that change from step to step. They are in GPU memory as `grad_norm_clip`
# computes the last two there: the CPU need not wait for the norm.
LEARNING_RATE = tl.constexpr(0)
BIAS_CORRECTION1 = tl.constexpr(1)
BIAS_CORRECTION2 = tl.constexpr(2)
CLIP_SCALE = tl.constexpr(3)
APPLY = tl.constexpr(4)


@triton.jit
def step_constants(scalars, weight_decay):
    """Return clip scale, 1 - rate * decay, rate / (1 - beta1^t), 1 / sqrt(1 - beta2^t), each rounded once from f64."""
    rate = tl.load(scalars + LEARNING_RATE).to(tl.float64)
    decay = (1.0 - rate * tl.cast(weight_decay, tl.float64)).to(tl.float32)
    corrected_rate = (rate / tl.load(scalars + BIAS_CORRECTION1).to(tl.float64)).to(tl.float32)
    v_scale = (1.0 / tl.sqrt(tl.load(scalars + BIAS_CORRECTION2).to(tl.float64))).to(tl.float32)
    return tl.load(scalars + CLIP_SCALE), decay, corrected_rate, v_scale


@triton.jit
def adamw_update(weight, gradient, m, v, constants, settings):
    """Return weight and moments after the step; rest1 and rest2 are 1 - beta1 and 1 - beta2."""
    clip_scale, decay, rate, v_scale = constants
    beta1, beta2, rest1, rest2, epsilon = settings
    gradient = clip_scale * gradient
    m = beta1 * m + rest1 * gradient
    v = beta2 * v + rest2 * gradient * gradient
    denominator = tl.sqrt_rn(v) * v_scale + epsilon
    return decay * weight - tl.div_rn(rate * m, denominator), m, v


@triton.jit
def step_block(arguments, offset, mask):
    """Update a block of f32 weights, or of master weights in two halves."""
    weight, low_bits, grad, first, second, constants, settings = arguments
    is_split: tl.constexpr = weight.dtype.element_ty == tl.bfloat16
    value = tl.load(weight + offset, mask=mask)
    if is_split:
        value = join_master(value, tl.load(low_bits + offset, mask=mask))
    gradient = tl.load(grad + offset, mask=mask)
    m, v = tl.load(first + offset, mask=mask), tl.load(second + offset, mask=mask)
    value, m, v = adamw_update(value, gradient, m, v, constants, settings)
    if is_split:
        value, low = split_master(value)
        tl.store(low_bits + offset, low, mask=mask)
    tl.store(weight + offset, value, mask=mask)
    tl.store(first + offset, m, mask=mask)
    tl.store(second + offset, v, mask=mask)


@triton.jit
def adamw_step(
    weight,
    low_bits,
    grad,
    first,
    second,
    scalars,
    beta1,
    beta2,
    rest1,
    rest2,
    epsilon,
    weight_decay,
    elements,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Update a piece of PIECE elements, block by block. Grid: (elements / PIECE).

    `first` and `second` are the moments m and v; f32 weights have no `low_bits`. If the gradient's norm is not finite
    `grad_norm_clip` has set APPLY to 0, and nothing changes.
    """
    if tl.load(scalars + APPLY) != 0.0:
        constants = step_constants(scalars, weight_decay)
        settings = (beta1, beta2, rest1, rest2, epsilon)
        arguments = (weight, low_bits, grad, first, second, constants, settings)
        piece = tl.program_id(0) * PIECE
        for start in range(piece, min(piece + PIECE, elements), BLOCK):
            call_on_block(step_block, arguments, start, elements, BLOCK)


# 1,024 elements over 128 threads are 8 per thread: 16-byte loads of bf16, two of f32. A piece is 8 blocks, so that the
# f64 arithmetic of `step_constants`, slow on desktop GPUs, is done once for 8,192 elements.
MOMENTS = {"grad": "*fp32:16", "first": "*fp32:16", "second": "*fp32:16", "scalars": "*fp32"}
SETTINGS = dict.fromkeys(("beta1", "beta2", "rest1", "rest2", "epsilon", "weight_decay"), "fp32")
KERNELS = [
    Kernel(
        "adamw_step.f32",
        adamw_step,
        arguments={"weight": "*fp32:16", **MOMENTS, **SETTINGS, "elements": "i32"},
        constants={"low_bits": None, "BLOCK": 1024, "PIECE": 8192},
        fused_multiply_add=False,
    ),
    Kernel(
        "adamw_step.bf16",
        adamw_step,
        arguments={"weight": "*bf16:16", "low_bits": "*i16:16", **MOMENTS, **SETTINGS, "elements": "i32"},
        constants={"BLOCK": 1024, "PIECE": 8192},
        fused_multiply_add=False,
    ),
]
