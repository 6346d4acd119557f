"""Dropout whose mask is a hash of (seed, row of the step, module, column), computed wherever it is needed.

    key  = mix(seed ^ mix(module))          64 bits: one per pass and module; the host passes mix(module)
    low, high = mix(key ^ row)              64 bits: one per row
    hash = mix32(mix32(column ^ low) ^ high)
    factor = 1 / (1 - probability) where hash >= threshold, else 0

The integers and the roundings are those of `src/cpu/dropout.rs`, so that a GPU gives the CPU's bits. `state` is a `Key`
of `src/dropout.rs`: five words that change per micro-batch, read from memory because a CUDA graph replays arguments.

Legend: N rows of I columns. Bytes per row: forward twice its elements, backward three times. The hash takes about 20
integer instructions per element, which memory at 1.8 TB/s leaves time for.
"""

import triton
import triton.language as tl
from declaration import Kernel


@triton.jit
def mix(counter):
    """Apply the finalizer of SplitMix64 to 64 bits (Steele, Lea and Flood, 2014): `src/counter_hash.rs`."""
    bits = counter + 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def mix32(bits):
    """Apply `lowbias32` to 32 bits (Wellons, 2018)."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def word_pair(low, high):
    """Return the 64 bits of two words of 32."""
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def mask_factors(state, module_low, module_high, threshold, scale, row, column):
    """Return the dropout factors of these columns of a row; all 1 if the `Key` is not enabled."""
    module = word_pair(module_low.to(tl.uint32, bitcast=True), module_high.to(tl.uint32, bitcast=True))
    key = mix(word_pair(tl.load(state), tl.load(state + 1)) ^ module)
    bits = mix(key ^ (word_pair(tl.load(state + 2), tl.load(state + 3)) + row.to(tl.uint64)))
    hashed = mix32(mix32(column.to(tl.uint32) ^ bits.to(tl.uint32)) ^ (bits >> 32).to(tl.uint32))
    kept = tl.where(hashed >= threshold.to(tl.uint32, bitcast=True), scale, 0.0)
    return tl.where(tl.load(state + 4) != 0, kept, 1.0)


@triton.jit
def dropout_forward(x, state, out, module_low, module_high, threshold, scale, width, BLOCK: tl.constexpr):
    """Compute `out = factor x`. Grid: (N, I / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)  # N * I elements may exceed 2^31
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    factor = mask_factors(state, module_low, module_high, threshold, scale, row, column)
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (factor * value).to(out.dtype.element_ty), mask=inside)


@triton.jit
def dropout_backward(dout, state, dx, module_low, module_high, threshold, scale, width, BLOCK: tl.constexpr):
    """Compute `dx += factor dout` with the factors of the forward pass. Grid: (N, I / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    factor = mask_factors(state, module_low, module_high, threshold, scale, row, column)
    gradient = tl.load(dout + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sum_I = tl.load(dx + row * width + column, mask=inside, other=0.0).to(tl.float32) + factor * gradient
    tl.store(dx + row * width + column, sum_I.to(dx.dtype.element_ty), mask=inside)


# 1,024 columns over 128 threads are 8 per thread: one 16-byte access of bf16.
KERNELS = [
    Kernel(
        f"{function.fn.__name__}.{dtype}",
        function,
        arguments={
            buffers[0]: pointer,
            "state": "*u32:16",
            buffers[1]: pointer,
            "module_low": "i32",
            "module_high": "i32",
            "threshold": "i32",
            "scale": "fp32",
            "width": "i32:16",
        },
        constants={"BLOCK": 1024},
        fused_multiply_add=False,
    )
    for dtype, pointer in (("bf16", "*bf16:16"), ("f32", "*fp32:16"))
    for function, buffers in ((dropout_forward, ("x", "out")), (dropout_backward, ("dout", "dx")))
]
