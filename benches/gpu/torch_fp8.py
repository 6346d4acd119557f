"""A linear layer of PyTorch whose three GEMMs multiply fp8 operands, each tensor with one scale.

    y_NO = x_NI w_OI^T        dx_NI = dy_NO w_OI        dw_OI = dy_NO^T x_NI

Scales follow from the tensors at hand (dynamic scaling), as in the default recipe of torchao's float8 training: e4m3
for activations and weights, e5m2 for gradients, whose values spread further; fast accumulation in the forward GEMM
only, since it keeps fewer bits of the sums. `torch._scaled_mm` takes the left operand stored row by row and the right
one column by column, both along the axis that is summed over: backward transposes three of its operands.

Legend of the suffixes: N tokens, I inputs, O outputs; `8` marks a tensor in fp8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ACTIVATION, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
# Below this a tensor counts as zeros: its scale must not be zero.
SMALLEST_AMAX = 1e-12


def to_fp8(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the values in fp8 and what they are to be multiplied by, one f32 number.

    The largest magnitude becomes the largest number of `dtype`. Nothing has to be clamped: rounding of the quotient
    exceeds that number by less than half of its last bit. An infinity becomes NaN, a NaN makes the whole tensor NaN.
    """
    scale = values.abs().amax().float().clamp(min=SMALLEST_AMAX) / torch.finfo(dtype).max
    return (values.float() / scale).to(dtype), scale


def columns_first(matrix: Tensor) -> Tensor:
    """Return the same matrix, stored column by column."""
    return matrix.t().contiguous().t()


class Fp8Matmuls(torch.autograd.Function):
    """`x_NI @ w_OI.T`, with operands in fp8 in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, w_OI: Tensor) -> Tensor:
        x8_NI, x_scale = to_fp8(x_NI, ACTIVATION)
        w8_OI, w_scale = to_fp8(w_OI, ACTIVATION)
        # The gradients read the same numbers: an activation is kept in one byte instead of two.
        ctx.save_for_backward(x8_NI, x_scale, w8_OI, w_scale)
        return torch._scaled_mm(
            x8_NI, w8_OI.t(), scale_a=x_scale, scale_b=w_scale, out_dtype=x_NI.dtype, use_fast_accum=True
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x8_NI, x_scale, w8_OI, w_scale = ctx.saved_tensors
        (dy_NO,) = gradients
        dy8_NO, dy_scale = to_fp8(dy_NO, GRADIENT)
        accurate = {"out_dtype": dy_NO.dtype, "use_fast_accum": False}
        dx_NI = torch._scaled_mm(dy8_NO, columns_first(w8_OI), scale_a=dy_scale, scale_b=w_scale, **accurate)
        dy8_ON = dy8_NO.t().contiguous()
        dw_OI = torch._scaled_mm(dy8_ON, columns_first(x8_NI), scale_a=dy_scale, scale_b=x_scale, **accurate)
        return dx_NI, dw_OI


class Fp8Linear(nn.Linear):
    """A linear layer without bias. Its sizes, and the number of tokens, must be multiples of 16."""

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = Fp8Matmuls.apply(x.flatten(0, -2), self.weight)
        return rows.unflatten(0, x.shape[:-1])
