"""Operands of fp8 GEMMs: bf16 matrices rounded to e4m3 with power-of-two scales, along both axes.

    s = 2^e, the smallest with max |x| <= 448 s in a block          q = e4m3(x / s), ties to even

e4m3 has 3 bits of mantissa, 448 at most, and multiples of 2^-9 below 2^-6. fp8 GEMMs read both operands along the axis
that they sum over, so each program writes a tile of codes as it is, transposed, or both, as `outputs` says: bit 0 is
for the matrix, bit 1 for its transpose. What is not requested is not written. Blocks are square, so the transpose has
the same codes, and `fp8_transpose_*` makes it from the matrix's codes later. `fp8_dequantize_*` writes the numbers that
codes stand for, in bf16: exactly, since they are e4m3 numbers times powers of two. Scales go where cuBLASLt looks for
them ("Narrow Precision Data Types Usage"):

    mxfp8      squares of 32. VEC32_UE8M0: 512 bytes per tile of 128 x 128, which are its 4 x 4 scales 32 times
    blockwise  squares of 128. VEC128_32F: [columns / 128, rows] in f32, rows contiguous
    tensorwise one scale. SCALAR_32F; two kernels before find the largest number and write it for both outputs

A block with an infinity or a NaN becomes NaN. Grid, where nothing else is said: (rows / 128, columns / 128).

Bytes per element: 2 read and 1 written per output; tensorwise reads 2 more. A transpose reads 1 and writes 1;
dequantization reads 1 and writes 2.
"""

import triton
import triton.language as tl
from declaration import Kernel

TILE = tl.constexpr(128)
INFINITY = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7F)
MAX_EXPONENT = tl.constexpr(120)
# The bits of `outputs`.
MATRIX = tl.constexpr(1)
TRANSPOSE = tl.constexpr(2)


@triton.jit
def tile_of(first, second, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the offsets in a matrix of its tile (first, second) of ROWS x COLUMNS, and which are inside of it."""
    row = first * ROWS + tl.arange(0, ROWS)
    column = second * COLUMNS + tl.arange(0, COLUMNS)
    offset = row[:, None].to(tl.int64) * columns + column[None, :]
    return offset, (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def load_tile(x, first, second, rows, columns, ROWS: tl.constexpr):
    """Return the tile (first, second) of ROWS x 128 in f32; zero outside of the matrix."""
    offset, inside = tile_of(first, second, rows, columns, ROWS, TILE)
    return tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def bits_of(tile):
    """Return the bits of numbers in f32."""
    return tile.to(tl.int32, bitcast=True)


@triton.jit
def size_of(bits):
    """Return bits without the sign: ordered as the numbers' sizes, infinities and NaN above all others."""
    return bits & 0x7FFFFFFF


@triton.jit
def exponent_of(largest):
    """Return the exponent of the scale for a block's largest number m 2^k: k - 8, or k - 7 if m > 1.75."""
    return tl.minimum(tl.maximum(((largest + 0x1FFFFF) >> 23) - 135, -MAX_EXPONENT), MAX_EXPONENT)


@triton.jit
def power_of_two(exponent):
    """Return 2^exponent in f32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(bits, exponent, largest):
    """Return the codes of numbers with these f32 bits, divided by 2^exponent; of the same shapes."""
    value = size_of(bits).to(tl.float32, bitcast=True) * power_of_two(-exponent)
    scaled = value.to(tl.int32, bitcast=True)
    # A normal number keeps 3 bits of mantissa; its exponent is biased by 7 instead of 127.
    normal = ((scaled + 0x7FFFF + ((scaled >> 20) & 1)) >> 20) - (120 << 3)
    # Multiples of 2^-9 are what the last bit of 2^14 stands for.
    subnormal = (value + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(value < 0.015625, subnormal, normal)
    code = tl.where(largest < INFINITY, code, NAN)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_transposed(codes, out_transposed, first, second, rows, columns, ROWS: tl.constexpr):
    """Store the matrix's tile (first, second) of ROWS x 128 codes in the transpose."""
    offset, inside = tile_of(second, first, columns, rows, TILE, ROWS)
    tl.store(out_transposed + offset, tl.trans(codes), mask=inside)


@triton.jit
def store_codes(codes, out, out_transposed, first, second, rows, columns, outputs, ROWS: tl.constexpr):
    """Store the tile (first, second) of ROWS x 128 codes in the requested outputs."""
    if outputs & MATRIX:
        offset, inside = tile_of(first, second, rows, columns, ROWS, TILE)
        tl.store(out + offset, codes, mask=inside)
    if outputs & TRANSPOSE:
        store_transposed(codes, out_transposed, first, second, rows, columns, ROWS)


@triton.jit
def largest_of_square(sizes, square, SQUARE: tl.constexpr):
    """Return the largest of the sizes in 32 columns of the tile."""
    inside = (tl.arange(0, TILE) // SQUARE == square)[None, :]
    return tl.max(tl.max(tl.where(inside, sizes, 0), axis=1), axis=0)


@triton.jit
def one_of_four(index, a, b, c, d):
    """Return the value that each index, 0 to 3, stands for."""
    return tl.where(index < 2, tl.where(index == 0, a, b), tl.where(index == 2, c, d))


@triton.jit
def quantize_mx(
    bits, out, out_transposed, scales, scales_transposed, first, second, rows, columns, outputs, SQUARE: tl.constexpr
):
    """Round the f32 bits of the tile (first, second) of 32 x 128; store the codes and the scales of its 4 squares."""
    sizes = size_of(bits)
    a, b = largest_of_square(sizes, 0, SQUARE), largest_of_square(sizes, 1, SQUARE)
    c, d = largest_of_square(sizes, 2, SQUARE), largest_of_square(sizes, 3, SQUARE)
    column = tl.arange(0, TILE)
    largest = one_of_four(column // SQUARE, a, b, c, d)
    exponents = exponent_of(largest)
    codes = e4m3(bits, exponents[None, :], largest[None, :])
    store_codes(codes, out, out_transposed, first, second, rows, columns, outputs, SQUARE)

    # A tile of scales is for 128 x 128 numbers: (outer, inner) is at (outer % 32) * 16 + outer / 32 * 4 + inner.
    tile, band = first // 4, first % 4
    if outputs & MATRIX:
        inner, outer = tl.arange(0, 4), tl.arange(0, SQUARE)
        bytes = (exponent_of(one_of_four(inner, a, b, c, d)) + 127).to(tl.uint8)
        begin = (tile * tl.cdiv(columns, TILE) + second).to(tl.int64) * 512
        offset = outer[:, None] * 16 + band * 4 + inner[None, :]
        tl.store(scales + begin + offset, tl.broadcast_to(bytes[None, :], (SQUARE, 4)))
    if outputs & TRANSPOSE:
        begin = (second * tl.cdiv(rows, TILE) + tile).to(tl.int64) * 512
        offset = column % SQUARE * 16 + column // SQUARE * 4 + band
        tl.store(scales_transposed + begin + offset, (exponents + 127).to(tl.uint8))


@triton.jit
def fp8_quantize_mx(x, out, out_transposed, scales, scales_transposed, rows, columns, outputs, SQUARE: tl.constexpr):
    """Round 4 squares of 32 side by side. Grid: (4 * (rows / 128), columns / 128)."""
    first, second = tl.program_id(0), tl.program_id(1)
    bits = bits_of(load_tile(x, first, second, rows, columns, SQUARE))
    quantize_mx(bits, out, out_transposed, scales, scales_transposed, first, second, rows, columns, outputs, SQUARE)


@triton.jit
def store_vector_scales(scale, scales, first, second, rows):
    """Store the scale of a tile for each of its rows."""
    row = first * TILE + tl.arange(0, TILE)
    tl.store(scales + second.to(tl.int64) * rows + row, tl.broadcast_to(scale, (TILE,)), mask=row < rows)


@triton.jit
def quantize_blocks(bits, out, out_transposed, scales, scales_transposed, first, second, rows, columns, outputs):
    """Round the f32 bits of the tile (first, second) of 128 x 128; store its codes and its scale."""
    largest = tl.max(tl.max(size_of(bits), axis=1), axis=0)
    exponent = exponent_of(largest)
    codes = e4m3(bits, exponent, largest)
    store_codes(codes, out, out_transposed, first, second, rows, columns, outputs, TILE)
    if outputs & MATRIX:
        store_vector_scales(power_of_two(exponent), scales, first, second, rows)
    if outputs & TRANSPOSE:
        store_vector_scales(power_of_two(exponent), scales_transposed, second, first, columns)


@triton.jit
def fp8_quantize_blocks(x, out, out_transposed, scales, scales_transposed, rows, columns, outputs):
    """Round a tile with one scale."""
    first, second = tl.program_id(0), tl.program_id(1)
    bits = bits_of(load_tile(x, first, second, rows, columns, TILE))
    quantize_blocks(bits, out, out_transposed, scales, scales_transposed, first, second, rows, columns, outputs)


@triton.jit
def bf16_bits(tile):
    """Return the f32 bits of numbers in f32 rounded to bf16: the lower half is zero."""
    return bits_of(tile.to(tl.bfloat16).to(tl.float32))


@triton.jit
def quantize(
    bits, out, out_transposed, scales, scales_transposed, first, second, rows, columns, outputs, SQUARE: tl.constexpr
):
    """Round the f32 bits of the tile (first, second) of SQUARE x 128; store its codes and its scales."""
    if SQUARE == TILE:
        quantize_blocks(bits, out, out_transposed, scales, scales_transposed, first, second, rows, columns, outputs)
    else:
        quantize_mx(bits, out, out_transposed, scales, scales_transposed, first, second, rows, columns, outputs, SQUARE)


@triton.jit
def fp8_largest(x, partials, rows, columns):
    """Store the bits of each tile's largest number; partials are [rows / 128, columns / 128]."""
    first, second = tl.program_id(0), tl.program_id(1)
    bits = bits_of(load_tile(x, first, second, rows, columns, TILE))
    largest = tl.max(tl.max(size_of(bits), axis=1), axis=0)
    tl.store(partials + first * tl.num_programs(1) + second, largest)


@triton.jit
def fp8_scale(partials, largest, scale, scale_transposed, tiles, BLOCK: tl.constexpr):
    """Reduce the tiles' largest numbers to the matrix's, and store its scale, the transpose's as well. Grid: (1)."""
    lane = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, tiles, BLOCK):
        most = tl.maximum(most, tl.load(partials + start + lane, mask=start + lane < tiles, other=0))
    most = tl.max(most, axis=0)
    tl.store(largest, most)
    tl.store(scale, power_of_two(exponent_of(most)))
    tl.store(scale_transposed, power_of_two(exponent_of(most)))


@triton.jit
def fp8_quantize_tensor(x, largest, out, out_transposed, rows, columns, outputs):
    """Round a tile with the matrix's scale."""
    most = tl.load(largest)
    first, second = tl.program_id(0), tl.program_id(1)
    codes = e4m3(bits_of(load_tile(x, first, second, rows, columns, TILE)), exponent_of(most), most)
    store_codes(codes, out, out_transposed, first, second, rows, columns, outputs, TILE)


# Four times, a thread loads 16 codes of a row at once and stores 16 codes of a column. In between, the compiler's code
# writes words of 4 codes to shared memory and reads single codes: 128 + 512 accesses of a warp per tile without bank
# conflicts, which take a multiprocessor 640 cycles. An H200 moves the tile's 32 KiB in 1,600 cycles (4.8 TB/s for 132
# multiprocessors at 1.75 GHz).
@triton.jit
def transpose_tile(codes, out, rows, columns):
    """Store this program's tile of a matrix of codes in the transpose."""
    first, second = tl.program_id(0), tl.program_id(1)
    offset, inside = tile_of(first, second, rows, columns, TILE, TILE)
    store_transposed(tl.load(codes + offset, mask=inside), out, first, second, rows, columns, TILE)


@triton.jit
def fp8_transpose_mx(codes, scales, out, out_scales, rows, columns):
    """Transpose a tile and its 4 x 4 scales, of which the first of the 32 copies is read."""
    transpose_tile(codes, out, rows, columns)
    first, second = tl.program_id(0), tl.program_id(1)
    byte = tl.arange(0, 512)
    source = scales + (first * tl.cdiv(columns, TILE) + second).to(tl.int64) * 512
    target = out_scales + (second * tl.cdiv(rows, TILE) + first).to(tl.int64) * 512
    tl.store(target + byte, tl.load(source + byte % 4 * 4 + byte % 16 // 4))


@triton.jit
def fp8_transpose_blocks(codes, scales, out, out_scales, rows, columns):
    """Transpose a tile and store its scale for each of its columns."""
    transpose_tile(codes, out, rows, columns)
    first, second = tl.program_id(0), tl.program_id(1)
    scale = tl.load(scales + second.to(tl.int64) * rows + first * TILE)
    store_vector_scales(scale, out_scales, second, first, columns)


@triton.jit
def fp8_transpose_tensor(codes, scales, out, out_scales, rows, columns):
    """Transpose a tile; the first program copies the matrix's scale."""
    transpose_tile(codes, out, rows, columns)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(out_scales, tl.load(scales))


@triton.jit
def dequantize_tile(codes, scale, out, rows, columns):
    """Store the numbers that this program's tile of codes stands for; `scale` is of a shape that fits the tile's."""
    offset, inside = tile_of(tl.program_id(0), tl.program_id(1), rows, columns, TILE, TILE)
    code = tl.load(codes + offset, mask=inside, other=0).to(tl.int32)
    size = code & NAN
    # Below 8 a code counts multiples of 2^-9; above, the exponent's bias becomes 127.
    subnormal = bits_of(size.to(tl.float32) * 0.001953125)
    bits = tl.where(size < 8, subnormal, (size + (120 << 3)) << 20)
    bits = tl.where(size == NAN, 0x7FC00000, bits) | ((code & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * scale
    tl.store(out + offset, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def fp8_dequantize_mx(codes, scales, out, rows, columns):
    """Dequantize a tile with its 4 x 4 scales."""
    begin = (tl.program_id(0) * tl.cdiv(columns, TILE) + tl.program_id(1)).to(tl.int64) * 512
    square = tl.arange(0, TILE) // 32
    exponents = tl.load(scales + begin + square[:, None] * 4 + square[None, :]).to(tl.int32) - 127
    dequantize_tile(codes, power_of_two(exponents), out, rows, columns)


@triton.jit
def fp8_dequantize_blocks(codes, scales, out, rows, columns):
    """Dequantize a tile with its scale."""
    scale = tl.load(scales + tl.program_id(1).to(tl.int64) * rows + tl.program_id(0) * TILE)
    dequantize_tile(codes, scale, out, rows, columns)


@triton.jit
def fp8_dequantize_tensor(codes, scales, out, rows, columns):
    """Dequantize a tile with the matrix's scale."""
    dequantize_tile(codes, tl.load(scales), out, rows, columns)


# A tile of 128 x 128 is 64 elements for each of 256 threads, one of 32 x 128 is 32 for each of 128.
CODES = {"out": "*u8:16", "out_transposed": "*u8:16"}
SIZES = {"rows": "i32:16", "columns": "i32:16"}
KERNELS = [
    Kernel(
        "fp8_quantize_mx.bf16",
        fp8_quantize_mx,
        arguments={
            "x": "*bf16:16",
            **CODES,
            "scales": "*u8:16",
            "scales_transposed": "*u8:16",
            **SIZES,
            "outputs": "i32",
        },
        constants={"SQUARE": 32},
    ),
    Kernel(
        "fp8_quantize_blocks.bf16",
        fp8_quantize_blocks,
        arguments={
            "x": "*bf16:16",
            **CODES,
            "scales": "*fp32:16",
            "scales_transposed": "*fp32:16",
            **SIZES,
            "outputs": "i32",
        },
        num_warps=8,
    ),
    Kernel(
        "fp8_largest.bf16",
        fp8_largest,
        arguments={"x": "*bf16:16", "partials": "*i32:16", **SIZES},
        num_warps=8,
    ),
    Kernel(
        "fp8_scale.bf16",
        fp8_scale,
        arguments={
            "partials": "*i32:16",
            "largest": "*i32:16",
            "scale": "*fp32:16",
            "scale_transposed": "*fp32:16",
            "tiles": "i32",
        },
        constants={"BLOCK": 1024},
    ),
    Kernel(
        "fp8_quantize_tensor.bf16",
        fp8_quantize_tensor,
        arguments={"x": "*bf16:16", "largest": "*i32:16", **CODES, **SIZES, "outputs": "i32"},
        num_warps=8,
        # Three blocks of 256 threads fit on a multiprocessor instead of two, without spilled registers.
        max_registers=80,
    ),
    *(
        Kernel(
            f"{function.fn.__name__}.u8",
            function,
            arguments={"codes": "*u8:16", "scales": scales, "out": "*u8:16", "out_scales": scales, **SIZES},
            num_warps=8,
        )
        for function, scales in (
            (fp8_transpose_mx, "*u8:16"),
            (fp8_transpose_blocks, "*fp32:16"),
            (fp8_transpose_tensor, "*fp32:16"),
        )
    ),
    *(
        Kernel(
            f"{function.fn.__name__}.bf16",
            function,
            arguments={"codes": "*u8:16", "scales": scales, "out": "*bf16:16", **SIZES},
            num_warps=8,
        )
        for function, scales in (
            (fp8_dequantize_mx, "*u8:16"),
            (fp8_dequantize_blocks, "*fp32:16"),
            (fp8_dequantize_tensor, "*fp32:16"),
        )
    ),
]
