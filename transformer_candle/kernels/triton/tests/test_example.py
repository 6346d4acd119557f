"""How a test runs a declared kernel."""

import pytest
import torch
from example import KERNELS
from interpreter import launch


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_scale_multiplies_every_element(kernel):
    dtype = torch.bfloat16 if "bf16" in kernel.name else torch.float32
    x = torch.randn(1040, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = torch.empty_like(x)
    launch(kernel, [triton_blocks(1040, kernel)], x, y, 3.0, 1040)
    assert torch.equal(y, (3.0 * x.float()).to(dtype))


def triton_blocks(elements, kernel):
    return -(-elements // kernel.constants["BLOCK"])
