"""Casts between f32 and bf16, and between f32 master weights and their two halves, each in one streaming pass.

    high = (bits(master) + 0x8000) >> 16        the nearest bf16, ties away from zero: the weight that the model uses
    low  = bits(master) - (high << 16)          the low bits, as a signed 16-bit integer from -0x8000 to 0x7FFF

4 bytes instead of 6 for a bf16 weight with an f32 master, and bits(master) = (high << 16) + low without loss.

Bytes per element: narrow and widen 6, split and join 8.
"""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def split_master(master):
    """Return the bf16 weights and the low bits of f32 master weights."""
    bits = master.to(tl.uint32, bitcast=True)
    high = (bits + 0x8000) >> 16
    weight = high.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    # Through unsigned 16 bits: the difference wraps, and the bitcast then takes it as signed.
    low_bits = (bits - (high << 16)).to(tl.uint16).to(tl.int16, bitcast=True)
    return weight, low_bits


@triton.jit
def join_master(weight, low_bits):
    """Return the f32 master weights that were split, bit for bit."""
    high = weight.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (high + low_bits.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def call_on_block(function: tl.constexpr, arguments, start, elements, BLOCK: tl.constexpr):
    """Call `function(arguments, offset, mask)` on BLOCK elements from `start` on, without a mask where all exist.

    A mask `offset < elements` may change between any two elements, as nothing is known of `elements`: the compiler
    then loads elements one by one. Without a mask it loads 16 bytes at once, and all blocks but the last have none.
    """
    offset = start + tl.arange(0, BLOCK)
    if start + BLOCK <= elements:
        function(arguments, offset, None)
    else:
        function(arguments, offset, offset < elements)


@triton.jit
def convert_block(buffers, offset, mask):
    """Narrow a block to the nearest bf16, ties to even, as PyTorch does, or widen it exactly."""
    source, target = buffers
    tl.store(target + offset, tl.load(source + offset, mask=mask).to(target.dtype.element_ty), mask=mask)


@triton.jit
def cast_convert(source, target, elements, BLOCK: tl.constexpr):
    """Compute `target = source`, in the target's type. Grid: (elements / BLOCK)."""
    call_on_block(convert_block, (source, target), tl.program_id(0) * BLOCK, elements, BLOCK)


@triton.jit
def split_block(buffers, offset, mask):
    """Store `split_master` of a block."""
    master, weight, low_bits = buffers
    high, low = split_master(tl.load(master + offset, mask=mask))
    tl.store(weight + offset, high, mask=mask)
    tl.store(low_bits + offset, low, mask=mask)


@triton.jit
def cast_split(master, weight, low_bits, elements, BLOCK: tl.constexpr):
    """Split master weights into weights and low bits. Grid: (elements / BLOCK)."""
    call_on_block(split_block, (master, weight, low_bits), tl.program_id(0) * BLOCK, elements, BLOCK)


@triton.jit
def join_block(buffers, offset, mask):
    """Store `join_master` of a block."""
    weight, low_bits, master = buffers
    value = join_master(tl.load(weight + offset, mask=mask), tl.load(low_bits + offset, mask=mask))
    tl.store(master + offset, value, mask=mask)


@triton.jit
def cast_join(weight, low_bits, master, elements, BLOCK: tl.constexpr):
    """Join weights and low bits into master weights. Grid: (elements / BLOCK)."""
    call_on_block(join_block, (weight, low_bits, master), tl.program_id(0) * BLOCK, elements, BLOCK)


# 1,024 elements over 128 threads are 8 per thread: one 16-byte access of bf16, two of f32.
HALVES = {"weight": "*bf16:16", "low_bits": "*i16:16"}
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
