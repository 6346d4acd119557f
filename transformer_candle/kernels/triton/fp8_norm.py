"""Root-mean-square norm recomputed in fp8, for recipes with one scale per square: `normalize` followed by fp8.py.

    normed = total * rstd * weight            rstd from `inv_rms`, as forward stored it

The formula is that of add_rms_norm.py and the rounding is that of fp8.py, and so is every bit of the codes and the
scales: a result in f32 is rounded to bf16 before it is rounded to fp8. The gradient of the weight of the projection
behind the norm reads the transpose.

N and D must be multiples of 16. Grid:

    mx       (4 * (N / 128), D / 128), tiles of 32 x 128; the last tiles may be below row N and write padding of scales
    blocks   (N / 128, D / 128), tiles of 128 x 128

Legend: N rows of D columns (width).

Bytes per element: 2 read and 1 written per output, where add_rms_norm.py and fp8.py read 4 and write 2 more.
"""

import triton
import triton.language as tl
from declaration import Kernel
from fp8 import TILE, bf16_bits, load_tile, quantize


@triton.jit
def fp8_normalize(
    total, weight, inv_rms, out, out_transposed, scales, scales_transposed, rows, width, outputs, SQUARE: tl.constexpr
):
    """Write a tile of the norm [N, D] in fp8, of its transpose [D, N], or both, by the bits of `outputs`."""
    first, second = tl.program_id(0), tl.program_id(1)
    row, column = first * SQUARE + tl.arange(0, SQUARE), second * TILE + tl.arange(0, TILE)
    rstd = tl.load(inv_rms + row, mask=row < rows, other=0.0)
    weight_D = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total_ND = load_tile(total, first, second, rows, width, SQUARE)
    bits = bf16_bits(total_ND * rstd[:, None] * weight_D[None, :])
    quantize(bits, out, out_transposed, scales, scales_transposed, first, second, rows, width, outputs, SQUARE)


KERNELS = [
    Kernel(
        f"fp8_normalize_{recipe}.bf16",
        fp8_normalize,
        arguments={
            "total": "*bf16:16",
            "weight": "*bf16:16",
            "inv_rms": "*fp32:16",
            "out": "*u8:16",
            "out_transposed": "*u8:16",
            "scales": scales,
            "scales_transposed": scales,
            "rows": "i32:16",
            "width": "i32:16",
            "outputs": "i32",
        },
        constants={"SQUARE": square},
        num_warps=warps,
    )
    for recipe, square, scales, warps in (("mx", 32, "*u8:16", 4), ("blocks", 128, "*fp32:16", 16))
]
