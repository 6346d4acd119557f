"""Between F32 and bf16, and between F32 master weights and their halves: the bf16 weight and a 16-bit remainder.

Bytes moved an element: narrow and widen 6, split and join 8.
"""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def split(master):
    """An F32 value's nearest bf16, ties away from zero, and what is left of its bits."""
    bits = master.to(tl.uint32, bitcast=True)
    high = (bits + 0x8000) >> 16
    weight = high.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    remainder = (bits - (high << 16)).to(tl.uint16).to(tl.int16, bitcast=True)
    return weight, remainder


@triton.jit
def join(weight, remainder):
    """The F32 value that was split, bit for bit."""
    high = weight.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (high + remainder.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def on_block(function: tl.constexpr, arguments, start, elements, BLOCK: tl.constexpr):
    """Calls `function(arguments, at, mask)`; whole blocks go without masks: they are read 16 bytes at a time.

    They would not be with one, as nothing is promised of the length.
    """
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= elements:
        function(arguments, at, None)
    else:
        function(arguments, at, at < elements)


@triton.jit
def convert_block(buffers, at, mask):
    """Narrows to the nearest, ties to even; widens exactly."""
    source, target = buffers
    tl.store(target + at, tl.load(source + at, mask=mask).to(target.dtype.element_ty), mask=mask)


@triton.jit
def cast_convert(source, target, elements, BLOCK: tl.constexpr):
    """A block a program."""
    on_block(convert_block, (source, target), tl.program_id(0) * BLOCK, elements, BLOCK)


@triton.jit
def split_block(buffers, at, mask):
    """See `split`."""
    master, weight, remainder = buffers
    high, low = split(tl.load(master + at, mask=mask))
    tl.store(weight + at, high, mask=mask)
    tl.store(remainder + at, low, mask=mask)


@triton.jit
def cast_split(master, weight, remainder, elements, BLOCK: tl.constexpr):
    """A block a program."""
    on_block(split_block, (master, weight, remainder), tl.program_id(0) * BLOCK, elements, BLOCK)


@triton.jit
def join_block(buffers, at, mask):
    """See `join`."""
    weight, remainder, master = buffers
    value = join(tl.load(weight + at, mask=mask), tl.load(remainder + at, mask=mask))
    tl.store(master + at, value, mask=mask)


@triton.jit
def cast_join(weight, remainder, master, elements, BLOCK: tl.constexpr):
    """A block a program."""
    on_block(join_block, (weight, remainder, master), tl.program_id(0) * BLOCK, elements, BLOCK)


HALVES = {"weight": "*bf16:16", "remainder": "*i16:16"}
KERNELS = [
    Kernel(
        "cast_narrow.bf16",
        cast_convert,
        arguments={"source": "*fp32:16", "target": "*bf16:16", "elements": "i32"},
        constants={"BLOCK": 1024},
    ),
    Kernel(
        "cast_widen.f32",
        cast_convert,
        arguments={"source": "*bf16:16", "target": "*fp32:16", "elements": "i32"},
        constants={"BLOCK": 1024},
    ),
    Kernel(
        "cast_split.bf16",
        cast_split,
        arguments={"master": "*fp32:16", **HALVES, "elements": "i32"},
        constants={"BLOCK": 1024},
    ),
    Kernel(
        "cast_join.f32",
        cast_join,
        arguments={**HALVES, "master": "*fp32:16", "elements": "i32"},
        constants={"BLOCK": 1024},
    ),
]
