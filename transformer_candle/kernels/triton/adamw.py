"""AdamW over flat buffers, in one pass, with the roundings of the CPU's version one by one.

Products and sums are not fused, roots and quotients are the nearest, the step's constants come from F64: equal inputs
give equal bits on both devices.

Bytes moved an element: 28, of which 16 are read (gradient 4, moments 8, F32 weight or bf16 weight and remainder 4).
"""

import triton
import triton.language as tl
from cast import join, on_block, split
from declaration import Kernel

LEARNING_RATE = tl.constexpr(0)
BIAS_CORRECTION1 = tl.constexpr(1)
BIAS_CORRECTION2 = tl.constexpr(2)
CLIP_SCALE = tl.constexpr(3)
APPLY = tl.constexpr(4)
"""Places in the step's scalars."""


@triton.jit
def step_constants(scalars, weight_decay):
    """The gradient's scale, the weight's decay, the rate and the second moment's scale, each rounded once from F64.

    The last three are 1 - rate * decay, rate / (1 - beta1^t) and 1 / sqrt(1 - beta2^t).
    """
    rate = tl.load(scalars + LEARNING_RATE).to(tl.float64)
    decay = (1.0 - rate * tl.cast(weight_decay, tl.float64)).to(tl.float32)
    corrected = (rate / tl.load(scalars + BIAS_CORRECTION1).to(tl.float64)).to(tl.float32)
    second_scale = (1.0 / tl.sqrt(tl.load(scalars + BIAS_CORRECTION2).to(tl.float64))).to(tl.float32)
    return tl.load(scalars + CLIP_SCALE), decay, corrected, second_scale


@triton.jit
def updated(weight, gradient, first, second, constants, settings):
    """Weight and moments after the step; rest1 and rest2 are 1 - beta."""
    clip_scale, decay, rate, second_scale = constants
    beta1, beta2, rest1, rest2, epsilon = settings
    gradient = clip_scale * gradient
    first = beta1 * first + rest1 * gradient
    second = beta2 * second + rest2 * gradient * gradient
    denominator = tl.sqrt_rn(second) * second_scale + epsilon
    return decay * weight - tl.div_rn(rate * first, denominator), first, second


@triton.jit
def step_block(arguments, at, mask):
    """One block of F32 weights, or of those that bf16 weights and their remainders make up."""
    weight, remainder, grad, first, second, constants, settings = arguments
    is_split: tl.constexpr = weight.dtype.element_ty == tl.bfloat16
    value = tl.load(weight + at, mask=mask)
    if is_split:
        value = join(value, tl.load(remainder + at, mask=mask))
    gradient, one, two = tl.load(grad + at, mask=mask), tl.load(first + at, mask=mask), tl.load(second + at, mask=mask)
    value, one, two = updated(value, gradient, one, two, constants, settings)
    if is_split:
        value, low = split(value)
        tl.store(remainder + at, low, mask=mask)
    tl.store(weight + at, value, mask=mask)
    tl.store(first + at, one, mask=mask)
    tl.store(second + at, two, mask=mask)


@triton.jit
def adamw_step(
    weight,
    remainder,
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
    """A piece a program, in blocks, so that F64 arithmetic is a small part of it. F32 weights have no remainder."""
    if tl.load(scalars + APPLY) != 0.0:
        constants = step_constants(scalars, weight_decay)
        settings = (beta1, beta2, rest1, rest2, epsilon)
        arguments = (weight, remainder, grad, first, second, constants, settings)
        piece = tl.program_id(0) * PIECE
        for start in range(piece, min(piece + PIECE, elements), BLOCK):
            on_block(step_block, arguments, start, elements, BLOCK)


MOMENTS = {"grad": "*fp32:16", "first": "*fp32:16", "second": "*fp32:16", "scalars": "*fp32"}
SETTINGS = dict.fromkeys(("beta1", "beta2", "rest1", "rest2", "epsilon", "weight_decay"), "fp32")
KERNELS = [
    Kernel(
        "adamw_step.f32",
        adamw_step,
        arguments={"weight": "*fp32:16", **MOMENTS, **SETTINGS, "elements": "i32"},
        constants={"remainder": None, "BLOCK": 1024, "PIECE": 8192},
        fused_multiply_add=False,
    ),
    Kernel(
        "adamw_step.bf16",
        adamw_step,
        arguments={"weight": "*bf16:16", "remainder": "*i16:16", **MOMENTS, **SETTINGS, "elements": "i32"},
        constants={"BLOCK": 1024, "PIECE": 8192},
        fused_multiply_add=False,
    ),
]
