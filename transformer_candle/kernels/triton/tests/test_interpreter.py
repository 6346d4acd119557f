"""The interpreter's bf16 arithmetic against PyTorch, and the check of arguments against the declaration."""

import pytest
import torch
import triton
import triton.language as tl
from declaration import Kernel
from interpreter import launch


@triton.jit
def _multiply(a, b, c, rounded, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(a + at), tl.trans(tl.load(b + at)))
    tl.store(c + at, product)
    tl.store(rounded + at, product.to(tl.bfloat16))


MULTIPLY = Kernel(
    "multiply.bf16",
    _multiply,
    arguments={"a": "*bf16:16", "b": "*bf16:16", "c": "*fp32:16", "rounded": "*bf16:16"},
    constants={"SIZE": 16},
)


def test_bf16_matmul_accumulates_f32_and_rounds_to_even():
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    c, rounded = torch.empty(16, 16), torch.empty(16, 16, dtype=torch.bfloat16)
    launch(MULTIPLY, [1], a, b, c, rounded)
    exact = a.double() @ b.double().T
    assert (c - exact).norm() < 1e-6 * exact.norm()
    assert torch.equal(rounded, c.bfloat16())


def test_arguments_unlike_the_declaration_are_rejected():
    matrix, out = torch.zeros(16, 16, dtype=torch.bfloat16), torch.zeros(16, 16)
    with pytest.raises(TypeError, match=r"`c` is \*fp32:16, given is \*bf16"):
        launch(MULTIPLY, [1], matrix, matrix, matrix, matrix)
    with pytest.raises(TypeError, match="given are 3 arguments"):
        launch(MULTIPLY, [1], matrix, matrix, out)
    unaligned = torch.zeros(300, dtype=torch.bfloat16)[1:257]
    with pytest.raises(TypeError, match=r"`a` is \*bf16:16"):
        launch(MULTIPLY, [1], unaligned, matrix, out, matrix)
